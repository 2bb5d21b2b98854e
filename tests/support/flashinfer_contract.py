"""What Quire takes for granted of FlashInfer, as a table: the calls, and the names of the arguments it gives them.

``breaches`` compares it with FlashInfer's source, without importing it, as that needs a GPU. Written down from
0.7.2.post1.
"""

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Call:
    """A function of one source file. ``positional`` are its first parameters, in order; ``keywords`` are among the
    others. Where it hands its keywords on, ``taken_by`` is the method that has them.
    """

    file: str
    name: str
    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    taken_by: str | None = None


_PLAN_OPTIONS = (
    *("sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type"),
    *("non_blocking", "seq_lens", "disable_split_kv"),
)
_PREFILL, _DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"

CONTRACT = (
    Call("prefill.py", f"{_PREFILL}.__init__", ("float_workspace_buffer", "kv_layout"), ("backend",)),
    Call(
        "prefill.py",
        f"{_PREFILL}.plan",
        (
            *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
            *("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"),
        ),
        ("causal", *_PLAN_OPTIONS),
    ),
    Call("prefill.py", f"{_PREFILL}.run", ("q", "paged_kv_cache"), ("out",)),
    Call(
        "decode.py",
        f"{_DECODE}.__init__",
        ("float_workspace_buffer", "kv_layout"),
        (
            *("use_cuda_graph", "use_tensor_cores", "backend"),
            *("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"),
        ),
    ),
    Call("decode.py", f"{_DECODE}.reset_workspace_buffer", ("float_workspace_buffer", "int_workspace_buffer")),
    Call(
        "decode.py",
        f"{_DECODE}.plan",
        ("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size"),
        _PLAN_OPTIONS,
        taken_by="_plan_impl",
    ),
    Call("decode.py", f"{_DECODE}.run", ("q", "paged_kv_cache"), ("out",)),
    Call(
        "attention/_core.py",
        "BatchAttentionWithAttentionSinkWrapper.__init__",
        ("float_workspace_buffer", "kv_layout"),
        ("backend", "q_data_type", "kv_data_type", "head_dim_qk", "head_dim_vo", "window_left"),
    ),
    Call(
        "page.py",
        "append_paged_kv_cache",
        (
            *("append_key", "append_value", "batch_indices", "positions", "paged_kv_cache"),
            *("kv_indices", "kv_indptr", "kv_last_page_len"),
        ),
        ("kv_layout",),
    ),
    Call("norm/__init__.py", "rmsnorm", ("input", "weight", "eps"), ("out",)),
    Call("norm/__init__.py", "fused_add_rmsnorm", ("input", "residual", "weight", "eps")),
    Call("norm/__init__.py", "gemma_rmsnorm", ("input", "weight", "eps"), ("out",)),
    Call("norm/__init__.py", "gemma_fused_add_rmsnorm", ("input", "residual", "weight", "eps")),
    Call("activation.py", "silu_and_mul", ("input",)),
    Call("activation.py", "gelu_tanh_and_mul", ("input",)),
    Call(
        "rope.py",
        "apply_rope_with_cos_sin_cache_inplace",
        ("positions", "query", "key", "head_size", "cos_sin_cache"),
        ("is_neox",),
    ),
)


def breaches(folder: Path) -> list[str]:
    """Where FlashInfer's package in ``folder`` is not what the table says."""
    exported = _exported(folder / "__init__.py")
    missing = sorted({call.name.split(".")[0] for call in CONTRACT} - exported)
    found = [f"flashinfer exports no {name}" for name in missing]
    return found + [breach for call in CONTRACT for breach in _breaches(folder, call)]


def _breaches(folder: Path, call: Call) -> list[str]:
    functions = _functions(folder / call.file)
    if call.name not in functions:
        return [f"{call.file} has no {call.name}"]
    positional, keywords = functions[call.name]
    if call.taken_by is not None:
        keywords |= functions.get(f"{call.name.rpartition('.')[0]}.{call.taken_by}", ([], set()))[1]
    breaches = [f"{call.name} has no parameter {name}" for name in call.keywords if name not in keywords]
    first = tuple(positional[: len(call.positional)])
    return breaches + ([f"{call.name} begins with {first}"] if first != call.positional else [])


def _functions(path: Path) -> dict[str, tuple[list[str], set[str]]]:
    """Positional parameters, and all that may be given by name, of the functions and methods of a file. Of overloads
    the last one counts, which is the function itself.
    """
    tree = ast.parse(path.read_text())
    scopes = [("", tree.body), *((f"{node.name}.", node.body) for node in tree.body if isinstance(node, ast.ClassDef))]
    return {
        prefix + node.name: _parameters(node)
        for prefix, body in scopes
        for node in body
        if isinstance(node, ast.FunctionDef)
    }


def _parameters(node: ast.FunctionDef) -> tuple[list[str], set[str]]:
    arguments = node.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args) if each.arg != "self"]
    return positional, {each.arg for each in (*arguments.args, *arguments.kwonlyargs)}


def _exported(path: Path) -> set[str]:
    imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name for node in imports for alias in node.names}
