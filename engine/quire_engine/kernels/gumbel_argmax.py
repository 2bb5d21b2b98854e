"""``gumbel_argmax``: samples one token from each of many rows of logits on a GPU, in one launch. It uses Triton, which
comes with torch for CUDA.

It gives the draws of ``sampling/sample_ops.py`` bit for bit. Scores, weights and noise are single IEEE operations in
the order of ``sampling/exact_math.py``, quotients are rounded (unlike Triton's own ``/``), nothing is fused, and
weights are summed as integers. One program handles one row, which stays in the L2 cache. It reads the row once for the
highest logit, once to sample, and up to 31 times each for top-k and top-p, to find the lowest kept score by bisecting
its bits.

Raises ``ImportError`` on import if Triton is not installed.
"""

import torch
import triton
import triton.language as tl

# ruff: noqa: PLR0917 -- a launch passes its arguments by position
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators


@triton.jit
def scores_at(row, start, highest, temperature, width, block: tl.constexpr):
    """Returns the scores of ``block`` tokens, -inf beyond the row."""
    at = start + tl.arange(0, block)
    logits = tl.load(row + at, mask=at < width, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logits - highest, tl.zeros((block,), tl.float32) + temperature)


@triton.jit
def rank(scores):
    """Maps scores of at most 0 to integers in the opposite order."""
    return (0.0 - scores).to(tl.int32, bitcast=True)


@triton.jit
def weight(scores):
    """Returns ``2^40 * exp(scores)``, truncated to integers."""
    power = tl.maximum(scores * 1.4426950216293335, -60.0)
    whole = (power + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds half to even
    f = power - whole
    p = f * 1.5353362e-4 + 1.3398874e-3
    p = p * f + 9.6184373e-3
    p = p * f + 5.5503324e-2
    p = p * f + 2.4022648e-1
    p = p * f + 6.9314720e-1
    p = p * f + 1.0
    bits = p.to(tl.int32, bitcast=True) + ((whole.to(tl.int32) + 40) << 23)
    return bits.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def mass_within(row, last, kth, highest, temperature, width, by_weight: tl.constexpr, block: tl.constexpr):
    """Returns the number, or the total weight, of a row's scores whose rank is at most ``last`` and ``kth``."""
    total = tl.zeros((block,), tl.int64)
    for start in range(0, width, block):
        scores = scores_at(row, start, highest, temperature, width, block)
        within = (rank(scores) <= last) & (rank(scores) <= kth) & (start + tl.arange(0, block) < width)
        if by_weight:
            total += tl.where(within, weight(scores), 0)
        else:
            total += within.to(tl.int64)
    return tl.sum(total)


@triton.jit
def last_rank(row, need, kth, highest, temperature, width, by_weight: tl.constexpr, block: tl.constexpr):
    """Returns the lowest rank up to which the count or weight reaches ``need``."""
    low = tl.zeros((), tl.int32)
    high = kth
    while low < high:
        middle = low + (high - low) // 2
        if mass_within(row, middle, kth, highest, temperature, width, by_weight, block) >= need:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def log_of_parts(f, exponent):
    """Returns the natural logarithm of ``(1 + f) * 2^exponent``."""
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    w = z * z
    rest = (w * 0.24279078841209412 + 0.40000972151756287) * w
    rest = rest + (w * 0.2849878668785095 + 0.6666666269302368) * z
    half = f * f * 0.5
    return s * (rest + half) + exponent * 9.05800061445916e-06 - half + f + exponent * 0.6931381225585938


@triton.jit
def gumbel(token, low, high):
    """Returns the noise of tokens, from the halves of a draw's key."""
    x = (token.to(tl.uint32) * 0x9E3779B9) ^ low
    x = (x ^ (x >> 16)) * 0x85EBCA6B + high
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    u = tl.minimum((x.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    above = (1.0 - u).to(tl.int32, bitcast=True) - 0x3F3504F3
    f = ((above & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    f = tl.where((above >> 23) == 0, 0.0 - u, f)
    exponential = 0.0 - log_of_parts(f, (above >> 23).to(tl.float32))
    above = exponential.to(tl.int32, bitcast=True) - 0x3F3504F3
    f = ((above & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    return 0.0 - log_of_parts(f, (above >> 23).to(tl.float32))


@triton.jit
def draw(
    logits,  # [rows, width]
    row_of,  # [draws], like the others below
    temperatures,
    top_ks,
    top_ps,
    log_min_ps,
    keys,  # [draws, 2]
    token_ids,
    noisy,
    stride,
    width,
    block: tl.constexpr,
):
    """Does one draw."""
    index = tl.program_id(0)
    row = logits + tl.load(row_of + index) * stride
    best = tl.full((block,), float("-inf"), tl.float32)
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        best = tl.maximum(best, tl.load(row + at, mask=at < width, other=float("-inf")).to(tl.float32))
    highest = tl.max(best)
    temperature = tl.load(temperatures + index)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, tl.maximum(temperature, 1e-30))
    everything = tl.full((), 0x7F800000, tl.int32)
    kth = everything
    top_k = tl.load(top_ks + index)
    if (not greedy) & (top_k > 0) & (top_k < width):
        kth = last_rank(row, top_k, everything, highest, temperature, width, False, block)
    last = kth
    top_p = tl.load(top_ps + index)
    if (not greedy) & (top_p < 1):
        total = mass_within(row, kth, kth, highest, temperature, width, True, block)
        need = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
        last = last_rank(row, need, kth, highest, temperature, width, True, block)
    log_min_p = tl.where(greedy, float("-inf"), tl.load(log_min_ps + index))
    low = tl.load(keys + 2 * index).to(tl.uint32, bitcast=True)
    high = tl.load(keys + 2 * index + 1).to(tl.uint32, bitcast=True)
    best = tl.full((block,), float("-inf"), tl.float32)
    best_ids = tl.zeros((block,), tl.int32) + width
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        scores = scores_at(row, start, highest, temperature, width, block)
        kept = (rank(scores) <= last) & (scores >= log_min_p) & (at < width)
        with_noise = tl.where(greedy, scores, scores + gumbel(at, low, high))
        with_noise = tl.where(kept, with_noise, float("-inf"))
        better = with_noise > best
        best = tl.where(better, with_noise, best)
        best_ids = tl.where(better, at, best_ids)
    found = tl.max(best)
    token_id = tl.min(tl.where(best == found, best_ids, width))
    # A row from which nothing can be drawn gets some valid token.
    tl.store(token_ids + index, tl.where(token_id < width, token_id, 0).to(tl.int64))
    tl.store(noisy + index, found)


BLOCK = 2048
"""How many tokens a program reads at a time."""

WARPS = 8


def gumbel_argmax(
    logits: torch.Tensor,
    row_of: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids [D] int64 and their scores with noise [D] float32. Draw i samples from row ``row_of[i]`` [D]
    int64 of ``logits`` [R, V], any float dtype with contiguous rows. The parameters are as in
    ``DeviceSamplingMetadata``, on the device of the logits. Does not wait for the device.
    """
    token_ids = torch.empty(len(row_of), dtype=torch.int64, device=logits.device)
    noisy = torch.empty(len(row_of), dtype=torch.float32, device=logits.device)
    if len(row_of):
        draw[(len(row_of),)](
            *(logits, row_of, temperature, top_k, top_p, log_min_p, keys, token_ids, noisy),
            *(logits.stride(0), logits.shape[1]),
            block=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return token_ids, noisy


def draw_something(device: torch.device) -> None:
    """Compiles the kernel and runs it once on ``device``. Raises any error of Triton."""
    one = torch.ones(1, device=device)
    rows, keys = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, 2, dtype=torch.int32, device=device)
    gumbel_argmax(
        torch.zeros(1, 16, device=device),
        rows,
        temperature=one,
        top_k=one.long(),
        top_p=one.double(),
        log_min_p=-one,
        keys=keys,
    )
