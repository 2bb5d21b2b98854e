"""Placement policies against each other, simulated: `make bench-fleet TRACES=FOLDER`.

On both public traces and on prompts that begin alike, at five loads: ``cost`` is to have a mean TTFT at or below the
best of the other policies, and four routers one within 5 % of that of one. Nothing is set that is not printed; limits
are the simulator's defaults. Takes a quarter of an hour; `--part 0.25 --loads 0.7 1` is a quick look.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from quire_router.simulation.config import FleetSettings
from quire_router.simulation.experiments import make_table, read_jobs, run_all
from quire_router.simulation.report import Report, make_report

LOADS = [0.5, 0.7, 0.9, 1.0, 1.1]
REPLICAS_BAR = 0.05
SHARED_PREFIX = {
    "gsp_num_groups": 128,
    "gsp_prompts_per_group": 12,
    "gsp_system_prompt_len": 4096,
    "gsp_question_len": 256,
    "gsp_output_len": 128,
}


def main() -> None:
    options = parse_options()
    verdicts: list[str] = []
    shared = {"admission": options.admission, "seed": options.seed}
    for name, workload in workloads(options).items():
        verdicts += [compare(name, load, workload | shared) for load in options.loads]
    print("\n" + "\n".join(verdicts))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, help="folder of the two traces")
    parser.add_argument("--part", type=float, default=1.0, help="of the requests")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="utilisations")
    parser.add_argument("--workload", choices=["conversation", "azure", "shared-prefix"], help="only this one")
    parser.add_argument("--admission", action="store_true", help="let requests wait at the router")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def workloads(options: argparse.Namespace) -> Mapping[str, dict[str, Any]]:
    every: dict[str, dict[str, Any]] = {
        "conversation": {"trace": options.traces / "mooncake-conversation.jsonl", "limit": 1000},
        "azure": {"trace": options.traces / "azure-conv-2023.csv", "limit": 2000},
        "shared-prefix": {**SHARED_PREFIX, "limit": 1536},
    }
    return {
        name: {**each, "limit": round(options.part * each["limit"])}
        for name, each in every.items()
        if options.workload in (None, name)
    }


def compare(name: str, load: float, workload: Mapping[str, Any]) -> str:
    """Runs one cell of the comparison; what it comes to in one line."""
    begin = perf_counter()
    reports = run(load, workload)
    four = run(load, {**workload, "replicas": 4, "policies": ["cost"]})["cost"]
    shown = {**reports, "cost, 4 routers": four}
    asked = f"{four.requests} requests within {four.arrival_seconds:.0f} s"
    took = perf_counter() - begin
    print(f"\n{name}, utilisation {load:g}: {asked} (took {took:.0f} s)\n{make_table(shown)}", flush=True)
    return f"{name:<14}{load:>5g}  {judge(reports)}; {judge_replicas(reports['cost'], four)}"


def run(load: float, workload: Mapping[str, Any]) -> dict[str, Report]:
    settings = FleetSettings(utilisation=[load], block_size=256, **workload)
    records = run_all(settings, read_jobs(settings))[load]
    return {policy: make_report(record) for policy, record in records.items()}


def judge(reports: Mapping[str, Report]) -> str:
    cost = reports["cost"].ttft.mean
    best = min((name for name in reports if name != "cost"), key=lambda name: reports[name].ttft.mean)
    ratio = cost / reports[best].ttft.mean
    verdict = "met" if ratio <= 1 else "MISSED"
    return f"{verdict}: cost {cost:.3f} s is {ratio:.3f} of the best other, {best}{rejects(reports, best)}"


def rejects(reports: Mapping[str, Report], best: str) -> str:
    counts = [reports[name].requests - reports[name].completed for name in ("cost", best)]
    return f" (rejects {counts[0]} and {counts[1]})" if any(counts) else ""


def judge_replicas(one: Report, four: Report) -> str:
    ratio = four.ttft.mean / one.ttft.mean
    return f"{'met' if ratio <= 1 + REPLICAS_BAR else 'MISSED'}: four routers {ratio:.3f} of one"


if __name__ == "__main__":
    main()
