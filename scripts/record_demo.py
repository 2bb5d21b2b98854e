"""Records ``quire demo`` as an animated SVG: ``python scripts/record_demo.py docs/images/demo.svg``, in a clone.

Each character appears when it was printed, but for the start of the processes, which is shortened. A viewer that shows
no animations, or whose user wants none, sees the end.
"""

import os
import pty
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from time import monotonic
from typing import NamedTuple

COLUMNS = 88
MAX_START = 1.0  # seconds until the answer begins
CELL, LINE, MARGIN = 8.4, 19, 16  # pixels
BACKGROUND, TEXT, DIM, PROMPT = "#16181d", "#e6e6e6", "#8b949e", "#7ee787"
COMMAND = "quire demo"
_PIECE = re.compile(r"\x1b\[(\d+)m|\x1b\[(K)|([^\x1b]+)")


class Span(NamedTuple):
    """Characters of one row that appear at one time, in seconds; ``column`` is that of the first."""

    row: int
    column: int
    at: float
    color: str
    text: str


def record() -> list[tuple[float, str]]:
    """Runs the command in a terminal. Returns what it printed, with the time in seconds. Raises ``SystemExit`` if it
    fails.
    """
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "quire_cli.main", "demo"]
    with subprocess.Popen(command, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL) as process:
        os.close(follower)
        began, events = monotonic(), []
        while True:
            try:
                data = os.read(leader, 1 << 16)
            except OSError:  # the last writer is gone
                break
            events.append((monotonic() - began, data.decode(errors="replace")))
    if process.returncode:
        raise SystemExit("".join(text for _, text in events))
    return events


def shortened(events: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """The events with a start of at most ``MAX_START``."""
    start = next(at for at, text in events if "ready after" in text)
    return [(at * MAX_START / start if at < start else at - start + MAX_START, text) for at, text in events]


def laid_out(events: list[tuple[float, str]]) -> list[Span]:
    """Puts the text into rows, broken between words where one is full. Lines that move are shown as they end."""
    spans = [Span(0, 0, 0.0, PROMPT, "$ "), Span(0, 2, 0.0, TEXT, COMMAND)]
    row, column, color = 1, 0, TEXT
    for at, text in events:
        for code, erases, run in _PIECE.findall(text.replace("\r", "")):
            if code:
                color = DIM if code == "2" else TEXT
            if erases:  # a line that moves: its end is shown
                spans, column = [span for span in spans if span.row != row], 0
            for part in re.findall(r"\n| ?[^\n ]+| ", run):
                fits = column + len(part) <= COLUMNS
                if part == "\n" or not fits:
                    row, column = row + 1, 0
                if part != "\n":
                    word = part if fits else part.lstrip()
                    spans.append(Span(row, column, at, color, word))
                    column += len(word)
    return spans


def drawn(spans: list[Span]) -> str:
    """The picture."""
    width = int(COLUMNS * CELL + 2 * MARGIN)
    height = (max(span.row for span in spans) + 1) * LINE + 2 * MARGIN
    texts = "\n".join(
        f'<text x="{MARGIN + span.column * CELL:.1f}" y="{MARGIN + span.row * LINE + 13}" fill="{span.color}" '
        f'style="animation-delay:{span.at:.2f}s">{escape(span.text)}</text>'
        for span in spans
        if span.text.strip()
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">
<title>quire demo: an answer continues after the engine that writes it is killed</title>
<style>
text {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre }}
text {{ animation: show 1ms both }}
@keyframes show {{ from {{ opacity: 0 }} to {{ opacity: 1 }} }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none }} }}
</style>
<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>
{texts}
</svg>
"""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawn(laid_out(shortened(record()))))
