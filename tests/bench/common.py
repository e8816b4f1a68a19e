"""Used by several benchmarks. To import it puts the project on the path: import it first."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a benchmark, with its line breaks."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=layout)


def read_rows(path: Path | str) -> list[dict]:
    """Return the rows of a JSONL file, none where there is no file."""
    path = Path(path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_row(path: Path | str, row: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def finish(process: subprocess.Popen) -> int:
    """Wait for a process. Return the most bytes of memory that it had, without its children."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def markdown(*lines: list[str]) -> str:
    """Return a table. The first line is its head."""
    drawn = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in drawn)


def put(page: str, marker: str, text: str) -> None:
    """Replace the text between two comments of a page: the marker, and one that begins with end."""
    path = ROOT / page
    pattern = rf"(<!-- {marker} -->\n).*?(<!-- end)"
    place = re.compile(pattern, re.DOTALL)
    path.write_text(place.sub(lambda found: f"{found[1]}{text}\n{found[2]}", path.read_text()))
