"""An executor over paged memory of tokens instead of tensors: it notices any block that does not hold what it should.

Each slot remembers the whole prefix up to its token (as a running hash), so that reading a block which was
overwritten, never computed, or copied to the wrong place is found at once. The next token is a pure function of the
prefix and the seed, so the right output of any request is known without running a scheduler.
"""

from hashlib import blake2b

from quire_engine.kv.capacity import KvCapacity
from quire_engine.scheduling.plan import BlockCopy, StepPlan, StepResult
from quire_engine.scheduling.rates import Rates

VOCAB_SIZE = 50


def digest(previous: bytes, token_id: int) -> bytes:
    return blake2b(previous + token_id.to_bytes(4, "little"), digest_size=8).digest()


def prefix_digests(token_ids: list[int]) -> list[bytes]:
    digests = [b""]
    for token_id in token_ids:
        digests.append(digest(digests[-1], token_id))
    return digests[1:]


def next_token(prefix: bytes, seed: int) -> int:
    return int.from_bytes(blake2b(prefix + seed.to_bytes(8, "little")).digest()[:4], "little") % VOCAB_SIZE


def expected_output(prompt: list[int], seed: int, max_tokens: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """What a request must generate, whatever else runs; a stop token ends it and is not part of it."""
    prefix = prefix_digests(prompt)[-1]
    output: list[int] = []
    while len(output) < max_tokens:
        token_id = next_token(prefix, seed)
        if token_id in stops:
            break
        output.append(token_id)
        prefix = digest(prefix, token_id)
    return output


class PagedExecutor:
    depth = 1
    rates = Rates(tokens_per_second=1e3, bytes_per_second=1e6)

    def __init__(self, capacity: KvCapacity) -> None:
        self.capacity = capacity
        self.parents: dict[bytes, bytes] = {}
        size = capacity.block_size
        self.device: list[list[bytes]] = [[b""] * size for _ in range(capacity.device_blocks)]
        self.host: list[list[bytes]] = [[b""] * size for _ in range(capacity.host_blocks)]

    def run(self, plan: StepPlan) -> StepResult:
        _copy(plan.copies_out, self.device, self.host)
        _copy(plan.copies_within, self.device, self.device)
        _copy(plan.copies_in, self.host, self.device)
        result = StepResult()
        for chunk in plan.chunks:
            prefix = self._read(chunk.block_ids, chunk.start)
            for position, token_id in enumerate(chunk.token_ids, chunk.start):
                parent, prefix = prefix, digest(prefix, token_id)
                self.parents[prefix] = parent
                self._write(chunk.block_ids, position, prefix)
            for draw in chunk.draws:
                result.token_ids[draw.sequence_id] = next_token(prefix, draw.seed)
        return result

    def close(self) -> None:
        pass

    def _read(self, block_ids: list[int], length: int) -> bytes:
        """The prefix of ``length`` tokens, after every slot of it was held against the tokens that led there."""
        size = self.capacity.block_size
        previous = b""
        for position in range(length):
            slot = self.device[block_ids[position // size]][position % size]
            assert self.parents.get(slot) == previous, f"token {position} is not what was computed there"
            previous = slot
        return previous

    def _write(self, block_ids: list[int], position: int, prefix: bytes) -> None:
        size = self.capacity.block_size
        block_id = block_ids[position // size]
        assert block_id != 0, "the null page was written"
        self.device[block_id][position % size] = prefix


def _copy(copies: list[BlockCopy], source: list[list[bytes]], target: list[list[bytes]]) -> None:
    for copy in copies:
        target[copy.target] = list(source[copy.source])
