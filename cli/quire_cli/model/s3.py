"""Models in object storage that speaks S3: ``s3://BUCKET/PREFIX``.

Requests are made by ``obstore`` (the Rust crate object_store), with its variables: ``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``, ``AWS_SKIP_SIGNATURE``; and the
credentials that EKS, ECS and EC2 give to what runs there. A file is asked for by its ETag, so that one which is
replaced meanwhile is never mixed with its older state.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire_proto.extras import install_command

from quire_cli.model.copies import MAX_FILES, ConnectionCutError, Copy, RemoteFile
from quire_cli.model.name import ModelNotFoundError, S3Name, Say

if TYPE_CHECKING:
    from obstore import ListResult
    from obstore.store import S3Store

BLOCK = 1 << 20  # bytes
MAX_CHOICES = 6
LISTING_SECONDS = 60.0
KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_CODE, _STATUS = re.compile(r"<Code>(\w+)</Code>"), re.compile(r"status code: (\d{3})")
_FROM_MACHINE = ("/latest/api/token", "/latest/meta-data", "/v2/credentials", "AssumeRole")


def open_s3(name: S3Name, say: Say) -> Copy:
    """The objects at ``name`` now, and their copy here. Raises ``ModelNotFoundError``."""
    endpoint = _endpoint()
    return Copy(name, S3Source(name, endpoint), "s3", endpoint or "", say)


class S3Source:
    """The files directly below a prefix of a bucket. ``endpoint`` is None for Amazon's own."""

    def __init__(self, name: S3Name, endpoint: str | None) -> None:
        try:
            import obstore
        except ImportError:
            raise ModelNotFoundError(f"{name} needs obstore: {install_command('quire-llm', 's3')}.") from None
        self._name, self._endpoint, self._obstore = name, endpoint, obstore
        with self._explained():
            self._store = self._connect()

    def _connect(self) -> "S3Store":
        from obstore.store import S3Store

        return S3Store(
            self._name.bucket,
            client_options={
                "allow_http": bool(self._endpoint and self._endpoint.startswith("http://")),
                "connect_timeout": timedelta(seconds=5),
                "read_timeout": timedelta(seconds=30),
                "timeout": timedelta(days=1),  # of a whole file
            },
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
        )

    def files(self) -> list[RemoteFile]:
        """The files below the prefix, folders apart. Raises ``ModelNotFoundError`` and ``ConnectionCutError``."""
        prefix = self._name.prefix
        with self._explained():
            found = self._list(prefix)
        listed = [_file(each, prefix) for each in found["objects"] if each["path"] != prefix]
        files = [each for each in listed if each is not None]
        if not files:
            raise ModelNotFoundError(self._nothing([path.rpartition("/")[2] for path in found["common_prefixes"]]))
        return files

    def _list(self, prefix: str) -> "ListResult[Any]":
        """Lists on a thread that ends with the process: a server may have one more page for ever."""
        listing: Future[Any] = Future()

        def run() -> None:
            try:
                listing.set_result(self._obstore.list_with_delimiter(self._store, prefix or None))
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is read
                listing.set_exception(error)

        Thread(target=run, name="s3 listing", daemon=True).start()
        try:
            found: ListResult[Any] = listing.result(LISTING_SECONDS)
        except TimeoutError:
            raise ModelNotFoundError(
                f"{self._name} was not listed within {LISTING_SECONDS:g} seconds: name the folder of one model."
            ) from None
        if len(found["objects"]) > MAX_FILES:
            raise ModelNotFoundError(f"{self._name} has more than {MAX_FILES} files: name the folder of one model.")
        return found

    def read(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """The bytes of ``file`` from ``start`` on. Raises as ``files`` does."""
        key = "/".join(part for part in (self._name.prefix, file.name) if part)
        with self._explained():
            wanted = {"range": {"offset": start}, "if_match": file.tag or None}
            found = self._obstore.get(self._store, key, options=wanted)  # type: ignore[arg-type]
            for block in found.stream(min_chunk_size=BLOCK):
                yield bytes(block)

    def _nothing(self, folders: list[str]) -> str:
        if folders:
            listed = ", ".join(folders[:MAX_CHOICES])
            return f"{self._name} has only folders ({listed}): name one of them, such as {self._below(folders[0])}."
        return f"There is nothing at {self._name}: check bucket and prefix, which is that of the folder of a model."

    def _below(self, folder: str) -> str:
        return str(S3Name(self._name.bucket, "/".join(part for part in (self._name.prefix, folder) if part)))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What can go wrong, each in one sentence that says what to do."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise self._refusal(str(error)) from None

    def _refusal(self, text: str) -> Exception:
        code, status = _CODE.search(text), _STATUS.search(text)
        where = self._endpoint or "Amazon S3"
        if any(part in text for part in _FROM_MACHINE):
            return ModelNotFoundError(
                f"No AWS credentials were found for {self._name}: {KEYS}, which `aws configure export-credentials "
                "--format env` prints, or AWS_SKIP_SIGNATURE=true for a public bucket."
            )
        if sentence := _SENTENCES.get(code[1] if code else ""):
            return ModelNotFoundError(sentence.format(name=self._name, bucket=self._name.bucket, where=where))
        if "incorrectly configured region" in text:
            return ModelNotFoundError(_REGION.format(bucket=self._name.bucket))
        if status and not status[1].startswith("5"):
            return ModelNotFoundError(
                f"{where} answered with status {status[1]}{f' ({code[1]})' if code else ''} for {self._name}: check "
                f"bucket, credentials and AWS_ENDPOINT_URL."
            )
        if "illegal character" in text or "Invalid path" in text:
            return ModelNotFoundError(f"{self._name} has a file whose name cannot be read: name another folder.")
        why = f"status {status[1]}" if status else "no connection"
        return ConnectionCutError(
            f"{where} cannot be reached ({why}): check the network and AWS_ENDPOINT_URL, start again, or name a folder."
        )


_REGION = "The bucket {bucket} is in another region: set AWS_REGION to it."
_CHANGED = "{name} has changed during the download: start again."
_SENTENCES = {
    "PreconditionFailed": _CHANGED,
    "NoSuchKey": _CHANGED,
    "NoSuchBucket": "There is no bucket {bucket} at {where}: check its name and AWS_ENDPOINT_URL.",
    "AccessDenied": f"{{where}} allows your credentials no access to {{name}}: {KEYS} of an account that may list "
    "and read it.",
    "InvalidAccessKeyId": f"{{where}} does not know your access key: {KEYS} to valid ones.",
    "SignatureDoesNotMatch": "The secret key does not belong to your access key: set AWS_SECRET_ACCESS_KEY to the "
    "right one.",
    "ExpiredToken": "Your AWS credentials have expired: log in again, and set AWS_SESSION_TOKEN and both keys anew.",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
}


def _file(found: Any, prefix: str) -> RemoteFile | None:
    """A file by name, size and ETag, which changes with the content; None for a name that no file of a model has."""
    name = found["path"].removeprefix(f"{prefix}/" if prefix else "")
    size, tag = found["size"], found["e_tag"] or ""
    blob = hashlib.sha256(f"{name}\n{size}\n{tag}".encode()).hexdigest()
    with suppress(ValueError):
        return RemoteFile(name, size, blob, tag)
    return None


def _endpoint() -> str | None:
    """The server's address; None is Amazon's. Raises ``ModelNotFoundError`` for what is none."""
    variable = next((each for each in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if os.environ.get(each)), None)
    if variable is None:
        return None
    url = os.environ[variable]
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
        good = parts.scheme in ("http", "https") and re.fullmatch(r"[\w.-]+|[0-9a-f:]+", host) is not None
    except ValueError:
        good = False
    if not good:
        raise ModelNotFoundError(
            f"{variable} is {url!r}, which is not an address: write one such as http://minio:9000."
        )
    return url
