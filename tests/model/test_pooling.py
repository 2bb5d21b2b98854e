"""Prompts that are pooled have the embeddings that transformers' hidden states make, however they are scheduled."""

import json
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from quire_engine.config import EngineConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.lora import LoRARequest
from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step_recording import RecordedEngine, StepRecorder, read_steps
from quire_engine.errors import LoRAError, ModelError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.factory import load_executor
from quire_engine.models import encoder as encoder_model
from quire_engine.models.loader import read_model_config
from quire_engine.simulation.replay import run_steps
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.pooling import PoolingParams, Task
from quire_proto.sampling import SamplingParams
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    XLMRobertaConfig,
)

from tests.model.models import VOCAB_SIZE, SmallModels, oracle_model, small_model

POOLINGS = ("last", "mean", "cls")
TOLERANCE = 1e-4
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # of the small models: layers, keys and values, heads, tokens, sizes, float32
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.3,
}
NOTHING = SamplingParams(max_tokens=1)


class PoolingEngine:
    """An engine's core on a model, in the caller's thread."""

    def __init__(self, folder: Path, pool_bytes: int = 4 << 20, **settings: object) -> None:
        config = EngineConfig.model_validate(
            {"model": folder, "dtype": "float32", "convert": "embed", "kv_cache_memory": pool_bytes, **settings}
        )
        self.executor: TorchExecutor = load_executor(config)
        pooler = self.executor.config.pooler_config
        limits = SchedulerConfig.of(
            config,
            max_model_len=self.executor.max_model_len,
            vocab_size=self.executor.config.vocab_size,
            supported_tasks=frozenset({Task.GENERATE, pooler.task}),
            pooler_config=pooler,
            enable_chunked_prefill=self.executor.config.is_causal,
        )
        memory = KVCacheManager(self.executor.kv_cache_config, prefix_caching=self.executor.config.is_causal)
        self.scheduler = Scheduler(limits, memory, rates=self.executor.rates)
        self.core = EngineCore(self.scheduler, self.executor, self._publish)
        self.ends: dict[str, EngineCoreOutput] = {}
        self.tokens: dict[str, list[int]] = {}

    def _publish(self, step: EngineCoreOutputs) -> None:
        for output in step.all_outputs():
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.ends_request:
                self.ends[output.request_id] = output

    def pool(self, prompts: Sequence[list[int]], params: PoolingParams | None = None) -> np.ndarray:
        """What each prompt is pooled to, all together: [prompts, size]."""
        for number, prompt in enumerate(prompts):
            self.scheduler.add_request(Request(f"p{number}", prompt, NOTHING, pooling=params or PoolingParams()))
        self.run()
        return np.stack([self.vector(f"p{number}") for number in range(len(prompts))])

    def run(self) -> None:
        while self.scheduler.has_work:
            self.core.step()

    def vector(self, request_id: str) -> np.ndarray:
        assert self.ends[request_id].error is None
        return np.frombuffer(self.ends[request_id].pooled, "<f4")

    def close(self) -> None:
        self.executor.close()


@torch.inference_mode()
def hidden_states(folder: Path, prompt: list[int]) -> torch.Tensor:
    """transformers' last hidden states [tokens, hidden] of one prompt alone."""
    output = oracle_model(folder)(input_ids=torch.tensor([prompt]), output_hidden_states=True)
    return output.hidden_states[-1][0]


POOLED_BY_HAND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "cls": lambda states: states[0],
}


def expected(folder: Path, prompts: Sequence[list[int]], pooling: str) -> np.ndarray:
    pooled = torch.stack([POOLED_BY_HAND[pooling](hidden_states(folder, prompt)) for prompt in prompts])
    return normalize(pooled, dim=1).numpy()


@pytest.fixture(scope="module")
def folder(small_models: SmallModels) -> Path:
    return small_models.folder("llama3")


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_are_transformers_hidden_states_in_chunks_and_from_the_cache(
    folder: Path, small_models: SmallModels, pooling: str
) -> None:
    prompts = small_models.prompts
    with closing(PoolingEngine(folder, pooling_type=pooling, max_num_batched_tokens=37)) as engine:
        wanted = expected(folder, prompts, pooling)
        assert np.abs(engine.pool(prompts) - wanted).max() < TOLERANCE
        assert max(map(len, prompts)) > 37, "no prompt took several chunks"
        assert np.abs(engine.pool(prompts) - wanted).max() < TOLERANCE, "blocks that were cached change the result"
        cached = sum(end.cached_tokens for end in engine.ends.values())
        assert (cached > 0) == (pooling == "last"), "others compute all of a prompt"


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma2"])
def test_families_embed_natively_and_through_transformers(small_models: SmallModels, name: str) -> None:
    folder = small_models.folder(name)
    with closing(PoolingEngine(folder)) as engine:
        wanted = expected(folder, small_models.prompts, "last")
        assert np.abs(engine.pool(small_models.prompts) - wanted).max() < TOLERANCE


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("settings", [{"swap_space": 0.0}, {"swap_space": 0.01, "preemption_mode": "swap"}])
@pytest.mark.parametrize("overlaps", [False, True])
def test_embeddings_beside_sequences_that_decode_and_take_their_memory(
    folder: Path, small_models: SmallModels, pooling: str, settings: dict[str, object], overlaps: bool
) -> None:
    """A prompt takes half of the pool, and those that decode grow into the rest before all of it is computed."""
    draw = random.Random(2)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(90)] for _ in range(3)]
    limits = {"max_num_batched_tokens": 8, "max_step_seconds": 0, "async_scheduling": overlaps, **settings}
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with closing(PoolingEngine(folder, 15 * BLOCK_BYTES, pooling_type=pooling, **limits)) as engine:
        for number, prompt in enumerate(small_models.prompts[:3]):
            engine.scheduler.add_request(Request(f"g{number}", prompt, greedy))
        engine.core.step()
        got = engine.pool(prompts)
        assert np.abs(got - expected(folder, prompts, pooling)).max() < TOLERANCE
        pooled = [engine.ends[f"p{number}"] for number in range(len(prompts))]
        assert any(end.timings.num_preemptions for end in pooled), "no prompt was preempted"
        made = [engine.tokens[f"g{number}"] for number in range(3)]
        assert made == small_models.outputs("llama3", range(3), 40)
        engine.pool([[5]])  # with it the executor hears of those that have ended
        assert not engine.executor._worker.pooler._sums, "what was kept of prompts is not given back"


def test_what_a_request_asks_for(folder: Path, small_models: SmallModels) -> None:
    prompts = small_models.prompts[:4]
    with closing(PoolingEngine(folder)) as engine:
        states = torch.stack([hidden_states(folder, prompt)[-1] for prompt in prompts])
        plain = engine.pool(prompts, PoolingParams(use_activation=False))
        assert np.abs(plain - states.numpy()).max() < TOLERANCE * float(states.abs().max())
        few = engine.pool(prompts, PoolingParams(dimensions=8))
        assert np.abs(few - normalize(states[:, :8], dim=1).numpy()).max() < TOLERANCE
        with pytest.raises(QuireError, match="embeddings have 64 numbers"):
            engine.pool(prompts, PoolingParams(dimensions=65))
        with pytest.raises(QuireError, match="classifies no texts"):
            engine.pool(prompts, PoolingParams(Task.CLASSIFY))
        with pytest.raises(QuireError, match="context length is 256"):
            engine.pool([[5] * 257])
        assert len(engine.pool([[5] * 256])) == 1, "a prompt may take all of the model's length"


def test_numbers_that_are_not_finite_end_their_own_request(folder: Path, small_models: SmallModels) -> None:
    with closing(PoolingEngine(folder)) as engine:
        forward = engine.executor._worker.runner.forward

        def broken(*arguments: object) -> torch.Tensor:
            states = forward(*arguments)
            states[len(small_models.prompts[0]) - 1] = float("nan")
            return states

        engine.executor._worker.runner.forward = broken
        for number, prompt in enumerate(small_models.prompts[:2]):
            engine.scheduler.add_request(Request(str(number), prompt, NOTHING, pooling=PoolingParams()))
        engine.run()
        assert "not finite" in str(engine.ends["0"].error)
        assert np.isfinite(engine.vector("1")).all()


def sentence_folder(tmp: Path, pooling: str = "mean", *, normalizes: bool = True) -> Path:
    """A body that was saved alone, in sentence-transformers' layout."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    AutoModel.from_config(config, dtype=torch.float32).save_pretrained(tmp)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalizes else [])]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (tmp / "modules.json").write_text(json.dumps(modules))
    (tmp / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
    flags = {key: mode == pooling for key, mode in modes.items()}
    (tmp / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **flags}))
    return tmp


@pytest.mark.parametrize(("pooling", "normalizes"), [("mean", True), ("last", False)])
def test_a_folder_of_sentence_transformers_says_how_it_pools(
    tmp_path: Path, small_models: SmallModels, pooling: str, normalizes: bool
) -> None:
    folder, prompts = sentence_folder(tmp_path, pooling, normalizes=normalizes), small_models.prompts[:6]
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    wanted = torch.stack(list(map(POOLED_BY_HAND[pooling], states)))
    wanted = normalize(wanted, dim=1) if normalizes else wanted
    with closing(PoolingEngine(folder, convert="auto")) as engine:
        assert np.abs(engine.pool(prompts) - wanted.numpy()).max() < TOLERANCE * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_ranks_share_a_model_that_pools(
    tmp_path: Path, small_models: SmallModels, pooling: str, sizes: tuple[int, int]
) -> None:
    folder, prompts = sentence_folder(tmp_path, pooling), small_models.prompts[:6]
    settings = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1], "max_num_batched_tokens": 16}
    with closing(PoolingEngine(folder, convert="auto")) as alone:
        wanted = alone.pool(prompts)
    with closing(PoolingEngine(folder, convert="auto", **settings)) as engine:
        assert np.abs(engine.pool(prompts) - wanted).max() < TOLERANCE


def test_the_last_stage_classifies(tmp_path: Path, small_models: SmallModels) -> None:
    base = small_model("qwen3", tmp_path)
    config = Qwen3Config.from_pretrained(base, num_labels=3, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "classifier")
    prompts, params = small_models.prompts[:4], PoolingParams(Task.CLASSIFY)
    with closing(PoolingEngine(tmp_path / "classifier", convert="auto")) as alone:
        wanted = alone.pool(prompts, params)
    with closing(PoolingEngine(tmp_path / "classifier", convert="auto", pipeline_parallel_size=2)) as engine:
        assert np.abs(engine.pool(prompts, params) - wanted).max() < TOLERANCE


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_decoder_that_classifies_scores_as_transformers_does(
    tmp_path: Path, small_models: SmallModels, num_labels: int
) -> None:
    base = small_model("qwen3", tmp_path)
    config = Qwen3Config.from_pretrained(base, num_labels=num_labels, pad_token_id=0)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "classifier")
    prompts = small_models.prompts[:8]
    with torch.inference_mode():
        logits = torch.cat([model(input_ids=torch.tensor([prompt])).logits for prompt in prompts])
    wanted = logits.sigmoid() if num_labels == 1 else logits.softmax(1)
    with closing(PoolingEngine(tmp_path / "classifier", convert="auto", max_num_batched_tokens=16)) as engine:
        params = PoolingParams(Task.CLASSIFY)
        assert np.abs(engine.pool(prompts, params) - wanted.numpy()).max() < TOLERANCE
        plain = engine.pool(prompts, PoolingParams(Task.CLASSIFY, use_activation=False))
        assert np.abs(plain - logits.numpy()).max() < TOLERANCE * max(1.0, float(logits.abs().max()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_generating_model_scores_by_the_tokens_that_its_folder_names(
    tmp_path: Path, small_models: SmallModels, tied: bool
) -> None:
    """As sentence-transformers' ``LogitScore`` of Qwen3-Reranker: the logit of yes less that of no."""
    folder = small_model("qwen3", tmp_path, tie_word_embeddings=tied)
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_LogitScore", "type": "b.LogitScore"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 17, "false_token_id": 42}))
    prompts = small_models.prompts[:8]
    with torch.inference_mode():
        logits = torch.cat([oracle_model(folder)(input_ids=torch.tensor([each])).logits[:, -1] for each in prompts])
    wanted = (logits[:, 17] - logits[:, 42]).sigmoid()[:, None]
    with closing(PoolingEngine(folder, convert="auto")) as engine:
        assert np.abs(engine.pool(prompts, PoolingParams(Task.CLASSIFY)) - wanted.numpy()).max() < TOLERANCE


ENCODERS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SIZES),
    "xlm-roberta": XLMRobertaConfig(**SIZES, pad_token_id=1, type_vocab_size=1),
    "modernbert": ModernBertConfig(**SIZES, local_attention=16, global_attn_every_n_layers=2, pad_token_id=0),
}


def encoder(folder: Path, name: str, kind: type, **changes: object) -> PreTrainedModel:
    """A small random encoder, as transformers runs it, and as it is written into ``folder``."""
    config = type(ENCODERS[name])(**{**ENCODERS[name].to_dict(), **changes})
    torch.manual_seed(7)
    model = kind.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def encoded_prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in (3, 90, 17, 40, 128, 1)]


def embedded_by_hand(model: PreTrainedModel, prompts: list[list[int]], pooling: str = "cls") -> np.ndarray:
    with torch.inference_mode():
        states = [model(input_ids=torch.tensor([each])).last_hidden_state[0] for each in prompts]
    return normalize(torch.stack(list(map(POOLED_BY_HAND[pooling], states))), dim=1).numpy()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_embeds_as_transformers_does(
    tmp_path: Path, encoded_prompts: list[list[int]], name: str, overlaps: bool
) -> None:
    """With room for two of the prompts in a step, of which each is computed whole."""
    model = encoder(tmp_path, name, AutoModel)
    settings = {"convert": "auto", "max_num_batched_tokens": 140, "async_scheduling": overlaps}
    for pooling in POOLINGS:
        wanted = embedded_by_hand(model, encoded_prompts, pooling)
        with closing(PoolingEngine(tmp_path, pooling_type=pooling, **settings)) as engine:
            assert engine.executor.depth == 1 + overlaps
            for _ in range(2):
                assert np.abs(engine.pool(encoded_prompts) - wanted).max() < TOLERANCE


def test_an_encoder_has_blocks_for_as_many_prompts_as_may_run_and_no_memory_for_them(tmp_path: Path) -> None:
    encoder(tmp_path, "bert", AutoModel)
    settings = {"convert": "auto", "max_num_batched_tokens": 130, "max_num_seqs": 40, "async_scheduling": True}
    with closing(PoolingEngine(tmp_path, 1 << 40, **settings, swap_space=1.0)) as engine:
        memory = engine.executor.kv_cache_config
        assert memory.device_blocks * memory.block_bytes < 1 << 10
        assert memory.host_blocks == 0
        assert engine.pool([[5 + each, 6] for each in range(100)]).shape == (100, 64)
        assert engine.pool([[5] * 130] * 3).shape == (3, 64)
        assert not engine.scheduler.stats.preemptions
        assert not engine.scheduler.kv_cache_manager.take_events()


def test_a_prompt_that_an_encoder_fails_on_ends_alone(
    tmp_path: Path, encoded_prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = embedded_by_hand(encoder(tmp_path, "bert", AutoModel), encoded_prompts[:2])
    encode, poison = encoder_model.EncoderModel.encode, VOCAB_SIZE - 1

    def fail(model: encoder_model.EncoderModel, token_ids: torch.Tensor, *others: object) -> torch.Tensor:
        if poison in token_ids:
            raise ValueError("no such token")
        return encode(model, token_ids, *others)

    with closing(PoolingEngine(tmp_path, convert="auto")) as engine:
        monkeypatch.setattr(encoder_model.EncoderModel, "encode", fail)
        for number, prompt in enumerate([encoded_prompts[0], [5, poison], encoded_prompts[1]]):
            engine.scheduler.add_request(Request(str(number), prompt, NOTHING, pooling=PoolingParams()))
        engine.run()
        assert engine.ends["1"].error.code is ErrorCode.INTERNAL
        assert np.abs(np.stack([engine.vector("0"), engine.vector("2")]) - wanted).max() < TOLERANCE


def test_an_encoder_embeds_the_same_after_it_slept(tmp_path: Path, encoded_prompts: list[list[int]]) -> None:
    encoder(tmp_path, "bert", AutoModel).bfloat16().save_pretrained(tmp_path)  # so that weights are not a mapped file
    with closing(PoolingEngine(tmp_path, convert="auto")) as engine:
        wanted = engine.pool(encoded_prompts)
        assert engine.executor.can_sleep
        engine.executor.sleep()
        weight = engine.executor._worker.runner._model._body.get_input_embeddings().weight
        assert not weight[64:192].any(), "the pages of the weights are not given back"
        engine.executor.wake_up()
        assert np.array_equal(engine.pool(encoded_prompts), wanted)


def test_the_steps_of_an_encoder_are_recorded_and_run_again(tmp_path: Path, encoded_prompts: list[list[int]]) -> None:
    folder, path = tmp_path / "model", tmp_path / "steps"
    encoder(folder, "bert", AutoModel)
    settings = {"convert": "auto", "max_num_batched_tokens": 140}
    with closing(PoolingEngine(folder, **settings)) as engine:
        recorder = StepRecorder(path, RecordedEngine("bert", VOCAB_SIZE, engine.executor.kv_cache_config), 1 << 30)
        engine.core._recorder = recorder
        engine.pool(encoded_prompts)
        recorder.close()
    with closing(PoolingEngine(folder, **settings)) as again:
        report = run_steps(again.executor, read_steps(path)[1])
    assert (report.ended, report.num_failed) == ("", 0)
    assert report.num_tokens == sum(map(len, encoded_prompts))


@pytest.mark.parametrize("name", ENCODERS)
def test_a_cross_encoder_scores_pairs_as_transformers_does(
    tmp_path: Path, encoded_prompts: list[list[int]], name: str
) -> None:
    """Of a model with token types, those of the second text are others."""
    model = encoder(tmp_path, name, AutoModelForSequenceClassification, num_labels=1)
    prompts, has_types = encoded_prompts[:3], name == "bert"
    starts = [1, 30, 9]
    with torch.inference_mode():
        logits = []
        for prompt, start in zip(prompts, starts, strict=True):
            types = {"token_type_ids": torch.tensor([[int(each >= start) for each in range(len(prompt))]])}
            logits.append(model(input_ids=torch.tensor([prompt]), **(types if has_types else {})).logits)
    wanted = torch.cat(logits).sigmoid().numpy()
    with closing(PoolingEngine(tmp_path, convert="auto")) as engine:
        for number, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            params = PoolingParams(Task.CLASSIFY, second_text_start=start)
            engine.scheduler.add_request(Request(str(number), prompt, NOTHING, pooling=params))
        engine.run()
        got = np.stack([engine.vector(str(number)) for number in range(3)])
        assert np.abs(got - wanted).max() < TOLERANCE


def test_an_encoder_whose_attention_does_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder(tmp_path, "modernbert", AutoModel)
    monkeypatch.setattr(encoder_model, "packed_attention", _without_windows(encoder_model.packed_attention))
    with pytest.raises(ModelError, match="has other hidden states where prompts are packed"):
        PoolingEngine(tmp_path, convert="auto")


def _without_windows(attention: Callable[..., object]) -> Callable[..., object]:
    def broken(*arguments: object, sliding_window: int | None = None, **others: object) -> object:
        return attention(*arguments, **others)

    return broken


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size is for decoders"),
        ({"quantization": "int8"}, "--quantization is for decoders"),
        ({"enable_lora": True}, "--enable-lora is for decoders"),
        ({"runner": "generate"}, "makes no text"),
        ({"max_model_len": 500}, "--max-model-len is 500, and this model's sequences have 1 to 130 tokens"),
    ],
)
def test_settings_that_an_encoder_cannot_have(tmp_path: Path, settings: dict[str, object], sentence: str) -> None:
    encoder(tmp_path, "bert", AutoModel)
    with pytest.raises(ModelError, match=sentence):
        PoolingEngine(tmp_path, **{"convert": "auto", **settings})


def test_an_encoder_serves_no_adapters_and_says_why(tmp_path: Path) -> None:
    encoder(tmp_path, "bert", AutoModel)
    with closing(PoolingEngine(tmp_path, convert="auto")) as engine, pytest.raises(LoRAError) as caught:
        engine.executor.check_lora(LoRARequest("a", 1, str(tmp_path)))
    assert str(caught.value).startswith("This engine serves no adapters: --enable-lora is for decoders")


def test_a_random_schedule_changes_nothing(folder: Path) -> None:
    """Prompts come one after the other while others are under way, some of them are aborted."""
    draw = random.Random(1)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, 90))] for _ in range(24)]
    with closing(PoolingEngine(folder, 40 * BLOCK_BYTES, pooling_type="mean", max_num_batched_tokens=20)) as engine:
        aborted = set()
        for number, prompt in enumerate(prompts):
            engine.scheduler.add_request(Request(str(number), prompt, NOTHING, pooling=PoolingParams()))
            for _ in range(draw.randint(0, 3)):
                engine.core.step()
            if draw.random() < 0.2 and str(number) not in engine.ends:
                engine.scheduler.abort_request(str(number))
                aborted.add(number)
        engine.run()
        kept = [number for number in range(len(prompts)) if number not in aborted]
        wanted = expected(folder, [prompts[number] for number in kept], "mean")
        got = np.stack([engine.vector(str(number)) for number in kept])
        assert aborted
        assert np.abs(got - wanted).max() < TOLERANCE
        engine.pool([[5]])  # with it the executor hears of those that have ended
        assert not engine.executor._worker.pooler._sums, "what was kept of prompts is not given back"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"convert": "classify"}, "has no layer that classifies"),
        ({"convert": "embed", "runner": "generate"}, "--runner generate and --convert embed exclude each other"),
    ],
)
def test_settings_that_cannot_be(folder: Path, settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        read_model_config(folder, EngineConfig.model_validate({"model": folder, **settings}))
