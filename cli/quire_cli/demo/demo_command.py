"""The command ``quire demo``: streams an answer, kills the engine that writes it with ``kill -9``, and shows that the
answer continues on another engine and ends with the text of an undisturbed run.
"""

import asyncio
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import NoReturn
from urllib.request import ProxyHandler, build_opener

from quire_engine.errors import ModelError
from quire_proto.cli import FlagParser
from quire_proto.terminal import DIM, INTERRUPTED, colored, fail, has_color, report_error

from quire_cli.chat.api_client import ApiClient, ApiError
from quire_cli.machine.gpus import visible_gpus
from quire_cli.machine.sockets import LOCALHOST
from quire_cli.serve.flags import ServeFlags, read_flags
from quire_cli.serve.log import show_status
from quire_cli.serve.plan import Plan, make_plan
from quire_cli.serve.ports import PortError, Ports
from quire_cli.serve.process_tree import ProcessTree, answers
from quire_cli.serve.ready_message import url_of
from quire_cli.serve.serve_command import check_host_memory, find
from quire_cli.serve.start_progress import StartProgress

DESCRIPTION = """Shows an answer that survives: starts a router and two engines on this machine, streams an answer, and
kills the engine that writes it (kill -9). The answer pauses, continues on the other engine, and is compared with the
answer of an undisturbed run.

MODEL is what quire serve takes; by default the demo model of the repository."""
DEMO_MODEL, DEMO_NAME = Path("demo/model"), "quire-demo"
PROMPT = "Once upon a time"
MAX_TOKENS = 400  # which the smallest model takes a second for: whole stories are over too soon to kill anything
KILL_AT = MAX_TOKENS // 3
ENGINES = 2
LAST_LINES = 10  # of the processes, printed where they end by themselves
LONGEST_START = 300.0  # seconds, in which the first start of a machine compiles kernels
SHORTEST_PAUSE = 0.05  # seconds between two pieces of text that count as a pause
_RUNNING = re.compile(r"^vllm:num_requests_running\{[^}]*\} ([0-9.]+)$", re.MULTILINE)


def demo(arguments: Sequence[str]) -> NoReturn:
    """Runs ``quire demo``. Exits with 0 if the answer equals an undisturbed one, else with 1."""
    flags = demo_parser().parse_args(list(arguments))
    if flags.model is None and not DEMO_MODEL.is_dir():
        fail("demo/model is not here", "run this in a clone of the repository, or name a MODEL")
    served = _serve_flags(flags.model or str(DEMO_MODEL))
    found = find(served)
    served = replace(served, names=[found.name if flags.model else DEMO_NAME])
    ports = Ports(lambda _text, _speaker: None)
    try:
        plan = make_plan(served, found.path, ports, visible_gpus())
    except (PortError, ModelError, ValueError) as error:
        fail(str(error))
    check_host_memory(plan)
    try:
        raise SystemExit(asyncio.run(_Demo(plan).run()))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def demo_parser() -> FlagParser:
    """Returns the parser of the command's flags."""
    parser = FlagParser("quire demo", DESCRIPTION, {})
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what is served (default: demo/model)")
    return parser


def _serve_flags(model: str) -> ServeFlags:
    own = ["--engines", str(ENGINES), "--no-journal", "--log-level", "error"]
    # Equal tokens on any engine, whatever else runs there, are promised in float32.
    return read_flags([model, *own, "--dtype", "float32"])


class _Demo:
    """One showing. ``run`` starts the processes of ``plan``, and ends them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._client = ApiClient(url_of(plan))
        self._body = {
            "model": plan.name, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "seed": 7, "ignore_eos": True,
        }  # fmt: skip
        self._killed = False
        self._log: deque[str] = deque(maxlen=LAST_LINES)
        self._progress = StartProgress([f"engine-{number}" for number in range(plan.engines)], show_status)
        self._tree = ProcessTree(plan.programs, self._keep, on_progress=self._progress.report)

    def _keep(self, text: str, speaker: str) -> None:
        self._log.append(f"{speaker:8} | {text}")

    async def run(self) -> int:
        """Returns 0 if the answer equals an undisturbed one, else 1."""
        async with asyncio.TaskGroup() as tasks:
            running, showing = tasks.create_task(self._tree.run()), tasks.create_task(self._show())
            try:
                await asyncio.wait((running, showing), return_when=asyncio.FIRST_COMPLETED)
                if showing.done():
                    return showing.result()
                _note("\n".join(("the processes have ended:", *self._log)))
                return 1
            finally:
                showing.cancel()
                self._tree.stop(0)

    async def _show(self) -> int:
        _note(f"starting a router and {ENGINES} engines with {self._plan.name} …")
        began = monotonic()
        async with asyncio.timeout(LONGEST_START), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._progress.run(self._tree.ready)) if has_color(sys.stdout) else None
            for _, port in self._plan.engine_ports:
                await answers(port, "/started")
            await answers(self._plan.settings.metrics_port, "/health")
            if watching is not None:
                watching.cancel()
        _note(f"ready after {monotonic() - began:.1f} s\n")
        loop = asyncio.get_running_loop()
        try:
            text = await asyncio.to_thread(self._disturbed, loop)
            expected = await asyncio.to_thread(lambda: "".join(self._pieces()))
        except ApiError as error:
            report_error(str(error))
            return 1
        _note(f"The same request without a kill: {'the same' if text == expected else 'another'} text.")
        if not self._killed:
            report_error("the answer was over before its engine could be killed")
        return int(text != expected or not self._killed)

    def _pieces(self) -> Iterator[str]:
        with closing(self._client.stream("/completions", self._body)) as chunks:
            for chunk in chunks:
                yield "".join(choice.get("text") or "" for choice in chunk.get("choices", ()))

    def _disturbed(self, loop: asyncio.AbstractEventLoop) -> str:
        """Prints the answer as it comes, and kills its engine on the way. Returns the answer."""
        text, longest = "", 0.0
        began = last = monotonic()
        sys.stdout.write(PROMPT)
        for number, piece in enumerate(self._pieces()):
            pause, last = monotonic() - last, monotonic()
            if self._killed and pause > max(longest, SHORTEST_PAUSE):
                longest = pause
                _note(f"\n── the other engine continues, {pause:.2f} s after the last token ──")
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
            if number == KILL_AT:
                self._kill(loop)
        _note(f"\n\n{MAX_TOKENS} tokens in {last - began:.1f} s, the longest pause {longest:.2f} s.")
        return text

    def _kill(self, loop: asyncio.AbstractEventLoop) -> None:
        """Kills the engine that runs the request, if one still does."""
        for number, (_, port) in enumerate(self._plan.engine_ports):
            if _running_requests(port):
                loop.call_soon_threadsafe(self._tree.kill_one, f"engine-{number}")
                _note(f"\n── kill -9 engine-{number}, which writes this ──")
                self._killed = True
                return


def _running_requests(port: int) -> float:
    """How many requests the engine with these metrics runs."""
    with suppress(OSError), build_opener(ProxyHandler({})).open(f"http://{LOCALHOST}:{port}/metrics", timeout=5) as got:
        return sum(map(float, _RUNNING.findall(got.read().decode())))
    return 0.0


def _note(text: str) -> None:
    """Prints a line about what happens, dimmed on a terminal."""
    sys.stdout.write(f"{colored(text, DIM, sys.stdout)}\n")
    sys.stdout.flush()
