"""Draw the pictures of the README and of docs/ as SVG, from numbers that this program measures.

    python tests/bench/bench_pictures.py                 # ratios.svg and length.svg: half a minute
    python tests/bench/bench_pictures.py --run runs/gspo-1 runs/gspo-2 --real runs/real-1
    python tests/bench/bench_pictures.py --rates docs/runs/rates/rows.jsonl

A few steps of the built-in policy are trained on one core, on chains of 1 to 8 operations instead
of 2 to 4: so completions have lengths from 8 to 50. curve.svg and real.svg need finished runs, of
the built-in policy and of a pretrained model. A curve is the mean of runs. rates.svg and bands.svg
need the rows that long.py writes. clip.svg and weights.svg are edited by hand.

A picture has a light and a dark look, page included, and letters that a phone can show. Colours are
distinct for colour-blind readers, and a word, a mark or a dash repeats the meaning of each."""

import html
import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import common
import long
import rollout
import train
from support import tasks
from support.report import Story, points_of, read_story

OPERATIONS = (1, 8)  # of the chains: fewest and most
MOST_TOKENS = 80  # of a completion. One of 8 operations has 50
STEPS = 12  # of training
GRPO_BAND = (0.8, 1.2)
GSPO_BAND = (1 - 3e-4, 1 + 4e-4)


# ---- SVG -----------------------------------------------------------------------------------------

PERCENT = {0: "0%", 0.25: "25%", 0.5: "50%", 0.75: "75%", 1: "100%"}  # labels of an axis
WIDTH = 480  # shown 640 wide: letters of 14 are 19 there, and 10 on a phone
STYLE = """
svg { --page: #ffffff; --text: #1f2328; --dim: #57606a; --line: #d0d7de;
  --c0: #0067b1; --c1: #b84a00; --c2: #00775a; --c3: #9a3a75; --c4: #6a5f00;
  font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 14px }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --text: #e6edf3; --dim: #9aa4af;
  --line: #373e47; --c0: #58b0f0; --c1: #f4a25c; --c2: #3fcb9f; --c3: #e795c8;
  --c4: #d9c94a } }
.page { fill: var(--page) } text { fill: var(--text) } .dim { fill: var(--dim) }
.title { font-size: 16px; font-weight: 600 } .bold { font-weight: 600 }
.axis { stroke: var(--line); fill: none }
.color0 { --c: var(--c0) } .color1 { --c: var(--c1) }
.color2 { --c: var(--c2) } .color3 { --c: var(--c3) }
.color4 { --c: var(--c4) }
.curve { stroke: var(--c); stroke-width: 2.2; stroke-linejoin: round; fill: none }
.thin { stroke: var(--c); stroke-width: 1.2; fill: none; opacity: 0.6 }
.edge { stroke: var(--c); stroke-width: 1.4; stroke-dasharray: 5 4; fill: none }
.band, .area { fill: var(--c); opacity: 0.16 } .dot { fill: var(--c); stroke: var(--page) }
.word { fill: var(--c) }
.null { stroke: var(--dim); stroke-width: 1.6; stroke-dasharray: 2 3; fill: none }
"""


def tag(name: str, *inside: str, **attributes) -> str:
    """Return an element around HTML. Attributes are written class_, stroke_width."""
    words = [name]
    for key, value in attributes.items():
        text = f"{value:.1f}" if isinstance(value, float) else html.escape(str(value))
        words.append(f'{key.strip("_").replace("_", "-")}="{text}"')
    return f"<{' '.join(words)}>{''.join(inside)}</{name}>"


def svg(title: str, described: str, height: int, drawn: list[str]) -> str:
    """Return a whole file: title and description for screen readers, the page, the drawing."""
    inside = [
        tag("title", html.escape(title), id="title"),
        tag("desc", html.escape(described), id="described"),
        tag("style", STYLE),
        box("page", 0, 0, WIDTH, height),
        words(16, 26, title, "title"),
        *drawn,
    ]
    opening = {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "width": 640}
    opening |= {"aria_labelledby": "title described", "viewBox": f"0 0 {WIDTH} {height}"}
    return tag("svg", "\n".join(inside), **opening) + "\n"


def words(x: float, y: float, said: str, look: str = "", anchor: str = "start") -> str:
    return tag("text", html.escape(said), x=float(x), y=float(y), class_=look, text_anchor=anchor)


def box(look: str, x: float, y: float, width: float, height: float, rx: float = 0) -> str:
    size = {"width": float(width), "height": float(height), "rx": float(rx)}
    return tag("rect", class_=look, x=float(x), y=float(y), **size)


class Plot(NamedTuple):
    """A chart's axes, and the way from values to places."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float
    right: float
    top: float
    bottom: float

    def x(self, value: float) -> float:
        first, last = self.x_range
        return self.left + (value - first) / (last - first) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the place of a value. Values beyond the axis lie on its ends."""
        low, high = self.y_range
        share = min(max((value - low) / (high - low), 0), 1)
        return self.bottom - share * (self.bottom - self.top)

    def line(self, points: list[tuple[float, float]], look: str) -> str:
        places = [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points]
        return f'<path class="{look}" d="M{"L".join(places)}"/>'

    def ticks_of_y(self, labels: dict[float, str]) -> Iterator[str]:
        """Draw lines across, each with its label."""
        for value, label in labels.items():
            yield self.line([(x, value) for x in self.x_range], "axis")
            yield words(self.left - 6, self.y(value) + 4, label, anchor="end")

    def ticks_of_x(self, labels: dict[float, str]) -> Iterator[str]:
        for value, label in labels.items():
            yield words(self.x(value), self.bottom + 16, label, anchor="middle")


def some_of(values: list[float]) -> dict[float, str]:
    """Return labels of at most seven values of an axis."""
    return {value: f"{value:g}" for value in values[:: math.ceil(len(values) / 7)]}


def band(plot: Plot, low: float, high: float, look: str) -> str:
    """Return a strip between two values."""
    top, bottom = plot.y(high), plot.y(low)
    return box(look, plot.left, top, plot.right - plot.left, bottom - top)


def across(plot: Plot, y: float, look: str) -> str:
    return plot.line([(x, y) for x in plot.x_range], look)


def marks(plot: Plot, points: list[tuple[float, float]], color: int, size: float = 8) -> list[str]:
    """Return dots, or squares for every other colour."""
    places = [(plot.x(x) - size / 2, plot.y(y) - size / 2) for x, y in points]
    rx = 0 if color % 2 else size / 2
    return [box(f"dot color{color}", *place, size, size, rx) for place in places]


# ---- measured ------------------------------------------------------------------------------------


class Completion(NamedTuple):
    """A completion, and the change of its log-probs by the updates of one step."""

    tokens: list[str]
    log_ratios: list[float]  # per token: log pi_theta after the updates - before them

    @property
    def log_ratio(self) -> float:
        """log s, the mean."""
        return statistics.fmean(self.log_ratios)

    @property
    def furthest(self) -> float:
        """|log r| of the token whose ratio is furthest from 1."""
        return max(map(abs, self.log_ratios))


def compare_steps(words: list[str]) -> list[Completion]:
    """Train with these flags. Return the completions of all steps, each scored before the updates
    of its step and after them."""
    found, before = [], []
    plan_updates, step_metrics = train.plan_updates, train.measure.step_metrics

    def plan(run, samples, *others):
        before.append(score(run, samples))
        return plan_updates(run, samples, *others)

    def measure(run, batch, *others):
        log_ratios = score(run, batch.rollout) - before.pop()
        for i, length in enumerate(batch.rollout.lengths.tolist()):
            ids = batch.rollout.completions[i, :length].tolist()
            tokens = [run.tokenizer.decode([id]) for id in ids]
            found.append(Completion(tokens, log_ratios[i, :length].tolist()))
        return step_metrics(run, batch, *others)

    with (
        mock.patch.object(train, "plan_updates", plan),
        mock.patch.object(train.measure, "step_metrics", measure),
    ):
        assert train.main(words) == 0
    return found


@torch.no_grad()
def score(run: train.Run, samples: rollout.Rollout) -> torch.Tensor:
    """Return log-probs (N, T) under the present policy."""
    return rollout.completion_logprobs(run.models.policy, samples, run.config.temperature)[0]


# ---- curve.svg and real.svg ----------------------------------------------------------------------


def curve_picture(stories: list[Story]) -> str:
    """Draw held-out accuracy by step: the mean of an algorithm's runs, with bars from the lowest
    seed to the highest."""
    flags = stories[0].flags
    curves = [dict(points_of(story, "eval_solved")) for story in stories]
    solved = {step: [curve[step] for curve in curves] for step in curves[0]}
    steps = list(solved)
    plot = Plot((0, steps[-1]), (0, 1), left=58, right=368, top=62, bottom=262)
    drawn = [*plot.ticks_of_y(PERCENT)]
    drawn += plot.ticks_of_x(some_of(steps))
    drawn.append(words(368, 294, "training step", "dim", "end"))
    model = Path(flags["model"]).name.removesuffix("-Instruct")
    model = "the built-in model" if model == "tiny" else model
    about = f"{model} on {flags['data'] or flags['task']}, greedy, mean of {len(stories)} seeds"
    drawn.append(words(16, 48, about, "dim"))
    points = [(step, statistics.fmean(those)) for step, those in solved.items()]
    drawn.append(plot.line(points, "curve color0"))
    drawn += marks(plot, points, 0)
    for step, those in solved.items():
        drawn.append(plot.line([(step, min(those)), (step, max(those))], "thin color0"))
    first, last = points[0][1], points[-1][1]
    label = f"{flags['algo']} {last:.0%}"
    drawn.append(words(380, plot.y(last) + 5, label, "word bold color0"))
    drawn.append(words(16, 316, "bars: from the lowest to the highest seed", "dim"))
    told = f"{flags['algo']} goes from {first:.1%} to {last:.1%} in {steps[-1]} steps"
    return svg("Held-out problems solved", f"{about}: {told}.", 330, drawn)


# ---- rates.svg and bands.svg ---------------------------------------------------------------------

RATES_ROWS = {  # row of long.py -> its line, and the mark in its label
    "gspo": ("curve", "●"),
    "grpo": ("curve", "■"),
    "gspo, 0.2": ("edge", "●"),
    "luspo": ("curve", "■"),
    "gspo, 3e-3": ("edge", "●"),
}


def apart(places: list[float], gap: float) -> list[float]:
    """Return the places of labels, moved down and up until they are a gap apart."""
    found = list(places)
    order = sorted(range(len(places)), key=lambda i: places[i])
    for _ in range(100):
        for upper, lower in zip(order, order[1:]):
            missing = max(0.0, gap - (found[lower] - found[upper]))
            found[upper] -= missing / 2
            found[lower] += missing / 2
    return found


class Line(NamedTuple):
    look: str
    label: str  # with its mark
    runs: dict[float, list[dict]]  # place on the axis -> runs of long.py


def outcomes_picture(title: str, about: str, axis: str, ticks: dict, lines: list[Line]) -> str:
    """Draw the outcome of runs: a line is the mean over seeds, a bar its 95% interval."""
    places = list(ticks)
    plot = Plot((places[0] - 0.1, places[-1] + 0.1), (0, 1), 58, 356, 66, 306)
    drawn = [*plot.ticks_of_y(PERCENT)]
    drawn += plot.ticks_of_x(ticks)
    before = statistics.fmean(map(long.start, lines[0].runs[places[0]])) / 100
    drawn.append(across(plot, before, "null"))
    drawn.append(words(62, plot.y(before) + 16, "start", "dim"))
    means, told = [], []
    for color, line in enumerate(lines):
        aside = (color - len(lines) // 2) * 0.04  # bars of several rows stand side by side
        points = []
        for place, some in line.runs.items():
            mean, half = long.interval([long.outcome(run) / 100 for run in some])
            points.append((place + aside, mean))
            bar = [(points[-1][0], mean - half), (points[-1][0], mean + half)]
            drawn.append(plot.line(bar, f"thin color{color}"))
        means.append(points)
        told.append(f"{line.label} from {points[0][1]:.0%} to {points[-1][1]:.0%}")
    names = apart([plot.y(points[-1][1]) + 5 for points in means], gap=18)
    for color, (line, points) in enumerate(zip(lines, means)):
        drawn.append(plot.line(points, f"{line.look} color{color}"))
        drawn += marks(plot, points, color)
        drawn.append(words(366, names[color], line.label, f"word bold color{color}"))
    drawn.append(words(16, 48, about, "dim"))
    drawn.append(words(356, 342, axis, "dim", "end"))
    drawn.append(words(16, 342, "bars: 95% interval of the mean", "dim"))
    return svg(title, f"{about}: {'; '.join(told)}.", 356, drawn)


def rates_picture(rows: list[dict]) -> str:
    """Draw the outcome by learning rate, a line a row of the experiment."""
    runs = long.of_rows(long.runs_with(rows, ""), RATES_ROWS)
    rates, lines = long.values_of(runs, "lr"), []
    for row, (look, mark) in RATES_ROWS.items():
        by_rate = {math.log(lr): long.where(runs, row=row, lr=lr) for lr in rates}
        lines.append(Line(look, f"{mark} {row}", by_rate))
    ticks = {math.log(lr): long.short(lr) for lr in rates}
    seeds = len(long.values_of(runs, "seed"))
    about = f"16 updates a rollout, answers of 80 tokens, {seeds} seeds"
    title = "Held-out problems solved, by learning rate"
    return outcomes_picture(title, about, "learning rate", ticks, lines)


def bands_picture(rows: list[dict]) -> str:
    """Draw gspo's outcome by the width of its band, a line a learning rate."""
    runs = long.bands_of(long.runs_with(rows, ""))
    # the label of luspo's band has no room beside that of 3e-3
    shown = [row for row in long.WIDTHS if row != "gspo, luspo's band"]
    places = [math.log10(long.WIDTHS[row]) for row in shown]
    labels = [row.removeprefix("gspo").strip(", ") or "paper" for row in shown]
    lines = []
    for lr, mark in zip(long.BAND_RATES, "●■●"):
        by_width = {place: long.where(runs, row=row, lr=lr) for place, row in zip(places, shown)}
        lines.append(Line("curve", f"{mark} lr {long.short(lr)}", by_width))
    seeds = len(long.values_of(runs, "seed"))
    about = f"gspo, 16 updates a rollout, answers of 80 tokens, {seeds} seeds"
    title = "Held-out problems solved, by GSPO's ε"
    return outcomes_picture(title, about, "ε", dict(zip(places, labels)), lines)


# ---- ratios.svg and length.svg -------------------------------------------------------------------


def ratios_picture(shown: Completion) -> str:
    """Draw each token's ratio in GRPO's band, and again enlarged, with s in GSPO's band."""
    ratios = [math.exp(value) for value in shown.log_ratios]
    s, places = math.exp(shown.log_ratio), (-1, len(ratios))
    near = max(1.5 * abs(s - 1), 1e-3)
    wide = Plot(places, (0.75, 1.25), left=70, right=462, top=66, bottom=176)
    close = Plot(places, (1 - near, 1 + near), left=70, right=462, top=222, bottom=332)
    drawn = [words(16, 52, "GRPO's band of each token's r: 0.8 … 1.2", "bold")]
    drawn += wide.ticks_of_y({value: f"{value:g}" for value in (0.8, 1, 1.2)})
    drawn.append(band(wide, *GRPO_BAND, "band color0"))
    drawn.append(words(16, 208, "GSPO's band of s: 0.9997 … 1.0004 (close up)", "bold"))
    ticks = (1 - near / 1.5, 1, 1 + near / 1.5)
    drawn += close.ticks_of_y({value: f"{value:.4f}" for value in ticks})
    drawn.append(band(close, *GSPO_BAND, "band color1"))
    for plot in (wide, close):
        for i, ratio in enumerate(ratios):
            drawn.append(plot.line([(i, 1), (i, ratio)], "thin color0"))
            if plot.y_range[0] <= ratio <= plot.y_range[1]:
                drawn += marks(plot, [(i, ratio)], 0, size=7)
        drawn.append(across(plot, s, "curve color1"))
    for i, token in enumerate(shown.tokens):
        if i == len(ratios) - 1 and len(token) > 1:
            drawn.append(words(close.x(i) - 8, 352, "end", "dim"))
        else:
            drawn.append(words(close.x(i), 352, token, "dim", anchor="middle"))
    drawn.append(words(16, 380, "● r of a token", "word bold color0"))
    drawn.append(words(150, 380, f"▬ s = {s:.4f}, geometric mean", "word bold color1"))
    out = sum(not GRPO_BAND[0] <= ratio <= GRPO_BAND[1] for ratio in ratios)
    inside = "inside" if GSPO_BAND[0] <= s <= GSPO_BAND[1] else "outside"
    described = (
        f"{len(ratios)} tokens of one completion, chosen because its ratios vary, after the four "
        f"updates of a step: ratios from "
        f"{min(ratios):.3f} to {max(ratios):.3f}, {out} of them outside GRPO's band; the ratio of "
        f"the completion is {s:.5f}, {inside} GSPO's band."
    )
    return svg("Token ratios, and the ratio of their completion", described, 394, drawn)


def by_length(found: list[Completion], least: int = 50) -> dict[int, list[Completion]]:
    """Group completions by length, without lengths that fewer than `least` completions have."""
    lengths: dict[int, list[Completion]] = {}
    for one in found:
        lengths.setdefault(len(one.tokens), []).append(one)
    return {length: lengths[length] for length in sorted(lengths) if len(lengths[length]) >= least}


def furthest_of_random_tokens(groups: dict[int, list[Completion]], length: int) -> float:
    """Return the median of max |log ratio| over `length` tokens that are sampled from all
    completions: a token's quantile 0.5^(1 / length). A maximum of more numbers is larger."""
    tokens = [abs(x) for same in groups.values() for one in same for x in one.log_ratios]
    return float(torch.tensor(tokens, dtype=torch.float64).quantile(0.5 ** (1 / length)))


def length_picture(groups: dict[int, list[Completion]]) -> str:
    """Draw the distance of ratios from 1 by the length of the completion, on a log axis."""
    last = max(groups)
    plot = Plot((0, last + 4), (-4, 0), left=70, right=462, top=62, bottom=262)
    drawn = [*plot.ticks_of_y({-power: f"{10**-power:.{power}f}" for power in range(5)})]
    drawn += plot.ticks_of_x(some_of(list(groups)))
    drawn.append(words(462, 294, "tokens of the completion", "dim", "end"))
    drawn.append(words(16, 48, "|log ratio| after a step; middle 80% shaded", "dim"))
    told = []
    for color, name in enumerate(("furthest", "log_ratio")):
        low, middle, high = [], [], []
        for length, same in groups.items():
            values = [abs(getattr(one, name)) for one in same]
            cuts = statistics.quantiles(values, n=10, method="inclusive")
            for curve, cut in ((low, cuts[0]), (middle, cuts[4]), (high, cuts[8])):
                curve.append((length, math.log10(cut)))
        drawn.append(plot.line(low + high[::-1], f"area color{color}"))
        drawn.append(plot.line(middle, f"curve color{color}"))
        drawn += marks(plot, middle, color)
        told.append([10 ** middle[i][1] for i in (0, -1)])
    null = [(length, furthest_of_random_tokens(groups, length)) for length in groups]
    drawn.append(plot.line([(x, math.log10(y)) for x, y in null], "null"))
    for color, clip, said in ((0, 0.2, "GRPO's clip, 0.2"), (1, 4e-4, "GSPO's clip, 0.0004")):
        drawn.append(across(plot, math.log10(clip), f"edge color{color}"))
        drawn.append(words(76, plot.y(math.log10(clip)) + 16, said, f"word color{color}"))
    drawn.append(words(16, 318, "● furthest token, median", "word bold color0"))
    drawn.append(words(290, 318, "■ s, median", "word bold color1"))
    drawn.append(
        words(16, 340, "┄ furthest of as many tokens, sampled from all completions", "dim")
    )
    described = (
        f"From {min(groups)} to {last} tokens, medians: the furthest token goes from "
        f"{told[0][0]:.3f} to {told[0][1]:.3f}, the furthest of as many random tokens from "
        f"{null[0][1]:.3f} to {null[-1][1]:.3f}, s from {told[1][0]:.4f} to {told[1][1]:.4f}."
    )
    return svg("How far from 1 ratios are, by length", described, 354, drawn)


# ---- the command ---------------------------------------------------------------------------------


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--run", nargs="+", type=Path, help="folders, for curve.svg")
    parser.add_argument("--real", nargs="+", type=Path, help="folders, for real.svg")
    parser.add_argument("--rates", help="rows of long.py, for rates.svg and bands.svg")
    parser.add_argument("--out", type=Path, default=common.ROOT / "docs/pictures")
    given = parser.parse_args()
    drawn = {}
    if given.rates:
        rows = common.read_rows(given.rates)
        drawn["rates"], drawn["bands"] = rates_picture(rows), bands_picture(rows)
    if given.run:
        drawn["curve"] = curve_picture([read_story(folder) for folder in given.run])
    if given.real:
        drawn["real"] = curve_picture([read_story(folder) for folder in given.real])
    if not drawn:
        torch.set_num_threads(1)
        flags = f"--steps {STEPS} --max-new-tokens {MOST_TOKENS} --device cpu "
        flags += "--eval-prompts 8 --eval-samples 0 --eval-every 0"
        with (
            mock.patch.object(tasks, "ARITHMETIC_OPERATIONS", OPERATIONS),
            tempfile.TemporaryDirectory() as folder,
        ):
            found = compare_steps([*flags.split(), "--runs", folder])
        # the completion with the most ratios that differ visibly from 1, and all fit on the axis
        some = [one for one in found if 16 <= len(one.tokens) <= 24 and one.furthest < 0.22]
        varied = max(some, key=lambda one: sum(abs(each) > 0.01 for each in one.log_ratios))
        drawn = {"ratios": ratios_picture(varied), "length": length_picture(by_length(found))}
    given.out.mkdir(exist_ok=True)
    for name, text in drawn.items():
        (given.out / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"{name}.svg, {len(text.encode()) / 1000:.1f} KB")


if __name__ == "__main__":
    main()
