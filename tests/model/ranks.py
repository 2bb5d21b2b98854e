"""Models of several ranks under test: what they are asked for, and ranks that are stopped, killed or fail alone."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import psutil
import pytest
import torch
from quire_engine.core.step import SampleRequest, SchedulerOutput
from quire_engine.executor import multiproc
from quire_engine.executor.rank_processes import RankError
from quire_engine.executor.rpc import step_to_arrays
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.layers.decoder_stack import DecoderStack
from quire_proto.sampling import SamplingParams

from tests.model.driver import GREEDY
from tests.model.engine import Run, run
from tests.model.models import SmallModels
from tests.support.forked_ranks import running_ranks
from tests.support.processes import eventually
from tests.support.steps import KnownChunk, make_step

OUTPUT_TOKENS = 12
PROMPTS = 6
SECONDS_TO_BE_TOLD = 5.0
# Blocks of both pools, and how the work is cut: victims are computed again, or swapped.
SCHEDULES = {"recompute": (10, 0, 64), "swap": (10, 100, 7)}


def generate(executor: TorchExecutor, models: SmallModels, chunk: int = 64, **how: Any) -> Run:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=3)
    prompts = models.prompts[4 : 4 + PROMPTS]
    return run(executor, prompts, [params] * PROMPTS, chunk=chunk, max_num_seqs=5, **how)


def expected(models: SmallModels, name: str) -> list[list[int]]:
    return models.outputs(name, range(4, 4 + PROMPTS), OUTPUT_TOKENS)


def assert_near(made: Run, alone: Run) -> None:
    """The same tokens, and log-probabilities that sums in another order explain."""
    for mine, theirs in zip(made.choices, alone.choices, strict=True):
        assert mine[0].token_ids == theirs[0].token_ids
        for one, other in zip(mine[0].logprobs, theirs[0].logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def chunk(tokens: list[int], blocks: list[int], id: int = 0) -> KnownChunk:
    return KnownChunk(id, tokens, 0, blocks, (SampleRequest(GREEDY, 0, len(tokens)),))


def assert_only_its_own_request_fails(executor: TorchExecutor) -> None:
    """A step that no rank can run fails, and the next ones are as before."""
    good, bad = chunk([5, 6], [1], id=1), chunk([999], [2], id=2)
    wanted = executor.execute_model(make_step(0, [good])).token_ids
    for _ in range(3):
        with pytest.raises(IndexError):
            executor.execute_model(make_step(1, [good, bad]))
        assert executor.execute_model(make_step(1, [good])).token_ids == wanted


class Watched:
    """An executor of several processes that ``load`` makes, and what was told of a loss. ``others`` are the processes
    but rank 0's, by rank.
    """

    def __init__(self, load: Callable[..., TorchExecutor]) -> None:
        self.told: list[str] = []
        self.executor = load(on_lost=self.told.append)
        self.others = running_ranks()

    def run(self) -> dict[int, int]:
        return self.executor.execute_model(make_step(0, [chunk([5, 6, 7], [1])])).token_ids

    def loss(self) -> str:
        """What is told within the time that it may take."""
        eventually(lambda: self.told, SECONDS_TO_BE_TOLD, "nothing was told")
        with pytest.raises(RankError) as caught:
            self.run()
        assert [str(caught.value)] == self.told
        return self.told[0]

    def close(self) -> None:
        self.executor.close()
        for other in self.others:
            assert_gone(other)

    def check_stopped_and_killed(self, rank: int) -> None:
        """A rank that is stopped is waited for, and one that is killed meanwhile is reported."""
        wanted, other = self.run(), self.others[rank - 1]
        other.suspend()
        made: list[dict[int, int]] = []
        thread, raised = in_background(lambda: made.append(self.run()))
        thread.join(0.5)
        assert thread.is_alive()
        other.resume()
        thread.join(SECONDS_TO_BE_TOLD)
        assert made == [wanted]
        other.suspend()
        thread, raised = in_background(self.run)
        thread.join(0.2)
        other.kill()
        thread.join(SECONDS_TO_BE_TOLD)
        assert [type(error) for error in raised] == [RankError]
        assert self.loss() == str(raised[0])
        assert f"Rank {rank} (process {other.pid}) was killed by SIGKILL" in self.told[0]

    def loss_by_a_wrong_batch(self, patch: pytest.MonkeyPatch) -> str:
        """What is told when the other ranks are sent a step that they refuse."""

        def wrong(output: SchedulerOutput, *others: Any) -> list[Any]:
            new = [replace(each, token_ids=array("i", [1 << 30] * len(each.token_ids))) for each in output.new]
            return step_to_arrays(replace(output, new=new), *others)

        self.run()
        patch.setattr(multiproc, "step_to_arrays", wrong)
        thread, raised = in_background(self.run)
        told = self.loss()
        thread.join(SECONDS_TO_BE_TOLD)
        assert [type(error) for error in raised] == [RankError]
        return told


def assert_gone(process: psutil.Process) -> None:
    """Looks without waiting for it as a parent does: that is for who started it."""
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    eventually(lambda: not process.is_running() or process.status() in ended, SECONDS_TO_BE_TOLD)


def record_split(patch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step that a rank of this process computes in two halves, as long as ``patch`` holds."""
    seen: list[int] = []
    overlapped = DecoderStack._overlapped

    def record(stack: DecoderStack, states: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(len(states))
        return overlapped(stack, states, *others)

    patch.setattr(DecoderStack, "_overlapped", record)
    return seen


def in_background(work: Callable[[], object]) -> tuple[Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def watch() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            raised.append(error)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    return thread, raised
