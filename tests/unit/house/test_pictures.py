"""The pictures of the documentation are those that their script draws from the figures in docs/evidence."""

from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from scripts.pictures import IMAGES, PICTURES, Picture


@pytest.mark.parametrize("draw", PICTURES, ids=lambda draw: draw.__name__)
def test_a_picture_is_as_its_script_draws_it(draw: Callable[[], Picture]) -> None:
    drawn = draw().drawn()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert (IMAGES / f"{draw.__name__}.svg").read_text() == drawn, "run python scripts/pictures.py"
