"""The file of targets: what it may say, and the sentence for what it may not."""

import json
import os
from pathlib import Path

import pytest
from quire_router.admission.model_targets import ModelTarget, ShadowTarget, TargetGroup
from quire_router.admission.settings_file import FileWatch, SettingsFileError
from quire_router.admission.targets_file import read_targets
from quire_router.core import metrics

VOCABULARIES = {"v1": b"a", "v2": b"a", "v3": b"a", "other": b"b"}
TOML = """
[models.chat]
targets = [{ model = "v1", weight = 90 }, { model = "v2", weight = 10 }]
shadow = { model = "v3", percent = 10.5 }
[models."org/small"]
targets = [{ model = "other" }]
"""


def written(folder: Path, **chat: object) -> Path:
    path = folder / "targets.json"
    path.write_text(json.dumps({"models": {"chat": chat}}))
    return path


def test_a_file_names_targets_and_a_shadow(tmp_path: Path) -> None:
    (tmp_path / "targets.toml").write_text(TOML)
    file = read_targets(tmp_path / "targets.toml", VOCABULARIES)
    targets = (ModelTarget("v1", 90), ModelTarget("v2", 10))
    assert file.groups == {
        "chat": TargetGroup(targets, ShadowTarget("v3", 10.5)),
        "org/small": TargetGroup((ModelTarget("other", 1),)),
    }
    assert file.summary == "chat: v1 90, v2 10, shadow v3 10.5 %; org/small: other 1"


@pytest.mark.parametrize(
    ("chat", "problem"),
    [
        ({"targets": []}, "models.chat.targets: list should have at least 1 item"),
        ({"targets": [{"model": "v1", "weight": 0}]}, "the weights add up to 0: no request could be answered"),
        ({"targets": [{"model": "v1", "weight": -1}]}, "input should be greater than or equal to 0"),
        ({"targets": [{"model": "v1", "weight": 0.5}]}, r"targets\[0\].weight: input should be a valid integer"),
        ({"targets": [{"model": "v9"}]}, "'v9' is no --model of this router"),
        ({"targets": [{"model": "v1"}, {"model": "v1"}]}, "'v1' is there twice"),
        ({"targets": [{"model": "v1", "share": 1}]}, r"targets\[0\].share: there is no such setting"),
        ({"targets": [{"model": "v1"}], "shadow": {"model": "v2", "percent": 101}}, "less than or equal to 100"),
        ({"targets": [{"model": "v1"}], "shadow": {"model": "v1", "percent": 1}}, "'v1' is a target, too"),
        ({"targets": [{"model": "v1"}], "shadow": {"model": "other", "percent": 1}}, "another tokenizer than 'v1'"),
        ({"targets": [{"model": "v1"}], "shadow": {"model": "v2"}}, "shadow.percent: it is missing"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence(tmp_path: Path, chat: dict, problem: str) -> None:
    with pytest.raises(SettingsFileError, match=problem) as refusal:
        read_targets(written(tmp_path, **chat), VOCABULARIES)
    assert str(refusal.value).startswith(f"{tmp_path / 'targets.json'}: ")
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("name", ["v1", "no name", ""])
def test_a_name_is_none_of_a_model_and_can_be_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / "targets.json"
    path.write_text(json.dumps({"models": {name: {"targets": [{"model": "v1"}]}}}))
    with pytest.raises(SettingsFileError, match=r"could mean either|cannot name a model"):
        read_targets(path, VOCABULARIES)


async def test_weights_change_when_the_file_is_replaced_and_stay_when_the_new_one_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, targets=[{"model": "v1"}])
    watch = FileWatch(path, read(path), read, metrics.TARGETS_FILE_CURRENT)
    os.replace(written(tmp_path, targets=[{"model": "v1", "weight": 3}, {"model": "v2"}]).rename(tmp_path / "n"), path)
    changed = await watch.look()
    written(tmp_path, targets=[{"model": "v9"}])
    broken = [await watch.look() for _ in range(2)]
    state = metrics.TARGETS_FILE_CURRENT._value.get()

    assert changed is not None
    assert changed.groups["chat"].targets == (ModelTarget("v1", 3), ModelTarget("v2", 1))
    assert (broken, state) == ([None, None], 0)
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


def read(path: Path):
    return read_targets(path, VOCABULARIES)
