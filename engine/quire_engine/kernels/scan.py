"""What a draw looks at in rows of numbers on the CPU. Knows tensors, and nothing of what they mean."""

import torch

from quire_engine.kernels.library import DTYPES, library


def argmax_rows(rows: torch.Tensor) -> torch.Tensor | None:
    """The lowest place of the highest number of each of ``rows`` [R, V]: [R] int64; some place where a row has a NaN.
    None where there is no kernel for them.
    """
    places = torch.empty(len(rows), dtype=torch.int64)
    return places if _scan(rows, places, None) else None


def finite_rows(rows: torch.Tensor) -> torch.Tensor | None:
    """Which of ``rows`` [R, V] hold only finite numbers, [R] bool; None where there is no kernel for them."""
    finite = torch.empty(len(rows), dtype=torch.bool)
    return finite if _scan(rows, None, finite) else None


def _scan(rows: torch.Tensor, places: torch.Tensor | None, finite: torch.Tensor | None) -> bool:
    kernels = library() if rows.is_cpu and rows.dtype in DTYPES and rows.numel() and rows.stride(1) == 1 else None
    if kernels is None:
        return False
    count, width = rows.shape
    kernels.quire_scan_rows(
        *(rows.data_ptr(), rows.stride(0), count, width, rows.dtype is torch.bfloat16),
        *(None if made is None else made.data_ptr() for made in (places, finite)),
        torch.get_num_threads(),
    )
    return True
