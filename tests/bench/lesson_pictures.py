"""Draw weights.svg and clip.svg of the lesson: python tests/bench/lesson_pictures.py

A picture has a light and a dark look. Words and numbers repeat the meaning of the colours."""

import html
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import exercises  # noqa: E402

import gspo  # noqa: E402

FOLDER = ROOT / "docs/pictures"
WIDTH = 480  # shown 640 wide
STYLE = """
svg { --page: #ffffff; --text: #1f2328; --dim: #57606a; --line: #d0d7de; --up: #0067b1;
  --down: #b84a00; font-size: 13px;
  font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --text: #e6edf3; --dim: #9aa4af;
  --line: #373e47; --up: #58b0f0; --down: #f4a25c } }
.page { fill: var(--page) } text { fill: var(--text) } .dim { fill: var(--dim) }
.title { font-size: 16px; font-weight: 600 } .bold { font-weight: 600 }
.small { font-size: 12px } .middle { text-anchor: middle } .end { text-anchor: end }
.up { fill: var(--up) } .down { fill: var(--down) } .none { fill: none; stroke: var(--line) }
.axis { stroke: var(--line); fill: none } .zone { fill: var(--dim); opacity: 0.12 }
.curve { stroke: var(--up); stroke-width: 2.4; fill: none }
.flat { stroke: var(--down); stroke-width: 2.4; stroke-dasharray: 6 4; fill: none }
.faint { stroke: var(--dim); stroke-dasharray: 2 4; fill: none }
"""


def words(x: float, y: float, said: str, look: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{look}">{html.escape(said)}</text>'


def box(x: float, y: float, width: float, height: float, look: str, opacity: float = 1) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {size} class="{look}" fill-opacity="{opacity:.2f}"/>'


def path(points: list[tuple[float, float]], look: str) -> str:
    return f'<path class="{look}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def page(title: str, described: str, height: int, drawn: list[str]) -> str:
    """Return a whole file: title and description for screen readers, the page, the drawing."""
    opening = f'viewBox="0 0 {WIDTH} {height}" width="640" role="img"'
    named = (
        f'<title id="t">{html.escape(title)}</title><desc id="d">{html.escape(described)}</desc>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {opening} aria-labelledby="t d">{named}',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="5"/>',
        words(16, 26, title, "title"),
        *drawn,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


# ---- the batch worked by hand --------------------------------------------------------------------

CELL, GAP, LEFT, TOP, ROW = 36.5, 8, 82, 116, 27


def weights_picture() -> str:
    """Draw a row per loss and a cell per token. The darker a cell, the larger the weight."""
    columns = []  # left edge of each token's cell, with a gap between completions
    for i, tokens in enumerate(exercises.TOKENS):
        columns.append(
            [LEFT + GAP * i + CELL * (len(sum(columns, [])) + t) for t in range(len(tokens))]
        )
    drawn = []
    for name, lefts, tokens, ratios, reward in zip(
        "abcd", columns, exercises.TOKENS, exercises.RATIOS, exercises.REWARDS, strict=True
    ):
        sign, look = (">", "up") if reward else ("<", "down")
        drawn.append(words(lefts[0] + 1, 54, f"{name}: A{sign}0", f"small bold {look}"))
        for left, token, ratio in zip(lefts, tokens, ratios, strict=True):
            drawn.append(words(left + CELL / 2, 76, token.strip("<>"), "small middle dim"))
            drawn.append(words(left + CELL / 2, 98, f"{ratio:g}", "small middle"))
    drawn.append(words(12, 98, "ratio", "small"))
    for i, name in enumerate(exercises.LOSSES):
        found, _ = exercises.weights(getattr(gspo, f"{name}_loss"))
        y = TOP + ROW * i
        drawn.append(words(12, y + 17, name.upper(), "small"))
        for lefts, row in zip(columns, found, strict=True):
            for left, weight in zip(lefts, row, strict=True):
                drawn += cell(left, y, weight)
    return page(
        "Weight of each token's gradient, in % of |A|",
        "Ten tokens of four completions under seven losses: the numbers of the lesson's table.",
        TOP + ROW * len(exercises.LOSSES) + 10,
        drawn,
    )


def cell(x: float, y: float, weight: float) -> list[str]:
    look = "up" if weight > 0 else "down" if weight < 0 else "none"
    shade = 0.12 + 0.5 * min(abs(weight) / 25, 1)
    said = f"{weight:.3g}".replace("-", "−")
    middle = words(x + CELL / 2, y + 17, said, "small middle" if weight else "small middle dim")
    return [box(x + 1, y, CELL - 2, ROW - 3, look, shade if weight else 1), middle]


# ---- PPO's objective -----------------------------------------------------------------------------


def clip_picture() -> str:
    """Draw min(r A, clip(r) A) over r for A = 1 and A = -1, with its six cases."""
    drawn = []
    for left, advantage, said in ((50, 1, "A > 0: should rise"), (274, -1, "A < 0: should fall")):
        drawn += panel(left, advantage, said)
    drawn.append(words(16, 256, "Solid: the token has a gradient.", "up"))
    drawn.append(words(16, 274, "Dashed: the clip stops it. Dotted: r A without the clip.", "down"))
    described = (
        "For A above 0 the objective rises with r up to 1.2 and is constant beyond. For A below 0 "
        "it is constant below 0.8 and falls with r above."
    )
    return page("PPO's objective over the ratio r, ε = 0.2", described, 288, drawn)


def panel(left: float, advantage: int, said: str) -> list[str]:
    width, top, bottom = 180, 66, 216

    def place(r: float, value: float) -> tuple[float, float]:
        low = 0.4 if advantage > 0 else -1.6
        height = (value - low) / 1.2 * (bottom - top)
        return left + (r - 0.4) / 1.2 * width, bottom - height

    def line(start: float, end: float, look: str, clipped: bool = False) -> str:
        values = [min(max(r, 0.8), 1.2) if clipped else r for r in (start, end)]
        points = zip((start, end), values, strict=True)
        return path([place(r, value * advantage) for r, value in points], look)

    low, high = place(0.8, 0)[0], place(1.2, 0)[0]
    drawn = [words(left, 54, said, "bold"), box(low, top, high - low, bottom - top, "zone")]
    drawn += [path([(left, bottom), (left + width, bottom)], "axis")]
    drawn += [
        words(x, bottom + 16, mark, "middle dim") for x, mark in ((low, "0.8"), (high, "1.2"))
    ]
    cases = ((0.6, "r < 0.8"), (1.0, "within"), (1.4, "r > 1.2"))
    if advantage > 0:
        drawn += [line(0.4, 1.2, "curve"), line(1.2, 1.6, "flat", True), line(1.2, 1.6, "faint")]
        notes = ("may return", "rises", "stopped")
    else:
        drawn += [line(0.8, 1.6, "curve"), line(0.4, 0.8, "flat", True), line(0.4, 0.8, "faint")]
        notes = ("stopped", "falls", "no bound")
    for (r, _), note in zip(cases, notes, strict=True):
        y, look = (bottom - 10, "down") if note == "stopped" else (top + 14, "up")
        drawn.append(words(place(r, 0)[0], y, note, f"middle {look}"))
    return drawn


PICTURES = {"weights.svg": weights_picture, "clip.svg": clip_picture}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
