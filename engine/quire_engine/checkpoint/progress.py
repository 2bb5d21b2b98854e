"""The progress bar of a download from the Hugging Face Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.utils.tqdm import tqdm

_BYTES = "huggingface_hub.snapshot_download"  # the name of the bar that counts the bytes written


@contextmanager
def one_bar(title: str) -> Iterator[type[tqdm]]:
    """Yields a class of progress bars for ``snapshot_download``, which makes three and leaves two of them open until
    the process ends, so that later lines of a log continue theirs. Of these the one of bytes is shown, and closed here.
    """
    bars: list[tqdm] = []

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            shown = options.get("name") == _BYTES
            options |= {"desc": title} if shown else {"disable": True}
            super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]
            bars.append(self)

        def set_description(self, *_: Any, **__: Any) -> None:
            """Keeps the title."""

    try:
        yield Bar
    finally:
        for bar in bars:
            bar.close()
