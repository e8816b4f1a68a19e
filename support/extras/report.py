"""The page of a run: curves, the same held-out prompts at every evaluation, and all flags. One file
without a script, which loads nothing. And in sentences: what is not healthy, and what to try.

    python train.py --report runs/a runs/b

It reads config.json, starts.jsonl, metrics.jsonl and evaluations.jsonl of a run's folder."""

import html
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from support.data import need, printable
from support.folders import replace_text

MOST_POINTS = 200  # of a curve
MOST_DOTS = 40
MOST_EVALUATIONS = 12  # of a prompt
MOST_CHARACTERS = 2000  # of a text


class Story(NamedTuple):
    """Of one run."""

    name: str
    flags: dict  # config.json
    starts: list[dict]  # starts.jsonl: date, command, the evaluation before; a line a resume
    rows: list[dict]  # metrics.jsonl
    evaluations: list[dict]  # evaluations.jsonl: step, prompt, answer, completion, reward, correct


def read_story(folder: Path) -> Story:
    def rows(name: str) -> list[dict]:
        """The object of each line; not that of a last line that is still being written."""
        lines = (folder / f"{name}.jsonl").read_text(errors="replace").split("\n")
        return [json.loads(line) for line in lines[:-1]]

    flags = json.loads((folder / "config.json").read_text())
    files = map(rows, ("starts", "metrics", "evaluations"))
    return Story(folder.resolve().name, flags, *files)


def points_of(story: Story, metric: str) -> list[tuple[float, float]]:
    """(step, value), from the evaluation before training on, where there is one."""
    rows = story.starts[:1] + story.rows
    return [(row["step"], row[metric]) for row in rows if metric in row]


# ---- health --------------------------------------------------------------------------------------

RECENT = 10  # steps that the sentences are about
EASIER = "take easier prompts, a larger --group-size, and look in samples.jsonl what is paid"
EXPLORE = "exploration is over before all is solved; again, with a lower --lr or --entropy-coef"
COLLAPSE = "see where entropy, approx_kl, length_mean drift; lower --lr, or fewer updates a rollout"


def health(rows: list[dict], flags: dict) -> list[str]:
    """What is not healthy in the last steps of a run, by docs/metrics.md, and what to try."""
    if not rows:
        return ["no step is done yet"]
    recent = rows[-RECENT:]
    now = {name: fmean(row.get(name, 0.0) for row in recent) for name in rows[-1]}
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
    rewards = [row["reward"] for row in rows]
    levels = [fmean(rewards[i : i + RECENT]) for i in range(0, len(rows), RECENT)]
    best, last = max(levels), now["reward"]
    fell = last < (best + min(levels[0], 0.0)) / 2
    warn(fell, f"the reward fell from {best:.2f} to {last:.2f}: {COLLAPSE}")
    return found


# ---- HTML and SVG --------------------------------------------------------------------------------


def visible(value) -> str:
    """Text as HTML: escaped, and what would hide or reorder text (control, bidi) as its code."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    lines = text[:MOST_CHARACTERS].split("\n")
    shown = "\n".join(map(printable, lines))
    if len(text) > MOST_CHARACTERS:
        shown += f" … and {len(text) - MOST_CHARACTERS} more characters"
    return html.escape(shown)


def elements(name: str, inside: Iterable[str]) -> str:
    """An element around each; what is inside is HTML already."""
    return "".join(f"<{name}>{each}</{name}>" for each in inside)


class Plot(NamedTuple):
    """A picture's axes: from values to places."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float = 50.0
    right: float = 300.0
    top: float = 6.0
    bottom: float = 130.0

    def x(self, value: float) -> float:
        first, last = self.x_range
        share = (value - first) / (last - first)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        """Values beyond the axis lie on its ends."""
        low, high = self.y_range
        share = min(max((value - low) / (high - low), 0), 1)
        return self.bottom - share * (self.bottom - self.top)

    def line(self, points: list[tuple[float, float]], look: str) -> str:
        places = [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points]
        return f'<path class="{look}" d="M{"L".join(places)}"/>'

    def dots(self, points: list[tuple[float, float]], look: str, radius=2.0) -> Iterator[str]:
        """With their numbers, for a mouse that rests on them."""
        for x, y in points:
            place = f'cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}"'
            note = f"<title>step {x:g}: {y:.5g}</title>"
            yield f'<circle class="{look}" {place}>{note}</circle>'

    def ticks_of_y(self, labels: dict[float, str]) -> Iterator[str]:
        """Lines across, each with its label."""
        for value, label in labels.items():
            y = self.y(value)
            yield f'<path class="axis" d="M{self.left} {y:.1f}H{self.right}"/>'
            yield f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'

    def ticks_of_x(self, values: list[float], name: str) -> Iterator[str]:
        """Numbers below, behind their name."""
        y = self.bottom + 15
        yield f'<text x="{self.left - 6}" y="{y}" text-anchor="end">{name}</text>'
        for value in values:
            yield f'<text x="{self.x(value):.1f}" y="{y}" text-anchor="middle">{value:g}</text>'


def round_ticks(low: float, high: float) -> list[float]:
    """Two to six round numbers between them."""
    size = high - low
    decade = 10.0 ** math.floor(math.log10(size))
    steps = [factor * decade for factor in (0.2, 0.5, 1, 2)]
    step = next(step for step in steps if size <= 5 * step)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [step * number for number in range(first, last + 1)]


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
SHARES = ("eval_solved", "solved", "truncated", "dead", "clip_fraction")
FORMS = dict.fromkeys(SHARES, ".1%")  # of numbers; of others .5g


def at_most(most: int, items: list) -> list:
    """Some of them, evenly chosen, the first and the last among them."""
    size = max(1, math.ceil((len(items) - 1) / (most - 1)))
    return items[:-1:size] + items[-1:]


def value_range(values: list[float]) -> tuple[float, float]:
    """What an axis shows: all values with a margin, but for one below 0."""
    low, high = min(values), max(values)
    margin = 0.05 * (high - low)
    if margin <= 1e-9 * max(abs(low), abs(high)):  # flat but for rounding
        margin = 0.1 * abs(high) or 1.0
    return max(low - margin, min(low, 0.0)), high + margin


def chart_figure(metric: str, stories: list[Story]) -> str:
    """One metric of all runs; nothing where no run has it, or where it is but rounding."""
    curves = [at_most(MOST_POINTS, points_of(story, metric)) for story in stories]
    values = [value for curve in curves for _, value in curve]
    largest = max(map(abs, values), default=0.0)
    if not values or 0 < largest < 1e-6:
        return ""
    form = FORMS.get(metric, ".5g")
    last = max(1, *(step for curve in curves for step, _ in curve))
    plot = Plot((0, last), value_range(values))
    labels = {tick: f"{tick:{form}}" for tick in round_ticks(*plot.y_range)}
    drawn = [*plot.ticks_of_y(labels)]
    drawn += plot.ticks_of_x(round_ticks(0, last), "step")
    caption = f"<b>{metric}</b> "
    for i, curve in enumerate(curves):
        if curve:
            _, value = curve[-1]
            caption += f'<span class="key color{i}">{value:{form}}</span>'
            drawn.append(plot.line(curve, f"curve color{i}"))
            drawn += plot.dots(at_most(MOST_DOTS, curve), f"dot color{i}")
    caption += f'<div class="dim">{CHARTS[metric]}</div>'
    picture = f'<svg viewBox="0 0 320 150" role="img" aria-label="{metric}">{"".join(drawn)}</svg>'
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


# ---- the page ------------------------------------------------------------------------------------


def headline(story: Story) -> str:
    """What was trained, from where to where, when, and by which command."""
    flags = story.flags
    data = flags["data"] or flags["task"]
    parts = [f"{flags['algo']}, {flags['model']} on {data}"]
    solved = points_of(story, "eval_solved")
    if solved:
        first, before = solved[0]
        last, after = solved[-1]
        parts.append(f"held out {before:.1%} (step {first}) → {after:.1%} (step {last})")
    parts += [f"{start['date']}: {start['command']}" for start in story.starts]
    return elements("div", map(visible, parts))


def answers(story: Story) -> str:
    """A run's answers to each of the held-out prompts, evaluation after evaluation."""
    by_prompt: dict[str, list[dict]] = {}
    for row in story.evaluations:
        by_prompt.setdefault(row["prompt"], []).append(row)
    parts = [f"<summary><b>{visible(story.name)}</b></summary>"]
    for prompt, rows in by_prompt.items():
        cards = map(card, at_most(MOST_EVALUATIONS, rows))
        answer = visible(rows[0]["answer"])
        parts.append(f'<pre class="prompt">{visible(prompt)}</pre>')
        parts.append(f'<span class="dim">answer: {answer}</span>')
        parts.append(f'<div class="cards" tabindex="0">{"".join(cards)}</div>')
    return f'<details open="">{"".join(parts)}</details>'


def card(row: dict) -> str:
    """An answer, with its verdict."""
    head, look = f"step {row['step']}: reward {row['reward']:g}", "card"
    if row["correct"] is not None:
        verdict = "right" if row["correct"] > 0.5 else "wrong"
        head, look = f"{head}, {verdict}", f"card {verdict}"
    head, shown = visible(head), visible(row["completion"])
    return f'<div class="{look}"><span class="head">{head}</span><pre>{shown}</pre></div>'


def flag_table(stories: list[Story]) -> str:
    """The resolved flags of all runs, those that differ marked."""
    names = [visible(story.name) for story in stories]
    lines = [f"<tr>{elements('th', ['flag', *names])}</tr>"]
    for name in dict.fromkeys(name for story in stories for name in story.flags):
        values = [visible(story.flags.get(name)) for story in stories]
        look = "same" if len(set(values)) == 1 else "differs"
        lines.append(f'<tr class="{look}">{elements("td", [visible(name), *values])}</tr>')
    summary = "<summary>all resolved flags; coloured: where these runs differ</summary>"
    return f'<details>{summary}<div class="wide"><table>{"".join(lines)}</table></div></details>'


# completions are hostile; should one get past visible(), the page still loads and runs nothing
HEAD = """
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; --c: #777 } * { box-sizing: border-box; overflow-wrap: anywhere }
body { margin: 0 auto; padding: 16px; max-width: 1400px; font: 15px/1.45 system-ui, sans-serif }
.grid { display: grid; gap: 20px; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)) }
figure { margin: 0 } .dim { color: #777 } text { fill: #777; font-size: 11px }
svg { display: block; width: 100% } .axis { stroke: #8885 } .dot { fill: var(--c) }
.curve { stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; fill: none }
.color0 { --c: #1a7fc9 } .color1 { --c: #c9590f } .color2 { --c: #0f8a66 }
.color3 { --c: #bf5595 } .color4 { --c: #8a7119 } .color5 { --c: #6f73d9 }
.key { margin-right: 14px } .key::before { content: "■ "; color: var(--c) }
.wide { overflow-x: auto } .differs { font-weight: 600; color: #c9590f }
td, th { padding: 3px 16px 3px 0; text-align: left; vertical-align: top; min-width: 120px }
.cards { display: flex; gap: 10px; overflow-x: auto; margin: 6px 0 20px }
.card { flex: 1 0 210px; max-width: 420px; padding: 8px 10px; background: #8882 }
.head, .prompt { font-weight: 600 } .right .head { color: #0f8a66 } .wrong .head { color: #d4453b }
pre { margin: 4px 0 0; white-space: pre-wrap; max-height: 320px; overflow-y: auto }
</style>
"""


def write_report(folders: list[Path], path: Path) -> None:
    """Writes one page about runs."""
    stories = [read_story(folder) for folder in folders]
    names = [story.name for story in stories]
    title = visible(f"Report of {', '.join(names)}")
    body = [f"<h1>{title}</h1>"]
    for i, story in enumerate(stories):
        body.append(f'<span class="key color{i}">{visible(story.name)}</span>')
        body.append(headline(story))
        sentences = map(visible, health(story.rows, story.flags))
        body.append(f"<ul>{elements('li', sentences)}</ul>")
    figures = [chart_figure(metric, stories) for metric in CHARTS]
    body.append(f'<h2>Metrics</h2><div class="grid">{"".join(figures)}</div>')
    body.append("<h2>The same held-out prompts at every evaluation</h2>")
    body += map(answers, stories)
    body.append(f"<h2>Flags</h2>{flag_table(stories)}")
    head = f"{HEAD}<title>{title}</title>"
    inside = "\n".join(body)
    replace_text(path, f'<!doctype html>\n<html lang="en">{head}{inside}</html>\n')


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
    folder = paths[-1]
    if len(paths) > 1:
        folder = folder.parent
    write_report(paths, folder / "report.html")
    print(f"the report is in {folder}/report.html")
    return 0
