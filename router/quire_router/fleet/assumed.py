"""What a model's engines are taken to be able to do before the first of them has told."""

from collections.abc import Mapping
from pathlib import Path

from quire_proto.text.vocabulary import read_config

from quire_router.fleet.limits import ServedModelLimits


def assumed_limits(models: Mapping[str, Path]) -> dict[str, ServedModelLimits]:
    """The limits of each model by its folder's ``config.json``, where that says them: so a request can wait for the
    first engine of a fleet that was scaled to zero, instead of being refused because nobody knows its limits.
    """
    found = ((name, _limits(folder)) for name, folder in models.items())
    return {name: limits for name, limits in found if limits is not None}


def _limits(folder: Path) -> ServedModelLimits | None:
    config = read_config(folder)
    length, vocabulary = config.get("max_position_embeddings"), config.get("vocab_size")
    if not (type(length) is int and type(vocabulary) is int and length > 0 and vocabulary > 0):
        return None
    return ServedModelLimits(max_model_len=length, vocab_size=vocabulary)
