"""`--reward code`: find the program in a completion, and run it on the answer's test cases."""

import json
import re
import sys
import textwrap
import time

import support.extras.sandbox as sandbox
from rewards import after_thinking, verifier
from support.errors import expecting, need

# the program may define input() and json itself
CALL_CASES = """
import builtins as _builtins, json as _json
def _call(case):
    function = _builtins.globals().get("{name}")
    return (function or _builtins.getattr(Solution(), "{name}"))(*case)
_results = [_call(case) for case in _json.loads(_builtins.input())]
_results = _json.loads(_json.dumps(_results))
_builtins.print('\\n' + _json.dumps(_results, sort_keys=True))"""


@verifier
def code(completion: str, answer: dict) -> bool:
    """1 if the program passes every case: {"fn": name, "cases": [[arguments, result], ...]}
    (compared as JSON text: 1 is neither 1.0 nor true) or {"stdin": [[input, output], ...]}.

    The program is the last fenced block of Python that defines the function (possibly as a method
    of `class Solution`) or reads the input. All cases share CODE_SECONDS, plus START_SECONDS per
    run. A program that fails earns 0, whatever it has printed."""
    with expecting('expected {"fn": name, "cases": [pair, ...]} or {"stdin": [pair, ...]}'):
        given, expected = zip(*answer["cases" if "fn" in answer else "stdin"], strict=True)
    text = after_thinking(completion)
    if "fn" in answer:
        return passes_calls(text, answer["fn"], given, expected)
    return passes_texts(text, given, expected)


def check_sandbox() -> None:
    """Print which layers of the sandbox are active. Raises UserError if programs can't run."""
    layers, output = sandbox.run_program("")
    print(f"--reward code: sandbox layers: {layers}", file=sys.stderr)
    need(output is not None, "--reward code needs seccomp, on Linux on x86-64 or aarch64")


code.threads = True  # it waits for other processes
code.prepare = check_sandbox


def passes_calls(text: str, name: str, arguments: tuple, results: tuple) -> bool:
    """Run all calls of a function in one process."""
    need(name.isidentifier(), f"fn {name!r:.80} is not a function name")
    need(all(isinstance(case, list) for case in arguments), "a case's arguments are not a list")
    right = json.dumps(results, allow_nan=False, sort_keys=True)
    defines = rf"^[ \t]*(?:async )?def {name}\b|^{name}[ \t]*(?::[^=\n]*)?=[^=]"
    source = last_program(text, defines)
    if not source:
        return False
    source += CALL_CASES.format(name=name)
    _, output = sandbox.run_program(source, json.dumps(arguments), name="program")
    return (output or "").splitlines()[-1:] == [right]


def passes_texts(text: str, inputs: tuple, outputs: tuple) -> bool:
    """Run each pair of input and output in a process of its own."""
    need(all(isinstance(part, str) for part in inputs + outputs), "an input or output is not text")
    source = last_program(text, r"\b(?:input|stdin|open)\b")
    deadline = time.monotonic() + sandbox.CODE_SECONDS + sandbox.START_SECONDS * len(inputs)
    for given, expected in zip(inputs, outputs):
        left = deadline - time.monotonic()
        if not source or left <= 0:
            return False
        _, output = sandbox.run_program(source, given, seconds=left)
        if output is None or output.split() != expected.split():
            return False
    return True


FENCED = re.compile(
    r"^[ \t]*(([`~])\2{2,})[ \t]*([\w+-]*)[^`~\n]*(?:\n|\Z)"  # ```python
    r"(.*?)(^[ \t]*\1\2*[ \t]*$|\Z)",  # the block, then ```, or nothing if it is still open
    re.MULTILINE | re.DOTALL,
)


def last_program(text: str, wanted: str) -> str:
    """Return the last fenced block of Python that matches `wanted`, or else the last one. Blocks
    without a tag only count if none is tagged Python. Returns "" if a block is still open."""
    blocks = {}
    for *_, tag, source, end in FENCED.findall("\n".join(text.splitlines())):
        if not end:
            return ""
        language = "python" if tag.lower() in ("python3", "py", "py3") else tag.lower()
        blocks.setdefault(language, []).append(textwrap.dedent(source))
    candidates = blocks.get("python") or blocks.get("") or [""]
    matching = [block for block in candidates if re.search(wanted, block, re.MULTILINE)]
    return (matching or candidates)[-1]
