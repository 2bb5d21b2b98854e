"""Sizes and durations of settings: a number alone has the setting's unit, and one with a unit is converted."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from quire_engine.config import EngineConfig
from quire_proto.units import Bytes, Gib, Seconds, unit_metavar
from quire_router.config import Settings

BYTES, GIB, SECONDS = TypeAdapter(Bytes), TypeAdapter(Gib), TypeAdapter(Seconds)
POWERS = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
WITH_UNITS = [
    (kind, name)
    for kind in (EngineConfig, Settings)
    for name, field in kind.model_fields.items()
    if unit_metavar(field)
]


@given(st.integers(0, 10**6), st.sampled_from(sorted(POWERS)), st.sampled_from(["", " "]), st.sampled_from(["", "B"]))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str, space: str, byte: str) -> None:
    text = f"{number}{space}{unit}{byte}"
    assert BYTES.validate_python(text) == number * POWERS[unit]
    assert BYTES.validate_python(text.lower()) == number * POWERS[unit]


@given(st.decimals(0, 10**5, places=3), st.sampled_from(sorted(POWERS.keys() - {""})))
def test_a_size_may_have_decimals_and_is_never_more_than_was_given(number: Decimal, unit: str) -> None:
    assert BYTES.validate_python(f"{number}{unit}B") == int(Fraction(number) * POWERS[unit])


@pytest.mark.parametrize("text", ["1.3", "0.3KB1", "2 GiBs", "i", "1iB", "-1GiB", "GiB", "1e3x", "١GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        BYTES.validate_python(text)


def test_a_size_in_gib_is_converted_and_a_number_alone_is_gib() -> None:
    assert [GIB.validate_python(text) for text in ("2", 0.5, "512MiB", "1.5GiB")] == [2.0, 0.5, 0.5, 1.5]


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59), st.integers(0, 999))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int, milliseconds: int) -> None:
    text = f"{hours}h{minutes}m {seconds}s {milliseconds}ms"
    assert SECONDS.validate_python(text) == pytest.approx(hours * 3600 + minutes * 60 + seconds + milliseconds / 1000)


@pytest.mark.parametrize("text", ["5 minutes", "1h30", "s", "-5s", "1:30", "3y"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="1h30m"):
        SECONDS.validate_python(text)


@given(st.floats(0, 1e9))
def test_a_number_alone_is_read_as_before(number: float) -> None:
    assert SECONDS.validate_python(repr(number)) == number == SECONDS.validate_python(number)
    assert GIB.validate_python(repr(number)) == number


def test_every_setting_that_speaks_of_bytes_or_seconds_takes_a_unit() -> None:
    for kind in (EngineConfig, Settings):
        for name, field in kind.model_fields.items():
            words = (field.description or "").split()
            if words and words[0] in ("Bytes", "GiB", "Seconds") and not unit_metavar(field):
                pytest.fail(f"{name} of {kind.__name__} takes no unit")
    assert {"max_body_bytes", "kv_cache_memory", "swap_space"} <= {name for _, name in WITH_UNITS}
