"""FlashInfer, as far as Quire uses it, in torch on the CPU: the same names, arrays and complaints.

A plan reads the indptrs, page ids and last page lengths as the kernels do, and nothing else; a run looks at keys and
values through it. What is queued on a GPU's stream is queued here too while ``Stream`` is lazy: a plan goes through a
staging buffer of its wrapper that the next plan overwrites, and all work is done only when someone waits.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

from tests.support.flashinfer_contract import CONTRACT

Tensor = torch.Tensor


class Stream:
    """The work that a GPU would still have before it."""

    def __init__(self) -> None:
        self.lazy = False
        self._work: list[Callable[[], None]] = []

    def queue(self, work: Callable[[], None]) -> None:
        if self.lazy:
            self._work.append(work)
        else:
            work()

    def take(self) -> list[Callable[[], None]]:
        """All that is queued, undone: what a graph captures."""
        work, self._work = self._work, []
        return work

    def synchronize(self) -> None:
        for each in self.take():
            each()


STREAM = Stream()


class Gpu:
    """The GPU that is emulated."""

    capability = (8, 0)


GPU = Gpu()


class Fence:
    """In the place of ``StagingFence``: waits for the stream."""

    def __init__(self, device: torch.device) -> None:
        self._marked = False

    def wait(self) -> None:
        if self._marked:
            STREAM.synchronize()

    def record(self) -> None:
        self._marked = True


class _Wrapper:
    """What both wrappers have in common. ``staging`` is what a plan fills on the host, ``on_device`` what runs read."""

    def __init__(self, workspace: Tensor, kv_layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.data_ptr() % 16 == 0
        assert kv_layout == "HND"
        assert backend == "fa2" or (backend == "fa3" and GPU.capability[0] == 9)
        self.workspace = workspace
        self.staging: dict[str, Tensor] = {}
        self.on_device: dict[str, Tensor] = {}
        self.settings: dict | None = None

    def _stage(self, **arrays: Tensor) -> None:
        for name, array in arrays.items():
            assert array.dtype == torch.int32, name
            assert array.dim() == 1, name
            assert array.is_contiguous(), name
        self.staging.update({name: array.clone() for name, array in arrays.items()})
        STREAM.queue(lambda: self.on_device.update({name: value.clone() for name, value in self.staging.items()}))

    def _check(self, arrays: dict[str, Tensor], page_size: int) -> None:
        indptr, last = arrays["kv_indptr"], arrays["last_page_len"]
        assert len(indptr) == len(last) + 1
        assert indptr[0] == 0
        assert (indptr.diff() > 0).all()
        assert len(arrays["kv_indices"]) == indptr[-1]
        assert ((last >= 1) & (last <= page_size)).all()
        if arrays["seq_lens"] is not None:
            assert torch.equal(arrays["seq_lens"], (indptr.diff() - 1) * page_size + last)

    def _run(self, q: Tensor, kv: Tensor, out: Tensor, q_indptr: Tensor | None, causal: bool) -> Tensor:
        settings = self.settings
        assert settings is not None, "plan info is not initialized"
        if q.dtype != settings["q_data_type"] or kv.dtype != settings["kv_data_type"]:
            raise ValueError("the dtype does not match the one specified in plan")
        assert q.stride(2) == kv.stride(4) == 1
        assert kv.shape[1:] == (2, settings["num_kv_heads"], settings["page_size"], settings["head_dim"])
        assert q.shape[1:] == (settings["num_qo_heads"], settings["head_dim"])
        assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
        STREAM.queue(lambda: attend(q, kv, out, q_indptr, self._read(), settings, causal=causal))
        return out

    def _read(self) -> dict[str, Tensor]:
        """The arrays that the kernels read."""
        return self.on_device


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        non_blocking=True,
        seq_lens=None,
        disable_split_kv=False,
    ):
        arrays = {"q_indptr": qo_indptr, "kv_indptr": paged_kv_indptr, "kv_indices": paged_kv_indices}
        arrays |= {"last_page_len": paged_kv_last_page_len}
        self._check(arrays | {"seq_lens": seq_lens}, page_size)
        assert len(qo_indptr) == len(paged_kv_indptr)
        self._rows = int(qo_indptr[-1])
        self._stage(**arrays)
        self.settings = _settings(locals(), head_dim_qk)

    def run(self, q, paged_kv_cache, *, out=None):
        if q.shape[0] != self._rows:
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({self._rows})")
        return self._run(q, paged_kv_cache, out, None, causal=self.settings["causal"])


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        *,
        backend="auto",
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        head_dim_qk=128,
        head_dim_vo=128,
        window_left=-1,
    ):
        super().__init__(float_workspace_buffer, kv_layout, backend=backend)
        # The kernel is compiled for these, and a plan cannot change them.
        self._made_for = (q_data_type, kv_data_type, head_dim_qk, window_left >= 0)
        assert head_dim_qk == head_dim_vo

    def run(self, q, paged_kv_cache, sink, sm_scale, *, out=None):
        settings = self.settings
        asked = (settings["q_data_type"], settings["kv_data_type"], settings["head_dim"], settings["window_left"] >= 0)
        assert asked == self._made_for
        assert settings["soft_cap"] is None
        assert (sink.dtype, sink.shape) == (torch.float32, (settings["num_qo_heads"],))
        settings |= {"sm_scale": sm_scale, "sink": sink}
        return super().run(q, paged_kv_cache, out=out)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        *,
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._on_tensor_cores = use_tensor_cores
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._buffers = buffers if use_cuda_graph else None
        self.int_workspace: Tensor | None = None
        if use_cuda_graph:
            assert all(buffer.dtype == torch.int32 and buffer.is_contiguous() for buffer in buffers)
            if len(paged_kv_indptr_buffer) != len(paged_kv_last_page_len_buffer) + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert int_workspace_buffer.data_ptr() % 16 == 0
        self.int_workspace = int_workspace_buffer

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        non_blocking=True,
        seq_lens=None,
        disable_split_kv=False,
    ):
        assert self._on_tensor_cores or not disable_split_kv, "the kernel on CUDA cores would split"
        arrays = {"kv_indptr": indptr, "kv_indices": indices, "last_page_len": last_page_len}
        self._check(arrays | {"seq_lens": seq_lens}, page_size)
        if self._buffers is not None:
            self._fill(indptr, indices, last_page_len)
        self._batch_size = len(last_page_len)
        if self._buffers is not None and not disable_split_kv:
            needed = graph_workspace_bytes(self._batch_size, num_qo_heads, num_kv_heads, head_dim)
            if needed > self.workspace.nbytes:
                raise RuntimeError(f"Failed to allocate memory for batch_prefill_tmp_v: {needed} bytes")
        self._stage(**arrays)
        self.settings = _settings(locals(), head_dim)

    def _fill(self, indptr, indices, last_page_len):
        to_indptr, to_indices, to_last = self._buffers
        if len(last_page_len) != len(to_last):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(indices) > len(to_indices):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        pairs = ((to_indptr, indptr), (to_indices[: len(indices)], indices), (to_last, last_page_len))
        for target, source in pairs:
            STREAM.queue(lambda target=target, source=source: target.copy_(source))

    def _read(self):
        if self._buffers is None:
            return self.on_device
        assert torch.equal(self.on_device["kv_indptr"], self._buffers[0]), "the plan is of another step"
        return dict(zip(("kv_indptr", "kv_indices", "last_page_len"), self._buffers, strict=True))

    def run(self, q, paged_kv_cache, *, out=None):
        if q.shape[0] != self._batch_size:
            raise ValueError(f"q implies q_len_per_req={q.shape[0] // self._batch_size} but plan() used 1")
        return self._run(q, paged_kv_cache, out, torch.arange(len(q) + 1), causal=False)


def graph_workspace_bytes(rows: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """What a plan takes of the float workspace in a graph, on a GPU of one multiprocessor: ``PrefillSplitQOKVIndptr``
    and ``PrefillPlanImpl`` in FlashInfer's ``scheduler.cuh``, ``FA2DetermineCtaTileQ`` in ``utils.cuh``.
    """
    group = heads // kv_heads
    tile = 128 if group > 64 and head_dim < 256 else 64 if group > 16 or GPU.capability < (8, 0) else 16
    tiles = max(2 // kv_heads, -(-rows * group // tile) + rows - 1)
    partial = -(-tiles * tile // group)
    return 4 * heads * partial * head_dim + 4 * heads * partial


def append_paged_kv_cache(
    append_key,
    append_value,
    batch_indices,
    positions,
    paged_kv_cache,
    kv_indices,
    kv_indptr,
    kv_last_page_len,
    kv_layout="NHD",
):
    assert kv_layout == "HND"
    for array in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert array.dtype == torch.int32
        assert array.is_contiguous()
    assert len(append_key) == len(append_value) == len(batch_indices) == len(positions)
    assert len(kv_indptr) == len(kv_last_page_len) + 1
    # The kernel reads keys and values as being of the cache's dtype, whatever they are of.
    assert append_key.dtype == append_value.dtype == paged_kv_cache.dtype
    assert append_key.shape[1:] == append_value.shape[1:] == paged_kv_cache.shape[2:5:2]
    assert append_key.stride(2) == append_value.stride(2) == paged_kv_cache.stride(4) == 1

    def store() -> None:
        size = paged_kv_cache.shape[3]
        place = kv_indptr[batch_indices] * size + positions
        pages, offsets = kv_indices[place // size], place % size
        for plane, rows in enumerate((append_key, append_value)):
            as_bytes(paged_kv_cache)[pages, plane, :, offsets] = as_bytes(rows)

    STREAM.queue(store)


def as_bytes(tensor: Tensor) -> Tensor:
    """fp8 as bytes, which torch can index; any other tensor as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def attend(
    q: Tensor, kv: Tensor, out: Tensor, q_indptr: Tensor | None, arrays: dict, settings: dict, *, causal: bool
) -> None:
    """Attention in float64, request by request, masked as FlashInfer masks: query i of a request with n keys and m
    queries is at n - m + i, and sees ``window_left`` keys before itself.
    """
    bounds = arrays["q_indptr"] if q_indptr is None else q_indptr
    size = settings["page_size"]
    for request, last in enumerate(arrays["last_page_len"].tolist()):
        queries = slice(int(bounds[request]), int(bounds[request + 1]))
        first_page, end_page = arrays["kv_indptr"][request : request + 2].tolist()
        count = (end_page - first_page - 1) * size + last
        pages = as_bytes(kv)[arrays["kv_indices"][first_page:end_page].long()].view(kv.dtype)
        keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :count].double()
        rows = q[queries].double()
        group = rows.shape[1] // len(keys)
        scores = torch.einsum("thd,hnd->htn", rows, keys.repeat_interleave(group, 0)) * settings["sm_scale"]
        at = torch.arange(len(rows))[:, None] + count - len(rows)
        key_at = torch.arange(count)
        hidden = torch.zeros(len(rows), count, dtype=torch.bool)
        if causal:
            hidden |= key_at > at
        if settings["window_left"] >= 0:
            hidden |= key_at + settings["window_left"] < at
        if settings["soft_cap"] is not None:
            scores = torch.tanh(scores / settings["soft_cap"]) * settings["soft_cap"]
        scores = scores.masked_fill(hidden, -torch.inf)
        if "sink" in settings:
            scores = torch.cat((scores, settings["sink"].double().view(-1, 1, 1).expand(*scores.shape[:2], 1)), -1)
        weights = scores.softmax(-1)[..., :count]
        out[queries] = torch.einsum("htn,hnd->thd", weights, values.repeat_interleave(group, 0)).to(out.dtype)


def rmsnorm(input, weight, eps=1e-6, out=None):
    _check_rows(input, weight)
    out.copy_(_normed(input.float(), weight.float(), eps))
    return out


def _normed(wide, weight, eps):
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def fused_add_rmsnorm(input, residual, weight, eps=1e-6):
    _check_rows(input, weight)
    _check_rows(residual, weight)
    wide = input.float() + residual.float()
    residual.copy_(wide)
    input.copy_(_normed(wide, weight.float(), eps))


def gemma_rmsnorm(input, weight, eps=1e-6, out=None):
    assert input.dim() == 2, "it has no norm of each head"
    _check_rows(input, weight)
    out.copy_(_normed(input.float(), weight.float() + 1, eps))
    return out


def gemma_fused_add_rmsnorm(input, residual, weight, eps=1e-6):
    _check_rows(input, weight)
    _check_rows(residual, weight)
    wide = input.float() + residual.float()
    residual.copy_(wide)
    input.copy_(_normed(wide, weight.float() + 1, eps))


def silu_and_mul(input):
    return _gated(input, torch.nn.functional.silu)


def gelu_tanh_and_mul(input):
    return _gated(input, functools.partial(torch.nn.functional.gelu, approximate="tanh"))


def _gated(input, activate):
    assert input.dtype in (torch.float16, torch.bfloat16)
    if input.shape[-1] * input.element_size() % 16:
        raise ValueError("The pointers must be multiple of 16 bytes.")
    assert input.is_contiguous()
    gate, up = input.float().chunk(2, dim=-1)
    return (activate(gate) * up).to(input.dtype)


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    assert is_neox
    assert cos_sin_cache.is_contiguous()
    assert cos_sin_cache.data_ptr() % 16 == 0
    half = cos_sin_cache.shape[1] // 2
    assert half % max(8, head_size // 32) == 0
    assert query.dtype == key.dtype != torch.float32
    cos, sin = (part[:, None] for part in cos_sin_cache[positions.long()].chunk(2, dim=-1))
    for each in (query, key):
        heads = each.view(each.shape[0], -1, head_size)
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        heads[..., : 2 * half] = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(each.dtype)


def _check_rows(x: Tensor, weight: Tensor) -> None:
    assert x.dtype == weight.dtype
    assert x.dtype in (torch.float16, torch.bfloat16)
    assert x.stride(-1) == 1
    assert weight.shape == x.shape[-1:]
    assert all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])


def _settings(given: dict, head_dim: int) -> dict:
    names = ("num_qo_heads", "num_kv_heads", "page_size", "sm_scale", "window_left", "q_data_type", "kv_data_type")
    assert given["non_blocking"]
    assert given["num_qo_heads"] % given["num_kv_heads"] == 0
    settings = {name: given[name] for name in names} | {"head_dim": head_dim, "causal": given.get("causal", False)}
    return settings | {"soft_cap": given["logits_soft_cap"]}


@contextmanager
def installed(*, lazy: bool = False, capability: tuple[int, int] = (8, 0)) -> Iterator[ModuleType]:
    """``import flashinfer`` finds the emulation, of a GPU of this compute capability, and fences wait for its
    stream.
    """
    module = ModuleType("flashinfer")
    for name in {call.name.split(".")[0] for call in CONTRACT}:
        setattr(module, name, globals()[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", module)
        patch.setattr("quire_engine.attention.flashinfer.StagingFence", Fence)
        patch.setattr("quire_engine.attention.flashinfer.MIN_WORKSPACE_BYTES", 1024)
        patch.setattr("quire_engine.attention.flashinfer.MAX_GRAPH_BATCH_SIZE", 8)
        patch.setattr(STREAM, "lazy", lazy)
        patch.setattr(GPU, "capability", capability)
        patch.setattr("quire_engine.attention.flashinfer._gpu", lambda device: (1, capability))
        yield module
        STREAM.synchronize()
