"""``TorchExecutor``: one model, its KV memory and its attention backend, run step by step.

It knows plans and tensors. Which sequence gets which blocks, and why, is the scheduler's.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from quire_proto.errors import ErrorCode, QuireError, internal

from quire_engine.attention.base import AttentionBackend, AttentionShape
from quire_engine.executor.torch.backends import make_attention
from quire_engine.executor.torch.batch import StepBatch, pack
from quire_engine.executor.torch.kv_cache import KvCache
from quire_engine.executor.torch.threads import configure_threads
from quire_engine.kv.capacity import KvCapacity
from quire_engine.models.config import ModelConfig
from quire_engine.models.errors import ModelError
from quire_engine.models.llama import Llama
from quire_engine.models.weights import Checkpoint, resolve_dtype
from quire_engine.sampling import NOT_FINITE, SamplingRows, sample
from quire_engine.scheduling.plan import Chunk, StepPlan, StepResult, StepTimings
from quire_engine.scheduling.rates import Rates


class TorchExecutor:
    """Carries out plans one after the other. Used by one thread."""

    def __init__(
        self, config: ModelConfig, model: Llama, kv: KvCache, attention: AttentionBackend, max_model_len: int
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self._model = model
        self._kv = kv
        self._attention = attention

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: str = "auto",
        block_size: int = 16,
        kv_cache_bytes: int,
        swap_bytes: int,
        max_model_len: int | None = None,
        attention: str = "auto",
    ) -> "TorchExecutor":
        """Loads the model of ``folder`` onto the CPU, with KV pools of at most the given bytes.

        ``dtype`` is auto, float32, bfloat16 or float16. ``max_model_len`` defaults to the model's own limit. Raises
        ``ModelError``, with one sentence, for whatever makes the folder or these settings impossible.
        """
        configure_threads()
        device = torch.device("cpu")
        config = ModelConfig.read(folder)
        length = _model_length(config, max_model_len)
        checkpoint = Checkpoint(folder)
        resolved = resolve_dtype(dtype, checkpoint.dtype("model.embed_tokens.weight"), device)
        kv = KvCache(
            config,
            block_size=block_size,
            kv_cache_bytes=kv_cache_bytes,
            swap_bytes=swap_bytes,
            dtype=resolved,
            device=device,
        )
        backend = make_attention(attention, _attention_shape(config, block_size))
        with torch.inference_mode():
            model = Llama(config, checkpoint, resolved, device)
        checkpoint.log_unread()
        return cls(config, model, kv, backend, length)

    @property
    def capacity(self) -> KvCapacity:
        """Blocks of both pools; constant."""
        return self._kv.capacity

    @property
    def rates(self) -> Rates:
        """Measured when the model was loaded."""
        return Rates(1e3, 1e9)

    @property
    def depth(self) -> int:
        """Plans that may be under way at once."""
        return 1

    @property
    def dtype_name(self) -> str:
        """What weights and KV memory are held in: ``float32`` or ``bfloat16``."""
        return str(self._kv.device.dtype).removeprefix("torch.")

    def run(self, plan: StepPlan) -> StepResult:
        """See ``Executor.run``."""
        result = StepResult()
        with torch.inference_mode():
            self._copy(plan, result.timings)
            chunks = _chunks_with_tokens(plan.chunks, result)
            if chunks:
                self._compute(pack(chunks, self.capacity.block_size), result)
        return result

    def close(self) -> None:
        """Gives the KV memory back. Nothing can be run any more."""
        self._kv.close()

    def _copy(self, plan: StepPlan, timings: StepTimings) -> None:
        with _timed(timings, "swap"):
            self._kv.copy_out(plan.copies_out)
            self._kv.copy_within(plan.copies_within)
            self._kv.copy_in(plan.copies_in)

    def _compute(self, batch: StepBatch, result: StepResult) -> None:
        with _timed(result.timings, "forward"):
            self._attention.prepare(batch.attention)
            kv = self._kv.device
            token_ids, positions = batch.token_ids.to(kv.device), batch.attention.positions.to(kv.device)
            hidden = self._model.forward(token_ids, positions, kv, self._attention)
            if not batch.sampled:
                return
            logits = self._model.logits(hidden[batch.sampled_rows.to(kv.device)])
        with _timed(result.timings, "sample"):
            _sample(logits, batch.sampled, result)


def _sample(logits: torch.Tensor, chunks: Sequence[Chunk], result: StepResult) -> None:
    draws = [draw for chunk in chunks for draw in chunk.draws]
    drawn = sample(logits, SamplingRows.of([d.params for d in draws], [len(d.token_ids) for d in draws])).tolist()
    for draw, token_id in zip(draws, drawn, strict=True):
        if token_id == NOT_FINITE:
            message = "The model computed numbers that are not finite for this request."
            result.errors[draw.sequence_id] = QuireError(ErrorCode.INTERNAL, message)
        else:
            result.token_ids[draw.sequence_id] = token_id


def _chunks_with_tokens(chunks: Sequence[Chunk], result: StepResult) -> list[Chunk]:
    """The chunks that there is something to compute for; one without tokens has nothing to draw from either."""
    for chunk in chunks:
        if not chunk.token_ids:
            result.errors.update((draw.sequence_id, internal()) for draw in chunk.draws)
    return [chunk for chunk in chunks if chunk.token_ids]


def _model_length(config: ModelConfig, asked: int | None) -> int:
    if asked is None:
        return config.max_length
    if not 1 <= asked <= config.max_length:
        raise ModelError(
            f"The model length is set to {asked} tokens, but this model's is between 1 and {config.max_length}."
        )
    return asked


def _attention_shape(config: ModelConfig, block_size: int) -> AttentionShape:
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        scale=config.head_dim**-0.5,
    )


@contextmanager
def _timed(timings: StepTimings, part: str) -> Iterator[None]:
    """Adds the seconds of the block to one field of ``timings``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        setattr(timings, part, getattr(timings, part) + time.perf_counter() - start)
