"""The priorities that are more than an order: best effort, as Kubernetes calls what only gets what others leave, and
what goes behind even that.
"""

from typing import Final

BEST_EFFORT: Final = 2**31 - 1
"""The priority of requests that are best effort, as the lines of batches are. Whatever the scheduling policy, an engine
computes nothing of them while the prompt of another request is computed or waits, preempts them first, and for others'
prompts too. The largest that a message can carry, so that an engine which does not know this has them last as well.
"""

SHADOW: Final = BEST_EFFORT + 1
"""That of a request whose answer is compared and thrown away: best effort, and behind all others that are. Too large
for the field of a message, which has BEST_EFFORT then, and beside it ``shadow``.
"""
