"""Whether and how a model pools prompts, according to its folder: ``config.json``, and the modules of
sentence-transformers (``modules.json``, ``1_Pooling/config.json``, ``2_Normalize``). Without torch, because the model
fetcher uses it too.

The settings have vLLM's names: ``--runner`` says whether the model generates or pools, and ``--convert`` the task to
which a model that was made for another one is converted.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_proto.pooling import Task

from quire_engine.checkpoint.architecture import GENERATING_FORMS, architecture_of
from quire_engine.checkpoint.config import config_path, is_positive_int, read_json, read_json_value
from quire_engine.core.pooling import PoolerConfig, PoolingType
from quire_engine.errors import ModelError

if TYPE_CHECKING:  # takes 0.25 s, and a model's fetcher needs only one name of this module
    from quire_engine.config import ExecutorConfig

MODULES_FILE, LENGTH_FILE = "modules.json", "sentence_bert_config.json"
_CLASSIFIES = "ForSequenceClassification"
_POOLING_MODES = {"lasttoken": PoolingType.LAST, "mean": PoolingType.MEAN, "cls": PoolingType.CLS}
_LEGACY_MODES = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""How sentence-transformers wrote a pooling mode before version 5."""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The settings of ``modules.json``: which hidden states are pooled, whether embeddings are normalised, and
    ``score_tokens``. A model that scores like a generating model (``LogitScore``) compares the logits of these tokens:
    the one for a relevant document and, optionally, the one for an irrelevant document.
    """

    pooling_type: PoolingType | None = None
    normalizes: bool = False
    score_tokens: tuple[int, ...] = ()


def read_pooler_config(folder: Path, raw: dict[str, Any], settings: "ExecutorConfig") -> PoolerConfig | None:
    """Returns how the model of ``folder`` pools prompts; None if it generates. ``raw`` is its ``config.json``. Raises
    ``ModelError`` for settings that do not fit the model, and for modules that are not supported.
    """
    path = config_path(folder)
    architecture = architecture_of(path, raw)
    modules = read_sentence_modules(folder)
    task = _task(path, architecture, modules, settings)
    if task is Task.GENERATE:
        return None
    if task is Task.CLASSIFY and not (architecture.endswith(_CLASSIFIES) or (modules and modules.score_tokens)):
        raise ModelError(f"{path} names {architecture}, which has no layer that classifies: take --convert embed.")
    given = settings.pooling_type
    if given != "auto":
        pooling_type = PoolingType(given)
    elif modules is not None and modules.pooling_type is not None:
        pooling_type = modules.pooling_type
    else:
        pooling_type = PoolingType.LAST if is_causal(raw) else PoolingType.CLS
    if task is Task.CLASSIFY:
        return PoolerConfig(task, pooling_type, _activates_scores(raw), num_labels(path, raw, modules))
    size: Any = raw.get("hidden_size") or raw.get("n_embd") or raw.get("d_model") or raw.get("dim")
    if not is_positive_int(size):
        raise ModelError(f"{path} has no hidden_size.")
    normalizes = modules is None or modules.normalizes
    return PoolerConfig(task, pooling_type, normalizes, int(size), _matryoshka_dimensions(path, raw))


def read_sentence_modules(folder: Path) -> SentenceModules | None:
    """Returns the settings in the folder's ``modules.json``; None if it has none. Raises ``ModelError`` for unsupported
    modules.
    """
    path = folder / MODULES_FILE
    if not path.is_file():
        return None
    pooling_type, normalizes = None, False
    score_tokens: tuple[int, ...] = ()
    for module in _entries(path):
        kind, place = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if kind == "Pooling":
            pooling_type = _pooling_type(place / "config.json")
        elif kind == "Normalize":
            normalizes = True
        elif kind == "LogitScore":
            score_tokens = _score_tokens(place / "config.json")
        elif kind != "Transformer":
            raise ModelError(f"{path} has a module {kind or module.get('type')!r}, which is not run here.")
    return SentenceModules(pooling_type, normalizes, score_tokens)


def max_seq_length(folder: Path, length: int) -> int:
    """Returns the longest prompt, in tokens, that a model of ``length`` pools. sentence-transformers' folders may set a
    shorter one. Raises ``ModelError``.
    """
    path = folder / LENGTH_FILE
    given = read_json(path).get("max_seq_length") if path.is_file() else None
    if given is not None and not is_positive_int(given):
        raise ModelError(f"{path} says that max_seq_length is {given!r}, and it must be a whole number above 0.")
    return length if given is None else min(length, given)


def is_causal(raw: dict[str, Any]) -> bool:
    """Whether ``config.json`` describes a decoder, in which a token attends only to earlier ones. Encoders are
    recognised by their token types or their model type.
    """
    if raw.get("is_causal") is False or raw.get("use_bidirectional_attention"):
        return False
    return "type_vocab_size" not in raw and raw.get("model_type") not in _ENCODERS


_ENCODERS = ("modernbert", "distilbert", "bert", "roberta", "xlm-roberta", "electra", "camembert", "eurobert")


def num_labels(path: Path, raw: dict[str, Any], modules: SentenceModules | None = None) -> int:
    """Returns the number of classes of a classifier; transformers' default is two. Raises ``ModelError``."""
    if modules is not None and modules.score_tokens:
        return 1
    labels = raw.get("id2label")
    count = len(labels) if isinstance(labels, dict) else raw.get("num_labels", 2)
    if not is_positive_int(count):
        raise ModelError(f"{path} says that num_labels is {count!r}, and it must be a whole number above 0.")
    return int(count)


def _task(path: Path, architecture: str, modules: SentenceModules | None, settings: "ExecutorConfig") -> Task:
    """Returns the engine's task, from its settings and from the task that the model was made for."""
    generates, runner, convert = architecture.endswith(GENERATING_FORMS), settings.runner, settings.convert
    if runner == "auto":
        made_for_pooling = not generates or modules is not None
        pools = convert in ("embed", "classify") or (made_for_pooling and convert == "auto") or not generates
        runner = "pooling" if pools else "generate"
    if runner == "generate":
        if not generates:
            raise ModelError(f"{path} names {architecture}, which makes no text: leave --runner generate out.")
        return Task.GENERATE
    if convert in ("embed", "classify"):
        return Task(convert)
    scores = architecture.endswith(_CLASSIFIES) or bool(modules and modules.score_tokens)
    return Task.CLASSIFY if scores else Task.EMBED


def _entries(path: Path) -> list[dict[str, Any]]:
    value = read_json_value(path)
    if not isinstance(value, list) or not all(isinstance(module, dict) for module in value):
        raise ModelError(f"{path} is not a list of modules.")
    return list(value)


def _pooling_type(path: Path) -> PoolingType:
    config = read_json(path)
    modes = config.get("pooling_mode") or [name for key, name in _LEGACY_MODES.items() if config.get(key)]
    names = [modes] if isinstance(modes, str) else list(modes)
    if len(names) != 1 or names[0] not in _POOLING_MODES:
        known = ", ".join(_POOLING_MODES)
        raise ModelError(f"{path} pools by {' and '.join(map(str, names)) or 'nothing'}, and known are {known}.")
    if config.get("include_prompt") is False:
        raise ModelError(f"{path} leaves prompts out of what is pooled (include_prompt), which is not done here.")
    return _POOLING_MODES[names[0]]


def _score_tokens(path: Path) -> tuple[int, ...]:
    config = read_json(path)
    tokens = [config.get("true_token_id"), config.get("false_token_id")]
    given = tuple(token for token in tokens if token is not None)
    if tokens[0] is None or not all(isinstance(token, int) and token >= 0 for token in given):
        raise ModelError(f"{path} names no token for a document that is relevant (true_token_id).")
    return given


def _activates_scores(raw: dict[str, Any]) -> bool:
    """Whether scores become probabilities unless a request overrides it. False if sentence-transformers' cross encoder
    says that scores stay as they are.
    """
    own = raw.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or raw.get("sbert_ce_default_activation_function")
    return not (isinstance(named, str) and named.endswith("Identity"))


def _matryoshka_dimensions(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    listed = raw.get("matryoshka_dimensions") or ()
    if not isinstance(listed, list | tuple) or not all(map(is_positive_int, listed)):
        raise ModelError(f"{path} has matryoshka_dimensions that are not a list of whole numbers above 0.")
    return tuple(sorted(listed))
