"""Write the page of a run: curves, the same held-out prompts at every evaluation, all flags.

    python train.py --report runs/a runs/b
    python train.py --report runs/a docs/runs/published/math-qwen2.5-math-1.5b.csv

The page is one file without a script, and it loads nothing. Sentences name problems of the run and
their usual remedies. A CSV file with the columns step and eval_solved has published points."""

import csv
import html
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from support.data import printable
from support.folders import replace_text
from support.health import health
from support.user import expecting, need

MOST_POINTS = 200  # of a curve
MOST_DOTS = 40
MOST_EVALUATIONS = 12  # of a prompt


class Story(NamedTuple):
    """The files of one run, or points that somebody published: rows with a source, no flags."""

    name: str
    flags: dict  # config.json
    starts: list[dict]  # starts.jsonl, a line a start
    rows: list[dict]  # metrics.jsonl, a line a step
    evaluations: list[dict]  # evaluations.jsonl, a line an answer
    source: str = ""  # of published points


def read_story(folder: Path) -> Story:
    """Read a run's folder."""
    files = []
    for name in ("config.json", "starts.jsonl", "metrics.jsonl", "evaluations.jsonl"):
        with expecting(f"{folder / name}: expected a file of a run"):
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            # a last line without an end is still being written
            lines = [text] if name == "config.json" else text.split("\n")[:-1]
            files.append([json.loads(line) for line in lines])
    [flags], *rest = files
    return Story(folder.resolve().name, flags, *rest)


def read_points(path: Path) -> Story:
    """Read published points. Lines that begin with # name the source."""
    with expecting(f"{path}: expected a CSV file with the columns step and eval_solved"):
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [line.strip("# ") for line in lines if line.startswith("#")]
        table = csv.DictReader(line for line in lines if not line.startswith("#"))
        points = sorted((float(row["step"]), float(row["eval_solved"])) for row in table)
        shares = all(0 <= solved <= 1 for _, solved in points)
        need(points and shares, "expected steps, and shares from 0 to 1")
    rows = [{"step": step, "eval_solved": solved} for step, solved in points]
    return Story(path.stem, {}, [], rows, [], source=" ".join(comments))


def points_of(story: Story, metric: str) -> list[tuple[float, float]]:
    """Return (step, value), from the evaluation before training on."""
    rows = story.starts[:1] + story.rows
    return [(row["step"], row[metric]) for row in rows if metric in row]


# ---- HTML and SVG --------------------------------------------------------------------------------


def visible(value) -> str:
    """Return text as escaped HTML. Characters that hide or reorder text are shown by their code."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return html.escape("\n".join(map(printable, text.split("\n"))))


def elements(name: str, inside: Iterable[str]) -> str:
    """Return an element around each piece of HTML."""
    return "".join(f"<{name}>{each}</{name}>" for each in inside)


class Plot(NamedTuple):
    """A chart's axes, and the way from values to places."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float = 50.0
    right: float = 300.0
    top: float = 6.0
    bottom: float = 130.0

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

    def dots(self, points: list[tuple[float, float]], look: str, form=",.3g", radius=2.5):
        """Draw dots that show their numbers under the mouse."""
        for x, y in points:
            place = f'cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}"'
            note = f"<title>step {x:g}: {y:{form}}</title>"
            yield f'<circle class="{look}" {place}>{note}</circle>'

    def ticks_of_y(self, labels: dict[float, str]) -> Iterator[str]:
        """Draw lines across, each with its label."""
        for value, label in labels.items():
            y = self.y(value)
            yield f'<path class="axis" d="M{self.left} {y:.1f}H{self.right}"/>'
            yield f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'

    def ticks_of_x(self, values: list[float], name: str) -> Iterator[str]:
        """Write the numbers of the steps below, after the axis's name."""
        y = self.bottom + 15
        yield f'<text x="{self.left - 6}" y="{y}" text-anchor="end">{name}</text>'
        for value in values:
            yield f'<text x="{self.x(value):.1f}" y="{y}" text-anchor="middle">{value:g}</text>'


def round_ticks(low: float, high: float) -> list[float]:
    """Return two to six round numbers between low and high."""
    decade = 10.0 ** math.floor(math.log10(high - low))
    steps = [factor * decade for factor in (0.2, 0.5, 1, 2)]
    step = next(step for step in steps if high - low <= 5 * step)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [step * number for number in range(first, last + 1)]


class Chart(NamedTuple):
    healthy: str  # and the unit
    low: float = 0.0  # the axis always shows low and high, so that small changes look small
    high: float = 1e-6
    form: str = ",.3g"


CHARTS = {
    "eval_solved": Chart("held-out prompts, greedy. Rises with solved", 0, 1, ".1%"),
    "eval_solved_lenient": Chart("the same answers in any format", 0, 1, ".1%"),
    "solved": Chart("sampled completions that are right. Rises with the reward", 0, 1, ".1%"),
    "reward": Chart("mean over the completions trained on. Rises", 0, 1, ".2f"),
    "eval_reward": Chart("held-out prompts, greedy, without a verdict. Rises", 0, 1, ".2f"),
    "length_mean": Chart("tokens. No drift to --max-new-tokens", form=",.0f"),
    "truncated": Chart("near 0, else raise --max-new-tokens", 0, 1, ".1%"),
    "dead": Chart("groups with one reward for all. Near 100% little is learned", 0, 1, ".1%"),
    "entropy": Chart("nats. Falls slowly. Near 0 exploration is over", 0, 0.1),
    "clip_fraction": Chart("GSPO 10 to 60%, less at the end. GRPO up to 2%", 0, 1, ".1%"),
    "ratio_mean": Chart("GSPO: within 0.003 of 1", 0.997, 1.003, ".4f"),
    "approx_kl": Chart("nats to π_old. A rise comes before collapse"),
    "kl": Chart("nats to π_ref. Grows slowly"),
    "sampler_kl": Chart("trainer to sampler. 0 up to rounding in float32", 0, 1e-3),
    "grad_norm": Chart("before clipping. Steady"),
    "tool_calls": Chart("replies of --tool in a completion", 0, 1),
    "teacher_kl": Chart("nats to the teacher. Falls"),
    "seconds_step": Chart("without evaluations", form=",.4g"),
}


def at_most(most: int, items: list) -> list:
    """Return some of them, evenly chosen, always the first and the last."""
    size = max(1, math.ceil((len(items) - 1) / (most - 1)))
    return items[:-1:size] + items[-1:]


def chart_figure(metric: str, stories: list[Story]) -> str:
    """Draw one metric of all runs. Return "" if no run has it."""
    chart = CHARTS[metric]
    curves = [at_most(MOST_POINTS, points_of(story, metric)) for story in stories]
    points = [point for curve in curves for point in curve]
    if not points:
        return ""
    steps, values = zip(*points)
    y_range = min(chart.low, *values), max(chart.high, *values)
    plot = Plot((0, max(1, *steps)), y_range)
    form = chart.form.replace(".1%", ".0%")
    labels = {tick: f"{tick:{form}}" for tick in round_ticks(*y_range)}
    drawn = [*plot.ticks_of_y(labels), *plot.ticks_of_x(round_ticks(*plot.x_range), "step")]
    title = f"<figcaption><b>{metric}</b> "
    for i, (story, curve) in enumerate(zip(stories, curves)):
        if curve:
            line, dot = ("curve", "dot") if story.flags else ("published", "hollow")
            title += f'<span class="key color{i}">{curve[-1][1]:{chart.form}}</span>'
            drawn.append(plot.line(curve, f"{line} color{i}"))
            drawn += plot.dots(at_most(MOST_DOTS, curve), f"{dot} color{i}", chart.form)
    picture = f'<svg viewBox="0 0 320 150" role="img" aria-label="{metric}">{"".join(drawn)}</svg>'
    healthy = f'<div class="dim">{visible(chart.healthy)}</div>'
    return f"<figure>{title}</figcaption>{picture}{healthy}</figure>"


# ---- the page ------------------------------------------------------------------------------------


def headline(story: Story) -> str:
    """Say which model was trained, from where to where, when, and by which command."""
    flags = story.flags
    data = flags["data"] or flags["task"]
    parts = [f"{flags['algo']}, {flags['model']} on {data}"]
    solved = points_of(story, "eval_solved")
    if solved:
        (first, before), (last, after) = solved[0], solved[-1]
        parts.append(f"held out {before:.1%} (step {first}) → {after:.1%} (step {last})")
    parts += [f"{start['date']}: {start['command']}" for start in story.starts]
    return elements("div", map(visible, parts))


def answers(story: Story) -> str:
    """Show a run's answers to each of the held-out prompts, evaluation after evaluation."""
    by_prompt: dict[str, list[dict]] = {}
    for row in story.evaluations:
        by_prompt.setdefault(row["prompt"], []).append(row)
    parts = [f"<summary><b>{visible(story.name)}</b></summary>"]
    for prompt, rows in by_prompt.items():
        parts.append(f'<pre class="prompt">{visible(prompt)}</pre>')
        parts.append(f'<span class="dim">answer: {visible(rows[0]["answer"])}</span>')
        parts.append('<div class="cards" tabindex="0">')
        for row in at_most(MOST_EVALUATIONS, rows):
            verdict = "unjudged"
            if row["correct"] is not None:
                verdict = "right" if row["correct"] > 0.5 else "wrong"
            head = visible(f"step {row['step']}: reward {row['reward']:.3g}, {verdict}")
            shown = f'<span class="head">{head}</span><pre>{visible(row["completion"])}</pre>'
            parts.append(f'<div class="card {verdict}">{shown}</div>')
        parts.append("</div>")
    return f'<details open="">{"".join(parts)}</details>'


def flag_table(stories: list[Story]) -> str:
    """List the resolved flags of all runs, and mark those that differ."""
    names = [visible(story.name) for story in stories]
    lines = [f"<tr>{elements('th', ['flag', *names])}</tr>"]
    for name in dict.fromkeys(name for story in stories for name in story.flags):
        values = [visible(story.flags.get(name)) for story in stories]
        look = "same" if len(set(values)) == 1 else "differs"
        lines.append(f'<tr class="{look}">{elements("td", [visible(name), *values])}</tr>')
    summary = "<summary>all resolved flags; coloured if the runs differ</summary>"
    return f'<details>{summary}<div class="wide"><table>{"".join(lines)}</table></div></details>'


# completions are hostile: if one gets past visible(), the page still loads and runs nothing
HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; --c: #777 } * { box-sizing: border-box; overflow-wrap: anywhere }
body { margin: 0 auto; padding: 16px; max-width: 1400px; font: 15px/1.45 system-ui, sans-serif }
.grid { display: grid; gap: 24px; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)) }
figure { margin: 0 } figcaption { margin-bottom: 2px } .dim { color: #777; font-size: 13px }
text { fill: #777; font-size: 11px } svg { display: block; width: 100% } .axis { stroke: #8885 }
.curve, .published, .hollow { stroke: var(--c); stroke-width: 1.6; fill: none }
.published { stroke-dasharray: 3 4 } .dot { fill: var(--c) } path { stroke-linejoin: round }
.color0 { --c: #1a7fc9 } .color1 { --c: #c9590f } .color2 { --c: #0f8a66 }
.color3 { --c: #bf5595 } .color4 { --c: #8a7119 } .color5 { --c: #6f73d9 }
.key { margin-right: 14px; white-space: nowrap } .key::before { content: "■ "; color: var(--c) }
.wide { overflow-x: auto } .differs { font-weight: 600; color: #c9590f }
td, th { padding: 3px 16px 3px 0; text-align: left; vertical-align: top; min-width: 120px }
.cards { display: flex; gap: 10px; overflow-x: auto; margin: 6px 0 20px }
.card { flex: 1 0 210px; max-width: 420px; padding: 8px 10px; background: #8882 }
.head, .prompt { font-weight: 600 } .right .head { color: #0f8a66 } .wrong .head { color: #d4453b }
pre { margin: 4px 0 0; white-space: pre-wrap; max-height: 320px; overflow-y: auto }
</style>
"""


def write_report(paths: list[Path], path: Path) -> list[str]:
    """Write one page about runs and published points. Return sentences about the runs."""
    stories = [read_points(each) if each.suffix == ".csv" else read_story(each) for each in paths]
    runs = [story for story in stories if story.flags]
    title = visible(f"Report of {', '.join(story.name for story in runs)}")
    body, said = [HEAD, f"<title>{title}</title><h1>{title}</h1>"], []
    for i, story in enumerate(stories):
        body.append(f'<b><span class="key color{i}">{visible(story.name)}</span></b>')
        if not story.flags:
            body.append(f"<p>published, dashed: {visible(story.source)}</p>")
            continue
        sentences = health(story.rows, story.flags, *story.starts[:1]) or ["nothing unhealthy"]
        said += [f"{story.name}: {sentence}" for sentence in sentences]
        body += [headline(story), f"<ul>{elements('li', map(visible, sentences))}</ul>"]
    figures = [chart_figure(metric, stories) for metric in CHARTS]
    body.append(f'<h2>Metrics</h2><div class="grid">{"".join(figures)}</div>')
    body.append("<h2>The same held-out prompts at every evaluation</h2>")
    body += map(answers, runs)
    body.append(f"<h2>Flags</h2>{flag_table(runs)}</html>\n")
    replace_text(path, "\n".join(body))
    return said


def main(arguments: list[str]) -> int:
    """Write one page of runs, next to the last of them, and print the sentences of each."""
    paths = [Path(each) for each in arguments]
    folders = [path for path in paths if path.suffix != ".csv"]
    need(folders, "--report: expected folders of runs")
    place = folders[0] if len(folders) == 1 else folders[-1].parent
    # a missing field: the files of another version, or of another program
    with expecting(f"--report {' '.join(arguments)}: cannot make a page of these runs"):
        for sentence in write_report(paths, place / "report.html"):
            print(printable(sentence))
    print(f"the report is in {place}/report.html")
    return 0
