"""Runs the experiment on learning rates, one process per run, and prints its main tables.

    python tests/bench/long.py            # every missing run
    python tests/bench/long.py --table    # the tables, and no run

A finished run is a line in ROWS_FILE, so the command can be stopped and rerun at any time. Delete
lines to repeat runs. docs/runs/rates/ has the plan and the results."""

import itertools
import math
import statistics
import sys

import common
import train  # noqa: F401  # each fork then has it
from common import markdown, read_rows
from support import pretrain, tasks

OPERATIONS = (12, 15)  # in a chain, fewest and most: answers have 80 tokens on average
WARM_STARTS = 5  # a seed of runs uses warm start seed % 5: other demonstrations, other weights
SEEDS = tuple(range(100, 110))  # in this order each warm start is used once, then once more
FLAGS = (  # 256 completions per step make 16 updates. No warm-up, as for a policy named tiny
    "--task chains --steps 16 --completions-per-update 16 --warmup-steps 0 "
    "--eval-every 4 --eval-prompts 256 --eval-samples 0 --save-every 0"
)
ROWS = {  # name -> flags of train.py
    "gspo": "--algo gspo",
    "gspo, 3e-3": "--algo gspo --clip-low 3e-3 --clip-high 3e-3",
    "gspo, 0.2": "--algo gspo --clip-low 0.2 --clip-high 0.2",
    "luspo": "--algo luspo",
    "grpo": "--algo grpo --kl-coef 0",
    "dapo's loss": "--algo dapo --no-dynamic-sampling --overlong-cache 0",
    "dr-grpo": "--algo dr-grpo",
    "cispo": "--algo cispo",
    "gmpo": "--algo gmpo",
    "sapo": "--algo sapo",
    "reinforce": "--algo reinforce",
    "gspo, 1e-4": "--algo gspo --clip-low 1e-4 --clip-high 1e-4",
    "gspo, 1e-3": "--algo gspo --clip-low 1e-3 --clip-high 1e-3",
    "gspo, 1e-2": "--algo gspo --clip-low 1e-2 --clip-high 1e-2",
    "gspo, 3e-2": "--algo gspo --clip-low 3e-2 --clip-high 3e-2",
    "gspo, luspo's band": "--algo gspo --clip-low 2e-3 --clip-high 2.5e-3",
}
MAIN, OTHERS = tuple(ROWS)[:5], tuple(ROWS)[5:11]
BANDS = tuple(ROWS)[11:]  # of gspo
RATES = (1e-4, 2e-4, 2.8e-4, 4e-4, 5.6e-4, 8e-4)
BAND_RATES = (1e-4, 2e-4, 4e-4)
PARTS = (  # rows, rates, seeds, further flags
    (MAIN, RATES, SEEDS, ""),
    (("gspo", "grpo"), (4e-4, 5.6e-4), SEEDS, "--max-grad-norm 0.03"),
    (OTHERS, RATES, SEEDS[:5], ""),
    (BANDS, BAND_RATES, SEEDS, ""),
    (BANDS[-1:], RATES, SEEDS, ""),
    (("gspo", "grpo"), (5e-5,), SEEDS, ""),  # after the plan: is a lower rate better?
)
ROWS_FILE = common.ROOT / "docs/runs/rates/rows.jsonl"
METRICS = ("clip_fraction", "policy_kl", "grad_norm", "entropy", "policy_sequence_std")
Runs = list[dict]


# ---- one run -------------------------------------------------------------------------------------


def train_once(run: dict) -> tuple[dict, str]:
    """Run train.py to its end. Return the numbers that the tables need, and words about them."""
    tasks.TASKS["chains"] = tasks.chains(OPERATIONS)
    policy = pretrain.built_in_policy(tasks.TASKS["chains"], "tiny", run["seed"] % WARM_STARTS)
    flags = f"{ROWS[run['row']]} {run['more']} --lr {run['lr']:g} --seed {run['seed']} {FLAGS}"
    before, metrics = common.train(["--model", str(policy), *flags.split()])
    solved = {row["step"]: row["eval_solved"] for row in metrics if "eval_solved" in row}
    found = {"solved": {0: before} | solved}
    for name in METRICS:
        found[name] = [float(f"{row.get(name, 0.0):.3g}") for row in metrics]
    return found, " ".join(f"{100 * share:.0f}" for share in found["solved"].values())


def every_run() -> Runs:
    keys = [key for *lists, more in PARTS for key in itertools.product(*lists, [more])]
    return [dict(zip(("row", "lr", "seed", "more"), key)) for key in dict.fromkeys(keys)]


# ---- statistics ----------------------------------------------------------------------------------

# 97.5% quantiles of Student's t for 1 to 9 degrees of freedom
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95% interval."""
    mean, count = statistics.fmean(values), len(values)
    return mean, T_QUANTILES[count - 2] * statistics.stdev(values) / math.sqrt(count)


def permutation_p(differences: list[float]) -> float:
    """Return the exact two-sided p: the share of sign flips whose sum is at least as far from 0."""
    seen = abs(sum(differences))
    signs = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(sign * each for sign, each in zip(some, differences))) for some in signs]
    return sum(each >= seen - 1e-9 for each in sums) / len(sums)


def holm(ps: list[float]) -> list[float]:
    """Return Holm-corrected p values: the smallest times their number, the next times one less, and
    so on, none below the one before it."""
    corrected, highest = list(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = highest
    return corrected


def largest_rate(gains: dict[float, float]) -> float:
    """Return the largest rate with a gain above 0, interpolated in the logarithm of the rate.

    gains: rate -> outcome minus start. Without any gain, returns the smallest rate."""
    rates = sorted(gains)
    rate = max((lr for lr in rates if gains[lr] > 0), default=rates[0])
    higher = next((lr for lr in rates if lr > rate), None)
    if higher is None or gains[rate] <= 0:
        return rate
    part = gains[rate] / (gains[rate] - gains[higher])  # of the way to where the gain is 0
    return rate * (higher / rate) ** part


def at_own_best(ends: dict[int, dict[float, float]]) -> dict[int, float]:
    """Return for each seed its outcome at the rate that is best for the other seeds.

    ends: seed -> rate -> outcome."""
    found = {}
    for seed, mine in ends.items():
        others = [rates for other, rates in ends.items() if other != seed]
        best = max(mine, key=lambda lr: sum(rates[lr] for rates in others))
        found[seed] = mine[best]
    return found


# ---- tables --------------------------------------------------------------------------------------

MEAN, LARGEST, BEST = "mean over the rates", "log2 of the largest rate", "at its own best rate"
NARROW = (("gspo, 1e-3", "gspo", BAND_RATES), ("gspo, 1e-2", "gspo, 3e-2", BAND_RATES))
COMPARISONS = {  # rows and rates, with p corrected for their number
    **dict.fromkeys(
        (MEAN, LARGEST, BEST),
        (("gspo", "grpo", RATES), ("gspo", "gspo, 0.2", RATES), ("gspo, 3e-3", "gspo", RATES)),
    ),
    f"{MEAN}, second plan": (("luspo", "gspo, luspo's band", RATES), *NARROW),
}


def outcome(run: dict) -> float:
    """Return the held-out percent at the end, mean of the last two evaluations."""
    return 50 * (run["solved"]["12"] + run["solved"]["16"])


def gain(run: dict) -> float:
    return outcome(run) - 100 * run["solved"]["0"]


def cells(runs: Runs, said) -> str:
    """Return said(outcomes over seeds) by row and rate, in italics where the row breaks, that is,
    ends below its start on average."""
    lines = [["", *(f"{lr:g}" for lr in RATES)]]
    for row in MAIN:
        line = [f"`{row}`"]
        for lr in RATES:
            there = [run for run in runs if (run["row"], run["lr"]) == (row, lr)]
            text = said([outcome(run) for run in there])
            line.append(f"*{text}*" if statistics.fmean(map(gain, there)) < 0 else text)
        lines.append(line)
    return markdown(*lines)


def spread(values: list[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.0f} ± {half:.0f}"


def by_seed(runs: Runs, name: str, row: str, rates: tuple) -> dict[int, float]:
    """Return seed -> the number with this name of a row."""
    ends, gains = {}, {}
    for run in runs:
        if run["row"] == row and run["lr"] in rates:
            ends.setdefault(run["seed"], {})[run["lr"]] = outcome(run)
            gains.setdefault(run["seed"], {})[run["lr"]] = gain(run)
    if name == BEST:
        return at_own_best(ends)
    if name == LARGEST:
        return {seed: math.log2(largest_rate(gains[seed])) for seed in gains}
    return {seed: statistics.fmean(ends[seed].values()) for seed in ends}


def comparisons(runs: Runs) -> str:
    """Compare rows, paired by seed: mean difference with interval, p, and p corrected by Holm."""
    lines = [["", "", "difference", "95% interval", "pairs above", "p", "p, Holm"]]
    for name, pairs in COMPARISONS.items():
        gaps = []
        for one, other, rates in pairs:
            ones, others = [by_seed(runs, name, row, rates) for row in (one, other)]
            gaps.append([ones[seed] - others[seed] for seed in ones])
        ps = [permutation_p(each) for each in gaps]
        for (one, other, _), each, p, corrected in zip(pairs, gaps, ps, holm(ps)):
            mean, half = interval(each)
            line = [name, f"{one} − {other}", f"{mean:+.2f}"]
            line += [f"{mean - half:+.2f} to {mean + half:+.2f}"]
            line += [f"{sum(gap > 0 for gap in each)} of {len(each)}", f"{p:.3f}"]
            lines.append([*line, f"{corrected:.3f}"])
    return markdown(*lines)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--table", action="store_true", help="train nothing")
    given = parser.parse_args()
    if not given.table:
        common.run_missing(train_once, every_run(), ROWS_FILE)
    rows = read_rows(ROWS_FILE)
    if len(rows) < len(every_run()):
        sys.exit(f"{len(every_run()) - len(rows)} runs are missing, and the tables need all")
    runs = [run for run in rows if run["more"] == ""]
    print(f"{cells(runs, spread)}\n\n{comparisons(runs)}")


if __name__ == "__main__":
    main()
