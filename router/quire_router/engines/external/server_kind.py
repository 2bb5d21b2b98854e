"""``ServerKind``: what differs between the servers that others have written: how one is asked, what it answers, what it
cannot do, and how it says what it is and how busy.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from secrets import token_hex
from typing import Any, ClassVar

from prometheus_client.parser import text_string_to_metric_families
from quire.v1 import engine_pb2
from quire_proto.convert import sampling_from_proto
from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams, StopToken, choice_seed

from quire_router.core.errors import needs_quire, structured_cannot_resume
from quire_router.engines.attempt import Output
from quire_router.engines.external.http_client import BadAnswer, HttpClient, Json, ServerError
from quire_router.engines.output_stream import positions_of
from quire_router.engines.settings import KnownModel

MAX_SEED = 2**63 - 1
"""Others' seeds are signed."""

MAX_TOKEN_ID = 2**31 - 1

MAX_SAMPLES, MAX_SAMPLE = 4096, 4096
"""Of metrics that are read, and characters of each: the parser takes some 20 µs for one."""
_OTHER_VALUES = 16_384  # of an event, beside those of its tokens
_TOKEN_VALUES = 64  # of one that is written: commas in its text count, too
_MIX = 0xBF58476D1CE4E5B9  # odd, so that no two positions have one multiple


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One choice of a request, as a request of its own: choices that an earlier engine has begun differ in what was
    delivered of them. ``token_ids`` are the prompt's and what was ``delivered``; of ``params`` are ``seed``,
    ``max_tokens`` and ``min_tokens`` those of this choice from here on, and ``logprobs`` is set where ``best_of`` needs
    them. ``salt`` separates prefix caches. ``vocab_size`` is 0 if it is not known.
    """

    model: str
    request_id: str
    index: int
    token_ids: Sequence[int]
    delivered: int
    params: SamplingParams
    salt: bytes
    priority: int
    vocab_size: int = 0

    @property
    def max_values(self) -> int:
        """The most values that an event of the answer has: it may repeat the prompt, and all that was written."""
        of_token = _TOKEN_VALUES + 4 * (self.params.logprobs or 0)
        return _OTHER_VALUES + len(self.token_ids) + of_token * (self.params.max_tokens + 1)

    @property
    def fresh_seed(self) -> int:
        """A seed for a sampler whose random numbers begin anew with each request. Where an earlier engine has begun the
        choice it is another one: with the same numbers again, what is drawn would depend on how the choice began.
        """
        return (self.params.seed ^ (self.delivered * _MIX)) & MAX_SEED


def split_choices(message: engine_pb2.Submit, model: str, vocab_size: int = 0) -> Iterator[ChoiceRequest]:
    """Yields each choice that is to be run, of the ``model`` as the server calls it, with so many tokens. Its id has an
    ending of its own at each attempt: a server refuses one that it knows, and may not have noticed yet that the attempt
    before was given up.
    """
    params = sampling_from_proto(message.sampling)
    written: dict[int, Sequence[int]] = {0: message.output_token_ids}
    written |= {each.index: each.token_ids for each in message.delivered}
    prompt = list(message.prompt_token_ids)
    logprobs = params.logprobs if params.logprobs is not None or not params.wants_logprobs else 0
    positions, attempt = positions_of(message), token_hex(4)
    for index, position in positions.items():
        own = replace(
            params,
            n=1,
            best_of=0,
            seed=choice_seed(params.seed, index) & MAX_SEED,
            max_tokens=params.max_tokens - position,
            min_tokens=max(0, params.min_tokens - position),
            logprobs=logprobs,
        )
        request_id = f"{message.request_id}-{index}-{attempt}"
        own_tokens = written.get(index)
        tokens = [*prompt, *own_tokens] if own_tokens else prompt
        salt, priority = message.cache_salt, message.priority
        yield ChoiceRequest(model, request_id, index, tokens, position, own, salt, priority, vocab_size)


class ChoiceReader(ABC):
    """Turns the events of one choice into outputs. ``position`` is that of its next token, ``left`` how many it may
    still have, and ``ended`` whether its end has come.
    """

    def __init__(self, choice: ChoiceRequest) -> None:
        self.index = choice.index
        self.position = choice.delivered
        self.left = choice.params.max_tokens
        self.wants_logprobs = choice.params.logprobs is not None
        self.num_top = choice.params.logprobs or 0
        self.stop_token_ids = choice.params.stop_token_ids
        self.ended = False
        self._vocab_size = choice.vocab_size or MAX_TOKEN_ID + 1

    def read(self, event: Json) -> Output | None:
        """Returns what is new in an event, None if nothing is. Raises ``BadAnswer``, and ``AttemptFailed`` where the
        server gave the request up.
        """
        try:
            output = self._read(event)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise BadAnswer(f"an event lacks what it should have: {error!r}") from None
        if output is not None:
            self._check(output)
            self.position += len(output.token_ids)
            self.left -= len(output.token_ids)
            self.ended = output.finish_reason is not None
        return output

    def _check(self, output: Output) -> None:
        """Raises ``BadAnswer`` for what no server may answer, so that another one goes on."""
        if len(output.token_ids) > self.left:
            raise BadAnswer("it answers with more tokens than it was asked for")
        stop = output.stop_token
        logprobs = [*output.logprobs, *([] if stop is None or stop.logprobs is None else [stop.logprobs])]
        token_ids = [*output.token_ids, *([] if stop is None else [stop.token_id])]
        token_ids += [token_id for each in logprobs for token_id, _ in each.top]
        if not all(type(each) is int and 0 <= each < self._vocab_size for each in token_ids):
            raise BadAnswer("a token is none of the vocabulary")
        if not all(isfinite(value) for each in logprobs for value in (each.logprob, *(top for _, top in each.top))):
            raise BadAnswer("a log-probability is not a number")

    @abstractmethod
    def _read(self, event: Json) -> Output | None:
        """As ``read``; may raise what follows from a wrong shape."""


class ServerKind(ABC):
    """One kind of server. ``name`` is the one in ``--engine``, ``title`` the one in messages; requests are posted to
    ``path``. ``unnamed_status`` is that of HTTP which errors within a stream mean that name none.
    ``publishes_kv_events``: it can, once it has been described.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    path: ClassVar[str]
    unnamed_status: ClassVar[int] = 500
    publishes_kv_events = False

    @abstractmethod
    def body(self, choice: ChoiceRequest) -> dict[str, Any]:
        """What is posted for a choice. Nothing is left to the server's defaults, which may be those of the model."""

    @abstractmethod
    def reader(self, choice: ChoiceRequest) -> ChoiceReader:
        """Reads the answer to it."""

    @abstractmethod
    async def describe(self, http: HttpClient, models: Mapping[str, KnownModel]) -> engine_pb2.DescribeResponse:
        """Asks what the server is, of whose models ``models`` are wanted. What it does not say is left out. Raises as
        ``HttpClient.get``.
        """

    @abstractmethod
    async def load(self, http: HttpClient) -> engine_pb2.Load:
        """Asks how busy the server is, as far as it says. Raises as ``HttpClient.get``: it is not healthy then."""

    @abstractmethod
    async def tokenize(self, http: HttpClient, model: str, text: str) -> list[int] | None:
        """The server's tokens of a text without those that begin a prompt, None if it cannot say."""

    def unsupported(self, params: SamplingParams, *, resumed: bool) -> QuireError | None:
        """Why no server of this kind can run a request, None if it can. ``resumed``: another engine has begun it."""
        if params.structured is not None and resumed:  # grammars are compiled for what a server writes itself
            return structured_cannot_resume(self.title)
        if params.beam_width:
            return self._cannot("beam_width", "beam searches")
        if params.prompt_logprobs is not None:
            return self._cannot("prompt_logprobs", "log-probabilities of prompts")
        if params.bad_words:
            return self._cannot("bad_words", "bad_words")
        return None

    def _cannot(self, param: str, what: str) -> QuireError:
        return needs_quire(param, what, self.title)


def read_load(text: bytes, names: Mapping[str, str], blocks: int) -> engine_pb2.Load:
    """The load in some metrics, of which ``names`` says which are ``running``, ``waiting`` and the part of the
    ``blocks`` in ``usage``. A server with several engines has each metric of each of them, and SGLang with priorities
    that of each priority beside the sum. Raises ``BadAnswer``.
    """
    found: dict[str, list[float]] = {meaning: [] for meaning in names.values()}
    for name, labels, value in iter_samples(text, names):
        if not labels.get("priority"):
            found[names[name]].append(value)
    usage = sum(found["usage"]) / max(1, len(found["usage"]))
    return engine_pb2.Load(
        running=positive(sum(found["running"])),
        waiting=positive(sum(found["waiting"])),
        blocks_total=blocks,
        blocks_free=round(blocks * (1 - min(1.0, max(0.0, usage)))),
    )


def iter_samples(text: bytes, names: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yields name, labels and value of each sample of these metrics. Raises ``BadAnswer``.

    Lines of other metrics are dropped first: a server has hundreds, and parsing them would take longer than anything
    else here.
    """
    prefixes = tuple(f"{name}{end}" for name in names for end in "{ ")
    try:
        lines = [line for line in text.decode().splitlines() if line.startswith(prefixes)]
        if len(lines) > MAX_SAMPLES or any(len(line) > MAX_SAMPLE for line in lines):
            raise BadAnswer(f"its metrics have more than {MAX_SAMPLES} samples of one kind, or longer ones than any")
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if sample.value == sample.value:  # a number
                    yield sample.name, sample.labels, sample.value
    except ValueError as error:
        raise BadAnswer(f"its metrics cannot be parsed: {error}") from None


async def ask_tokenize(http: HttpClient, model: str, text: str) -> list[int] | None:
    """As ``ServerKind.tokenize``, of servers with ``/tokenize`` in vLLM's form; None if it is missing or fails."""
    try:
        answer = await http.post_json("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    except ServerError:
        return None
    tokens = answer.get("tokens")
    return tokens if isinstance(tokens, list) else None


def served_model(listed: Json, models: Mapping[str, KnownModel]) -> tuple[Json, list[str]]:
    """The entry of ``/v1/models`` that is one of ``models``, or the first if none is, and all names of the same model.
    Adapters, which have a ``parent``, do not count. Raises ``BadAnswer``.
    """
    data = listed.get("data")
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    bases = [entry for entry in entries if not entry.get("parent") and isinstance(entry.get("id"), str)]
    if not bases:
        raise BadAnswer("it lists no model")
    chosen = next((entry for model in models for entry in bases if entry["id"] == model), bases[0])
    root = chosen.get("root")
    aliases = [entry["id"] for entry in bases if root and entry.get("root") == root and entry is not chosen]
    return chosen, [chosen["id"], *aliases]


def positive(value: Any) -> int:
    """The value if it is a number above 0 that a message can hold; otherwise 0, which is unknown."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
    return number if 0 < number < 2**32 else 0


def drop_stop_token(output: Output, stop_token_ids: Collection[int]) -> Output:
    """The output without its last token, which ended it and is not one of its tokens: no stop string was asked for. It
    is told where it has log-probabilities, or is one of the request's ``stop_token_ids``.
    """
    last = output.token_ids.pop()
    logprobs = output.logprobs.pop() if output.logprobs else None
    if logprobs is not None or last in stop_token_ids:
        output.stop_token = StopToken(last, logprobs)
    return output


def most_probable(pairs: Sequence[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` most probable of some tokens with their log-probabilities, best first. Those that cannot be, as a
    grammar forbids them, are left out.
    """
    possible = [pair for pair in pairs if pair[1] != -inf]
    return tuple(sorted(possible, key=lambda pair: (-pair[1], pair[0]))[:count])
