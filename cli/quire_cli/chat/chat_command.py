"""The commands ``quire chat`` and ``quire complete``: what is typed goes to a running server, its answer to the
terminal as it is generated.

Ctrl-C ends an answer, and cancels its request; at the prompt it ends the command, as Ctrl-D does.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress

from quire_proto.cli import FlagParser
from quire_proto.terminal import DIM, INTERRUPTED, PLAIN, fail, has_color, report_error

from quire_cli.chat.api_client import ApiClient, ApiError
from quire_cli.machine.server import DEFAULT_URL, KEY_HELP, base_url, key_of_environment

PROMPT = "> "
CHAT = """Talks to a running server, by default the one that quire serve starts.

Without MESSAGE it asks for one after the other, and the model sees the whole conversation; /clear begins
another one, and /help tells the other commands. MESSAGE alone is answered once. Text that is piped
in is part of the message."""
COMPLETE = """Continues a text at a running server, by default the one that quire serve starts.

PROMPT, or the text that is piped in, is printed together with its continuation."""
HELP = """/clear  begin another conversation (also /new)
/help   this list (also /?)
/exit   end (also /bye, /quit, Ctrl-D)
A message that begins with / is sent with a space before it. Ctrl-C ends an answer.
"""
CLEAR, ENDS, HELPS = ("/clear", "/new"), ("/exit", "/bye", "/quit"), ("/help", "/?")
SLASH_WORD = re.compile(r"/[a-z?]*(\s|$)")  # and no path, such as /etc/hosts
Message = Mapping[str, str]


def chat(arguments: Sequence[str]) -> None:
    """Runs ``quire chat``. Exits with 1 and one sentence if the server cannot answer."""
    parser = _parser("quire chat", CHAT)
    parser.add_argument("message", nargs="*", metavar="MESSAGE", help="what is asked")
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    flags = parser.parse_args(list(arguments))
    _guarded(lambda: _chat(flags))


def complete(arguments: Sequence[str]) -> None:
    """Runs ``quire complete``. Exits with 1 and one sentence if the server cannot answer."""
    parser = _parser("quire complete", COMPLETE)
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="the text to continue")
    flags = parser.parse_args(list(arguments))
    _guarded(lambda: _complete(flags))


def _parser(name: str, description: str) -> FlagParser:
    parser = FlagParser(name, description, {}, dict.fromkeys(("--host", "--port", "--base-url"), "use --url"))
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", metavar="KEY", help=KEY_HELP)
    parser.add_argument("--model", metavar="NAME", help="by default the only one that is served")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, metavar="NUMBER", help="how freely is chosen; 0: never")
    parser.add_argument("--top-p", type=float, metavar="NUMBER", help="part of the probability that is chosen from")
    parser.add_argument("--seed", type=int, metavar="N", help="the same choices each time")
    return parser


def _guarded(work: Callable[[], None]) -> None:
    try:
        work()
    except ApiError as error:
        fail(str(error))
    except BrokenPipeError:  # ``| head``; a reader that is gone needs no sentence
        sys.stdout = None  # what is buffered cannot be written at the exit either
        raise SystemExit(1) from None
    except OSError as error:
        fail(f"the server cannot be reached: {error}.")
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        raise SystemExit(INTERRUPTED) from None


def _chat(flags: Namespace) -> None:
    client = _client(flags)
    body = _body(flags, client)
    beginning: list[Message] = [{"role": "system", "content": flags.system}] if flags.system else []
    message = _given(flags.message)
    if message is not None:
        _show_chat(client, body, [*beginning, {"role": "user", "content": message}])
        return
    sys.stderr.write(f"{body['model']} at {client.url}; /help tells the commands, Ctrl-D ends\n")
    messages = list(beginning)
    for line in _lines():
        if SLASH_WORD.match(line):
            word = line.split()[0]
            if word in ENDS:
                return
            if word in CLEAR:
                messages = list(beginning)
            elif word in HELPS:
                sys.stderr.write(HELP)
            else:
                report_error(f"unknown command {word}", "/help lists the commands")
            continue
        messages.append({"role": "user", "content": line.strip()})
        try:
            messages.append({"role": "assistant", "content": _show_chat(client, body, messages)})
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            messages.pop()  # an answer that nobody wanted, and its question
        except ApiError as error:
            report_error(str(error))
            messages.pop()


def _complete(flags: Namespace) -> None:
    client = _client(flags)
    prompt = _given(flags.prompt)
    if not prompt:
        fail("PROMPT is needed, as an argument or piped in", status=2)
    body = {"max_tokens": 256, **_body(flags, client), "prompt": prompt}
    with closing(client.stream("/completions", body)) as chunks:
        for number, chunk in enumerate(chunks):
            text = "".join(choice.get("text") or "" for choice in chunk.get("choices", ()))
            _show(text if number else prompt + text)  # a prompt that is refused is not printed
    _show("\n")


def _show_chat(client: ApiClient, body: Mapping[str, object], messages: Sequence[Message]) -> str:
    """Prints an answer as it comes, thoughts dimmed; returns it without its thoughts."""
    answer, thinking = "", False
    dim, plain = (DIM, PLAIN) if has_color(sys.stdout) else ("", "")
    with closing(client.stream("/chat/completions", {**body, "messages": messages})) as chunks:
        for delta in (choice.get("delta", {}) for chunk in chunks for choice in chunk.get("choices", ())):
            thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
            if sys.stdout.isatty() and thinking != bool(thought) and (thought or text):
                _show(dim if thought else f"{plain}\n")
                thinking = bool(thought)
            _show(thought + text if sys.stdout.isatty() else text)
            answer += text
    _show(f"{plain}\n" if thinking else "\n")
    return answer


def _client(flags: Namespace) -> ApiClient:
    return ApiClient(flags.url, flags.api_key or key_of_environment(base_url(flags.url)))


def _body(flags: Namespace, client: ApiClient) -> dict[str, object]:
    """The fields of each request that the flags set, and the model."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    given: dict[str, object] = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    return {"model": flags.model or _only_model(client), **given}


def _only_model(client: ApiClient) -> str:
    try:
        models = client.models()
    except ConnectionRefusedError:
        raise ApiError(f"no server answers at {client.url}; quire serve MODEL starts one.") from None
    if len(models) != 1:
        raise ApiError(f"{client.url} serves {', '.join(models) or 'no model'}: choose with --model.")
    return models[0]


def _given(words: Sequence[str]) -> str | None:
    """Returns the arguments and the piped text; None without both."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    parts = [part for part in (" ".join(words), piped.rstrip("\n")) if part]
    return "\n\n".join(parts) or None


def _lines() -> Iterator[str]:
    """Yields typed lines until Ctrl-D or Ctrl-C."""
    if sys.stdin is None or not sys.stdin.isatty():
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history and its editing
    while True:
        try:
            line = input(PROMPT).rstrip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        if line.strip():
            yield line


def _show(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
