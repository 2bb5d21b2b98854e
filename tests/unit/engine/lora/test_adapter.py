"""An adapter's folder is read as PEFT wrote it; what cannot be served is refused in one sentence."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quire_engine.core.lora import LoRARequest
from quire_engine.errors import LoRAError
from quire_engine.lora.adapter import LoRAAdapter
from quire_engine.models.loader import model_class, read_model_config
from quire_engine.server.loras import LoRARegistry
from quire_proto.errors import QuireError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.adapters import write_adapter

MAX_RANK = 8
PREFIX = "base_model.model.model.layers"
Targets = Mapping[str, tuple[int, int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=40, num_hidden_layers=2, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def targets(model: Path) -> Targets:
    config = read_model_config(model)
    return model_class(config).lora_targets(config)


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", model)


def change_config(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("config_values", "scale"),
    [({}, 2.0), ({"lora_alpha": 3}, 0.75), ({"use_rslora": True}, 4.0), ({"lora_alpha": 0.5}, 0.125)],
)
def test_the_scale_is_pefts(folder: Path, targets: Targets, config_values: dict[str, object], scale: float) -> None:
    change_config(folder, **config_values)
    adapter = LoRAAdapter.read(folder, targets, MAX_RANK)
    stored = load_file(folder / "adapter_model.safetensors")
    assert set(adapter.weights) == set(targets)
    for name, weights in adapter.weights.items():
        assert torch.equal(weights.a, stored[f"base_model.model.{name}.lora_A.weight"])
        torch.testing.assert_close(weights.b.T, scale * stored[f"base_model.model.{name}.lora_B.weight"])


@pytest.mark.parametrize("body", ["model.language_model.", "language_model.model.", "", "model.model."])
def test_names_of_a_text_part_are_those_of_its_layers(folder: Path, targets: Targets, body: str) -> None:
    plain = LoRAAdapter.read(folder, targets, MAX_RANK)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("base_model.model.model.", f"base_model.model.{body}")] = tensors.pop(name)
        seeing = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
        tensors[seeing] = torch.zeros(4, 4)

    change_tensors(folder, rename)
    adapter = LoRAAdapter.read(folder, targets, MAX_RANK)
    assert set(adapter.weights) == set(plain.weights)
    assert all(torch.equal(each.b, plain.weights[name].b) for name, each in adapter.weights.items())


def test_a_layer_may_not_have_two_names(folder: Path, targets: Targets) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        name = f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"
        tensors[name.replace("model.layers", "model.language_model.layers")] = tensors[name].clone()

    change_tensors(folder, add)
    with pytest.raises(LoRAError, match="has two names for the layer"):
        LoRAAdapter.read(folder, targets, MAX_RANK)


def test_ranks_and_scales_of_some_layers_are_pefts(model: Path, tmp_path: Path, targets: Targets) -> None:
    """The first pattern counts that matches the whole name of a layer, or its end behind a dot."""
    ranks = {"v_proj": 2, "layers.0.self_attn.q_proj": 8, "model.layers.[01].mlp.up_proj": 1}
    alphas = {"proj": 99, "q_proj": 32, r".*\.1\.self_attn.k_proj": 3, "^model.layers.0.mlp.down_proj": 1}
    folder = write_adapter(tmp_path / "a", model, rank_pattern=ranks, alpha_pattern=alphas)
    adapter = LoRAAdapter.read(folder, targets, MAX_RANK)
    stored = load_file(folder / "adapter_model.safetensors")
    scales = {}
    for name, weights in adapter.weights.items():
        b = stored[f"base_model.model.{name}.lora_B.weight"]
        scales[name.removeprefix("model.layers.")] = float((weights.b.T / b).median())
        torch.testing.assert_close(weights.b.T, b * scales[name.removeprefix("model.layers.")])
    expected = dict.fromkeys(scales, 2.0)
    expected |= {"0.self_attn.q_proj": 4.0, "1.self_attn.q_proj": 8.0, "0.mlp.up_proj": 8.0, "1.mlp.up_proj": 8.0}
    expected |= {"0.self_attn.v_proj": 4.0, "1.self_attn.v_proj": 4.0, "1.self_attn.k_proj": 0.75}
    expected["0.mlp.down_proj"] = 0.25
    assert scales == pytest.approx(expected)


def test_the_digest_is_of_both_files_and_of_nothing_else(folder: Path, model: Path, targets: Targets) -> None:
    def digest(path: Path) -> bytes:
        return LoRAAdapter.read(path, targets, MAX_RANK).digest

    known = digest(folder)
    (folder / "README.md").write_text("A card.")
    assert digest(write_adapter(folder.parent / "copy", model)) == digest(folder) == known
    change_config(folder, lora_alpha=9)
    assert digest(folder) != known
    change_config(folder, lora_alpha=8)
    assert digest(folder) == known
    change_tensors(folder, lambda tensors: next(iter(tensors.values())).add_(1))
    assert digest(folder) != known


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"peft_type": "LOHA"}, "its peft_type must be LORA"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "this model and the rank 2 ask for"),
        ({"rank_pattern": {"q_proj": 9}}, "has the rank 9, and --max-lora-rank is 8"),
        ({"rank_pattern": {"q_proj": 0}}, "each of rank_pattern"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern that is none of at most"),
        ({"alpha_pattern": {str(number): 1 for number in range(1025)}}, "at most 1024 entries"),
        ({"alpha_pattern": {"q_proj": "2"}}, "each of alpha_pattern"),
        ({"alpha_pattern": {"(.|.)*x": 2}}, "'(.|.)*x': only parts of names"),
        ({"alpha_pattern": {".*.*.*x": 2}}, "'.*.*.*x': only parts of names"),
        ({"alpha_pattern": {"**": 2}}, "'**': only parts of names"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"kasa_config": {"beta": 1}}, "KaSA"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "changes the model's own weights"),
        ({"r": 9}, "has the rank 9, and --max-lora-rank is 8"),
        ({"r": 0}, "r must be a whole number"),
        ({"r": True}, "r must be a whole number"),
        ({"r": None}, "r must be a whole number"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
        ({"r": 3}, "this model and the rank 3 ask for"),
    ],
)
def test_what_the_settings_ask_for_and_is_not_done_is_refused(
    folder: Path, targets: Targets, values: dict[str, object], told: str
) -> None:
    change_config(folder, **values)
    with pytest.raises(LoRAError) as caught:
        LoRAAdapter.read(folder, targets, MAX_RANK)
    assert told in str(caught.value)
    assert str(folder) in str(caught.value)


def _rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({f"{PREFIX}.{new}": tensors.pop(f"{PREFIX}.{old}")})


def _add(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({f"{PREFIX}.{name}": torch.ones(*shape, dtype=dtype)})


Q = "0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            _rename(f"{Q}.lora_A.weight", f"{Q}.lora_magnitude_vector"),
            "what adapters may change here is q_proj, k_proj,",
        ),
        (_add("0.mlp.experts.0.w1.lora_A.weight", 4, 16), "mlp.experts.0"),
        (_add("0.self_attn.q_proj.bias", 16), "q_proj.bias"),
        (_add("2.self_attn.q_proj.lora_A.weight", 4, 16), "layers.2"),
        (lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 16)}), "lm_head"),
        (lambda tensors: tensors.pop(f"{PREFIX}.{Q}.lora_B.weight"), "has only one of the two matrices"),
        (_add(f"{Q}.lora_B.weight", 17, 4), "in the shape [17, 4]"),
        (_add(f"{Q}.lora_A.weight", 4, 15), "in the shape [4, 15]"),
        (_add(f"{Q}.lora_A.weight", 4, 16, dtype=torch.int8), "torch.int8, which is not supported"),
        (lambda tensors: tensors.clear(), "has no tensors"),
        (lambda tensors: tensors[f"{PREFIX}.{Q}.lora_A.weight"][1].fill_(torch.nan), "not finite"),
        (lambda tensors: tensors[f"{PREFIX}.{Q}.lora_B.weight"][1].fill_(3e38), "not finite, or are not once they are"),
    ],
)
def test_tensors_that_fit_no_layer_of_the_model_are_refused(
    folder: Path, targets: Targets, change: Callable[[dict[str, torch.Tensor]], object], told: str
) -> None:
    change_tensors(folder, change)
    with pytest.raises(LoRAError) as caught:
        LoRAAdapter.read(folder, targets, MAX_RANK)
    assert told in str(caught.value)


def test_a_pickle_is_refused_with_a_remedy(folder: Path, targets: Targets) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(LoRAError, match=r"is a pickle, .* safe_serialization=True"):
        LoRAAdapter.read(folder, targets, MAX_RANK)


def test_broken_folders_are_refused(folder: Path, targets: Targets) -> None:
    def error() -> str:
        with pytest.raises(LoRAError) as caught:
            LoRAAdapter.read(folder, targets, MAX_RANK)
        return str(caught.value)

    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        weights.write_bytes(whole[:length])
        assert "is not a whole safetensors file" in error()
    os.truncate(weights, 1 << 32)
    assert "is more than an adapter of this model can be" in error()
    weights.unlink()
    assert error().endswith("has no adapter_model.safetensors.")
    many = int("9" * 400)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": many, "lora_alpha": 1}))
    assert "has the rank 99999999999999999999, and --max-lora-rank is" in error()
    for text in ("", "[]", "{", '"LORA"'):
        (folder / "adapter_config.json").write_text(text)
        assert "adapter_config.json" in error()
    (folder / "adapter_config.json").unlink()
    assert error().endswith("has no adapter_config.json.")
    os.mkfifo(folder / "adapter_config.json")
    assert error().endswith("adapter_config.json is not a file.")
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()
    assert error().endswith("adapter_config.json cannot be read: Is a directory.")
    (folder / "adapter_config.json").rmdir()
    folder.rmdir()
    assert error().startswith("There is no adapter to load: no folder ")
    folder.symlink_to(folder)
    assert error().endswith("cannot be read: Too many levels of symbolic links.")


@pytest.mark.parametrize(("path", "told"), [("x" * 300, "File name too long"), ("a\0b", "not the name of a folder")])
def test_an_invalid_folder_is_refused(targets: Targets, path: str, told: str) -> None:
    with pytest.raises(LoRAError, match=told):
        LoRAAdapter.read(Path("/", path), targets, MAX_RANK)


async def test_loading_an_adapter_does_not_reveal_which_folders_exist(
    folder: Path, targets: Targets, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no adapter is answered with one sentence, whatever it is; the log says what it is."""
    root = tmp_path / "adapters"
    for name in ("empty", "pipe"):
        (root / name).mkdir(parents=True)
    os.mkfifo(root / "pipe" / "adapter_config.json")
    (root / "loop").symlink_to(root / "loop")
    (root / "link").symlink_to(folder)
    inside = Path(shutil.move(folder, root / "inside"))
    outside = shutil.copytree(inside, folder)

    def check(lora: LoRARequest) -> LoRARequest:
        adapter = LoRAAdapter.read(Path(lora.lora_path), targets, MAX_RANK)
        return replace(lora, lora_path=Path(lora.lora_path), digest=adapter.digest)

    async def refusal(registry: LoRARegistry, path: str) -> str:
        with pytest.raises(QuireError) as refused:
            await registry.load("name", path)
        assert refused.value.param == "lora_path"
        return refused.value.message.replace(ascii(path), "PATH")

    anywhere, below = LoRARegistry(check, ["m"]), LoRARegistry(check, ["m"], root)
    found = {await refusal(anywhere, str(root / name)) for name in ("nowhere", "empty", "pipe", "loop")}
    assert found == {"There is no adapter at PATH that this engine can read; its log says why."}
    strange = ["..", "../adapter", str(outside), "link", "/", "/etc", "/etc/nowhere", "a\0b", "a\nb"]
    found = {await refusal(below, path) for path in ("nowhere", "empty", "pipe", "loop", *strange)}
    wanted = f"There is no adapter at PATH that this engine can read, below the {root} of --lora-root"
    assert found == {f"{wanted}; its log says why."}
    assert "a\nb" not in caplog.text
    assert "has no adapter_config.json" in caplog.text
    assert (await below.load("name", "inside")).lora_path == inside
    assert (await below.load("name", str(inside))).lora_path == inside
    assert (await anywhere.load("name", str(outside))).lora_path == outside
