"""News that reach each reader some time after they happened. Times are in nanoseconds."""

from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class News(Generic[Item]):
    """What happened at one place, in the order of time."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Item]] = []

    def tell(self, time: int, item: Item) -> None:
        """Something happened now; time never goes back."""
        self.told.append((time, item))


class Reader(Generic[Item]):
    """Hears of each of the news once, ``delay`` after it happened; never, with None."""

    def __init__(self, news: News[Item], delay: int | None) -> None:
        self._told = news.told
        self._delay = delay
        self._next = 0

    def due(self, now: int) -> Iterator[tuple[int, Item]]:
        """What has come by now, and when it did."""
        while self._delay is not None and self._next < len(self._told):
            time, item = self._told[self._next]
            if time + self._delay > now:
                break
            self._next += 1
            yield time + self._delay, item
