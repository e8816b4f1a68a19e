"""Mistakes of the user, each in one sentence, and functions of files. Standard library alone."""

import contextlib
import difflib
import functools
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


class UserError(ValueError):
    """A mistake of the user, in one sentence. The scripts print it and exit with status 2."""


def need(condition: object, message: str) -> None:
    """Raise UserError with the message if the condition is false."""
    if not condition:
        raise UserError(message)


def reason(error: BaseException) -> str:
    """Return one line that says why something failed."""
    text = f"{type(error).__name__}: {error}".removeprefix("UserError: ")
    return f"{text.splitlines()[0]:.300}"


@contextlib.contextmanager
def expecting(expected: str, errors=(Exception, SystemExit)) -> Iterator[None]:
    """Turn errors inside the block into a UserError: the expected input, then the reason."""
    try:
        yield
    except errors as error:
        raise UserError(f"{expected}: {reason(error)}") from error


def dashed(name: str) -> str:
    """Return --group-size for group_size."""
    return "--" + name.replace("_", "-")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word, such as `, did you mean math?`."""
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def function_of(place: str, kind: str = "function") -> Callable:
    """Import the function of `file.py:function`. UserError if the file has none."""
    path, _, name = place.rpartition(":")
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:  # the file may import its neighbours, now and when it runs
        sys.path.append(folder)
    table = run_file(path, Path(path).stat().st_mtime_ns)
    need(name in table, f"{path} has no {kind} {name!r}{did_you_mean(name, table)}")
    need(callable(table[name]), f"{path}: {name} is no function")
    return table[name]


@functools.cache
def run_file(path: str, changed: int) -> dict:
    """Return the names of a file. Its functions share globals: it runs once, until `changed`."""
    return runpy.run_path(path)


def raised(error: BaseException) -> str:
    """Return the error of a user's function and the line of the user's file that raised it."""
    inside = traceback.extract_tb(error.__traceback__)[2:]  # without the two lines that call it
    if not inside or inside[0].filename == contextlib.__file__:  # it returned something wrong
        return reason(error)
    return f"{reason(error)} ({inside[0].filename}, line {inside[0].lineno})"
