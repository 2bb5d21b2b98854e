"""Models in a registry of containers: ``oci://REGISTRY/REPOSITORY:TAG``, or ``@sha256:DIGEST``.

``oras`` makes the requests and finds credentials: what ``docker login`` wrote into ``~/.docker/config.json`` (or the
folder that ``DOCKER_CONFIG`` names), and its helpers. A manifest is read whose layers are files as they are: an
artifact of ORAS, where ``org.opencontainers.image.title`` names each, or one of ModelPack with raw layers
(github.com/modelpack/model-spec). Each file is compared with its digest.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from quire_engine.errors import first_line
from quire_proto.extras import install_command
from quire_proto.names import shown

from quire_cli.model.copies import MAX_FILES, ConnectionCutError, Copy, RemoteFile
from quire_cli.model.name import ModelNotFoundError, OciName, Say

if TYPE_CHECKING:
    from requests import Response

BLOCK = 1 << 20  # bytes
MAX_ANSWER = 4 << 20  # bytes of a manifest, a token or a list of tags, as registries bound manifests
MAX_CHOICES = 12
TIMEOUT = (5.0, 30.0)  # seconds to connect, and between two packets
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
TITLE, UNPACK = "org.opencontainers.image.title", "io.deis.oras.content.unpack"
MODEL_PATHS = ("org.cncf.model.filepath", "org.cnai.model.filepath")  # the specification had the second name first
MODEL_LAYERS = ("application/vnd.cncf.model.", "application/vnd.cnai.model.")
READ = "read are artifacts of ORAS, one file a layer, and of ModelPack with raw layers"


def open_oci(name: OciName, say: Say) -> Copy:
    """What ``name`` is now, and its copy here. Raises ``ModelNotFoundError``."""
    return Copy(name, OciSource(name), "oci", name.registry, say)


class OciSource:
    """The files of a manifest. On this machine itself, a registry is asked by plain HTTP, as Docker does."""

    def __init__(self, name: OciName) -> None:
        try:
            from oras.container import Container
            from oras.logger import logger
        except ImportError:
            raise ModelNotFoundError(f"{name} needs oras: {install_command('quire-llm', 'oci')}.") from None
        logger.set_level(logging.CRITICAL)  # it would print what is told here in one sentence
        self._name, self._renewing = name, Lock()
        self._container = Container(f"{name.repository}:{name.tag}", name.registry)

    @cached_property
    def _registry(self) -> Any:
        return _client(self._name)

    def files(self) -> list[RemoteFile]:
        """The files that layers are. Raises ``ModelNotFoundError`` and ``ConnectionCutError``."""
        manifest = self._manifest()
        layers = manifest.get("layers")
        if not isinstance(layers, list):
            raise ModelNotFoundError(f"{self._name} is an index of several images, not a model: {READ}.")
        if len(layers) > MAX_FILES:
            raise ModelNotFoundError(f"{self._name} has {len(layers)} layers, and at most {MAX_FILES} are read.")
        found = [file for layer in layers if (file := _file(layer))]
        if not found:
            raise ModelNotFoundError(f"{self._name} is {_kind(layers)}: {READ} (modctl build --raw, oras push).")
        return found

    def read(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """The bytes of ``file`` from ``start`` on. Raises as ``files`` does."""
        headers = {"Range": f"bytes={start}-{file.size - 1}"} if start else {}
        with self._explained(), self._get(self._container.get_blob_url(file.tag), headers, stream=True) as answer:
            self._check(answer)
            skipped = start if answer.status_code == 200 else 0  # a registry need not know of ranges
            for block in answer.iter_content(BLOCK):
                rest = block[skipped:]
                skipped -= len(block) - len(rest)
                yield rest

    def _manifest(self) -> dict[str, Any]:
        """The manifest, which has the digest of the name if that has one."""
        reference = self._name.digest or self._name.tag
        wanted = {"Accept": ", ".join(MANIFESTS)}
        with self._explained(), self._get(self._container.manifest_url(reference), wanted) as answer:
            if answer.status_code == 404:
                raise ModelNotFoundError(self._unknown())
            self._check(answer)
            content = answer.content
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if self._name.digest not in (None, digest):
            raise ModelNotFoundError(
                f"{self._name.registry} answered for {self._name} with {digest}: check the registry."
            )
        try:
            manifest = json.loads(content)
        except (ValueError, RecursionError):
            manifest = None
        if not isinstance(manifest, dict):
            raise ModelNotFoundError(f"{self._name.registry} is not a container registry: check the name.")
        return manifest

    def _get(self, address: str, headers: dict[str, str], *, stream: bool = False) -> "Response":
        url = f"{self._registry.prefix}://{address}"
        auth = self._registry.auth
        token = getattr(auth, "token", None)
        answer = self._registry.do_request(url, headers=dict(headers), stream=stream)
        if answer.status_code == 401 and token:  # it is valid for minutes, and a download may take longer
            answer.close()
            with self._renewing:
                if auth.token == token:  # otherwise another thread has renewed it
                    auth.token = None
            answer = self._registry.do_request(url, headers=dict(headers), stream=stream)
        return answer

    def _check(self, answer: "Response") -> None:
        registry, status = self._name.registry, answer.status_code
        if status in (401, 403):
            raise ModelNotFoundError(self._no_access())
        if status == 404:
            raise ModelNotFoundError(f"{self._name} lacks a layer of its manifest in {registry}: push it again.")
        if status == 429 or status >= 500:
            raise ConnectionCutError(
                f"{registry} cannot serve {self._name} (status {status}): start again later, or name a folder."
            )
        if status not in (200, 206):
            raise ModelNotFoundError(f"{registry} answered with status {status} for {self._name}: check the name.")

    def _no_access(self) -> str:
        registry = self._name.registry
        return f"{registry} allows no access to {self._name}: docker login {registry} with an account that may pull it."

    def _unknown(self) -> str:
        with self._get(self._container.tags_url(), {}) as answer:
            tags = answer.json().get("tags") if answer.status_code == 200 else None
        known = sorted(tag for tag in tags if isinstance(tag, str)) if isinstance(tags, list) else []
        advice = f"take {', '.join(map(shown, known[:MAX_CHOICES]))}" if known else "check the name"
        return f"There is no {self._name}: {advice}."

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What can go wrong, each in one sentence that says what to do."""
        import requests

        try:
            yield
        except requests.exceptions.RequestException as error:
            raise ConnectionCutError(
                f"{self._name.registry} cannot be reached ({_innermost(error)}): check the name and the network, start "
                "again, or name a folder."
            ) from None
        except _TooLongError:
            raise ModelNotFoundError(
                f"{self._name.registry} answers for {self._name} with more than {MAX_ANSWER >> 20} MiB, and no "
                "manifest is that long: check the registry."
            ) from None
        except (ValueError, AttributeError, RecursionError):  # so oras says that it has no credentials to offer
            raise ModelNotFoundError(self._no_access()) from None


def _client(name: OciName) -> Any:
    """A client of the registry, with the user's credentials for it, in the way that the registry asks for."""
    import requests
    from oras.provider import Registry
    from requests.adapters import HTTPAdapter

    class Impatient(HTTPAdapter):  # type: ignore[misc]
        """Waits for no answer without an end, and reads no more of one than is asked for."""

        def send(self, *args: Any, **options: Any) -> Any:
            answer = super().send(*args, **{**options, "timeout": options.get("timeout") or TIMEOUT})
            if not options.get("stream"):
                answer.raw = _BoundedBody(answer.raw)
            return answer

    class OneRequest(Registry):  # type: ignore[misc]
        """Without the repetitions of ``oras``, whose pauses take minutes without an answer."""

        do_request = Registry.do_request.__wrapped__

    insecure = _is_local(name.registry)
    ping = f"{'http' if insecure else 'https'}://{name.registry}/v2/"
    with requests.get(ping, timeout=TIMEOUT, stream=True) as answer:
        wants_password = answer.headers.get("WWW-Authenticate", "").lower().startswith("basic")
    registry = OneRequest(name.registry, insecure=insecure, auth_backend="basic" if wants_password else "token")
    for scheme in ("http://", "https://"):
        registry.session.mount(scheme, Impatient())
    folder = os.environ.get("DOCKER_CONFIG")
    own = [str(path)] if folder and (path := Path(folder).expanduser() / "config.json").is_file() else []
    try:
        registry.auth.load_configs(registry.get_container(f"{name.registry}/x"), own)
    except (OSError, ValueError, AttributeError):
        raise ModelNotFoundError("Docker's config.json cannot be read: correct it, or set DOCKER_CONFIG.") from None
    return registry


class _TooLongError(Exception):
    """An answer that is read into memory has more than ``MAX_ANSWER`` bytes."""


class _BoundedBody:
    """The body of an answer that is read into memory. Raises ``_TooLongError``."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def stream(self, size: int, decode_content: bool = True) -> Iterator[bytes]:
        """Yields the body, as ``urllib3`` does."""
        left = MAX_ANSWER
        for block in self._body.stream(size, decode_content=decode_content):
            left -= len(block)
            if left < 0:
                raise _TooLongError
            yield block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


def _is_local(registry: str) -> bool:
    host = registry.rpartition(":")[0] if registry.rpartition(":")[2].isdigit() else registry
    return host == "localhost" or host.startswith("127.")


def _file(layer: Any) -> RemoteFile | None:
    """The file that a layer is; None if it is an archive, or has no name that a file of a model may have."""
    try:
        kind, digest, size = str(layer["mediaType"]), str(layer["digest"]), layer["size"]
        notes: Mapping[str, str] = layer.get("annotations") or {}
        algorithm, _, value = digest.partition(":")
        name = next((notes[key] for key in (*MODEL_PATHS, TITLE) if key in notes), None)
        packed = notes.get(UNPACK) == "true" or (kind.startswith(MODEL_LAYERS) and ".tar" in kind)
    except (KeyError, TypeError, AttributeError):
        return None
    if not name or packed or algorithm != "sha256":
        return None
    with suppress(ValueError):  # a model needs no file of another name
        return RemoteFile(str(name).removeprefix("./"), size, value, digest, sha256=value)
    return None


def _kind(layers: list[Any]) -> str:
    """What a manifest without files is, in words."""
    kinds = " ".join(str(layer.get("mediaType")) for layer in layers if isinstance(layer, dict))
    if "vnd.cncf.model" in kinds or "vnd.cnai.model" in kinds:
        return "a ModelPack artifact with packed layers"
    if "kitops" in kinds:
        return "a ModelKit of KitOps"
    if "vnd.docker.ai" in kinds or "ollama" in kinds:
        return "a model in GGUF for another server"
    return "an image of containers" if "image" in kinds else "no model"


def _innermost(error: BaseException) -> str:
    """The innermost cause, in a few words."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)[:120]
