"""Write the page of a run: curves, a group inside an update, answers to held-out prompts, flags.

    python train.py --report runs/a runs/b
    python train.py --report runs/a docs/runs/published/math-qwen2.5-math-1.5b.csv

The page is one file without scripts that loads nothing. A CSV file has published points."""

import csv
import html
import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from support.data import printable
from support.folders import replace_text
from support.health import health
from support.user import expecting, need

MOST_POINTS, MOST_DOTS = 200, 40  # of a curve
MOST_CARDS = 12  # evaluations of a prompt, completions of a group
MOST_TOKENS = 400  # of a completion


class Story(NamedTuple):
    """The files of one run, or points that somebody published: rows with a source, no flags."""

    name: str
    flags: dict  # config.json
    starts: list[dict]  # starts.jsonl, a line a start
    rows: list[dict]  # metrics.jsonl, a line a step
    evaluations: list[dict]  # evaluations.jsonl, a line an answer
    group: Sequence[dict] = ()  # samples.jsonl: the last completions that have their tokens
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
    [flags], starts, rows, evaluations = files
    group = read_group(folder / "samples.jsonl")
    return Story(folder.resolve().name, flags, starts, rows, evaluations, group)


def read_group(path: Path) -> list[dict]:
    """Return the last group of completions that has its tokens. Older runs have none."""
    if not path.exists():
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        whole = (line for line in file if '"log_ratios":' in line and line.endswith("\n"))
        rows = [json.loads(line) for line in deque(whole, maxlen=MOST_CARDS)]
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def read_points(path: Path) -> Story:
    """Read published points. Lines that begin with # name the source."""
    with expecting(f"{path}: expected a CSV file with the columns step and eval_solved"):
        lines = path.read_text(encoding="utf-8").splitlines()
        source = " ".join(line.strip("# ") for line in lines if line.startswith("#"))
        table = csv.DictReader(line for line in lines if not line.startswith("#"))
        rows = [{name: float(row[name]) for name in ("step", "eval_solved")} for row in table]
        need(rows and all(0 <= row["eval_solved"] <= 1 for row in rows), "no shares from 0 to 1")
    rows.sort(key=lambda row: row["step"])
    return Story(path.stem, flags={}, starts=[], rows=rows, evaluations=[], source=source)


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
    return html.escape("\n".join(map(printable, text.split("\n"))))


def elements(name: str, pieces: Iterable[str]) -> str:
    """Return an element around each piece of HTML."""
    return "".join(f"<{name}>{piece}</{name}>" for piece in pieces)


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
    "seconds_step": Chart("without evaluations", form=",.4g"),
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

    drawn = ['<text x="44" y="145" text-anchor="end">step</text><text x="50" y="145">0</text>']
    drawn.append(f'<text x="300" y="145" text-anchor="end">{last:g}</text>')
    for value in (low, (low + high) / 2, high):
        _, y = place(0, value)
        label = f"{value:{chart.form.replace('.1', '.0').replace('.3', '.2')}}"
        drawn.append(f'<path class="axis" d="M50 {y:.1f}H300"/>')
        drawn.append(f'<text x="44" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    title = f"<figcaption><b>{metric}</b> "
    for i, (story, curve) in enumerate(zip(stories, curves)):
        if not curve:
            continue
        line, dot = ("curve", "dot") if story.flags else ("published", "hollow")
        title += f'<span class="key color{i}">{curve[-1][1]:{chart.form}}</span>'
        path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in curve)
        drawn.append(f'<path class="{line} color{i}" d="M{path}"/>')
        for step, value in at_most(MOST_DOTS, curve):
            where = 'cx="{:.1f}" cy="{:.1f}" r="2.5"'.format(*place(step, value))
            note = f"<title>step {step:g}: {value:{chart.form}}</title>"
            drawn.append(f'<circle class="{dot} color{i}" {where}>{note}</circle>')
    picture = f'<svg viewBox="0 0 320 150" role="img" aria-label="{metric}">{"".join(drawn)}</svg>'
    return f'<figure>{title}</figcaption>{picture}<div class="dim">{chart.healthy}</div></figure>'


# ---- inside an update ----------------------------------------------------------------------------

ONE_RATIO = ("gspo", "gspo-token", "luspo")  # s, of a completion. Others have one for each token


def band_of(flags: dict) -> tuple[float, float]:
    """Return the bounds of the ratio. There are none without a clip, and DPPO's bound pi itself."""
    low, high = flags.get("clip_low"), flags.get("clip_high")
    if low is None or flags["algo"] == "dppo":
        return -math.inf, math.inf
    if flags["algo"] == "gmpo":  # bounds of the log-ratio
        return math.exp(-low), math.exp(high)
    return 1 - low, 1 + high


def in_loss(row: dict, flags: dict) -> list[tuple[float, float, bool]]:
    """Return each token's ratio in the loss, its advantage, and whether the clip stopped it."""
    low, high = band_of(flags)
    moves, advantages = row["log_ratios"], row["advantage"]
    if flags["algo"] in ONE_RATIO:
        moves = [fmean(moves)] * len(moves)
    if not isinstance(advantages, list):  # with a critic each token has its own
        advantages = [advantages] * len(moves)
    pairs = zip(map(math.exp, moves), advantages)
    # as in the losses: clipped < unclipped
    return [(ratio, A, min(max(ratio, low), high) * A < ratio * A) for ratio, A in pairs]


def inside_update(story: Story) -> str:
    """Show each completion's tokens, shaded by their ratio, below the ratios in the loss."""
    losses = [in_loss(row, story.flags) for row in story.group]
    low, high = band_of(story.flags)
    clips = math.isfinite(high)
    darkest = max(abs(move) for row in story.group for move in row["log_ratios"]) or 1e-9
    ratios = [ratio for loss in losses for ratio, _, _ in loss] + [low, high] * clips
    reach = max(abs(ratio - 1) for ratio in ratios) or 1.0
    left, right = (150 * min(max((edge - 1) / reach, -1), 1) for edge in (low, high))
    strip = f'<rect class="band" x="{left:.1f}" width="{right - left:.1f}" height="16"/>'
    said = f"The last update of step {story.group[0]['step']}. Blue tokens became likelier, orange "
    said += f"ones less likely, up to {math.exp(darkest):.3g} times. Bars: the loss's ratios"
    if clips:
        said += f". Grey: the band, {low:.5g} to {high:.5g}. Red: stopped by the clip"
    parts = [f'<h2>Inside an update of {visible(story.name)}</h2><p class="dim">{said}.</p>']
    parts.append(
        f'<pre class="prompt">{visible(story.group[0]["prompt"])}</pre><div class="cards">'
    )
    for row, loss in zip(story.group, losses):
        bars, spans = set(), []
        for text, move, (ratio, _, stopped) in zip(row["tokens"], row["log_ratios"], loss):
            look = "stopped" if stopped else "kept"
            bars.add(f'<path class="curve {look}" d="M{150 * (ratio - 1) / reach:.0f} 2V14"/>')
            look += f" {'more' if move > 0 else 'less'} by{4 * abs(move) / darkest:.0f}"
            span = f'<span class="{look}" title="{math.exp(move):.4f}">'
            spans.append(f"{span}{visible(text)}</span>")
        s = math.exp(fmean(row["log_ratios"]))
        head = f"A {fmean(A for _, A, _ in loss):+.2f}, s {s:.5f}"
        if clips:
            head += f": {sum(stopped for *_, stopped in loss)} of {len(loss)} tokens stopped"
        parts.append(f'<div class="card"><span class="head">{head}</span>')
        parts.append(f'<svg viewBox="-152 0 304 16">{strip}{"".join(sorted(bars))}</svg>')
        parts.append(f"<pre>{''.join(spans[:MOST_TOKENS])}</pre></div>")
    return "".join([*parts, "</div>"])


def headline(story: Story) -> str:
    """Say which model was trained, from where to where, when, and by which command."""
    flags = story.flags
    lines = [f"{flags['algo']}, {flags['model']} on {flags['data'] or flags['task']}"]
    for metric, form in (("eval_solved", "{:.1%}"), ("eval_reward", "mean reward {:.2f}")):
        texts = [f"{form.format(y)} (step {step})" for step, y in points_of(story, metric)]
        if texts:
            lines.append(f"held out {texts[0]} → {texts[-1]}")
    lines += [f"{start['date']}: {start['command']}" for start in story.starts]
    return elements("div", map(visible, lines))


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
            parts.append(f'<div class="card {verdict}"><span class="head">{head}</span>')
            parts.append(f"<pre>{visible(row['completion'])}</pre></div>")
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
    summary = "<summary>all flags; coloured if the runs differ</summary>"
    return f'<details>{summary}<div class="wide"><table>{"".join(lines)}</table></div></details>'


# completions are hostile: if one gets past visible(), the page still loads and runs nothing
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""


def write_report(paths: list[Path], page: Path) -> list[str]:
    """Write one page about runs and published points. Return sentences about the runs."""
    stories = [read_points(path) if path.suffix == ".csv" else read_story(path) for path in paths]
    runs = [story for story in stories if story.flags]
    title = visible(f"Report of {', '.join(story.name for story in runs)}")
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    body = [HEAD, f"<style>{style}</style><title>{title}</title><h1>{title}</h1>"]
    said = []
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
    body += [inside_update(story) for story in runs if story.group]
    body += ["<h2>The same held-out prompts at every evaluation</h2>", *map(answers, runs)]
    body.append(f"<h2>Flags</h2>{flag_table(runs)}</html>\n")
    replace_text(page, "\n".join(body))
    return said


def main(arguments: list[str]) -> int:
    """Write one page of runs, next to the last of them, and print the sentences of each."""
    paths = [Path(argument) for argument in arguments]
    folders = [path for path in paths if path.suffix != ".csv"]
    need(folders, "--report: expected folders of runs")
    place = folders[0] if len(folders) == 1 else folders[-1].parent
    # a missing field: the files of another version, or of another program
    with expecting(f"--report {' '.join(arguments)}: cannot make a page of these runs"):
        for sentence in write_report(paths, place / "report.html"):
            print(printable(sentence))
    print(f"the report is in {place}/report.html")
    return 0
