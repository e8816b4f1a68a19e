"""Draws the README's pictures, from numbers that it measures itself, as SVG files in .github/.

    python tests/bench_pictures.py --run runs/gspo-1 --real runs/gspo-0 runs/gspo-1 runs/grpo-0
    python tests/bench_pictures.py --only loop slots

A few steps of the built-in policy are trained on one CPU core, on chains of 1 to 8 operations
instead of 2 to 4: so completions have lengths from 8 to 50. The first time that takes its warm
start, a minute. Only curve.svg and real.svg need finished runs, of the built-in policy and of a
pretrained model: --run and --real name their folders. Where they are of several algorithms, the
runs of one are drawn as their mean.

A picture has a light and a dark look of its own, page included. Colours are told apart by
colour-blind readers, too, and none of them says what no word, mark or dash says.
"""

import argparse
import contextlib
import dataclasses
import html
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import rewards  # noqa: E402
import rollout  # noqa: E402
import train  # noqa: E402
from train import tag  # noqa: E402

OPERATIONS = (1, 8)  # of the chains: from fewest to most
MOST_TOKENS = 80  # of a completion; one of 8 operations has 50
STEPS = 12  # of training
SLOTS = 6  # of the picture of slots
SAMPLED = 24  # completions for it, each of a prompt of its own
LEAST_COMPLETIONS = 50  # of one length, for a place in the picture of lengths
GRPO_BAND = (0.8, 1.2)
GSPO_BAND = (1 - 3e-4, 1 + 4e-4)


# ------------------------------------------------------------------------------ SVG

WIDTH = 640
STYLE = """
svg { --page: #ffffff; --text: #1f2328; --dim: #57606a; --line: #d0d7de; --card: #f3f5f7;
  --c0: #0067b1; --c1: #b84a00; --c2: #00775a; --c3: #9a3a75;
  font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --text: #e6edf3; --dim: #9aa4af;
  --line: #373e47; --card: #1b222b; --c0: #58b0f0; --c1: #f4a25c; --c2: #3fcb9f; --c3: #e795c8 } }
.page { fill: var(--page) } text { fill: var(--text) } .dim { fill: var(--dim) }
.title { font-size: 16px; font-weight: 600 } .small { font-size: 12px }
.mono { font: 12px ui-monospace, "DejaVu Sans Mono", monospace }
.card { fill: var(--card); stroke: var(--line) } .axis { stroke: var(--line); fill: none }
.color0 { --c: var(--c0) } .color1 { --c: var(--c1) }
.color2 { --c: var(--c2) } .color3 { --c: var(--c3) }
.curve { stroke: var(--c); stroke-width: 2.2; stroke-linejoin: round; fill: none }
.thin { stroke: var(--c); stroke-width: 1.2; fill: none; opacity: 0.6 }
.edge { stroke: var(--c); stroke-width: 1.4; stroke-dasharray: 5 4; fill: none }
.band, .area { fill: var(--c); opacity: 0.16 } .mark { fill: var(--c); stroke: var(--page) }
text.word { fill: var(--c) } .bold { font-weight: 600 }
.bar { fill: var(--c); stroke: var(--page) } text.on { fill: var(--page); font-size: 11px }
.policy { fill: var(--card); stroke: var(--c); stroke-width: 2 }
.flow { stroke: var(--dim); stroke-width: 1.6; fill: none } .head { fill: var(--dim) }
"""


def words(x: float, y: float, said: str, *, look: str = "", anchor: str = "start") -> str:
    return tag("text", html.escape(said), x=float(x), y=float(y), class_=look, text_anchor=anchor)


def path(look: str, *places: tuple[float, float], closed: bool = False) -> str:
    """A line through places (x, y)."""
    moves = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    end = "Z" if closed else ""
    return tag("path", class_=look, d=f"M{moves}{end}")


def box(look: str, x: float, y: float, width: float, height: float, round_: float = 0) -> str:
    size = {"width": float(width), "height": float(height), "rx": float(round_)}
    return tag("rect", class_=look, x=float(x), y=float(y), **size)


def dot(look: str, x: float, y: float, radius: float = 3.5) -> str:
    return tag("circle", class_=look, cx=float(x), cy=float(y), r=radius)


def square(look: str, x: float, y: float) -> str:
    return box(look, x - 3.5, y - 3.5, 7, 7)


def svg(title: str, described: str, height: int, drawn: list[str]) -> str:
    """A whole file: title and description for those who listen, the page, and what is drawn."""
    inside = [
        tag("title", html.escape(title), id="title"),
        tag("desc", html.escape(described), id="described"),
        tag("style", STYLE),
        box("page", 0, 0, WIDTH, height, 8),
        words(20, 30, title, look="title"),
        *drawn,
    ]
    opening = {"xmlns": "http://www.w3.org/2000/svg", "role": "img"}
    opening |= {"aria_labelledby": "title described", "viewBox": f"0 0 {WIDTH} {height}"}
    return tag("svg", "\n".join(inside), width=WIDTH, height=height, **opening) + "\n"


@dataclasses.dataclass
class Axes:
    """From a value on each axis to a place in the picture."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float
    right: float
    top: float
    bottom: float
    log_y: bool = False

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Values beyond the axis lie on its ends."""
        low, high = self.y_range
        value = min(max(value, low), high)
        if self.log_y:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def place(self, x: float, y: float) -> tuple[float, float]:
        return self.x(x), self.y(y)

    def y_ticks(self, ticks: dict[float, str]) -> list[str]:
        """Lines across, each with its label."""
        drawn = []
        for value, label in ticks.items():
            y = self.y(value)
            drawn.append(path("axis", (self.left, y), (self.right, y)))
            drawn.append(words(self.left - 8, y + 4, label, look="dim small", anchor="end"))
        return drawn

    def x_ticks(self, values: list[float], name: str) -> list[str]:
        """Numbers below, and at the end of their line what they count."""
        drawn = []
        for value in values:
            place = (self.x(value), self.bottom + 18)
            drawn.append(words(*place, f"{value:g}", look="dim small", anchor="middle"))
        drawn.append(words(self.right, self.bottom + 36, name, look="dim small", anchor="end"))
        return drawn

    def across(self, look: str, y: float) -> str:
        return path(look, (self.left, self.y(y)), (self.right, self.y(y)))

    def band(self, color: str, low: float, high: float) -> list[str]:
        """A strip between two values, with dashed edges."""
        top, bottom = self.y(high), self.y(low)
        strip = box(f"band {color}", self.left, top, self.right - self.left, bottom - top)
        return [strip, self.across(f"edge {color}", low), self.across(f"edge {color}", high)]


# ------------------------------------------------------------------------------ measured


@dataclasses.dataclass
class Completion:
    """What the updates of one step did to a completion that was sampled before them."""

    tokens: list[str]
    log_ratios: list[float]  # a token each: log pi_theta after the updates - before them

    @property
    def log_ratio(self) -> float:
        """log s, the mean."""
        return statistics.fmean(self.log_ratios)

    @property
    def furthest(self) -> float:
        """|log r| of the token whose ratio is furthest from 1."""
        return max(map(abs, self.log_ratios))


@contextlib.contextmanager
def short_run(steps: int = STEPS) -> Iterator[train.Run]:
    """GSPO with its defaults, on longer and shorter chains than those of the built-in task."""
    usual = rewards.ARITHMETIC_OPERATIONS
    rewards.ARITHMETIC_OPERATIONS = OPERATIONS
    flags = f"--steps {steps} --max-new-tokens {MOST_TOKENS} --device cpu "
    flags += "--eval-prompts 8 --eval-samples 0"  # the evaluation before is not read
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = train.resolve(train.parse_flags([*flags.split(), "--runs", folder]))
            run = train.start(config, train.Ranks())
            with run.lock:
                yield run
    finally:
        rewards.ARITHMETIC_OPERATIONS = usual


def train_and_compare(run: train.Run) -> list[list[Completion]]:
    """For every step its completions, scored before its updates and after them."""
    steps = []
    for step in range(1, run.config.steps + 1):
        train.snapshot(run, step)
        batch = train.collect(run, step)
        train.freeze(run, batch)
        train.compare(run, batch)
        before = score(run, batch.samples)
        train.improve(run, batch)
        after = score(run, batch.samples)
        steps.append(completions(batch.samples, after - before, run.tokenizer))
    return steps


@torch.no_grad()
def score(run: train.Run, samples: rollout.Rollout) -> torch.Tensor:
    """Log-probs (N, T) under the policy as it is now."""
    logprobs, _ = rollout.completion_logprobs(
        run.policy, samples, temperature=run.config.temperature
    )
    return logprobs


def completions(samples: rollout.Rollout, log_ratios, tokenizer) -> list[Completion]:
    """The rows of a rollout, without their padding."""
    found = []
    for i, length in enumerate(samples.lengths.tolist()):
        ids = samples.completions[i, :length].tolist()
        found.append(
            Completion([tokenizer.decode([id]) for id in ids], log_ratios[i, :length].tolist())
        )
    return found


@dataclasses.dataclass
class Stay:
    """A completion in a slot, from one decode step up to another."""

    slot: int
    sample: int
    begin: int
    end: int  # the first decode step without it
    moved: bool = False  # it came from another slot


def watch_slots(run: train.Run) -> tuple[list[Stay], list[int]]:
    """One rollout in few slots: who was where, and the lengths of the completions."""
    prompts = [next(run.prompts)["ids"] for _ in range(SAMPLED)]
    with watched_slots() as steps:
        samples = rollout.generate(
            run.policy,
            prompts,
            group_size=1,
            max_new_tokens=MOST_TOKENS,
            max_slots=SLOTS,
            generator=torch.Generator().manual_seed(0),
            **run.ends,
        )
    return stays(steps), samples.lengths.tolist()


@contextlib.contextmanager
def watched_slots() -> Iterator[list[dict[int, int]]]:
    """A list that gets, for every decode step within, slot -> the sample that is alive in it.

    Each sample has a slot of its own, as on a GPU."""
    steps = []
    pace = rollout.PACE["cpu"]
    decode = rollout.Slots.decode_one_token

    def watch(slots, rows, span):
        alive = slots.alive[:rows].nonzero()[:, 0].tolist()
        steps.append({slot: int(slots.row[slot]) for slot in alive})
        decode(slots, rows, span)

    rollout.Slots.decode_one_token = watch
    rollout.PACE["cpu"] = pace._replace(shares=False)
    try:
        yield steps
    finally:
        rollout.Slots.decode_one_token = decode
        rollout.PACE["cpu"] = pace


def stays(steps: list[dict[int, int]]) -> list[Stay]:
    """Decode steps in which a slot holds the same sample, one after another, are one stay."""
    found, under_way, seen = [], {}, set()
    for time, holders in enumerate(steps):
        for slot, sample in holders.items():
            stay = under_way.get(slot)
            if stay is None or stay.sample != sample or stay.end != time:
                stay = Stay(slot, sample, time, time, moved=sample in seen)
                under_way[slot] = stay
                found.append(stay)
            stay.end = time + 1
            seen.add(sample)
    return found


def fixed_batches(lengths: list[int], size: int) -> int:
    """Decode steps where a batch begins only when the one before it has ended."""
    return sum(max(lengths[first : first + size]) for first in range(0, len(lengths), size))


# ------------------------------------------------------------------------------ loop.svg


def loop_picture() -> str:
    """The three policies and the numbered phases of train.py."""
    policies = {
        "old_policy π_old": (1, 60, "samples: π_θ as it is", "when a step starts"),
        "ref_policy π_ref": (2, 180, "frozen; only where", "there is a KL term"),
        "policy π_θ": (0, 300, "trained; moves with", "every update"),
    }
    phases = {
        "2  sample": (250, 60, "G completions of", "each of P prompts"),
        "3  score, plan": (460, 60, "rewards; advantages", "within a group"),
        "4  freeze": (250, 180, "log-probs under", "π_old and π_ref"),
        "5  compare": (460, 300, "advantages that", "need log-probs"),
        "6  improve": (250, 300, "loss and gradient,", "update by update"),
    }
    drawn = []
    for name, (color, y, *lines) in policies.items():
        drawn += card(f"policy color{color}", f"word bold color{color}", 44, y, name, lines)
    for name, (x, y, *lines) in phases.items():
        drawn += card("card", "bold", x, y, name, lines)

    drawn += arrow((204, 84), (246, 84))  # the sampler samples
    drawn += arrow((410, 97), (456, 97))
    drawn += arrow((330, 134), (330, 176))
    drawn += arrow((540, 134), (540, 296))
    drawn += arrow((204, 112), (227, 112), (227, 200), (246, 200))  # pi_old scores
    drawn += arrow((204, 232), (246, 232))
    drawn += arrow((330, 254), (330, 296))
    drawn += arrow((456, 337), (414, 337))
    drawn += arrow((246, 337), (208, 337))
    drawn += arrow((44, 337), (22, 337), (22, 97), (40, 97))  # pi_old <- pi_theta
    drawn += arrow((124, 300), (124, 258), look="edge color2")
    drawn.append(words(340, 159, "completions", look="dim small"))
    drawn.append(words(340, 280, "log-probs", look="dim small"))
    drawn.append(words(550, 220, "rewards", look="dim small"))
    drawn.append(words(30, 159, "1  snapshot, every step", look="small bold"))
    drawn.append(words(134, 282, "every ref_every steps", look="dim small"))
    described = (
        "The policy is copied to old_policy when a step starts. old_policy samples completions, "
        "a verifier scores them, advantages compare a group's completions, log-probs under "
        "old_policy and ref_policy are frozen, and the updates improve the policy."
    )
    return svg("One step of training, three policies", described, 394, drawn)


def card(look: str, name_look: str, x: float, y: float, name: str, lines: list[str]) -> list[str]:
    """A box with a name and two lines of text."""
    drawn = [box(look, x, y, 160, 74, 7), words(x + 12, y + 24, name, look=name_look)]
    for i, line in enumerate(lines):
        drawn.append(words(x + 12, y + 44 + 17 * i, line, look="dim"))
    return drawn


def arrow(*places: tuple[float, float], look: str = "flow") -> list[str]:
    """A line along the axes, with a head at its end."""
    (x, y), (end_x, end_y) = places[-2:]
    along_x = (end_x > x) - (end_x < x)
    along_y = (end_y > y) - (end_y < y)
    back_x, back_y = end_x - 8 * along_x, end_y - 8 * along_y
    head = [
        (end_x, end_y),
        (back_x - 4 * along_y, back_y - 4 * along_x),
        (back_x + 4 * along_y, back_y + 4 * along_x),
    ]
    return [path(look, *places), path("head", *head, closed=True)]


# ------------------------------------------------------------------------------ ratios.svg


def typical(found: list[Completion], shortest: int = 30, longest: int = 40) -> Completion:
    """Of those that fit the picture the one whose furthest token is in the middle, by size."""
    fitting = [one for one in found if shortest <= len(one.tokens) <= longest] or found
    return sorted(fitting, key=lambda one: one.furthest)[len(fitting) // 2]


def ratios_picture(shown: Completion) -> str:
    """Token ratios of one completion and its sequence ratio, in GRPO's band and in GSPO's."""
    ratios = [math.exp(value) for value in shown.log_ratios]
    sequence = math.exp(shown.log_ratio)
    count = len(ratios)
    reach = 1.25 * max(0.2, *[abs(ratio - 1) for ratio in ratios])
    near = 1.5 * max(4e-4, abs(sequence - 1))
    wide = Axes((-1, count), (max(1 - reach, 0), 1 + reach), 70, 620, 76, 196)
    close = Axes((-1, count), (1 - near, 1 + near), 70, 620, 252, 372)

    drawn = [words(20, 60, "GRPO clips each token's ratio r outside 0.8 … 1.2", look="bold")]
    drawn += wide.y_ticks({0.8: "0.8", 1: "1", 1.2: "1.2"})
    drawn += wide.band("color0", *GRPO_BAND)
    told = (
        f"GSPO clips the completion's s outside 0.9997 … 1.0004 (seen {reach / near:.0f} x closer)"
    )
    drawn.append(words(20, 236, told, look="bold"))
    ticks = [1 - near / 1.5, 1, 1 + near / 1.5]
    drawn += close.y_ticks({tick: f"{tick:.4f}" for tick in ticks})
    drawn += close.band("color1", *GSPO_BAND)

    for axes in (wide, close):
        drawn += token_marks(axes, ratios)
        drawn.append(axes.across("curve color1", sequence))
    for i, token in enumerate(shown.tokens):
        last = i == count - 1
        said = "end" if last and len(token) > 1 else token
        drawn.append(words(close.x(i), 394, said, look="mono", anchor="middle"))
    s_told = f"▬ s = {sequence:.4f}, their geometric mean"
    drawn.append(words(20, 422, "● r of a token (▲ beyond the axis)", look="word bold color0"))
    drawn.append(words(330, 422, s_told, look="word bold color1"))

    out = sum(not GRPO_BAND[0] <= ratio <= GRPO_BAND[1] for ratio in ratios)
    inside = GSPO_BAND[0] <= sequence <= GSPO_BAND[1]
    described = (
        f"{count} tokens of one completion after the four updates of a step: ratios from "
        f"{min(ratios):.3f} to {max(ratios):.3f}, {out} of them outside GRPO's band 0.8 to 1.2; "
        f"the sequence ratio is {sequence:.5f}, {'inside' if inside else 'outside'} GSPO's band "
        "0.9997 to 1.0004."
    )
    return svg("Token ratios and the sequence ratio of one completion", described, 440, drawn)


def token_marks(axes: Axes, ratios: list[float]) -> list[str]:
    """A stem from 1 to each ratio and a dot; a triangle at the edge where it lies beyond it."""
    low, high = axes.y_range
    drawn = []
    for i, ratio in enumerate(ratios):
        x, y = axes.place(i, ratio)
        drawn.append(path("thin color0", (x, axes.y(1)), (x, y)))
        if low <= ratio <= high:
            drawn.append(dot("mark color0", x, y))
        else:
            base = y + (8 if ratio > high else -8)
            drawn.append(path("mark color0", (x, y), (x - 5, base), (x + 5, base), closed=True))
    return drawn


# ------------------------------------------------------------------------------ length.svg


@dataclasses.dataclass
class Spread:
    """Completions of one length: 10%, 50% and 90% of them have less."""

    length: int
    count: int
    furthest: tuple[float, float, float]  # |log r| of the token furthest from 1
    sequence: tuple[float, float, float]  # |log s|
    tokens: float  # root mean square of log r over all tokens


def spreads(found: list[Completion], least: int = LEAST_COMPLETIONS) -> list[Spread]:
    """By length, those lengths alone that many completions have."""
    by_length: dict[int, list[Completion]] = {}
    for one in found:
        by_length.setdefault(len(one.tokens), []).append(one)
    lengths = sorted(by_length)
    return [spread(by_length[length]) for length in lengths if len(by_length[length]) >= least]


def spread(same: list[Completion]) -> Spread:
    """Of completions of one length."""
    return Spread(
        length=len(same[0].tokens),
        count=len(same),
        furthest=deciles([one.furthest for one in same]),
        sequence=deciles([abs(one.log_ratio) for one in same]),
        tokens=root_mean_square([value for one in same for value in one.log_ratios]),
    )


def deciles(values: list[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[4], cuts[8]


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values))


def length_picture(found: list[Spread]) -> str:
    """How far ratios are from 1 against the length of the completion, on a log axis."""
    axes = Axes((0, found[-1].length + 6), (1e-5, 1), 70, 620, 70, 300, log_y=True)
    ticks = {1: "1", 0.1: "0.1", 1e-2: "0.01", 1e-3: "0.001", 1e-4: "0.0001", 1e-5: "0.00001"}
    drawn = axes.y_ticks(ticks)
    drawn += axes.x_ticks([one.length for one in found], "tokens of the completion")
    drawn.append(
        words(20, 54, "|log ratio|: how far from 1; the middle 80% are shaded", look="dim")
    )

    for color, name, mark in (("color0", "furthest", dot), ("color1", "sequence", square)):
        cuts = {one.length: getattr(one, name) for one in found}
        low = [axes.place(length, cut[0]) for length, cut in cuts.items()]
        middle = [axes.place(length, cut[1]) for length, cut in cuts.items()]
        high = [axes.place(length, cut[2]) for length, cut in cuts.items()]
        high.reverse()
        drawn.append(path(f"area {color}", *low, *high, closed=True))
        drawn.append(path(f"curve {color}", *middle))
        drawn += [mark(f"mark {color}", *place) for place in middle]
    drawn.append(axes.across("edge color0", 0.2))
    drawn.append(axes.across("edge color1", 4e-4))
    drawn.append(words(76, axes.y(0.2) - 5, "GRPO's clip, about 0.2", look="word small color0"))
    clip = "GSPO's clip, 0.0003 and 0.0004"
    drawn.append(words(76, axes.y(4e-4) + 15, clip, look="word small color1"))
    drawn.append(words(20, 360, "● token furthest from 1: median", look="word bold color0"))
    drawn.append(words(320, 360, "■ sequence ratio s: median", look="word bold color1"))

    first, last = found[0], found[-1]
    described = (
        f"At {first.length} tokens the median completion's furthest token has |log r| "
        f"{first.furthest[1]:.3f} and its |log s| is {first.sequence[1]:.4f}; at {last.length} "
        f"tokens {last.furthest[1]:.3f} and {last.sequence[1]:.4f}."
    )
    return svg("How far ratios stray from 1, by length of the completion", described, 378, drawn)


# ------------------------------------------------------------------------------ curve.svg


@dataclasses.dataclass
class Curve:
    """Of a run, or the mean over runs that differ in their seeds."""

    name: str
    sampled: list[tuple[float, float]]  # (step, share of the sampled completions)
    held_out: list[tuple[float, float]]  # (step, share of the held-out prompts)
    ranges: list[tuple[float, float]]  # least and greatest over the seeds, for each of held_out


def curves_of(runs: list[train.Chronicle]) -> list[Curve]:
    """A curve a run, but one for runs of one algorithm where there are several."""
    algorithms = [run.flags.get("algo") for run in runs]
    only_one = len(set(algorithms)) == 1
    all_differ = len(set(algorithms)) == len(runs)
    if only_one or all_differ:
        return [mean_curve(run.name, [run]) for run in runs]
    curves = []
    for name in dict.fromkeys(algorithms):
        seeds = [run for run in runs if run.flags.get("algo") == name]
        number = f", {len(seeds)} seeds" if len(seeds) > 1 else ""
        curves.append(mean_curve(f"{name}{number}", seeds))
    return curves


def mean_curve(name: str, seeds: list[train.Chronicle]) -> Curve:
    sampled = by_step(seeds, "solved")
    held_out = by_step(seeds, "eval_solved")
    return Curve(
        name,
        sampled=[(step, statistics.mean(shares)) for step, shares in sampled.items()],
        held_out=[(step, statistics.mean(shares)) for step, shares in held_out.items()],
        ranges=[(min(shares), max(shares)) for shares in held_out.values()],
    )


def by_step(runs: list[train.Chronicle], metric: str) -> dict[float, list[float]]:
    """Step -> values of the runs that have it there."""
    values = {}
    for run in runs:
        for step, value in train.points_of(run.rows, (metric,)):
            values.setdefault(step, []).append(value)
    return dict(sorted(values.items()))


def curve_picture(runs: list[train.Chronicle]) -> str:
    """Held-out accuracy by step, over what the sampled completions reach."""
    last = max(row["step"] for run in runs for row in run.rows)
    axes = Axes((0, last), (0, 1), 60, 610, 60, 270)
    drawn = axes.y_ticks({share / 4: f"{share / 4:.0%}" for share in range(5)})
    drawn += axes.x_ticks(train.round_ticks(0, last), "rollout steps")
    told = []
    curves = curves_of(runs)
    for i, curve in enumerate(curves):
        color = f"color{i % 4}"
        drawn.append(path(f"thin {color}", *[axes.place(*point) for point in curve.sampled]))
        drawn.append(path(f"curve {color}", *[axes.place(*point) for point in curve.held_out]))
        beside = 4 * (i - (len(curves) - 1) / 2)  # where they would lie on each other
        for (step, _), (low, high) in zip(curve.held_out, curve.ranges):
            if high > low:
                x = axes.x(step) + beside
                drawn.append(path(f"thin {color}", (x, axes.y(low)), (x, axes.y(high))))
        kind = (i + i // 4) % 2  # the fifth has the first one's colour, and another mark
        mark = (dot, square)[kind]
        drawn += [mark(f"mark {color}", *axes.place(*point)) for point in curve.held_out]
        step, share = curve.held_out[-1]
        place = (60 + 290 * (i % 2), 330 + 20 * (i // 2))
        legend = f"{'●■'[kind]} {curve.name}: {share:.1%} at step {step:g}"
        drawn.append(words(*place, legend, look=f"word bold {color}"))
        low, high = curve.ranges[-1]
        over_seeds = f" ({low:.1%} to {high:.1%})" if high > low else ""
        told.append(
            f"{curve.name}: sampled {curve.sampled[0][1]:.0%} at step {curve.sampled[0][0]:g}, "
            f"held out {share:.1%}{over_seeds} at step {step:g}"
        )
    below = 330 + 20 * math.ceil(len(curves) / 2)
    bars = ""
    if any(high > low for curve in curves for low, high in curve.ranges):
        bars = "; bars: range of seeds"
    note = f"marks: held out, greedy{bars}; thin: completions sampled for training"
    drawn.append(words(60, below, note, look="dim small"))
    return svg("Share of problems solved", "; ".join(told) + ".", below + 18, drawn)


def chronicle(folder: Path) -> train.Chronicle:
    """A run that was evaluated at least once."""
    found = train.read_chronicle(folder)
    rewards.need(
        any("eval_solved" in row for row in found.rows),
        f"--run {folder}: expected a run's folder, whose metrics.jsonl has eval_solved",
    )
    return found


# ------------------------------------------------------------------------------ slots.svg


def slots_picture(found: list[Stay], lengths: list[int]) -> str:
    """A row for each slot, time to the right, a bar for each completion."""
    slots = 1 + max(stay.slot for stay in found)
    ends = max(stay.end for stay in found)
    bottom = 64 + 32 * slots
    axes = Axes((0, ends), (0, 1), 70, 620, 64, bottom)
    drawn = []
    for slot in range(slots):
        y = 64 + 32 * slot
        drawn.append(box("card", axes.left, y + 3, axes.right - axes.left, 26, 4))
        drawn.append(words(62, y + 21, f"slot {slot}", look="dim small", anchor="end"))
    for stay in found:
        drawn += bar(axes, stay)
    ticks = train.round_ticks(0, ends)
    drawn += axes.x_ticks(ticks, "decode steps, one token each")

    batches = fixed_batches(lengths, slots)
    y = bottom + 56
    drawn.append(words(70, y, "■ the first to come", look="word bold color0"))
    drawn.append(words(230, y, "■ took a freed slot", look="word bold color1"))
    drawn.append(words(400, y, "■ moved, to close a gap", look="word bold color2"))
    told = (
        f"{len(lengths)} completions in {slots} slots take {ends} decode steps; "
        f"in batches of {slots} they would take {batches}"
    )
    drawn.append(words(20, y + 26, told, look="dim"))
    described = f"{told}. A completion that ends gives its slot to one that waits, at once."
    return svg("Sampling: a slot that is free takes the next completion", described, y + 44, drawn)


def bar(axes: Axes, stay: Stay) -> list[str]:
    """With its completion's number, from 1, and three looks: first, refill, moved."""
    color = 0
    if stay.begin > 0:
        color = 1
    if stay.moved:
        color = 2
    left, right = axes.x(stay.begin), axes.x(stay.end)
    y = 64 + 32 * stay.slot
    drawn = [box(f"bar color{color}", left, y + 3, right - left, 26, 4)]
    if right - left >= 18:
        number = str(stay.sample + 1)
        drawn.append(words((left + right) / 2, y + 20, number, look="on", anchor="middle"))
    return drawn


# ------------------------------------------------------------------------------ the command


MEASURED = ("ratios", "length", "slots")
CURVES = ("curve", "real")  # of runs that are finished
PICTURES = ("loop", *MEASURED, *CURVES)


def measured_pictures() -> dict[str, Callable[[], str]]:
    """Those that need the short run."""
    with short_run() as run:
        seats = watch_slots(run)
        steps = train_and_compare(run)
    by_length = spreads([one for step in steps for one in step])
    print("tokens  completions  furthest |log r|, median  |log s|, median  rms of log r")
    for one in by_length:
        print(
            f"{one.length:6}  {one.count:11}  {one.furthest[1]:24.4f}  {one.sequence[1]:15.4f}"
            f"  {one.tokens:12.4f}"
        )
    return {
        "slots": slots_picture(*seats),
        "ratios": ratios_picture(typical(steps[-1])),
        "length": length_picture(by_length),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", nargs="+", type=Path, default=[], help="folders, for curve.svg")
    parser.add_argument("--real", nargs="+", type=Path, default=[], help="folders, for real.svg")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    parser.add_argument("--out", type=Path, default=ROOT / ".github", help="folder to write to")
    arguments = parser.parse_args()
    wanted = set(arguments.only)
    try:
        finished = {
            "curve": [chronicle(folder) for folder in arguments.run],
            "real": [chronicle(folder) for folder in arguments.real],
        }
    except rewards.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    drawn = {"loop": loop_picture()}
    if wanted & set(MEASURED):
        drawn |= measured_pictures()
    for name in CURVES:
        if finished[name]:
            drawn[name] = curve_picture(finished[name])
        elif name in wanted:
            flag = {"curve": "--run", "real": "--real"}[name]
            print(f"no {name}.svg: {flag} names no run; python train.py makes one", file=sys.stderr)
    arguments.out.mkdir(exist_ok=True)
    for name in PICTURES:
        if name in wanted & drawn.keys():
            (arguments.out / f"{name}.svg").write_text(drawn[name], encoding="utf-8")
            print(f"{name}.svg, {len(drawn[name].encode()) / 1000:.1f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
