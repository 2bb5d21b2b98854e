"""Tests of everything with everything: which combinations run always, and which in `make soak`."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest


def one_in(number: int, *axes: Sequence[Any]) -> Iterator[Any]:
    """All combinations of values, for ``parametrize``; a value that is a tuple stands for several arguments. One of
    ``number`` runs always, in which every value of every axis occurs, and the rest in `make soak`.
    """
    for axis in axes:
        others = sum(len(other) - 1 for other in axes if other is not axis)
        assert others >= number - 1, "some values of this axis would never run"
    for places in product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        flat = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
        yield pytest.param(*flat, marks=() if sum(places) % number == 0 else pytest.mark.soak)
