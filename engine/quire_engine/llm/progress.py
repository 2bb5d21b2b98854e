"""The progress bar: prompts that are done, and tokens a second."""

from time import perf_counter
from types import TracebackType
from typing import Self

from tqdm import tqdm  # type: ignore[import-untyped]


class Progress:
    """Counts what a call has done so far, and shows it on standard error unless ``shown`` is False."""

    def __init__(self, prompts: int, *, shown: bool) -> None:
        self._bar = tqdm(
            total=prompts, desc="Prompts", unit="prompt", miniters=0, dynamic_ncols=True, disable=not shown
        )
        self._started = perf_counter()
        self._prompt_tokens = self._output_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, *, prompts: int, prompt_tokens: int, output_tokens: int) -> None:
        """Counts what one step has finished, read and made."""
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        seconds = max(perf_counter() - self._started, 1e-9)
        rates = f"prompt {self._prompt_tokens / seconds:.0f} tok/s, output {self._output_tokens / seconds:.0f} tok/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(prompts)
