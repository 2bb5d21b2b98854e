"""The process of a core says why it ends, and answers calls with what they return or raise."""

import pytest
from quire_engine.core.engine_core import EngineCoreOutputs, StepTrace
from quire_engine.core.executor import CopyError, ExecutorError
from quire_engine.core.outputs import EngineLoad
from quire_engine.core.step import StepTimings
from quire_engine.core_client.client import CoreStats
from quire_engine.core_client.core_main import _answer, _Sender
from quire_engine.core_client.core_messages import Ended, FromCore, Leaving, Published, RemoteError
from quire_engine.errors import LoRANotFoundError


def sender(*, is_traced: bool = False) -> tuple[_Sender, list[FromCore]]:
    sent: list[FromCore] = []
    return _Sender(sent.append, CoreStats(), is_traced=is_traced), sent


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (None, None),
        (ExecutorError("Rank 1 is gone, and the engine cannot go on."), "Rank 1 is gone, and the engine cannot go on."),
        (CopyError("a block copy failed"), "The engine core has failed: CopyError: a block copy failed."),
        (KeyError("x"), "The engine core has failed: KeyError: 'x'."),
    ],
)
def test_the_end_of_a_core_has_one_sentence(
    failure: Exception | None, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    to_server, sent = sender()
    to_server.is_running = True
    to_server.on_end(failure)
    assert sent == [Ended(reason)]
    assert not to_server.is_running
    assert bool(caplog.records) == (reason or "").startswith("The engine core has failed"), "with its traceback"


@pytest.mark.parametrize("is_traced", [False, True])
def test_names_of_requests_are_sent_only_where_steps_are_traced(is_traced: bool) -> None:
    to_server, sent = sender(is_traced=is_traced)
    trace = StepTrace(1, 2, StepTimings(), 0, 0, 0, 0, 1, 1, 0, 0, False, ["7"])
    to_server.on_outputs(EngineCoreOutputs([], EngineLoad(*[0] * 8), [], trace))
    to_server.on_leaving()
    published, leaving = sent
    assert isinstance(published, Published)
    assert published.outputs.trace.request_ids == (["7"] if is_traced else [])
    assert leaving == Leaving()


def test_a_call_is_answered_with_its_result_or_its_error(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[object] = []

    def missing() -> None:
        raise LoRANotFoundError("It is not there.")

    def broken() -> None:
        raise ZeroDivisionError

    for call in (lambda: 7, missing, broken):
        _answer(answers.append, call)
    assert answers == [7, RemoteError("LoRANotFoundError", "It is not there."), RemoteError("", "ZeroDivisionError")]
    assert [record.exc_info is not None for record in caplog.records] == [True], "which nobody expects"
