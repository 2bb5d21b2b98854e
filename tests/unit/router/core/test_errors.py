"""The messages of the router's errors that are more than a constant."""

from quire_router.core.errors import unknown_model


def test_an_unknown_model_is_told_with_a_few_of_those_that_are_served() -> None:
    assert unknown_model("x", ["a", "b"]).message == "There is no model named 'x' here, only 'a', 'b'."
    many = unknown_model("x" * 1000, [f"m{number}" for number in range(1000)]).message
    assert many.endswith("here, only 'm0', 'm1', 'm2', 'm3', 'm4' and 995 more.")
    assert len(many) < 300
