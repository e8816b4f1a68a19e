"""Verifiers and rewards: answers to reward, answers not to reward, texts that must not hang."""

import ast
import contextlib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch

import rewards
from forks import fork, program
from support import mathematics
from support.errors import UserError, need

pytest.importorskip("support.extras.programs")  # it registers a verifier

ROOT = Path(rewards.__file__).parent
COMMAND = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # python FILE ARGUMENTS, for fork

VERIFY = rewards.VERIFIERS
RIGHT = "def add(a, b):\n    return a + b"
RUNS_NOTHING = [name for name in VERIFY if not name.startswith("code")]
ADD = {"fn": "add", "cases": [[[1, 2], 3], [[20, 22], 42]]}
COUNTDOWN = {"numbers": [3, 5, 2], "target": 13}
GOLD = {"countdown": COUNTDOWN, "code": ADD, "choice": "B"}  # else 6


def cells(text):
    """Texts of a table, between bars and line breaks. ⏎ is a line break inside a text."""
    found = [cell.strip() for cell in re.split(r" \| |\n", text)]
    return [cell.replace("⏎", "\n") for cell in found if cell]


def boxed(answer):
    return "so \\boxed{" + answer + "}"


def fenced(source):
    return "Here it is:\n```python\n" + textwrap.dedent(source) + "\n```\nDone.\n"


# ---- verdicts. In the tables a gold answer other than GOLD's follows an arrow

EXTRACTED = r"""
    <answer>6</answer> | <think>2+3=5</think> <answer>6</answer> | 2+3=5</think> <answer>6</answer>
    <think>\boxed{5}</think> \boxed{6} | <think>a</think><think>b</think>\boxed{6}
    <answer>5</answer> no, <answer>6</answer> | <answer>the answer is \boxed{6}</answer>
    \boxed{5} <answer>6</answer> | <answer>6</answer> \boxed{5} | \boxed{5} or rather \boxed{6}
    \boxed{\frac{1}{2}} => \frac{1}{2} | \boxed{5 \boxed{6} | \\boxed{6} | \boxed{\{6\}} => \{6\}
    \boxed{\{1,2\}} => \{1,2\} | { } } { \boxed{6} { | #### 6 | ####6 | \boxed{6} and \boxed{5
    #### 1 234 dollars => 1 234 dollars | <answer>⏎6⏎</answer> | a⏎#### 5⏎b⏎#### 6⏎c
    #### 5⏎\boxed{6} | \boxed{6}⏎#### 5 | \boxed{[0,1\}} => [0,1\} | \boxed 6 | so $\boxed 6.$
"""
NOT_EXTRACTED = r"""
    6 | the answer is 6 | <think>\boxed{6} | <think>\boxed{6}</think> | \boxed{6}</think>
    <think>#### 6</think>done | <think>a</think><think>\boxed{6} | <answer>6 | ####⏎6
    <answer>5</answer> <answer>6 | \boxed{6 | \boxed 56 | \boxed{} | <answer></answer>
    <answer> </answer>\boxed{6} | #### | </answer>6<answer> | \fbox{6} | <answer>\boxed{6</answer
    \boxed{either \boxed{5} or \boxed{6}} | \boxed{5 \text{ not } \boxed{6}} | \boxed{\boxed{6}+1}
    \boxed{\boxed{5}\boxed{6}} | <answer>\boxed{5 or \boxed{6}}</answer>
"""
LENIENT = r"""
    the answer is 6 | 6 apples, 7 pears => 7 | it costs $1,234.50. => 1234.5 | x = -5 => -5
    −5 => -5 | it is –5 => -5 | the answer is -$5 => -5 | it is .5 => 0.5 | so 1/2 => 0.5
    \frac{3}{4} => 0.75 | so $-\dfrac{3}{4}$ => -3/4 | so 50% => 0.5 | so 50\% => 1/2 | 5 cm => 5 cm
    6 or \boxed{7} => 7 | 42 is right => 42 | **6** | it's $6/hour | 10-6
"""
NOT_LENIENT = r"""
    6 apples, 7 pears | 10-6 => -6 | \boxed{7} then 6 | <think>it is 6. </think> none | <think>6
    no number | 6 #### \boxed{} | 6 #### | so \boxed{6 | 6 <answer></answer> | −5 => 5
    so 0.5% => 0.5 | it is .5 => 5 | so 1/2. => 2 | \frac{3}{4} => 4
"""
SOLUTIONS = r"""
    3*5-2 | 5*3-2 | -2+3*5 | 3×5−2 | 3\times5-2 | 3\cdot 5 - 2 | 3*5-2=13 | 3*5-2 = 13. | ((3*5))-2
    $3*5-2$ | +3*5-2 | 5*3+-2
"""
NO_SOLUTIONS = r"""
    13 | 3*5 | 3*5-2+0 | 3*5-2-2+2 | 5+5+3 | 35-2*11 | 3*5-1-1 | 3*5+2 | 3^5-2 | 3//5*2 | 3*5-2=14
    13=13=3*5-2 | 13=3*5-2=13 | 3*5-2.. | 13=13 | 3*5-2;3 | 3*5-2,13 | int('3')*5-2 | 3 5 2 | ３*5-2
    3*5-(2 | 3*5-2) | 3*5-2%1 | abs(3)*5-2 | 9**9**9**9 | (3)(5)-2 | <think>3*5-2
    the solution is 3*5-2 | 3*5-2⏎13
"""
CHOSEN = r"""
    B | b | (B) | B. | B) | **B** | \boxed{B} | \boxed{\text{B}} | \boxed{\textbf{(B)}}
    <answer>B</answer> | <answer>(B) Paris</answer> | B. Paris | B: the capital | The answer is B.
    The correct option is (B). | the final answer is B | <think>A</think>B | #### B | B. A dog
    B - Paris | --- B --- | B – Paris | (B) - a dog | option B | (B) is correct
    (B) because it fits | B. None of the above | \boxed{\textrm{B}} | the best choice is B
"""
NOT_CHOSEN = r"""
    A | A or B | A, B | B and C | (A)(B) | B. or A. | B) C) D) | B) 1⏎(c) 2 | AB | BB | Berlin
    a big dog | not B | I think B is wrong | <think>B</think>A | <answer>B | Б | 1 | the answer
    \boxed{A} B | B? A? | B. Or rather C | B. C is the answer | B. On reflection C is right
    B) 1 c) 2 | B - no, C is right | A - B | B-52 | (B) is not correct | B: incorrect
    B. Wrong, because | (B) isn't right | (B) isn’t it | B. This is not the answer
    (B) cannot be right | (B)? No | ≠ B | ¬B | ❌ B | B ❌ | ~~B~~ | B, no | (B), which is wrong
    B. Never the right choice | (B) is ruled out | not (B) | B- Paris | B++ | \boxed{B#}
    the answer is ≠ B | B. Not given | B. False
"""
EXACT = r"""
    Paris => paris | <answer>new   york</answer> => New York | Straße => STRASSE
    \boxed{a b} => a b | <think>x</think>Paris => Paris | ⏎ Paris ⏎ => Paris
"""
NOT_EXACT = "Paris. => Paris | in Paris => Paris | Pari => Paris | <think>6 | 0.5 => 1/2"
FORMED = """
    <think>a</think><answer>b</answer> | a</think><answer>b</answer>
    <think>⏎a⏎</think>⏎⏎<answer>⏎b</answer>⏎ | <think>a < b > c</think> <answer><b></answer>
    <think>漢</think><answer>-</answer> | ⏎<think>a</think><answer>b</answer>
"""
NOT_FORMED = """
    a | <answer>b</answer> | <think>a</think> | <think>a</think>b | <think>a<answer>b</answer>
    <think>a</think><answer>b | <think></think><answer>b</answer> | </think><answer>b</answer>
    <think>a</think><answer> </answer> | x<think>a</think><answer>b</answer>
    <think>a</think>x<answer>b</answer> | <think>a</think><answer>b</answer>x
    <think>a</think><answer>b</answer><answer>c</answer> | <think><think>a</think><answer>b</answer>
    <think>a</think><answer><think></answer> | <answer>b</answer><think>a</think>
"""
EQUAL = r"""
    18.00 => 18 | \$1,080 => 1080 | 1{,}080 => 1080 | 1\,080 => 1080 | $18$ => 18
    \text{18 dollars} => 18 | \mathbf{18} => 18 | −3 => -3 | .5 => 1/2 | \frac12 => 0.5
    2 1/2 => 5/2 | 2\frac{1}{2} => 2.5 | 25\% => 25 | 25% => 0.25 | 25 percent => 25 | 25 => 25\%
    1.2 \times 10^3 => 1200 | 9+9 => 18 | 18\text{ eggs/day} => 18 | \text{Total} = 21 => 21
    n = 21 => 21 | the answer is 21 => 21 | \frac{3}{\sqrt{2}} => \frac{3\sqrt2}{2}
    Friday => friday | 2π => 2 \pi | (x+1)^2 => x^2+2x+1 | \frac{x+1}{2} => \frac{x}{2}+\frac12
    xy => yx | x² => x \cdot x | 90^\circ => 90 | 9\pi\text{ cm}^2 => 9\pi
    (1.0, \frac{4}{2}) => (1,2) | (x,y)=(1,2) => (1,2)
    (3,\infty) \cup (-\infty,3] => (-\infty,3]\cup(3,\infty) | x \in [1,2] => [1,2]
    \{1, 2\} => \{2,1\} | 1, 2, and 3 => 3,2,1 | x=1 or x=2 => 2, 1
    1 \pm \frac1{\sqrt2} => 1-\sqrt{.5}, 1+\sqrt{.5} | 2x+1 => y=1+2x | f(x) = x^2 => x^2
    x_1 => x_{1} | e^{i\pi} => -1
    \begin{pmatrix}1 & 2\\3 & 4\\ \end{pmatrix} => \begin{bmatrix}1&2\\3&4.0\end{bmatrix}
    \textbf{(A)} => A | \text{no solution} => No solution | x \ge 3 => x>=3 | 2516_8 => 2516_{8}
    1,234,567 => 1234567 | 016 => 16 | = 42 => 42 | \approx 42 => 42 | 150 sq ft => 150
    sqrt(4) => 2 | \{1, 2\} => 1,2 | \sqrt{0} => 0 | \lambda + 1 => λ+1
    \frac{PV}{nR} => \frac{VP}{Rn} | 5\text{ cm}^2 => 5\text{ cm}^{2} | (-\infty, 5) => (-\infty,5)
    \text{1, 3, and 5} => 1,3,5 | \frac{-63209876544}{7901234496} => -987654321/123456789
"""
DIFFERENT = r"""
    3 dozen => 3 | 5 thousand => 5 | \sqrt[3]{8} => 2.1 | 180 => 18 | -18 => 18 | 18 or 19 => 18
    18, 19 => 18 | 18 million => 18 | 0.25 => 25 | 0.25% => 25 | 60\% => 6 | 1,08 => 108
    0,05 => 0,5 | 0.33 => 1/3 | 2\frac12 => 1 | 18^2 => 18 | 18x => 18 | x+18 => 18
    18 is wrong => 18 | 1 8 => 18 | 2 hours 30 minutes => 2 | 5 ft => 5 inches
    5\text{ cm}^2 => 5\text{ cm} | 18\sqrt => 18 | \sqrt5 = 18 => 18 | 5 ms => 5 m | 7 tenths => 7
    5 squared => 5 | twice 18 => 18 | 18 = 19 => 19 | (1,2) => (2,1) | (1,2) => [1,2]
    [1,2) => (1,2] | (1,2) => \{1,2\} | 1,1 => 1 | (1,234) => 1234 | x>3 => x<3 | x\ge3 => x>3
    \pm 2 => 2 | 3+4i => 3-4i | y=2x+1 => 2x | x=5, y=6 => 5
    \begin{pmatrix}1&2\end{pmatrix} => \begin{pmatrix}1\\2\end{pmatrix} | f(2) => f(3) | n! => n
    \sin x \cos y => \cos x \sin y | 11_2 => 11 | \sqrt{x^2} => x | |x| => x | \gamma => \Gamma
    \infty => -\infty | \infty - \infty => 0 | 3.14159265 => \pi | e^{-1000} => 0 | 9^{9^9} => 9
    7)(5 => 35 | *5 => 5 | 2**3 => 23 | 1_000 => 1000 | 5j => 5 | 0x5 => 5 | 5, x => 5
    5 if 1 else 6 => 5 | lambda: 5 => 5 | C++ => C | A or B => A | (A)(B) => A | 12\frac => 12
    7][5 => 5 | \sqrt{2}3 => \sqrt{23} | 5\text{ isn't it} => 5 | 4\text{ lakh} => 4
    x\text{ cm} => x | Pari => Paris | 10^{400} => \pi | (2n)! => 2n! | \sin^2(x)y => \sin^2(xy)
    x=1, y=2, x=3 => 1, 2, 3 | x = 3, y = -2 => 3, -2 | 5 thirty-seconds => 5 | pH => PH
    5 m² => 5 cm² | e^{-500} => 0 | \frac{1}{0} => \frac{2}{0} | \binom{10}{3} => \binom{10}{4}
    3 or four => 3 | 5\text{ ft} => 5\text{ yd} | \dim V => V | f(1,234) => f(1234) | \det A => A
    n! \cdot n => (n!)^2 | \theta_1 - \theta_2 => \theta_2 - \theta_1 | \sqrt{u^2} => -u | -x => |x|
    \sin^{-1} x => \frac{1}{\sin x} | \log^2 x => \log_2 x | x \approx 3 => x | x^2 = 4 => 4
    x<1 or y>2 => x<1 or x>2 | x=1 or y=2 => (1,2) | 0 < x < 2 => [0,2] | (1,2),(2,1) => (1,2)
    \begin{vmatrix}1&2\\3&4\end{vmatrix} => \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \frac{1}{\infty} => 0.1 | 1:15 PM => 2:30 PM | ¬B => B | (A) is wrong => A | f(2) => 2f
    5, 5 => 5 | \frac{1000000000000000000000000000001}{3000000000000000000000000000000} => 1/3
"""
TABLES = [  # verifiers, completion around a text, gold answer without an arrow, verdict, texts
    ("math exact", "{}", "6", 1, EXTRACTED),
    ("math", "{}", "6", 0, NOT_EXTRACTED),
    ("exact", "{}", "6", 1, EXACT),
    ("exact", "{}", "6", 0, NOT_EXACT),
    ("math math_lenient", "so \\boxed{{}}", "", 1, EQUAL),
    ("math math_lenient", "so \\boxed{{}}", "", 0, DIFFERENT),
    ("math_lenient", "{}", "6", 1, LENIENT),
    ("math_lenient", "{}", "6", 0, NOT_LENIENT),
    ("choice", "{}", "B", 1, CHOSEN),
    ("choice", "{}", "B", 0, NOT_CHOSEN),
    ("countdown", "{}", COUNTDOWN, 1, SOLUTIONS),
    ("countdown", "<think>3+5</think>\\boxed{<answer>{}</answer>}", COUNTDOWN, 1, SOLUTIONS),
    ("countdown", "{}", COUNTDOWN, 0, NO_SOLUTIONS),
    ("format", "{}", None, 1, FORMED),
    ("format", "{}", None, 0, NOT_FORMED),
]


@pytest.mark.parametrize("names, around, usual_gold, verdict, table", TABLES)
def test_verifier_judges_as_written(names, around, usual_gold, verdict, table):
    for cell in cells(table):
        text, _, gold = cell.partition(" => ")
        for name in names.split():
            completion = around.replace("{}", text)
            assert VERIFY[name](completion, gold or usual_gold) == verdict, (name, cell)


def test_known_limits_are_those_of_the_page():
    """Each row of its table: the answer, the gold answer, right or wrong, refused or rewarded."""
    page = (ROOT / "docs/verifiers.md").read_text()
    rows = re.findall(r"(?m)^\| `(.+)` \| `(.+)` \| (right|wrong).* (refused|rewarded) \|$", page)
    assert len(rows) > 10
    for given, gold, truth, verdict in rows:
        assert (truth, verdict) in (("right", "refused"), ("wrong", "rewarded"))
        assert VERIFY["math"](boxed(given), gold) == (verdict == "rewarded"), (given, gold)


def test_each_rewrite_does_what_its_example_says():
    source = (ROOT / "support/mathematics.py").read_text()
    examples = re.findall(r"(?m)^    \(r.*\),  # (.+) -> (.+)$", source)
    for (pattern, ours), (given, expected) in zip(mathematics.REWRITES, examples, strict=True):
        assert re.sub(pattern, ours, given) == expected


def test_long_completions_are_read_to_the_end():
    """The answer may stand anywhere in the text, but has at most 10,000 characters itself."""
    for text in (
        "x" * 500_000 + "\\boxed{6}" + "x" * 500_000,
        "<answer>6</answer>" + "x" * 500_000,
    ):
        assert VERIFY["math"](text, "6") == 1
    assert VERIFY["math_lenient"]("so 42" + " and on" * 1000, "42") == 1
    assert VERIFY["math_lenient"]("7" * 2000, "7") == VERIFY["choice"]("B" * 1000, "B") == 0
    for text in ("(" * 5000 + "3*5-2" + ")" * 5000, "3*5-2" + "+0" * 5000, "1" * 1_000_000):
        assert VERIFY["countdown"](text, COUNTDOWN) == 0
    assert rewards.final_answer(boxed("5" * 10_000), marked=True) == "5" * 10_000
    assert rewards.final_answer(boxed("5" * 10_001), marked=True) == ""
    assert VERIFY["exact"]("7", 7) == VERIFY["exact"]("0.5", 0.5) == 1


def test_countdown_computes_in_fractions_and_does_not_join_digits():
    right = {"1/3*3": 1, "8/(3-8/3)": 24, "8÷(3−8÷3)": 24, "2-5=-3": -3}
    wrong = {"1/2": 0, "1/(2-2)": 0, "3 1/2*2": 7, "2 2+1": 23}
    for text, target in (right | wrong).items():
        numbers = [int(digit) for digit in text.partition("=")[0] if digit.isdigit()]
        answer = {"numbers": numbers, "target": target}
        assert VERIFY["countdown"](text, answer) == (text in right), text


# ---- totality and time

MANY = (
    "\0|1|\\boxed{|<answer>|<think>|</answer>|<answer></answer>|<think></think>|#|####\n|7+5=2;"
    "|<calc>1*2</calc>|`|~|```\n|```a|```python\nx = 1\n```\n| |\n|a |the cat, |\\|\ud800|é∑漢"
    "|😀|e\u0301|٣|[|*|5 |5 - |2^|5? |?|not |is |B) |$5|x="
)


def hostile():
    """Long, deep and strange texts."""
    texts = MANY.split("|")
    found = [piece * (60_000 // len(piece)) for piece in [*texts, "\\boxed{" + "{" * 2000]]
    found += ["", boxed("1" * 999_000), "\\boxed{" * 20_000 + "}" * 20_000, boxed("9**9**9**9")]
    found += [boxed("(" * 490 + "1" + ")" * 490), "\\boxed{" + "{}" * 100_000]
    found += [f"<answer>{piece}x</answer>" for piece in ("the answer is " * 600, " " * 9000)]
    rng = random.Random(0)
    found += [rng.randbytes(5000).decode("latin-1") * rng.randint(1, 20) for _ in range(9)]
    pieces = [*texts, *"{}^(),.x=<+-*/!%;_B", "\\frac", "and", "minus", "\\sqrt[0]{", "1/0", "i"]
    found += ["".join(rng.choices(pieces, k=rng.randint(1, 200))) for _ in range(150)]
    short = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(500)]
    return found + short + list(map(boxed, short))


HOSTILE = hostile()


def is_a_verdict(value):
    """Whether it is a number from 0 to 1, or a list of (position, such a number)."""
    if type(value) is list:
        return all(type(end) is int and is_a_verdict(part) for end, part in value)
    return type(value) in (bool, float) and 0 <= value <= 1


@pytest.mark.parametrize("name", [*RUNS_NOTHING, "code"])
def test_verifier_is_total_and_takes_no_time_on_hostile_text(name):
    """Of up to a million characters. Hardly any has a program: `code` tries fewer."""
    for text in HOSTILE[:80] if name == "code" else HOSTILE:
        start = time.process_time()
        verdict = VERIFY[name](text, GOLD.get(name, "6"))
        assert time.process_time() - start < 1, text[:100]
        assert is_a_verdict(verdict), text[:100]


@pytest.mark.parametrize("name", RUNS_NOTHING)
def test_a_gold_answer_is_usable_or_a_user_error(name):
    golds = [None, True, 0, -1, 3.5, float("inf"), float("nan"), 10**4000, "", "x" * 100_000]
    golds += ["\\frac{1}{", "\0", [], [1], {}, {"numbers": 3}, object(), b"", ()]
    for gold, text in itertools.product(golds, ["", "6", "\\boxed{6}", "#6", "<answer>x</answer>"]):
        with contextlib.suppress(UserError):
            assert is_a_verdict(VERIFY[name](text, gold)), (text, gold)


# what costs time: roots, powers, long lists, products of long numbers, letters at every place
SLOW = r"""
    \sqrt{ | 9^ | 9^{99}* | x_1+ | (x+1)^{9}* | 1, | x, | x* | \frac{1}{ | ( | { | [ | 2^{- | 1 1/
    (x,x)= | \text{ cm} | and | 1,000, | 5 cm | f(x)= | x= | ±1 | e^ | i^ | - | % | ^{} | ¦{ | .5
    x/
"""


@pytest.mark.parametrize("piece", cells(SLOW))
def test_no_comparison_takes_long(piece):
    """Of texts up to the length that is read as mathematics, with several ends, both ways."""
    for size, end in itertools.product((40, 150, 280), ("", "5", "x}", ")" * 20 + "5")):
        text = (piece * size)[:size] + end
        for given, gold in ((text, "5"), ("5", text), (text, text[1:] + text[0])):
            start = time.process_time()
            mathematics.same_answer(given, gold)
            assert time.process_time() - start < 0.2, (given, gold)


# Exponential backtracking takes a repeat of something that can match a text in several ways. These
# are the repeats of something with a choice in it -> a text on which a wrong one would take long
CHOICES = {
    r"\\boxed +(-?\w+(?:[.,/]\d+)*)": "\\boxed 1" + 25 * ".1",
    r"(?:(?:the|final|correct|best|answer|option|choice|is)\b[^\w≠¬~❌]*)*": 25 * "the ",
    r"([^\W\d]\w*(?:\(\w\))?|\(\w(?:, ?\w)+\)) ?=": "(x" + 25 * ", x",
    r"\A(?:[= ]|\*\*|0(?=\d))+|(?:[. ]|\*\*)+\Z": 25 * "**= 0. ",
    r"\{(?:[^{}]|\{[^{}]*\})*\}": "¦{" + 25 * "{}",
}
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def expressions(path):
    """Every expression of a file's calls, such as re.search("..."), and of its REWRITES."""
    module = importlib.import_module(path.replace("/", "."))
    yield from (pattern for pattern, _ in getattr(module, "REWRITES", []))
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if re.fullmatch(r"re\.(?!escape)\w+", call):
            words = ast.walk(node.args[0])
            local = {word.id: "name" for word in words if isinstance(word, ast.Name)}
            yield eval(ast.unparse(node.args[0]), local | vars(module))


def parts_of(expression):
    """(operation, argument) of every node of a parsed expression, at any depth."""
    for each in expression if isinstance(expression, (tuple, list)) else expression.data:
        if isinstance(expression, re._parser.SubPattern):
            yield str(each[0]), each[1]
        if isinstance(each, (tuple, list, re._parser.SubPattern)):
            yield from parts_of(each)


def has_choice(expression):
    return any(
        operation == "BRANCH" or (operation in REPEATS and argument[0] != argument[1])
        for operation, argument in parts_of(expression)
    )


@pytest.mark.parametrize(
    "path", ["rewards", "support/mathematics", "support/tasks", "support/extras/programs"]
)
def test_no_expression_backtracks_exponentially(path):
    for expression in expressions(path):
        parts = parts_of(re._parser.parse(expression))
        repeats = [argument for operation, argument in parts if operation in REPEATS]
        if any(has_choice(body) for _, high, body in repeats if high > 9):
            [text] = [text for part, text in CHOICES.items() if part in expression]
            start = time.process_time()
            for completion in (text, text + "\0"):
                re.search(expression, completion)
            assert time.process_time() - start < 0.2, expression


def test_verifiers_take_no_time_on_repeated_pieces():
    """Nor on the longest text that is read as an answer."""
    rng = random.Random(0)
    pieces = [*MANY.split("|"), *cells(SLOW), ".1", "the ", ", x", "**= 0. ", "{}"]
    pieces += ["".join(rng.choices(pieces, k=2)) for _ in range(60)]
    for piece, name in itertools.product(pieces, ("math", "math_lenient", "choice")):
        text = (piece * 9_900)[:9_900]
        for completion in (text, boxed(text), boxed(text[:900])):
            start = time.process_time()
            VERIFY[name](completion, "B")
            assert time.process_time() - start < 0.2, (name, piece)


# ---- rewards

ROW = {"prompt": "1+5?", "answer": "6"}


@pytest.fixture
def own(tmp_path):
    """own(source) -> the path of a user's file with it."""

    def write(source):
        (tmp_path / "own.py").write_text(textwrap.dedent(source))
        return f"{tmp_path}/own.py"

    return write


def scored(spec, *completions, **row):
    """The verdicts on completions by a reward: (verdicts, rewarded, correct)."""
    reward = rewards.parse_reward(spec)
    reward.check([ROW | row])
    verdicts = reward.verify(list(completions), [ROW | row] * len(completions))
    return verdicts, *reward.without_shaping(verdicts)


MINE = """
    def double(completion, answer): return 2 * (completion == answer)
    def near(completion, answer): return -abs(int(completion) - int(answer))
    def short(completion, answer): return -len(completion) / 50
    def share(completion, answer): return min(len(completion) / 10, 1)
    share.shaping = False
    def steps(completion, answer):
        return [(1, 0.5), (2, len(completion)), (3, completion == answer)]
    def style(completion, answer): return completion.islower()
    style.shaping = True
    def late(completion, answer): return 3 if completion == "jackpot" else completion == answer
"""
FORM = "<think>a</think><answer>{}</answer>"
SUMS = [  # sum, completions, reward, rewarded, correct
    (" 0.5*math+0.1 * format", [FORM.format(6), FORM.format(7)], [0.6, 0.1], [0.5, 0], [1, 0]),
    ("format", [FORM.format(6), "6"], [1, 0], [1, 0], None),  # there is nothing but shaping
    ("math", [], [], [], []),
    ("exact + 0.2*{}:short", ["6", " 6 ", "7"], [0.996, 0.988, -0.004], [1, 1, 0], [1, 1, 0]),
    ("3*exact + {}:share", ["6", "seven"], [3.1, 0.5], [3.1, 0.5], [3.1 / 4, 0.5 / 4]),
    # values outside 0 to 1, whose sum does not tell which completions are right
    ("{}:double", ["6", "7"], [2, 0], [2, 0], None),
    ("{}:near", ["6", "1"], [0, -5], [0, -5], None),
    # marked functions and negative weights are shaping, though they are worth between 0 and 1
    ("exact + 0.5*{}:style", ["6", "seven"], [1, 0.5], [1, 0], [1, 0]),
    ("-0.1*{}:share + exact", ["6", "seven"], [0.99, -0.05], [1, 0], [1, 0]),
    ("-1*{}:share", ["6", "seven"], [-0.1, -0.5], [-0.1, -0.5], None),
    # found too late to be shaping: `solved` keeps its meaning
    ("{}:late", ["6", "7", "jackpot"], [1, 0, 3], [1, 0, 3], [1, 0, 1]),
]


@pytest.mark.parametrize("spec, completions, reward, rewarded, correct", SUMS)
def test_only_what_is_no_shaping_says_what_is_right(
    spec, completions, reward, rewarded, correct, own
):
    """It is decided by a few answers to the first row, and a function may raise on some of them.
    Shares count in part."""
    verdicts, *rest = scored(spec.format(own(MINE)), *completions)
    assert [verdict.reward for verdict in verdicts] == pytest.approx(reward)
    assert rest == [pytest.approx(rewarded), correct and pytest.approx(correct)]


def test_shaping_is_decided_at_the_start_and_later_values_only_warn(own):
    path = own(MINE)
    reward = rewards.parse_reward(f"{path}:late + {path}:double + {path}:style")
    reward.check([ROW])
    assert (reward.shaping, reward.out_of_range) == ({"double", "style"}, {"double"})
    assert reward.without_shaping(reward.verify(["jackpot", "6"], [ROW, ROW])) == ([3, 1], [1, 1])
    assert (reward.shaping, reward.out_of_range) == ({"double", "style"}, {"double", "late"})


def test_steps_are_weighted_and_rewarded_and_the_last_entry_is_the_outcome(own):
    verdicts, rewarded, _ = scored(f"2*{own(MINE)}:steps + 0.5*exact", "6", "77")
    assert verdicts[0].terms == {"steps": 1.0, "exact": 1.0}
    assert (verdicts[0].reward, verdicts[0].steps) == (2.5, [(1, 1.0), (2, 2.0)])
    assert (verdicts[1].reward, verdicts[1].steps) == (0.0, [(1, 1.0), (2, 4.0)])
    assert rewarded == [2.5 + 1 + 2, 0.0 + 1 + 4]  # no dead group: other steps, other gradients


PARAMETERS = [  # fields that stand in a parameter's place, by its name where the row has it
    ("completion, answer", ["c", "6"]),
    ("text, gold", ["c", "6"]),
    ("prompt, completion, answer", ["1+5?", "c", "6"]),
    ("answer, completion", ["6", "c"]),
    ("data_source, solution_str, ground_truth, extra_info=None", ["gsm", "c", "6", None]),
    ("completion", ["c"]),
    ("text, gold, prompt, marker='*'", ["c", "6", "1+5?", "*"]),
    ("text, gold, /, *, tokens", ["c", "6", 3]),
    ("*both", ["c", "6"]),
    ("completion, answer, **row", ["c", "6", "data_source", "level", "prompt", "tokens"]),
]


@pytest.mark.parametrize("parameters, expected", PARAMETERS)
def test_parameters_receive_the_fields_of_their_names(parameters, expected, own):
    given = parameters.replace(", /", "").replace(" *,", "").replace("**row", "*sorted(row)")
    given = re.sub(r"=[^,]*", "", given)
    path = own(f"SEEN = []\ndef f({parameters}):\n    SEEN[:] = [{given}]\n    return 1\n")
    row = ROW | {"data_source": "gsm", "level": [0], "tokens": 3}
    reward = rewards.parse_reward(f"{path}:f")
    assert reward.verify(["c"], [row])[0].fault == ""
    assert reward.terms["f"].function.__globals__["SEEN"] == expected


def test_functions_of_a_file_share_its_globals_and_get_copies(own, tmp_path):
    """The file runs once, and imports its neighbour while a function runs."""
    (tmp_path / "neighbour_of_mine.py").write_text("HALF = 0.5\n")
    path = own("""
        SEEN = []
        class Callable:
            def __call__(self, completion, answer): return 0.25 * len(SEEN)
        g = Callable()
        def f(completion, answer, level):
            from neighbour_of_mine import HALF
            SEEN.append(level.pop())
            return answer.pop("target") * HALF
    """)
    row = {"prompt": "?", "answer": {"target": 1}, "level": [0]}
    [verdict] = rewards.parse_reward(f"{path}:f + {path}:g").verify(["6"], [row])
    assert verdict.terms == {"f": 0.5, "g": 0.25}
    assert row == {"prompt": "?", "answer": {"target": 1}, "level": [0]}


def test_attributes_of_a_function_are_read_by_their_value(own):
    """False and None switch off what True or a function switches on."""
    path = own("""
        import threading
        def f(completion, answer): return threading.current_thread() is threading.main_thread()
        f.threads, f.shaping, f.prepare, f.read = False, False, None, None
        def g(completion, answer): return f(completion, answer)
        g.threads = True
    """)
    (verdict,), _, correct = scored(f"{path}:f", "6")
    assert verdict.reward == 1 and correct == [1]
    assert rewards.parse_reward(f"{path}:g").verify(["6"], [ROW])[0].reward == 0


FAULTS = r"""
    raise KeyError('x\n\x1b[31m') | return None | return 'a' | return float('nan') | return [1, 2]
    return float('inf') | return [(1, float('nan'))] | return [] | return [1] | return 1/0
    raise SystemExit(3) | return 10 ** 400 | return [(1, 1e300), (2, 1.0)] | assert False
    return ''
"""


@pytest.mark.parametrize("body", cells(FAULTS))
def test_a_completion_whose_verifier_fails_abstains(body, own):
    """It has no reward, not even of the verifiers that did not fail, and the others have theirs."""
    path = own(
        f"def broken(completion, answer):\n    if completion[-1] == '6': return 0\n    {body}\n"
    )
    reward = rewards.parse_reward(f"exact + -1*{path}:broken")
    verdicts = reward.verify(["6", "\x1b[31m" + "long " * 1000], [ROW, ROW])
    assert verdicts[0].terms == {"exact": 1.0, "broken": 0.0} and verdicts[0].fault == ""
    assert [str(verdict.reward) for verdict in verdicts] == ["1.0", "nan"]
    assert str(verdicts[1].terms) == "{'exact': nan, 'broken': nan}"
    assert str(reward.without_shaping(verdicts)) == "([1.0, nan], [1.0, nan])"
    fault = verdicts[1].fault
    assert fault.startswith("broken: ") and "long" in fault and fault.isprintable()
    assert len(fault) < 500 and ("own.py, line 3" in fault) == (
        not body.startswith("return ") or "/" in body
    )


@pytest.mark.parametrize("end", ["sys.exit(7)", "raise ValueError", "return 1", "sys.exit()"])
def test_a_child_process_of_a_verifier_ends_with_it(end, own):
    """Otherwise it would go on training beside its parent."""
    path = own(f"""
        import os, sys
        def f(completion, answer):
            child = os.fork()
            if child == 0:
                {end}
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    """)
    process = os.getpid()
    with warnings.catch_warnings(action="ignore"):  # of forks beside threads
        [verdict] = rewards.parse_reward(f"{path}:f").verify(["6"], [ROW])
    if os.getpid() != process:
        os._exit(99)
    assert verdict.reward == {"sys.exit(7)": 7, "raise ValueError": 1}.get(end, 0)


def test_torch_is_left_as_it_was(own):
    path = own("""
        import torch
        def f(completion, answer):
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float64)
            return 1 if completion == answer else 1 / 0
    """)
    reward = rewards.parse_reward(f"{path}:f")
    reward.check([ROW])
    assert [str(each.reward) for each in reward.verify(["6", "7"], [ROW, ROW])] == ["1.0", "nan"]
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32


WRONG_REWARDS = {  # a sum, or the source of a user's file, and words of the sentence
    "mth": "--reward mth: no such verifier; did you mean math?; expected file.py:function",
    "": "--reward : no such verifier; expected",
    "x*math": "could not convert string to float: 'x'",
    "0*math": "a weight of 0, expected up to 1e6",
    "nan*math": "a weight of nan",
    "math+math": "math is given twice",
    "nowhere.py:fn": "--reward nowhere.py:fn: FileNotFoundError: ",
    "def f(:": "own.py:f: SyntaxError: invalid syntax (own.py, line 1)",
    "raise RuntimeError('one\\ntwo')": "own.py:f: RuntimeError: one",
    "ff = 3": "own.py has no f",
}


@pytest.mark.parametrize("broken, words", WRONG_REWARDS.items())
def test_parse_reward_says_what_is_wrong(broken, words, own):
    """The cause comes first, and in one line."""
    with pytest.raises(UserError) as error:
        rewards.parse_reward(f"{own(broken)}:f" if " " in broken else broken)
    message = str(error.value)
    assert message.startswith("--reward ") and words in message and "\n" not in message


ONE = "it gets one completion at a time; return a number"
CHECKED = {  # a user's function, and words of the sentence that refuses it
    "def f(completion, answer, level): return 1": [
        "'level' on ''; expected def f(completion, answer)"
    ],
    "def f(completion, answer): return '1.0'": [f"it returned '1.0': {ONE}"],
    "def f(completion, answer): return anwser": ["anwser", "own.py, line 1)", "prompt, answer"],
    "def f(completion, answer): return None": [f"it returned None: {ONE}"],
    "async def f(completion, answer): return 1.0": ["it returned <coroutine object f", ONE],
    # of TRL, verl and ms-swift: lists in, lists out
    "def f(completions, answer, **kw): return [1.0 for text in completions + '.']": ["[1.0]", ONE],
    "def f(prompts, completions, **kwargs): return [0.0] * 3": ["[0.0, 0.0, 0.0]", ONE],
    "def f(completions, **kw): return [c[0]['content'] for c in completions + '.']": ["TypeError"],
    "class F:\n    def __call__(self, completions, solution, **kw): return [1]\nf = F()": ["[1]"],
    "def f(data_source, solution_str, ground_truth): return 1": ["'ground_truth'"],
}


@pytest.mark.parametrize("source", CHECKED)
def test_check_refuses_functions_that_cannot_work(source, own):
    """In one sentence, before any model is loaded, and without a warning of Python's."""
    reward = rewards.parse_reward(f"math + {own(source)}:f")
    with warnings.catch_warnings(action="error"), pytest.raises(UserError) as error:
        reward.check([ROW])
    message = str(error.value)
    assert message.startswith("--reward f: ") and "\n" not in message and len(message) < 400
    assert all(word in message for word in CHECKED[source]), message


def test_need_refuses_a_gold_answer_before_training_and_abstains_in_a_run(monkeypatch):
    monkeypatch.setattr(rewards, "VERIFIERS", dict(rewards.VERIFIERS))

    @rewards.verifier
    def shorter(completion, answer):
        need(answer > 0, "a length is positive")
        return len(completion) < answer

    reward = rewards.parse_reward("shorter + 0.5*exact")
    right, none = reward.verify(["abc", "abc"], [{"answer": 4}, {"answer": -1}])
    assert right.terms == {"shorter": 1.0, "exact": 0.0}
    assert none.fault == "shorter: a length is positive on 'abc'"
    reward.check_answer(1)
    with pytest.raises(UserError, match="shorter.*a length is positive"):
        reward.check_answer(-1)


def test_a_reward_has_a_lenient_twin_where_it_has_our_math(own):
    """The same sum, weights and shaping. A user's own `math` takes any answer, and has none."""
    texts = ["so \\boxed{6}", "so 6", "so 7"]
    reward = rewards.parse_reward("2*math + 0.1*format + exact")
    reward.shaping.add("exact")  # as if it had returned 2
    assert reward.without_shaping(reward.verify(texts, [ROW] * 3))[1] == [1, 0, 0]
    twin = reward.lenient_twin()
    assert twin.without_shaping(twin.verify(texts, [ROW] * 3)) == ([2, 2, 0], [1, 1, 0])
    assert rewards.parse_reward("exact + format").lenient_twin() is None
    reward = rewards.parse_reward(own("def math(text, gold): return gold == {}") + ":math")
    assert reward.check_answer({}) is None and reward.lenient_twin() is None
    assert reward.verify(["x"], [{"prompt": "", "answer": {}}])[0].reward == 1.0


def test_rewards_can_be_copied_with_three_small_files(tmp_path):
    """They import no torch. A deleted extra is an ImportError of Python's."""
    (tmp_path / "support").mkdir()
    for name in ("rewards", "support/errors", "support/mathematics", "support/user_code"):
        shutil.copy(ROOT / f"{name}.py", tmp_path / f"{name}.py")
    program = """if True:
        import sys, rewards
        reward = rewards.parse_reward("math + countdown + choice")
        assert reward.terms["math"].function("\\\\boxed{1/2}", "0.5")
        assert rewards.parse_reward("exact").verify(["6"], [{"answer": 6}])[0].reward == 1
        assert "torch" not in sys.modules
        rewards.parse_reward("code")
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)
    error = done.stderr.decode().splitlines()[-1]
    assert "--reward code: ModuleNotFoundError: No module named 'support.extras'" in error


MALFORMED = """
    null | 13 | {} | {"numbers": [3, 5, 2]} | {"target": 13} | {"numbers": [], "target": 13}
    {"numbers": "352", "target": 13} | {"numbers": [3, 5, 2, true], "target": 13}
    {"numbers": [3, "5", 2], "target": 13} | {"numbers": [3, 5, 2.5], "target": 13}
    {"numbers": [3, 5, 2], "target": "13"} | {"numbers": [3, 5, -2], "target": 13}
"""
UNUSABLE = {"countdown": [json.loads(cell) for cell in cells(MALFORMED)]}
UNUSABLE |= {"choice": ["Paris"], "math": ["<think>5", "x" * 20_000]}
UNUSABLE |= dict.fromkeys(("math_lenient", "exact", "arithmetic"), [None, "", "  ", [], {}, True])


@pytest.mark.parametrize("name", VERIFY)
def test_check_answer_accepts_what_a_verifier_can_use_and_nothing_else(name):
    reward = rewards.parse_reward(f"-0.5*{name} + 0.1*format" if name != "format" else name)
    assert reward.check_answer(GOLD.get(name, "6")) is None
    for answer in UNUSABLE.get(name, []):
        with pytest.raises(UserError, match=name) as error:
            reward.check_answer(answer)
        assert "\n" not in str(error.value) and len(str(error.value)) < 200


# ---- command line


def test_command_prints_the_mean_and_the_disagreements_or_the_unusable_gold_answer(tmp_path):
    """As a program: extras register with the module, not with __main__."""
    path = tmp_path / "answers.jsonl"

    def command():
        out, err = tmp_path / "out", tmp_path / "err"
        given = ["rewards.py", str(path), "--reward", "math"]
        process = fork(program, COMMAND, *given, out=out, err=err, folder=ROOT)
        process.join()
        return process.exitcode, out.read_text(), err.read_text()

    path.write_text('{"completion": "a", "answer": ""}')
    status, said, error = command()
    assert (status, said, error.count("\n")) == (2, "", 1)
    assert re.search("line 1.*cannot be used by math", error)
    rows = [{"completion": f"#### {n}", "answer": "3" if n == 2 else str(n)} for n in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    status, said, _ = command()
    assert status == 0 and "reward 0.7500 of 4;" in said
    assert "row 3: '3' from '#### 2'" in said and "row 2" not in said
