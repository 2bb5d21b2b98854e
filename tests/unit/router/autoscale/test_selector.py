"""Label selectors select what the Kubernetes API says they do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_router.autoscale.external_metrics import MAX_SELECTOR, Selector, SelectorError

KEYS = st.sampled_from(["model", "tier", "quire.dev/model", "in", "a"])
VALUES = st.sampled_from(["", "llama", "qwen_2.5", "1", "20", "in"]) | st.from_regex(r"[a-z0-9]{1,5}", fullmatch=True)
LABELS = st.dictionaries(KEYS, VALUES, max_size=4)
SPACES = st.sampled_from(["", " ", "  ", "\t"])


@st.composite
def requirements(draw: st.DrawFn) -> tuple[str, object]:
    """A requirement as text, and as a function of labels that was written for it."""
    key, space = draw(KEYS), draw(SPACES)
    kind = draw(st.sampled_from(["exists", "lacks", "is", "is not", "in", "notin", "more", "less"]))
    if kind in ("exists", "lacks"):
        is_there = kind == "exists"
        return f"{space}{'' if is_there else '!'}{space}{key}{space}", lambda labels: (key in labels) is is_there
    if kind in ("is", "is not"):
        value = draw(VALUES)
        sign = draw(st.sampled_from(["=", "=="])) if kind == "is" else "!="
        return f"{key}{space}{sign}{space}{value}", lambda labels: (labels.get(key) == value) is (kind == "is")
    if kind in ("more", "less"):
        bound = draw(st.integers(0, 30))
        sign = ">" if kind == "more" else "<"

        def compare(labels: dict[str, str]) -> bool:
            try:
                number = int(labels[key])
            except (KeyError, ValueError):
                return False
            return number > bound if kind == "more" else number < bound

        return f"{key}{space}{sign}{space}{bound}", compare
    values = draw(st.lists(VALUES, min_size=1, max_size=3))
    text = f"{key} {kind}{space}({f',{space}'.join(values)}{space})"
    return text, lambda labels: (labels.get(key) in values) is (kind == "in")


@settings(max_examples=30)
@given(st.lists(requirements(), max_size=4), LABELS)
def test_every_requirement_has_to_be_met(wanted: list, labels: dict[str, str]) -> None:
    selector = Selector.parse(",".join(text for text, _ in wanted))
    assert selector.matches(labels) is all(holds(labels) for _, holds in wanted)


@pytest.mark.parametrize(
    "text",
    [
        ",",
        "a,",
        ",a",
        "a b",
        "a=b c",
        "=b",
        "a=b=c",
        "a===b",
        "a==!b",
        "a in b",
        "a in (b",
        "a in (b c)",
        "a in b)",
        "a in (b))",
        "a notin",
        "a like (b)",
        "!",
        "!!a",
        "!a=b",
        "a>b",
        "a<",
        "a>-1",
        "a>1.5",
        "a=b/c",
        "a=-b",
        "a=" + "b" * 64,
        "a" * 64,
        "/a",
        "a/",
        "A/a",
        "a/b/c",
        "é=b",
        "a=é",
        "a=\0",
        "()",
        "a" * (MAX_SELECTOR + 1),
    ],
)
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(SelectorError):
        Selector.parse(text)


@given(st.text(alphabet="ab=!<>(), in\t/é1-", max_size=30))
def test_whatever_the_text_is_it_is_a_selector_or_refused(text: str) -> None:
    try:
        Selector.parse(text).matches({"a": "b"})
    except SelectorError:
        return
