"""The command ``quire-engine replay``: runs recorded steps again, on a model or on the simulated executor. It reports
whether they sample the same tokens, and how long they take compared with the recording.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
from quire_proto.cli import read_settings
from quire_proto.terminal import fail

from quire_engine.config import EngineConfig
from quire_engine.core.executor import Executor, ExecutorError
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.core.step_recording import RecordedEngine, RecordedStep, RecordingError, read_steps
from quire_engine.errors import ModelError
from quire_engine.factory import load_executor
from quire_engine.simulation.config import SimulatedEngineConfig
from quire_engine.simulation.simulated_executor import SimulatedExecutor
from quire_engine.simulation.simulator import VirtualClock

USAGE = "usage: quire-engine replay FILE [--model MODEL and other flags of quire-engine | flags of a simulated engine]"


def replay(arguments: Sequence[str]) -> None:
    """Runs the subcommand. Exits with 2 for wrong settings, and with 1 and one sentence for a file or a model that
    cannot be used.
    """
    if arguments[:1] in (["--help"], ["-h"]):
        sys.stdout.write(f"{USAGE}\n\n{__doc__}")
        return
    if not arguments or arguments[0].startswith("-"):
        fail(f"{USAGE}.", status=2)
    path, flags = Path(arguments[0]), arguments[1:]
    try:
        engine, steps = read_steps(path)
        report = _replay_on_model(engine, steps, flags) if _has_model(flags) else _simulate(engine, steps, flags)
    except (RecordingError, ModelError, ExecutorError) as error:
        fail(str(error))
    sys.stdout.write(f"{engine.model}, on {'the model' if _has_model(flags) else 'the simulated executor'}\n{report}\n")


def _has_model(flags: Sequence[str]) -> bool:
    return any(flag == "--model" or flag.startswith("--model=") for flag in flags)


def _simulate(engine: RecordedEngine, steps: Iterator[RecordedStep], flags: Sequence[str]) -> "ReplayReport":
    """Runs the steps on the simulated executor, in virtual time."""
    settings, clock = read_settings(SimulatedEngineConfig, flags), VirtualClock()
    executor = SimulatedExecutor(
        *(engine.capacity, settings.latency),
        seed=settings.seed,
        vocab_size=engine.vocab_size,
        sleep=clock.sleep,
    )
    return run_steps(executor, steps, lambda: clock.seconds, compares=False)


def _replay_on_model(engine: RecordedEngine, steps: Iterator[RecordedStep], flags: Sequence[str]) -> "ReplayReport":
    with closing(_load(engine, flags)) as executor:
        return run_steps(executor, steps)


def _load(engine: RecordedEngine, flags: Sequence[str]) -> Executor:
    """Loads the model, with at least as much KV memory as the recorded engine. Raises ``ModelError``."""
    capacity, config = engine.capacity, read_settings(EngineConfig, flags)
    given = {
        "kv_cache_memory": capacity.device_bytes,
        "swap_space": capacity.host_bytes / (1 << 30),
        "block_size": capacity.block_size,
        "kv_disk_path": None,
    }
    executor = load_executor(config.model_copy(update=given), owns_process=True, nodes=config)
    made = executor.kv_cache_config
    if (made.block_size, len(made.groups)) != (capacity.block_size, len(capacity.groups)):
        executor.close()
        raise ModelError(
            f"The steps are of an engine with blocks of {capacity.block_size} tokens in {len(capacity.groups)} groups "
            f"of layers, and this model has blocks of {made.block_size} in {len(made.groups)}."
        )
    if made.device_blocks < capacity.device_blocks or made.host_blocks < capacity.host_blocks:
        executor.close()
        raise ModelError(
            f"The steps use {capacity.device_blocks} blocks on the device and {capacity.host_blocks} on the host, and "
            f"this engine has {made.device_blocks} and {made.host_blocks}: its dtype may be another one."
        )
    if made.states != capacity.states:
        executor.close()
        raise ModelError(f"The steps use {capacity.states}, and this engine has {made.states}: pass the same limits.")
    return executor


@dataclass(slots=True)
class ReplayReport:
    """The result of a replay. ``with_prompts`` and ``decoding`` have the recorded and the replayed seconds of each
    step, of steps that compute prompts and of other steps. ``num_compared`` sampled tokens were compared, and
    ``num_equal`` of them were the same. ``ended`` says why the replay ended early.
    """

    with_prompts: list[tuple[float, float]] = field(default_factory=list)
    decoding: list[tuple[float, float]] = field(default_factory=list)
    num_tokens: int = 0
    num_compared: int = 0
    num_equal: int = 0
    num_failed: int = 0
    ended: str = ""

    def __str__(self) -> str:
        """Returns the report as a table."""
        both = self.with_prompts + self.decoding
        lines = [f"{len(both):,} steps, {self.num_tokens:,} tokens computed; seconds:"]
        lines.append(f"{'':<22}{'steps':>8}{'recorded':>10}{'p50':>9}{'p99':>9}{'replayed':>11}{'p50':>9}{'p99':>9}")
        for name, seconds in (("with prompts", self.with_prompts), ("decoding alone", self.decoding), ("all", both)):
            if seconds:
                columns = [_sum_and_percentiles([pair[side] for pair in seconds]) for side in (0, 1)]
                lines.append(f"{name:<22}{len(seconds):>8,}{columns[0]} {columns[1]}")
        if self.num_compared:
            lines.append(f"{self.num_equal:,} of {self.num_compared:,} drawn tokens are the recorded ones")
        if self.num_failed:
            lines.append(f"{self.num_failed:,} steps had errors, then or now, and were not compared")
        return "\n".join([*lines, *([self.ended] if self.ended else [])])


def _sum_and_percentiles(seconds: list[float]) -> str:
    p50, p99 = np.percentile(seconds, (50, 99))
    return f"{sum(seconds):>10.2f}{p50:>9.4f}{p99:>9.4f}"


def run_steps(
    executor: Executor,
    steps: Iterator[RecordedStep],
    clock: Callable[[], float] = perf_counter,
    *,
    compares: bool = True,
) -> ReplayReport:
    """Runs all steps in order, on the tokens that ``executor`` samples, even if they differ from the recorded ones.
    With ``compares``, compares the two; turn it off for an executor that makes up tokens. ``clock`` returns seconds.
    Raises ``RecordingError`` and ``ExecutorError``.
    """
    report, rows_with_grammar = ReplayReport(), set[int]()
    for step in steps:
        output = step.scheduler_output
        rows_with_grammar -= {new.row for new in output.new}
        rows_with_grammar |= step.rows_with_grammar
        begun = clock()
        try:
            made = executor.execute_model(output)
        except ExecutorError:
            raise
        except Exception as error:  # noqa: BLE001 - the recorded one may have failed too
            report.ended = f"step {output.step} fails, and those behind it are left out: {error!r}"
            break
        ended = clock()
        has_prompts = any(length > 1 + len(output.drafts.get(i, ())) for i, length in enumerate(output.lengths))
        (report.with_prompts if has_prompts else report.decoding).append((step.seconds, ended - begun))
        report.num_tokens += output.num_tokens
        if compares:
            _compare(report, output, step, made, rows_with_grammar)
    return report


def _compare(
    report: ReplayReport, output: SchedulerOutput, step: RecordedStep, made: ModelOutput, rows_with_grammar: set[int]
) -> None:
    if step.failed or made.has_errors:
        report.num_failed += 1
        return
    draw = 0
    for row, num_draws in zip(output.rows, output.num_draws, strict=True):
        for number in range(draw, draw + num_draws):
            if row not in rows_with_grammar and number not in made.candidates and number not in made.pooled:
                report.num_compared += 1
                report.num_equal += made.token_ids[number] == step.token_ids[number]
        draw += num_draws
