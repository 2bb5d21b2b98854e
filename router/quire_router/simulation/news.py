"""A feed of events that reach each reader some time after they happened. Times are in nanoseconds."""

from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class DelayedFeed(Generic[Item]):
    """What happened at one place, in the order of time."""

    def __init__(self) -> None:
        self.items: list[tuple[int, Item]] = []

    def publish(self, time: int, item: Item) -> None:
        """Something happened now; time never goes back."""
        self.items.append((time, item))


class FeedReader(Generic[Item]):
    """Hears of each of the news once, ``delay`` after it happened; never, with None."""

    def __init__(self, news: DelayedFeed[Item], delay: int | None) -> None:
        self._items = news.items
        self._delay = delay
        self._next = 0

    def due(self, now: int) -> Iterator[tuple[int, Item]]:
        """What has come by now, and when it did."""
        while self._delay is not None and self._next < len(self._items):
            time, item = self._items[self._next]
            if time + self._delay > now:
                break
            self._next += 1
            yield time + self._delay, item
