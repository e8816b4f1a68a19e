"""Runs the experiment on learning rates, a process a run, and prints its tables.

    python tests/bench/long.py                     # every missing run
    python tests/bench/long.py --parts rates norm  # of these parts alone
    python tests/bench/long.py --table --write     # the tables, and no run

A finished run is a line of --out, so the command can be stopped at any time and given again. Delete
lines to repeat runs. docs/results.md, "Learning rates", has the plan and the results."""

import hashlib
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import common
import train  # noqa: F401  # each fork then has it
from common import markdown, read_rows
from support import tasks

STEPS, EVERY, PROMPTS = 16, 4, 256  # rollout steps, between evaluations, held-out prompts
COMPLETIONS = 16  # of an update: 256 of a step make 16 updates
WARM_STARTS = 5  # a seed of runs uses warm start seed % 5: other demonstrations, other weights
SEEDS = tuple(range(100, 110))  # in this order each warm start is used once, then once more
# fewest and most operations of a chain, by the tokens of a mean answer
LENGTHS = {80: (12, 15), 170: (24, 32)}

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
MAIN = tuple(ROWS)[:5]
OTHERS = tuple(ROWS)[5:11]
BANDS = tuple(ROWS)[11:15]
WIDTHS = {  # gspo's bands -> their mean width
    "gspo, 1e-4": 1e-4,
    "gspo": 3.5e-4,
    "gspo, 1e-3": 1e-3,
    "gspo, luspo's band": 2.25e-3,
    "gspo, 3e-3": 3e-3,
    "gspo, 1e-2": 1e-2,
    "gspo, 3e-2": 3e-2,
    "gspo, 0.2": 0.2,
}
RATES = (1e-4, 2e-4, 2.8e-4, 4e-4, 5.6e-4, 8e-4)
BAND_RATES = (1e-4, 2e-4, 4e-4)


USUAL = {"tokens": 80, "more": ""}  # tokens of a mean answer, further flags
# name -> rows, rates, seeds, settings that are not the usual ones; in the order of their importance
PARTS = {
    "rates": (MAIN, RATES, SEEDS, {}),
    "norm": (("gspo", "grpo"), (4e-4, 5.6e-4), SEEDS, {"more": "--max-grad-norm 0.03"}),
    "longer": (MAIN, (5e-5, 1e-4, 2e-4), SEEDS, {"tokens": 170}),
    "others": (OTHERS, RATES, SEEDS[:5], {}),
    "bands": (BANDS, BAND_RATES, SEEDS, {}),
    "sum": (("gspo, luspo's band",), RATES, SEEDS, {}),
}
METRICS = ("clip_fraction", "policy_kl", "grad_norm", "entropy")
LATER_METRICS = ("policy_sequence_std",)  # which the first runs did not keep


# ---- one run -------------------------------------------------------------------------------------


def flags_of(run: dict) -> str:
    flags = f"{ROWS[run['row']]} --lr {run['lr']:g} {run['more']} --seed {run['seed']} "
    flags += f"--task chains --steps {STEPS} --completions-per-update {COMPLETIONS} "
    flags += f"--eval-every {EVERY} --eval-prompts {PROMPTS} --eval-samples 0 --save-every 0 "
    return flags + "--warmup-steps 0"  # as for a policy that is named tiny


def train_once(run: dict) -> tuple[dict, str]:
    """Run train.py to its end. Return the numbers that the tables need, and words about them."""
    begun, warm = time.monotonic(), run["seed"] % WARM_STARTS
    tasks.TASKS["chains"] = tasks.chains(LENGTHS[run["tokens"]])
    policy = tasks.built_in_policy(tasks.TASKS["chains"], "tiny", warm)
    before, metrics = common.train(["--model", str(policy), *flags_of(run).split()])
    solved = {row["step"]: row["eval_solved"] for row in metrics if "eval_solved" in row}
    found = run | {"warm": warm, "solved": {0: before} | solved}
    exact = {name: [row.get(name, 0.0) for row in metrics] for name in METRICS}  # of every step
    # two versions of the code that train the same bits have the same digest
    found["digest"] = hashlib.sha256(repr((found["solved"], exact)).encode()).hexdigest()[:12]
    for name in (*METRICS, *LATER_METRICS):
        found[name] = [float(f"{row.get(name, 0.0):.3g}") for row in metrics]
    found["seconds"] = round(time.monotonic() - begun)
    said = " ".join(f"{100 * share:.0f}" for share in found["solved"].values())
    return found, f"{said} ({found['seconds']} s)"


def missing(given) -> list[dict]:
    """Return the runs that --out does not hold. All runs of a part with one seed, in random order,
    come before those with the next seed. So an early end leaves whole blocks."""
    names = ("row", "lr", "tokens", "more", "seed")
    done = [{name: run[name] for name in names} for run in read_rows(given.out)]
    left = []
    for rows, rates, seeds, others in map(PARTS.get, given.parts):
        block = [{"row": row, "lr": lr} for row, lr in itertools.product(rows, rates)]
        for seed in given.seeds or seeds:
            shuffled = random.Random(seed).sample(block, len(block))
            runs = [run | USUAL | others | {"seed": seed} for run in shuffled]
            left += [run for run in runs if run not in done]
    return left


# ---- statistics ----------------------------------------------------------------------------------

# 97.5% quantiles of Student's t for 1 to 9 degrees of freedom
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean, and the half width of its 95% interval."""
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return mean, math.nan
    return mean, T_QUANTILES[count - 2] * statistics.stdev(values) / math.sqrt(count)


def permutation_p(differences: list[float]) -> float:
    """Return the exact two-sided p: the share of choices of signs whose sum is as far from 0."""
    seen = abs(sum(differences))
    signs = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(sign * each for sign, each in zip(some, differences))) for some in signs]
    return sum(each >= seen - 1e-9 for each in sums) / len(sums)


def holm(ps: list[float]) -> list[float]:
    """Return corrected p values: the smallest times their number, the next times one less, and so
    on, none below the one before it."""
    corrected, highest = list(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = highest
    return corrected


def largest_rate(gains: dict[float, float]) -> float:
    """Return the largest rate with a gain above 0, interpolated in the logarithm of the rate.

    gains: rate -> outcome minus start. Without any gain it is the smallest rate."""
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

COMPARISONS = (("gspo", "grpo"), ("gspo", "gspo, 0.2"), ("gspo, 3e-3", "gspo"))
Runs = dict[str, dict[int, dict[float, dict]]]  # row -> seed -> rate -> run


def start(run: dict) -> float:
    """Return the held-out percent before training."""
    return 100 * run["solved"]["0"]


def outcome(run: dict) -> float:
    """Return the held-out percent at the end, mean of the last two evaluations."""
    return 50 * (run["solved"]["12"] + run["solved"]["16"])


def gain(run: dict) -> float:
    return outcome(run) - start(run)


def runs_of(rows: list[dict], **settings) -> Runs:
    """Return the runs of these settings, in the order of ROWS, of the seeds and of the rates."""
    found: Runs = {name: {} for name in ROWS}
    for run in sorted(rows, key=lambda run: (run["seed"], run["lr"])):
        if all(run[name] == value for name, value in settings.items()):
            found[run["row"]].setdefault(run["seed"], {})[run["lr"]] = run
    return {name: seeds for name, seeds in found.items() if seeds}


def rates_of(runs: Runs) -> list[float]:
    return sorted({lr for seeds in runs.values() for by_rate in seeds.values() for lr in by_rate})


def at_rate(seeds: dict[int, dict[float, dict]], lr: float) -> list[dict]:
    return [by_rate[lr] for by_rate in seeds.values() if lr in by_rate]


def whole_blocks(runs: Runs) -> Runs:
    """Leave out the seeds of which a run is not there yet."""
    rates, whole = rates_of(runs), set.intersection(*map(set, runs.values()))
    whole = [
        seed for seed in sorted(whole) if all(len(runs[row][seed]) == len(rates) for row in runs)
    ]
    return {row: {seed: seeds[seed] for seed in whole} for row, seeds in runs.items()}


def short(lr: float) -> str:
    return f"{lr:.1e}".replace(".0e", "e").replace("e-0", "e-")


def spread(values: list[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.0f} ± {half:.0f}"


def clipped(run: dict) -> float:
    return 100 * statistics.fmean(run["clip_fraction"])


def at_step_4(run: dict) -> float:
    return 100 * run["solved"]["4"]


def cells(runs: Runs, number=outcome, said=spread) -> str:
    """Return a number of the runs by row and rate: mean over seeds and its 95% interval. It is in
    italics where the row breaks: on average it ends below its start."""
    rates = rates_of(runs)
    lines = [["", *map(short, rates)]]
    for row, seeds in runs.items():
        line = [f"`{row}`"]
        for lr in rates:
            there = at_rate(seeds, lr)
            text = said([number(run) for run in there]) if there else ""
            breaks = there and statistics.fmean(map(gain, there)) < 0
            line.append(f"*{text}*" if breaks else text)
        lines.append(line)
    return markdown(*lines)


def primary(runs: Runs) -> dict[str, dict[str, dict[int, float]]]:
    """Return name -> row -> seed -> number, of the numbers that are compared."""
    means, largest, best = {}, {}, {}
    for row, seeds in runs.items():
        ends, means[row], largest[row] = {}, {}, {}
        for seed, by_rate in seeds.items():
            ends[seed] = {lr: outcome(run) for lr, run in by_rate.items()}
            gains = {lr: gain(run) for lr, run in by_rate.items()}
            means[row][seed] = statistics.fmean(ends[seed].values())
            largest[row][seed] = math.log2(largest_rate(gains))
        best[row] = at_own_best(ends)
    return {
        "mean over the rates, points": means,
        "log2 of the largest rate": largest,
        "at its own best rate, points": best,
    }


def numbers(runs: Runs) -> str:
    """Return the numbers of each row: mean over seeds and its 95% interval. Of the largest rate it
    is the geometric mean."""
    means, largest, best = primary(runs).values()
    lines = [["", "mean over the rates", "largest rate", "at its own best rate", "which is"]]
    for row, seeds in runs.items():
        middle, half = interval([*largest[row].values()])
        rates = [short(2 ** (middle + some)) for some in (0, -half, half)]
        highest = max(rates_of(runs), key=lambda lr: sum(map(outcome, at_rate(seeds, lr))))
        line = [f"`{row}`", spread([*means[row].values()])]
        line.append(f"{rates[0]} ({rates[1]} to {rates[2]})")
        lines.append([*line, spread([*best[row].values()]), short(highest)])
    return markdown(*lines)


def by_warm_start(gaps: dict[int, float]) -> str:
    """Return the mean difference of each warm start."""
    found: dict[int, list[float]] = {}
    for seed, gap in gaps.items():
        found.setdefault(seed % WARM_STARTS, []).append(gap)
    return ", ".join(f"{statistics.fmean(found[warm]):+.1f}" for warm in sorted(found))


def pairs_above(gaps) -> str:
    return f"{sum(gap > 0 for gap in gaps)} of {len(gaps)}"


def compared(pairs: list[tuple[str, str, dict[int, float], dict[int, float]]]) -> list[list[str]]:
    """Return lines of a table: two rows of the experiment, paired by seed, and p corrected for the
    number of lines. pairs: their names, and the number of each seed."""
    gaps = [
        {seed: mine - theirs[seed] for seed, mine in ours.items()} for *_, ours, theirs in pairs
    ]
    ps = [permutation_p([*each.values()]) for each in gaps]
    lines = []
    for (one, other, *_), each, p, corrected in zip(pairs, gaps, ps, holm(ps)):
        mean, half = interval([*each.values()])
        line = [f"{one} − {other}", f"{mean:+.2f}", f"{mean - half:+.2f} to {mean + half:+.2f}"]
        line += [pairs_above(each.values()), f"{p:.3f}", f"{corrected:.3f}", by_warm_start(each)]
        lines.append(line)
    return lines


HEAD = ["", "difference", "95% interval", "pairs above", "p", "p, Holm", "by warm start"]


def comparisons(runs: Runs) -> str:
    """Compare rows by their primary numbers, with p of each and p corrected for the three."""
    lines = [["", *HEAD]]
    for name, by_row in primary(runs).items():
        pairs = [(one, other, by_row[one], by_row[other]) for one, other in COMPARISONS]
        lines += [[name, *line] for line in compared(pairs)]
    return markdown(*lines)


def by_rate_comparisons(runs: Runs) -> str:
    """Compare rows at each rate: mean difference, its 95% interval, pairs above, p."""
    rates = rates_of(runs)
    lines = [["", *map(short, rates)]]
    for one, other in COMPARISONS:
        line = [f"{one} − {other}"]
        for lr in rates:
            pairs = zip(at_rate(runs[one], lr), at_rate(runs[other], lr))
            gaps = [outcome(mine) - outcome(theirs) for mine, theirs in pairs]
            mean, half = interval(gaps)
            compared = f"{mean:+.0f} ± {half:.0f}, {pairs_above(gaps)}"
            line.append(f"{compared}, {permutation_p(gaps):.3f}")
        lines.append(line)
    return markdown(*lines)


def below(gains: list[float]) -> str:
    """Return how many runs ended below their start."""
    return str(sum(each < 0 for each in gains))


def share(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2g}%"


def early_clip(run: dict) -> float:
    """Return the percent of completions that the clip stops, mean of the first four steps."""
    return 100 * statistics.fmean(run["clip_fraction"][:4])


def width_over_spread(run: dict) -> float:
    """Return the width of the band over the spread of log s in a step, mean of the first four."""
    return WIDTHS[run["row"]] / statistics.fmean(run["policy_sequence_std"][:4])


def widest_run(points: list[tuple[float, bool, float]]) -> list[tuple[float, bool, float]]:
    """Return the most neighbours, in the order of their first number, that are all good and that
    have every rate. points: (number, whether it is good, rate)."""
    rates, best, run = {rate for *_, rate in points}, [], []
    for point in sorted(points):
        run = [*run, point] if point[1] else []
        if {rate for *_, rate in run} == rates and len(run) > len(best):
            best = run
    return best


def rule(runs: Runs, number: Callable) -> str:
    """Say in which interval of a number all bands are within 5 points of the best of their rate."""
    points = []
    for lr in rates_of(runs):
        means = {row: statistics.fmean(map(outcome, at_rate(runs[row], lr))) for row in runs}
        for row, mean in means.items():
            value = statistics.fmean(map(number, at_rate(runs[row], lr)))
            points.append((value, mean >= max(means.values()) - 5, lr))
    found = widest_run(points)
    if not found:
        return "no interval holds for all rates"
    holds = f"{found[0][0]:.2g} to {found[-1][0]:.2g} holds {len(found)} of {len(points)} cells"
    return f"{holds}, of which {sum(good for _, good, _ in points)} are within 5 points"


def bands_of(plain: Runs) -> Runs:
    """Return gspo's runs at three rates, in the order of the width of their band."""
    found = {}
    for row in WIDTHS:
        found[row] = {}
        for seed, by_rate in plain[row].items():
            found[row][seed] = {lr: by_rate[lr] for lr in BAND_RATES if lr in by_rate}
    return whole_blocks(found)


def bands(plain: Runs) -> dict[str, str]:
    """Return the tables on the width of gspo's band."""
    narrow = bands_of(plain)
    both = whole_blocks({row: plain[row] for row in ("luspo", "gspo, luspo's band")})
    three, six = primary(narrow), primary(both)
    pairs = [("luspo", "gspo, luspo's band", six), ("gspo, 1e-3", "gspo", three)]
    pairs.append(("gspo, 1e-2", "gspo, 3e-2", three))
    name = "mean over the rates, points"
    lines = compared([(one, other, of[name][one], of[name][other]) for one, other, of in pairs])
    ratio = width_over_spread
    rules = (
        f"Percent clipped: {rule(narrow, early_clip)}. ε over the spread: {rule(narrow, ratio)}."
    )

    def plainly(values: list[float]) -> str:
        return f"{statistics.fmean(values):.2g}"

    seeds = f"{len(narrow['gspo'])} seeds a row."
    return {
        "Bands. Outcome, mean and 95% interval.": f"{cells(narrow)}\n\n{seeds}",
        "Bands. Share of completions that is clipped, first four steps.": cells(
            narrow, early_clip, share
        ),
        "Bands. ε over `policy_sequence_std`, first four steps.": cells(narrow, ratio, plainly),
        "Bands. A rule.": rules,
        "`gspo` with the band of `luspo`, and `luspo`.": cells(both),
        "Three comparisons, mean over their rates.": markdown(HEAD, *lines),
    }


def tables(rows: list[dict]) -> str:
    """Return everything that docs/results.md has of these runs."""
    plain = runs_of(rows, **USUAL)
    runs = whole_blocks({row: seeds for row, seeds in plain.items() if row in MAIN})
    seeds = runs["gspo"]
    starts = ", ".join(f"{start(by_rate[RATES[0]]):.0f}" for by_rate in seeds.values())
    said = f"{len(seeds)} seeds from {min(seeds)} on, which start at {starts}%."
    found = {
        "Outcome, mean and 95% interval.": cells(runs) + "\n\n" + said,
        "Numbers of a row.": numbers(runs),
        "Comparisons, paired by seed.": comparisons(runs),
        "The same by rate: points, pairs above, p.": by_rate_comparisons(runs),
        "Runs that end below their start.": cells(runs, gain, below),
        "Held-out percent at step 4.": cells(runs, at_step_4),
        "Share that is clipped, of completions (grpo: of tokens).": cells(runs, clipped, share),
    }
    further = {
        "With `--max-grad-norm 0.03`.": runs_of(rows, **USUAL | PARTS["norm"][-1]),
        "Answers of 170 tokens.": runs_of(rows, **USUAL | PARTS["longer"][-1]),
        "Other objectives.": {row: plain[row] for row in OTHERS if row in plain},
    }
    for name, some in further.items():
        if some:
            found[f"{name} Outcome."] = (
                f"{cells(some)}\n\n{min(map(len, some.values()))} seeds a row."
            )
    if plain.keys() >= set(OTHERS):
        some = {row: plain[row] for row in (*MAIN, *OTHERS)}
        found["Numbers of every row, of the seeds that all have."] = numbers(whole_blocks(some))
    if plain.keys() >= WIDTHS.keys():
        found |= bands(plain)
    return "\n\n".join(f"**{name}**\n\n{table}" for name, table in found.items())


# ---- the command ---------------------------------------------------------------------------------


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: as the plan says")
    parser.add_argument("--out", type=Path, default=common.ROOT / "docs/runs/rates/rows.jsonl")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--write", action="store_true", help="put them into docs/results.md")
    given = parser.parse_args()
    if not given.table:
        left = missing(given)
        print(len(left), "runs are missing", file=sys.stderr, flush=True)
        common.run_each(train_once, left, given.out, given.jobs)
    found = tables(read_rows(given.out))
    print(found)
    if given.write:
        common.put("docs/results.md", "rates", found)


if __name__ == "__main__":
    main()
