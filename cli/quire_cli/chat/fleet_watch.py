"""``FleetWatch``: says in an answer's view what it waits for, while no engine can run it.

It reads ``/v1/fleet/events`` of Quire's router while an answer comes. Other servers have no such stream, and a key may
not be allowed to read it: then it stays silent.
"""

from collections.abc import Mapping
from contextlib import suppress
from threading import Event, Thread
from typing import Any, Self

from quire_cli.chat.answer_view import AnswerView
from quire_cli.chat.api_client import ApiClient

PATIENCE = 0.5  # seconds of silence before anything is said
REASONS = {
    "connecting": "its engine is starting",
    "lost": "its engine was lost and is started again",
    "reconnecting": "the connection to its engine was lost",
    "sleeping": "its engine wakes up",
}


class FleetWatch:
    """Watches while the block runs, if the view is a terminal's."""

    def __init__(self, client: ApiClient, model: str, view: AnswerView) -> None:
        self._client, self._model, self._view = client, model, view
        # What the last samples said: the condition of each engine, and how many are ready for the model.
        self._engines: dict[str, str] = {}
        self._ready = 1
        self._closed = Event()
        self._thread = Thread(target=self._run, daemon=True, name="fleet watch")

    def __enter__(self) -> Self:
        if self._view.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _run(self) -> None:
        with suppress(Exception):  # only notes: whatever fails, there are none
            for sample in self._client.fleet():
                if self._closed.is_set():
                    return
                self._read(sample)

    def _read(self, sample: Mapping[str, Any]) -> None:
        """Takes a sample, which has only what changed."""
        self._engines.update((engine["id"], engine["condition"]) for engine in sample["engines"])
        for model in sample["models"] or ():
            if model["name"] == self._model:
                self._ready = model["ready_engines"]
        seconds = self._view.silence
        if not self._ready and seconds > PATIENCE:
            self._view.wait(f"waiting for {self._model}: {self._reason()} ({seconds:.0f} s)")

    def _reason(self) -> str:
        conditions = self._engines.values()
        return next((text for condition, text in REASONS.items() if condition in conditions), "no engine is ready")
