"""``ModelRunner``: one model, its KV memory and its attention backend on one device. Every rank has one.

On CUDA nothing here waits for the device.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from quire_engine.attention.base import AttentionBackend, AttentionShape
from quire_engine.attention.kv_cache_spec import BlockLayout
from quire_engine.attention.mixed import attention_of
from quire_engine.attention.state_cache import RecurrentRunner
from quire_engine.checkpoint.config import ModelConfig
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import EngineArgs
from quire_engine.core.block_pool import BlockCopies, KVCacheConfig
from quire_engine.core.executor import SleepError
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferResult
from quire_engine.core.lora import LoRARequest
from quire_engine.device.accelerator import upload
from quire_engine.distributed.communicator import SINGLE_RANK, Communicator
from quire_engine.distributed.pipeline import PipelineStage, is_last
from quire_engine.errors import ModelError
from quire_engine.lora.manager import LoRAManager
from quire_engine.models.base import Classifier, Model
from quire_engine.models.loader import load_model
from quire_engine.worker.attention_selector import check_attention, make_attention, resolve_kv_cache_dtype
from quire_engine.worker.cpu_graph import make_cpu_graphs
from quire_engine.worker.cuda_graph import (
    NO_GRAPHS,
    CudaGraphCapturer,
    CudaGraphRunner,
    GraphCaptureError,
    GraphCapturer,
    capture_graphs,
    capture_sizes,
)
from quire_engine.worker.input_batch import ModelInput, scatter_pending
from quire_engine.worker.kv_cache import KVCache, min_cache_sizes
from quire_engine.worker.memory import CacheBudget, CacheSizes
from quire_engine.worker.sleep import PutAway, device_storages, put_away
from quire_engine.worker.state_memory import StateLayout

log = logging.getLogger(__name__)
KEEPS_WINDOWS = "layers with a window keep the keys and values of all tokens, %s"
FREES_WINDOWS = "a token has a KV block in each of these groups of layers, until their window has left it: %s"
STATES = "layers keep states of %.1f MiB a sequence in a pool of their own, with a checkpoint after each %d tokens"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its attention and its limits: all that a ``ModelRunner`` needs apart from the KV memory.

    * ``kv_cache_dtype`` is the dtype of KV rows. With ``frees_windows``, blocks that have left the windows of their
      layers are freed.
    * ``max_model_len`` is the longest sequence in tokens, and ``max_num_batched_tokens`` the most tokens of a step.
    * ``graph_sizes`` are the batch sizes of decode steps to capture as CUDA graphs, if model and attention allow it. If
      there are any, the CPU captures a CPU graph for each size that occurs.
    * ``state_layout`` says how the states of recurrent layers are kept; None without such layers.
    * ``stage`` is the pipeline stage that ``model`` is.
    * ``loras`` holds the adapters; None if the model has no slots for them.
    * ``classifier`` scores pooled prompts; None if the model does not classify.
    """

    config: ModelConfig
    model: Model
    attention: AttentionBackend
    kv_cache_dtype: torch.dtype
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    device: torch.device
    frees_windows: bool = False
    graph_sizes: Sequence[int] = ()
    state_layout: StateLayout | None = None
    stage: PipelineStage | None = None
    loras: LoRAManager | None = None
    classifier: Classifier | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        return self.block_layout.block_bytes

    def cache_budget(self, settings: EngineArgs) -> CacheBudget:
        """Returns the KV memory that ``settings`` ask for. An encoder has none: it gets as many empty blocks as the
        scheduler can hand out to the prompts of two steps.
        """
        if self.config.is_causal:
            return CacheBudget(settings.kv_cache_memory, settings.swap_bytes, settings.gpu_memory_utilization)
        num_blocks = 1 + settings.max_num_seqs + -(-2 * settings.max_num_batched_tokens // self.block_size)
        return CacheBudget(num_blocks * self.block_bytes, 0)

    def cache_sizes(self, num_blocks: int, num_host_blocks: int) -> CacheSizes:
        """Returns the KV memory in bytes of ``num_blocks`` on the device and ``num_host_blocks`` on the host."""
        return CacheSizes(num_blocks * self.block_bytes, num_host_blocks * self.block_bytes)

    @property
    def min_cache_sizes(self) -> CacheSizes:
        """The least KV memory that any step can run with. Raises ``ModelError`` for an impossible block size."""
        return min_cache_sizes(self.block_layout, self.state_layout)

    @property
    def block_layout(self) -> BlockLayout:
        """What one KV block holds. Raises ``ModelError`` for an impossible block size."""
        if self.block_size < 1:
            raise ModelError(f"The block size is {self.block_size} tokens, and it must be at least 1.")
        layers, longest = self.model.attention_layers, self.max_model_len if self.frees_windows else None
        return BlockLayout.of(layers, self.block_size, self.kv_cache_dtype, max_model_len=longest)

    def make_kv_cache(self, pools: CacheSizes) -> KVCache:
        """Allocates KV memory for this model. Raises ``ModelError`` if there is not enough memory."""
        return KVCache(self.block_layout, pools, self.device, state_layout=self.state_layout)


def load_model_and_attention(
    config: EngineArgs,
    model_config: ModelConfig,
    device: torch.device,
    ranks: Communicator = SINGLE_RANK,
    stage: PipelineStage | None = None,
    *,
    expert_ranks: Communicator | None = None,
) -> LoadedModel:
    """The model of ``config``, described by ``model_config``, on ``device``, and its attention; of a model that several
    ``ranks`` share, this one's part of the layers of ``stage``, and of the experts, which ``expert_ranks`` share, by
    default the same. ``check_start`` allows the settings. Raises ``ModelError``.
    """
    length = config.max_model_len or model_config.max_length
    if not model_config.is_causal:  # a step computes a prompt as a whole
        length = min(length, config.max_num_batched_tokens)
    deterministic = config.deterministic
    check = partial(check_attention, config.attention, device, deterministic=deterministic)
    num_lora_slots = config.max_loras if config.enable_lora else 0
    options = LoadOptions(config, device, ranks, stage, num_lora_slots, expert_ranks)
    model = load_model(model_config, config.model, options, check if model_config.is_causal else None)
    kv_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, model.dtype)

    def make(shape: AttentionShape) -> AttentionBackend:
        return make_attention(config.attention, shape, device, model.dtype, kv_dtype, deterministic=deterministic)

    backend = attention_of(model.attention_layers, config.block_size, make)
    graph_sizes = () if config.enforce_eager else capture_sizes(config.max_num_seqs)
    loras = None
    if model.loras is not None:
        loras = LoRAManager(model.lora_targets(model_config), model.loras)
    loaded = LoadedModel(
        config=model_config,
        model=model,
        attention=backend,
        kv_cache_dtype=kv_dtype,
        block_size=config.block_size,
        max_model_len=length,
        max_num_batched_tokens=config.max_num_batched_tokens,
        device=device,
        frees_windows=_frees_windows(config, model, length),
        graph_sizes=graph_sizes,
        stage=stage,
        loras=loras,
        classifier=(
            model.load_classifier(model_config, config.model, device) if ranks.rank == 0 and is_last(stage) else None
        ),
    )
    if loaded.frees_windows:
        _log_groups(loaded.block_layout)
    if model.recurrent_layers is not None:
        loaded = replace(loaded, state_layout=_choose_state_layout(config, loaded, model.recurrent_layers.num_bytes))
    return loaded


def _choose_state_layout(config: EngineArgs, model: LoadedModel, state_bytes: int) -> StateLayout:
    layout = StateLayout.choose(
        state_bytes,
        (model.block_size, model.block_bytes),
        model.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    log.info(STATES, state_bytes / 2**20, layout.block_size)
    return layout


def _frees_windows(config: EngineArgs, model: Model, max_model_len: int) -> bool:
    """Whether some layers have windows shorter than sequences, and no setting needs all tokens of those layers."""
    if not any(layer.window is not None and layer.window < max_model_len for layer in model.attention_layers):
        return False
    reasons = {
        "with --pipeline-parallel-size": config.pipeline_parallel_size > 1,
        "with --kv-disk-path": config.kv_disk_path is not None,
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    if reason is not None:
        log.info(KEEPS_WINDOWS, reason)
    return reason is None


def _log_groups(layout: BlockLayout) -> None:
    if layout.windows == (None,):
        log.info(KEEPS_WINDOWS, "as no groups of layers take blocks of about one size")
        return
    counts = [layout.layer_groups.count(number) for number in range(len(layout.windows))]
    seen = ["all tokens" if window is None else f"the last {window}" for window in layout.windows]
    log.info(FREES_WINDOWS, ", ".join(f"{count} ({tokens})" for count, tokens in zip(counts, seen, strict=True)))


class ModelRunner:
    """Computes batches on one device, in inference mode. Use it from one thread. ``capture`` captures the CUDA graphs
    of decode steps; the default is a ``CudaGraphCapturer``.

    If the capture fails, a runner that is ``alone`` logs a warning and runs without graphs. A runner of a multi-rank
    model raises ``GraphCaptureError``: if one rank left a capture alone, the others would wait in an exchange forever.
    """

    def __init__(
        self, model: LoadedModel, sizes: CacheSizes, capture: GraphCapturer | None = None, *, alone: bool = True
    ) -> None:
        self._loaded = model
        self._model, self._attention, self._loras = model.model, model.attention, model.loras
        self._kv_cache = model.make_kv_cache(sizes)
        self._recurrent: RecurrentRunner | None = None
        if model.model.recurrent_layers is not None and self._kv_cache.states is not None:
            self._recurrent = RecurrentRunner(model.model.recurrent_layers, self._kv_cache.states)
        self._put_away: PutAway | None = None
        self._make_capturer: Callable[[], GraphCapturer] | None = None
        if capture is not None:
            self._make_capturer = lambda: capture
        elif model.device.type == "cuda" and model.graph_sizes:
            self._make_capturer = CudaGraphCapturer  # each has a memory pool, which goes with its graphs
        self._cuda_graphs = self._cpu_graphs = None
        if self._make_capturer is not None:
            self._cuda_graphs = self._capture_graphs(self._make_capturer(), alone)
        elif model.device.type == "cpu" and model.graph_sizes:
            self._cpu_graphs = make_cpu_graphs(model.model, self._kv_cache.layers, model.attention)

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The blocks of both pools. Constant."""
        return self._kv_cache.capacity

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations, and of KV memory unless that has its own dtype."""
        return self._model.dtype

    def copy(self, copies: BlockCopies) -> None:
        """Copies blocks. Copies ahead of need run concurrently with the next forward pass, and later work waits for
        them. Raises ``CopyError``.
        """
        self._kv_cache.copy(copies)

    def forward(self, batch: ModelInput, pending: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the hidden states [T, hidden] of the batch on the device, valid until the next call. ``pending`` [P]
        int64, also on the device, are the tokens at ``batch.pending_rows``. Raises ``IndexError`` for a token outside
        the vocabulary.

        In a pipeline these are the hidden states of this stage; the last stage returns the model's.
        """
        batch.check_vocabulary(self._loaded.config.vocab_size)
        if self._loras is not None:
            self._loras.prepare(batch.lora_ids)
        try:
            if self._cuda_graphs is not None and self._cuda_graphs.can_run(batch):
                hidden = self._cuda_graphs.forward(batch, pending)
            else:
                self._attention.prepare(*batch.attention)
                replayed = None if self._cpu_graphs is None else self._cpu_graphs.forward(batch, pending)
                hidden = self._forward_eagerly(batch, pending) if replayed is None else replayed
        finally:
            # Also after a failure: work that was launched before it still reads and writes blocks.
            if self._kv_cache.swap_stream is not None:
                self._kv_cache.swap_stream.record_compute()
        if self._loaded.stage is not None:
            self._loaded.stage.pass_on(hidden)
        return hidden

    def _forward_eagerly(self, batch: ModelInput, pending: torch.Tensor | None) -> torch.Tensor:
        device = self._kv_cache.blocks.device
        token_ids, positions = upload(batch.token_ids, device), upload(batch.positions, device)
        if pending is not None:
            scatter_pending(token_ids, batch.pending_rows, pending)
        token_types = upload(batch.token_types, device) if len(batch.token_types) else None
        kv, attention = self._kv_cache.layers, self._attention
        if batch.states is None:
            return self._model.forward(token_ids, positions, kv, attention, token_types)
        assert self._recurrent is not None, "the model keeps no states"
        with self._recurrent.step(batch.states):
            return self._model.forward(token_ids, positions, kv, attention, token_types)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns the logits [R, vocabulary] of the hidden states at ``rows`` [R], which must be ascending. They are
        valid until the next call.
        """
        if len(rows) < len(hidden):
            hidden = hidden.index_select(0, upload(rows, hidden.device))
        logits = None if self._cpu_graphs is None else self._cpu_graphs.logits(hidden)
        return self._model.logits(hidden) if logits is None else logits

    def execute_dummy_batch(self) -> None:
        """Takes part in a forward pass of the other engines of a group, without tokens."""
        self._model.execute_dummy_batch(self._kv_cache.blocks.device)

    def add_lora(self, lora: LoRARequest) -> None:
        """Reads an adapter into host memory, so that batches may use it. Raises ``LoRAError``."""
        assert self._loras is not None, "the model has no slots for adapters"
        self._loras.add(lora)

    def remove_lora(self, lora_id: int) -> None:
        """Frees the memory of an adapter."""
        assert self._loras is not None, "the model has no slots for adapters"
        self._loras.remove(lora_id)

    def open_disk(
        self, folder: Path, fingerprint: str, num_slots: int, report: Callable[[TransferResult], object]
    ) -> DiskContents:
        """See ``Worker.open_disk``."""
        return self._kv_cache.open_disk(folder, fingerprint, num_slots, report)

    def _capture_graphs(self, capture: GraphCapturer, alone: bool) -> CudaGraphRunner | None:
        pages = -(-self._loaded.max_model_len // self._loaded.block_size)
        kv, sizes = self._kv_cache.layers, self._loaded.graph_sizes
        try:
            with torch.inference_mode():
                return capture_graphs(self._model, kv, self._attention, sizes=sizes, max_pages=pages, capture=capture)
        except GraphCaptureError as error:
            if alone:
                log.warning(NO_GRAPHS, error)
                return None
            self._kv_cache.close()
            raise

    def sleep(self) -> None:
        """See ``Worker.sleep``. Drops the CUDA graphs, because they hold addresses."""
        if self._put_away is not None:
            return
        model, device = self._loaded, self._loaded.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        held = device_storages((model.model, model.attention, model.classifier), device)
        pools = {each.data_ptr() for each in self._kv_cache.device_storages}
        self._put_away = put_away([each for each in held if each.data_ptr() not in pools], device)
        self._cuda_graphs = None
        self._kv_cache.sleep()
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """See ``Worker.wake_up``."""
        if self._put_away is None:
            return
        self._kv_cache.wake_up()
        try:
            self._put_away.restore()
        except SleepError:
            self._kv_cache.sleep()
            raise
        self._put_away = None
        if self._make_capturer is not None:
            self._cuda_graphs = self._capture_graphs(self._make_capturer(), alone=True)

    def close(self) -> None:
        """See ``Ranks.close``."""
        self._cuda_graphs = self._cpu_graphs = self._loras = self._recurrent = None
        self._kv_cache.close()
        del self._model, self._attention, self._loaded
