"""Write a report on one or more runs: curves, a group inside an update, and held-out answers.

    python train.py --report runs/a runs/b

The page is a single file that runs no scripts and loads nothing."""

import html
import json
import math
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from support.console import duration
from support.data import printable, printable_lines
from support.errors import expecting, need
from support.health import health
from support.run_folder import replace_text

MOST_POINTS, MOST_DOTS = 200, 40  # per curve
MOST_CARDS = 12  # evaluations per prompt, completions per group
MOST_TOKENS = 400  # per completion
CARD = '<div class="card {}"><span class="head">{}</span><pre>{}</pre></div>'
# algorithm -> the ratio that it clips, either a completion's or a token's
CLIPS = dict.fromkeys(("gspo", "gspo-token", "luspo"), "s")
CLIPS |= dict.fromkeys(("grpo", "dr-grpo", "dapo", "ppo", "reinforce++"), "a token's ratio")


class Story(NamedTuple):
    name: str  # of the run's folder
    flags: dict  # config.json
    starts: list[dict]  # starts.jsonl, one row per start
    rows: list[dict]  # metrics.jsonl, one row per step
    evaluations: list[dict]  # evaluations.jsonl, one row per answer
    group: list[dict]  # samples.jsonl, the last group with tokens


def read_story(folder: Path) -> Story:
    """Read the files in a run's folder."""
    flags = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = [folder / f"{name}.jsonl" for name in ("starts", "metrics", "evaluations")]
    group = read_group(folder / "samples.jsonl")
    return Story(folder.resolve().name, flags, *map(read_rows, files), group)


def read_rows(path: Path) -> list[dict]:
    """Read a JSONL file, except for a last line that is still being written."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def read_group(path: Path) -> list[dict]:
    """Return the last group with tokens, without loading the whole file into memory."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        whole = (line for line in file if b'"log_ratios":' in line and line.endswith(b"\n"))
        rows = [json.loads(line) for line in deque(whole, maxlen=MOST_CARDS)]
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def points_of(story: Story, metric: str) -> list[tuple[float, float]]:
    """Return (step, value) pairs, starting with the evaluation before training."""
    rows = story.starts[:1] + story.rows
    return [(row["step"], row[metric]) for row in rows if metric in row]


def at_most(most: int, items: list) -> list:
    """Thin out a list evenly, keeping its first and last items."""
    size = max(1, math.ceil((len(items) - 1) / (most - 1)))
    return items[:-1:size] + items[-1:]


def visible(value) -> str:
    """Escape text for HTML, and replace characters that hide or reorder text with escapes."""
    return html.escape(printable_lines(str(value)))


class Chart(NamedTuple):
    healthy: str  # what is healthy, and the unit
    low: float = 0.0  # the axis always includes low and high, so that small changes look small
    high: float = 1e-6
    form: str = ",.3g"


CHARTS = {
    "eval_solved": Chart("Greedy accuracy on held-out prompts. Should rise.", 0, 1, ".1%"),
    "eval_solved_lenient": Chart("The same, but answers count in any format.", 0, 1, ".1%"),
    "solved": Chart("Sampled completions that are right. Should rise.", 0, 1, ".1%"),
    "reward": Chart("Mean over the completions trained on. Should rise.", 0, 1),
    "eval_reward": Chart("Mean greedy reward on held-out prompts. Should rise.", 0, 1),
    "length_mean": Chart("In tokens. Should not drift toward --max-new-tokens.", form=",.0f"),
    "truncated": Chart("Should stay near 0; if not, raise --max-new-tokens.", 0, 1, ".1%"),
    "dead": Chart("Groups whose rewards are equal. Near 100%, little is learned.", 0, 1, ".1%"),
    "entropy": Chart("In nats per token. Should fall slowly; near 0, exploration is over.", 0, 0.1),
    "clip_fraction": Chart("GSPO: half at first, a fifth later. GRPO: up to 2%.", 0, 1, ".1%"),
    "ratio_mean": Chart("GSPO: within 0.003 of 1.", 0.997, 1.003, ".4f"),
    "approx_kl": Chart("In nats, from π_old. Rises before a collapse."),
    "kl": Chart("In nats, from π_ref. Should grow slowly."),
    "sampler_kl": Chart("Trainer vs. sampler. In float32, 0 up to rounding.", 0, 1e-3),
    "grad_norm": Chart("Before clipping. Should be steady."),
    "tool_calls": Chart("Replies from --tool per completion.", 0, 1),
    "teacher_kl": Chart("In nats, from the teacher. Should fall."),
}


def chart_figure(metric: str, stories: list[Story]) -> str:
    """Draw one metric of all runs. Returns "" if no run has it."""
    chart = CHARTS[metric]
    curves = [at_most(MOST_POINTS, points_of(story, metric)) for story in stories]
    points = [point for curve in curves for point in curve]
    if not points:
        return ""
    steps, values = zip(*points)
    last = max(1, *steps)
    low, high = min(chart.low, *values), max(chart.high, *values)

    def place(step: float, value: float) -> tuple[float, float]:
        return 64 + 250 * step / last, 130 - 124 * (value - low) / (high - low)

    drawn = [f'<text x="314" y="145" text-anchor="end">step {last:g}</text>']
    for value in (low, (low + high) / 2, high):
        _, y = place(0, value)
        drawn.append(f'<path class="axis" d="M64 {y:.1f}H314"/>')
        drawn.append(f'<text x="58" y="{y + 4:.1f}" text-anchor="end">{value:{chart.form}}</text>')
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


def inside_update(story: Story) -> str:
    """Show the completions of a group, each token shaded by how far its probability moved."""
    group, flags = story.group, story.flags
    legend = (
        f"Completions for one prompt at the last update of step {visible(group[0]['step'])}. Since "
        'they were sampled, <span class="more by3">blue</span> tokens have become likelier and '
        '<span class="less by3">orange</span> ones less likely (hover over a token for its ratio). '
        "A is a completion's advantage, s the geometric mean of its ratios."
    )
    low, high = 0.0, math.inf
    if clips := CLIPS.get(flags["algo"]):
        low, high = 1 - flags["clip_low"], 1 + flags["clip_high"]
        band = f"A &gt; 0 and {clips} above {high:g}, or A &lt; 0 and {clips} below {low:g}"
        units = "completions" if clips == "s" else "tokens"
        legend += f' <span class="clipped">Underlined</span> {units} are clipped: {band}.'
    parts = [f"<h2>Inside an update of {visible(story.name)}</h2><p>{legend}</p>"]
    parts.append(f'<pre class="prompt">{visible(group[0]["prompt"])}</pre><div class="cards">')
    darkest = max(abs(move) for row in group for move in row["log_ratios"]) or 1e-9
    for row in group:
        s = math.exp(fmean(row["log_ratios"]))
        spans = ""
        for text, move, a in zip(row["tokens"][:MOST_TOKENS], row["log_ratios"], row["advantage"]):
            ratio = math.exp(move)
            look = f"{'more' if move > 0 else 'less'} by{4 * abs(move) / darkest:.0f}"
            limited = s if clips == "s" else ratio
            if (a > 0 and limited > high) or (a < 0 and limited < low):
                look += " clipped"
            spans += f'<span class="{look}" title="{ratio:.4f}">{visible(text)}</span>'
        _, words = judged(row)
        head = f"{words}, A {fmean(row['advantage']):+.2f}, s&#160;{s:.5f}"
        parts.append(CARD.format("", head, spans))
    return "".join([*parts, "</div>"])


def judged(row: dict) -> tuple[str, str]:
    """Return an answer's CSS class, and its reward in words."""
    words = "no verdict" if row["reward"] is None else f"reward {row['reward']:.3g}"
    if row.get("correct") is None:  # unknown in samples.jsonl, and to some verifiers
        return "", words
    look = "right" if row["correct"] > 0.5 else "wrong"
    return look, f"{words}, {look}"


def headline(story: Story) -> str:
    """Say what was trained, how, for how long, with what result, and by which command."""
    flags = story.flags
    seconds = sum(row["seconds_step"] for row in story.rows)  # without evaluations
    lines = [f"{flags['algo']}, {flags['model']} on {flags['data'] or flags['task']}"]
    lines[0] += f", lr {flags['lr']:g}, seed {flags['seed']}: training took {duration(seconds)}"
    forms = {"solved": ".1%", f"pass@{flags['eval_samples']}": ".1%", "reward": ".3g"}
    for name, form in forms.items():
        texts = [f"{y:{form}} (step {step})" for step, y in points_of(story, f"eval_{name}")]
        if texts:
            lines.append(f"held out, {name}: {texts[0]} → {texts[-1]}")
    lines += [f"{start['date']}: {start['command']}" for start in story.starts]
    return "".join(f"<div>{visible(line)}</div>" for line in lines)


def answers(story: Story) -> str:
    """Show how the answers to each held-out prompt changed, starting with those still wrong."""
    by_prompt: dict[str, list[dict]] = {}
    for row in story.evaluations:
        by_prompt.setdefault(row["prompt"], []).append(row)
    parts = [f"<summary><b>{visible(story.name)}</b></summary>"]
    for rows in sorted(by_prompt.values(), key=lambda rows: judged(rows[-1])[0] != "wrong"):
        parts.append(f'<pre class="prompt">{visible(rows[0]["prompt"])}</pre>')
        parts.append(f'<span class="dim">answer: {visible(rows[0]["answer"])}</span>')
        parts.append('<div class="cards">')
        for row in at_most(MOST_CARDS, rows):
            look, words = judged(row)
            head = visible(f"step {row['step']}: {words}")
            parts.append(CARD.format(look, head, visible(row["completion"])))
        parts.append("</div>")
    return f'<details open="">{"".join(parts)}</details>'


# hostile completions that get past visible() still can't load or run anything
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""


def write_report(folders: list[Path], page: Path) -> list[str]:
    """Write a page about one or more runs. Returns sentences about their health."""
    stories = [read_story(folder) for folder in folders]
    title = visible(f"Report on {', '.join(story.name for story in stories)}")
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    body = [HEAD, f"<style>{style}</style><title>{title}</title><h1>{title}</h1>"]
    said = []
    for i, story in enumerate(stories):
        sentences = health(story.rows, story.flags, story.starts[0]) or ["no problems found"]
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
    """Write a report into the folder of a single run, or next to the last of several runs."""
    need(arguments, "--report: expected folders of runs")
    folders = [Path(argument) for argument in arguments]
    place = folders[0] if len(folders) == 1 else folders[-1].parent
    # files from another version or program may lack fields
    with expecting(f"--report {' '.join(arguments)}: cannot make a page from these runs"):
        for sentence in write_report(folders, place / "report.html"):
            print(printable(sentence))
    print(f"the report is in {place}/report.html")
    return 0
