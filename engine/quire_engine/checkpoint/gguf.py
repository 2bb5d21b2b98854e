"""GGUF files, as llama.cpp writes them: metadata and tensors in one file.

The file is untrusted: every count, length and offset is checked against the file's size and fixed bounds before it is
used. Arrays of the metadata, which hold the tokenizer, are skipped unless they are requested.
"""

import math
import os
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from quire_engine.errors import ModelError
from quire_engine.models.registry import ARCHITECTURES

GGUF_SUFFIX = ".gguf"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16
MAX_NAME_BYTES = 1 << 16
MAX_ARRAY = 1 << 24
MAX_READ_ARRAY = 1 << 21
"""Elements of an array that is read. Vocabularies have a few hundred thousand tokens."""
MAX_STRINGS = 1 << 21
"""Strings of all arrays together. A vocabulary and its merges have less than a million."""
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 16
# The format of struct for each type of value.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
GGUF_ARCHITECTURES = {own.gguf: name for name, own in ARCHITECTURES.items() if own.gguf is not None}
"""The architectures that can be read from GGUF files, by their names there."""
ROPE_FACTORS = "rope_freqs.weight"
MAX_ROPE_FACTORS = 1 << 16


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensor: its ``number`` in files, and how many ``numbers`` and bytes (``nbytes``) a block has."""

    number: int
    numbers: int
    nbytes: int


BLOCKS = {
    "F32": BlockType(0, 1, 4),
    "F16": BlockType(1, 1, 2),
    "BF16": BlockType(30, 1, 2),
    "Q4_0": BlockType(2, 32, 18),
    "Q4_1": BlockType(3, 32, 20),
    "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24),
    "Q8_0": BlockType(8, 32, 34),
    "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176),
    "Q6_K": BlockType(14, 256, 210),
}
"""The supported types, by ggml's names."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A stored tensor: ``kind`` names its type (``Q4_K``), ``shape`` is torch's shape, and ``start`` is the offset of
    its first byte.
    """

    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the last dimension."""
        block = BLOCKS[self.kind]
        return self.shape[-1] // block.numbers * block.nbytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The contents of a file except the bytes of its tensors. ``metadata`` has numbers, strings and the requested
    arrays as lists; other arrays are None.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    digest: str = ""

    @classmethod
    def read(cls, path: Path, arrays: Collection[str] = (), salt: bytes | None = None) -> "GgufFile":
        """Reads everything except the tensors' bytes and the arrays not in ``arrays``. With a ``salt``, ``digest`` is
        the hash of the salt and all bytes read. Raises ``ModelError``.
        """
        try:
            with path.open("rb") as file:
                digest = None if salt is None else blake2b(salt, digest_size=16)
                return _Reader(path, file, os.fstat(file.fileno()).st_size, arrays, digest).read()
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from None

    def read_rows(self, tensor: GgufTensor, first: int, end: int) -> bytearray:
        """Returns the bytes of a tensor's rows from ``first`` up to but without ``end``. Raises ``ModelError``."""
        raw = bytearray((end - first) * tensor.row_bytes)
        try:
            with self.path.open("rb") as file:
                file.seek(tensor.start + first * tensor.row_bytes)
                complete = file.readinto(raw) == len(raw)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}.") from None
        if not complete:
            raise ModelError(f"{self.path} is not a whole GGUF file: it has become shorter.")
        return raw

    @property
    def architecture(self) -> str:
        """One of ``GGUF_ARCHITECTURES``. Raises ``ModelError`` for others."""
        name = self.metadata.get("general.architecture")
        if name not in GGUF_ARCHITECTURES:
            raise ModelError(
                f"{self.path} has the architecture {name!r}, and of GGUF files read are "
                f"{', '.join(GGUF_ARCHITECTURES)}."
            )
        return str(name)


def find_gguf(model: Path) -> Path | None:
    """Returns ``model`` if it is a GGUF file, or the only GGUF file in a folder without ``config.json``; else None.
    Raises ``ModelError`` if a folder has several.
    """
    if model.suffix == GGUF_SUFFIX and not model.is_dir():
        return model
    if not model.is_dir() or (model / "config.json").is_file():
        return None
    files = sorted(model.glob(f"*{GGUF_SUFFIX}"))
    if len(files) > 1:
        raise ModelError(f"The model folder {model} has {len(files)} GGUF files: --model has to name one of them.")
    return files[0] if files else None


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Returns the equivalent of the model's ``config.json``. Raises ``ModelError`` for a model that cannot be
    served.
    """
    prefix = file.architecture
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{file.path} is a part of a split file; llama-gguf-split --merge makes one of them.")
    if file.metadata.get(f"{prefix}.expert_count"):
        raise ModelError(f"{file.path} has a mixture of experts, which is not read from GGUF files.")
    sizes = {name: file.metadata.get(f"{prefix}.{key}") for name, key in _SIZES.items()}
    embedding = file.tensors.get("token_embd.weight")
    architecture = GGUF_ARCHITECTURES[prefix]
    return {
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture].model_type,
        **{name: value for name, value in sizes.items() if value is not None},
        "vocab_size": embedding.shape[0] if embedding else None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_parameters": _rope_parameters(file, prefix),
        "rope_factors": _rope_factors(file),
        "eos_token_id": _end_tokens(file),
        "quantization_config": {"quant_method": "gguf"},
    }


_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def _rope_parameters(file: GgufFile, prefix: str) -> dict[str, Any]:
    def value(key: str, default: Any) -> Any:
        return file.metadata.get(f"{prefix}.rope.{key}", default)

    parameters = {"rope_type": "default", "rope_theta": value("freq_base", 10000.0)}
    rotated, head_dim = value("dimension_count", None), file.metadata.get(f"{prefix}.attention.key_length")
    if None not in (rotated, head_dim) and rotated != head_dim:
        raise ModelError(f"{file.path} rotates {rotated} of {head_dim} numbers of each head, which is not supported.")
    kind = value("scaling.type", "none")
    if kind == "none":
        return parameters
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{file.path} asks for rope of type {kind!r}, and of GGUF files read are none, linear and yarn."
        )
    parameters |= {"rope_type": kind, "factor": value("scaling.factor", 1.0)}
    original = value("scaling.original_context_length", None)
    return parameters if original is None else parameters | {"original_max_position_embeddings": original}


def _rope_factors(file: GgufFile) -> list[float] | None:
    """Returns the divisors of the rope frequencies if the file has them: Llama 3.1's scaling, precomputed."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_ROPE_FACTORS:
        raise ModelError(f"{file.path} has {ROPE_FACTORS} as {tensor.kind} {list(tensor.shape)}, which is not read.")
    return list(struct.unpack(f"<{tensor.shape[0]}f", file.read_rows(tensor, 0, 1)))


def _end_tokens(file: GgufFile) -> list[int]:
    """Returns the ids that end a text or a turn."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return [file.metadata[key] for key in keys if key in file.metadata]


class _Reader:
    """Reads a file of ``size`` bytes from its start."""

    def __init__(self, path: Path, file: BinaryIO, size: int, arrays: Collection[str], digest: blake2b | None) -> None:
        self._path, self._file, self._left, self._size, self._arrays = path, file, size, size, arrays
        self._digest = digest
        self._strings = MAX_STRINGS

    def read(self) -> GgufFile:
        """See ``GgufFile.read``."""
        if self._size < 4 or self._take(4) != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file.")
        version = self._number("<I")
        if version not in VERSIONS:
            raise ModelError(f"{self._path} is a GGUF file of version {version}, and read are 2 and 3.")
        num_tensors, num_values = self._count(MAX_ENTRIES), self._count(MAX_ENTRIES)
        metadata: dict[str, Any] = self._entries(num_values, self._value)
        infos: dict[str, tuple[str, tuple[int, ...], int]] = self._entries(num_tensors, lambda _: self._tensor_info())
        data = -(-(self._size - self._left) // self._alignment(metadata)) * self._alignment(metadata)
        tensors = {name: self._place(name, data, *info) for name, info in infos.items()}
        return GgufFile(self._path, metadata, tensors, "" if self._digest is None else self._digest.hexdigest())

    def _entries(self, count: int, read: Callable[[str], Any]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(count):
            name = self._text()
            if name in entries:
                raise self._broken(f"names {name} twice")
            entries[name] = read(name)
        return entries

    def _value(self, name: str) -> Any:
        kind = self._number("<I")
        if kind == _STRING:
            return self._text(self._left)
        if kind == _ARRAY:
            return self._array() if name in self._arrays else self._skip_array()
        return self._number(self._format(kind))

    def _array(self) -> list[Any]:
        kind, count = self._number("<I"), self._count(MAX_READ_ARRAY)
        if kind == _STRING:
            return [self._text() for _ in range(self._count_strings(count))]
        layout = f"<{count}{self._format(kind)[1]}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))

    def _skip_array(self) -> None:
        kind, count = self._number("<I"), self._count(MAX_ARRAY)
        if kind != _STRING:
            return self._skip(count * struct.calcsize(self._format(kind)))
        for _ in range(self._count_strings(count)):
            self._skip(self._count(self._left))

    def _count_strings(self, count: int) -> int:
        self._strings -= count
        if self._strings < 0:
            raise self._broken(f"has more than {MAX_STRINGS} strings in arrays")
        return count

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int]:
        dimensions = self._number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._broken(f"has a tensor of {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        kind = self._number("<I")
        name = next((name for name, block in BLOCKS.items() if block.number == kind), f"number {kind}")
        return name, shape, self._number("<Q")

    def _place(self, name: str, data: int, kind: str, shape: tuple[int, ...], offset: int) -> GgufTensor:
        """Returns the tensor at ``offset`` from ``data``. Raises ``ModelError`` unless all its bytes are in the
        file.
        """
        if kind not in BLOCKS:
            raise ModelError(f"{self._path} stores {name} as type {kind}, and read are {', '.join(BLOCKS)}.")
        block, tensor = BLOCKS[kind], GgufTensor(kind, shape, data + offset)
        if shape[-1] % block.numbers:
            raise self._broken(f"has rows of {shape[-1]} numbers in {name}, which {kind} cannot hold")
        if min(shape) < 1 or tensor.start + math.prod(shape[:-1]) * tensor.row_bytes > self._size:
            raise self._broken(f"ends before {name} does")
        return tensor

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._broken(f"has the alignment {value!r}")
        return value

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._broken(f"has a value of type {kind}")
        return _NUMBERS[kind]

    def _text(self, limit: int = MAX_NAME_BYTES) -> str:
        return self._take(self._count(limit)).decode(errors="replace")

    def _count(self, limit: int) -> int:
        count = int(self._number("<Q"))
        if count > limit:
            raise self._broken(f"asks for {count} of what it can have {limit} of")
        return count

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _take(self, count: int) -> bytes:
        self._use(count)
        taken = self._file.read(count)
        if len(taken) != count:
            raise self._broken("ends too early")
        if self._digest is not None:
            self._digest.update(taken)
        return taken

    def _skip(self, count: int) -> None:
        if self._digest is None:
            self._use(count)
            self._file.seek(count, 1)
        while self._digest is not None and count:
            count -= len(self._take(min(count, 1 << 20)))

    def _use(self, count: int) -> None:
        if count > self._left:
            raise self._broken("ends too early")
        self._left -= count

    def _broken(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is not a whole GGUF file: it {what}.")
