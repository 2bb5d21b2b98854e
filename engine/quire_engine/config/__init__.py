"""The engine's configuration: every flag is also an environment variable ``QUIRE_ENGINE_…``. Names are those of vLLM's
flags.

Each subject has a file: the model, parallel execution, KV memory, the scheduler. ``EngineArgs`` is all that concerns
the engine itself; ``EngineConfig`` adds the command line, the server, and the other machines (``NodeArgs``). A setting
stands once, in its part, with its default, range and help: the offline ``LLM`` takes the fields of ``EngineArgs``, and
the simulators' settings inherit ``CoreArgs``. Functions that need several settings take a part or the whole, and a
rank's process gets the whole as JSON.
"""

from quire_engine.config.engine_args import EngineArgs, ExecutorConfig
from quire_engine.config.engine_config import OTHER_VARIABLES, PREFIX, EngineConfig
from quire_engine.config.fields import (
    BlockSize,
    KVCacheDtype,
    KVCacheMemory,
    KVDiskSpace,
    MaxNumSeqs,
    MaxWaiting,
    ModelFolder,
    Names,
    Policy,
    PreemptionPolicy,
    Quantization,
    SwapSpace,
)
from quire_engine.config.model_args import ServedModel
from quire_engine.config.parallel_args import NodeArgs
from quire_engine.config.scheduler_args import CoreArgs, SchedulerArgs

__all__ = [
    "OTHER_VARIABLES",
    "PREFIX",
    "BlockSize",
    "CoreArgs",
    "EngineArgs",
    "EngineConfig",
    "ExecutorConfig",
    "KVCacheDtype",
    "KVCacheMemory",
    "KVDiskSpace",
    "MaxNumSeqs",
    "MaxWaiting",
    "ModelFolder",
    "Names",
    "NodeArgs",
    "Policy",
    "PreemptionPolicy",
    "Quantization",
    "SchedulerArgs",
    "ServedModel",
    "SwapSpace",
]
