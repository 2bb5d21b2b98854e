"""``EncoderExecutor``: runs an encoder, which computes each prompt in one step and keeps no KV cache."""

from collections.abc import Sequence
from time import perf_counter

import torch

from quire_engine.checkpoint.config import ModelConfig
from quire_engine.config import EngineArgs
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.data_parallel import DataParallel
from quire_engine.core.executor import Rates, WeightStats
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferResult
from quire_engine.core.lora import LoRARequest
from quire_engine.core.startup import StartupPhase, StartupTimer
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.device.accelerator import configure_threads, inference_on, resolve_device
from quire_engine.errors import LoRAError, ModelError
from quire_engine.executor.start_checks import check_start
from quire_engine.models.encoder import EncoderModel, PackedPrompts, load_encoder
from quire_engine.worker.input_batch import prepare_inputs
from quire_engine.worker.pooler import Pooler
from quire_engine.worker.request_states import RequestStates
from quire_engine.worker.sleep import PutAway, device_storages, put_away
from quire_engine.worker.worker import device_errors

_TIMED_TOKENS = 128


class EncoderExecutor:
    """Executes one step at a time. Implements ``Executor`` with depth 1. Use it from one thread.

    An encoder has no KV memory. ``kv_cache_config`` has enough blocks of 0 bytes for the tokens of one step: the
    scheduler allocates them as for any model, and they are free again when the step ends.
    """

    depth = 1
    disk_contents: DiskContents | None = None
    data_parallel: DataParallel | None = None
    weight_stats: WeightStats | None = None

    def __init__(self, model: EncoderModel, config: ModelConfig, args: EngineArgs) -> None:
        assert config.pooler_config is not None, "an encoder pools"
        self.config = config
        self.max_model_len = min(args.max_model_len or config.max_length, args.max_num_batched_tokens)
        blocks = -(-args.max_num_batched_tokens // args.block_size) + args.max_num_seqs + 1
        self.kv_cache_config = KVCacheConfig(args.block_size, blocks, 0)
        self._model = model
        self._put_away: PutAway | None = None
        self._states = RequestStates(1, config.vocab_size)
        self._pooler = Pooler(config.pooler_config, model.classifier)
        self.rates = Rates(self._measure(), 1e9)

    @classmethod
    def load(
        cls,
        args: EngineArgs,
        config: ModelConfig,
        *,
        owns_process: bool = False,
        startup: StartupTimer | None = None,
    ) -> "EncoderExecutor":
        """Loads the model of ``args``, described by ``config``. If the engine ``owns_process``, sets torch's thread
        count for the process. ``startup`` times the phases. Raises ``ModelError``.
        """
        device = resolve_device(args.device)
        check_start(args, config, device)
        length = args.max_model_len
        if length is not None and length > config.max_length:
            raise ModelError(
                f"--max-model-len is {length}, and this model's prompts have 1 to {config.max_length} tokens."
            )
        if owns_process:
            configure_threads()
        timer = startup or StartupTimer()
        timer.begin(StartupPhase.WEIGHTS)
        model = load_encoder(config, args.model, args.dtype, device)
        timer.begin(StartupPhase.WARMUP)
        return cls(model, config, args)

    @property
    def dtype_name(self) -> str:
        """The dtype of weights and activations."""
        return str(self._model.dtype).removeprefix("torch.")

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """See ``Executor.execute_model``."""
        output = ModelOutput([0] * scheduler_output.num_draws)
        self._states.update(scheduler_output)
        self._pooler.remove(scheduler_output.freed_rows)
        if not scheduler_output.rows:
            return output
        with device_errors(), inference_on(self._model.device):
            begun = perf_counter()
            capacity = self.kv_cache_config
            batch = prepare_inputs(self._states, scheduler_output, capacity.block_size, capacity.groups)
            batch.model_input.check_vocabulary(self.config.vocab_size)
            lengths, starts = list(scheduler_output.lengths), [each.params.second_text_start for each in batch.pooled]
            hidden = self._model.forward(PackedPrompts(batch.model_input.token_ids, lengths, starts))
            computed = perf_counter()
            self._pooler.pool(hidden, batch.pooled).fetch_into(output)
        output.timings.forward, output.timings.sample = computed - begun, perf_counter() - computed
        return output

    def take_transfers(self, timeout: float) -> Sequence[TransferResult]:
        """See ``Executor.take_transfers``. An encoder has no disk tier."""
        del timeout
        return ()

    def check_lora(self, lora: LoRARequest) -> LoRARequest:
        """Raises ``LoRAError``: encoders serve no adapters."""
        raise LoRAError(f"This engine serves no adapters, so not {lora.lora_name}: its model is an encoder.")

    def remove_lora(self, lora_id: int) -> None:
        """See ``Executor.remove_lora``. An encoder has no adapters."""

    @property
    def can_sleep(self) -> bool:
        """Whether this is a ``Sleeper``."""
        return True

    def sleep(self) -> None:
        """See ``Sleeper.sleep``. An encoder has no KV memory."""
        self._put_away = put_away(device_storages(self._model, self._model.device), self._model.device)

    def wake_up(self) -> None:
        """See ``Sleeper.wake_up``."""
        assert self._put_away is not None, "it does not sleep"
        self._put_away.restore()
        self._put_away = None

    def close(self) -> None:
        """Frees the memory of the weights. May be called again."""
        self.__dict__.pop("_model", None)

    def _measure(self) -> float:
        """Returns the measured speed in tokens per second."""
        count = min(_TIMED_TOKENS, self.max_model_len)
        tokens = torch.arange(count) * 7919 % self.config.vocab_size
        with inference_on(self._model.device):
            begun = perf_counter()
            self._model.forward(PackedPrompts(tokens, [count], [0])).sum().item()
        return count / max(perf_counter() - begun, 1e-6)
