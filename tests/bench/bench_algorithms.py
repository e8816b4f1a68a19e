"""Train with every algorithm and several seeds, one process each, and print a table of results.

    python tests/bench/bench_algorithms.py --out results.jsonl --write
    python tests/bench/bench_algorithms.py --out results.jsonl --algos gspo grpo -- --lr 2e-4

A run already in --out is not repeated, so an interrupted benchmark picks up where it
stopped. Delete the file when train.py has changed. --write puts the table into docs/results.md,
between its bench markers. The flags after -- go to train.py."""

import statistics
from pathlib import Path

import common
import gspo

GOAL = 0.9  # held-out accuracy whose first step is reported


def run(given: dict) -> tuple[dict, str]:
    """Train with these flags. Return metrics and the initial accuracy."""
    before, rows = common.train(["--eval-every", "5", *given["flags"]])
    return {"before": before, "rows": rows}, f"{before:.1%} -> {rows[-1]['eval_solved']:.1%}"


def mean(runs: list[dict], metric: str) -> float:
    """Mean over steps and runs."""
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
    """One row per algorithm: mean ± std over seeds, and the seed that did worst."""
    head = ["", "before", "after", "worst seed", f"first step at {GOAL:.0%}", "clip fraction"]
    lines = [[*head, "dead groups", "peak MB"]]
    for name, runs in results.items():
        after = [100 * run["rows"][-1]["eval_solved"] for run in runs]
        spread = statistics.stdev(after) if len(after) > 1 else 0.0
        line = [f"`{name}`", f"{statistics.fmean(run['before'] for run in runs):.1%}"]
        line += [f"{statistics.fmean(after):.1f} ± {spread:.1f}%", f"{min(after):.1f}%"]
        line += [steps_to_goal(runs), f"{mean(runs, 'clip_fraction'):.2%}"]
        line += [f"{mean(runs, 'dead'):.0%}"]
        line += [f"{1000 * statistics.fmean(run['rows'][-1]['memory_gb'] for run in runs):.0f}"]
        lines.append(line)
    return common.markdown(*lines)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--algos", nargs="+", choices=gspo.ALGOS, default=list(gspo.ALGOS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file of finished runs")
    parser.add_argument("--write", action="store_true", help="put the table into docs/results.md")
    parser.add_argument("flags", nargs="*", help="of train.py, after --")
    given = parser.parse_args()
    wanted = [
        {"flags": ["--algo", algo, "--seed", str(seed), *given.flags]}
        for seed in given.seeds
        for algo in given.algos
    ]
    common.run_missing(run, wanted, given.out, start="spawn")
    results = {algo: [] for algo in given.algos}
    for each in common.read_rows(given.out):
        if {"flags": each["flags"]} in wanted:
            results[each["flags"][1]].append(each)
    table = results_table(results)
    print(table)
    if given.write:
        common.put("docs/results.md", "bench table", table)


if __name__ == "__main__":
    main()
