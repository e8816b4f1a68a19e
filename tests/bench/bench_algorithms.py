"""Train with every algorithm and several seeds, a process each, and print a table of the results.

    python tests/bench/bench_algorithms.py --out results.jsonl --write
    python tests/bench/bench_algorithms.py --algos gspo grpo --seeds 0 1 -- --lr 2e-4

A run that is in --out already is not repeated, so an interrupted benchmark goes on where it
stopped. Delete the file when train.py has changed. --write puts the table into docs/results.md,
between its bench markers. The flags after -- go to train.py."""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gspo  # noqa: E402

GOAL = 0.9  # held-out accuracy whose first step is reported


def train(flags: list[str]) -> dict:
    """Run train.py to its end. Return its metrics, the accuracy before, the peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "--eval-every", "5", *flags]
        command += ["--runs", folder, "--name", "bench"]
        with open(Path(folder, "log"), "w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            _, status, usage = os.wait4(process.pid, 0)  # resources of this process alone
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{' '.join(flags)}: {Path(folder, 'log').read_text()[-2000:]}")
        rows = {}
        for name in ("starts", "metrics"):
            lines = Path(folder, f"bench/{name}.jsonl").read_text().splitlines()
            rows[name] = [json.loads(line) for line in lines]
    peak = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return {"before": rows["starts"][0]["eval_solved"], "rows": rows["metrics"], "peak_mb": peak}


def train_all(algos: list[str], seeds: list[int], extra: list[str], jobs: int, out: Path) -> dict:
    """Return algorithm -> its runs. Read those that --out holds from it."""
    known = {}
    if out and out.exists():
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        known = {tuple(line["flags"]): line for line in lines}

    def one(flags: list[str]) -> dict:
        if tuple(flags) in known:
            return known[tuple(flags)]
        result = {"flags": flags} | train(flags)
        if out:
            with open(out, "a") as file:
                file.write(json.dumps(result) + "\n")
        after = result["rows"][-1]["eval_solved"]
        print(f"{' '.join(flags)}: {result['before']:.1%} -> {after:.1%}", file=sys.stderr)
        return result

    wanted = [["--algo", algo, "--seed", str(seed), *extra] for seed in seeds for algo in algos]
    results = {algo: [] for algo in algos}
    with ThreadPoolExecutor(jobs) as pool:
        for flags, result in zip(wanted, pool.map(one, wanted)):
            results[flags[1]].append(result)
    return results


def first_step(run: dict) -> int | None:
    """At which the goal was reached."""
    steps = [row["step"] for row in run["rows"] if row.get("eval_solved", 0.0) >= GOAL]
    return min(steps, default=None)


def mean(runs: list[dict], metric: str) -> float:
    """Over steps and runs."""
    return statistics.fmean(row.get(metric, 0.0) for run in runs for row in run["rows"])


def results_table(results: dict) -> str:
    """One row an algorithm: mean ± std over seeds, and the seed that did worst."""
    head = ["", "before", "after", "worst seed", f"first step at {GOAL:.0%}", "clip fraction"]
    lines = [[*head, "dead groups", "peak MB"]]
    lines.append(["---"] * len(lines[0]))
    for name, runs in results.items():
        after = [100 * run["rows"][-1]["eval_solved"] for run in runs]
        spread = statistics.stdev(after) if len(after) > 1 else 0.0
        steps = [first_step(run) for run in runs if first_step(run) is not None]
        reached = f"{statistics.fmean(steps):.0f}" if steps else "never"
        if 0 < len(steps) < len(runs):
            reached += f" ({len(steps)} of {len(runs)} seeds)"
        line = [f"`{name}`", f"{statistics.fmean(run['before'] for run in runs):.1%}"]
        line += [f"{statistics.fmean(after):.1f} ± {spread:.1f}%", f"{min(after):.1f}%", reached]
        line += [f"{mean(runs, 'clip_fraction'):.2%}", f"{mean(runs, 'dead'):.0%}"]
        line += [f"{statistics.fmean(run['peak_mb'] for run in runs):.0f}"]
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, extra = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algos", nargs="+", choices=gspo.ALGOS, default=list(gspo.ALGOS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, help="JSONL file of finished runs, read and appended")
    parser.add_argument("--write", action="store_true", help="put the table into docs/results.md")
    arguments = parser.parse_args(own)
    found = train_all(arguments.algos, arguments.seeds, extra, arguments.jobs, arguments.out)
    print(results_table(found))
    if arguments.write:
        path = ROOT / "docs/results.md"
        piece = rf"\1{results_table(found)}\n\2"
        pattern = r"(<!-- bench table -->\n).*?(<!-- end -->)"
        path.write_text(re.sub(pattern, piece, path.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
