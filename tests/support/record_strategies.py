"""Any request, any answer to it, and how they are stored: strategies of hypothesis."""

from array import array
from dataclasses import replace
from functools import partial
from zlib import crc32

from hypothesis import strategies as st
from quire_proto.sampling import FinishReason, SamplingParams, StopToken, TokenLogprobs
from quire_proto.structured_output import Structured, StructuredKind, choice
from quire_router.core.generation import GenerationRequest, LoRA, Usage
from quire_router.journal.base import RecordedDelta
from quire_router.journal.codec import encode_request_fields
from quire_router.journal.token_log import TokenLog

token_ids = st.integers(0, 2**31 - 1)
grammars = st.one_of(
    st.just(Structured(StructuredKind.JSON_OBJECT)),
    st.builds(Structured, st.just(StructuredKind.REGEX), st.text(min_size=1, max_size=9)),
    st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3).map(choice),
)
sampling = st.one_of(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(0, 2**31 - 1),
        seed=st.integers(0, 2**64 - 1),
        max_tokens=st.integers(1, 10**6),
        stop_token_ids=st.lists(token_ids, max_size=16).map(tuple),
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.1, 10),
        logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=3).map(lambda bias: tuple(bias.items())),
        bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        n=st.integers(1, 4),
        best_of=st.sampled_from([0, 4, 5]),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(0, 20),
        structured=st.none() | grammars,
    ),
    st.builds(SamplingParams, ignore_eos=st.booleans(), min_tokens=st.integers(0, 16)),
    st.builds(
        SamplingParams,
        n=st.integers(1, 4),
        beam_width=st.integers(4, 6),
        length_penalty=st.floats(-10, 10),
        early_stopping=st.sampled_from([True, False, "never"]),
    ),
)
generations = st.builds(
    GenerationRequest,
    request_id=st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    model=st.text(max_size=20),
    prompt_token_ids=st.lists(token_ids, max_size=50).map(partial(array, "i")),
    params=sampling,
    stop=st.lists(st.text(st.characters(), max_size=5), max_size=4).map(tuple),
    include_stop=st.booleans(),
    skip_special_tokens=st.booleans(),
    echo=st.booleans(),
    priority=st.integers(-(2**31), 2**31 - 1),
    operation=st.sampled_from(["chat", "text_completion"]),
    tenant=st.text(max_size=9),
    cache_salt=st.binary(max_size=32),
    stream=st.booleans(),
    created=st.floats(0, 2e9),
    response_options=st.text(max_size=9),
    conversation=st.text(st.characters(), max_size=9),
    parts=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    digest=st.text(max_size=9),
    background=st.booleans(),
    session=st.text(max_size=9),
    lora=st.none() | st.builds(LoRA, st.text(min_size=1, max_size=9), st.binary(min_size=16, max_size=16)),
    deadline=st.none() | st.floats(0, 2e9),
    served_name=st.text(max_size=9),
)
any_tokens = st.lists(token_ids, max_size=50)
floats = st.floats(width=32, allow_nan=False)
any_logprobs = st.builds(TokenLogprobs, floats, st.lists(st.tuples(token_ids, floats), max_size=3).map(tuple))


@st.composite
def any_delta(draw: st.DrawFn, plain: bool = False) -> RecordedDelta:
    """A delta of one of four choices, as an answer may have it."""
    tokens, reason = draw(st.lists(token_ids, max_size=4)), draw(st.none() | st.sampled_from(FinishReason))
    delta = RecordedDelta(draw(st.integers(0, 3)), tokens, reason)
    if plain or draw(st.booleans()):
        return delta
    return replace(
        delta,
        logprobs=draw(st.lists(any_logprobs, min_size=len(tokens), max_size=len(tokens))),
        prompt_logprobs=draw(st.lists(any_logprobs, max_size=3)),
        score=None if reason is None else draw(st.none() | floats),
        stop_token=None if reason is None else draw(st.none() | st.builds(StopToken, token_ids, any_logprobs)),
    )


deltas = st.lists(any_delta(), max_size=8)


def possible(deltas: list[RecordedDelta], choices: int) -> list[RecordedDelta]:
    """The deltas without those that an answer of so many choices cannot have."""
    kept: list[RecordedDelta] = []
    ended, prompted = set[int](), False
    for delta in deltas:
        if delta.index < choices and delta.index not in ended:
            kept.append(replace(delta, prompt_logprobs=[]) if prompted else delta)
            prompted = prompted or bool(delta.prompt_logprobs)
            ended |= {delta.index} if delta.finish_reason is not None else set()
    return kept


def deliver(deltas: list[RecordedDelta], choices: int) -> TokenLog:
    """The log of these deltas, each of which is appended twice, the second time in vain."""
    log, lengths = TokenLog(choices), [0] * choices
    for delta in deltas:
        before = len(log.values)
        assert log.append(lengths[delta.index], delta) == len(log.values) - before
        assert log.append(lengths[delta.index], delta) == 0
        lengths[delta.index] += len(delta.token_ids)
    return log


usages = st.builds(Usage, *[st.integers(0, 2**20)] * 3)


def stored(generation: GenerationRequest, log: bytes = b"", **others: bytes) -> dict[bytes, bytes]:
    """The fields of a record as Redis has them."""
    sealed = encode_request_fields(generation)
    fields = {b"request": sealed.request, b"prompt": sealed.prompt, b"seal": b"%d" % sealed.seal}
    fields |= {b"sum": b"%d" % crc32(log)}
    if sealed.conversation:
        fields[b"conversation"] = sealed.conversation
    return fields | {b"owner": b"me", b"epoch": b"1"} | {name.encode(): value for name, value in others.items()}
