"""Programs in completions: which one runs, when it earns a reward, and that no crash and no trick
does."""

import json
import os
import time

import pytest

import rewards
from support.errors import UserError
from test_rewards import ADD, RIGHT, cells, fenced

sandbox = pytest.importorskip("support.extras.sandbox")


def those_rewarded(completions, answer) -> list[str]:
    """Those of the completions that `code` rewards, as many at a time as there are cores."""
    rows = [{"prompt": "", "answer": answer}] * len(completions)
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
    # programs that are wrong
    fenced("def add(a, b):\n    return str(a + b)"),
    fenced("def add(a):\n    return a"),
    fenced("def add(a, b)\n    return a + b"),
    fenced("add = 3"),
    fenced("x = " + "(" * 300 + ")" * 300),
]


def test_code_runs_the_block_that_defines_the_function():
    """And no other block until one is right."""
    assert those_rewarded(CHOSEN + NOT_CHOSEN, ADD) == CHOSEN


def test_code_runs_the_block_that_reads_its_input():
    reads = fenced("a, b = map(int, input().split())\nprint(a + b)")
    wrong = [reads + reads.replace("a + b", other) for other in ("0", "a + b, a")]
    right = reads + fenced("print('for example', 3)")
    assert those_rewarded([right, *wrong], TEXTS) == [right]
    assert those_rewarded(["", "no program"], {"stdin": [["", ""]]}) == []
    # given both, it calls the function
    assert those_rewarded([fenced(RIGHT)], ADD | {"stdin": [["1", "1"]]}) == [fenced(RIGHT)]


SAME = """
    1 => 1 | None => null | (1, 2) => [1, 2] | {2: 'ä', 10: 1} => {"10": 1, "2": "ä"}
    10 ** 40 => 10000000000000000000000000000000000000000
"""
OTHER = """
    True => 1 | 1.0 => 1 | 1 => 1.0 | '1' => 1 | [2, 1] => [1, 2] | {1, 2} => [1, 2] | '' => null
    [1, [2, True]] => [1, [2, 1]] | float('nan') => null | 0.1 + 0.2 => 0.3 | 10 ** 5000 => 1
"""


def test_code_compares_type_strictly():
    programs, rows = [], []
    for cell in cells(SAME + OTHER):
        result, expected = cell.split(" => ")
        answer = {"fn": "f", "cases": [[[], json.loads(expected)]]}
        programs.append(fenced(f"def f():\n    return {result}"))
        rows.append({"prompt": "", "answer": answer})
    verdicts = rewards.parse_reward("code").verify(programs, rows)
    right = len(cells(SAME))
    assert [verdict.reward for verdict in verdicts] == [1] * right + [0] * (len(rows) - right)


MALFORMED = """
    null | "" | [] | {} | {"fn": "add"} | {"fn": "add", "cases": []} | {"stdin": []}
    {"cases": [[[1, 2], 3]]} | {"fn": "add", "cases": [[1]]} | {"fn": "add", "cases": 3}
    {"stdin": [["1"]]} | {"stdin": [["1", 1]]} | {"fn": "add", "cases": [["ab", 1]]}
    {"fn": "add", "cases": [[[1, 2], 3], [[1, 2], NaN]]} | {"fn": "", "cases": [[[1, 2], 3]]}
    {"fn": "add(1, 2) or add", "cases": [[[1, 2], 3]]} | {"fn": 3, "cases": [[[1, 2], 3]]}
"""


def test_code_refuses_malformed_tests():
    reward = rewards.parse_reward("code")
    for answer in cells(MALFORMED):
        with pytest.raises(UserError, match="code"):
            reward.check_answer(json.loads(answer))


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


@pytest.mark.parametrize("programs, answer", [(CALLED, ADD), (SUMS, TEXTS)])
def test_code_rewards_a_right_program(programs, answer):
    """Whatever it does besides."""
    completions = [fenced(source) for source in programs]
    assert those_rewarded(completions, answer) == completions


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


def test_code_prints_its_layers_and_needs_seccomp(monkeypatch, capsys):
    rewards.parse_reward("code")
    assert "--reward code: sandbox layers: {'landlock': " in capsys.readouterr().err
    monkeypatch.setattr(sandbox, "run_program", lambda source: ({"seccomp": False}, None))
    with pytest.raises(UserError, match="--reward code needs seccomp"):
        rewards.parse_reward("code")


# programs that fail, and print nothing before
CRASHES = cells("""
    import os; os._exit(7) | raise SystemExit('no') | 1 / 0 | import os; os.abort() | x = (
""")


@pytest.mark.parametrize(
    "form, answer",
    [
        ("if input() == '2':\n    {}", {"stdin": [["1", ""], ["2", " \n"]]}),
        ("print(3, flush=True)\n{}", {"stdin": [["", "3"]]}),
        (f"{RIGHT}\n{{}}", ADD),
    ],
)
def test_code_never_rewards_a_crash(form, answer):
    """Whatever is expected, even if it is nothing or was printed before the crash. The same program
    without a crash is rewarded."""
    programs = [fenced(form.format(each)) for each in [*CRASHES, "pass"]]
    assert those_rewarded(programs, answer) == programs[-1:]


def test_code_never_rewards_a_program_whose_time_is_over(monkeypatch):
    """Whether nothing is expected, or what it printed before."""
    monkeypatch.setattr(sandbox, "CODE_SECONDS", 0.3)
    for before, expected in (("", ""), ("print(3, flush=True)", "3")):
        program = fenced(f"import time\n{before}\ntime.sleep(30)")
        assert not those_rewarded([program], {"stdin": [["", expected]]})


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


@pytest.mark.parametrize(
    "off", [None, *[pytest.param(layer, marks=pytest.mark.slow) for layer in sandbox.LAYERS]]
)
def test_code_does_not_reward_attacks(off, monkeypatch):
    """With one layer switched off, too: verdicts rest on none of them."""
    monkeypatch.setattr(sandbox, "LAYERS", tuple(x for x in sandbox.LAYERS if x != off))
    assert those_rewarded([fenced(source) for source in ATTACKS], ADD) == []


@pytest.mark.parametrize("processes, at_once", [("2", 2), ("8", 1), (None, 4)])
def test_programs_of_all_processes_share_the_cores(processes, at_once, monkeypatch):
    """Four cores: as many programs at a time, over all processes that torchrun has started."""
    running, counts = [], []

    def run_program(*arguments, **settings):
        running.append(1)
        counts.append(len(running))
        time.sleep(0.02)
        running.pop()
        return {}, "[3, 42]"

    monkeypatch.setattr(sandbox, "run_program", run_program)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert len(those_rewarded([fenced(RIGHT)] * 9, ADD)) == 9 and max(counts) == at_once
