"""Which files of a model folder hold its weights: one safetensors file, the files of an index, or numbered shards
without an index. Without torch, because the model fetcher uses it too.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire_proto.names import is_name, shown

from quire_engine.checkpoint.config import read_json
from quire_engine.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SETTINGS = "training_args.bin"  # a Trainer leaves it next to weights
_OTHERS = (".h5", ".msgpack", ".onnx")
_CONVERT_WEIGHTS = (
    "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; s, t = sys.argv[1:]; "
    'M.from_pretrained(s, dtype="auto").save_pretrained(t)'
)
_CONVERT_BOTH = f"{_CONVERT_WEIGHTS}; T.from_pretrained(s).save_pretrained(t)"
_CONVERT_ONE = (
    "import sys, torch; from safetensors.torch import save_file; "
    'w = torch.load(sys.argv[1], weights_only=True, map_location="cpu"); w = w.get("state_dict", w); '
    'save_file({k: v.clone().contiguous() for k, v in w.items()}, sys.argv[2], {"format": "pt"})'
)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a folder. ``source`` names them in errors, ``names`` are the files in the order in which they
    are read, and ``places`` maps tensors to files, if there is an index.
    """

    source: Path
    names: tuple[str, ...]
    places: dict[str, str]

    @classmethod
    def find(cls, folder: Path) -> "WeightFiles":
        """Finds the weights of a folder, as transformers does. Raises ``ModelError`` if there are none, with the
        command that converts other files if there are any.
        """
        single, index = folder / SINGLE_FILE, folder / INDEX_FILE
        if single.is_file():
            return cls(single, (SINGLE_FILE,), {})
        if index.is_file():
            places = _read_weight_map(index)
            return cls(index, tuple(sorted(set(places.values()))), places)
        shards = numbered_shards(folder)
        if not shards:
            raise ModelError(what_is_there(folder))
        for name in shards:
            if not (folder / name).is_file():
                raise ModelError(f"The model folder {folder} has no {name}.")
        return cls(folder, shards, {})


def _read_weight_map(path: Path) -> dict[str, str]:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{path} has no weight_map.")
    for file in names.values():
        if not is_name(file) or "/" in file:
            raise ModelError(f"{path} names {shown(file)!r}, which is not a file of this folder.")
    return names


def numbered_shards(folder: Path) -> tuple[str, ...]:
    """Returns the names of all shards that a folder without an index must have, judged by the shards that are there.
    Empty if there are none, or shards of two models.
    """
    found = [_SHARD.fullmatch(path.name) for path in _files(folder)]
    models = {(shard["stem"], shard["count"]) for shard in found if shard}
    if len(models) != 1:
        return ()
    ((stem, count),) = models
    return tuple(f"{stem}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1))


def what_is_there(folder: Path) -> str:
    """Returns the error message for a folder without readable weights."""
    sentence = f"The model folder {folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    pickles = sorted(path.name for path in _files(folder) if path.suffix in _PICKLES and path.name != _SETTINGS)
    if pickles:
        return (
            f"{sentence}, and {pickles[0]} is a pickle, which can hold a program and is not read: run "
            f"{_conversion(folder, pickles)} to convert it."
        )
    other = next((path.name for path in sorted(_files(folder)) if path.suffix in _OTHERS), None)
    return f"{sentence}." if other is None else f"{sentence}, and {other} is not read: take its weights in safetensors."


def _files(folder: Path) -> Iterator[Path]:
    yield from folder.iterdir() if folder.is_dir() else ()


def conversion_command(source: str, target: str) -> str:
    """Returns the command that converts a model that transformers reads (a folder or a name on the Hub) into a folder
    with safetensors and a ``tokenizer.json``.
    """
    return f"python -c {shlex.quote(_CONVERT_BOTH)} {shlex.quote(source)} {shlex.quote(target)}"


def _conversion(folder: Path, pickles: list[str]) -> str:
    """Returns a command that converts the weights of ``folder`` to safetensors: by transformers for
    ``pytorch_model.bin`` and its shards, else for the first file alone.
    """
    if any(name.startswith("pytorch_model") for name in pickles):
        place = shlex.quote(str(folder))
        has_tokenizer = (folder / "tokenizer.json").is_file()
        program = shlex.quote(_CONVERT_WEIGHTS if has_tokenizer else _CONVERT_BOTH)
        return f"python -c {program} {place} {place}"
    files = (shlex.quote(str(folder / name)) for name in (pickles[0], SINGLE_FILE))
    return f"python -c {shlex.quote(_CONVERT_ONE)} {' '.join(files)}"
