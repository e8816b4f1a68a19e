"""Prints the tables of docs/rounding.md: python tests/bench/rounding_tables.py"""

import itertools
import statistics

import common
from long import interval
from rounding import BANDS, CASES, FOLDER, LENGTHS, ROWS

Quantities = dict[str, float]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def stopped(log_s: float, positive: bool, band: tuple[float, float]) -> bool:
    """Whether GSPO's clip removes the gradient of a completion. log s, ratio - 1 to first order."""
    low, high = band
    return log_s > high if positive else log_s < -low


def signs(length: int, count: int) -> list[bool]:
    """A > 0 for every other completion of 200 tokens, and for all windows of it."""
    windows = 200 // length
    return [i // windows % 2 == 0 for i in range(count)]


def compare(row: dict, name: str, length: int) -> Quantities:
    exact, rounded = row["float32"][str(length)], row[name][str(length)]
    gaps = [abs(b - a) for a, b in zip(exact, rounded)]
    found = {
        "move": statistics.median(map(abs, exact)),
        "move 90%": quantile(list(map(abs, exact)), 0.9),
        "error": statistics.median(gaps),
        "error 90%": quantile(gaps, 0.9),
        "r": statistics.correlation(exact, rounded),
    }
    positive = signs(length, len(exact))
    for band, limits in BANDS.items():
        right = [stopped(each, sign, limits) for each, sign in zip(exact, positive)]
        said = [stopped(each, sign, limits) for each, sign in zip(rounded, positive)]
        found[f"stopped {band}"] = 100 * statistics.fmean(right)
        found[f"differ {band}"] = 100 * statistics.fmean(a != b for a, b in zip(right, said))
    return found


def ranged(values: list[float], form: str = ".1e") -> str:
    """The mean over seeds, and the smallest and the largest."""
    mean, low, high = (
        f"{each:{form}}" for each in (statistics.fmean(values), min(values), max(values))
    )
    return f"{mean} ({low} to {high})"


def moves_tables(rows: list[dict]) -> None:
    conditions = list(dict.fromkeys((row["weights"], row["lr"], row["update"]) for row in rows))
    head = ["weights", "lr", "update", "tokens", "movement", "error", "correlation", *BANDS]
    lines = {"bfloat16": [head], "float16": [head], "tf32": [head]}
    for condition, length, name in itertools.product(conditions, LENGTHS, lines):
        weights, lr, update = condition
        some = [row for row in rows if (row["weights"], row["lr"], row["update"]) == condition]
        some = [row for row in some if name in row]
        if not some:
            continue
        found = [compare(row, name, length) for row in some]
        line = [weights, f"{lr:.0e}", str(update), str(length)]
        for quantity in ("move", "error"):
            middle, high = (
                statistics.fmean(each[key] for each in found)
                for key in (quantity, f"{quantity} 90%")
            )
            line.append(f"{middle:.1e}, {high:.1e}")
        line.append(ranged([each["r"] for each in found], ".2f"))
        for band in BANDS:
            line.append(ranged([each[f"differ {band}"] for each in found], ".0f"))
        lines[name].append(line)
    for name, table in lines.items():
        print(f"\n**{name}**\n\n{common.markdown(*table)}")
    print("\n**before any update, against float32**\n")
    lines = [
        ["weights", "dtype", "token std", *[f"log s std, {n} tokens" for n in LENGTHS], *BANDS]
    ]
    for weights, name in itertools.product(("rounded", "stored"), ("bfloat16", "float16", "tf32")):
        named = [row for row in rows if row["weights"] == weights and f"{name} before" in row]
        some = {row["seed"]: row for row in named}.values()
        if not some:
            continue
        line = [weights, name, ranged([row[f"{name} token std"] for row in some])]
        for length in LENGTHS:
            line.append(ranged([statistics.pstdev(r[f"{name} before"][str(length)]) for r in some]))
        for band in BANDS.values():
            outside = [
                100
                * statistics.fmean(not -band[0] <= x <= band[1] for x in r[f"{name} before"]["64"])
                for r in some
            ]
            line.append(ranged(outside, ".0f"))
        lines.append(line)
    print(common.markdown(*lines))


COUNTS = "decisions by update: all, stopped, stopped in float32, different"


def percent(rows: list[dict], updates: str, which: int) -> list[float]:
    """For each run, the percent of decisions (1: stopped, 3: different) in these updates."""
    return [
        100 * sum(row[COUNTS][u][which] for u in updates) / sum(row[COUNTS][u][0] for u in updates)
        for row in rows
    ]


def runs_table(rows: list[dict]) -> None:
    head = ["row", "dtype", "old_logprobs", "seeds", "held out, %", "minus float32's"]
    head += ["log s std before updates", "stopped at update 1, %", "at 2 to 4, %"]
    lines = [[*head, "changed at update 1, %", "at 2 to 4, %"]]

    def last(row):
        return 100 * list(row["solved"].values())[-1]

    for name, (dtype, old) in itertools.product(ROWS, CASES):
        some = [r for r in rows if (r["row"], r["dtype"], r["old"]) == (name, dtype, old)]
        if not some:
            continue
        plain = {
            r["seed"]: r
            for r in rows
            if r["row"] == name and r["dtype"] == "float32" and r["old"] == "trainer"
        }
        gaps = [last(r) - last(plain[r["seed"]]) for r in some if r["seed"] in plain]
        line = [name, dtype, old, str(len(some))]
        for values, form in ((list(map(last, some)), ".1f"), (gaps, "+.1f")):
            if len(values) > 1 and (dtype, old) != CASES[0] or form == ".1f" and len(values) > 1:
                mean, half = interval(values)
                line.append(f"{mean:{form}} ± {half:.1f}")
            else:
                line.append(f"{values[0]:{form}}" if values else "")
        line.append(f"{statistics.fmean(r['log s std at the first update'] for r in some):.1e}")
        for which in (1, 3):
            for updates in ("1", "234"):
                line.append(ranged(percent(some, updates, which), ".1f"))
        lines.append(line)
    print(common.markdown(*lines))


def main() -> None:
    moves_tables(common.read_rows(FOLDER / "moves.jsonl"))
    for part in ("tiny", "real"):
        print(f"\n**{part}**\n")
        runs_table(common.read_rows(FOLDER / f"{part}.jsonl"))


if __name__ == "__main__":
    main()
