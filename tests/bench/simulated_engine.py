"""An engine's service without a model: the whole server and core, on the simulator's latency model in real time. For
benchmarks of fleets that this machine does not have.
"""

import argparse
import json
from pathlib import Path

import uvloop
from quire_engine.config import EngineConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.scheduler import Scheduler
from quire_engine.core_client.client import LoadedCore
from quire_engine.core_client.core_thread import CoreThread
from quire_engine.server.server import EngineServer
from quire_engine.simulation.config import SimulatedEngineConfig
from quire_engine.simulation.simulated_executor import SimulatedExecutor
from quire_engine.structured_output.compiler import ModelGrammars
from quire_router.simulation.simulated_fleet import describe

MODEL_LEN = 8_192


def make_server(model: Path, name: str, port: int, metrics_port: int, settings: SimulatedEngineConfig) -> EngineServer:
    """``model`` is a folder whose tokenizer and vocabulary the router has too."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    executor = SimulatedExecutor(settings.kv_cache_config, settings.latency, vocab_size=vocab_size)
    limits = settings.scheduler_config(settings.scheduling_policy)
    limits = SchedulerConfig(**{**limits.model_dump(), "max_model_len": MODEL_LEN, "vocab_size": vocab_size})
    memory = KVCacheManager(settings.kv_cache_config, prefix_caching=True)
    description = describe(settings)
    description.served_model_names.append(name)
    description.max_model_len, description.vocab_size = MODEL_LEN, vocab_size
    runner = CoreThread(Scheduler(limits, memory, rates=settings.latency.rates), executor)
    config = EngineConfig(model=model, port=port, metrics_port=metrics_port, host="127.0.0.1")
    return EngineServer(config, LoadedCore(runner, description, ModelGrammars(model, vocab_size, ())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--served-model-name", default="quire-demo")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument("--preset", default="a100-8b")
    options = parser.parse_args()
    chosen = SimulatedEngineConfig(_cli_parse_args=[], preset=options.preset)
    ports = options.port, options.metrics_port
    uvloop.run(make_server(options.model, options.served_model_name, *ports, chosen).serve())
