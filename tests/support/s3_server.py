"""A server that speaks S3, as far as downloads need it: ListObjectsV2 in pages, GetObject by range and ETag, and the
errors of both. It knows one access key, and looks at no signature.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.file_server import FileHandler, FileServer, serve_files

ACCESS_KEY = "AKIAKNOWN"
STATUS = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "ExpiredToken": 400,
    "InvalidAccessKeyId": 403,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "PermanentRedirect": 301,
    "PreconditionFailed": 412,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
}


class S3Server(FileServer):
    """``url`` is for ``AWS_ENDPOINT_URL``. ``fail`` is the code of the error that every request gets."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.buckets: dict[str, dict[str, bytes]] = {}
        self.public: set[str] = set()
        self.page = 1000  # keys of an answer
        self.fail: str | None = None

    def add(self, bucket: str, prefix: str, files: dict[str, bytes]) -> dict[str, bytes]:
        """Uploads a folder. The console makes an empty object for the folder itself, too."""
        objects = self.buckets.setdefault(bucket, {})
        objects |= {f"{prefix}/{name}": content for name, content in files.items()} | {f"{prefix}/": b""}
        return objects


@contextmanager
def s3_server() -> Iterator[S3Server]:
    with serve_files(S3Server, _Handler) as server:
        yield server


class _Handler(FileHandler):
    @property
    def s3(self) -> S3Server:
        assert isinstance(self.files, S3Server)
        return self.files

    def answer(self, *, head: bool) -> None:
        bucket, _, key = unquote(urlsplit(self.path).path).strip("/").partition("/")
        authorization = self.headers.get("Authorization", "")
        objects = self.s3.buckets.get(bucket)
        if self.s3.fail:
            self._error(self.s3.fail)
        elif not authorization and bucket not in self.s3.public:
            self._error("AccessDenied")
        elif authorization and f"Credential={ACCESS_KEY}/" not in authorization:
            self._error("InvalidAccessKeyId")
        elif objects is None:
            self._error("NoSuchBucket")
        elif not key:
            self._list(objects)
        elif key not in objects:
            self._error("NoSuchKey")
        else:
            tag = _tag(objects[key])
            if self.headers.get("If-Match", tag) != tag:
                self._error("PreconditionFailed")
            else:
                dates = {"Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}
                self.send_file(objects[key], key.rpartition("/")[2], head, {"ETag": tag, **dates})

    def _list(self, objects: dict[str, bytes]) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        below = {key: key[len(prefix) :].partition("/") for key in objects if key.startswith(prefix)}
        found = sorted({f"{prefix}{name}{slash}" for name, slash, _ in below.values()} - {"" if prefix else "/"})
        page = [each for each in found if each > after][: self.s3.page]
        more = bool(page) and page[-1] != found[-1]
        parts = [f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>"]
        if more:
            parts.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        for each in page:
            if each.endswith("/") and each != prefix:
                parts.append(f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>")
            else:
                content = objects[each]
                parts.append(
                    f"<Contents><Key>{escape(each)}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{escape(_tag(content))}</ETag><Size>{len(content)}</Size></Contents>"
                )
        self._xml(200, f"<ListBucketResult>{''.join(parts)}</ListBucketResult>")

    def _error(self, code: str) -> None:
        self._xml(STATUS[code], f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")

    def _xml(self, status: int, text: str) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'
