"""``AnswerView``: shows one answer while it comes; in a terminal with wrapped words, colors and notes."""

import shutil
import sys
from threading import RLock
from time import monotonic

from quire_proto.terminal import CLEAR_LINE, DIM, PLAIN, has_color

from quire_cli.chat.markdown import Markdown
from quire_cli.chat.word_wrap import WordWrap


class AnswerView:
    """Writes to standard output. ``note`` and ``wait`` may be called from another thread, and write in terminals only.
    Markdown has colors in one that shows them, unless the answer is shown ``raw``. ``text`` is the answer so far, and
    ``longest_pause`` the most seconds between two pieces of it.
    """

    def __init__(self, *, raw: bool = False) -> None:
        self.text = ""
        self.longest_pause = 0.0
        self.is_terminal = sys.stdout.isatty()
        self._dim, self._plain = (DIM, PLAIN) if has_color(sys.stdout) else ("", "")
        self._wrap = WordWrap(shutil.get_terminal_size().columns - 1) if self.is_terminal else None
        self._markdown = Markdown() if has_color(sys.stdout) and not raw else None
        self._lock = RLock()
        self._began, self._first, self._last = monotonic(), 0.0, 0.0
        self._is_thinking = self._is_waiting = self._was_cut = self._is_broken = False

    @property
    def silence(self) -> float:
        """Seconds since the last piece, or since the question."""
        return monotonic() - (self._last or self._began)

    def add(self, text: str, thought: str = "") -> None:
        """Shows the next piece."""
        if not (text or thought):
            return
        with self._lock:
            self._measure()
            self._clear_wait()
            if self._was_cut:
                self._was_cut = False
                self.note(f"connection lost, continued after {self.longest_pause:.1f} s")
            if self.is_terminal and self._is_thinking != bool(thought):
                self._write(self._dim if thought else self._plain + self._wrapped("\n"))
                self._is_thinking = bool(thought)
            shown = text if self._markdown is None else self._markdown.feed(text)
            self._write(self._wrapped(thought + shown) if self.is_terminal else text)
            self.text += text

    def note(self, text: str) -> None:
        """Shows a dim line of its own."""
        if not self.is_terminal:
            return
        with self._lock:
            self._clear_wait()
            self._break_line()
            self._write(f"{self._dim}– {text} –{self._plain}\n{self._dim if self._is_thinking else ''}")

    def wait(self, text: str) -> None:
        """Shows a dim line until the next piece or note."""
        if not self.is_terminal:
            return
        with self._lock:
            self._break_line()
            self._write(f"{CLEAR_LINE}{self._dim}{text}{self._plain}")
            self._is_waiting = True

    def cut(self) -> None:
        """Shows that the connection was lost, and with the next piece how long that took."""
        self._was_cut = bool(self._first)
        self.wait("the connection is lost; trying again")

    def clear(self) -> None:
        """Takes the line of ``wait`` away, shows what was held back, and leaves no color behind."""
        with self._lock:
            self._clear_wait()
            self._flush()
            self._write(self._plain if self._is_thinking else "")

    def end(self) -> None:
        """Ends the line."""
        with self._lock:
            self._clear_wait()
            self._flush()
            self._write(f"{self._plain}\n" if self._is_thinking else "\n")
            self._is_thinking = False

    def tell_speed(self, tokens: int) -> None:
        """Shows the tokens per second of the answer."""
        if self.is_terminal and tokens:
            seconds = self._last - self._first
            rate = f", {(tokens - 1) / seconds:.1f} tokens/s" if tokens > 1 and seconds > 0 else ""
            first = self._first - self._began
            self._write(f"{self._dim}{tokens} tokens{rate}, the first after {first:.2f} s{self._plain}\n")

    def _measure(self) -> None:
        now = monotonic()
        if self._first:
            self.longest_pause = max(self.longest_pause, now - self._last)
        self._first, self._last = self._first or now, now

    def _wrapped(self, text: str) -> str:
        if self._wrap is None:
            return text
        if text and self._is_broken:
            text, self._is_broken = text.removeprefix(" "), False
        return self._wrap.feed(text)

    def _flush(self) -> None:
        if self._markdown is not None:
            self._write(self._wrapped(self._markdown.end()))

    def _break_line(self) -> None:
        """Ends a line of the answer that has begun: its rest begins the next one."""
        if self._wrap is not None and self._wrap.column:
            self._write("\n")
            self._wrap, self._is_broken = WordWrap(shutil.get_terminal_size().columns - 1), True

    def _clear_wait(self) -> None:
        if self._is_waiting:
            self._write(CLEAR_LINE + (self._dim if self._is_thinking else ""))
            self._is_waiting = False

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
