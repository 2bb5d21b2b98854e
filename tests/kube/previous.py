"""The chart's previous version, as Helm packed it, from which releases are upgraded. ``python -m tests.kube.previous
COMMIT`` packs that of a commit instead.
"""

import argparse
import copy
import io
import json
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator
from jsonschema.exceptions import ValidationError

from tests.kube.helm import ROOT, Helm
from tests.kube.helm_api import HelmApi

FOLDER = Path(__file__).with_name("previous")
Values = dict[str, Any]


def previous_chart() -> Path:
    """The one archive that there is."""
    (archive,) = FOLDER.glob("*.tgz")
    return archive


@cache
def _schema() -> Draft7Validator:
    with tarfile.open(previous_chart()) as archive:
        file = archive.extractfile("quire/values.schema.json")
        assert file is not None
        return Draft7Validator(json.load(file))


def known_values(values: Values) -> Values:
    """Of ``values`` those that the previous version takes."""
    known = copy.deepcopy(values)
    while (error := next(_schema().iter_errors(known), None)) is not None:
        _take_out(known, error)
    return known


def _take_out(values: Any, error: ValidationError) -> None:
    """What is wrong, or of an object with unknown names these."""
    *folders, last = error.absolute_path or [None]
    for folder in folders:
        values = values[folder]
    if error.validator != "additionalProperties":
        del values[last]
        return
    known = error.schema.get("properties", {})
    inner = values if last is None else values[last]
    for name in [name for name in inner if name not in known]:
        del inner[name]


def pack(commit: str) -> Path:
    """Packs the chart of a commit in the place of the archive that there is."""
    tree = subprocess.run(["git", "archive", commit, "charts/quire"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    with tempfile.TemporaryDirectory() as folder, HelmApi() as api, Helm(api) as helm:
        with tarfile.open(fileobj=io.BytesIO(tree.stdout)) as archive:
            archive.extractall(folder, filter="data")
        for old in FOLDER.glob("*.tgz"):
            old.unlink()
        return helm.package(Path(folder, "charts/quire"), FOLDER)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="the last one with the version that becomes the previous one")
    print(pack(parser.parse_args().commit))
