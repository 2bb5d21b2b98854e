"""The commands ``quire chat`` and ``quire complete``: what is typed goes to a running server, its answer to the
terminal as it is generated.

Ctrl-C ends an answer, and cancels its request; at the prompt it clears the line, and Ctrl-D ends the command.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from time import monotonic, sleep

from quire_proto.cli import FlagParser
from quire_proto.terminal import INTERRUPTED, fail

from quire_cli.chat.answer_view import AnswerView
from quire_cli.chat.api_client import ApiClient, ApiError
from quire_cli.chat.conversation import Conversation, Message
from quire_cli.chat.fleet_watch import FleetWatch
from quire_cli.machine.server import KEY_HELP, URL_HELP, find_server, is_starting, key_of_environment, no_server

CHAT = """Talks to a running server, by default the newest that quire serve runs here.

Without MESSAGE it asks for one after the other, and the model sees the whole conversation; /clear begins
another one, and /help tells the other commands. MESSAGE alone is answered once. Text that is piped
in is part of the message."""
COMPLETE = """Continues a text at a running server, by default the newest that quire serve runs here.

PROMPT, or the text that is piped in, is printed together with its continuation."""
CHAT_EXAMPLES = """examples:
  quire chat
  quire chat "Summarise this:" < notes.txt
  quire chat --url http://127.0.0.1:8010 --system "Answer in one sentence." --temperature 0"""
COMPLETE_EXAMPLES = """examples:
  quire complete "Once upon a time" --max-tokens 64"""
LONGEST_START = 600.0  # seconds in which a server that is starting begins to answer
_ANSWER_PERIOD = 0.5  # seconds between two tries


def chat(arguments: Sequence[str]) -> None:
    """Runs ``quire chat``. Exits with 1 and one sentence if the server cannot answer."""
    flags = chat_parser().parse_args(list(arguments))
    _guarded(lambda: _chat(flags))


def complete(arguments: Sequence[str]) -> None:
    """Runs ``quire complete``. Exits with 1 and one sentence if the server cannot answer."""
    flags = complete_parser().parse_args(list(arguments))
    _guarded(lambda: _complete(flags))


def chat_parser() -> FlagParser:
    """Returns the parser of the flags of ``quire chat``."""
    parser = _parser("quire chat", CHAT, CHAT_EXAMPLES)
    parser.add_argument("message", nargs="*", metavar="MESSAGE", help="what is asked")
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    parser.add_argument("--raw", action="store_true", help="show answers as they are, without colors for Markdown")
    return parser


def complete_parser() -> FlagParser:
    """Returns the parser of the flags of ``quire complete``."""
    parser = _parser("quire complete", COMPLETE, COMPLETE_EXAMPLES)
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="the text to continue")
    return parser


def _parser(name: str, description: str, examples: str) -> FlagParser:
    parser = FlagParser(name, description, {}, dict.fromkeys(("--host", "--port", "--base-url"), "use --url"))
    parser.epilog = examples
    parser.add_argument("--url", metavar="URL", help=URL_HELP)
    parser.add_argument("--api-key", metavar="KEY", help=KEY_HELP)
    parser.add_argument("--model", metavar="NAME", help="by default the only one that is served")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, metavar="NUMBER", help="sampling temperature; 0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="NUMBER", help="nucleus sampling: part of the probability")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of sampling: the same one draws the same tokens")
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
    message = _given(flags.message)
    talk = Conversation(client, body, flags.system)
    if message is None:
        talk.run(lambda messages: _show_chat(client, body, messages, raw=flags.raw))
    else:
        _show_chat(client, body, [*talk.messages, {"role": "user", "content": message}], raw=flags.raw)


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


def _show_chat(client: ApiClient, body: Mapping[str, object], messages: Sequence[Message], *, raw: bool) -> str:
    """Shows an answer as it comes; returns it without its thoughts. In a terminal, also how fast it came, and what
    happened to its engine or its connection.
    """
    view, tokens = AnswerView(raw=raw), 0
    asked = {**body, "messages": messages}
    if view.is_terminal:
        asked["stream_options"] = {"include_usage": True}
    try:
        with (
            closing(client.stream("/chat/completions", asked, on_cut=view.cut, on_note=view.note)) as chunks,
            FleetWatch(client, str(body["model"]), view),
        ):
            for chunk in chunks:
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for delta in (choice.get("delta", {}) for choice in chunk.get("choices", ())):
                    view.add(delta.get("content") or "", delta.get("reasoning_content") or "")
    except BaseException:
        view.clear()
        raise
    view.end()
    view.tell_speed(tokens)
    return view.text


def _client(flags: Namespace) -> ApiClient:
    url = find_server(flags.url)
    return ApiClient(url, flags.api_key or key_of_environment(url))


def _body(flags: Namespace, client: ApiClient) -> dict[str, object]:
    """The fields of each request that the flags set, and the model."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    given: dict[str, object] = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    return {"model": flags.model or _only_model(client), **given}


def _only_model(client: ApiClient) -> str:
    models = _models(client)
    if len(models) != 1:
        raise ApiError(f"{client.url} serves {', '.join(models) or 'no model'}: choose with --model.")
    return models[0]


def _models(client: ApiClient) -> list[str]:
    """Returns the models that are served. Waits for a server that is starting here."""
    view, began = AnswerView(), monotonic()
    try:
        while True:
            try:
                return client.models()
            except ConnectionRefusedError:
                if not is_starting(client.url) or monotonic() - began > LONGEST_START:
                    raise ApiError(no_server(client.url)) from None
            view.wait(f"waiting for {client.url}: its server is starting ({monotonic() - began:.0f} s)")
            sleep(_ANSWER_PERIOD)
    finally:
        view.clear()


def _given(words: Sequence[str]) -> str | None:
    """Returns the arguments and the piped text; None without both."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    parts = [part for part in (" ".join(words), piped.rstrip("\n")) if part]
    return "\n\n".join(parts) or None


def _show(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
