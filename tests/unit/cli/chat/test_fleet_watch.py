"""What an answer waits for, from the router's stream of samples; and notes in the middle of an answer."""

import sys
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest
from quire_cli.chat.answer_view import AnswerView
from quire_cli.chat.api_client import ApiClient, ApiError
from quire_cli.chat.fleet_watch import FleetWatch

from tests.support.processes import eventually


class Fleet(ApiClient):
    """A server whose samples are put into a queue; None ends them."""

    def __init__(self) -> None:
        super().__init__("http://h:8000")
        self.samples: Queue[dict[str, Any] | None] = Queue()

    def fleet(self) -> Iterator[dict[str, Any]]:
        return iter(self.samples.get, None)

    def sample(self, **fields: Any) -> None:
        self.samples.put({"engines": [], "models": None, **fields})


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("quire_cli.chat.fleet_watch.PATIENCE", 0.0)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.samples.put(None)


class Shown:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._text = capsys, ""

    def __call__(self) -> str:
        self._text += self._capsys.readouterr().out
        return self._text


@pytest.mark.usefixtures("terminal")
def test_the_reason_for_waiting_is_shown(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    shown, view = Shown(capsys), AnswerView()
    with FleetWatch(fleet, "demo", view):
        fleet.sample(engines=[{"id": "h:1", "condition": "connecting"}], models=[{"name": "demo", "ready_engines": 0}])
        eventually(lambda: "waiting for demo: its engine is starting (0 s)" in shown())
        view.add("Once upon")
        assert shown().endswith("\r\x1b[KOnce upon")
        fleet.sample(engines=[{"id": "h:1", "condition": "lost"}])
        eventually(lambda: "\n\r\x1b[Kwaiting for demo: its engine was lost and is started again (0 s)" in shown())
        view.note("engine h:1 lost (closed), continued on h:2 after 0.3 s")
        view.add(" a time")
    assert shown().endswith("\r\x1b[K– engine h:1 lost (closed), continued on h:2 after 0.3 s –\na time"), (
        "no line begins with the space between two words"
    )


@pytest.mark.usefixtures("terminal")
def test_a_server_without_the_stream_disturbs_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Iterator[dict[str, Any]]:
        raise ApiError("there is nothing here")

    monkeypatch.setattr(fleet, "fleet", refuse)
    view = AnswerView()
    with FleetWatch(fleet, "demo", view):
        view.add("Once")
    assert capsys.readouterr() == ("Once", "")


def test_elsewhere_than_in_a_terminal_nothing_is_watched(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    view = AnswerView()
    with FleetWatch(fleet, "demo", view):
        fleet.sample(models=[{"name": "demo", "ready_engines": 0}])
        view.cut()
        view.note("a note")
        view.add("Once")
        view.tell_speed(5)
    assert fleet.samples.qsize() == 1
    assert capsys.readouterr() == ("Once", "")


@pytest.mark.usefixtures("terminal")
def test_a_lost_connection_is_a_note_once_it_is_there_again(capsys: pytest.CaptureFixture[str]) -> None:
    view = AnswerView()
    view.add("Once")
    view.cut()
    view.longest_pause = 2.0
    view.add(" upon")
    view.end()
    shown = capsys.readouterr().out
    assert shown.startswith(
        "Once\n\r\x1b[Kthe connection is lost; trying again\r\x1b[K– connection lost, continued after 2.0 s"
    )
    assert shown.endswith(" –\nupon\n")


@pytest.mark.usefixtures("terminal")
def test_the_speed_stands_below_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    view = AnswerView()
    view.add("Once")
    view.add(" upon")
    view.end()
    view.tell_speed(2)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("2 tokens, ")
    assert " tokens/s, the first after 0.0" in last
