"""An executor over paged memory of tokens instead of tensors: it notices any block that does not hold what it should.

Each slot remembers the whole prefix up to its token (as a running hash), the group of layers and the adapter, so that
reading a block which was overwritten, never computed, given up, or copied to the wrong place is found at once. The next
token is a pure function of the prefix and the seed, so the right output of any request is known without running a
scheduler.
"""

from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import accumulate

import numpy as np
import torch
from quire_engine.attention.state_cache import StateCache, StateChunks
from quire_engine.core.beam_search import BeamSearch, Hypothesis
from quire_engine.core.block_pool import (
    BlockCopies,
    BlockCopy,
    KVCacheConfig,
    PoolCopies,
    StateCacheConfig,
    Transfer,
)
from quire_engine.core.executor import Rates
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferOutcome, TransferResult
from quire_engine.core.step import BeamCandidates, ModelOutput, SampleRequest, SchedulerOutput
from quire_proto.sampling import SamplingParams, TokenLogprobs

from tests.support.steps import KnownChunk, PlainRows, prompt_targets

VOCAB_SIZE = 50
DIGEST_BYTES = 8


def digest(previous: bytes, token_id: int) -> bytes:
    return blake2b(previous + token_id.to_bytes(4, "little"), digest_size=DIGEST_BYTES).digest()


def prefix_digests(token_ids: list[int]) -> list[bytes]:
    digests = [b""]
    for token_id in token_ids:
        digests.append(digest(digests[-1], token_id))
    return digests[1:]


def next_token(prefix: bytes, seed: int, barred: Iterable[int] = ()) -> int:
    """The first token, from a random one on, that is not barred."""
    first = int.from_bytes(blake2b(prefix + seed.to_bytes(8, "little")).digest()[:4], "little")
    return next(id % VOCAB_SIZE for id in range(first, first + VOCAB_SIZE) if id % VOCAB_SIZE not in barred)


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


def logprob(prefix: bytes, token_id: int) -> float:
    """How probable a token is after a prefix, in thousandths, so that few are equal."""
    return -(int.from_bytes(blake2b(prefix + token_id.to_bytes(4, "little")).digest()[:3], "little") % 9973) / 1000


def candidates(prefix: bytes, count: int) -> BeamCandidates:
    best = sorted(range(VOCAB_SIZE), key=lambda token_id: (-logprob(prefix, token_id), token_id))[:count]
    return BeamCandidates(best, [logprob(prefix, token_id) for token_id in best])


def expected_beams(prompt: list[int], params: SamplingParams, stops: frozenset[int]) -> list[Hypothesis]:
    """What a beam search must find, whatever else runs."""
    search = BeamSearch(params, stops)
    outputs: list[list[int]] = [[]]
    for _ in range(params.max_tokens):
        prefixes = [prefix_digests(prompt + output)[-1] for output in outputs]
        rows = [candidates(prefix, search.num_candidates) for prefix in prefixes]
        going_on = search.advance(list(zip(outputs, rows, strict=True)))
        if not going_on:
            return search.finished[: params.n]
        outputs = [[*outputs[each.parent], each.token_id] for each in going_on]
    raise AssertionError("the search did not end")


class PagedExecutor:
    depth = 1
    rates = Rates(tokens_per_second=1e3, bytes_per_second=1e6)

    def __init__(self, capacity: KVCacheConfig) -> None:
        self.kv_cache_config = capacity
        self.parents: dict[bytes, bytes] = {}
        self.rows = PlainRows()
        self.given: list[KnownChunk] = []
        size = capacity.block_size
        self.device: list[list[bytes]] = [[b""] * size for _ in range(capacity.device_blocks)]
        self.host: list[list[bytes]] = [[b""] * size for _ in range(capacity.host_blocks)]
        self.disk = PagedDisk(self.host)
        self.states = None if capacity.states is None else PagedStates(capacity.states)
        self.fails: Callable[[], bool] = lambda: False  # asked for each step of several sequences

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        self.take_rows(scheduler_output)
        self.copy(scheduler_output)
        model_output, draw = ModelOutput([0] * scheduler_output.total_num_draws), 0
        prefixes = [self.compute(number, chunk, model_output) for number, chunk in enumerate(self.given)]
        if self.states is not None and self.given:
            self.states.compute(self.given)
        if len(self.given) > 1 and self.fails():
            raise RuntimeError("a step has failed")
        for chunk, prefix in zip(self.given, prefixes, strict=True):
            for request, known, behind in self.draws_of(chunk, list(chunk.known)[: chunk.end], prefix):
                self.draw(request, known, behind, draw, model_output)
                draw += 1
        self.copy_ahead(scheduler_output)
        self.append_drawn(scheduler_output, model_output)
        return model_output

    def take_rows(self, scheduler_output: SchedulerOutput) -> None:
        """Brings the rows up to date; ``given`` is then what the step computes."""
        self.rows.update(scheduler_output)
        self.given = [self.rows.known(chunk) for chunk in scheduler_output.chunks]

    def append_drawn(self, scheduler_output: SchedulerOutput, model_output: ModelOutput) -> None:
        draw = 0
        for chunk in scheduler_output.chunks:
            if chunk.num_draws and not chunk.draft_token_ids:
                self.rows.append_drawn(chunk.row, chunk.end, model_output.token_ids[draw])
            draw += chunk.num_draws

    def take_transfers(self, timeout: float) -> list[TransferResult]:
        return self.disk.take(timeout)

    def close(self) -> None:
        pass

    def copy(self, scheduler_output: SchedulerOutput) -> None:
        _copy(scheduler_output.copies.blocks_to_swap_out, self.device, self.host)
        _copy(scheduler_output.copies.blocks_to_copy, self.device, self.device)
        _copy(scheduler_output.copies.blocks_to_swap_in, self.host, self.device)
        if self.states is not None and scheduler_output.copies.states is not None:
            self.states.copy(scheduler_output.copies.states)

    def copy_ahead(self, scheduler_output: SchedulerOutput) -> None:
        """As late as that may be: behind the forward pass."""
        _copy(scheduler_output.copies.blocks_to_swap_ahead, self.device, self.host)
        self.disk.submit(scheduler_output.copies)

    def compute(self, number: int, chunk: KnownChunk, model_output: ModelOutput) -> bytes:
        """Fills the slots of the step's chunk ``number``; returns the prefix that ends in it."""
        adapter = b"" if chunk.lora is None else chunk.lora.lora_name.encode()
        tables = self._tables(chunk)
        (prefix,) = {self._read(table, number, chunk.start, adapter) for number, table in enumerate(tables)} - {None}
        for position, token_id in enumerate(chunk.token_ids, chunk.start):
            parent, prefix = prefix, digest(prefix, token_id)
            self.parents[prefix] = parent
            for group, table in enumerate(tables):
                self._write(table, position, prefix + bytes((group,)) + adapter)
        if targets := prompt_targets(chunk):
            pairs = zip(targets, range(chunk.start, chunk.end), strict=False)
            told = [TokenLogprobs(float(position + 1), ((token_id, 0.0),)) for token_id, position in pairs]
            model_output.prompt_logprobs[number] = told
        return prefix

    def draws_of(
        self, chunk: KnownChunk, known: list[int], last: bytes
    ) -> list[tuple[SampleRequest, list[int], bytes]]:
        """Each draw of a chunk: how, the tokens before it, of all that are ``known`` with the drafts, and the prefix
        that was computed of them; ``last`` is that of the whole chunk.
        """
        if not chunk.num_draft_tokens:
            return [(request, known, last) for request in chunk.sample_requests[: chunk.draws]]
        behind = [last]
        for _ in range(chunk.num_draft_tokens):
            behind.append(self.parents[behind[-1]])
        return [
            (chunk.sample_requests[0], known[: len(known) - number], prefix) for number, prefix in enumerate(behind)
        ][::-1]

    def spoil(self, chunk: KnownChunk) -> None:
        """Leaves in the chunk's slots what no token is."""
        for table in self._tables(chunk):
            for position in range(chunk.start, chunk.end):
                self._write(table, position, b"spoilt")

    def draw(
        self, request: SampleRequest, token_ids: list[int], prefix: bytes, number: int, model_output: ModelOutput
    ) -> None:
        """The step's draw ``number``, from the sequence's tokens, and the prefix that was computed of them."""
        assert prefix_digests(token_ids)[-1] == prefix, "the draw is not of what was computed"
        if request.num_candidates:
            model_output.candidates[number] = candidates(prefix, request.num_candidates)
            return
        is_early = len(token_ids) - request.num_prompt_tokens < request.params.min_tokens
        token_id = next_token(prefix, request.seed, request.stop_token_ids if is_early else ())
        model_output.token_ids[number] = token_id
        if request.params.wants_logprobs:
            model_output.logprobs[number] = TokenLogprobs(logprob(prefix, token_id))

    def _tables(self, chunk: KnownChunk) -> list[list[int]]:
        assert len(chunk.tables) == self.kv_cache_config.num_tables, "not every group of layers has a table"
        tables = chunk.tables[: len(self.kv_cache_config.groups)]
        assert len({len(table) for table in tables}) == 1, "the groups' tables differ in length"
        return tables

    def _read(self, block_ids: list[int], number: int, length: int, adapter: bytes) -> bytes | None:
        """The prefix of ``length`` tokens, after every slot of it that the group sees was held against the tokens that
        led there. None if it sees none of them.
        """
        size, window = self.kv_cache_config.block_size, self.kv_cache_config.groups[number].window
        first = 0 if window is None else max(0, length + 1 - window)
        previous: bytes | None = None if first else b""
        for position in range(first, length):
            block_id = block_ids[position // size]
            assert block_id != 0, f"token {position} was given up, and is read"
            slot = self.device[block_id][position % size]
            parent = self.parents.get(slot[:DIGEST_BYTES])
            is_right = parent is not None if previous is None else parent == previous
            assert is_right, f"token {position} is not what was computed there"
            assert slot[DIGEST_BYTES:] == bytes((number,)) + adapter, (
                f"token {position} is another group's or adapter's"
            )
            previous = slot[:DIGEST_BYTES]
        return previous

    def _write(self, block_ids: list[int], position: int, prefix: bytes) -> None:
        size = self.kv_cache_config.block_size
        block_id = block_ids[position // size]
        assert block_id != 0, "the null page was written"
        self.device[block_id][position % size] = prefix


class PagedStates:
    """States in the rows of a ``StateCache``: each is the digest of the tokens before it. ``contents`` are by row."""

    def __init__(self, capacity: StateCacheConfig) -> None:
        rows = torch.zeros(capacity.device_blocks + capacity.max_num_seqs, 1)
        host_rows = torch.zeros(capacity.host_blocks, 1)
        self.cache = StateCache(rows, host_rows, capacity.device_blocks, capacity.block_size)
        self.contents = [b"none"] * len(rows)
        self.host = [b"none"] * len(host_rows)

    def copy(self, copies: PoolCopies) -> None:
        for rows_of, each, source, target in (
            (self.cache.copy_to_host, copies.blocks_to_swap_out, self.contents, self.host),
            (self.cache.copy_within, copies.blocks_to_copy, self.contents, self.contents),
            (self.cache.copy_from_host, copies.blocks_to_swap_in, self.host, self.contents),
        ):
            for copy in each:
                from_row, to_row = rows_of(copy.source, copy.target)
                target[to_row] = source[from_row]

    def compute(self, chunks: list[KnownChunk]) -> None:
        """Computes the states after the chunks from those before, which must be those of the tokens there."""
        size = self.cache.block_size
        tables = [chunk.tables[-1][max(0, chunk.start - 1) // size : -(-chunk.end // size)] for chunk in chunks]
        runs, written = self.cache.begin_step(
            StateChunks(
                starts=np.array([chunk.start for chunk in chunks]),
                query_indptr=np.array([0, *accumulate(len(chunk.token_ids) for chunk in chunks)]),
                blocks=np.array([block for table in tables for block in table]),
                indptr=np.array([0, *accumulate(map(len, tables))]),
            )
        )
        assert 0 not in written.blocks, "the null state was written"
        known = [[b"", *prefix_digests(list(chunk.known)[: chunk.end])] for chunk in chunks]
        parents = [each for chunk, digests in zip(chunks, known, strict=True) for each in digests[chunk.start : -1]]
        prefixes = [each for chunk, digests in zip(chunks, known, strict=True) for each in digests[chunk.start + 1 :]]
        for run in runs:
            tokens = range(len(parents))[run.tokens] if isinstance(run.tokens, slice) else run.tokens.tolist()
            read = [None] * len(run.write) if run.read is None else run.read.tolist()
            before = [b"" if row is None else self.contents[row] for row in read]
            assert before == [parents[token] for token in tokens[:: run.length]], "a chunk begins with another state"
            for row, token in zip(run.write.tolist(), tokens[run.length - 1 :: run.length], strict=True):
                self.contents[row] = prefixes[token]
        self.cache.end_step(written)


class PagedDisk:
    """The disk behind ``host``. Transfers end in any order and as late as ``num_ending`` says, which is given how many
    are under way and is asked again in each round; then what a block holds is read, or written. ``outcome`` is asked
    for each.
    """

    def __init__(self, host: list[list[bytes]]) -> None:
        self.host = host
        self.slots: dict[int, tuple[bytes, list[bytes]]] = {}
        self.under_way: list[Transfer] = []
        self.num_ending: Callable[[int], int] = lambda count: count
        self.outcome: Callable[[bool], TransferOutcome] = lambda is_load: TransferOutcome.DONE
        self.num_loaded = 0

    def contents(self, num_blocks: int) -> DiskContents:
        """As an engine finds it that starts."""
        self.under_way.clear()
        return DiskContents(num_blocks, [(slot, block_hash) for slot, (block_hash, _) in self.slots.items()])

    def submit(self, copies: BlockCopies) -> None:
        self.under_way += copies.transfers

    def take(self, timeout: float) -> list[TransferResult]:
        count = max(self.num_ending(len(self.under_way)), int(timeout > 0))
        ending, self.under_way = self.under_way[-count:] if count else [], self.under_way[: len(self.under_way) - count]
        return [TransferResult(transfer.transfer_id, self._end(transfer)) for transfer in ending]

    def _end(self, transfer: Transfer) -> TransferOutcome:
        outcome = self.outcome(transfer.is_load)
        if not transfer.is_load:
            contents = list(self.host[transfer.host_block])
            self.slots[transfer.tier_block] = (transfer.block_hash, contents if outcome is TransferOutcome.DONE else [])
            return outcome
        block_hash, contents = self.slots[transfer.tier_block]
        assert block_hash == transfer.block_hash, "a slot was written over while it is loaded from"
        is_damaged = outcome is not TransferOutcome.DONE
        self.host[transfer.host_block][:] = [b"damaged"] * len(contents) if is_damaged else contents
        self.num_loaded += not is_damaged
        return outcome


def _copy(copies: list[BlockCopy], source: list[list[bytes]], target: list[list[bytes]]) -> None:
    for copy in copies:
        target[copy.target] = list(source[copy.source])
