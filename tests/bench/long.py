"""Runs the experiment on learning rates, one process per run, and prints its tables.

    python tests/bench/long.py                     # every missing run
    python tests/bench/long.py --table --write     # the tables, and no run

A finished run is a line in --out, so the command can be stopped and rerun at any time. Delete
lines to repeat runs. docs/runs/rates/ has the plan and the results."""

import collections
import itertools
import math
import statistics
from pathlib import Path

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
BANDS = (  # of gspo, from the narrowest to the widest
    "gspo, 1e-4",
    "gspo",
    "gspo, 1e-3",
    "gspo, luspo's band",
    "gspo, 3e-3",
    "gspo, 1e-2",
    "gspo, 3e-2",
    "gspo, 0.2",
)
RATES = (1e-4, 2e-4, 2.8e-4, 4e-4, 5.6e-4, 8e-4)
BAND_RATES = (1e-4, 2e-4, 4e-4)
NORM = "--max-grad-norm 0.03"
PARTS = (  # rows, rates, seeds, further flags
    (MAIN, RATES, SEEDS, ""),
    (("gspo", "grpo"), (4e-4, 5.6e-4), SEEDS, NORM),
    (OTHERS, RATES, SEEDS[:5], ""),
    (BANDS, BAND_RATES, SEEDS, ""),
    (("gspo, luspo's band",), RATES, SEEDS, ""),
)
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


# ---- numbers of runs -----------------------------------------------------------------------------


def start(run: dict) -> float:
    """Return the held-out percent before training."""
    return 100 * run["solved"]["0"]


def outcome(run: dict) -> float:
    """Return the held-out percent at the end, mean of the last two evaluations."""
    return 50 * (run["solved"]["12"] + run["solved"]["16"])


def gain(run: dict) -> float:
    return outcome(run) - start(run)


def where(runs: Runs, **settings) -> Runs:
    return [run for run in runs if all(run[name] == value for name, value in settings.items())]


def of_rows(runs: Runs, rows) -> Runs:
    """Return the runs of these rows, in their order, of the seeds that have as many as any."""
    found = [run for row in rows for run in where(runs, row=row)]
    count = collections.Counter(run["seed"] for run in found)
    return [run for run in found if count[run["seed"]] == max(count.values())]


def values_of(runs: Runs, name: str) -> list:
    return list(dict.fromkeys(run[name] for run in runs))


def runs_with(rows: Runs, more: str) -> Runs:
    """Return the runs with these further flags, in the order of seeds and rates."""
    return sorted(where(rows, more=more), key=lambda run: (run["seed"], run["lr"]))


def primary(runs: Runs) -> dict[str, dict[str, dict[int, float]]]:
    """Return name -> row -> seed -> number, of the numbers that are compared."""
    means, largest, best = {}, {}, {}
    for row in values_of(runs, "row"):
        ends, means[row], largest[row] = {}, {}, {}
        for seed in values_of(runs, "seed"):
            some = where(runs, row=row, seed=seed)
            ends[seed] = {run["lr"]: outcome(run) for run in some}
            means[row][seed] = statistics.fmean(ends[seed].values())
            largest[row][seed] = math.log2(largest_rate({run["lr"]: gain(run) for run in some}))
        best[row] = at_own_best(ends)
    return {MEANS: means, "log2 of the largest rate": largest, "at its own best rate, points": best}


# ---- tables --------------------------------------------------------------------------------------

MEANS = "mean over the rates, points"
COMPARISONS = (("gspo", "grpo"), ("gspo", "gspo, 0.2"), ("gspo, 3e-3", "gspo"))
HEAD = ["", "difference", "95% interval", "pairs above", "p", "p, Holm", "by warm start"]


def short(lr: float) -> str:
    return f"{lr:.1e}".replace(".0e", "e").replace("e-0", "e-")


def spread(values: list[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.0f} ± {half:.0f}"


def cells(runs: Runs, said=None) -> str:
    """Return the outcomes by row and rate: mean over seeds and its 95% interval. In italics
    where the row breaks, that is, ends below its start on average."""
    rates = values_of(runs, "lr")
    lines = [["", *map(short, rates)]]
    for row in values_of(runs, "row"):
        line = [f"`{row}`"]
        for lr in rates:
            there = where(runs, row=row, lr=lr)
            text = (said or spread)([outcome(run) for run in there])
            line.append(f"*{text}*" if statistics.fmean(map(gain, there)) < 0 else text)
        lines.append(line)
    return markdown(*lines)


def numbers(runs: Runs) -> str:
    """Return the numbers of each row: mean over seeds and its 95% interval. For the largest
    rate, the geometric mean."""
    means, largest, best = primary(runs).values()
    lines = [["", "mean over the rates", "largest rate", "at its own best rate", "which is"]]
    for row in means:
        middle, half = interval([*largest[row].values()])
        rates = [short(2 ** (middle + some)) for some in (0, -half, half)]
        ends = {lr: sum(map(outcome, where(runs, row=row, lr=lr))) for lr in RATES}
        line = [f"`{row}`", spread([*means[row].values()])]
        line.append(f"{rates[0]} ({rates[1]} to {rates[2]})")
        lines.append([*line, spread([*best[row].values()]), short(max(ends, key=ends.get))])
    return markdown(*lines)


def by_warm_start(gaps: dict[int, float]) -> str:
    """Return the mean difference for each warm start."""
    found = [[gaps[seed] for seed in gaps if seed % WARM_STARTS == i] for i in range(WARM_STARTS)]
    return ", ".join(f"{statistics.fmean(some):+.1f}" for some in found)


def compared(pairs: list[tuple[str, str, dict]]) -> list[list[str]]:
    """Return lines of a table: two rows of the experiment, paired by seed, and p corrected for the
    number of lines. pairs: their names, and row -> seed -> number."""
    gaps = [{seed: of[one][seed] - of[other][seed] for seed in of[one]} for one, other, of in pairs]
    ps = [permutation_p([*each.values()]) for each in gaps]
    lines = []
    for (one, other, _), each, p, corrected in zip(pairs, gaps, ps, holm(ps)):
        mean, half = interval([*each.values()])
        line = [f"{one} − {other}", f"{mean:+.2f}", f"{mean - half:+.2f} to {mean + half:+.2f}"]
        above = sum(gap > 0 for gap in each.values())
        line += [f"{above} of {len(each)}", f"{p:.3f}", f"{corrected:.3f}", by_warm_start(each)]
        lines.append(line)
    return lines


def comparisons(runs: Runs) -> str:
    """Compare rows by their primary numbers, with p of each and p corrected for the three."""
    lines = [["", *HEAD]]
    for name, by_row in primary(runs).items():
        pairs = [(one, other, by_row) for one, other in COMPARISONS]
        lines += [[name, *line] for line in compared(pairs)]
    return markdown(*lines)


def tables(rows: Runs) -> str:
    """Return the tables of docs/runs/rates/README.md."""
    plain = runs_with(rows, "")
    runs, others = of_rows(plain, MAIN), of_rows(plain, OTHERS)
    narrow = of_rows([run for run in plain if run["lr"] in BAND_RATES], BANDS)
    eleven, both = of_rows(plain, MAIN + OTHERS), of_rows(plain, ("luspo", "gspo, luspo's band"))
    limited = of_rows(runs_with(rows, NORM), ("gspo", "grpo"))
    starts = ", ".join(f"{start(run):.0f}" for run in where(runs, row="gspo", lr=RATES[0]))
    said = f"{len(SEEDS)} seeds from {SEEDS[0]} on, which start at {starts}%."
    three = primary(narrow)[MEANS]
    pairs = [("luspo", "gspo, luspo's band", primary(both)[MEANS])]
    pairs += [("gspo, 1e-3", "gspo", three), ("gspo, 1e-2", "gspo, 3e-2", three)]
    titles = {
        "Outcome, mean and 95% interval.": f"{cells(runs)}\n\n{said}",
        "Numbers of a row.": numbers(runs),
        "Comparisons, paired by seed.": comparisons(runs),
        f"With `{NORM}`. Outcome.": f"{cells(limited)}\n\n10 seeds a row.",
        "Other objectives. Outcome.": f"{cells(others)}\n\n5 seeds a row.",
        "Numbers of every row, of the seeds that all have.": numbers(eleven),
        "Bands. Outcome, mean and 95% interval.": f"{cells(narrow)}\n\n10 seeds a row.",
        "`gspo` with the band of `luspo`, and `luspo`.": cells(both),
        "Three comparisons, mean over their rates.": markdown(HEAD, *compared(pairs)),
    }
    return "\n\n".join(f"**{title}**\n\n{table}" for title, table in titles.items())


# ---- the command ---------------------------------------------------------------------------------


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--out", type=Path, default=common.ROOT / "docs/runs/rates/rows.jsonl")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument(
        "--write", action="store_true", help="put them into the README of docs/runs/rates"
    )
    given = parser.parse_args()
    if not given.table:
        common.run_missing(train_once, every_run(), given.out, given.jobs)
    found = tables(read_rows(given.out))
    print(found)
    if given.write:
        common.put("docs/runs/rates/README.md", "rates", found)


if __name__ == "__main__":
    main()
