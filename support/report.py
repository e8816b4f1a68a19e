"""The page of a run: curves, the same held-out prompts at every evaluation, and all flags. One file
without a script, which loads nothing. And in sentences: what is not healthy, and what to try.

    python train.py --report runs/a runs/b

It reads config.json, starts.jsonl, metrics.jsonl and evaluations.jsonl of a run's folder."""

import dataclasses
import html
import json
import math
import statistics
from pathlib import Path

from support.data import need, printable
from support.folders import replace_text

# ---- what a run's folder tells -------------------------------------------------------------------


@dataclasses.dataclass
class Story:
    """Of one run."""

    name: str
    flags: dict  # config.json
    starts: list[dict]  # starts.jsonl: date, command, the evaluation before; a line a resume
    rows: list[dict]  # metrics.jsonl
    evaluations: list[dict]  # evaluations.jsonl: step, prompt, answer, completion, reward, correct


def read_story(folder: Path) -> Story:
    return Story(
        name=folder.resolve().name,
        flags=json.loads((folder / "config.json").read_text()),
        starts=read_lines(folder / "starts.jsonl"),
        rows=read_lines(folder / "metrics.jsonl"),
        evaluations=read_lines(folder / "evaluations.jsonl"),
    )


def read_lines(path: Path) -> list[dict]:
    """The object of each line; not that of a last line that is still being written."""
    lines = path.read_text(errors="replace").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def points_of(story: Story, metric: str) -> list[tuple[float, float]]:
    """(step, value), from the evaluation before training on, where there is one."""
    rows = story.starts[:1] + story.rows
    return [(row["step"], row[metric]) for row in rows if metric in row]


# ---- health --------------------------------------------------------------------------------------

RECENT = 10  # steps that the sentences are about


def health(rows: list[dict], flags: dict) -> list[str]:
    """What is not healthy in the last steps of a run, by docs/metrics.md, and what to try."""
    if not rows:
        return ["no step is done yet"]
    now = {name: mean_of(rows[-RECENT:], name) for name in rows[-1]}
    found = []

    def warn(applies: bool, sentence: str) -> None:
        if applies:
            found.append(sentence)

    dead, right = now["dead"], now.get("dead_right", 0.0)
    warn(right > 0.9, f"{right:.0%} of groups are all right: take harder prompts")
    if not flags.get("teacher"):  # which teaches whatever is paid
        warn(dead > 0.9 >= right, f"{dead:.0%} of groups are paid alike: {EASIER}")
    warn(now["verifier_faults"] > 0, "a verifier fails, and pays 0: the console has its error")
    truncated = now["truncated"]
    warn(truncated > 1 / 3, f"{truncated:.0%} of completions are cut off: raise --max-new-tokens")

    completions = flags["prompts_per_step"] * flags["group_size"]
    updates = completions // flags["completions_per_update"] * flags["epochs"]
    warn(updates == 1, "one update a rollout: every ratio is 1; lower --completions-per-update")
    if updates > 1 and flags["clip_low"] is not None and "clip_fraction" in now:
        clipped = now["clip_fraction"]
        warn(clipped == 0, "nothing is clipped: the policy hardly moves; raise --lr")
        most = 1 - 1 / updates  # the first update clips nothing
        warn(clipped > 0.95 * most, f"almost all is clipped ({clipped:.0%}): lower --lr")
    warn(rows[-1]["lr"] < flags["lr"], "the learning rate still warms up (--warmup-steps): wait")
    warn(now["bad_updates"] > 0, "updates were skipped, something was not finite: lower --lr")

    entropy = now.get("entropy", 1.0)
    solved = now.get("solved", 0.0)
    warn(entropy < 0.01 and solved < 0.9, f"the entropy is {entropy:.3f}: {EXPLORE}")
    levels = [mean_of(rows[i : i + RECENT], "reward") for i in range(0, len(rows), RECENT)]
    fell = now["reward"] < (max(levels) + min(levels[0], 0.0)) / 2
    warn(fell, f"the reward fell from {max(levels):.2f} to {now['reward']:.2f}: {COLLAPSE}")
    return found


EASIER = "take easier prompts, a larger --group-size, and look in samples.jsonl what is paid"
EXPLORE = "exploration is over before all is solved; again, with a lower --lr or --entropy-coef"
COLLAPSE = "see where entropy, approx_kl, length_mean drift; lower --lr, or fewer updates a rollout"


def mean_of(rows: list[dict], metric: str) -> float:
    return statistics.fmean(row.get(metric, 0.0) for row in rows)


# ---- HTML and SVG --------------------------------------------------------------------------------

MOST_CHARACTERS = 2000  # of a text


def tag(name: str, *inside: str, **attributes) -> str:
    """An element. What is inside is HTML already; attributes are written class_, stroke_width."""
    words = [name]
    for key, value in attributes.items():
        text = f"{value:.1f}" if isinstance(value, float) else html.escape(str(value))
        words.append(f'{key.strip("_").replace("_", "-")}="{text}"')
    return f"<{' '.join(words)}>{''.join(inside)}</{name}>"


def visible(value) -> str:
    """Text as HTML: escaped, and what would hide or reorder text (control, bidi) as its code."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    lines = text[:MOST_CHARACTERS].split("\n")
    shown = "\n".join(map(printable, lines))
    if len(text) > MOST_CHARACTERS:
        shown += f" … and {len(text) - MOST_CHARACTERS} more characters"
    return html.escape(shown)


@dataclasses.dataclass
class Plot:
    """A picture's axes: from values to places."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float = 50.0
    right: float = 300.0
    top: float = 6.0
    bottom: float = 130.0

    def x(self, value: float) -> float:
        first, last = self.x_range
        share = (value - first) / ((last - first) or 1)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        """Values beyond the axis lie on its ends."""
        low, high = self.y_range
        share = min(max((value - low) / (high - low), 0), 1)
        return self.bottom - share * (self.bottom - self.top)

    def line(self, points: list[tuple[float, float]], look: str) -> str:
        places = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        return tag("path", class_=look, d=f"M{places}")

    def dots(self, points: list[tuple[float, float]], look: str, radius: float = 2.0) -> list[str]:
        """With their numbers, for a mouse that rests on them."""
        drawn = []
        for x, y in points:
            note = tag("title", f"step {x:g}: {y:.5g}")
            drawn.append(tag("circle", note, class_=look, cx=self.x(x), cy=self.y(y), r=radius))
        return drawn

    def ticks_of_y(self, labels: dict[float, str]) -> list[str]:
        """Lines across, each with its label."""
        drawn = []
        for value, label in labels.items():
            y = self.y(value)
            drawn.append(tag("path", class_="axis", d=f"M{self.left} {y:.1f}H{self.right}"))
            drawn.append(tag("text", label, x=self.left - 6, y=y + 4, text_anchor="end"))
        return drawn

    def ticks_of_x(self, values: list[float], name: str) -> list[str]:
        """Numbers below, the first of them behind its name."""
        drawn = []
        for value in values:
            anchor, label = "middle", f"{value:g}"
            if value == values[0]:
                anchor, label = "start", f"{name} {value:g}"
            place = {"x": self.x(value), "y": self.bottom + 15}
            drawn.append(tag("text", label, **place, text_anchor=anchor))
        return drawn


def round_ticks(low: float, high: float) -> list[float]:
    """Two to six round numbers between them."""
    size = high - low
    decade = 10.0 ** math.floor(math.log10(size))
    step = next(factor * decade for factor in (0.2, 0.5, 1, 2) if size <= 5 * factor * decade)
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [step * number for number in numbers]


# ---- curves --------------------------------------------------------------------------------------

CHARTS = {  # metric, over the steps -> what is healthy
    "eval_solved": "held-out prompts, greedy; rises with solved",
    "solved": "of the completions sampled; rises with the reward",
    "reward": "of what is trained on; rises",
    "eval_reward": "held-out prompts, greedy, where nothing says what is right; rises",
    "length_mean": "tokens; no drift to --max-new-tokens",
    "truncated": "near 0, else raise --max-new-tokens",
    "dead": "groups that are paid alike; near 100% little is learned",
    "entropy": "nats; falls slowly; near 0 exploration is over",
    "clip_fraction": "GSPO 10 to 60%, less once all is solved; GRPO to 2%",
    "ratio_mean": "GSPO: within 0.003 of 1",
    "approx_kl": "nats to π_old; a rise comes before collapse",
    "kl": "nats to π_ref; grows slowly",
    "sampler_kl": "trainer to sampler; 0 up to rounding in float32",
    "grad_norm": "before clipping; steady",
    "tool_calls": "replies of --tool in a completion",
    "teacher_kl": "nats to the teacher; falls",
    "seconds_step": "without evaluations",
}
SHARES = ("eval_solved", "solved", "truncated", "dead", "clip_fraction")  # in percent
COLORS = 6  # of STYLE; then they come again
MOST_POINTS = 200  # of a curve
MOST_DOTS = 40


def at_most(most: int, items: list) -> list:
    """Some of them, evenly chosen, the first and the last among them."""
    size = max(1, math.ceil((len(items) - 1) / (most - 1)))
    return items[:-1:size] + items[-1:]


def value_range(values: list[float]) -> tuple[float, float]:
    """What an axis shows: all values with a margin, none of it negative if they are not."""
    low, high = min(values), max(values)
    margin = 0.05 * (high - low)
    if margin <= 1e-9 * max(abs(low), abs(high)):  # flat but for rounding
        margin = 0.1 * abs(high) or 1.0
    least = 0.0 if low >= 0 else -math.inf
    return max(low - margin, least), high + margin


def chart_figure(metric: str, stories: list[Story]) -> str:
    """One metric of all runs; nothing where no run has it."""
    curves = [at_most(MOST_POINTS, points_of(story, metric)) for story in stories]
    values = [value for curve in curves for _, value in curve]
    if not values:
        return ""
    form = ".1%" if metric in SHARES else ".5g"
    last = max(step for curve in curves for step, _ in curve)
    plot = Plot((0, last), value_range(values))
    ticks = round_ticks(*plot.y_range)
    drawn = plot.ticks_of_y({tick: f"{tick:{form}}" for tick in ticks})
    drawn += plot.ticks_of_x(round_ticks(0, last or 1), "step")
    caption = [tag("b", metric), " "]
    for i, curve in enumerate(curves):
        if curve:
            caption.append(key(i, f"{curve[-1][1]:{form}}"))
            drawn.append(plot.line(curve, f"curve color{i % COLORS}"))
            drawn += plot.dots(at_most(MOST_DOTS, curve), f"dot color{i % COLORS}")
    caption.append(tag("div", CHARTS[metric], class_="dim"))
    picture = tag("svg", *drawn, viewBox="0 0 320 150", role="img", aria_label=metric)
    return tag("figure", picture, tag("figcaption", *caption))


def key(color: int, text: str) -> str:
    return tag("span", text, class_=f"key color{color % COLORS}")


# ---- texts ---------------------------------------------------------------------------------------

MOST_EVALUATIONS = 12  # of a prompt


def headline(story: Story) -> str:
    """What was trained, from where to where, when, and by which command."""
    flags = story.flags
    data = flags.get("data") or flags.get("task")
    parts = [f"{flags.get('algo')}, {flags.get('model')} on {data}"]
    solved = points_of(story, "eval_solved")
    if solved:
        (first, before), (last, after) = solved[0], solved[-1]
        parts.append(f"held out {before:.1%} (step {first}) → {after:.1%} (step {last})")
    for start in story.starts:
        parts.append(f"{start['date']}: {start['command']}")
    return "".join(tag("div", visible(part)) for part in parts)


def answers(story: Story) -> str:
    """A run's answers to each of the held-out prompts, evaluation after evaluation."""
    by_prompt: dict[str, dict[int, dict]] = {}
    for row in story.evaluations:
        by_prompt.setdefault(row["prompt"], {})[row["step"]] = row
    parts = [tag("summary", tag("b", visible(story.name)))]
    for prompt, by_step in by_prompt.items():
        answer = next(iter(by_step.values()))["answer"]
        parts.append(tag("pre", visible(prompt), class_="prompt"))
        parts.append(tag("span", "answer: ", visible(answer), class_="dim"))
        parts.append(tag("div", *cards(by_step), class_="cards", tabindex=0))
    return tag("details", *parts, open="")


def cards(by_step: dict[int, dict]) -> list[str]:
    """One an evaluation, with its verdict."""
    drawn = []
    for step in at_most(MOST_EVALUATIONS, sorted(by_step)):
        row = by_step[step]
        head, look = f"step {step}: reward {row['reward']:g}", "card"
        if row["correct"] is not None:
            verdict = "right" if row["correct"] > 0.5 else "wrong"
            head, look = f"{head}, {verdict}", f"card {verdict}"
        shown = tag("pre", visible(row["completion"]))
        drawn.append(tag("div", tag("span", head, class_="head"), shown, class_=look))
    return drawn


def flag_table(stories: list[Story]) -> str:
    """The resolved flags of all runs, those that differ marked."""
    names = ["flag", *(story.name for story in stories)]
    lines = [tag("tr", *[tag("th", visible(name)) for name in names])]
    for name in dict.fromkeys(name for story in stories for name in story.flags):
        values = [visible(story.flags.get(name)) for story in stories]
        cells = [tag("td", text) for text in (visible(name), *values)]
        look = "same" if len(set(values)) == 1 else "differs"
        lines.append(tag("tr", *cells, class_=look))
    summary = tag("summary", "all resolved flags; coloured: where these runs differ")
    return tag("details", summary, tag("div", tag("table", *lines), class_="wide"))


# ---- the page ------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1d21; --dim: #63676e; --line: #d9dbdf;
  --card: #f5f6f7; --odd: #b3261e; --c0: #0067b1; --c1: #c24a00; --c2: #00825f; --c3: #a8407f;
  --c4: #7a6200; --c5: #4b4fc4 }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --text: #e6e8eb; --dim: #9aa0a8;
  --line: #34383e; --card: #1f2226; --odd: #ff8a80; --c0: #5db2f2; --c1: #f59a5b; --c2: #45c79f;
  --c3: #e58fc3; --c4: #d3b545; --c5: #9ea2ff } }
* { box-sizing: border-box; overflow-wrap: anywhere }
body { margin: 0 auto; padding: 16px; max-width: 1400px; background: var(--page);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif }
figure { margin: 0 } .dim, text { color: var(--dim) }
.grid { display: grid; gap: 20px; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)) }
svg { display: block; width: 100% } text { fill: currentColor; font-size: 11px }
.axis { stroke: var(--line) } .dot { fill: var(--c) }
.curve { stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; fill: none }
.key { margin-right: 14px } .key::before { content: "■ "; color: var(--c) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 14px }
td, th { padding: 3px 16px 3px 0; text-align: left; vertical-align: top; min-width: 120px }
.differs { font-weight: 600; color: var(--c1) } summary { cursor: pointer; margin: 10px 0 }
.cards { display: flex; gap: 10px; overflow-x: auto; margin: 6px 0 20px }
.card { flex: 1 0 210px; max-width: 420px; padding: 8px 10px; background: var(--card) }
.head { font-weight: 600 } .right .head { color: var(--c2) } .wrong .head { color: var(--odd) }
pre { margin: 4px 0 0; white-space: pre-wrap; max-height: 320px; overflow-y: auto }
.prompt { font-weight: 600 }
"""
STYLE += "".join(f".color{i} {{ --c: var(--c{i}) }}\n" for i in range(COLORS))


def write_report(folders: list[Path], path: Path) -> None:
    """Writes one page about runs."""
    stories = [read_story(folder) for folder in folders]
    title = "Report of " + ", ".join(story.name for story in stories)
    body = [tag("h1", visible(title))]
    for i, story in enumerate(stories):
        body += [key(i, visible(story.name)), headline(story)]
        sentences = [tag("li", visible(each)) for each in health(story.rows, story.flags)]
        body.append(tag("ul", *sentences))
    figures = [chart_figure(metric, stories) for metric in CHARTS]
    body += [tag("h2", "Metrics"), tag("div", *figures, class_="grid")]
    body.append(tag("h2", "The same held-out prompts at every evaluation"))
    body += [answers(story) for story in stories]
    body += [tag("h2", "Flags"), flag_table(stories)]
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # completions are hostile; should one get past visible(), it still loads and runs nothing
        '<meta http-equiv="Content-Security-Policy" content="',
        "default-src 'none'; style-src 'unsafe-inline'\">",
        tag("title", visible(title)),
        tag("style", STYLE),
    ]
    page = tag("html", tag("head", *head), tag("body", "\n".join(body)), lang="en")
    replace_text(path, f"<!doctype html>\n{page}\n")


def main(folders: list[str]) -> int:
    """One page of all these runs, beside the last of them, and what is not healthy in each."""
    need(folders, "--report: expected folders of runs")
    paths = [Path(folder) for folder in folders]
    for path in paths:
        need((path / "config.json").exists(), f"--report {path}: expected the folder of a run")
    for story in map(read_story, paths):
        sentences = health(story.rows, story.flags) or ["nothing unhealthy by docs/metrics.md"]
        for sentence in sentences:
            print(f"{story.name}: {sentence}")
    page = paths[-1] / "report.html"
    if len(paths) > 1:
        page = paths[-1].parent / "report.html"
    write_report(paths, page)
    print(f"the report is in {page}")
    return 0
