"""Placing requests with the real index: what is cached where, for whom, and what a placement leaves behind."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire_proto import hashing
from quire_proto.hashing import extra_key
from quire_proto.sampling import SamplingParams
from quire_router.admission.queue import AdmissionQueue
from quire_router.core.generation import GenerationRequest, LoRA, ResponseConsumer
from quire_router.journal.memory import MemoryJournal
from quire_router.placement.engine_table import EngineTable
from quire_router.placement.placer import (
    BLOCKS_HASHED_AT_ONCE,
    MAX_EXPLAINED_ENGINES,
    MAX_ROUTE_HEADER_BYTES,
    PlacementDecision,
    Placer,
    route_attributes,
    route_header,
)
from quire_router.placement.policies import LoRAColumns, PlacementSettings, PolicyName
from quire_router.placement.prefix_index import BlockNamespace, PrefixIndex, Tier
from quire_router.requests.dispatch import Dispatcher
from quire_router.requests.state import RequestState

from tests.support.byte_tokenizer import TOKENIZER
from tests.support.hashes import hash_blocks
from tests.support.placement import PACE

ONE = BlockNamespace("one", 16)
PROMPT = array("i", range(160))


class Stage:
    """A placer for so many engines, all in one namespace unless said otherwise."""

    def __init__(self, engines: int, **placement: object) -> None:
        self.now = 0.0
        self.table = EngineTable()
        self.index = PrefixIndex()
        self.rows = [self.table.add(f"engine-{number}") for number in range(engines)]
        for row in self.rows:
            self.table.set_step_times(row, PACE)
        self.namespaces = [ONE] * len(self.table)
        self.placer = Placer(
            self.table,
            self.index,
            PlacementSettings(**placement),  # type: ignore[arg-type]
            lambda row: self.namespaces[row],
            lambda: self.now,
        )

    def caches(self, row: int, blocks: int, tier: Tier = Tier.DEVICE, salt: bytes = b"") -> None:
        """The engine tells of the first blocks of ``PROMPT``."""
        namespace = self.namespaces[row]
        names = hash_blocks(PROMPT, namespace.block_size, extra_key(namespace.model_revision, salt))
        self.index.store(row, tier, names[:blocks])

    def place(
        self, *, rows: Sequence[int] | None = None, explained: bool = False, **request: object
    ) -> PlacementDecision:
        decision = self.placer.place(generation(**request), self.rows if rows is None else rows, explained=explained)
        assert decision is not None
        return decision

    def routing(self) -> Dispatcher:
        """What asks the placer while an event loop runs, where engines always have room."""
        rows = np.array(self.rows, np.intp)
        rows.flags.writeable = False
        fleet = SimpleNamespace(
            table=self.table, rows=lambda *_: rows, has_capacity=lambda _: True, has_spare_capacity=lambda _: True
        )
        queue = AdmissionQueue(["m"], fleet)  # type: ignore[arg-type]
        return Dispatcher(fleet, self.placer, queue, policy="cost", hold_timeout=10)  # type: ignore[arg-type]


def progress_of(request: GenerationRequest) -> RequestState:
    journal = MemoryJournal()
    return RequestState(request, TOKENIZER, journal, journal.open(request), ResponseConsumer())


def generation(**request: object) -> GenerationRequest:
    fields = {"request_id": "r", "model": "m", "prompt_token_ids": PROMPT, "params": SamplingParams(), **request}
    return GenerationRequest(**fields)  # type: ignore[arg-type]


def test_without_engines_there_is_no_decision() -> None:
    assert Stage(2).placer.place(generation(), []) is None


def test_a_request_goes_where_its_prompt_is_cached() -> None:
    stage = Stage(4)
    stage.caches(2, 6)
    decision = stage.place()
    assert (decision.engine_id, decision.row, decision.policy, decision.cached_tokens) == ("engine-2", 2, "cost", 96)


def test_an_ineligible_engine_does_not_get_the_request() -> None:
    stage = Stage(4)
    stage.caches(2, 6)
    decision = stage.place(rows=[0, 3])
    assert decision.row in (0, 3)
    assert decision.cached_tokens == 0


def test_a_full_hit_leaves_a_token_to_compute_and_no_less_than_nothing_to_copy() -> None:
    stage = Stage(1)
    stage.table.set_step_times(0, replace(PACE, host_block_seconds=100))
    stage.caches(0, 10)
    decision = stage.place(explained=True)
    assert decision.cached_tokens == 159
    assert decision.scores[0][1]["prefill"] > 0


def test_the_host_tier_counts_after_the_device() -> None:
    stage = Stage(2)
    stage.caches(0, 4)
    stage.caches(0, 9, Tier.HOST)
    stage.caches(1, 4)
    decision = stage.place()
    assert (decision.row, decision.cached_tokens) == (0, 144)


def test_a_prompt_shorter_than_a_block_is_placed() -> None:
    assert Stage(1).place(prompt_token_ids=array("i", [5])).cached_tokens == 0


@given(mine=st.binary(max_size=32), theirs=st.binary(max_size=32))
@settings(deadline=None, max_examples=25)
def test_what_is_cached_under_another_salt_is_never_found(mine: bytes, theirs: bytes) -> None:
    stage = Stage(2)
    stage.caches(0, 10, salt=theirs)
    found = stage.place(cache_salt=mine, rows=[0]).cached_tokens
    assert found == (159 if mine == theirs else 0)


def test_another_tenants_cache_changes_nothing_of_a_decision() -> None:
    warm, cold = Stage(3), Stage(3)
    warm.caches(1, 10, salt=b"another")
    one, other = (stage.place(cache_salt=b"mine", explained=True) for stage in (warm, cold))
    assert (one.row, one.cached_tokens, one.scores) == (other.row, other.cached_tokens, other.scores)


@pytest.mark.parametrize(("blocks", "row", "cached_tokens"), [(2, 1, 96), (8, 0, 128)])
def test_engines_with_another_block_hashing_are_looked_up_by_their_hashes(
    blocks: int, row: int, cached_tokens: int
) -> None:
    stage = Stage(3)
    stage.namespaces[1] = BlockNamespace("two", 32)
    stage.caches(0, blocks)
    stage.caches(1, 3)
    decision = stage.place()
    assert (decision.row, decision.cached_tokens) == (row, cached_tokens)
    names = stage.namespaces[row]
    assert list(decision.block_hashes) == hash_blocks(PROMPT, names.block_size, extra_key(names.model_revision))


def test_read_only_rows_are_grouped_once() -> None:
    stage = Stage(3)
    asked: list[int] = []
    placer = Placer(stage.table, stage.index, PlacementSettings(), lambda row: asked.append(row) or ONE, lambda: 0.0)
    rows = np.array(stage.rows, np.intp)
    rows.flags.writeable = False
    for number in range(5):
        placer.place(generation(request_id=f"r{number}"), rows)
    assert sorted(asked[:3]) == [0, 1, 2]
    assert len(asked) == 3 + 5  # and the chosen one's each time
    assert placer.place(generation(), rows[1:]) is not None


# What follows from a placement


def test_blocks_of_a_dispatched_prompt_are_expected_there_at_once() -> None:
    stage = Stage(5)
    first = stage.place(request_id="first")
    assert stage.place(request_id="other").cached_tokens == 0
    stage.placer.record_dispatch(first, generation(request_id="first"))
    second = stage.place(request_id="second")
    assert (second.row, second.cached_tokens) == (first.row, 159)


def test_blocks_that_are_new_to_the_chosen_engine_are_published() -> None:
    stage = Stage(3)
    names = list(ONE.hashes(PROMPT))
    stage.index.store(1, Tier.DEVICE, names[:4])
    published: list[tuple[str, list[bytes]]] = []
    stage.placer.on_speculative_blocks = lambda engine_id, new: published.append((engine_id, list(new)))
    for _ in range(2):
        decision = stage.placer.place(generation(), stage.rows)
        assert decision is not None
        stage.placer.record_dispatch(decision, generation())
    assert published == [
        ("engine-1", names[4:]),
        ("engine-1", names[9:]),
    ]  # a block with the last token is computed again


def test_a_session_goes_back_to_its_engine() -> None:
    stage = Stage(8)
    for name in ("a", "b", "c", "d"):
        first = stage.place(request_id=name, session=name)
        stage.placer.record_dispatch(first, generation(session=name, prompt_token_ids=array("i", [1])))
        again = stage.place(request_id=f"{name} again", session=name, prompt_token_ids=array("i", [9] * 40))
        assert again.row == first.row


def test_a_session_of_another_tenant_is_another_session() -> None:
    stage = Stage(8)
    for number in range(8):
        decision = stage.place(rows=[3])
        stage.placer.record_dispatch(decision, generation(session="s", tenant="a", prompt_token_ids=array("i", [1])))
        other = stage.place(request_id=f"r{number}", session="s", tenant="b", explained=True)
        assert {terms["session"] for _, terms in other.scores} == {0}
        same = stage.place(request_id=f"r{number}", session="s", tenant="a", explained=True)
        assert {terms["session"] for _, terms in same.scores} == {0, 0.5}


def test_a_session_whose_engine_has_left_goes_anywhere() -> None:
    stage = Stage(2)
    stage.placer.record_dispatch(stage.place(rows=[1]), generation(session="s", prompt_token_ids=array("i", [1])))
    stage.table.remove("engine-1")
    assert stage.table.add("newcomer") == 1
    decision = stage.place(session="s", explained=True)
    assert {terms["session"] for _, terms in decision.scores} == {0}
    assert decision.left == "engine-1"
    assert "; left=engine-1," in route_header(decision)
    stage.placer.record_dispatch(decision, generation(session="s", prompt_token_ids=array("i", [1])))
    assert stage.place(session="s").left == ""


def test_a_session_whose_engine_can_run_nothing_now_says_so() -> None:
    stage = Stage(3)
    stage.placer.record_dispatch(stage.place(rows=[1]), generation(session="s", prompt_token_ids=array("i", [1])))
    assert stage.place(session="s", rows=[0, 2]).left == "engine-1"
    assert stage.place(session="s", rows=[0, 1]).left == ""
    assert stage.place(rows=[0, 2]).left == ""


def test_the_number_of_sessions_is_bounded() -> None:
    stage = Stage(2, max_sessions=2, session_seconds=9.0)
    for name in ("a", "b", "c"):
        stage.placer.record_dispatch(stage.place(rows=[1]), generation(session=name, prompt_token_ids=array("i", [1])))
    homes = {name: stage.place(session=name, rows=[0, 1], explained=True).scores for name in ("a", "b", "c")}
    assert {name: max(term["session"] for _, term in terms) for name, terms in homes.items()} == {
        "a": 0, "b": 9, "c": 9,
    }  # fmt: skip


def test_the_queue_that_requests_find_makes_computing_dearer() -> None:
    stage = Stage(2)
    stage.caches(0, 9)
    stage.table.pending_tokens[0] = 800
    assert stage.place(request_id="quiet").row == 1
    stage.table.requests[:2] = 500
    for number in range(100):
        stage.place(request_id=str(number))
    assert stage.place(request_id="busy").row == 0


# Explanation


def test_an_explanation_has_each_terms_cost_for_the_best_engines() -> None:
    stage = Stage(9)
    stage.caches(4, 5)
    stage.table.pending_tokens[:9] = range(0, 900, 100)
    decision = stage.place(explained=True)
    totals = [sum(terms.values()) for _, terms in decision.scores]
    assert len(totals) == MAX_EXPLAINED_ENGINES
    assert totals == sorted(totals)
    assert decision.scores[0][0] == decision.engine_id
    assert set(decision.scores[0][1]) == {
        "waiting", "prefill", "neighbours", "memory", "lora", "others", "affinity", "session",
    }  # fmt: skip


def test_the_chosen_engine_is_explained_also_when_others_cost_less() -> None:
    stage = Stage(9, policy="round_robin")
    stage.table.pending_tokens[0] = 1e6
    decision = stage.place(explained=True)
    assert decision.engine_id == "engine-0"
    assert len(decision.scores) == MAX_EXPLAINED_ENGINES
    assert decision.scores[-1][0] == "engine-0"


def test_a_decision_is_explained_only_on_request() -> None:
    assert Stage(3).place().scores == ()


def test_the_header_reads_well() -> None:
    terms = [("a:9000", {"waiting": 0.25, "memory": 0.0}), ("b:9000", {"waiting": 0.0, "memory": 0.0})]
    header = route_header(PlacementDecision("a:9000", 0, "cost", 96, terms))
    assert header == "a:9000; policy=cost; cached=96, a:9000: waiting=0.25, b:9000: 0"


@given(
    st.text(max_size=3000),
    st.lists(st.tuples(st.text(max_size=300), st.dictionaries(st.sampled_from("abc"), st.floats())), max_size=9),
)
@example("é" * 3000, [])
@example("a", [("engine-" * 20, {"waiting": 1.0})] * 9)
@settings(deadline=None, max_examples=30)
def test_the_header_is_ascii_and_bounded(engine_id: str, terms: list[tuple[str, dict[str, float]]]) -> None:
    header = route_header(PlacementDecision(engine_id, 0, "cost", 10**9, terms))
    assert len(header) <= MAX_ROUTE_HEADER_BYTES
    assert header.isascii()
    assert header.isprintable()


def test_the_spans_attributes_are_one_for_each_engine() -> None:
    decision = Stage(3).place(explained=True)
    attributes = route_attributes(decision)
    assert list(attributes) == ["quire.route.1", "quire.route.2", "quire.route.3"]
    assert attributes["quire.route.1"].startswith(f"{decision.engine_id} {{")


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_every_policy_can_be_named_and_places(policy: str) -> None:
    decision = Stage(3, policy=policy).place(explained=True)
    assert decision.policy == policy
    assert decision.engine_id in [engine_id for engine_id, _ in decision.scores]


@pytest.mark.parametrize("cached", [0, 1, 5_000, 8_192])
async def test_however_much_of_a_long_prompt_is_cached_its_blocks_are_named_a_few_at_a_time(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, prompt, named, most = Stage(3), array("i", range(131_072)), 0, 0
    stage.index.store(1, Tier.DEVICE, hash_blocks(prompt, 16, extra_key("one", b""))[:cached])

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal named, most
        named += 1
        most = max(most, named)
        return blake2b(*arguments, **more)

    async def others() -> None:
        nonlocal named
        while True:
            named = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(hashing, "blake2b", counted)
    running = asyncio.create_task(others())
    decision = await stage.routing().first(progress_of(generation(prompt_token_ids=prompt)))
    running.cancel()
    assert decision is not None
    assert decision.cached_tokens == min(16 * cached, len(prompt) - 1)
    assert 1 <= most <= (1 + BLOCKS_HASHED_AT_ONCE if cached else 1)
    at_once = stage.place(prompt_token_ids=prompt)
    assert (decision.row, decision.cached_tokens) == (at_once.row, at_once.cached_tokens)
    assert list(islice(decision.block_hashes, 600)) == list(islice(at_once.block_hashes, 600))


async def test_a_request_that_is_cancelled_while_its_blocks_are_hashed_is_not_placed() -> None:
    stage, prompt = Stage(1), array("i", range(131_072))
    stage.index.store(0, Tier.DEVICE, hash_blocks(prompt, 16, extra_key("one", b"")))
    progress = progress_of(generation(prompt_token_ids=prompt))
    routed = asyncio.create_task(stage.routing().next(progress))
    await asyncio.sleep(0)
    progress.interrupted.set_result(None)
    assert await routed is None
    assert len(list(stage.placer.compute_hashes(progress.generation, stage.rows, progress.block_hashes))) > 1, (
        "names were left"
    )


def test_blocks_of_one_adapter_are_not_those_of_another_or_of_the_model() -> None:
    stage, mine, other = Stage(3), LoRA("x", b"1" * 16), LoRA("x", b"2" * 16)
    names = hash_blocks(PROMPT, 16, extra_key("one", b"", mine.digest))
    stage.index.store(1, Tier.DEVICE, names[:6])
    assert [stage.place(rows=[1], lora=lora).cached_tokens for lora in (mine, other, None)] == [96, 0, 0]


def test_a_request_goes_where_its_adapter_is_in_use_unless_that_costs_more_than_loading_it() -> None:
    stage, lora = Stage(3), LoRA("x", b"1" * 16)
    stage.placer.lora_columns = lambda rows, _: LoRAColumns(rows == 1, rows == 2)
    assert stage.place(lora=lora).row == 1
    assert stage.place(lora=lora, rows=[0, 2]).row == 0, "the other one has no slot for it"
    stage.table.pending_tokens[1] = 10_000
    decision = stage.place(lora=lora, explained=True)
    assert decision.row == 0
    scores = dict(decision.scores)
    assert scores["engine-1"]["lora"] == 0 < scores["engine-0"]["lora"] < scores["engine-2"]["lora"]
    stage.caches(2, 9)
    assert stage.place().row == 2, "a request without an adapter asks for none"
