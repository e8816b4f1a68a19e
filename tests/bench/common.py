"""Used by several benchmarks. Importing it puts the project on the path, so import it first."""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a benchmark, with its line breaks."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=layout)


def read_rows(path: Path | str) -> list[dict]:
    """Return the rows of a JSONL file, or none if there is no file."""
    path = Path(path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_row(path: Path | str, row: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def train(flags: list[str]) -> tuple[float, list[dict]]:
    """Run train.py silently to its end, with one thread. Return the held-out share solved before
    training, and the metrics."""
    import torch

    import train  # as the benchmark has changed it

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        with open(folder / "log", "w") as log, contextlib.redirect_stdout(log):
            status = train.main([*flags, "--runs", str(folder), "--name", "run"])
        assert status == 0, f"{flags}: {(folder / 'log').read_text()[-2000:]}"
        before = read_rows(folder / "run/starts.jsonl")[0]["eval_solved"]
        return before, read_rows(folder / "run/metrics.jsonl")


def attempt(call: tuple) -> tuple[dict, dict | None, str]:
    work, given = call
    os.nice(10)
    try:
        numbers, said = work(given)
    except Exception as error:  # the others go on
        numbers, said = None, repr(error)
    return given, numbers, said


def run_missing(work, wanted: list[dict], out: Path, start: str = "fork") -> None:
    """Append the row one | work(one) to a file for each of these that it does not have yet. work
    returns numbers, and words about them.

    Two run at a time, each in a process of its own. A fork need not import torch again; with
    start="spawn" a process takes as much memory as one started by hand."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done, failed = read_rows(out), 0
    left = [one for one in wanted if not any(one.items() <= row.items() for row in done)]
    print(len(left), "runs are missing", file=sys.stderr, flush=True)
    with multiprocessing.get_context(start).Pool(2, maxtasksperchild=1) as pool:
        for given, numbers, said in pool.imap_unordered(attempt, [(work, one) for one in left]):
            print(f"{given}: {said}", file=sys.stderr, flush=True)
            if numbers is None:
                failed += 1
            else:
                add_row(out, given | numbers)
        pool.close()
        pool.join()  # otherwise a signal stops the last one, and train.py answers it
    if failed:
        sys.exit(f"{failed} runs failed")


def markdown(*lines: list[str]) -> str:
    """Return a Markdown table. The first line is its header."""
    drawn = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in drawn)


def put(page: str, marker: str, text: str) -> None:
    """Replace the text between two comments of a page: the marker, and one that begins with end."""
    path = ROOT / page
    pattern = rf"(<!-- {marker} -->\n).*?(<!-- end)"
    place = re.compile(pattern, re.DOTALL)
    path.write_text(place.sub(lambda found: f"{found[1]}{text}\n{found[2]}", path.read_text()))
