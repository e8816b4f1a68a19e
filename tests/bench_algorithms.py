"""Trains with every algorithm and several seeds, a process each, and prints what came out.

    python tests/bench_algorithms.py --out results.jsonl --write
    python tests/bench_algorithms.py --algos gspo grpo --seeds 0 1 -- --lr 2e-4

A run that is in --out already is not done again, so an interrupted benchmark goes on where it
stopped; delete the file when train.py has changed. --write puts the table into tests/results.md,
between its bench markers. Printed, too: the curves, and the range that each metric had.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import gspo  # noqa: E402

GOAL = 0.9  # held-out accuracy whose first step is reported
# name of a variant -> its flags of train.py
VARIANTS = {name: ["--algo", name] for name in gspo.ALGOS}


# ---------------------------------------------------------------- one run


def train(flags: list[str], seed: int) -> dict:
    """Runs train.py to its end. Returns its metrics, accuracy before, seconds and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "--eval-every", "5", *flags]
        command += ["--seed", str(seed), "--runs", folder, "--name", "bench"]
        begun = time.perf_counter()
        with open(Path(folder, "log"), "w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
        _, status, usage = os.wait4(process.pid, 0)  # resources of this process alone
        process.returncode = os.waitstatus_to_exitcode(status)
        log = Path(folder, "log").read_text()
        if process.returncode:
            return {"error": f"exit {process.returncode}: {(log.splitlines() or ['?'])[-1]}"}
        metrics = Path(folder, "bench", "metrics.jsonl").read_text().splitlines()
        return {
            "before": float(re.search(r"held out: solved ([\d.]+)%", log)[1]) / 100,
            "process_seconds": time.perf_counter() - begun,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_mb": usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
            "rows": [json.loads(line) for line in metrics],
        }


def train_all(variants: dict, seeds: list[int], jobs: int, out: Path | None) -> dict:
    """Results of all runs, variant -> list over seeds; those that --out holds are read from it."""
    known = {}
    if out and out.exists():
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        known = {(tuple(line["flags"]), line["seed"]): line for line in lines}
    wanted = [(name, flags, seed) for seed in seeds for name, flags in variants.items()]

    def one(name, flags, seed):
        if (tuple(flags), seed) in known:
            return known[tuple(flags), seed]
        result = {"variant": name, "flags": flags, "seed": seed} | train(flags, seed)
        if "error" in result:
            print(f"{name}, seed {seed}: {result['error']}", file=sys.stderr)
            return result
        if out:
            with open(out, "a") as file:
                file.write(json.dumps(result) + "\n")
        print(
            f"{name}, seed {seed}: {result['before']:.1%} -> {after(result):.1%}, "
            f"{training_seconds(result):.0f} s of {result['process_seconds']:.0f} s in training",
            file=sys.stderr,
        )
        return result

    results = {name: [] for name in variants}
    with ThreadPoolExecutor(jobs) as pool:
        for (name, *_), result in zip(wanted, pool.map(one, *zip(*wanted))):
            results[name].append(result)
    return results


# ---------------------------------------------------------------- numbers of a run


def after(run: dict) -> float:
    return run["rows"][-1]["eval_solved"]


def curve(run: dict) -> dict[int, float]:
    """Held-out accuracy by step; step 0 is before training."""
    held_out = {row["step"]: row["eval_solved"] for row in run["rows"] if "eval_solved" in row}
    return {0: run["before"]} | held_out


def first_step(run: dict) -> int | None:
    return next((step for step, solved in curve(run).items() if solved >= GOAL), None)


def training_seconds(run: dict) -> float:
    """Sampling, scoring and updates; without start, evaluation and checkpoint."""
    return sum(row[name] for row in run["rows"] for name in row if name.startswith("seconds_"))


def mean_over_steps(run: dict, *metrics: str) -> float:
    return statistics.mean(sum(row[metric] for metric in metrics) for row in run["rows"])


# ---------------------------------------------------------------- tables


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mean_over_runs(runs: list[dict], *metrics: str) -> float:
    return statistics.mean(mean_over_steps(run, *metrics) for run in runs)


def results_table(results: dict) -> str:
    """One row a variant: mean ± std over seeds, and the seed that did worst."""
    head = ["", "before", "after", "worst seed", f"first step at {GOAL:.0%}", "clip fraction"]
    head += ["dead groups", "training s", "peak MB"]
    lines = []
    for name, runs in results.items():
        accuracies = [100 * after(run) for run in runs]
        reached = [step for run in runs if (step := first_step(run)) is not None]
        line = [f"`{name}`"]
        line.append(f"{100 * statistics.mean(run['before'] for run in runs):.1f}%")
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        line.append(f"{statistics.mean(accuracies):.1f} ± {spread:.1f}%")
        line.append(f"{min(accuracies):.1f}%")
        missed = f" ({len(reached)} of {len(runs)} seeds)" if len(reached) < len(runs) else ""
        line.append(f"{statistics.mean(reached):.0f}{missed}" if reached else "never")
        line.append(f"{mean_over_runs(runs, 'clip_fraction'):.2%}")
        line.append(f"{mean_over_runs(runs, 'dead_right', 'dead_wrong'):.0%}")
        line.append(f"{statistics.mean(map(training_seconds, runs)):.0f}")
        line.append(f"{statistics.mean(run['peak_mb'] for run in runs):.0f}")
        lines.append(line)
    return table(head, lines)


def mean_curve(runs: list[dict]) -> dict[int, float]:
    return {step: statistics.mean(curve(run)[step] for run in runs) for step in curve(runs[0])}


def curves_table(results: dict) -> str:
    curves = {name: mean_curve(runs) for name, runs in results.items()}
    steps = list(next(iter(curves.values())))
    rows = [[name, *(f"{100 * c[step]:.1f}" for step in steps)] for name, c in curves.items()]
    return table(["held-out % at step", *map(str, steps)], rows)


def short_number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def ranges(results: dict) -> dict[str, str]:
    """Metric -> 5th and 95th percentile over steps and seeds, of gspo or the first that has it."""
    found = {}
    for variant in sorted(results, key=lambda variant: variant != "gspo"):
        rows = [row for run in results[variant] for row in run["rows"]]
        for name in {name for row in rows for name in row} - found.keys():
            values = [row[name] for row in rows if name in row] * 2  # quantiles need two or more
            cuts = statistics.quantiles(values, n=20, method="inclusive")
            spread = " to ".join(dict.fromkeys([short_number(cuts[0]), short_number(cuts[-1])]))
            found[name] = spread + (f" ({variant})" if variant != "gspo" else "")
    return {re.sub("^reward/.*", "reward/NAME", name): spread for name, spread in found.items()}


def ranges_table(results: dict) -> str:
    return table(["metric", "5% to 95% of steps"], sorted(ranges(results).items()))


def write(results: dict) -> None:
    """Puts the table into tests/results.md, between its markers."""
    path = ROOT / "tests/results.md"
    pattern = r"(<!-- bench table -->\n).*?(<!-- end -->)"
    piece = rf"\1{results_table(results)}\n\2"
    path.write_text(re.sub(pattern, piece, path.read_text(), flags=re.DOTALL))


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, extra = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algos", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, help="rollout steps; default: train.py's")
    parser.add_argument("--out", type=Path, help="JSONL file of finished runs, read and appended")
    parser.add_argument("--write", action="store_true", help="put the table into tests/results.md")
    arguments = parser.parse_args(own)
    extra += ["--steps", str(arguments.steps)] if arguments.steps else []
    variants = {name: VARIANTS[name] + extra for name in arguments.algos}

    results = train_all(variants, arguments.seeds, arguments.jobs, arguments.out)
    whole = {name: [run for run in runs if "error" not in run] for name, runs in results.items()}
    whole = {name: runs for name, runs in whole.items() if runs}
    if whole:
        print(results_table(whole), curves_table(whole), ranges_table(whole), sep="\n\n")
    if arguments.write and whole:
        write(whole)
    sys.exit(any("error" in run for runs in results.values() for run in runs))


if __name__ == "__main__":
    main()
