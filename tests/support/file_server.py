"""What servers of models' files have in common: ranges, cut and held connections, and a count of all."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar
from urllib.parse import urlsplit

CHUNK = 1 << 16


class FileServer:
    """``sent`` counts bytes of files; ``pause`` holds a file back after so many bytes until it is cleared, and ``cut``
    closes connections after so many, once for each file. With ``status``, every request fails.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.sent: Counter[str] = Counter()
        self.requests: list[tuple[str, str, str | None]] = []
        self.pause: dict[str, int] = {}
        self.paused = threading.Event()
        self.resume = threading.Event()
        self.cut: dict[str, int] = {}
        self.status: int | None = None


_Server = TypeVar("_Server", bound=FileServer)


@contextmanager
def serve_files(make: Callable[[str], _Server], handler: type["FileHandler"]) -> Iterator[_Server]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    files = make(f"http://127.0.0.1:{server.server_address[1]}")
    server.files = files  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield files
    finally:
        files.resume.set()
        server.shutdown()
        server.server_close()
        thread.join()


class FileHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits 40 ms for its head's acknowledgement

    @property
    def files(self) -> FileServer:
        return self.server.files  # type: ignore[attr-defined, no-any-return]

    def do_HEAD(self) -> None:
        self._note()
        self.answer(head=True)

    def do_GET(self) -> None:
        self._note()
        self.answer(head=False)

    def answer(self, *, head: bool) -> None:
        raise NotImplementedError

    def _note(self) -> None:
        self.files.requests.append((self.command, urlsplit(self.path).path, self.headers.get("Range")))

    def send_file(self, content: bytes, name: str, head: bool, headers: dict[str, str] | None = None) -> None:
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if not head:
            self._send(content, start, name)

    def _send(self, content: bytes, start: int, name: str) -> None:
        cut = self.files.cut.pop(name, None)
        for at in range(start, len(content), CHUNK):
            pause = self.files.pause.get(name)
            if pause is not None and at >= pause:
                self.files.paused.set()
                self.files.resume.wait()
            if cut is not None and at >= cut:
                self.close_connection = True
                return
            part = content[at : at + CHUNK]
            try:
                self.wfile.write(part)
                self.wfile.flush()
            except OSError:  # the client has gone
                self.close_connection = True
                return
            self.files.sent[name] += len(part)

    def log_message(self, *_: object) -> None:
        pass
