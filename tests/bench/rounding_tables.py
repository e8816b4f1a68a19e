"""Writes the tables of docs/rounding.md: python tests/bench/rounding_tables.py"""

import itertools
import statistics
from statistics import fmean, median

import common
from common import markdown
from long import interval
from rounding import BANDS, FOLDER, LENGTHS

TOKENS = [f"{length} tokens" for length in LENGTHS]
COUNTS = "decisions by update: all, stopped, stopped in float32, different"


def ranged(values: list[float], form: str) -> str:
    """The mean over seeds, and in brackets the smallest and the largest."""
    mean, low, high = (f"{number(values):{form}}" for number in (fmean, min, max))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def stopped(log_s: list[float], band: tuple[float, float]) -> list[bool]:
    """Whether the clip removes a completion's gradient, with A > 0 for every second one of the four
    completions of 200 tokens, and for all windows of it."""
    windows, (low, high) = len(log_s) // 4, band
    positive = [i // windows % 2 == 0 for i in range(len(log_s))]
    return [each > high if sign else each < -low for each, sign in zip(log_s, positive)]


def by_length(rows: list[dict], dtype: str, number) -> list[str]:
    return [number([(row["float32"][str(n)], row[dtype][str(n)]) for row in rows]) for n in LENGTHS]


def sizes(pairs: list[tuple]) -> str:
    """Median movement in float32, median error, and their correlation over all seeds, with the
    smallest and largest of a seed where a seed has more than four completions."""
    exact = [abs(each) for true, _ in pairs for each in true]
    errors = [abs(b - a) for pair in pairs for a, b in zip(*pair)]
    pooled = [list(itertools.chain(*each)) for each in zip(*pairs)]
    said = f"{median(exact):.1e}, {median(errors):.1e}, {statistics.correlation(*pooled):.2f}"
    by_seed = [statistics.correlation(*pair) for pair in pairs if len(pair[0]) > 4]
    return said + (f" ({min(by_seed):.2f} to {max(by_seed):.2f})" if len(by_seed) > 1 else "")


def decisions(pairs: list[tuple]) -> str:
    """Percent of decisions that differ from float32's, band by band."""
    found = []
    for band in BANDS.values():
        both = [[stopped(log_s, band) for log_s in pair] for pair in pairs]
        differ = [100 * fmean(a != b for a, b in zip(*each)) for each in both]
        found.append(ranged(differ, ".0f"))
    return " / ".join(found)


def stops(pairs: list[tuple]) -> str:
    """Percent that are stopped, in float32 and in the other dtype, band by band."""
    found = []
    for band in BANDS.values():
        true, said = (100 * fmean(fmean(stopped(x, band)) for x in each) for each in zip(*pairs))
        found.append(f"{true:.0f}, {said:.0f}")
    return " / ".join(found)


def moves_tables(rows: list[dict], dtype: str) -> str:
    rows = [row for row in rows if dtype in row]
    head = ["weights", "rate", "update"]
    moved, decided = [[*head, *TOKENS]], [[*head, *TOKENS, "stopped, of 12 tokens"]]
    for key in dict.fromkeys((row["weights"], row["lr"], row["update"]) for row in rows):
        some = [row for row in rows if (row["weights"], row["lr"], row["update"]) == key]
        said = [key[0], f"{key[1]:.0e}".replace("e-0", "e-"), str(key[2])]
        moved.append([*said, *by_length(some, dtype, sizes)])
        line = [*said, *by_length(some, dtype, decisions)]
        decided.append([*line, by_length(some, dtype, stops)[0]])
    before = [["weights", "of a token", *TOKENS]]
    for weights in ("rounded", "stored"):
        some = [row for row in rows if row["weights"] == weights]
        seeds = {row["seed"]: row for row in some}.values()
        if seeds:
            spread = [
                [statistics.pstdev(r[f"{dtype} before"][str(n)]) for r in seeds] for n in LENGTHS
            ]
            tokens = [row[f"{dtype} token std"] for row in seeds]
            before.append([weights, *(ranged(each, ".1e") for each in (tokens, *spread))])
    titles = {
        f"{dtype}: median movement, median error, correlation": moved,
        f"{dtype}: percent of decisions that differ, {' / '.join(BANDS)}": decided,
        f"{dtype} before any update: std of log s against float32": before,
    }
    tables = [f"**{title}**\n\n{markdown(*lines)}" for title, lines in titles.items()]
    return "\n\n".join(tables)


def share(run: dict, which: int, updates: str) -> float:
    """Percent of decisions in these updates: 1 stopped, 2 stopped in float32, 3 different."""
    counts = [run[COUNTS][update] for update in updates]
    return 100 * sum(each[which] for each in counts) / sum(each[0] for each in counts)


def last(run: dict) -> float:
    return 100 * list(run["solved"].values())[-1]


def runs_table(runs: list[dict]) -> str:
    head = ["row", "dtype", "old_logprobs", "runs", "held out, %", "minus float32's, points"]
    head += ["log s std before any update", "stopped, update 1", "stopped, 2 to 4"]
    lines = [[*head, "changed, update 1", "changed, 2 to 4"]]
    for key in dict.fromkeys((run["row"], run["dtype"], run["old"]) for run in runs):
        some = [run for run in runs if (run["row"], run["dtype"], run["old"]) == key]
        reference = (key[0], "float32", "trainer")
        exact = [run for run in runs if (run["row"], run["dtype"], run["old"]) == reference]
        plain = {run["seed"]: last(run) for run in exact}
        gaps = [last(run) - plain[run["seed"]] for run in some if run["seed"] in plain]
        line = [*key, str(len(some)), ranged(list(map(last, some)), ".1f"), ""]
        if key != reference and len(gaps) > 1:
            line[-1] = "{:+.1f} ± {:.1f}".format(*interval(gaps))
        line.append(ranged([run["log s std at the first update"] for run in some], ".1e"))
        for which, updates in itertools.product((1, 3), ("1", "234")):
            line.append(ranged([share(run, which, updates) for run in some], ".1f"))
        lines.append(line)
    return markdown(*lines)


def main() -> None:
    moves = common.read_rows(FOLDER / "moves.jsonl")
    parts = [moves_tables(moves, dtype) for dtype in ("bfloat16", "float16", "tf32")]
    runs = {part: common.read_rows(FOLDER / f"{part}.jsonl") for part in ("tiny", "real", "vllm")}
    runs["first round of real"] = [run for run in runs["real"] if "steps" not in run]
    runs["real"] = [run for run in runs["real"] if "steps" in run]
    for run in runs["first round of real"]:
        run["row"] += f" at {run['lr']:g}, {run['weights']}"
    for part, rows in runs.items():
        parts.append(f"**{part}**\n\n{runs_table(rows)}")
    text = "\n\n".join(parts)
    common.put("docs/rounding.md", "tables", text)
    print(text)


if __name__ == "__main__":
    main()
