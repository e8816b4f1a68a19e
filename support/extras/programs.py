"""`--reward code`: find the program of a completion, and run it on the cases of the answer."""

import json
import re
import sys
import textwrap
import time

import support.extras.sandbox as sandbox
from rewards import after_thinking, verifier
from support.user import expecting, need

# the program may have an input() and a json of its own
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
    (results as JSON, where 1 is neither 1.0 nor true) or {"stdin": [[input, output], ...]}.

    The program is a fenced block of Python, the last one with the function or that reads its input.
    A function may be a method of `class Solution`. A program that fails is never right, whatever it
    printed. All cases share CODE_SECONDS, without START_SECONDS a run."""
    with expecting('expected {"fn": name, "cases": [pair, ...]} or {"stdin": [pair, ...]}'):
        calls = "fn" in answer
        given, expected = zip(*answer["cases" if calls else "stdin"], strict=True)
    text = after_thinking(completion)
    if calls:
        return passes_calls(text, answer["fn"], given, expected)
    return passes_texts(text, given, expected)


def check_sandbox() -> None:
    """Print which layers of the sandbox there are. UserError if one that is needed is missing."""
    layers, output = sandbox.run_program("")
    print(f"--reward code: layers of the sandbox: {layers}", file=sys.stderr)
    need(output is not None, f"--reward code: layers are missing: {layers}")


code.threads = True  # programs take time
code.prepare = check_sandbox


def passes_calls(text: str, name: str, arguments: tuple, results: tuple) -> bool:
    """Run all calls of a function in one process."""
    need(name.isidentifier(), f"fn {name!r:.80} is no name of a function")
    need(all(isinstance(case, list) for case in arguments), "the arguments of a case are no list")
    right = json.dumps(results, allow_nan=False, sort_keys=True)
    defines = rf"^[ \t]*(?:async )?def {name}\b|^{name}[ \t]*(?::[^=\n]*)?=[^=]"
    source = last_program(text, defines)
    if not source:
        return False
    source += CALL_CASES.format(name=name)
    _, output = sandbox.run_program(source, json.dumps(arguments), name="program")
    return (output or "").splitlines()[-1:] == [right]


def passes_texts(text: str, inputs: tuple, outputs: tuple) -> bool:
    """Run each case of input and output in a process of its own."""
    need(all(isinstance(part, str) for part in inputs + outputs), "an input or output is no text")
    source = last_program(text, r"\b(?:input|stdin|open)\b")
    left = sandbox.CODE_SECONDS
    for given, expected in zip(inputs, outputs):
        if not source or left <= 0:
            return False
        start = time.monotonic()
        _, output = sandbox.run_program(source, given, seconds=left)
        if output is None or output.split() != expected.split():
            return False
        left -= max(time.monotonic() - start - sandbox.START_SECONDS, 0)
    return True


FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*([\w+-]*)[^`~]*")


def last_program(text: str, wanted: str) -> str:
    """Return the source of the last fenced block of Python in which something `wanted` is.

    Without such a block it is the last one. Blocks without a tag count only if no block has one. A
    fence has a line of its own. An open block makes the result empty."""
    tagged, untagged = [], []
    fence, tag, lines = "", "", []
    for line in text.splitlines():
        stripped = line.strip()
        opens = FENCE.fullmatch(stripped)
        if fence and stripped.startswith(fence) and not stripped.strip(fence[0]):
            source = textwrap.dedent("\n".join(lines))
            if tag in ("python", "python3", "py", "py3"):
                tagged.append(source)
            elif not tag:
                untagged.append(source)
            fence = ""
        elif fence:
            lines.append(line)
        elif opens:
            fence, tag, lines = opens[1], opens[2].lower(), []
    blocks = tagged or untagged
    if fence or not blocks:
        return ""
    fitting = [block for block in blocks if re.search(wanted, block, re.MULTILINE)]
    return (fitting or blocks)[-1]
