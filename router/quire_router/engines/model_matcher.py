"""Which engine serves which of the configured models: ``ModelIdentity``, what a router knows of one, and
``ModelMatcher``, which compares it with what engines say of themselves.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from quire.v1 import engine_pb2
from quire_proto.text.model_folder import folder_config_digest, read_config

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """One model as this router knows it, from its ``folder``: the digest of its tokens and that of its configuration
    (``quire_proto.text.tokenizer``), and the size of its vocabulary by the configuration. Empty and 0 where the folder
    does not have them.
    """

    folder: Path
    digest: bytes
    config_digest: bytes = b""
    size: int = 0

    @classmethod
    def of(cls, folder: Path, digest: bytes) -> Self:
        """What the folder's ``config.json`` adds to the ``digest`` of its tokens."""
        size = read_config(folder).get("vocab_size")
        return cls(folder, digest, folder_config_digest(folder), size if type(size) is int and size > 0 else 0)

    def difference(self, description: engine_pb2.DescribeResponse) -> str:
        """Returns what an engine has another of; empty if it has the same, as far as both are known."""
        if description.tokenizer_digest and description.tokenizer_digest != self.digest:
            return "another tokenizer"
        if self.size and description.vocab_size and description.vocab_size != self.size:
            return f"a vocabulary of {description.vocab_size} tokens, which is another one"
        if self.config_digest and description.config_digest and description.config_digest != self.config_digest:
            return "a model of another architecture or size"
        return ""


class ModelMatcher:
    """``models`` are the names that requests can ask for. An engine that reads other tokens than this router writes
    would answer with nonsense, and one with another model differently from its replicas. So an engine does not serve a
    model whose ``vocabularies`` entry differs from what the engine describes. A missing digest is not compared.
    """

    def __init__(self, models: Iterable[str], vocabularies: Mapping[str, ModelIdentity] | None = None) -> None:
        self._models = tuple(models)
        self._vocabularies = dict(vocabularies or {})

    def matching_names(self, address: str, description: engine_pb2.DescribeResponse) -> frozenset[str]:
        """The names under which the engine at ``address`` gets requests. Logs when that is none that are configured."""
        names = description.served_model_names
        if not any(model in names for model in self._models):
            log.warning(
                "engine %s serves %s, which this router does not (it serves %s): it gets no requests",
                address,
                _quoted(names),
                _quoted(self._models),
            )
        return frozenset(name for name in names if self._matches(address, name, description))

    def _matches(self, address: str, name: str, description: engine_pb2.DescribeResponse) -> bool:
        own = self._vocabularies.get(name)
        difference = "" if own is None else own.difference(description)
        if own is None or not difference:
            return True
        log.error(
            "engine %s serves %r with %s than the one in %s: it gets no requests for that model, "
            "because it would answer as another model",
            address,
            name,
            difference,
            own.folder,
        )
        return False


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
