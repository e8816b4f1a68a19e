"""How a run ends: at a signal, with a sentence for a mistake, with a traceback for a bug."""

import os
import signal
import sys
from pathlib import Path

from support import folders
from support.console import command_to_resume, say
from support.data import printable
from support.user import UserError


class StopSignal:
    """Asks the run to end after its step, with a checkpoint, at the first signal. The second ends
    it at once."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number, frame) -> None:
        self.asked = True
        signal.signal(number, signal.default_int_handler)
        say("stopping after this step, with a checkpoint; once more: at once, without")


def fail(error: BaseException, ranks, config) -> int:
    """Print why the run ends, once for all processes, and return the exit status. A bug of the code
    keeps its traceback."""
    explained = explain(error)
    if not ranks.fails_first():  # another process says why
        os._exit(explained[0] if explained else 2)
    if explained is None:
        raise error
    status, sentence = explained
    asked = config and config.name and status != 2
    if asked and folders.checkpoints(Path(config.runs, config.name)):
        sentence += f"; to continue: {command_to_resume(config.runs, config.name)}"
    print(printable(sentence), file=sys.stderr, flush=True)
    if ranks.size > 1:
        os._exit(status)  # at once: an orderly end would wait for the others
    return status


def explain(error: BaseException) -> tuple[int, str] | None:
    """Return exit status and a sentence. None for a bug of the code, which keeps its traceback."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped"
    if isinstance(error, (UserError, OSError)):
        return 2, f"error: {error}"
    full = any(words in str(error) for words in ("out of memory", "can't allocate memory"))
    if isinstance(error, MemoryError) or (full and isinstance(error, RuntimeError)):  # GPU, CPU
        less = "lower --micro-batch-tokens, --cache-gb or --max-new-tokens"
        return 1, f"error: out of memory; {less}, or add --gradient-checkpointing, --lora-rank 16"
    return None
