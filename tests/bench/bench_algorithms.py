"""Train with every algorithm and several seeds, a process each, and print a table of the results.

    python tests/bench/bench_algorithms.py --out results.jsonl --write
    python tests/bench/bench_algorithms.py --out results.jsonl --algos gspo grpo -- --lr 2e-4

A run that is in --out already is not repeated, so an interrupted benchmark goes on where it
stopped. Delete the file when train.py has changed. --write puts the table into docs/results.md,
between its bench markers. The flags after -- go to train.py."""

import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
import gspo

GOAL = 0.9  # held-out accuracy whose first step is reported


def train(flags: list[str]) -> dict:
    """Run train.py to its end. Return its metrics, the accuracy before, the peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(common.ROOT / "train.py"), "--eval-every", "5", *flags]
        command += ["--runs", folder, "--name", "bench"]
        with open(Path(folder, "log"), "w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            peak = common.finish(process) / 2**20
        if process.returncode:
            sys.exit(f"{' '.join(flags)}: {Path(folder, 'log').read_text()[-2000:]}")
        before = common.read_rows(f"{folder}/bench/starts.jsonl")[0]["eval_solved"]
        rows = common.read_rows(f"{folder}/bench/metrics.jsonl")
    return {"flags": flags, "before": before, "rows": rows, "peak_mb": peak}


def train_all(wanted: list[list[str]], jobs: int, out: Path) -> list[dict]:
    """Return the runs of these flags. Read those that --out holds from it."""
    known = {tuple(run["flags"]): run for run in common.read_rows(out)}

    def one(flags: list[str]) -> dict:
        if tuple(flags) in known:
            return known[tuple(flags)]
        run = train(flags)
        common.add_row(out, run)
        after = run["rows"][-1]["eval_solved"]
        print(f"{' '.join(flags)}: {run['before']:.1%} -> {after:.1%}", file=sys.stderr)
        return run

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, wanted))


def mean(runs: list[dict], metric: str) -> float:
    """Over steps and runs."""
    return statistics.fmean(row.get(metric, 0.0) for run in runs for row in run["rows"])


def steps_to_goal(runs: list[dict]) -> str:
    """Return the mean of the steps at which runs reached the goal, and how many runs did."""
    firsts = []
    for run in runs:
        reached = [row["step"] for row in run["rows"] if row.get("eval_solved", 0.0) >= GOAL]
        firsts += reached[:1]
    if not firsts:
        return "never"
    text = f"{statistics.fmean(firsts):.0f}"
    if len(firsts) < len(runs):
        text += f" ({len(firsts)} of {len(runs)} seeds)"
    return text


def results_table(results: dict[str, list[dict]]) -> str:
    """One row an algorithm: mean ± std over seeds, and the seed that did worst."""
    head = ["", "before", "after", "worst seed", f"first step at {GOAL:.0%}", "clip fraction"]
    lines = [[*head, "dead groups", "peak MB"]]
    for name, runs in results.items():
        after = [100 * run["rows"][-1]["eval_solved"] for run in runs]
        spread = statistics.stdev(after) if len(after) > 1 else 0.0
        line = [f"`{name}`", f"{statistics.fmean(run['before'] for run in runs):.1%}"]
        line += [f"{statistics.fmean(after):.1f} ± {spread:.1f}%", f"{min(after):.1f}%"]
        line += [steps_to_goal(runs), f"{mean(runs, 'clip_fraction'):.2%}"]
        line += [f"{mean(runs, 'dead'):.0%}"]
        line += [f"{statistics.fmean(run['peak_mb'] for run in runs):.0f}"]
        lines.append(line)
    return common.markdown(*lines)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--algos", nargs="+", choices=gspo.ALGOS, default=list(gspo.ALGOS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", required=True, help="JSONL file of finished runs, also read")
    parser.add_argument("--write", action="store_true", help="put the table into docs/results.md")
    parser.add_argument("flags", nargs="*", help="of train.py, after --")
    given = parser.parse_args()
    wanted = [
        ["--algo", algo, "--seed", str(seed), *given.flags]
        for seed in given.seeds
        for algo in given.algos
    ]
    results = {algo: [] for algo in given.algos}
    for run in train_all(wanted, given.jobs, given.out):
        results[run["flags"][1]].append(run)
    table = results_table(results)
    print(table)
    if given.write:
        common.put("docs/results.md", "bench table", table)


if __name__ == "__main__":
    main()
