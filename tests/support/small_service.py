"""A process for tests of those that start and stop processes: it answers health probes, and ends as it was asked to.

``python -m tests.support.small_service '{"port": 1234, …}'``; the fields are those of ``Behaviour``.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Behaviour:
    port: int  # where it answers 200, or 503 while it is not ``ready``
    ready: bool = True
    says: str = ""  # a line, when it begins
    status: int | None = None  # it ends with this before it listens; below zero: by that signal
    only_first: str = ""  # a file: what comes before holds from the second start on
    linger: float = 0.0  # seconds from SIGTERM to its end
    stubborn: bool = False  # it does not hear SIGTERM

    def arguments(self) -> list[str]:
        return [json.dumps(asdict(self))]


class Health(BaseHTTPRequestHandler):
    ready = True

    def do_GET(self) -> None:
        self.send_response(200 if self.ready else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    behaviour = Behaviour(**json.loads(sys.argv[1]))
    first = bool(behaviour.only_first) and not Path(behaviour.only_first).exists()
    if behaviour.only_first:
        Path(behaviour.only_first).touch()
    print("began", flush=True)
    if behaviour.says:
        print(behaviour.says, flush=True)
    if behaviour.status is not None and not first:
        print("cannot", flush=True)
        if behaviour.status < 0:
            os.kill(os.getpid(), -behaviour.status)
        sys.exit(behaviour.status)

    def end(*_: object) -> None:
        if not behaviour.stubborn:
            time.sleep(behaviour.linger)
            print("ended", flush=True)
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
    Health.ready = behaviour.ready
    ThreadingHTTPServer(("127.0.0.1", behaviour.port), Health).serve_forever()


if __name__ == "__main__":
    main()
