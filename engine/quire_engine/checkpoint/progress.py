"""The progress bar of a download from the Hugging Face Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.utils.tqdm import tqdm

_BYTES = "huggingface_hub.snapshot_download"  # the name of the bar that counts the bytes written


@contextmanager
def one_bar(title: str, most: int | None = None) -> Iterator[type[tqdm]]:
    """Yields a class of progress bars for ``snapshot_download``. That function makes three bars and leaves two of them
    open until the process ends, so that later log lines continue theirs. This class shows only the bar of bytes, and
    closes all of them at the end. It raises ``OSError`` when there are more than ``most`` bytes, before they are
    written.
    """
    bars: list[tqdm] = []

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.counted = 0
            self.bounded = shown = options.get("name") == _BYTES
            options |= {"desc": title} if shown else {"disable": True}
            super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]
            bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            self.counted += int(n or 0)
            if self.bounded and most is not None and self.counted > most:
                raise OSError(f"it has more than the {most} bytes that were listed")
            return super().update(n)  # type: ignore[no-any-return]

        def set_description(self, *_: Any, **__: Any) -> None:
            """Keeps the title."""

    try:
        yield Bar
    finally:
        for bar in bars:
            bar.close()
