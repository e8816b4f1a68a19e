"""Take the picture of report.html that the README shows: four curves, and the inside of an update.

    python train.py --algo gspo
    python tests/bench/screenshot.py runs/gspo-1 --step 1    # writes docs/pictures/report.png

Needs chromium on the PATH."""

import subprocess
import tempfile
from pathlib import Path

import common
from support import report

SHOWN = ("eval_solved", "solved", "clip_fraction", "entropy")
PICTURE = common.ROOT / "docs/pictures/report.png"
WIDTH, HEIGHT, SCALE = 1000, 472, 1.5  # the README is about 800 pixels wide


def page_of(folder: Path, step: int) -> str:
    """The part of a run's page that is shown, with the group of another step."""
    story = report.read_story(folder)
    rows = report.read_rows(folder / "samples.jsonl")
    story = story._replace(group=[row for row in rows if row["step"] == step and "tokens" in row])
    style = Path(report.__file__).with_suffix(".css").read_text()
    figures = "".join(report.chart_figure(metric, [story]) for metric in SHOWN)
    style += ":root { color-scheme: light } .grid { grid-template-columns: repeat(4, 1fr) }"
    style += ".grid .dim { display: none }"
    body = f'<div class="grid">{figures}</div>{report.inside_update(story)}'
    return f"{report.HEAD}<style>{style}</style>{body}"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=1, help="step of the group")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(page_of(given.run, given.step))
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
        command += [f"--window-size={WIDTH},{HEIGHT}", f"--force-device-scale-factor={SCALE}"]
        subprocess.run([*command, f"--screenshot={PICTURE}", page.as_uri()], check=True)


if __name__ == "__main__":
    main()
