"""``quire-engine``: reads the settings, loads the model, serves it."""

import logging
import sys
from typing import TYPE_CHECKING, NoReturn

from pydantic import ValidationError
from pydantic_settings import CliApp
from quire.v1 import engine_pb2 as pb
from quire_proto import __version__
from quire_proto.tracing import setup_tracing, shutdown_tracing

from quire_engine.config import EngineConfig
from quire_engine.kv.capacity import KvCapacity
from quire_engine.scheduling.config import SchedulerConfig
from quire_engine.service.server import EngineServer, ServerConfig

if TYPE_CHECKING:
    from quire_engine.executor.torch.runner import TorchExecutor

log = logging.getLogger("quire_engine")


def main() -> None:
    """The command. Exits with 2 for wrong settings, 1 with one sentence for a model that cannot be served.

    Torch is imported only once the settings are known to be right.
    """
    try:
        config = CliApp.run(EngineConfig)
    except ValidationError as error:
        _quit(2, "; ".join(_explain(problem["loc"], problem["msg"]) for problem in error.errors()))
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    tracing = setup_tracing("quire-engine", max_links=config.max_num_seqs)
    try:
        _serve(config, tracing)
    except KeyboardInterrupt:
        pass
    finally:
        shutdown_tracing()


def _serve(config: EngineConfig, tracing: bool) -> None:
    import uvloop

    executor = _load(config)
    length = _servable_length(executor.max_model_len, executor.capacity)
    server = EngineServer(
        _server_config(config, tracing),
        executor,
        _scheduling(config, executor, length),
        _description(config, executor, length),
        prefix_caching=config.enable_prefix_caching,
    )
    try:
        uvloop.run(server.serve())
    except OSError as error:
        _quit(1, f"The engine cannot listen: {error}.")


def _load(config: EngineConfig) -> "TorchExecutor":
    from quire_engine.executor.torch.runner import TorchExecutor
    from quire_engine.models.errors import ModelError

    try:
        return TorchExecutor.load(
            config.model,
            dtype=config.dtype,
            block_size=config.block_size,
            kv_cache_bytes=config.kv_cache_memory,
            swap_bytes=int(config.swap_space * (1 << 30)),
            max_model_len=config.max_model_len,
            attention=config.attention,
        )
    except ModelError as error:
        _quit(1, str(error))


def _scheduling(config: EngineConfig, executor: "TorchExecutor", length: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=length,
        max_waiting=config.max_waiting,
        eos_token_ids=frozenset(executor.config.eos_token_ids),
        vocab_size=executor.config.vocab_size,
        model_revision=executor.config.model_revision,
    )


def _description(config: EngineConfig, executor: "TorchExecutor", length: int) -> pb.DescribeResponse:
    return pb.DescribeResponse(
        served_model_names=config.names,
        model_revision=executor.config.model_revision,
        max_model_len=length,
        vocab_size=executor.config.vocab_size,
        eos_token_ids=executor.config.eos_token_ids,
        block_size=executor.capacity.block_size,
        blocks_total=executor.capacity.device_blocks - 1,
        host_blocks_total=executor.capacity.host_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        dtype=executor.dtype_name,
        version=__version__,
        prefix_caching=config.enable_prefix_caching,
    )


def _server_config(config: EngineConfig, tracing: bool) -> ServerConfig:
    return ServerConfig(
        host=config.host,
        port=config.port,
        metrics_port=config.metrics_port,
        session_grace=config.session_grace,
        shutdown_timeout=config.shutdown_timeout,
        stall_timeout=config.stall_timeout,
        trace_step_interval=config.trace_step_interval,
        tracing=tracing,
    )


def _servable_length(wanted: int, capacity: KvCapacity) -> int:
    """The longest request to accept: what the model can do, but no more than the KV pool can hold."""
    if capacity.usable_tokens < wanted:
        log.warning(
            "the KV pool holds %d tokens, so requests are limited to that instead of the model's %d; "
            "raise --kv-cache-memory to change it",
            capacity.usable_tokens,
            wanted,
        )
    return min(wanted, capacity.usable_tokens)


def _explain(location: tuple[int | str, ...], message: str) -> str:
    flag = str(location[0]).replace("_", "-") if location else "settings"
    return f"--{flag}: {message}"


def _quit(status: int, message: str) -> NoReturn:
    sys.stderr.write(f"quire-engine: {message}\n")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
