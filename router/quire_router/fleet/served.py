"""Which of an engine's names this router believes, and why an engine gets no requests. Does no I/O but log."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.v1 import engine_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of one model as this router knows them: their digest (``quire_proto.text.vocabulary``), and the folder
    that they were read from.
    """

    folder: Path
    digest: bytes


class Served:
    """``models`` are the names that requests can ask for. An engine that reads other tokens than this router writes
    would answer with nonsense, so it does not serve a model whose ``vocabularies`` entry is not its own; one that does
    not tell is taken at its word.
    """

    def __init__(self, models: Iterable[str], vocabularies: Mapping[str, Vocabulary] | None = None) -> None:
        self._models = tuple(models)
        self._vocabularies = dict(vocabularies or {})

    def names_of(self, address: str, description: engine_pb2.DescribeResponse) -> frozenset[str]:
        """The names under which the engine at ``address`` gets requests. Logs when that is none that are configured."""
        told = description.served_model_names
        if not any(model in told for model in self._models):
            log.warning(
                "engine %s serves %s, which this router does not (it serves %s): it gets no requests",
                address,
                _quoted(told),
                _quoted(self._models),
            )
        return frozenset(name for name in told if self._agrees(address, name, description.tokenizer_digest))

    def _agrees(self, address: str, name: str, digest: bytes) -> bool:
        own = self._vocabularies.get(name)
        if own is None or not digest or digest == own.digest:
            return True
        log.error(
            "engine %s serves %r with another tokenizer than the one in %s: it gets no requests for that model, "
            "because tokens would be read as other text",
            address,
            name,
            own.folder,
        )
        return False


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
