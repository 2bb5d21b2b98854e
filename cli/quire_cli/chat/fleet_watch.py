"""``FleetWatch``: says in an answer's view what its engines do: that one is starting, was lost, or continued it.

It reads ``/v1/fleet/events`` of Quire's router while an answer comes. Other servers have no such stream, and a key may
not be allowed to read it: then nothing is said.
"""

from collections.abc import Mapping
from contextlib import suppress
from threading import Event, Thread
from time import monotonic
from typing import Any, Self

from quire_cli.chat.answer_view import AnswerView
from quire_cli.chat.api_client import ApiClient

ID_PREFIX, ID_CHARACTERS = "chatcmpl-", 8  # what chunks put before a request's id, and how much the stream shows of it
SHORTEST_PAUSE = 0.1  # seconds that may have been a lost engine
PERIOD = 0.6  # seconds in which the next event comes
REASONS = {
    "connecting": "its engine is starting",
    "lost": "its engine is being started again",
    "reconnecting": "the connection to its engine is being made again",
    "sleeping": "its engine wakes up",
}


class FleetWatch:
    """Watches while the block runs, if the view is a terminal's. ``request_id`` is set once it is known."""

    def __init__(self, client: ApiClient, model: str, view: AnswerView) -> None:
        self.request_id = ""
        self._client, self._model, self._view = client, model, view
        self._began = monotonic()
        # What the last samples said: the condition of each engine, the ready engines of each model, and the requests.
        self._engines: dict[str, str] = {}
        self._ready: dict[str, int] = {}
        self._requests: list[Mapping[str, Any]] = []
        self._lost: Mapping[str, Any] | None = None  # the event that is to be told
        self._told = 0  # number of the last event that was
        self._closed, self._sampled = Event(), Event()
        self._thread = Thread(target=self._run, daemon=True, name="fleet watch")

    def __enter__(self) -> Self:
        if self._view.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends it. After an answer with a pause it waits for the sample that explains the pause."""
        if kind is None and self._thread.is_alive() and self._view.longest_pause > SHORTEST_PAUSE and not self._told:
            self._sampled.clear()
            self._sampled.wait(PERIOD)
        self._closed.set()
        if self._lost is not None:
            self._tell_continued("another engine")

    def _run(self) -> None:
        with suppress(Exception):  # only notes: whatever fails, there are none
            for sample in self._client.fleet():
                if self._closed.is_set():
                    return
                self._read(sample)

    def _read(self, sample: Mapping[str, Any]) -> None:
        """Takes a sample, which has only what changed."""
        self._engines.update((engine["id"], engine["condition"]) for engine in sample["engines"])
        self._ready.update((model["name"], model["ready_engines"]) for model in sample["models"] or ())
        self._requests = self._requests if sample["requests"] is None else sample["requests"]
        own = self.request_id.removeprefix(ID_PREFIX)[:ID_CHARACTERS]
        for event in sample["events"]:
            if own and event["kind"] == "attempt_lost" and event["request"] == own and event["number"] > self._told:
                self._lost, self._told = event, event["number"]
        if self._lost is not None:
            self._follow(self._lost, own)
        elif not self._view.has_begun and not self._ready.get(self._model, 1):
            seconds = monotonic() - self._began
            self._view.wait(f"waiting for {self._model}: {self._reason()} ({seconds:.0f} s)")
        self._sampled.set()

    def _follow(self, lost: Mapping[str, Any], own: str) -> None:
        for request in self._requests:
            if request["id"] == own and request["engine"] and request["attempt"] > lost["attempt"]:
                self._tell_continued(request["engine"])
                return
        self._view.wait(f"engine {lost['engine']} is lost; waiting for another")

    def _tell_continued(self, engine: str) -> None:
        assert self._lost is not None
        lost, self._lost = self._lost, None
        self._view.note(f"engine {lost['engine']} lost, continued on {engine} after {self._view.longest_pause:.1f} s")

    def _reason(self) -> str:
        return next((text for condition, text in REASONS.items() if condition in self._engines.values()), "no engine")
