"""A tree of processes starts what dies again, ends all in their order, and leaves nobody behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from quire_cli.serve import child, process_tree
from quire_cli.serve.process_tree import ProcessTree, Program, answers

from tests.support.ports import free_port
from tests.support.processes import eventually
from tests.support.small_service import Behaviour
from tests.support.waiting import until


def program(name: str, *, stop_timeout: float = 20.0, grouped: bool = False, **behaviour: Any) -> Program:
    service = Behaviour(port=free_port(), **behaviour)
    kind = name.partition("-")[0]
    probe = service.port, "/health"
    return Program(name, kind, "tests.support.small_service", service.arguments(), probe, stop_timeout, grouped=grouped)


class Lines:
    """What was said, by whom."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, text: str, speaker: str) -> None:
        self.lines.append((speaker, text))

    def count(self, text: str) -> int:
        return sum(text in said for _, said in self.lines)


@asynccontextmanager
async def running(*programs: Program) -> AsyncIterator[tuple[ProcessTree, Lines, asyncio.Task[int]]]:
    lines = Lines()
    tree = ProcessTree(programs, lines)
    task = asyncio.create_task(tree.run())
    try:
        yield tree, lines, task
    finally:
        tree.stop(0)
        await asyncio.wait_for(task, 30)


def process_of(tree: ProcessTree, name: str) -> psutil.Process:
    return psutil.Process(tree._running[name].pid)


async def test_the_last_kind_ends_first_and_one_kind_together() -> None:
    names = ["redis", "engine-1", "engine-2", "router"]
    async with running(*(program(name, linger=0.3) for name in names)) as (tree, lines, task):
        await until(lambda: tree.ready == set(names))
        tree.stop(130)
        tree.stop(1)  # only the first one counts
        assert await task == 130
        ended = [speaker for speaker, text in lines.lines if text == "ended"]
        assert (ended[0], sorted(ended[1:3]), ended[3]) == ("router", ["engine-1", "engine-2"], "redis")
        assert not tree.ready


async def test_a_warning_that_all_of_one_kind_give_at_their_start_is_printed_once() -> None:
    warning = "2026-01-02 03:04:05,{} WARNING quire: half is slow here"
    names = ["engine-1", "engine-2", "engine-3", "router"]
    programs = [program(name, says=warning.format(100 + number)) for number, name in enumerate(names)]
    other = program("engine-4", says="2026-01-02 03:04:05,600 WARNING quire: another is slow here")
    async with running(*programs, other) as (tree, lines, _):
        await until(lambda: len(tree.ready) == 5)
        assert lines.count("began") == 5
        told = [speaker.partition("-")[0] for speaker, text in lines.lines if "half is slow" in text]
        assert sorted(told) == ["engine", "router"]
        assert lines.count("another is slow") == 1


async def test_what_is_killed_is_started_again_and_the_others_stay() -> None:
    async with running(program("engine-1"), program("router")) as (tree, lines, task):
        await until(lambda: len(tree.ready) == 2)
        router, engine = process_of(tree, "router"), process_of(tree, "engine-1")
        engine.kill()
        await until(lambda: lines.count("is started again") and len(tree.ready) == 2)
        assert process_of(tree, "engine-1").pid != engine.pid
        assert process_of(tree, "router") == router
        assert lines.lines.count(("quire", "engine-1 was killed with SIGKILL (by the system, if memory ran out) "
                                  "and is started again")) == 1  # fmt: skip
        assert [text for speaker, text in lines.lines if "is ready again" in text and speaker == "quire"] != []
        assert not task.done()


async def test_of_a_group_that_lost_one_those_that_do_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stopped process does not; what was started again meanwhile is left alone, and so is what is in no group."""
    monkeypatch.setattr(process_tree, "GROUP_END_TIMEOUT", 1.0)
    names = ["engine-0", "engine-1", "engine-2"]
    others = program("engine-9"), program("router")
    async with running(*(program(name, grouped=True) for name in names), *others) as (tree, lines, _):
        await until(lambda: len(tree.ready) == 5)
        before = {name: process_of(tree, name) for name in tree.ready}
        before["engine-1"].suspend()
        before["engine-2"].kill()
        before["engine-0"].kill()
        await until(lambda: lines.lines.count(("engine-1", "began")) == 2 and len(tree.ready) == 5)
        after = {name: process_of(tree, name) for name in before}
        assert {name for name in before if after[name] != before[name]} == set(names)
        assert [lines.lines.count((name, "began")) for name in names] == [2, 2, 2]
        assert lines.count("does not end although") == 1


@pytest.mark.parametrize(("status", "exit_status", "starts"), [(7, 7, 1), (-signal.SIGKILL, 137, 3)])
async def test_what_was_never_ready_ends_all(status: int, exit_status: int, starts: int) -> None:
    """At once where it ended by itself, with a sentence of its own; where it was killed, after two more tries."""
    async with running(program("engine-1"), program("router", status=status)) as (_, lines, task):
        assert await asyncio.wait_for(task, 30) == exit_status
        assert lines.lines.count(("router", "cannot")) == starts
        assert lines.count("the others are stopped") == 1


async def test_what_was_ready_may_fail_to_start_twice_but_not_thrice(tmp_path: Path) -> None:
    async with running(program("engine-1", status=3, only_first=str(tmp_path / "began"))) as (tree, lines, task):
        await until(lambda: tree.ready)
        process_of(tree, "engine-1").kill()
        assert await asyncio.wait_for(task, 30) == 3
        assert lines.lines.count(("engine-1", "cannot")) == 3
        assert "engine-1 ended with status 3, 3 times in a row; the others are stopped" in [t for _, t in lines.lines]
        assert lines.lines[-1] == ("quire", "its last lines:\nbegan\ncannot")


async def test_an_answer_of_another_program_at_its_port_makes_nothing_ready() -> None:
    theirs = program("router")
    async with running(theirs) as (tree, *_):
        await until(lambda: "router" in tree.ready)
        late = replace(program("router"), probe=theirs.probe)
        async with running(late, program("engine-1")) as (other, lines, _):
            await until(lambda: "engine-1" in other.ready and lines.lines.count(("router", "began")))
            await asyncio.sleep(0.5)  # ten probes
            assert other.ready == {"engine-1"}


async def test_what_does_not_answer_is_not_ready() -> None:
    async with running(program("engine-1", ready=False), program("router")) as (tree, lines, _):
        await until(lambda: "router" in tree.ready and lines.lines.count(("engine-1", "began")))
        assert tree.ready == {"router"}


async def test_one_that_does_not_end_is_killed() -> None:
    async with running(program("router", stubborn=True, stop_timeout=0.2)) as (tree, lines, task):
        await until(lambda: tree.ready)
        tree.stop(130)
        assert await asyncio.wait_for(task, 30) == 130
        assert lines.count("router does not end and is killed") == 1


async def test_nobody_has_to_wait_for_the_end() -> None:
    async with running(program("router", stubborn=True, stop_timeout=300)) as (tree, _, task):
        await until(lambda: tree.ready)
        tree.stop(130)
        await asyncio.sleep(0)
        tree.kill()
        assert await asyncio.wait_for(task, 30) == 130


async def test_it_can_be_stopped_before_anything_runs() -> None:
    async with running(program("engine-1"), program("router")) as (tree, _, task):
        await asyncio.sleep(0)
        tree.stop(143)
        assert await asyncio.wait_for(task, 30) == 143


def test_a_child_dies_with_its_parent_even_if_that_is_killed() -> None:
    sleeper = "import subprocess, sys, os, time; p = subprocess.Popen([sys.executable, '-S', sys.argv[1], \
str(os.getpid()), 'http.server', '0', '--bind', '127.0.0.1']); print(p.pid, flush=True); time.sleep(300)"
    parent = subprocess.Popen([sys.executable, "-c", sleeper, child.__file__], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    orphan = psutil.Process(int(parent.stdout.readline()))
    eventually(lambda: "http.server" in orphan.cmdline() and child.__file__ not in orphan.cmdline())
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([orphan], timeout=20)
    assert not alive


def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    command = [sys.executable, "-S", child.__file__, "1", "http.server"]
    assert subprocess.run(command, timeout=30, check=False, env=os.environ).returncode == 1


async def test_health_probes_bypass_any_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            await asyncio.wait_for(answers(server.server_address[1], "/"), 30)
        finally:
            server.shutdown()
