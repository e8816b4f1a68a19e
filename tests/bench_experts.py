"""Routing Replay on the built-in mixture of experts: who needs it, at how many updates a rollout?

    python tests/bench_experts.py --out moe_results.jsonl
    python tests/bench_experts.py --algos gspo --seeds 0 1 2 -- --lr 4e-4

GSPO, GRPO and CISPO, each without replay, with the experts that pi_old chose and with those that
the sampler chose, at 4, 16 and 64 updates a rollout, and at 4 with a sampler that is refreshed
every fourth step. A process each; runs that are in --out already are not done again.
"""

import argparse
import statistics
import sys
from pathlib import Path

from bench_algorithms import after, mean_over_runs, table, train_all

ALGOS = {
    "gspo": ["--algo", "gspo"],
    "grpo": ["--algo", "grpo", "--kl-coef", "0"],
    "cispo": ["--algo", "cispo"],
}
UPDATES = {  # of 256 completions a rollout
    "4": ["--completions-per-update", "64"],
    "16": ["--completions-per-update", "16"],
    "64": ["--completions-per-update", "4"],
    "4, stale": ["--completions-per-update", "64", "--stale-steps", "4"],
}
REPLAYS = {
    "none": [],
    "policy": ["--routing-replay", "policy"],
    "sampler": ["--routing-replay", "sampler"],
}


def cells(algos: list[str], extra: list[str]) -> dict[tuple, list[str]]:
    """(algorithm, updates, replay) -> flags of train.py."""
    common = ["--model", "tiny-moe", "--eval-every", "10", "--eval-samples", "0", *extra]
    return {
        (algo, updates, replay): [*common, *ALGOS[algo], *UPDATES[updates], *REPLAYS[replay]]
        for algo in algos
        for updates in UPDATES
        for replay in REPLAYS
    }


def mean_where_measured(runs: list[dict], metric: str) -> float | None:
    """Over steps and seeds: flips of experts are told with evaluations, or by one replay alone."""
    values = [row[metric] for run in runs for row in run["rows"] if metric in row]
    return statistics.mean(values) if values else None


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.2%}"


def accuracy(runs: list[dict]) -> str:
    return f"{statistics.mean(map(after, runs)):.1%}" if runs else "–"


def worst(runs: list[dict]) -> str:
    return f"{min(map(after, runs)):.1%}" if runs else "–"


def flips(runs: list[dict]) -> str:
    return percent(mean_where_measured(runs, "expert_flips"))


def clipped(runs: list[dict]) -> str:
    return percent(mean_over_runs(runs, "clip_fraction") if runs else None)


def drift(runs: list[dict]) -> str:
    return f"{1e4 * mean_over_runs(runs, 'approx_kl'):.2f}" if runs else "–"


COLUMNS = {  # each says none / policy / sampler
    "held out after": accuracy,
    "worst seed": worst,
    "expert flips": flips,
    "clip fraction": clipped,
    "KL to π_old, 1e-4 nats": drift,
}


def results_table(results: dict) -> str:
    """A row for each algorithm and number of updates; in a cell the three replays."""
    head = ["algorithm", "updates", "seeds", *COLUMNS, "sampler flips"]
    lines = []
    for algo, updates in dict.fromkeys((algo, updates) for algo, updates, _ in results):
        each = [results[algo, updates, replay] for replay in REPLAYS]
        line = [f"`{algo}`", updates, "/".join(str(len(runs)) for runs in each)]
        for tell in COLUMNS.values():
            line.append(" / ".join(tell(runs) for runs in each))
        line.append(percent(mean_where_measured(each[-1], "sampler_flips")))
        lines.append(line)
    return table(head, lines)


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, extra = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algos", nargs="+", choices=ALGOS, default=list(ALGOS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, default=20, help="rollout steps")
    parser.add_argument("--out", type=Path, help="JSONL file of finished runs, read and appended")
    arguments = parser.parse_args(own)

    variants = cells(arguments.algos, ["--steps", str(arguments.steps), *extra])
    results = train_all(variants, arguments.seeds, arguments.jobs, arguments.out)
    whole = {cell: [run for run in runs if "error" not in run] for cell, runs in results.items()}
    print("each cell: no replay / policy / sampler", results_table(whole), sep="\n\n")
    sys.exit(any("error" in run for runs in results.values() for run in runs))


if __name__ == "__main__":
    main()
