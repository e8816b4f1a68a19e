"""Write the page of a run: curves, a group inside an update, answers to held-out prompts.

    python train.py --report runs/a runs/b

The page is one file without scripts that loads nothing."""

import html
import json
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from support.data import printable, printable_lines
from support.errors import expecting, need
from support.health import health
from support.run_folder import replace_text

MOST_POINTS, MOST_DOTS = 200, 40  # of a curve
MOST_CARDS = 12  # evaluations of a prompt, completions of a group
MOST_TOKENS = 400  # of a completion


class Story(NamedTuple):
    """The files of one run."""

    name: str
    flags: dict  # config.json
    starts: list[dict]  # starts.jsonl, a line a start
    rows: list[dict]  # metrics.jsonl, a line a step
    evaluations: list[dict]  # evaluations.jsonl, a line an answer
    group: Sequence[dict] = ()  # samples.jsonl: the last completions that have their tokens


def read_story(folder: Path) -> Story:
    """Read a run's folder."""
    flags = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    starts = read_rows(folder / "starts.jsonl")
    rows = read_rows(folder / "metrics.jsonl")
    evaluations = read_rows(folder / "evaluations.jsonl")
    group = read_group(folder / "samples.jsonl")
    return Story(folder.resolve().name, flags, starts, rows, evaluations, group)


def read_rows(path: Path) -> list[dict]:
    """Read a JSONL file. A last line without an end is still being written."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def read_group(path: Path) -> list[dict]:
    """Return the last group of completions that has its tokens. Older runs have none."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        whole = (line for line in file if b'"log_ratios":' in line and line.endswith(b"\n"))
        rows = [json.loads(line) for line in deque(whole, maxlen=MOST_CARDS)]
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def points_of(story: Story, metric: str) -> list[tuple[float, float]]:
    """Return (step, value), from the evaluation before training on."""
    rows = story.starts[:1] + story.rows
    return [(row["step"], row[metric]) for row in rows if metric in row]


def at_most(most: int, items: list) -> list:
    """Return some of them, evenly chosen, always the first and the last."""
    size = max(1, math.ceil((len(items) - 1) / (most - 1)))
    return items[:-1:size] + items[-1:]


# ---- charts --------------------------------------------------------------------------------------


def visible(value) -> str:
    """Return text as escaped HTML. Characters that hide or reorder text are shown by their code."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return html.escape(printable_lines(text))


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
    "eval_reward": Chart("mean reward of held-out prompts, greedy. Rises", 0, 1, ".2f"),
    "length_mean": Chart("tokens. No drift to --max-new-tokens", form=",.0f"),
    "truncated": Chart("near 0, else raise --max-new-tokens", 0, 1, ".1%"),
    "dead": Chart("groups with one reward for all. Near 100% little is learned", 0, 1, ".1%"),
    "entropy": Chart("nats. Falls slowly. Near 0 exploration is over", 0, 0.1),
    "clip_fraction": Chart("GSPO half at first, a quarter at the end. GRPO to 2%", 0, 1, ".1%"),
    "ratio_mean": Chart("GSPO: within 0.003 of 1", 0.997, 1.003, ".4f"),
    "approx_kl": Chart("nats to π_old. A rise comes before collapse"),
    "kl": Chart("nats to π_ref. Grows slowly"),
    "sampler_kl": Chart("trainer to sampler. 0 up to rounding in float32", 0, 1e-3),
    "grad_norm": Chart("before clipping. Steady"),
    "tool_calls": Chart("replies of --tool in a completion", 0, 1),
    "teacher_kl": Chart("nats to the teacher. Falls"),
}


def chart_figure(metric: str, stories: list[Story]) -> str:
    """Draw one metric of all runs. Return "" if no run has it."""
    chart = CHARTS[metric]
    curves = [at_most(MOST_POINTS, points_of(story, metric)) for story in stories]
    points = [point for curve in curves for point in curve]
    if not points:
        return ""
    steps, values = zip(*points)
    last = max(1, *steps)
    low, high = min(chart.low, *values), max(chart.high, *values)

    def place(step: float, value: float) -> tuple[float, float]:
        return 50 + 250 * step / last, 130 - 124 * (value - low) / (high - low)

    drawn = [f'<text x="300" y="145" text-anchor="end">step {last:g}</text>']
    for value in (low, (low + high) / 2, high):
        _, y = place(0, value)
        drawn.append(f'<path class="axis" d="M50 {y:.1f}H300"/>')
        drawn.append(f'<text x="44" y="{y + 4:.1f}" text-anchor="end">{value:{chart.form}}</text>')
    title = f"<figcaption><b>{metric}</b> "
    for i, curve in enumerate(curves):
        if not curve:
            continue
        title += f'<span class="key color{i}">{curve[-1][1]:{chart.form}}</span>'
        path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in curve)
        drawn.append(f'<path class="curve color{i}" d="M{path}"/>')
        for step, value in at_most(MOST_DOTS, curve):
            where = 'cx="{:.1f}" cy="{:.1f}" r="2.5"'.format(*place(step, value))
            note = f"<title>step {step:g}: {value:{chart.form}}</title>"
            drawn.append(f'<circle class="dot color{i}" {where}>{note}</circle>')
    picture = f'<svg viewBox="0 0 320 150" role="img" aria-label="{metric}">{"".join(drawn)}</svg>'
    return f'<figure>{title}</figcaption>{picture}<div class="dim">{chart.healthy}</div></figure>'


# ---- texts ---------------------------------------------------------------------------------------


def inside_update(story: Story) -> str:
    """Show the completions of a group, each token shaded by how far its probability moved."""
    group = story.group
    darkest = max(abs(move) for row in group for move in row["log_ratios"]) or 1e-9
    said = "The last update of step {}. Blue tokens became likelier, orange ones less likely."
    parts = [f"<h2>Inside an update of {visible(story.name)}</h2>"]
    parts.append(f'<p class="dim">{said.format(group[0]["step"])}</p>')
    parts.append(f'<pre class="prompt">{visible(group[0]["prompt"])}</pre><div class="cards">')
    for row in group:
        spans = []
        for text, move in zip(row["tokens"][:MOST_TOKENS], row["log_ratios"]):
            look = f"{'more' if move > 0 else 'less'} by{4 * abs(move) / darkest:.0f}"
            ratio = math.exp(move)
            spans.append(f'<span class="{look}" title="{ratio:.4f}">{visible(text)}</span>')
        s = math.exp(fmean(row["log_ratios"]))
        head = f"A {fmean(row['advantage']):+.2f}, s {s:.5f}"
        parts.append(card("", head, "".join(spans)))
    return "".join([*parts, "</div>"])


def card(look: str, head: str, body: str) -> str:
    """Return a completion in a box below a line about it, both as HTML."""
    title = f'<span class="head">{head}</span>'
    return f'<div class="card {look}">{title}<pre>{body}</pre></div>'


def headline(story: Story) -> str:
    """Say which model was trained, from where to where, when, and by which command."""
    flags = story.flags
    lines = [f"{flags['algo']}, {flags['model']} on {flags['data'] or flags['task']}"]
    for metric, form in (("eval_solved", "{:.1%}"), ("eval_reward", "mean reward {:.2f}")):
        texts = [f"{form.format(y)} (step {step})" for step, y in points_of(story, metric)]
        if texts:
            lines.append(f"held out {texts[0]} → {texts[-1]}")
    lines += [f"{start['date']}: {start['command']}" for start in story.starts]
    return "".join(f"<div>{visible(line)}</div>" for line in lines)


def answers(story: Story) -> str:
    """Show a run's answers to each of the held-out prompts, evaluation after evaluation."""
    by_prompt: dict[str, list[dict]] = {}
    for row in story.evaluations:
        by_prompt.setdefault(row["prompt"], []).append(row)
    parts = [f"<summary><b>{visible(story.name)}</b></summary>"]
    for prompt, rows in by_prompt.items():
        parts.append(f'<pre class="prompt">{visible(prompt)}</pre>')
        answer = f'<span class="dim">answer: {visible(rows[0]["answer"])}</span>'
        parts.append(f'{answer}<div class="cards">')
        for row in at_most(MOST_CARDS, rows):
            verdict = "unjudged"
            if row["correct"] is not None:
                verdict = "right" if row["correct"] > 0.5 else "wrong"
            head = visible(f"step {row['step']}: reward {row['reward']:.3g}, {verdict}")
            parts.append(card(verdict, head, visible(row["completion"])))
        parts.append("</div>")
    return f'<details open="">{"".join(parts)}</details>'


# completions are hostile: if one gets past visible(), the page still loads and runs nothing
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""


def write_report(folders: list[Path], page: Path) -> list[str]:
    """Write one page about runs. Return sentences about them."""
    stories = [read_story(folder) for folder in folders]
    title = visible(f"Report of {', '.join(story.name for story in stories)}")
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    body = [HEAD, f"<style>{style}</style><title>{title}</title><h1>{title}</h1>"]
    said = []
    for i, story in enumerate(stories):
        sentences = health(story.rows, story.flags, story.starts[0]) or ["nothing unhealthy"]
        said += [f"{story.name}: {sentence}" for sentence in sentences]
        body.append(f'<b><span class="key color{i}">{visible(story.name)}</span></b>')
        body += [headline(story), *(f"<p>{visible(sentence)}</p>" for sentence in sentences)]
    figures = [chart_figure(metric, stories) for metric in CHARTS]
    body.append(f'<h2>Metrics</h2><div class="grid">{"".join(figures)}</div>')
    body += [inside_update(story) for story in stories if story.group]
    body += ["<h2>The same held-out prompts at every evaluation</h2>", *map(answers, stories)]
    replace_text(page, "\n".join([*body, "</html>\n"]))
    return said


def main(arguments: list[str]) -> int:
    """Write one page of runs, next to the last of them, and print the sentences of each."""
    need(arguments, "--report: expected folders of runs")
    folders = [Path(argument) for argument in arguments]
    place = folders[0] if len(folders) == 1 else folders[-1].parent
    # a missing field: the files of another version, or of another program
    with expecting(f"--report {' '.join(arguments)}: cannot make a page of these runs"):
        for sentence in write_report(folders, place / "report.html"):
            print(printable(sentence))
    print(f"the report is in {place}/report.html")
    return 0
