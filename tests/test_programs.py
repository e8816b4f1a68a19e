"""Programs in completions: which one runs, and when it earns a reward."""

import concurrent.futures
import json
import os

import pytest

import rewards
from support.errors import UserError
from test_rewards import ADD, RIGHT, cells, fenced
from tools import watched

sandbox = pytest.importorskip("support.extras.sandbox")


def those_rewarded(completions, *answers) -> list[str]:
    """Those that `code` rewards. One answer is that of all completions."""
    rows = [{"prompt": "", "answer": answer} for answer in answers]
    rows *= len(completions) // len(rows)
    verdicts = rewards.parse_reward("code").verify(completions, rows)
    return [verdict.completion for verdict in verdicts if verdict.reward == 1]


# ---- which program runs

TEXTS = {"stdin": [["1 2\n", "3\n"], ["20 22", "42"]]}  # as ADD, for programs that read
WRONG = RIGHT.replace("a + b", "0")
SOLUTION = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b"
EXAMPLE = fenced("result = add(1, 2)\nprint(result)  # 3")
CHOSEN = [
    # the last one
    f"<think>{fenced(WRONG)}</think>{fenced(WRONG)}{fenced(RIGHT)}",
    # a block of Python, whatever its tag and its fence
    "1. So:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n",
    '```py title="add.py"\n' + RIGHT + "\n```",
    "````python\n" + RIGHT + '\ntext = """\n```\n"""\n````',
    "```python\n" + RIGHT + '\ntext = """\n```text\n"""\n```',
    "As ```add``` is short, between ``` and the like:\n~~~python\n" + RIGHT + "\n~~~",
    # no output, no other language, nothing without a tag beside one with it
    "```\nprint('noise')\n```\n```\n" + RIGHT + "\n```\n```\n42\n```",
    fenced(RIGHT) + "Output:\n```text\ndef add(a, b): ...\n```\n",
    fenced(RIGHT) + "```\ndef add(a, b):\n    return 0\n```\n",
    # the one that defines the function, behind which an example may stand
    fenced(RIGHT) + EXAMPLE + fenced("assert add(1, 1) == 2") + "```\n3\n```",
    fenced(RIGHT) + fenced("from solution import addition\nadded = addition(1, 2)"),
    fenced("add: object = lambda a, b: a + b") + EXAMPLE,
    fenced("def helper(a): return a\n" + SOLUTION) + fenced("print(Solution().add(1, 2))"),
    fenced("def helper(a, b):\n    return 0\n1 / 0") + fenced(RIGHT),  # earlier blocks do not run
]
NOT_CHOSEN = [
    *("", "no program", "```", "```python\n```", "```text\nx\n```", RIGHT),
    fenced(RIGHT) + fenced(WRONG),
    f"<think>{fenced(RIGHT)}",
    fenced(RIGHT) + "```python\n",  # not closed
    "```python\n" + RIGHT + "```",
    fenced(RIGHT.replace("add", "added")),
    fenced(SOLUTION.replace("a + b", "a - b")),
    fenced("x = " + "(" * 300 + ")" * 300),
]

# ---- what a program may do

CALLED = [  # programs that define `add`
    "print('noise')\ndef add(a, b):\n    print(a)\n    return a + b",
    "def add(a, b):\n    print('\\n[3, 42]')\n    raise SystemExit",  # prints what it may read
    f"import sys\nsys.stdout.write('no newline')\n{RIGHT}",
    f"{RIGHT}\nif __name__ == '__main__':\n    print(input())",
    f"json = results = 0\ndef print(*words): pass\ndef input(): pass\n{RIGHT}",  # our names
    f"text = '{'x' * 200_000}'\n{RIGHT}",  # longer than an argument may be
    """
        import asyncio, collections, datetime, decimal, fractions, itertools, numpy, random, re
        from concurrent.futures import ThreadPoolExecutor
        async def later(number): return int(numpy.array([decimal.Decimal(number)]).sum())
        def add(a, b):
            with ThreadPoolExecutor(4) as pool:
                return sum(pool.map(abs, (asyncio.run(later(a)), b)))""",
]
SUMS = [  # programs that read two numbers
    "import sys\nprint(sum(map(int, sys.stdin.read().split())), end='')",
    "print(sum(map(int, open(0).read().split())))",
    "a, b = map(int, input().split())\nprint(a + b)\nexit()",
    """
        import sys, threading
        sys.setrecursionlimit(10 ** 6), threading.stack_size(1 << 26)
        def main(): print(sum(map(int, sys.stdin.readline().split())))
        threading.Thread(target=main).start()""",
]
ATTACKS = [  # each would be rewarded if the verifier trusted the child
    "def add(a, b):\n    import os\n    os._exit(0)",
    "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()",
    "import atexit\natexit.register(lambda: print('[true, true]'))\ndef add(a, b): return 0",
    "import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 0",
    "import threading\nthreading.Timer(0.2, print, ['[3, 42.0]']).start()\ndef add(a, b): return 0",
    """
        import gc
        def add(a, b):
            pairs = [each for each in gc.get_objects() if isinstance(each, list) and len(each) == 2]
            return next((y for x, y in pairs if x == [a, b] and isinstance(y, int)), 0)""",
]
CRASHES = cells("""
    import os; os._exit(7) | raise SystemExit('no') | 1 / 0 | import os; os.abort() | x = (
""")


@pytest.mark.parametrize("layers", [sandbox.LAYERS, pytest.param((), marks=pytest.mark.slow)])
def test_code_rewards_right_functions_alone(layers, monkeypatch):
    """Of the chosen block. Without layers, too: verdicts rest on none of them."""
    monkeypatch.setattr(sandbox, "LAYERS", layers)
    right = CHOSEN + [fenced(source) for source in CALLED]
    wrong = ATTACKS + [f"{RIGHT}\n{crash}" for crash in CRASHES]
    assert those_rewarded(right + NOT_CHOSEN + [fenced(each) for each in wrong], ADD) == right


def test_code_rewards_right_programs_that_read_their_input():
    """Of several blocks the last one that reads."""
    reads = fenced("a, b = map(int, input().split())\nprint(a + b)")
    right = [reads + fenced("print('for example', 3)"), *[fenced(source) for source in SUMS]]
    wrong = [reads + reads.replace("a + b", other) for other in ("0", "a + b, a")]
    assert those_rewarded(right + wrong, TEXTS) == right
    assert those_rewarded(["", "no program"], {"stdin": [["", ""]]}) == []
    # given both, it calls the function
    assert those_rewarded([fenced(RIGHT)], ADD | {"stdin": [["1", "1"]]}) == [fenced(RIGHT)]


def test_code_never_rewards_a_crash():
    """Even if nothing is expected, or what was printed before. Without the crash it is rewarded."""
    forms = {"if input() == '2':\n    {}": [["1", ""], ["2", " \n"]]}
    forms |= {"print(3, flush=True)\n{}": [["", "3"]]}
    for form, pairs in forms.items():
        programs = [fenced(form.format(each)) for each in [*CRASHES, "pass"]]
        assert those_rewarded(programs, {"stdin": pairs}) == programs[-1:]


# ---- answers, time, processes

SAME = """
    1 => 1 | None => null | (1, 2) => [1, 2] | {2: 'ä', 10: 1} => {"10": 1, "2": "ä"}
    10 ** 40 => 10000000000000000000000000000000000000000
"""
OTHER = """
    True => 1 | 1.0 => 1 | 1 => 1.0 | '1' => 1 | [2, 1] => [1, 2] | {1, 2} => [1, 2] | '' => null
    [1, [2, True]] => [1, [2, 1]] | float('nan') => null | 0.1 + 0.2 => 0.3 | 10 ** 5000 => 1
"""


def test_code_compares_type_strictly():
    pairs = [cell.split(" => ") for cell in cells(SAME + OTHER)]
    programs = [fenced(f"def f():\n    return {result}") for result, _ in pairs]
    answers = [{"fn": "f", "cases": [[[], json.loads(expected)]]} for _, expected in pairs]
    assert those_rewarded(programs, *answers) == programs[: len(cells(SAME))]


MALFORMED = """
    null | {} | {"fn": "add"} | {"fn": "add", "cases": []} | {"fn": "add", "cases": [["ab", 1]]}
    {"stdin": []} | {"stdin": [["1"]]} | {"stdin": [["1", 1]]} | {"cases": [[[1, 2], 3]]}
    {"fn": "", "cases": [[[1, 2], 3]]} | {"fn": 3, "cases": [[[1, 2], 3]]}
    {"fn": "add(1, 2) or add", "cases": [[[1, 2], 3]]} | {"fn": "add", "cases": [[[1, 2], NaN]]}
"""


def test_code_refuses_malformed_tests():
    reward = rewards.parse_reward("code")
    for answer in cells(MALFORMED):
        with pytest.raises(UserError, match="code"):
            reward.check_answer(json.loads(answer))


@pytest.mark.slow
def test_code_cases_of_stdin_share_one_budget_of_time(monkeypatch):
    """Which is not charged for the start of the interpreter."""
    quick = fenced("print(input())")
    slow = fenced("import time\ntime.sleep(0.4)\nprint(input())")
    monkeypatch.setattr(sandbox, "CODE_SECONDS", 0.3)
    assert those_rewarded([quick], {"stdin": [["1", "1"]] * 20})  # whose starts take longer
    monkeypatch.setattr(sandbox, "CODE_SECONDS", 1.5)
    assert those_rewarded([slow], {"stdin": [["1", "1"]]})
    assert not those_rewarded([slow], {"stdin": [["1", "1"]] * 20})


@pytest.mark.parametrize("processes, workers", [("1", 4), ("2", 2), ("8", 1)])
def test_programs_of_all_processes_share_the_cores(processes, workers, monkeypatch):
    """Four cores: as many programs at a time, over all processes that torchrun has started."""
    pools = watched(monkeypatch, concurrent.futures, "ThreadPoolExecutor")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert those_rewarded([fenced(RIGHT)], ADD) and pools[0][0] == (workers,)
