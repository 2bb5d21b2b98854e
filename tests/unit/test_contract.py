"""The rules that router and engine compute alike: block names, parameter ranges, errors, conversions."""

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import types_pb2 as pb
from quire_proto.convert import (
    error_from_proto,
    error_to_proto,
    finish_from_proto,
    finish_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from quire_proto.errors import STATUS, ErrorCode, QuireError
from quire_proto.hashing import ROOT, extra_key, hash_block, hash_blocks
from quire_proto.sampling import MAX_SEED, FinishReason, SamplingParams, check_length

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


@given(st.tuples(st.text(max_size=6), st.binary(max_size=6)), st.tuples(st.text(max_size=6), st.binary(max_size=6)))
def test_extra_keys_collide_for_equal_parts_only(one: tuple[str, bytes], other: tuple[str, bytes]) -> None:
    assert (extra_key(*one) == extra_key(*other)) == (one == other)


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
    )
)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    message = pb.SamplingParams.FromString(sampling_to_proto(params).SerializeToString())
    assert sampling_from_proto(message) == params


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
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 10**400),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("stop_token_ids", tuple(range(17))),
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


def test_what_a_newer_peer_says_is_taken_as_an_error_of_ours() -> None:
    assert error_from_proto(pb.Error(code=99, message="?")).code is ErrorCode.INTERNAL
    assert finish_from_proto(99) is FinishReason.ERROR
