"""Routing Replay on the built-in mixture of experts: who needs it, at how many updates a rollout?

    python tests/bench/bench_experts.py --out moe_results.jsonl
    python tests/bench/bench_experts.py --algos gspo --seeds 0 1 2 -- --lr 4e-4

Each algorithm without replay and with the experts that pi_old chose, at 4, 16 and 64 updates a
rollout, and at 4 with a sampler that is refreshed every fourth step. A process each; runs that are
in --out already are not done again. What stands behind -- goes to train.py."""

import argparse
import statistics
import sys
from pathlib import Path

from bench_algorithms import mean, train_all

COMMON = ["--model", "tiny-moe", "--kl-coef", "0", "--eval-samples", "0"]
UPDATES = {  # of 256 completions a rollout
    "4": ["--completions-per-update", "64"],
    "16": ["--completions-per-update", "16"],
    "64": ["--completions-per-update", "4"],
    "4, stale": ["--completions-per-update", "64", "--stale-steps", "4"],
}
REPLAYS = ([], ["--routing-replay"])


def cell(runs: list[dict]) -> list[str]:
    """What a table says of an algorithm's runs."""
    after = [run["rows"][-1]["eval_solved"] for run in runs]
    flips = [row["expert_flips"] for run in runs for row in run["rows"] if "expert_flips" in row]
    return [
        f"{statistics.fmean(after):.1%}",
        f"{min(after):.1%}",
        f"{statistics.fmean(flips):.2%}",  # told with evaluations
        f"{mean(runs, 'clip_fraction'):.2%}",
        f"{1e4 * mean(runs, 'approx_kl'):.2f}",
    ]


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, extra = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algos", nargs="+", default=["gspo", "grpo", "cispo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", nargs="+", choices=UPDATES, default=list(UPDATES))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, default=20, help="rollout steps")
    parser.add_argument("--out", type=Path, help="JSONL file of finished runs, read and appended")
    given = parser.parse_args(own)

    head = ["updates", "", "held out after", "worst seed", "expert flips", "clip fraction"]
    lines = [[*head, "KL to pi_old, 1e-4 nats"], ["---"] * 7]
    for updates in given.updates:
        pair = []
        for replay in REPLAYS:
            flags = [*COMMON, "--steps", str(given.steps), *UPDATES[updates], *replay, *extra]
            pair.append(train_all(given.algos, given.seeds, flags, given.jobs, given.out))
        for algo in given.algos:
            columns = zip(*(cell(results[algo]) for results in pair))
            lines.append([updates, f"`{algo}`", *(" / ".join(column) for column in columns)])
    print("each cell: without replay / with", "", sep="\n")
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))


if __name__ == "__main__":
    main()
