"""What a model's engines are taken to be able to do before the first of them has told. Knows no engine."""

import json
from collections.abc import Mapping
from pathlib import Path

from quire_router.fleet.limits import ModelLimits

_MOST_BYTES = 1 << 20


def assumed_limits(models: Mapping[str, Path]) -> dict[str, ModelLimits]:
    """The limits of each model by its folder's ``config.json``, where that says them: so a request can wait for the
    first engine of a fleet that was scaled to zero, instead of being refused because nobody knows its limits.
    """
    found = ((name, _read(folder / "config.json")) for name, folder in models.items())
    return {name: limits for name, limits in found if limits is not None}


def _read(path: Path) -> ModelLimits | None:
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_MOST_BYTES))
        length, vocabulary = config["max_position_embeddings"], config["vocab_size"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if not (type(length) is int and type(vocabulary) is int and length > 0 and vocabulary > 0):
        return None
    return ModelLimits(max_model_len=length, vocab_size=vocabulary)
