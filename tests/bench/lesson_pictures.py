"""Draw docs/pictures/weights.svg from the losses: python tests/bench/lesson_pictures.py

It has a light and a dark look. Numbers repeat the meaning of the colours. clip.svg, which has no
measured numbers, is edited by hand."""

import html
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import exercises  # noqa: E402

import gspo  # noqa: E402

FILE = ROOT / "docs/pictures/weights.svg"
TITLE = "Weight of each token's gradient, in % of |A|"
DESCRIBED = "Ten tokens of four completions under seven losses: the numbers of the lesson's table."
WIDTH, CELL, GAP, LEFT, TOP, ROW = 480, 36.5, 8, 82, 116, 27  # shown 640 wide
STYLE = """
svg { --page: #ffffff; --text: #1f2328; --dim: #57606a; --line: #d0d7de; --up: #0067b1;
  --down: #b84a00; font-size: 12px;
  font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --text: #e6edf3; --dim: #9aa4af;
  --line: #373e47; --up: #58b0f0; --down: #f4a25c } }
.page { fill: var(--page) } text { fill: var(--text) } .dim { fill: var(--dim) }
.title { font-size: 16px; font-weight: 600 } .bold { font-weight: 600 }
.middle { text-anchor: middle } .up { fill: var(--up) } .down { fill: var(--down) }
.none { fill: none; stroke: var(--line) }
"""


def words(x: float, y: float, said: str, look: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{look}">{html.escape(said)}</text>'


def head(left: float, name: str, number: int) -> list[str]:
    """Draw the name of a completion, its tokens and their ratios."""
    sign, look = ("+", "up") if exercises.REWARDS[number] else ("−", "down")
    drawn = [words(left + 1, 54, f"{name}: {sign}A", f"bold {look}")]
    for token, ratio in zip(exercises.TOKENS[number], exercises.RATIOS[number], strict=True):
        drawn.append(words(left + CELL / 2, 76, token.strip("<>"), "middle dim"))
        drawn.append(words(left + CELL / 2, 98, f"{ratio:g}", "middle"))
        left += CELL
    return drawn


def cell(x: float, y: float, weight: float) -> list[str]:
    """Draw a weight. The darker its cell, the larger it is. A stopped token has an empty cell."""
    look = "up" if weight > 0 else "down" if weight < 0 else "none"
    shade = 0.12 + 0.5 * min(abs(weight) / 25, 1)
    place = f'x="{x + 1:.1f}" y="{y:.1f}" width="{CELL - 2:.1f}" height="{ROW - 3:.1f}"'
    said = f"{weight:.3g}".replace("-", "−")
    return [
        f'<rect {place} class="{look}" fill-opacity="{shade:.2f}"/>',
        words(x + CELL / 2, y + 17, said, "middle" if weight else "middle dim"),
    ]


def picture() -> str:
    lefts, height = [LEFT], TOP + ROW * len(exercises.LOSSES) + 10
    for tokens in exercises.TOKENS[:-1]:
        lefts.append(lefts[-1] + GAP + CELL * len(tokens))
    drawn = [words(16, 26, TITLE, "title"), words(12, 98, "ratio")]
    for number, left in enumerate(lefts):
        drawn += head(left, "abcd"[number], number)
    for i, name in enumerate(exercises.LOSSES):
        found, _ = exercises.weights(getattr(gspo, f"{name}_loss"))
        drawn.append(words(12, TOP + ROW * i + 17, name.upper()))
        for left, row in zip(lefts, found, strict=True):
            for t, weight in enumerate(row):
                drawn += cell(left + CELL * t, TOP + ROW * i, weight)
    opening = f'viewBox="0 0 {WIDTH} {height}" width="640" role="img" aria-labelledby="t d"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {opening}><title id="t">{TITLE}</title>',
        f'<desc id="d">{DESCRIBED}</desc><style>{STYLE}</style>',
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="5"/>',
        *drawn,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
