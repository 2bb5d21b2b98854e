"""``OfflineEngine``: a model in this process, with the parts that ``LLM`` and ``AsyncLLM`` need to run it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import WeakSet

from pydantic import ValidationError
from quire_proto.errors import invalid
from quire_proto.text.model_folder import recommended_sampling
from quire_proto.text.tokenizer import ModelTokenizer

from quire_engine.checkpoint.gguf_tokenizer import tokenizer_folder
from quire_engine.config import EngineArgs, EngineConfig, ServedModel
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Executor
from quire_engine.errors import ModelError
from quire_engine.factory import load_executor, make_grammar_compiler, make_scheduler
from quire_engine.llm.model_folder import find_model_folder
from quire_engine.llm.processor import InputProcessor
from quire_engine.llm.types import SamplingParams
from quire_engine.structured_output.compiler import GrammarCompiler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quire_engine.executor.torch_executor import TorchExecutor

# The keyword arguments of ``LLM``: all settings of the engine itself, except the model, which is an argument.
LLM_SETTINGS = tuple(name for name in EngineArgs.model_fields if name not in ServedModel.model_fields)

AsyncEngineArgs = make_dataclass(
    "AsyncEngineArgs",
    [
        ("model", str | Path),
        ("tokenizer", str | Path | None, None),
        ("seed", int | None, None),
        ("allow_download", bool, False),
        *((name, Any, None) for name in LLM_SETTINGS),
    ],
)
"""The arguments of ``LLM`` and ``AsyncLLM`` as one object, as in vLLM: ``AsyncLLM.from_engine_args(args)``,
``LLM(**asdict(args))``. A setting that is None uses its default.
"""


class Closable(Protocol):
    """An ``LLM`` or ``AsyncLLM``."""

    def close(self) -> None:
        """Frees the model's memory."""
        ...


OPEN: WeakSet[Closable] = WeakSet()


def destroy_model_parallel() -> None:
    """Closes every ``LLM`` and ``AsyncLLM`` of this process, as programs for vLLM expect of its function of this
    name.
    """
    for each in list(OPEN):
        each.close()


@dataclass(frozen=True, slots=True)
class OfflineEngine:
    """``requests`` creates the requests that ``core`` runs. ``tokenizer`` was read from ``tokenizer_folder``.
    ``default_params`` are those that the model's ``generation_config.json`` recommends.
    """

    tokenizer: ModelTokenizer
    tokenizer_folder: Path
    executor: Executor
    core: EngineCore
    grammars: GrammarCompiler
    requests: InputProcessor
    default_params: SamplingParams

    @classmethod
    def load(
        cls,
        model: str | Path,
        settings: Mapping[str, object],
        publish: Callable[[EngineCoreOutputs], None],
        *,
        tokenizer: str | Path | None,
        seed: int | None,
        allow_download: bool,
    ) -> Self:
        """Loads ``model``, with ``tokenizer`` as the tokenizer of another model if given. See ``LLM`` for the rest."""
        config = engine_config(find_model_folder(model, allow_download=allow_download), settings)
        other = None if tokenizer is None else find_model_folder(tokenizer, allow_download=allow_download)
        folder = tokenizer_folder(config.model) if other is None else other
        loaded_tokenizer, params = ModelTokenizer.load(folder), _default_params(config.model)
        executor = load_executor(config)
        try:
            return cls._around(
                executor, config, publish, loaded_tokenizer, folder, default_params=params, other=other, seed=seed
            )
        except BaseException:
            executor.close()
            raise

    @classmethod
    def _around(
        cls,
        executor: "TorchExecutor",
        config: EngineConfig,
        publish: Callable[[EngineCoreOutputs], None],
        tokenizer: ModelTokenizer,
        folder: Path,
        *,
        default_params: SamplingParams,
        other: Path | None,
        seed: int | None,
    ) -> Self:
        """Returns the engine of ``executor``. ``other`` is the folder of ``tokenizer`` if it is another model's. Raises
        ``ModelError`` if the tokenizer has more tokens than the model.
        """
        size = executor.config.vocab_size
        if other is not None and tokenizer.vocab_size > size:
            raise ModelError(
                f"{other} is not a tokenizer of this model: it has {tokenizer.vocab_size} tokens, and the model {size}."
            )
        scheduler = make_scheduler(config, executor)
        random = SystemRandom() if seed is None else Random(seed)  # noqa: S311 - it draws tokens, not keys
        grammars = make_grammar_compiler(config, executor, other)
        seeds = partial(random.getrandbits, 64)
        requests = InputProcessor(tokenizer, scheduler, seeds, grammars, executor.check_lora)
        core = EngineCore(scheduler, executor, publish)
        return cls(tokenizer, folder, executor, core, grammars, requests, default_params)

    def load_transformers_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer as transformers loads it. Downloads nothing and runs no code of a folder."""
        from transformers import AutoTokenizer  # importing it takes a second

        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.tokenizer_folder, local_files_only=True)
        return loaded

    def close(self) -> None:
        """Frees the model's memory. No step may be running."""
        self.grammars.close()
        self.executor.close()


def _default_params(model: Path) -> SamplingParams:
    """Returns the sampling parameters that the model's folder recommends, with defaults for the rest. Raises
    ``ModelError``.
    """
    try:
        return SamplingParams(**recommended_sampling(model))
    except ValueError as error:
        raise ModelError(str(error)) from None


def engine_config(model: Path, settings: Mapping[str, object]) -> EngineConfig:
    """Returns the checked settings. Settings that are missing or None come from ``QUIRE_ENGINE_…`` in the environment,
    or are the defaults. Raises ``QuireError`` INVALID that names the first wrong one.
    """
    for name in settings:
        if name not in LLM_SETTINGS:
            instead = EngineConfig.foreign_flags.get(f"--{name.replace('_', '-')}")
            raise invalid(name, f"LLM has no setting named {name}{f': {instead}' if instead else ''}.")
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        return EngineConfig.model_validate({"model": model, **given})
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0]) if problem["loc"] else "settings"
        raise invalid(name, f"{name}: {problem['msg']}.") from None
