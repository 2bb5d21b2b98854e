"""What a model folder says about any model: its configuration, its end tokens, its identity. Knows no architecture and
no weights.

No code from a folder is ever run.
"""

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

from quire_engine.models.errors import ModelError

MAX_HEADER_BYTES = 100_000_000
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096


def read_config_json(folder: Path) -> dict[str, Any]:
    """The object in ``config.json``. Raises ``ModelError`` where there is none, or where it asks for code or for
    quantized weights.
    """
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("auto_map"):
        raise ModelError(f"{path} has auto_map, but code from a model folder is never run.")
    if raw.get("quantization_config"):
        raise ModelError(f"{path} has quantization_config, and quantized weights are not supported.")
    return raw


def architecture_of(path: Path, raw: dict[str, Any]) -> str:
    """The name of the model's class. Raises ``ModelError`` where there is none."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name is None:
        raise ModelError(f"{path} names no architecture.")
    if not isinstance(name, str):
        raise ModelError(f"{path} names the architecture {name!r}, which is not a name.")
    return name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ``ModelError`` where there is none, or where it holds NaN or Infinity."""
    if not path.parent.is_dir():
        raise ModelError(f"The model folder {path.parent} does not exist.")
    try:
        value = json.loads(path.read_bytes(), parse_constant=lambda name: _refuse_not_finite(path, name))
    except FileNotFoundError:
        raise ModelError(f"The model folder {path.parent} has no {path.name}.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not valid JSON.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return value


def to_hf_config(path: Path, raw: dict[str, Any], config_class: Any) -> Any:
    """``raw`` as an object of transformers' ``config_class``, with the defaults that it has there."""
    values = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}
    try:
        return config_class.from_dict(values)
    except Exception as error:  # noqa: BLE001 - transformers checks with exceptions of many kinds
        raise ModelError(f"{path} is not a {config_class.__name__}: {one_line(error)}.") from None


def one_line(error: BaseException) -> str:
    """The message of ``error`` on one line, without a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def is_positive_int(value: object) -> bool:
    """Whether ``value`` is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def rope_max_length(length: int, rope: dict[str, Any]) -> int:
    """The longest sequence for a trained ``length``, in tokens: longer by YaRN's factor where ``length`` is still the
    one before it.

    With dynamic scaling it ends where scaling would begin: keys in the cache cannot be turned again.
    """
    if rope.get("rope_type") != "yarn" or rope.get("factor") is None:
        return length
    return max(length, int(rope["factor"] * rope["original_max_position_embeddings"]))


def eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end an output: those of ``generation_config.json``, else those of ``config.json``, else none."""
    path = folder / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.is_file() else None
    if value is None:
        path, value = folder / "config.json", raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise ModelError(f"{path} says that eos_token_id is {value!r}, which is neither a token id nor a list of them.")
    return tuple(dict.fromkeys(ids))


def compute_revision(folder: Path) -> str:
    """Hash of ``config.json`` and of names, sizes, headers and samples of the weight files.

    Fine-tunes of one base share headers and sizes, hence the samples; reading all gigabytes would slow every start.
    """
    digest = blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(_safetensors_header(path))
        digest.update(_sample_bytes(path))
    return digest.hexdigest()


def _refuse_not_finite(path: Path, name: str) -> NoReturn:
    raise ModelError(f"{path} holds {name}, which is not a number that a model can have.")


def _sample_bytes(path: Path) -> bytes:
    """Pieces of a file at even distances, its end among them."""
    try:
        with path.open("rb") as file:
            last = max(0, path.stat().st_size - SAMPLE_BYTES)
            starts = [last * index // (NUM_SAMPLES - 1) for index in range(NUM_SAMPLES)]
            return b"".join(os.pread(file.fileno(), SAMPLE_BYTES, start) for start in starts)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None


def _safetensors_header(path: Path) -> bytes:
    """The length and the JSON header that a safetensors file begins with, as far as they are there."""
    try:
        with path.open("rb") as file:
            size = file.read(8)
            return size + file.read(min(int.from_bytes(size, "little"), MAX_HEADER_BYTES))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
