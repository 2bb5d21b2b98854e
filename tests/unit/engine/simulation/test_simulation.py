"""The simulator: virtual time is right, runs repeat, and the figures are those of what happened."""

from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.config import PreemptionPolicy
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.simulation.config import SimulationConfig
from quire_engine.simulation.report import Percentiles, SimulationReport, make_report, overtakes
from quire_engine.simulation.simulated_executor import LatencyModel
from quire_engine.simulation.simulator import Simulation, SimulationRecorder
from quire_engine.simulation.step_policies import Batching
from quire_engine.simulation.trace import Arrival, read_trace

from tests.support.traces import public_trace, random_rows, write_azure, write_mooncake

SECOND = LatencyModel(
    tokens_per_second=100,
    weights_seconds=1.0,
    context_seconds=0.0,
    pair_seconds=0.0,
    draw_seconds=0.0,
    overhead_seconds=0.0,
    bytes_per_second=1e9,
)
LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100, max_model_len=5000)
ROOMY = KVCacheConfig(block_size=16, device_blocks=1001, host_blocks=0)
TIGHT = KVCacheConfig(block_size=16, device_blocks=301, host_blocks=200, block_bytes=1000)


def arrival(time: float, num_prompt: int, num_output: int, row: int = 0) -> Arrival:
    return Arrival(time, num_prompt, num_output, (row,), num_prompt)


def arrivals(count: int = 120, seed: int = 1, seconds: float = 300.0) -> list[Arrival]:
    return [arrival(*row, index) for index, row in enumerate(random_rows(count, seed, seconds))]


def run(
    requests: list[Arrival],
    limits: SchedulerConfig = LIMITS,
    capacity: KVCacheConfig = ROOMY,
    latency: LatencyModel = SECOND,
    seed: int = 0,
    batching: Batching = "continuous",
) -> SimulationRecorder:
    return Simulation(limits, capacity, latency, seed=seed, batching=batching).run(requests)


def repeatable(report: SimulationReport) -> dict[str, object]:
    """All but the real time that the simulator took."""
    return {name: value for name, value in asdict(report).items() if name != "pace"}


def test_the_times_of_a_request_alone_are_those_of_its_steps() -> None:
    """250 tokens in steps of 100 are three steps; the last draws the first of four tokens."""
    recorder = run([arrival(10.0, 250, 4)])
    life = recorder.requests["0"]
    assert (life.arrived, life.admitted, life.first_token, life.ended) == (10.0, 10.0, 13.0, 16.0)
    assert list(recorder.token_gaps) == [1.0, 1.0, 1.0]
    assert life.num_tokens == 4


def test_a_request_that_arrives_during_a_step_waits_for_its_end_from_its_arrival() -> None:
    lives = run([arrival(0, 10, 3, 0), arrival(0.25, 10, 1, 1), arrival(0.5, 10, 1, 2)]).requests
    assert [life.admitted for life in lives.values()] == [0.0, 1.0, 1.0]
    report = make_report(run([arrival(0, 10, 3, 0), arrival(0.25, 10, 1, 1), arrival(0.5, 10, 1, 2)]))
    assert report.waiting.mean == pytest.approx((0 + 0.75 + 0.5) / 3)
    assert report.ttft.max == pytest.approx(1.75)


def test_idle_time_is_jumped_over() -> None:
    recorder = run([arrival(0, 10, 1), arrival(1e6, 10, 1)])
    assert len(recorder.samples.time) == 2
    assert recorder.requests["1"].ended == 1e6 + 1


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_a_run_repeats_from_its_seed(policy: str) -> None:
    limits, shaken = LIMITS.model_copy(update={"scheduling_policy": policy}), replace(SECOND, jitter=0.3)
    one, again, other = (make_report(run(arrivals(), limits, TIGHT, shaken, seed)) for seed in (1, 1, 2))
    assert repeatable(one) == repeatable(again) != repeatable(other)
    assert one.completed == one.requests == 120


def test_all_tokens_are_counted_and_no_block_is_lost_under_pressure() -> None:
    requests = arrivals()
    recorder = run(requests, capacity=TIGHT)
    report = make_report(recorder)
    assert report.preemptions_by_swap + report.preemptions_by_recompute > 0, "there was no pressure"
    assert report.output_tokens == sum(one.num_output for one in requests)
    assert report.output_tokens_per_second == pytest.approx(report.output_tokens / report.seconds)
    assert report.unreachable_blocks == 0
    memory = recorder.scheduler.kv_cache_manager
    memory.check_integrity()
    assert memory.device_pool.num_free == memory.device_pool.num_blocks


def test_requests_that_cannot_run_are_counted_by_their_error_and_the_others_run() -> None:
    report = make_report(run([arrival(0, 10, 1), arrival(0, 5000, 1), arrival(0, 10, 1), arrival(1, 9, 4999)]))
    assert (report.requests, report.completed, report.errors) == (4, 2, {"INVALID": 2})


def test_equal_prefixes_are_hits(tmp_path: Path) -> None:
    rows = [(index * 3000, 512, 1, [5]) for index in range(10)]
    report = make_report(run(read_trace(write_mooncake(tmp_path / "m.jsonl", rows)), latency=SECOND))
    # A full hit leaves the last block to compute.
    assert report.hit_rate_device + report.hit_rate_host == pytest.approx(9 * (512 - 16) / (10 * 512))


def test_levels_and_waste_are_weighted_with_time() -> None:
    """One request of 17 tokens, then one of 100: for a step of one second and one of three each."""
    limits = LIMITS.model_copy(update={"max_num_seqs": 1})
    latency = replace(SECOND, tokens_per_second=100 / 3)
    recorder = run([arrival(0, 17, 2, 0), arrival(0, 100, 2, 1)], limits, latency=latency)
    assert recorder.samples.duration.tolist() == [1.0, 1.0, 3.0, 1.0]
    # Of two blocks 17 slots have a token, then 18; of seven 100, then 101.
    empty = 15 + 14 + 3 * 12 + 11
    assert recorder.slot_seconds.tokens == 17 + 18 + 3 * 100 + 101
    assert recorder.slot_seconds.reserved + recorder.slot_seconds.internal == empty
    report = make_report(recorder)
    assert report.waste == pytest.approx(empty / (2 * 32 + 4 * 112))
    assert report.slots.external == pytest.approx(1 - (2 * 32 + 4 * 112) / (6 * 16_000))
    assert report.queue.mean == pytest.approx(2 / 6)
    assert report.queue.max == 1


@given(st.permutations(range(12)))
def test_an_overtake_is_a_later_arrival_that_was_admitted_earlier(admissions: list[int]) -> None:
    expected = [sum(other > rank for other in admissions[: admissions.index(rank)]) for rank in admissions]
    assert overtakes(admissions) == expected


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_a_spread_lies_between_least_and_greatest_and_rises(values: list[float]) -> None:
    spread = Percentiles.of(values)
    steps = [min(values, default=0), spread.p50, spread.p90, spread.p99, spread.max]
    assert all(low <= high or low == pytest.approx(high) for low, high in pairwise(steps))
    assert spread.max == max(values, default=0)
    if len(values) % 2:
        assert spread.p50 == sorted(values)[len(values) // 2]
    if values:
        assert spread.mean == pytest.approx(sum(values) / len(values))


def test_no_request_overtakes_another_first_come_first_served(tmp_path: Path) -> None:
    path = write_azure(tmp_path / "a.csv", random_rows(100, 3, 60.0))
    report = make_report(run(read_trace(path), capacity=TIGHT))
    assert report.overtakes.max == 0
    assert report.queue.max > 10


def test_shortest_job_first_waits_less_and_overtakes_no_more_than_it_may() -> None:
    requests = [replace(one, num_output=2) for one in arrivals(300, 2, 1500.0)]
    fcfs = make_report(run(requests))
    sjf = make_report(run(requests, LIMITS.model_copy(update={"scheduling_policy": "sjf", "max_overtakes": 40})))
    assert sjf.waiting.mean < 0.9 * fcfs.waiting.mean
    assert 0 < sjf.overtakes.max <= 40


def test_static_batching_admits_no_request_that_comes_while_a_batch_runs_until_all_of_it_has_ended() -> None:
    def taken_in_late(batching: Batching) -> int:
        lives = run(arrivals(40), batching=batching).requests.values()
        return sum(
            one.admitted < other.arrived and other.admitted < one.ended
            for one in lives
            for other in lives
            if one.admitted is not None and one.ended is not None and other.admitted is not None
        )

    assert taken_in_late("static") == 0 < taken_in_late("continuous")


def test_in_phased_steps_who_decodes_waits_for_prompts() -> None:
    mixed, phased = (make_report(run(arrivals(40), batching=batching)) for batching in ("continuous", "phased"))
    assert phased.itl.max > mixed.itl.max


def in_stages(num_stages: int, requests: list[Arrival]) -> SimulationRecorder:
    return run(requests, LIMITS.model_copy(update={"num_stages": num_stages}))


def test_a_request_alone_is_in_one_stage_of_a_pipeline_at_a_time() -> None:
    """Its prompt is of 60 tokens, which are not divided: a second in all stages together, as every token after it."""
    for num_stages in (1, 2, 4):
        life = in_stages(num_stages, [arrival(0.0, 60, 5)]).requests["0"]
        assert (life.first_token, life.ended) == (pytest.approx(1.0), pytest.approx(5.0))


@pytest.mark.parametrize("num_stages", [2, 4])
def test_prompts_fill_all_stages_but_for_the_first_and_the_last_steps(num_stages: int) -> None:
    """GPipe's bubble: ``m`` steps take as long as ``m + stages - 1`` of one stage."""
    steps, requests = 20, [arrival(0.0, 2000, 1)]
    recorder = in_stages(num_stages, requests)
    assert recorder.requests["0"].ended == pytest.approx((steps + num_stages - 1) / num_stages)


def test_sequences_that_decode_are_shared_among_the_stages() -> None:
    """Of eight in two stages, four are in each: as steps are as long as reading the weights, all have a token every
    second, as in one stage, and neither stage is ever idle.
    """
    requests = [arrival(0.0, 10, 50, row) for row in range(8)]
    recorder = in_stages(2, requests)
    samples = recorder.samples
    seconds = [lasted for lasted, at in zip(samples.duration, samples.time, strict=True) if 5 < at < 40]
    assert len(seconds) > 60
    assert seconds == pytest.approx([0.5] * len(seconds), abs=1e-6), "a step of four ends every half second"
    assert max(life.ended or 0.0 for life in recorder.requests.values()) == pytest.approx(50.0, abs=2.0)


def test_settings_of_the_latency_replace_those_of_the_preset_one_by_one(tmp_path: Path) -> None:
    config = SimulationConfig(trace=tmp_path, preset="cpu", weights_seconds=0.5, jitter=0.1)
    plain = SimulationConfig(trace=tmp_path, preset="cpu")
    assert config.latency == replace(plain.latency, weights_seconds=0.5, jitter=0.1)


def test_pools_are_sized_in_blocks_or_bytes(tmp_path: Path) -> None:
    config = SimulationConfig(trace=tmp_path, kv_cache_memory=1 << 30, swap_space=0.5, block_size=32)
    block_bytes = 32 * 131_072
    assert config.kv_cache_config == KVCacheConfig(
        32, 1 + (1 << 30) // block_bytes, (1 << 29) // block_bytes, block_bytes
    )
    override = SimulationConfig(trace=tmp_path, kv_cache_memory=1 << 30, num_gpu_blocks_override=7)
    assert override.kv_cache_config.device_blocks == 8
    assert override.scheduler_config("fcfs").max_model_len == 7 * 16


def test_less_than_4_percent_of_the_memory_is_wasted_on_azure_lengths() -> None:
    requests = read_trace(public_trace("azure-conv-2023.csv"), limit=600)
    config = SimulationConfig(trace=Path("unused"))
    report = make_report(run(requests, config.scheduler_config("fcfs"), config.kv_cache_config, config.latency))
    assert 0 < report.waste < 0.04
    assert report.unreachable_blocks == 0
    # Half a block a sequence is what paging cannot avoid.
    per_sequence = report.waste * report.kv_usage.mean * config.kv_cache_config.usable_tokens / report.running.mean
    assert 0.3 < per_sequence / 16 < 0.8


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_requests_are_told_from_untouched_ones_and_by_how_long_they_were_away(mode: PreemptionPolicy) -> None:
    limits = LIMITS.model_copy(update={"preemption_mode": mode})
    recorder = run(arrivals(), limits, TIGHT)
    report = make_report(recorder)
    assert (report.preemptions_by_swap > 0, report.preemptions_by_recompute > 0) == (mode == "swap", mode != "swap")
    assert report.preempted.requests + report.untouched.requests == report.completed
    assert report.untouched.away.max == 0
    some = [life for life in recorder.requests.values() if life.was_preempted]
    assert report.preempted.requests == len(some) > 0
    for life in some:
        timings = life.timings
        assert timings is not None
        assert timings.away_seconds <= life.ended - life.admitted
        back = [event.away_seconds for event in timings.events if event.time > life.first_token * 1e9]
        assert life.longest_gap >= max(back, default=0.0)
    gaps = max(life.longest_gap for life in recorder.requests.values())
    assert gaps == pytest.approx(max(recorder.token_gaps))
    assert report.preempted.longest_gap.max == gaps, "nobody waited longer than one that gave way"
