"""``Conversation``: what is typed at the prompt of ``quire chat``, and the commands that begin with ``/``."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from quire_proto.folders import trusted_folder, user_state_folder
from quire_proto.terminal import DIM, colored, did_you_mean, report_error

from quire_cli.chat.api_client import ApiClient, ApiError

PROMPT, MORE = "> ", "… "
QUOTES = '"""'  # begin and end a message of several lines
MAX_HISTORY = 1000  # lines
LEAVE = "/bye or Ctrl-D ends"
HELP = f"""/clear          begin another conversation (also /new)
/model [NAME]   list the models, or continue with another
/system [TEXT]  show the instructions, or begin another conversation with these
/save FILE      write the conversation as the body of a chat request (JSON)
/help           this list (also /?)
/bye            end (also /exit, /quit, Ctrl-D)
{QUOTES} begins and ends a message of several lines. A message that begins with / needs a space before it.
Ctrl-C ends an answer.
"""
ENDS = ("/bye", "/exit", "/quit")
Message = Mapping[str, str]


class Conversation:
    """The messages so far, and the fields of each request in ``body``, the model among them."""

    def __init__(self, client: ApiClient, body: dict[str, object], system: str | None) -> None:
        self._client = client
        self.body = body
        self._system = system
        self.messages: list[Message] = []
        self._clear("")
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/new": self._clear,
            "/model": self._model,
            "/system": self._set_system,
            "/save": self._save,
            "/help": self._help,
            "/?": self._help,
        }

    def run(self, answer: Callable[[list[Message]], str]) -> None:
        """Reads until the end, and has each message answered. An answer that is interrupted or fails is forgotten,
        together with its question.
        """
        _tell(f"{self.body['model']} at {self._client.url}; /help lists the commands, {LEAVE}")
        for text in _typed():
            word, _, rest = text.partition(" ")
            if word in ENDS:
                return
            if word in self._commands:
                self._commands[word](rest.strip())
            elif _is_command(word):
                near = get_close_matches(word, [*self._commands, *ENDS], 1)
                report_error(f"unknown command {word}{did_you_mean(near[0] if near else '')}", "/help lists them")
            else:
                self._ask(text.strip(), answer)

    def _ask(self, text: str, answer: Callable[[list[Message]], str]) -> None:
        question = [*self.messages, {"role": "user", "content": text}]
        try:
            self.messages = [*question, {"role": "assistant", "content": answer(question)}]
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        except ApiError as error:
            report_error(str(error))

    def _clear(self, _: str) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def _model(self, name: str) -> None:
        if name:
            self.body["model"] = name
            _tell(f"{name} answers from here on")
            return
        try:
            for each in self._client.models():
                sys.stdout.write(f"{'*' if each == self.body['model'] else ' '} {each}\n")
        except (ApiError, OSError) as error:
            report_error(str(error))

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
            self._clear("")
        sys.stdout.write(f"{self._system or 'no instructions'}\n")

    def _save(self, name: str) -> None:
        if not name:
            report_error("/save needs the name of a file")
            return
        try:
            with open(os.open(Path(name).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump({**self.body, "messages": self.messages}, file, indent=2, ensure_ascii=False)
            _tell(f"{len(self.messages)} messages are in {name}")
        except OSError as error:
            report_error(f"{name} cannot be written: {error.strerror}")

    def _help(self, _: str) -> None:
        sys.stderr.write(HELP)


def _is_command(word: str) -> bool:
    """Whether a word is meant as a command, and not as a path such as ``/etc/hosts``."""
    return word.startswith("/") and word[1:].isalpha()


def _typed() -> Iterator[str]:
    """Yields what is typed until Ctrl-D; several lines between quotes are one message. Ctrl-C begins the line anew."""
    if sys.stdin is None or not sys.stdin.isatty():
        return
    readline = _history()
    lines: list[str] = []
    while True:
        try:
            line = input(MORE if lines else PROMPT).rstrip()
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            _tell(LEAVE)
            lines.clear()
            continue
        if not lines and not line.startswith(QUOTES):
            if line.strip():
                _remember(readline)
                yield line
            continue
        lines.append(line)
        text = "\n".join(lines)
        if len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES):
            lines.clear()
            _remember(readline)
            yield " " + text.removeprefix(QUOTES).removesuffix(QUOTES).strip()


def _history() -> ModuleType | None:
    """Gives ``input`` its editing, and the lines of earlier conversations, which only this user may read."""
    try:
        import readline
    except ImportError:
        return None
    with suppress(OSError, RuntimeError):
        file = trusted_folder(user_state_folder()) / "chat_history"
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        readline.read_history_file(file)
        readline.set_history_length(MAX_HISTORY)
    return readline


def _remember(readline: ModuleType | None) -> None:
    """Writes the history, so that it survives however the command ends."""
    if readline is not None:
        with suppress(OSError, RuntimeError):
            readline.write_history_file(user_state_folder() / "chat_history")


def _tell(text: str) -> None:
    sys.stderr.write(f"{colored(text, DIM, sys.stderr)}\n")
