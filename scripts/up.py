"""``make up``: Redis, engines and a router on this machine, until Ctrl-C.

Settings come from the environment: MODEL (a folder; the demo model by default), ENGINES (2), and the services' own
variables, of which QUIRE_ROUTER_HTTP_PORT, QUIRE_ROUTER_GRPC_PORT, QUIRE_ROUTER_METRICS_PORT, QUIRE_ENGINE_PORT and
QUIRE_ENGINE_METRICS_PORT move the ports. Engine number i listens 10 * i above the engines' ports. QUIRE_REDIS_PORT
moves Redis.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo" / "model"
DEMO_NAME = "quire-demo"
READY_TIMEOUT = 600.0
SLOW_START = 10.0  # seconds after which a start is worth an explanation
STOP_TIMEOUT = 8.0  # seconds that a process may take to end before it is killed
MAX_PORT = 65535
PRINTING = Lock()  # a line and its end are written apart
# Whatever proxy the environment names, these addresses are this machine's own.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class End(NamedTuple):
    """Why all of it is to end: the first program that did, or None where somebody asked for it, and the status."""

    program: str | None
    status: int

    def __str__(self) -> str:
        how = f"ended with status {self.status}" if self.status >= 0 else f"was killed by {signal_name(-self.status)}"
        memory = ", as the system does when memory runs out" if self.status == -signal.SIGKILL else ""
        return f"{self.program} {how}{memory}; the others are stopped"


class Program:
    """One started program, in a session of its own, so that a terminal's Ctrl-C does not reach it. Its output is
    printed; ``ended`` gets its name and its status when it ends.
    """

    def __init__(self, name: str, command: Sequence[str], ended: "SimpleQueue[End]") -> None:
        self.name = name
        self._ended = ended
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._watcher = Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the program and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait(self, timeout: float) -> bool:
        """Whether it ended in time and all of its output is printed."""
        self._watcher.join(timeout)
        return not self._watcher.is_alive()

    def _watch(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            say(line.rstrip("\n"), self.name)
        self._ended.put(End(self.name, self._process.wait()))


class Programs:
    """Programs that run together: when one ends, all do."""

    def __init__(self) -> None:
        self._programs: list[Program] = []
        self._ended: SimpleQueue[End] = SimpleQueue()  # may be put to by a signal's handler, which others may not

    def run(self, commands: Iterable[tuple[str, Sequence[str]]]) -> int:
        """Starts them, waits for ``stop`` or the first that ends, and ends the others; the status to exit with."""
        try:
            for name, command in commands:
                self._programs.append(Program(name, command, self._ended))
            end = self._ended.get()
            if end.program:
                say(str(end))
        finally:
            self._stop_all()
        return end.status if end.status >= 0 else 128 - end.status

    def stop(self, status: int) -> None:
        """Starts the shutdown. May be called from any thread or signal handler, and more than once."""
        self._ended.put(End(None, status))

    def _stop_all(self) -> None:
        """Stops the last one first, and those of one kind (engines) together. So a program outlives those that use it:
        a router drains while its engines and Redis still run.
        """
        for _, alike in groupby(reversed(self._programs), key=lambda program: program.name.partition("-")[0]):
            programs = list(alike)
            for program in programs:
                program.signal(signal.SIGTERM)
            end = time.monotonic() + STOP_TIMEOUT
            for program in programs:
                if not program.wait(max(0.0, end - time.monotonic())):
                    say(f"{program.name} does not end and is killed")
                    program.signal(signal.SIGKILL)


class Port(NamedTuple):
    """A port that is listened on: by whom, and which variable moves it."""

    number: int
    owner: str
    variable: str


@dataclass(frozen=True)
class Plan:
    """What is started, and where."""

    model: Path
    name: str
    engines: int
    http_port: int
    grpc_port: int
    metrics_port: int
    engine_ports: list[tuple[int, int]]
    redis_port: int | None

    @property
    def ports(self) -> list[Port]:
        """Every port that must be free."""
        router = [
            ("REST", "HTTP", self.http_port),
            ("gRPC", "GRPC", self.grpc_port),
            ("metrics", "METRICS", self.metrics_port),
        ]
        engines = [
            Port(port, f"engine {number}", variable)
            for number, pair in enumerate(self.engine_ports, 1)
            for port, variable in zip(pair, ("QUIRE_ENGINE_PORT", "QUIRE_ENGINE_METRICS_PORT"), strict=True)
        ]
        redis = [Port(self.redis_port, "Redis", "QUIRE_REDIS_PORT")] if self.redis_port else []
        return [
            *(Port(port, f"the router's {name}", f"QUIRE_ROUTER_{word}_PORT") for name, word, port in router),
            *engines,
            *redis,
        ]


def main() -> None:
    """Starts everything, says when it is ready, and stops everything."""
    plan = make_plan()
    refuse_busy_ports(plan)
    programs = Programs()
    run_dir = ROOT / ".run"
    run_dir.mkdir(exist_ok=True)
    # A closed terminal and Ctrl-\\ end everything just like Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, _: programs.stop(128 + number))
    Thread(target=announce, args=(plan, programs), daemon=True).start()
    status = programs.run(commands(plan, run_dir))
    say("stopped")
    sys.exit(status)


def make_plan() -> Plan:
    """The plan that the environment asks for. Exits with one sentence when it cannot be."""
    model = Path(os.environ.get("MODEL") or DEMO).expanduser().resolve()
    for file in ("config.json", "tokenizer.json"):
        if not (model / file).is_file():
            fail(f"{model} is not a model folder that can be served: it has no {file}.")
    name = os.environ.get("NAME") or (DEMO_NAME if model == DEMO else model.name)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        fail(
            f"{name!r} cannot name a model; give another with NAME=, of letters, digits, dots, dashes and underscores."
        )
    engines = number("ENGINES", 2)
    port, metrics_port = number("QUIRE_ENGINE_PORT", 9000), number("QUIRE_ENGINE_METRICS_PORT", 9002)
    return Plan(
        model=model,
        name=name,
        engines=engines,
        http_port=number("QUIRE_ROUTER_HTTP_PORT", 8000),
        grpc_port=number("QUIRE_ROUTER_GRPC_PORT", 8001),
        metrics_port=number("QUIRE_ROUTER_METRICS_PORT", 8002),
        engine_ports=[(port + 10 * i, metrics_port + 10 * i) for i in range(engines)],
        redis_port=number("QUIRE_REDIS_PORT", 6379) if have_redis() else None,
    )


def have_redis() -> bool:
    """Whether a Redis can be started; installs it where the machine lets us."""
    if os.environ.get("QUIRE_ROUTER_REDIS_URL"):
        return False
    if not shutil.which("redis-server"):
        subprocess.run([str(ROOT / "scripts" / "redis.sh")], check=False)
    if shutil.which("redis-server"):
        return True
    say("no redis-server: request state is kept in memory, and ends with the router")
    return False


def commands(plan: Plan, run_dir: Path) -> list[tuple[str, list[str]]]:
    """Name and command line of each process."""
    python = [sys.executable, "-m"]
    quiet = [*unless_set("ENGINE", "--log-level", "warning"), *unless_set("ENGINE", "--shutdown-timeout", "2")]
    # Several engines share this machine, so none of them takes what it finds.
    measured = bool(os.environ.get("QUIRE_ENGINE_GPU_MEMORY_UTILIZATION"))
    pool = [] if measured else unless_set("ENGINE", "--kv-cache-memory", str(1 << 29))
    started: list[tuple[str, list[str]]] = []
    if plan.redis_port:
        redis = f"redis-server --port {plan.redis_port} --bind 127.0.0.1 --save '' --appendonly yes --logfile redis.log"
        started.append(("redis", [*shlex.split(redis), "--dir", str(run_dir)]))
    for index, (port, metrics_port) in enumerate(plan.engine_ports, 1):
        where = ["--port", str(port), "--metrics-port", str(metrics_port)]
        what = ["--model", str(plan.model), "--served-model-name", plan.name]
        started.append((f"engine-{index}", [*python, "quire_engine.cli", *what, *where, *quiet, *pool]))
    router = [*python, "quire_router.main", "--model", f"{plan.name}={plan.model}"]
    router += [*unless_set("ROUTER", "--log-level", "warning"), *unless_set("ROUTER", "--shutdown-timeout", "2")]
    router += ["--http-port", str(plan.http_port), "--grpc-port", str(plan.grpc_port)]
    router += ["--metrics-port", str(plan.metrics_port)]
    for port, _ in plan.engine_ports:
        router += ["--engine", f"127.0.0.1:{port}"]
    if plan.redis_port:
        router += ["--redis-url", f"redis://127.0.0.1:{plan.redis_port}/0"]
    started.append(("router", router))
    return started


def unless_set(service: str, flag: str, value: str) -> list[str]:
    """A flag with its value, unless the service's own variable for it is set."""
    variable = f"QUIRE_{service}_{flag.removeprefix('--').replace('-', '_').upper()}"
    return [] if os.environ.get(variable) else [flag, value]


def announce(plan: Plan, programs: Programs) -> None:
    """Prints how far the start is, then how to try it."""
    begin, last, explained = time.monotonic(), -1, False
    while time.monotonic() - begin < READY_TIMEOUT:
        ready = sum(is_up(port) for _, port in plan.engine_ports)
        if not explained and time.monotonic() - begin > SLOW_START:
            say("the first time, engines build their kernels, which takes about a minute")
            explained = True
        if ready != last:
            say(f"{ready} of {plan.engines} engines ready after {time.monotonic() - begin:.0f} s")
            last = ready
        if ready == plan.engines and is_up(plan.http_port):
            say(how_to_try(plan))
            return
        time.sleep(0.25)
    say(f"not ready after {READY_TIMEOUT:.0f} s, stopping")
    programs.stop(1)


def how_to_try(plan: Plan) -> str:
    """A command that streams an answer."""
    chat = (plan.model / "chat_template.jinja").is_file() or "chat_template" in tokenizer_config(plan.model)
    body: dict[str, object] = {"model": plan.name, "stream": True, "temperature": 0}
    if chat:
        body["messages"] = [{"role": "user", "content": "What is 7 plus 5?"}]
    else:
        body |= {"prompt": "Once upon a time", "max_tokens": 64}
    route = "chat/completions" if chat else "completions"
    key = f'    -H "Authorization: Bearer {variable_of_key()}" \\\n' if os.environ.get("QUIRE_ROUTER_API_KEY") else ""
    return (
        f"ready: {plan.name} on http://127.0.0.1:{plan.http_port} (gRPC on {plan.grpc_port}); Ctrl-C stops it. Try\n\n"
        f"  curl -N http://127.0.0.1:{plan.http_port}/v1/{route} \\\n"
        f"    -H 'Content-Type: application/json' \\\n{key}"
        f"    -d '{json.dumps(body)}'\n"
    )


def variable_of_key() -> str:
    """A shell expression for the first of the keys, so that the key itself is not printed."""
    several = "," in os.environ["QUIRE_ROUTER_API_KEY"]
    return "${QUIRE_ROUTER_API_KEY%%,*}" if several else "$QUIRE_ROUTER_API_KEY"


def signal_name(number: int) -> str:
    """A signal as people call it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tokenizer_config(model: Path) -> dict[str, object]:
    """The model's tokenizer_config.json; empty when there is none."""
    path = model / "tokenizer_config.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def is_up(port: int) -> bool:
    """Whether the service's health probe says so."""
    try:
        with DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def refuse_busy_ports(plan: Plan) -> None:
    """Exits with one sentence when a port is taken or wanted twice: better than half a start."""
    owners: dict[int, str] = {}
    for port, owner, variable in plan.ports:
        if port > MAX_PORT:
            fail(f"Port {port}, for {owner}, does not exist; the highest is {MAX_PORT}.")
        if port in owners:
            fail(f"Port {port} is wanted twice: for {owners[port]} and for {owner}.")
        owners[port] = owner
        if not is_free(port):
            fail(f"Port {port} is in use, which {owner} needs; {variable} chooses another one.")


def is_free(port: int) -> bool:
    """Whether the port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def number(variable: str, default: int) -> int:
    """A positive number from the environment."""
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or int(text) < 1:
        fail(f"{variable} is {text!r} but must be a number of at least 1.")
    return int(text)


def say(text: str, speaker: str = "quire") -> None:
    """One line to the person who started this, if there still is one: a reader that went away (``| head``, a closed
    terminal) must not keep the programs from being stopped.
    """
    with suppress(OSError), PRINTING:
        print(f"{speaker:8} | {text}", flush=True)


def fail(text: str) -> None:
    """Ends with one sentence."""
    sys.exit(f"quire: {text}")


if __name__ == "__main__":
    main()
