"""The engine beside three ways of transformers: one request after the other, static batches and continuous batching.

``.venv/bin/python -m tests.bench.batching`` measures them in turns, with one output for each prompt and with three, on
lengths as in ShareGPT, and prints for each the output tokens a second, how many times as many ours makes, and the part
of what it computes that is padding. Other arguments are those of ``quire-engine bench`` (``--lengths``,
``--num-prompts``, ``--rounds``), and the last of a kind counts.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

N = (1, 3)
PEERS = {
    "quire": "Quire",
    "transformers-serial": "transformers, one by one",
    "transformers": "transformers, static batches",
    "transformers-cb": "transformers, continuous batching",
}
ARGUMENTS = ("--shape", "135m", "--lengths", "sharegpt", "--max-model-len", "512", "--num-prompts", "16")
MEASURED = ("--measure", "throughput", "--rounds", "1", "--warm-up-output-len", "32", "--kv-cache-memory", "536870912")


def main() -> None:
    results = [measure(n, sys.argv[1:]) for n in N]
    for result in results:
        print(f"  {result['title']}")
    print(f"  | {' | '.join(['', *(f'n = {n}: tokens/s, times, padding' for n in N)])} |")
    print("  |" + "---|" * (1 + len(N)))
    for name, title in PEERS.items():
        print(f"  | {' | '.join([title, *(cell(result, name) for result in results)])} |")


def measure(n: int, arguments: list[str]) -> dict[str, Any]:
    """The figures of ``quire-engine bench`` with ``n`` outputs for each prompt."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        peers = ",".join(name for name in PEERS if name != "quire")
        command = [sys.executable, "-m", "quire_engine.cli", "bench", *ARGUMENTS, *MEASURED, "--against", peers]
        command += ["--num-outputs", str(n), "--json", str(path), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(path.read_text())
        return result


def cell(result: dict[str, Any], name: str) -> str:
    """A system's figures, or why it has none."""
    system = result["systems"][name]
    if system["failure"]:
        return str(system["failure"])
    times = result["ratios"].get(name, {}).get("throughput")
    padding = "" if system["padding"] is None else f", {system['padding']:.0%}"
    return f"{system['medians']['throughput']:,.0f}{f', {times:.1f}' if times else ', '}{padding}"


if __name__ == "__main__":
    main()
