"""The file of targets (``--model-targets``), TOML or JSON: for each name its targets with their weights, and perhaps a
shadow. It is read again when it was replaced (``settings_file``).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from quire_router.admission.model_targets import ModelTarget, ShadowTarget, TargetGroup
from quire_router.admission.settings_file import FileVersions, SettingsFileError, read_content, versions_of

MAX_WEIGHT = 1_000_000  # as of the Gateway API
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_MAX_NAMES = 1_024
_MAX_TARGETS = 64


@dataclass(frozen=True, slots=True)
class TargetsFile:
    """The content of the file: what is behind each name. ``versions`` has the one that was read."""

    groups: Mapping[str, TargetGroup] = field(default_factory=dict)
    versions: FileVersions = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What it says, in a few words."""
        words = (
            f"{name}: {', '.join(f'{each.model} {each.weight}' for each in group.targets)}"
            + ("" if group.shadow is None else f", shadow {group.shadow.model} {group.shadow.percent:g} %")
            for name, group in self.groups.items()
        )
        return "; ".join(words) or "it names no targets"


class _Target(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    weight: Annotated[int, Field(ge=0, le=MAX_WEIGHT)] = 1


class _Shadow(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    percent: Annotated[float, Field(ge=0, le=100)]


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    targets: Annotated[list[_Target], Field(min_length=1, max_length=_MAX_TARGETS)]
    shadow: _Shadow | None = None


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    models: Annotated[dict[str, _Group], Field(max_length=_MAX_NAMES)] = {}


def read_targets(path: Path, vocabularies: Mapping[str, bytes]) -> TargetsFile:
    """Returns what the file at ``path`` says. ``vocabularies`` has the digest of each configured model's tokenizer: a
    shadow gets the tokens of the target's prompt, so it has to have the same one. Raises ``SettingsFileError``.
    """
    versions = versions_of([path])
    content = read_content(path, _Content)
    groups = {
        name: _group(f"{path}: models.{name}", name, group, vocabularies) for name, group in content.models.items()
    }
    return TargetsFile(groups, versions)


def _group(where: str, name: str, group: _Group, vocabularies: Mapping[str, bytes]) -> TargetGroup:
    if not MODEL_NAME.fullmatch(name):
        raise SettingsFileError(f"{where}: this cannot name a model.")
    if name in vocabularies:
        raise SettingsFileError(f"{where}: --model has this name, too: requests could mean either.")
    models = [target.model for target in group.targets]
    for model in models:
        _check_model(where, model, vocabularies)
        if models.count(model) > 1:
            raise SettingsFileError(f"{where}.targets: {model!r} is there twice.")
    if not any(target.weight for target in group.targets):
        raise SettingsFileError(f"{where}.targets: the weights add up to 0: no request could be answered.")
    targets = tuple(ModelTarget(target.model, target.weight) for target in group.targets)
    return TargetGroup(targets, _shadow(f"{where}.shadow", group.shadow, models, vocabularies))


def _shadow(
    where: str, shadow: _Shadow | None, targets: list[str], vocabularies: Mapping[str, bytes]
) -> ShadowTarget | None:
    if shadow is None:
        return None
    _check_model(where, shadow.model, vocabularies)
    if shadow.model in targets:
        raise SettingsFileError(f"{where}: {shadow.model!r} is a target, too.")
    for model in targets:
        if vocabularies[model] != vocabularies[shadow.model]:
            raise SettingsFileError(
                f"{where}: {shadow.model!r} has another tokenizer than {model!r}: it cannot read its prompts."
            )
    return ShadowTarget(shadow.model, shadow.percent)


def _check_model(where: str, model: str, vocabularies: Mapping[str, bytes]) -> None:
    if model not in vocabularies:
        raise SettingsFileError(f"{where}: {model!r} is no --model of this router.")
