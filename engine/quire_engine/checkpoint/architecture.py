"""The class that runs a ``config.json``, chosen by its ``architectures`` and its ``model_type``.

``architectures`` may be missing, or may name a class of code in the folder (``auto_map``), which is never run. Then the
class of the model type is used, as in transformers with ``trust_remote_code=False``.
"""

import logging
from pathlib import Path
from typing import Any

from quire_engine.errors import ModelError
from quire_engine.models.registry import ARCHITECTURES, Architecture, registered_name

log = logging.getLogger(__name__)

_OWN_CLASSES = {own.model_type: name for name, own in ARCHITECTURES.items()}
GENERATING_FORMS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ModelWithLMHead", "Decoder")
"""Suffixes of the names of classes that generate text."""


def architecture_of(path: Path, raw: dict[str, Any]) -> str:
    """Returns the name of the model's class. Raises ``ModelError`` if there is none."""
    names = _listed(raw)
    if not names:
        raise ModelError(f"{path} names no architecture, and no model_type that is known: add one of them.")
    return names[0]


def with_served_class(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns ``raw`` with one architecture. Finds it without transformers if possible, because that takes seconds to
    import; asks transformers if only a model type is named.

    Removes ``auto_map`` if a native class serves the model, and keeps it otherwise.
    """
    names, model_type = _listed(raw), raw.get("model_type")
    if model_type == "mistral" and "layer_types" in raw:  # transformers reads such a file as Ministral's
        raw, model_type, names = {**raw, "model_type": "ministral"}, "ministral", ["MinistralForCausalLM"]
    name = _own_class(names, model_type) or next(iter(names), None) or _class_of_type(path.parent, model_type)
    if name is None:
        refuse_code(path, raw)
        return raw
    made = {**raw, "architectures": [name]}
    own = own_architecture(name)
    if own is not None and made.get("model_type", own.model_type) == own.model_type and made.pop("auto_map", None):
        log.info("%s names code (auto_map), which is not run: the model runs as %s", path, name)
    return made


def refuse_code(path: Path, raw: dict[str, Any]) -> None:
    """Raises ``ModelError`` if a model of unknown class brings its own code."""
    if raw.get("auto_map"):
        name = next(iter(_listed(raw)), "a model")
        raise ModelError(
            f"{path} has auto_map, but code from a model folder is never run, and no other class serves {name} of type "
            f"{raw.get('model_type')!r}."
        )


def own_architecture(architecture: str) -> Architecture | None:
    """Returns the registry's entry for an architecture, also for its pooling forms; None without a
    native class.
    """
    name = registered_name(architecture)
    return None if name is None else ARCHITECTURES[name]


def _listed(raw: dict[str, Any]) -> list[str]:
    """Returns the names in ``architectures``. Some files have it as a string, and others with nulls."""
    names = raw.get("architectures")
    return [name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str) and name]


def _own_class(names: list[str], model_type: object) -> str | None:
    """Returns the native class for a model type: the first of ``names`` that is a form of it, or the generating
    class if all names are generating classes. None without a native class, or if a name contradicts it.
    """
    own = _OWN_CLASSES.get(model_type) if isinstance(model_type, str) else None
    named = next((name for name in names if (each := own_architecture(name)) and each.model_type == model_type), None)
    if own is None or named is not None:
        return named
    return own if all(name.endswith(GENERATING_FORMS) for name in names) else None


def _class_of_type(folder: Path, model_type: object) -> str | None:
    """Returns transformers' class for a model type: the body alone if sentence-transformers' modules pool it, else the
    class that generates text. None if there is none.
    """
    if not isinstance(model_type, str):
        return None
    from transformers.models.auto import modeling_auto as auto

    if (folder / "modules.json").is_file():
        body: str | None = auto.MODEL_MAPPING_NAMES.get(model_type)
        return body
    named: str | None = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return named or auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
