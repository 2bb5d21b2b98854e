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
ARGUMENTS = ("--shape", "135m", "--lengths", "sharegpt", "--max-model-len", "384", "--num-prompts", "12")
MEASURED = ("--measure", "throughput", "--rounds", "1", "--warm-up-output-len", "32", "--kv-cache-memory", "536870912")


def main() -> None:
    for n in N:
        result = measure(n, sys.argv[1:])
        print(f"  {result['title']}\n\n  | | output tokens/s | Quire | padding |\n  |---|---|---|---|")
        for name, title in PEERS.items():
            print(f"  | {title} | {' | '.join(cells(result, name))} |", flush=True)
        print()


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


def cells(result: dict[str, Any], name: str) -> tuple[str, str, str]:
    """A system's tokens a second, how many times as many ours makes, and the padding; or why there are none."""
    system = result["systems"][name]
    if system["failure"]:
        return str(system["failure"]), "", ""
    times = result["ratios"].get(name, {}).get("throughput")
    padding = "" if system["padding"] is None else f"{system['padding']:.0%}"
    return f"{system['medians']['throughput']:,.0f}", f"{times:.1f} times" if times else "", padding


if __name__ == "__main__":
    main()
