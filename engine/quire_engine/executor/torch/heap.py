"""What the C library does with memory that is freed.

glibc takes every large block from the system and gives it back when it is freed, so that a step touches fresh pages
for all of its large tensors, one fault each: with a small model, half of the time of a long prompt. Kept in the heap,
the pages of one step serve the next.

What is kept is what the largest step took, which memory profiles count, and about as much again in holes, since a
block fits a hole only with room to spare; where small blocks happen to lie between the large ones it can be three times
as much again, and then grows no further. Hence larger blocks than ``MAX_KEPT_BLOCK`` are still given back.
Little is lost: only large models ask for them, whose products take far longer than the faults.
"""

import contextlib
import ctypes

# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_NEVER = 2**31 - 1
# Bytes of the largest block that is kept. glibc before 2.35 refuses more.
MAX_KEPT_BLOCK = 32 << 20


def tune_malloc() -> bool:
    """Makes malloc keep blocks of up to ``MAX_KEPT_BLOCK`` bytes when they are freed. Returns whether it does.

    Threads that begin later share one arena, as any other is made of pieces of 64 MiB, which are given back when they
    are free. Call it once weights are loaded: what loading took for a moment is given back first. Does
    nothing where the C library has no mallopt.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.malloc_trim(ctypes.c_size_t(0))
        mallopt = library.mallopt
        mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
        return all(
            mallopt(*pair) for pair in ((_MMAP_THRESHOLD, MAX_KEPT_BLOCK), (_TRIM_THRESHOLD, _NEVER), (_ARENA_MAX, 1))
        )
    return False
