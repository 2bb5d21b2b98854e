"""What a user types for a model, read: ``ORG/NAME``, ``ORG/NAME@REVISION``, ``ORG/NAME:FILE.gguf``,
``s3://BUCKET/PREFIX``, ``oci://REGISTRY/REPOSITORY:TAG`` and the others.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire_proto.folders import no_such_path
from quire_proto.logs import one_line

Say = Callable[[str], None]
"""Called with a line about what takes long."""
EXAMPLE = "Qwen/Qwen3-0.6B"
_PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
_HUB_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^@:\s]+))?(?::(?P<file>[^:\s]+))?")
_BUCKET = re.compile(r"[A-Za-z0-9][\w.-]*")
_REPOSITORY = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_OCI_NAME = re.compile(
    rf"(?P<registry>[A-Za-z0-9][\w.-]*(?::\d+)?)/(?P<repository>{_REPOSITORY}(?:/{_REPOSITORY})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_SHOWN = 200  # characters of a text that names nothing
_MAX_SERVED = 128  # characters of a name that clients ask for, as routers take it
_HUB_PREFIXES = ("hf://", "https://huggingface.co/", "https://hf.co/")


class ModelNotFoundError(Exception):
    """No model can be served. The text is one sentence that says what to do instead; what servers say in it cannot
    change a terminal.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(one_line(sentence))


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the Hub: ``repo`` is ``ORG/NAME``, ``revision`` a branch, a tag or a commit, and ``file`` names a
    GGUF file or its quantisation (``Q4_K_M``).
    """

    repo: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        """As it was typed."""
        revision, file = self.revision and f"@{self.revision}", self.file and f":{self.file}"
        return f"{self.repo}{revision or ''}{file or ''}"


@dataclass(frozen=True, slots=True)
class S3Name:
    """A folder of a bucket in object storage; ``prefix`` is empty for the bucket itself."""

    bucket: str
    prefix: str = ""

    @property
    def served(self) -> str:
        """What clients call it: the folder's name."""
        return served_name(self.prefix.rpartition("/")[2] or self.bucket)

    def __str__(self) -> str:
        """As it was typed."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


@dataclass(frozen=True, slots=True)
class OciName:
    """An artifact in a registry. ``registry`` is a host with its port; a ``digest`` counts more than the tag."""

    registry: str
    repository: str
    tag: str = "latest"
    digest: str | None = None

    @property
    def served(self) -> str:
        """What clients call it: the last part of the repository."""
        return self.repository.rpartition("/")[2]

    def __str__(self) -> str:
        """As it was typed, with a tag."""
        return f"oci://{self.registry}/{self.repository}{f'@{self.digest}' if self.digest else f':{self.tag}'}"


def read_name(text: str) -> Path | HubName | S3Name | OciName:
    """The local path, the repository of the Hub or of a registry, or the bucket that ``text`` names. What exists here
    is a path. Raises ``ModelNotFoundError`` for what is nothing of these.
    """
    try:
        path = Path(text).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # too long, or in a folder that may not be read; ~ of nobody
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise ModelNotFoundError(f"{text[:_SHOWN]!r} cannot be looked up: {reason}.") from None
    for prefix in _HUB_PREFIXES:
        text = text.removeprefix(prefix)
    if "://" in text:
        return _read_address(text)
    text = text.rstrip("/")
    found = _HUB_NAME.fullmatch(text)
    if found is None or text.startswith((".", "~", "/")) or _is_file_path(text):
        raise ModelNotFoundError(
            f"{text!r} names no model: {no_such_path(text)}, and names on the Hugging Face Hub are ORG/NAME, such as "
            f"{EXAMPLE}."
        )
    return HubName(found["repo"], found["revision"], found["file"])


def served_name(text: str) -> str:
    """What clients call a folder or file of this name: with "-" for what a model's name cannot have, such as spaces."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:_MAX_SERVED] or "model"


def _read_address(text: str) -> S3Name | OciName:
    scheme, _, rest = text.partition("://")
    if scheme == "oci":
        found = _OCI_NAME.fullmatch(rest)
        if found is None:
            raise ModelNotFoundError(f"{text!r} names nothing in a registry: write oci://REGISTRY/REPOSITORY:TAG.")
        return OciName(found["registry"], found["repository"], found["tag"] or "latest", found["digest"])
    if scheme != "s3":
        raise ModelNotFoundError(
            f"{scheme}:// is not read: copy the model here with the tool of that storage, and name its folder."
        )
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket) or "" in prefix.split("/")[1:] or {".", ".."} & set(prefix.split("/")):
        raise ModelNotFoundError(f"{text!r} names no folder of a bucket: write s3://BUCKET/PREFIX.")
    if text.endswith(".gguf"):
        raise ModelNotFoundError(
            f"{text} is a GGUF file, which is read from a disk only: copy it here, and name the file."
        )
    return S3Name(bucket, prefix)


def _is_file_path(text: str) -> bool:
    return text.endswith(".gguf") and ":" not in text
