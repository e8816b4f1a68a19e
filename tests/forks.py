"""Processes of their own without the seconds of an import: they are forked from one that has
imported torch and transformers, and nothing of the project, of which each may import a copy."""

import multiprocessing
import os
import sys

# of a pytest in a fork: half of its time
QUICK = {"PYTEST_ADDOPTS": "--assert=plain -p no:unraisableexception"}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "transformers.models.qwen3.modeling_qwen3"])


def begin(function, arguments, out, err, folder, nice, environment):
    """Run the function in a fork: redirect its output before, and exit with its status after."""
    sys.stdout = open(out, "a", buffering=1)  # noqa: SIM115, open until it dies
    sys.stderr = sys.stdout if err is None else open(err, "a", buffering=1)  # noqa: SIM115
    os.environ |= environment
    os.nice(nice)
    os.chdir(folder)
    status = function(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def fork(function, *arguments, out, err=None, folder=".", nice=0, **environment):
    """function(*arguments), which returns the exit status, in a process of its own that writes into
    the files out and err (None: one file for both). With nice=19 it takes no time from others."""
    given = (function, arguments, str(out), err and str(err), str(folder), nice, environment)
    process = FORKS.Process(target=begin, args=given, daemon=True)  # it does not outlive the suite
    process.start()
    return process


def program(source: str, *arguments: str) -> int:
    """`python -c source arguments`, for fork. It imports the project from its working directory."""
    sys.argv = ["-c", *arguments]
    tests = os.path.dirname(__file__)
    elsewhere = [path for path in sys.path if path not in (tests, os.path.dirname(tests))]
    sys.path[:] = [os.getcwd(), *elsewhere]
    try:
        exec(source, {"__name__": "__main__"})
    except SystemExit as end:
        return end.code or 0
    return 0
