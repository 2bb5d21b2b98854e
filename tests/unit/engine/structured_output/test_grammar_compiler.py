"""Grammars on their way: compiled once, remembered within bounds, refused in time."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from threading import Barrier
from time import monotonic, sleep

import pytest
from quire_engine.core.step import Grammar
from quire_engine.structured_output import compiler as compilers
from quire_engine.structured_output.compiler import CompileOutcome, GrammarCompiler
from quire_proto.errors import ErrorCode, QuireError

from tests.support.grammars import MODEL
from tests.support.slow_grammars import WAITING, EmptyGrammar, SlowSource, Watched, regex


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.compiler.close()


def made(future: "Future[Grammar]") -> Grammar:
    return future.result(WAITING)


def settled(watched: Watched, *texts: str) -> None:
    """Compiles them, each after the other."""
    watched.source.release()
    for text in texts:
        wait([watched.compiler.submit(regex(text))], WAITING)
        until_settled(watched)


def until_settled(watched: Watched) -> None:
    """Who waits for a future may hear of it before the compiler does."""
    until(lambda: not watched.compiler._num_pending)


def until(condition: Callable[[], bool]) -> None:
    end = monotonic() + WAITING
    while not condition():
        assert monotonic() < end, "nothing happened"
        sleep(0.001)


def test_equal_grammars_are_compiled_once_even_when_submitted_concurrently(watched: Watched) -> None:
    barrier = Barrier(16)

    def ask() -> "Future[Grammar]":
        barrier.wait(WAITING)
        return watched.compiler.submit(regex("same"))

    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask) for _ in range(16)]
        futures = [each.result(WAITING) for each in asked]
    watched.source.release()
    assert len({id(made(future)) for future in futures}) == 1
    assert watched.source.compiled == {"same": 1}
    assert sorted(watched.outcomes) == [CompileOutcome.COMPILED, *[CompileOutcome.KNOWN] * 15]


def test_a_refusal_is_remembered_and_a_failure_is_not(watched: Watched) -> None:
    settled(watched, "bad", "bad", "broken", "broken")
    assert watched.source.compiled == {"bad": 1, "broken": 2}
    assert watched.outcomes == [
        CompileOutcome.REFUSED,
        CompileOutcome.KNOWN,
        CompileOutcome.FAILED,
        CompileOutcome.FAILED,
    ]
    with pytest.raises(QuireError, match="It is bad"):
        made(watched.compiler.submit(regex("bad")))


def test_a_remembered_refusal_holds_no_frames_of_the_compiler(watched: Watched) -> None:
    settled(watched, "bad")
    error = watched.compiler.submit(regex("bad")).exception(WAITING)
    assert error is not None
    assert error.__context__ is None
    names = []
    trace = error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert "compile" not in names


@pytest.mark.parametrize(("bound", "kept"), [("MAX_CACHED", 2), ("MAX_CACHED_BYTES", 2 * (1024 + 3) + 1)])
def test_the_grammar_cache_is_bounded_and_evicts_the_least_recently_used(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, bound: str, kept: int
) -> None:
    monkeypatch.setattr(compilers, bound, kept)
    settled(watched, "one", "two", "one", "six", "one", "six", "two")
    assert watched.source.compiled == {"one": 1, "two": 2, "six": 1}


def test_too_many_at_once_are_refused_until_some_are_compiled(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "MAX_PENDING", 3)
    futures = [watched.compiler.submit(regex(text)) for text in ("a", "b", "c")]
    with pytest.raises(QuireError) as refused:
        watched.compiler.submit(regex("d"))
    assert refused.value.code is ErrorCode.OVERLOADED
    assert refused.value.retry_after is not None
    assert watched.compiler.submit(regex("a")) is futures[0]
    settled(watched, "a", "b", "c", "d")
    assert watched.source.compiled["d"] == 1


def test_grammars_of_one_tenant_wait_for_each_other_and_not_those_of_another(watched: Watched) -> None:
    many = [watched.compiler.submit(regex(f"many {number}"), b"many") for number in range(20)]
    other = watched.compiler.submit(regex("other"), b"other")
    until(other.running)
    assert [future.running() for future in many].count(True) == 1, "a tenant has one thread"
    watched.source.release()
    assert made(other)
    assert all(map(made, many))


def test_a_grammar_that_another_tenant_has_asked_for_comes_in_the_first_turn(watched: Watched) -> None:
    busy = [watched.compiler.submit(regex(f"busy {number}"), b"many") for number in range(9)]
    shared = watched.compiler.submit(regex("shared"), b"many")
    assert watched.compiler.submit(regex("shared"), b"other") is shared
    until(shared.running)
    watched.source.release()
    assert all(map(made, [*busy, shared]))
    assert watched.source.compiled["shared"] == 1


def test_one_tenant_has_a_share_of_what_may_wait_and_be_in_use(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "MAX_PENDING", 16)
    monkeypatch.setattr(compilers, "MAX_ALIVE_BYTES", 9000)
    for text in ("a", "b"):
        watched.compiler.submit(regex(text), b"one")
    with pytest.raises(QuireError, match="too many grammars"):
        watched.compiler.submit(regex("c"), b"one")
    watched.compiler.submit(regex("c"), b"two")
    watched.source.release()
    until_settled(watched)
    used = [made(watched.compiler.submit(regex(f"{number}"), b"one")) for number in range(3)]
    until_settled(watched)
    with pytest.raises(QuireError, match="too many grammars"):
        watched.compiler.submit(regex("more"), b"one")
    assert made(watched.compiler.submit(regex("more"), b"two"))
    assert len(used) == 3


def test_grammars_in_use_are_bounded_until_they_are_released(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "MAX_CACHED", 0)
    monkeypatch.setattr(compilers, "MAX_ALIVE_BYTES", 1500)
    watched.source.release()
    used = [made(watched.compiler.submit(regex(text))) for text in ("one", "two")]
    until_settled(watched)
    with pytest.raises(QuireError, match="too many grammars"):
        watched.compiler.submit(regex("three"))
    used.clear()
    until(lambda: not watched.compiler._alive_bytes)
    assert made(watched.compiler.submit(regex("three")))


def test_a_grammar_counts_for_what_it_was_measured_to_take(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "MAX_ALIVE_BYTES", 1 << 20)
    monkeypatch.setattr(compilers, "MAX_CACHED_BYTES", 1 << 20)
    watched.source.num_bytes = 2 << 20
    watched.source.release()
    large = made(watched.compiler.submit(regex("large")))
    until_settled(watched)
    with pytest.raises(QuireError, match="too many grammars"):
        watched.compiler.submit(regex("next"))
    del large
    until(lambda: not watched.compiler._alive_bytes)
    assert made(watched.compiler.submit(regex("next")))


def test_a_grammar_without_waiters_is_not_compiled(watched: Watched) -> None:
    busy = [watched.compiler.submit(regex(text)) for text in ("one", "two")]
    left, shared = regex("left"), regex("shared")
    watched.compiler.submit(left)
    kept = watched.compiler.submit(shared)
    assert watched.compiler.submit(shared) is kept
    watched.compiler.withdraw(left)
    watched.compiler.withdraw(shared)
    watched.source.release()
    assert made(kept)
    assert all(map(made, busy))
    watched.compiler.withdraw(shared)
    until_settled(watched)
    assert watched.source.compiled["left"] == 0
    assert not watched.compiler._waiters
    assert made(watched.compiler.submit(left)), "it can be asked for again"


def test_closing_cancels_pending_compilations() -> None:
    source = SlowSource()
    compiler = GrammarCompiler(source)
    futures = [compiler.submit(regex(str(number))) for number in range(8)]
    compiler.close()
    assert source.closed
    with pytest.raises(CancelledError):
        futures[-1].result(WAITING)
    assert isinstance(futures[0].result(WAITING), EmptyGrammar)


def test_files_of_the_library_that_cannot_be_opened_are_the_engines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported with the first grammar if ``prepare`` could not, and then there may be no descriptors."""

    def fail(structured: object) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(compilers, "to_llguidance", fail)
    grammars = compilers.ModelGrammars(MODEL, 512, [0], num_sandboxes=1)
    with pytest.raises(QuireError) as refused:
        grammars.compile(regex("a"))
    grammars.close()
    assert refused.value.code is ErrorCode.OVERLOADED


def test_the_library_is_imported_without_a_grammar_once_an_engine_serves() -> None:
    code = f"""
import sys
from pathlib import Path
from quire_engine.structured_output.compiler import GrammarCompiler, ModelGrammars
compiler = GrammarCompiler(ModelGrammars(Path({str(MODEL)!r}), 512, [0], num_sandboxes=1))
assert "llguidance" not in sys.modules
compiler.prepare()
compiler._turns._pool.shutdown(wait=True)
assert "llguidance.gbnf_to_lark" in sys.modules
compiler.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
