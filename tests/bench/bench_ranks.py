"""Seconds a step and peak memory of one process and of several, on the CPUs of this machine.

    python tests/bench/bench_ranks.py                                             # built-in policy
    python tests/bench/bench_ranks.py -- --model FOLDER --task sums --max-new-tokens 12 --steps 4

Runs take turns, 1 process, 2 processes, 1, 2, ...; every process has one thread. What stands behind
`--` goes to train.py. The table has medians over steps (but the first) and turns."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--steps", "8", "--eval-every", "0", "--eval-samples", "0", "--eval-prompts", "16"]
METRICS = ["seconds_step", "seconds_sample", "seconds_freeze", "seconds_improve"]
METRICS += ["memory_gb"]  # of the largest process


def run(processes: int, flags: list[str]) -> dict[str, float]:
    """One run of train.py: the median over its steps of each metric."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        command += [str(ROOT / "train.py"), "--runs", folder, "--name", "run", *SMALL, *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][1:]  # the first step warms up
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in METRICS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="for train.py, behind --")
    options = parser.parse_args()
    results = {count: [] for count in options.processes}
    for _ in range(options.turns):
        for count in options.processes:
            results[count].append(run(count, options.flags))
    print("| processes | " + " | ".join(METRICS) + " |")
    print("| --- " * (len(METRICS) + 1) + "|")
    for count, turns in results.items():
        cells = [f"{statistics.median(turn[name] for turn in turns):.3g}" for name in METRICS]
        print(f"| {count} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
