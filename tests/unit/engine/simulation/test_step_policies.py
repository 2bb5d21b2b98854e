"""The step policies that continuous batching is compared with."""

import pytest
from quire_engine.config import EngineConfig
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import SchedulerOutput
from quire_engine.llm.offline_engine import engine_config
from quire_engine.simulation.step_policies import STEP_POLICIES, Batching
from quire_proto.cli import read_settings
from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams

from tests.support.steps import all_drawn


class Bench:
    """A scheduler that is stepped by hand; every token drawn is 9."""

    def __init__(self, batching: Batching) -> None:
        limits = SchedulerConfig(max_model_len=4000, max_num_seqs=4, max_num_batched_tokens=8)
        memory = KVCacheManager(KVCacheConfig(4, 1000, 0))
        self.scheduler = Scheduler(limits, memory, step_policy=STEP_POLICIES[batching])
        self.order: list[str] = []

    def add(self, request_id: str, prompt: int, max_tokens: int = 1) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(request_id, [len(self.order) + 1] * prompt, params))

    def step(self) -> SchedulerOutput:
        scheduler_output = self.scheduler.schedule()
        self.order += [name for name in self.scheduler.request_ids() if name not in self.order]
        self.scheduler.update_from_output(scheduler_output, all_drawn(scheduler_output, 9))
        return scheduler_output


def test_a_static_batch_stays_closed_until_its_last_sequence_has_ended() -> None:
    bench = Bench("static")
    for index, length in enumerate((3, 9, 2, 1)):
        bench.add(str(index), 6, max_tokens=length)
    bench.step()
    bench.add("late", 1)
    seen = [len(bench.scheduler.running)]
    assert seen == [4], "a batch is all that wait and fit, not what a step can compute"
    while "late" not in bench.order:
        bench.step()
        seen.append(len(bench.scheduler.running))
        assert len(seen) < 100
    assert bench.order[-1] == "late"
    assert seen[-2] == 0, "admitted while the batch was running"


def test_in_a_phased_batch_prompts_go_first_and_nothing_decodes_beside_them() -> None:
    bench = Bench("phased")
    bench.add("0", 6, max_tokens=9)
    bench.step()
    bench.add("1", 20, max_tokens=9)
    lengths = [[chunk.length for chunk in bench.step().chunks] for _ in range(5)]
    assert lengths == [[8], [8], [4], [1, 1], [1, 1]]


def test_an_engine_that_is_to_have_another_policy_says_where_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    where = "engines batch continuously; static and phased batching are in quire-engine simulate, to compare with"
    with pytest.raises(SystemExit) as end:
        read_settings(EngineConfig, ["--model", "m", "--batching", "static"])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: unknown option --batching\ntip: {where}\n"
    with pytest.raises(QuireError, match=f"^LLM has no setting named batching: {where}.$"):
        engine_config("m", {"batching": "phased"})
