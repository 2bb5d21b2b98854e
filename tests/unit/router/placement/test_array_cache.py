"""What is remembered of arrays of rows: by the array itself, for as long as it cannot change, and not of too many."""

import numpy as np
from quire_router.placement.engine_table import MAX_CACHED_ARRAYS, ArrayCache


def fixed(*rows: int) -> np.ndarray:
    array = np.array(rows, np.intp)
    array.flags.writeable = False
    return array


def test_a_cached_value_belongs_to_one_array_and_not_to_an_equal_one() -> None:
    remembered: ArrayCache[str] = ArrayCache()
    rows = fixed(1, 2)
    assert remembered.get(rows) is None
    assert remembered.put(rows, "found") == "found" == remembered.get(rows)
    assert remembered.get(fixed(1, 2)) is None


def test_nothing_is_cached_for_a_writable_array() -> None:
    remembered: ArrayCache[str] = ArrayCache()
    rows = np.array([1, 2], np.intp)
    assert remembered.put(rows, "found") == "found"
    assert remembered.get(rows) is None


def test_an_array_is_never_taken_for_a_collected_one() -> None:
    remembered: ArrayCache[int] = ArrayCache()
    for number in range(10 * MAX_CACHED_ARRAYS):
        rows = fixed(number)
        assert remembered.get(rows) is None
        remembered.put(rows, number)
        del rows


def test_the_number_of_cached_values_is_bounded() -> None:
    remembered: ArrayCache[int] = ArrayCache()
    arrays = [fixed(number) for number in range(3 * MAX_CACHED_ARRAYS)]
    for number, rows in enumerate(arrays):
        remembered.put(rows, number)
    known = [remembered.get(rows) for rows in arrays]
    assert known[-1] == len(arrays) - 1
    assert sum(each is not None for each in known) <= MAX_CACHED_ARRAYS
