"""Load functions from a user's file, call them, and undo their side effects."""

import contextlib
import copy
import functools
import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from support.errors import UserError, need, reason


@functools.cache
def run_file(path: str) -> dict:
    """Run a user's file once, so that its functions share its globals."""
    sys.path.append(str(Path(path).resolve().parent))  # for its imports, now and when called
    return runpy.run_path(path)


def function_of(place: str) -> Callable:
    """Return the function that `file.py:function` names."""
    path, _, name = place.rpartition(":")
    functions = run_file(os.path.abspath(path))  # the cache must survive a change of directory
    need(name in functions, f"{path} has no {name}")
    return functions[name]


signature_of = functools.lru_cache(inspect.signature)  # it is slower than most verifiers


def call(function: Callable, completion: str, row: dict) -> list[tuple[int, float]]:
    """Call a verifier and return its (end, reward) pairs, of which the last is the outcome.

    Parameters named after a field of the row receive a copy of it, and the others the completion
    and the answer, in this order. Raises what the function raises; UserError for a bad result."""
    signature, values = signature_of(function), {}
    fields = row | {"completion": completion}
    named = signature.parameters.keys()
    unnamed = [fields[name] for name in ("completion", "answer") if name not in named]
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            values[name] = {other: row[other] for other in row.keys() - named - {"answer"}}
        elif parameter.kind is parameter.VAR_POSITIONAL:
            values[name] = unnamed
        elif name in fields:
            values[name] = fields[name]
        elif unnamed:
            values[name] = unnamed.pop(0)
    given = inspect.BoundArguments(signature, copy.deepcopy(values))
    with contained():
        value = function(*given.args, **given.kwargs)
    return pairs_of(value)


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Undo what a user's function may leave behind: a forked process that would go on training, or
    changes to torch's grad mode and default dtype."""
    process, status = os.getpid(), 0
    torch = sys.modules.get("torch")  # rewards.py runs without it
    before = torch and (torch.is_grad_enabled(), torch.get_default_dtype())
    try:
        yield
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) else 1
        raise
    finally:
        if os.getpid() != process:
            os._exit(status if isinstance(status, int) else status is not None)
        if torch:
            torch.set_grad_enabled(before[0])
            torch.set_default_dtype(before[1])


def pairs_of(value: object) -> list[tuple[int, float]]:
    """Convert a verifier's result to (end, reward) pairs. Raises UserError for anything but a
    number or pairs, such as None, NaN, a string or a list of numbers."""
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns that it was never awaited
    pairs = value if isinstance(value, (list, tuple)) else [(0, value)]
    with contextlib.suppress(TypeError, ValueError):
        if pairs and all(abs(number) <= 1e6 for _, number in pairs):
            return [(int(end), float(number)) for end, number in pairs]
    expected = "for one completion, return a number or a list of (end, number) pairs"
    raise UserError(f"it returned {value!r:.80}; {expected}")


def raised(error: BaseException) -> str:
    """Return why `call` failed, and which line of the user's file raised the error."""
    inside = traceback.extract_tb(error.__traceback__)[2:]  # without the caller and `call`
    if not inside or isinstance(error, UserError):
        return reason(error)
    return f"{reason(error)} ({inside[0].filename}, line {inside[0].lineno})"
