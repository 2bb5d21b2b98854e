"""The error that a request ended with is the same one whenever it is decoded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_router.journal.base import decode_error, encode_error

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=40)


def fields(error: QuireError) -> tuple[object, ...]:
    return error.code, error.message, error.param, error.retry_after, error.reason


@given(st.sampled_from(ErrorCode), words, st.none() | words, st.none() | st.floats(0, 1e6), st.none() | words)
def test_an_error_round_trips(
    code: ErrorCode, message: str, param: str | None, retry_after: float | None, reason: str | None
) -> None:
    error = QuireError(code, message, param=param, retry_after=retry_after, reason=reason)
    assert fields(decode_error(encode_error(error))) == fields(error)


def test_an_error_of_a_former_version_can_be_read() -> None:
    assert fields(decode_error("NOT_FOUND: There is no such model.")) == (
        ErrorCode.NOT_FOUND,
        "There is no such model.",
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "x",
        "STRANGE: x",
        *(
            f"INVALID: x\n{more}"
            for more in (
                "{",
                "{}x",
                '{"param":1}',
                '{"retry_after":"x"}',
                '{"retry_after":NaN}',
                '{"retry_after":-1}',
            )
        ),
    ],
)
def test_a_value_that_is_no_error_reads_as_an_internal_one(damage: str) -> None:
    assert decode_error(damage).code is ErrorCode.INTERNAL
