"""Errors that a user can fix, each reported in one sentence."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """A user's mistake, in one sentence. The scripts print it and exit with status 2."""


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
    """Turn an error in the block into a UserError that says what was expected, then the reason."""
    try:
        yield
    except errors as error:
        raise UserError(f"{expected}: {reason(error)}") from error


def dashed(name: str) -> str:
    """Return --group-size for group_size."""
    return "--" + name.replace("_", "-")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint such as `; did you mean math?`, or "" if no known word is similar."""
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""
