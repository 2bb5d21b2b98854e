"""How memory is divided between KV blocks and the states of recurrent layers."""

from dataclasses import dataclass

from quire_engine.core.block_pool import StateCacheConfig
from quire_engine.worker.memory import CacheSizes

MIN_CHECKPOINT_TOKENS, MAX_CHECKPOINT_TOKENS = 512, 2048
"""The least and the most tokens between two checkpoints. More of them cost time, because each cuts a prompt. Fewer of
them let later requests share less of a prompt.
"""
MIN_CHECKPOINTS = 4
"""The longest sequence has at least this many checkpoints."""
RUNNING_SHARE = 1 / 2
"""The largest part of the memory that is set aside for the states of running sequences."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """States of ``state_bytes``, with a checkpoint after each ``block_size`` tokens. Keys and values of a token take
    ``token_bytes``. A step has at most ``max_num_batched_tokens`` of at most ``max_num_seqs`` sequences.
    """

    state_bytes: int
    token_bytes: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @classmethod
    def choose(
        cls,
        state_bytes: int,
        kv_block: tuple[int, int],
        max_model_len: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> "StateLayout":
        """Chooses the tokens between two checkpoints: as many as take the memory of a state, within bounds, and a
        multiple of a KV block's. ``kv_block`` is the size of such a block in tokens and in bytes.
        """
        kv_block_size, kv_block_bytes = kv_block
        token_bytes = -(-kv_block_bytes // kv_block_size)
        tokens = min(max(-(-state_bytes // token_bytes), MIN_CHECKPOINT_TOKENS), MAX_CHECKPOINT_TOKENS)
        blocks = min(-(-tokens // kv_block_size), max_model_len // MIN_CHECKPOINTS // kv_block_size)
        return cls(state_bytes, token_bytes, max(1, blocks) * kv_block_size, max_num_seqs, max_num_batched_tokens)

    @property
    def min_bytes(self) -> int:
        """Bytes of the states that a single sequence can run with."""
        return self._num_running(1) * self.state_bytes

    def divide(self, sizes: CacheSizes, min_kv_bytes: int) -> tuple[StateCacheConfig, CacheSizes]:
        """Divides both pools. Returns the states, and the sizes that are left for KV blocks: at least ``min_kv_bytes``
        on the device, if one sequence can run.

        Each running sequence needs the state that a step begins with, the one after it, and one more if it passes a
        checkpoint. If these would take more than ``RUNNING_SHARE``, fewer sequences run at once. Otherwise there are as
        many checkpoints as the KV blocks hold times ``block_size`` tokens; running sequences take of them.
        """
        shared = sizes.kv_cache_bytes - min_kv_bytes
        most = min(int(sizes.kv_cache_bytes * RUNNING_SHARE), shared) // self.state_bytes
        num_seqs = max(1, min(self.max_num_seqs, (most - self._num_running(0)) // 3))
        with_state = self.block_size * self.token_bytes + self.state_bytes
        always = 1 + 2 * num_seqs
        checkpoints = max(0, shared - always * self.state_bytes) // with_state
        rows = max(self._num_running(num_seqs), always + checkpoints)
        swapped = sizes.swap_bytes // with_state
        swapped = max(swapped, min(num_seqs, sizes.swap_bytes // 2 // self.state_bytes))
        config = StateCacheConfig(self.block_size, rows - num_seqs, swapped, self.state_bytes, num_seqs)
        left = CacheSizes(sizes.kv_cache_bytes - rows * self.state_bytes, sizes.swap_bytes - swapped * self.state_bytes)
        return config, left

    def _num_running(self, num_seqs: int) -> int:
        """Returns the states that ``num_seqs`` running sequences need at most: a null state, 3 for each, and one for
        each checkpoint that a step's tokens pass.
        """
        return 1 + 3 * num_seqs + -(-self.max_num_batched_tokens // self.block_size)
