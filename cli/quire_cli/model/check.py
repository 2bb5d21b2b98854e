"""What can be known of a model before its weights are there: whether it is served at all, and whether it fits."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_engine.checkpoint.architecture import architecture_of
from quire_engine.checkpoint.config import read_config_json
from quire_engine.checkpoint.stored_schemes import NUMBERS_A_BYTE, is_dequantized
from quire_engine.checkpoint.support import check_support, checked_by_transformers
from quire_engine.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, numbered_shards
from quire_engine.errors import ModelError
from quire_proto.names import is_name
from quire_proto.terminal import waiting

from quire_cli.machine.memory import ELEMENT_BYTES, GIB, loaded_bytes, memory_shortage
from quire_cli.model.name import ModelNotFoundError

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
KV_TOKENS = 2048  # there is to be room for so many, at the least
DISK_MARGIN = 64 << 20  # bytes that stay free
_STORED_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """How the model will be loaded into the host's memory: by how many engines, and with which flags."""

    engines: int = 1
    dtype: str = "auto"
    quantization: str | None = None


def check_config(folder: Path, name: str, need: MemoryNeed | None, *, ask_engine: bool = True) -> dict[str, Any]:
    """What ``config.json`` in ``folder`` says. ``name`` stands for the folder in sentences. With ``ask_engine``, an
    engine's process tells of models that run through transformers, which takes seconds. Raises ``ModelNotFoundError``
    for a model that is not served.
    """
    path = folder / CONFIG_FILE
    try:
        raw = read_config_json(folder)
        check_support(path, raw, need.quantization if need else None)
        if ask_engine and checked_by_transformers(path, raw):
            with waiting(f"asking the engine whether it runs {name}"):
                _ask_engine(folder)
    except ModelError as error:
        sentence = str(error).replace(str(folder), name).rstrip(".")
        raise ModelNotFoundError(f"{sentence}: {error.instead}.") from None
    return raw


def _ask_engine(folder: Path) -> None:
    command = [sys.executable, "-m", "quire_engine.models.check_config", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - this Python
    if done.returncode == 1 and done.stderr.strip():
        raise ModelError(done.stderr.strip().splitlines()[-1])


def indexed_files(folder: Path) -> set[str]:
    """Returns the weight files that the index of ``folder`` names; none without an index. Raises ``ValueError`` for one
    that cannot be read, or that names a file outside of the folder.
    """
    path = folder / INDEX_FILE
    if not path.is_file():
        return set()
    try:
        names = set(json.loads(path.read_bytes())["weight_map"].values())
    except (KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is not an index of weights") from None
    if not all(is_name(name) and "/" not in name for name in names):
        raise ValueError("it names files that are not in this folder")
    return names


def weight_files(folder: Path) -> set[str]:
    """Returns the weight files that an engine reads: the single one, the files of the index, or shards without
    one. Raises ``ValueError`` for an index that cannot be read.
    """
    single = {SINGLE_FILE}
    if (folder / SINGLE_FILE).is_file():
        return single
    return indexed_files(folder) or set(numbered_shards(folder)) or single


def missing_files(folder: Path) -> list[str]:
    """The files that a model folder has to have and has not. A link to nothing is missing."""
    needed = {CONFIG_FILE, TOKENIZER_FILE}
    try:
        needed |= weight_files(folder)
    except ValueError:
        return sorted({name for name in needed if not (folder / name).is_file()} | {INDEX_FILE})
    return sorted(name for name in needed if not (folder / name).is_file())


def check_fits_disk(name: str, size: int, folder: Path) -> None:
    """Raises ``ModelNotFoundError`` if ``size`` bytes do not fit onto the disk of ``folder``, which need not exist."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if size + DISK_MARGIN > free:
        raise ModelNotFoundError(
            f"{name} takes {_size(size)} of disk, and {folder} has {_size(free)} free: make room there, or "
            "name a folder on a larger disk with HF_HOME."
        )


def disk_sentence(error: BaseException, folder: Path) -> str | None:
    """What to do about a disk where ``folder`` cannot be written; None if ``error`` is about something else."""
    number = getattr(error, "errno", None)
    if number == errno.ENOSPC:
        return f"The disk of {folder} is full: make room, or name another with HF_HOME."
    if number in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"{folder} cannot be written ({os.strerror(number)}): name another with HF_HOME."
    return None


def check_fits_memory(name: str, elements: Mapping[str, int], raw: dict[str, Any], need: MemoryNeed | None) -> None:
    """Raises ``ModelNotFoundError`` if weights, whose ``elements`` are counted by safetensors type, do not fit
    into memory together with keys and values of a few thousand tokens.
    """
    if need is None:
        return
    stored = raw.get("quantization_config")
    if stored and is_dequantized(architecture_of(Path(CONFIG_FILE), raw), stored):
        elements = {**elements, "U8": 0, "BF16": elements.get("BF16", 0) + NUMBERS_A_BYTE * elements.get("U8", 0)}
    weights = loaded_bytes(elements, need.dtype, need.quantization) + _kv_bytes(raw)
    if sentence := memory_shortage(name, weights, need.engines, need.quantization):
        raise ModelNotFoundError(sentence)


def stored_elements(size: int, raw: Mapping[str, Any]) -> dict[str, int]:
    """About how many elements of which safetensors type ``size`` bytes of weights have, as ``config.json`` says."""
    kind = _STORED_TYPES.get(str(raw.get("dtype") or raw.get("torch_dtype")), "")
    if not kind or raw.get("quantization_config") or raw.get("compression_config"):
        return {"U8": size}
    return {kind: size // ELEMENT_BYTES[kind]}


def _kv_bytes(raw: Mapping[str, Any]) -> int:
    """Bytes of keys and values of ``KV_TOKENS`` tokens in 16 bits."""
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    layers, kv_heads = raw.get("num_hidden_layers"), raw.get("num_key_value_heads") or heads
    if not all(isinstance(size, int) and size > 0 for size in (heads, hidden, layers, kv_heads)):
        return 0
    head_dim = raw.get("head_dim") or hidden // heads  # type: ignore[operator]
    return int(2 * 2 * layers * kv_heads * head_dim * KV_TOKENS)  # type: ignore[operator]


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"
