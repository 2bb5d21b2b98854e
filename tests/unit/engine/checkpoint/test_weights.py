"""A model folder either loads into exactly its tensors, or is refused in one sentence that names file and problem."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.checkpoint.weights import Checkpoint, resolve_dtype
from quire_engine.core.startup import StartupPhase
from quire_engine.errors import ModelError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.models.loader import read_decoder_config
from safetensors.torch import load_file, save_file

from tests.support.executors import load_executor

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
LAYER = {
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GATE = "model.layers.1.mlp.gate_proj.weight"


def tensors() -> dict[str, torch.Tensor]:
    shapes = {f"model.layers.{layer}.{name}.weight": shape for layer in (0, 1) for name, shape in LAYER.items()}
    shapes |= {"model.embed_tokens.weight": (30, 16), "lm_head.weight": (30, 16), "model.norm.weight": (16,)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, weights: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A model folder; a change to None takes the key out of ``config.json``."""
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors() if weights is None else weights, folder / SINGLE)
    return folder


def shard(folder: Path) -> Path:
    """Splits the single file into two, with an index."""
    weights = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    weight_map = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(sorted(weights))}
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name, where in weight_map.items() if where == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load(folder: Path, **settings: Any) -> TorchExecutor:
    options = {"kv_cache_memory": 1 << 20, "swap_bytes": 0, "attention": "reference", **settings}
    return load_executor(folder, **options)


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, **settings)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


# Loading


def test_a_folder_in_several_files_holds_the_same_tensors_as_in_one(folder: Path) -> None:
    one, several = Checkpoint(folder), Checkpoint(shard(Path(shutil.copytree(folder, folder.parent / "sharded"))))
    for name, tensor in tensors().items():
        for checkpoint in (one, several):
            assert torch.equal(checkpoint.load_fused([name], [tuple(tensor.shape)], torch.float32, CPU), tensor)


def test_fused_tensors_are_stacked_in_the_requested_order(folder: Path) -> None:
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = Checkpoint(folder).load_fused(names, [(16, 16), (8, 16), (8, 16)], torch.bfloat16, CPU)
    assert torch.equal(fused, torch.cat([tensors()[name] for name in names]).bfloat16())


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [
        (torch.float32, "auto", "float32"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float16, "auto", "bfloat16"),
        (torch.float64, "auto", "float32"),
        (torch.float32, "float16", "float16"),
        (torch.float32, "bfloat16", "bfloat16"),
        (torch.bfloat16, "float32", "float32"),
    ],
)
def test_the_dtype_is_the_requested_one_or_the_checkpoints(
    tmp_path: Path, stored: torch.dtype, asked: str, used: str
) -> None:
    folder = write(tmp_path / "model", {name: tensor.to(stored) for name, tensor in tensors().items()})
    assert load(folder, dtype=asked).dtype_name == used


def test_float16_on_a_cpu_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_dtype("auto", torch.float16, CPU) == torch.bfloat16
    assert "runs in bfloat16" in caplog.text


def test_float16_that_was_asked_for_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_dtype("float16", torch.float32, CPU) == torch.float16
    assert not caplog.text


def test_tensors_without_a_use_are_named_in_the_log_unless_they_are_known_to_be_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"model.strange": torch.zeros(1), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    with caplog.at_level(logging.WARNING):
        load(write(tmp_path / "model", tensors() | extra))
    assert "1 tensors that the model does not use: model.strange" in caplog.text


def test_how_much_has_been_read_is_reported_up_to_the_whole(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire_engine.progress"):
        load(folder)
    parts = [record.args[1] for record in caplog.records if record.args and record.args[0] == StartupPhase.WEIGHTS]
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (0.0, 1.0)


def test_a_tied_head_needs_no_tensor_of_its_own(tmp_path: Path) -> None:
    weights = tensors()
    del weights["lm_head.weight"]
    load(write(tmp_path / "model", weights, tie_word_embeddings=True))


# The configuration


def test_both_spellings_of_rope_parameters_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = write(tmp_path / "old", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    older = write(tmp_path / "older", rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = write(tmp_path / "new", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    plain = write(tmp_path / "plain", rope_theta=5e5)
    frequencies = [read_decoder_config(one).rope_frequencies for one in (old, older, new, plain)]
    assert frequencies[0] == frequencies[1] == frequencies[2] != frequencies[3]


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "linear", "factor": 2.0}, 64),
        ({"rope_type": "dynamic", "factor": 2.0}, 64),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ],
)
def test_the_length_is_what_the_rope_reaches(tmp_path: Path, rope: dict[str, Any], length: int) -> None:
    assert read_decoder_config(write(tmp_path / "model", rope_scaling=rope)).max_length == length


def test_dynamic_rope_is_unscaled_up_to_the_limit(tmp_path: Path) -> None:
    dynamic = read_decoder_config(write(tmp_path / "a", rope_scaling={"rope_type": "dynamic", "factor": 3.0}))
    assert dynamic.rope_frequencies == read_decoder_config(write(tmp_path / "b")).rope_frequencies


def test_yarn_takes_its_optional_parameters(tmp_path: Path) -> None:
    base = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    variants = [
        base,
        base | {"attention_factor": 0.5},
        base | {"mscale": 2.0, "mscale_all_dim": 0.5},
        base | {"truncate": False},
    ]
    folders = [write(tmp_path / f"{place}", rope_scaling=one) for place, one in enumerate(variants)]
    configs = list(map(read_decoder_config, folders))
    assert len({(config.rope_frequencies, config.rope_scale) for config in configs}) == 4
    assert configs[1].rope_scale == 0.5


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8)),
        ("MistralForCausalLM", {"model_type": "mistral"}, (4096, 4096)),
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (8, None),
        ),
    ],
)
def test_each_layer_has_the_window_of_its_kind(
    tmp_path: Path, architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    model_type = architecture.removesuffix("ForCausalLM").lower()
    folder = write(tmp_path / "model", **{"architectures": [architecture], "model_type": model_type, **changes})
    assert read_decoder_config(folder).sliding_windows == windows


def test_equal_folders_have_one_revision_and_other_folders_another(folder: Path, tmp_path: Path) -> None:
    revision = read_decoder_config(folder).model_revision
    copy = Path(shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile))
    assert read_decoder_config(copy).model_revision == revision
    assert read_decoder_config(shard(copy)).model_revision != revision
    assert read_decoder_config(write(tmp_path / "other", rms_norm_eps=1e-3)).model_revision != revision


# Refusals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": None, "model_type": None}, "no architecture"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
        ({"architectures": [5], "model_type": 5}, "no architecture"),
        ({"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"}, "auto_map, but code"),
        ({"quantization_config": {"quant_method": "exl3"}}, "quantised by 'exl3', and read are awq"),
        ({"quantization_config": {"bits": 4}}, "quantised by None"),
        ({"quantization_config": ["gptq"]}, "quantization_config that is not an object"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "have 3 bits"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "format": "marlin"}}, "format 'marlin'"),
        ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "version 'gemv'"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "e5m2"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}}, "128, 0"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": float("nan")}, "hidden_size is NaN"),
        ({"intermediate_size": float("inf")}, "intermediate_size is Infinity"),
        ({"time_step_limit": [float("nan"), 1.0]}, "time_step_limit is NaN"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648; 4096 can be read"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"vocab_size": -3}, "vocab_size is -3"),
        ({"vocab_size": 30.5}, "vocab_size is 30.5"),
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, "3 KV heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_theta": "big"}, "rope"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 0}, "sliding_window"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    text = refusal(write(tmp_path / "model", **changes))
    assert said in text
    assert "config.json" in text


Breakage = Callable[[Path], object]


def without(name: str) -> Breakage:
    return lambda folder: (folder / name).unlink()


def containing(name: str, text: str) -> Breakage:
    return lambda folder: (folder / name).write_text(text)


def cut(name: str, size: int) -> Breakage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (without("config.json"), "config.json"),
        (containing("config.json", "{"), "config.json is not valid JSON"),
        (containing("config.json", "[]"), "config.json is not a JSON object"),
        (containing("config.json", "[" * 100_000), "config.json is not valid JSON"),
        (containing("generation_config.json", "nonsense"), "generation_config.json is not valid JSON"),
        (without(SINGLE), "neither model.safetensors nor model.safetensors.index.json"),
        (cut(SINGLE, 0), SINGLE),
        (cut(SINGLE, 5), SINGLE),
        (cut(SINGLE, 300), SINGLE),
        (cut(SINGLE, 5000), SINGLE),
        (containing(SINGLE, "x" * 5000), SINGLE),
        (shutil.rmtree, "There is no model to load: no folder"),
    ],
)
def test_a_broken_folder_is_refused_in_one_sentence(folder: Path, broken: Breakage, named: str) -> None:
    broken(folder)
    assert named in refusal(folder)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (without("model-00002-of-00002.safetensors"), "has no model-00002-of-00002.safetensors"),
        (cut("model-00002-of-00002.safetensors", 900), "model-00002-of-00002.safetensors"),
        (containing(INDEX, "]"), f"{INDEX} is not valid JSON"),
        (containing(INDEX, "{}"), f"{INDEX} has no weight_map"),
        (containing(INDEX, '{"weight_map": {"a": "../model.safetensors"}}'), "'../model.safetensors'"),
        (containing(INDEX, '{"weight_map": {"a": 3}}'), "names '3'"),
        (containing(INDEX, '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'), "has no tensor"),
    ],
)
def test_a_broken_folder_of_several_files_is_refused_in_one_sentence(
    folder: Path, broken: Breakage, named: str
) -> None:
    broken(shard(folder))
    assert named in refusal(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    for missing in (GATE, "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        weights = tensors()
        del weights[missing]
        assert f"no tensor {missing}" in refusal(write(tmp_path / "model", weights))


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    text = refusal(write(tmp_path / "model", tensors() | {GATE: torch.zeros(23, 16)}))
    assert SINGLE in text
    assert f"{GATE} in the shape [23, 16], but config.json asks for [24, 16]" in text


@pytest.mark.parametrize("name", [GATE, "model.embed_tokens.weight"])
def test_a_tensor_of_integers_is_refused(tmp_path: Path, name: str) -> None:
    weights = tensors()
    weights[name] = weights[name].to(torch.int8)
    assert f"stores {name} as I8" in refusal(write(tmp_path / "model", weights))


# Settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_cache_memory": 0}, "0 bytes holds fewer than 2 blocks of 16 tokens, which take 2048 bytes"),
        ({"kv_cache_memory": 4095}, "4095 bytes"),
        ({"kv_cache_memory": 1 << 62}, "no memory for a KV pool"),
        ({"block_size": 0}, "block size is 0"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"attention": "magic"}, "attention backend 'magic'"),
        ({"max_model_len": 65}, "max-model-len is 65, and this model's sequences have 1 to 64 tokens"),
        ({"max_model_len": 0}, "max-model-len is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_numbers(
    folder: Path, settings: dict[str, Any], said: str
) -> None:
    assert said in refusal(folder, **settings)


def test_pools_are_as_large_as_the_bytes_given_allow(folder: Path) -> None:
    executor = load(folder, kv_cache_memory=10_000, swap_bytes=6_143)
    assert (executor.kv_cache_config.device_blocks, executor.kv_cache_config.host_blocks) == (4, 2)
    assert load(folder, kv_cache_memory=4096, swap_bytes=2047).kv_cache_config.host_blocks == 0


def test_a_pool_takes_no_memory_before_it_is_used(folder: Path) -> None:
    before = resident()
    executor = load(folder, kv_cache_memory=1 << 30, swap_bytes=1 << 30)
    assert resident() - before < 200 << 20
    executor.close()


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
