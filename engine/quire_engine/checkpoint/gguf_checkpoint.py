"""``GgufCheckpoint``: the tensors of a GGUF file under their names in Hugging Face's layout."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from quire_engine.checkpoint.gguf import BLOCKS, ROPE_FACTORS, GgufFile, GgufTensor
from quire_engine.checkpoint.gguf_blocks import DEQUANTIZE, WHOLE_NUMBERS, WholeNumbers
from quire_engine.checkpoint.weights import SAFETENSORS_DTYPES, Checkpoint, TensorInfo
from quire_engine.errors import ModelError

_NAME = re.compile(r"(?:blk\.(\d{1,6})\.)?(\w+)\.(weight|bias)")
_NUMBERS_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """The names of an architecture's tensors in GGUF files. ``names`` maps them to Hugging Face's names of layers,
    without the number of a decoder layer. With ``permutes_heads``, the rows of queries and keys are stored in
    llama.cpp's rotation order: pairs of neighbours instead of halves.
    """

    names: Mapping[str, str]
    permutes_heads: bool = False

    def hugging_face_name(self, name: str) -> str:
        """Returns the name of a tensor in Hugging Face's layout, or ``name`` itself if it has none."""
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in self.names:
            return name
        layer = "" if match[1] is None else f"model.layers.{int(match[1])}."
        return f"{layer}{self.names[match[2]]}.{match[3]}"


class GgufCheckpoint(Checkpoint):
    """The tensors of one file. Quantised tensors are dequantised to float32 when they are read."""

    def __init__(self, path: Path, tensors: GgufTensors) -> None:
        self._file = GgufFile.read(path)
        self._stored = {tensors.hugging_face_name(name): tensor for name, tensor in self._file.tensors.items()}
        self._orders = self._row_orders() if tensors.permutes_heads else {}
        self._list(path, {name: TensorInfo(path, name, each.shape, each.kind) for name, each in self._stored.items()})
        self.mark_used([ROPE_FACTORS])

    def dtype(self, name: str) -> torch.dtype:
        """See ``Checkpoint.dtype``; bfloat16 for a quantised tensor."""
        return SAFETENSORS_DTYPES.get(self._entry(name).dtype, torch.bfloat16)

    def whole_bits(self, name: str) -> int | None:
        """Returns the bits of the whole numbers that ``load_whole`` reads for the tensor; None if it cannot read it."""
        kind = self._stored[name].kind if name in self._stored else None
        return WHOLE_NUMBERS[kind][0] if kind in WHOLE_NUMBERS else None

    def load_whole(self, name: str, shape: tuple[int, int]) -> WholeNumbers:
        """Returns a tensor of ``shape`` [out, in] as stored: values [out, in], fp32 scales and zeros [out, groups]."""
        self._check_shape(name, shape)
        tensor, order = self._stored[name], self._orders.get(name.rpartition(".")[0])
        whole = WHOLE_NUMBERS[tensor.kind][1](self._blocks(tensor, 0, shape[0]))
        self.mark_used([name])

        def in_rows(part: torch.Tensor) -> torch.Tensor:
            rows = part.reshape(shape[0], -1)
            return rows if order is None else rows[order]

        zeros = None if whole.zeros is None else in_rows(whole.zeros)
        return WholeNumbers(in_rows(whole.values), in_rows(whole.scales), zeros)

    def _copy_slice(self, name: str, slices: tuple[slice, ...], target: torch.Tensor) -> None:
        tensor, order = self._stored[name], self._orders.get(name.rpartition(".")[0])
        chosen = torch.arange(tensor.shape[0])[slices[0]] if len(tensor.shape) > 1 else None
        if len(tensor.shape) > 2:
            raise ModelError(f"{self._file.path} has {name} in {len(tensor.shape)} dimensions, and read are 2.")
        if chosen is None:
            values = self._rows(tensor, 0, 1).flatten()
            target.copy_((values if order is None else values[order])[slices[0]])
            return
        if order is not None:
            chosen = order[chosen]
        count = max(1, _NUMBERS_AT_ONCE // tensor.shape[1])
        for rows, part in zip(chosen.split(count), target.split(count), strict=True):
            first, last = int(rows.min()), int(rows.max())
            part.copy_(self._rows(tensor, first, last + 1)[rows - first][:, slices[1]])

    def _rows(self, tensor: GgufTensor, first: int, end: int) -> torch.Tensor:
        """Returns the rows from ``first`` up to but without ``end``, fp32 [rows, columns]."""
        return DEQUANTIZE[tensor.kind](self._blocks(tensor, first, end)).view(end - first, -1)

    def _blocks(self, tensor: GgufTensor, first: int, end: int) -> torch.Tensor:
        """Returns the same rows as blocks, uint8 [blocks, bytes]."""
        raw = torch.frombuffer(self._file.read_rows(tensor, first, end), dtype=torch.uint8)
        return raw.view(-1, BLOCKS[tensor.kind].nbytes)

    def _row_orders(self) -> dict[str, torch.Tensor]:
        """Returns the stored positions of the rows of queries and keys."""
        prefix, heads = f"{self._file.architecture}.attention.head_count", {}
        heads["q_proj"] = self._file.metadata.get(prefix)
        heads["k_proj"] = self._file.metadata.get(f"{prefix}_kv", heads["q_proj"])
        orders = {}
        for name, tensor in self._stored.items():
            layer = name.rpartition(".")[0]
            part = layer.rpartition(".")[2]
            if part in heads:
                orders[layer] = self._unpermuted(name, tensor, heads[part])
        return orders

    def _unpermuted(self, name: str, tensor: GgufTensor, heads: object) -> torch.Tensor:
        rows = tensor.shape[0]
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
            raise ModelError(f"{self._file.path} has {rows} rows in {name} for {heads!r} heads.")
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
