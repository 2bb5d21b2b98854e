"""The tensors of a model folder: finds, checks and copies them from its safetensors files.

Tensors are mapped from disk one at a time, and each file is closed after each tensor. A load therefore needs the memory
of the weights and of one tensor. Nothing is read with pickle.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire_engine.checkpoint.text_part import text_name, text_names
from quire_engine.checkpoint.weight_files import INDEX_FILE, WeightFiles
from quire_engine.config import ExecutorConfig
from quire_engine.core.startup import StartupPhase, report_progress
from quire_engine.distributed.communicator import SINGLE_RANK, Communicator, shard
from quire_engine.distributed.pipeline import PipelineStage
from quire_engine.errors import ModelError

log = logging.getLogger(__name__)

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS_AT_ONCE = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Old exports have this buffer, which is computed from config.json.
IGNORED_SUFFIX = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The file, the name there, shape and safetensors dtype of a stored tensor."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of one folder, by name. For a multimodal model, only tensors of its text part, by their names in a
    model of text alone. All methods raise ``ModelError``, which names the file.
    """

    def __init__(self, folder: Path) -> None:
        files = WeightFiles.find(folder)
        stored = _read_tensor_infos(folder, files)
        names = text_names(stored)
        if len(names) < len(stored):
            log.info("%s: skipping %d tensors that are not of the text part", folder, len(stored) - len(names))
        self._list(files.source, {names[name]: info for name, info in stored.items() if name in names})
        self._absent |= {text_name(name): folder / file for name, file in files.places.items() if name not in stored}

    def _list(self, source: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._source_path, self._tensors, self._unused = source, tensors, set(tensors)
        self._absent: dict[str, Path] = {}
        self._numbers, self._numbers_read = max(1, sum(math.prod(tensor.shape) for tensor in tensors.values())), 0

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        """Returns the stored dtype of a tensor."""
        return SAFETENSORS_DTYPES[_supported(name, self._entry(name)).dtype]

    def dominant_dtype(self) -> torch.dtype:
        """Returns the stored dtype of the largest tensor that is not packed or quantised."""
        plain = [name for name, entry in sorted(self._tensors.items()) if entry.dtype in SAFETENSORS_DTYPES]
        largest = max(plain or sorted(self._tensors), key=lambda name: math.prod(self._tensors[name].shape))
        return self.dtype(largest)

    def load_fused(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        communicator: Communicator = SINGLE_RANK,
        dim: int = 0,
    ) -> torch.Tensor:
        """Returns tensors of the given shapes, concatenated in their first dimension, as one tensor of ``dtype`` on
        ``device``. Reads only this rank's shard of dimension ``dim`` of each.
        """
        for name, shape in zip(names, shapes, strict=True):
            self._check_shape(name, shape)
        slices = [_shard_slices(shape, dim, communicator) for shape in shapes]
        sizes = [[part.stop - part.start for part in each] for each in slices]
        rows = [size[0] for size in sizes]
        target = torch.empty((sum(rows), *sizes[0][1:]), dtype=dtype, device=device)
        for name, each, part in zip(names, slices, target.split(rows), strict=True):
            self._load_slice(name, each, part)
        return target

    def load_row(
        self, name: str, shape: tuple[int, ...], index: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns ``name[index]`` of a tensor of the given shape, without reading the rest."""
        self._check_shape(name, shape)
        part = torch.empty((1, *shape[1:]), dtype=dtype, device=device)
        self._load_slice(name, (slice(index, index + 1), *map(slice, shape[1:])), part)
        return part[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a stored tensor."""
        return self._entry(name).shape

    def load_stored(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> torch.Tensor:
        """Returns a whole tensor of the given shape as it is stored, on the CPU, in one of safetensors' ``dtypes``."""
        entry = self._entry(name)
        if entry.dtype not in dtypes:
            raise ModelError(f"{entry.path} stores {name} as {entry.dtype}, and it must be {' or '.join(dtypes)}.")
        self._check_shape(name, shape)
        return self.load_part(name)

    def load_part(self, name: str, index: int | None = None) -> torch.Tensor:
        """Returns a tensor as it is stored, on the CPU: all of it, or ``index`` of its first dimension."""
        entry = self._entry(name)
        with _open_safetensors(entry.path) as file:
            tensor: torch.Tensor = file.get_tensor(entry.name) if index is None else file.get_slice(entry.name)[index]
        self._mark_read(name)
        return tensor

    def are_equal(self, first: str, second: str, dtype: torch.dtype) -> bool:
        """Whether two tensors are stored unquantised and are equal in ``dtype``. Reads ``_ROWS_AT_ONCE`` rows at a
        time.
        """
        stored = [self._tensors.get(name) for name in (first, second)]
        if any(each is None or each.dtype not in SAFETENSORS_DTYPES for each in stored):
            return False
        shape = self.shape(first)
        if shape != self.shape(second):
            return False
        for start in range(0, shape[0], _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, shape[0]))
            parts = [torch.empty((rows.stop - start, *shape[1:]), dtype=dtype) for _ in range(2)]
            for name, part in zip((first, second), parts, strict=True):
                self._copy_slice(name, (rows, *map(slice, shape[1:])), part)
            if not torch.equal(*parts):
                return False
        return True

    def mark_used(self, names: Iterable[str]) -> None:
        """Excludes tensors that only other ranks read from ``log_unused``."""
        self._unused.difference_update(names)

    def log_unused(self) -> None:
        """Logs a warning that lists the tensors that were never read."""
        unused = sorted(name for name in self._unused if not name.endswith(IGNORED_SUFFIX))
        if unused:
            shown = ", ".join(unused[:5])
            log.warning("%s has %d tensors that the model does not use: %s", self._source_path, len(unused), shown)

    def _mark_read(self, name: str) -> None:
        if name in self._unused:
            self._unused.remove(name)
            self._numbers_read += math.prod(self._tensors[name].shape)
            report_progress(StartupPhase.WEIGHTS, self._numbers_read / self._numbers)

    def _entry(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            if path := self._absent.get(name):
                what = f"tensor {name}" if path.exists() else f"{path.name}, in which {name} is"
                raise ModelError(f"{path if path.exists() else path.parent} has no {what}: {INDEX_FILE} names it.")
            raise ModelError(f"{self._source_path} has no tensor {name}.")
        return self._tensors[name]

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self._entry(name)
        if entry.shape != shape:
            raise ModelError(
                f"{entry.path} has {name} in the shape {list(entry.shape)}, but config.json asks for {list(shape)}."
            )

    def _load_slice(self, name: str, slices: tuple[slice, ...], target: torch.Tensor) -> None:
        self._copy_slice(name, slices, target)
        self._mark_read(name)

    def _copy_slice(self, name: str, slices: tuple[slice, ...], target: torch.Tensor) -> None:
        """Copies a slice of a stored tensor to ``target``, converting its dtype."""
        entry = _supported(name, self._entry(name))
        with _open_safetensors(entry.path) as file:
            whole = tuple(target.shape) == entry.shape
            target.copy_(file.get_tensor(entry.name) if whole else file.get_slice(entry.name)[slices])


def _supported(name: str, entry: TensorInfo) -> TensorInfo:
    if entry.dtype not in SAFETENSORS_DTYPES:
        raise ModelError(f"{entry.path} stores {name} as {entry.dtype}, which is not supported.")
    return entry


def resolve_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype to compute in: the named one or, with ``auto``, the checkpoint's own.

    With ``auto`` on the CPU, a float16 checkpoint is computed in bfloat16, because float16 products have no fast path
    there. Raises ``ModelError`` for an unknown name, and for bfloat16 on a GPU that does not support it.
    """
    dtype = _resolve_name(name, stored, device)
    if dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise ModelError("This GPU cannot compute in bfloat16; use --dtype float16 or float32.")
    return dtype


def _resolve_name(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ModelError(f"The dtype {name!r} is not supported; use auto, float32, bfloat16 or float16.")
    if stored == torch.float16 and device.type == "cpu":
        log.warning("float16 is slow on a CPU: the model runs in bfloat16; --dtype float16 keeps the checkpoint's type")
        return torch.bfloat16
    return torch.float32 if stored == torch.float64 else stored


def _shard_slices(shape: tuple[int, ...], dim: int, communicator: Communicator) -> tuple[slice, ...]:
    """Returns this rank's shard of dimension ``dim``, and the whole of the other dimensions."""
    parts = [slice(0, size) for size in shape]
    parts[dim] = shard(shape[dim], communicator)
    return tuple(parts)


def _read_tensor_infos(folder: Path, files: WeightFiles) -> dict[str, TensorInfo]:
    """Returns all tensors of the files, listed in an index or not. If several files have a tensor, the file that the
    index names wins. Files of an index may be missing: only tensors that are needed must exist.
    """
    found: dict[str, TensorInfo] = {}
    for file in files.names:
        if files.places and not (folder / file).exists():
            log.warning("%s names %s, which is missing: its tensors are not read", files.source, file)
            continue
        for name, info in _file_tensors(folder / file):
            if name not in found or files.places.get(name) == file:
                found[name] = info
    if not found:
        raise ModelError(f"{files.source} has no tensors: none of the files is there that it names.")
    return found


def _file_tensors(path: Path) -> Iterator[tuple[str, TensorInfo]]:
    with _open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping, and not iterable
            view = file.get_slice(name)
            yield name, TensorInfo(path, name, tuple(view.get_shape()), view.get_dtype())


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file, memory mapped. Raises ``ModelError`` if it is missing, truncated or not safetensors."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise ModelError(f"The model folder {path.parent} has no {path.name}.") from None
    except SafetensorError as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from None


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded. ``config`` has the dtype, the quantization and whether to be deterministic. ``device`` is
    the resolved device. If several ranks share a model, each reads only its shard of the layers of its ``stage``. The
    ranks of ``expert_communicator`` share the experts; by default that is ``communicator``. ``num_lora_slots`` is how
    many adapters can be in use at once; 0 disables them.
    """

    config: ExecutorConfig = field(default_factory=ExecutorConfig)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    communicator: Communicator = SINGLE_RANK
    stage: PipelineStage | None = None
    num_lora_slots: int = 0
    expert_communicator: Communicator | None = None
