"""The rules that router and engine compute alike: block names, parameter ranges, errors, conversions."""

import json
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import types_pb2 as pb
from quire_proto.context_length import check_length
from quire_proto.convert import (
    error_from_proto,
    error_to_proto,
    finish_from_proto,
    finish_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from quire_proto.errors import STATUS, ErrorCode, QuireError
from quire_proto.hashing import ROOT, extra_key, hash_block
from quire_proto.sampling import MAX_SEED, FinishReason, SamplingParams, choice_seed
from quire_proto.structured_output import Structured, StructuredKind, choice

from tests.support.hashes import hash_blocks

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_a_block_is_named_by_parent_tokens_and_extra() -> None:
    tokens = [1, 256, 2**31 - 1]
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert hash_block(ROOT, tokens, b"x") == blake2b(bytes(16) + packed + b"x", digest_size=16).digest()


@given(TOKENS, st.integers(1, 8), st.binary(max_size=8))
def test_names_are_a_chain_over_full_blocks(tokens: list[int], block_size: int, extra: bytes) -> None:
    names = hash_blocks(tokens, block_size, extra)
    assert len(names) == len(tokens) // block_size
    for count in range(len(names)):
        assert hash_blocks(tokens[: count * block_size], block_size, extra) == names[:count]


@given(TOKENS.filter(bool), st.data())
def test_another_token_changes_every_later_name(tokens: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens]
    other[index] ^= 1
    for before, after in zip(hash_blocks(tokens, 1, b"")[index:], hash_blocks(other, 1, b"")[index:], strict=True):
        assert before != after


EXTRA_PARTS = st.tuples(st.text(max_size=6), st.binary(max_size=6), st.binary(max_size=6))


@given(EXTRA_PARTS, EXTRA_PARTS)
def test_extra_keys_collide_for_equal_parts_only(
    one: tuple[str, bytes, bytes], other: tuple[str, bytes, bytes]
) -> None:
    assert (extra_key(*one) == extra_key(*other)) == (one == other)


def test_the_key_without_an_adapter_is_what_it_always_was() -> None:
    assert extra_key("rev", b"salt") == b"\x03\0\0\0rev\x04\0\0\0salt" == extra_key("rev", b"salt", b"")


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2, width=32),
        top_p=st.floats(0.015625, 1, width=32),
        top_k=st.integers(0, 2**31 - 1),
        seed=st.integers(0, MAX_SEED),
        max_tokens=st.integers(1, 2**31 - 1),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=16).map(tuple),
        ignore_eos=st.booleans(),
        min_p=st.floats(0, 1, width=32),
        presence_penalty=st.floats(-2, 2, width=32),
        frequency_penalty=st.floats(-2, 2, width=32),
        repetition_penalty=st.floats(0.125, 10, width=32),
        logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100, width=32), max_size=4).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
        bad_words=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        min_tokens=st.integers(0, 1),
        n=st.integers(1, 8),
        best_of=st.sampled_from([0, 8, 64]),
        length_penalty=st.floats(-10, 10, width=32),
        early_stopping=st.sampled_from([True, False, "never"]),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(0, 20),
    )
)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    message = pb.SamplingParams.FromString(sampling_to_proto(params).SerializeToString())
    assert sampling_from_proto(message) == params


GRAMMARS = [
    Structured(StructuredKind.JSON_OBJECT),
    Structured(StructuredKind.JSON_SCHEMA, '{"type": "integer"}'),
    Structured(StructuredKind.REGEX, "[0-9]+"),
    choice(["yes", "nö"]),
    Structured(StructuredKind.GRAMMAR, 'start: "a"+'),
]


@pytest.mark.parametrize(
    "params", [SamplingParams(structured=each) for each in GRAMMARS] + [SamplingParams(beam_width=4)]
)
def test_grammars_and_beams_survive_the_wire(params: SamplingParams) -> None:
    message = pb.SamplingParams.FromString(sampling_to_proto(params).SerializeToString())
    assert sampling_from_proto(message) == params


@pytest.mark.parametrize(
    ("one", "other", "given"),
    [
        ("beam_width", "temperature", {"beam_width": 4, "temperature": 0.5}),
        ("beam_width", "top_p", {"beam_width": 4, "top_p": 0.5}),
        ("beam_width", "top_k", {"beam_width": 4, "top_k": 5}),
        ("beam_width", "min_p", {"beam_width": 4, "min_p": 0.5}),
        ("beam_width", "best_of", {"beam_width": 4, "best_of": 4}),
        ("beam_width", "logprobs", {"beam_width": 4, "logprobs": 0}),
        ("beam_width", "response_format", {"beam_width": 4, "structured": GRAMMARS[0]}),
        ("response_format", "ignore_eos", {"structured": GRAMMARS[0], "ignore_eos": True}),
        ("response_format", "min_tokens", {"structured": GRAMMARS[0], "min_tokens": 2}),
    ],
)
def test_parameters_that_exclude_each_other_are_named_together(one: str, other: str, given: dict[str, object]) -> None:
    with pytest.raises(QuireError) as refused:
        SamplingParams(**given)
    assert one in refused.value.message
    assert other in refused.value.message


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_object", "{}"), ("json_schema", ""), ("regex", ""), ("grammar", ""), ("regex", "x" * 65537),
        ("choice", "nonsense"), ("choice", "[]"), ("choice", '["a", ""]'), ("choice", '["a", 1]'),
        ("choice", '{"a": 1}'),
        ("choice", json.dumps(["x"] * 1025)),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_one_is_refused_by_name(kind: str, text: str) -> None:
    with pytest.raises(QuireError) as refused:
        Structured(StructuredKind(kind), text)
    assert refused.value.param == ("response_format" if kind.startswith("json") else kind)
    assert len(refused.value.message) < 200


def test_the_choices_of_a_request_have_seeds_of_their_own() -> None:
    assert choice_seed(7, 0) == 7
    assert len({choice_seed(seed, index) for seed in (0, 1, MAX_SEED) for index in range(64)}) == 3 * 64


def test_absent_parameters_take_the_defaults() -> None:
    assert sampling_from_proto(pb.SamplingParams()) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_p", 10**400),
        ("seed", 10**400),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 10**400),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("stop_token_ids", tuple(range(17))),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((token_id, 1.0) for token_id in range(1025))),
        ("bad_words", ((),)),
        ("bad_words", (tuple(range(33)),)),
        ("bad_words", ((1,),) * 65),
        ("min_tokens", 17),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 129),
        ("best_of", 129),
        ("beam_width", 1),
        ("beam_width", 33),
        ("length_penalty", 11.0),
        ("early_stopping", "sometimes"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(QuireError) as refused:
        SamplingParams(**{name: value})
    assert refused.value.code is ErrorCode.INVALID
    assert refused.value.param == name


@given(st.integers(0, 100), st.integers(1, 100), st.integers(1, 100))
def test_a_request_must_fit_the_model(prompt: int, output: int, limit: int) -> None:
    if prompt > 0 and prompt + output <= limit:
        check_length(prompt, output, limit)
        return
    with pytest.raises(QuireError) as refused:
        check_length(prompt, output, limit)
    assert prompt == 0 or str(limit) in refused.value.message


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_has_a_status_and_survives_the_wire(code: ErrorCode) -> None:
    for param, retry_after in (("prompt", None), (None, 1.5)):
        error = QuireError(code, "Something is wrong.", param=param, retry_after=retry_after)
        received = error_from_proto(pb.Error.FromString(error_to_proto(error).SerializeToString()))
        assert (received.code, received.message) == (code, error.message)
        assert (received.param, received.retry_after) == (param, retry_after)
    assert received.status is STATUS[code]
    assert pb.ErrorCode.Value(f"ERROR_CODE_{code.name}") == code


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_survive_the_wire(reason: FinishReason | None) -> None:
    assert finish_from_proto(finish_to_proto(reason)) is reason


def test_an_unknown_error_of_a_newer_peer_is_an_internal_error() -> None:
    assert error_from_proto(pb.Error(code=99, message="?")).code is ErrorCode.INTERNAL
    assert finish_from_proto(99) is FinishReason.ERROR
