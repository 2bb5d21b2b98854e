"""Models by the label that selectors and triggers know them by. Does no I/O."""

import re
from collections.abc import Iterable

_NOT_IN_A_LABEL = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST = 63


def label_of(model: str) -> str:
    """The model's name as the value of a Kubernetes label, in which a ``/`` cannot be: ``_`` stands for it, and at most
    63 characters are left, the last of which is a letter or a digit.
    """
    return _NOT_IN_A_LABEL.sub("_", model)[:_LONGEST].rstrip("_.-")


def labels_of(models: Iterable[str]) -> dict[str, str]:
    """The label of each model. Raises ``ValueError`` where two would have the same."""
    labels: dict[str, str] = {}
    for model in models:
        label = label_of(model)
        for other, taken in labels.items():
            if taken == label:
                raise ValueError(f"{other!r} and {model!r} would both be {label!r} as the label of a metric")
        labels[model] = label
    return labels
