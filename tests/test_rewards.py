"""Verifiers and rewards: answers to reward, answers not to reward, texts that must not hang."""

import contextlib
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import patterns
import rewards
from forks import fork, program
from support.user import UserError, need

answers = pytest.importorskip("support.extras.answers")  # these two register verifiers
pytest.importorskip("support.extras.programs")

ROOT = Path(rewards.__file__).parent
COMMAND = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # python FILE ARGUMENTS, for fork

VERIFY = rewards.VERIFIERS
RUNS_NOTHING = [name for name in VERIFY if not name.startswith("code")]
ADD = {"fn": "add", "cases": [[[1, 2], 3], [[20, 22], 42]]}
RIGHT = "def add(a, b):\n    return a + b"
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
    \boxed{either \boxed{5} or \boxed{6}} | \boxed{5 \text{ not } \boxed{6}}
    \boxed{\boxed{6}+1} | \boxed{\boxed{5}\boxed{6}}
    <answer>\boxed{5 or \boxed{6}}</answer>
"""
LENIENT = r"""
    the answer is 6 | 6 apples, 7 pears => 7 | it costs $1,234.50. => 1234.5 | x = -5 => -5
    −5 => -5 | it is –5 => -5 | - 5 => -5 | x = - 5. => -5 | the answer is - 5 => -5
    the answer is -$5 => -5 | it is .5 => 0.5 | so 1/2 => 0.5 | so 3 1/2 => 3.5
    \frac{3}{4} => 0.75 | so $-\dfrac{3}{4}$ => -3/4 | 2\frac{3}{4} => 2.75 | so 50% => 0.5
    so 50% => 50 | so 50\% => 1/2 | 50 percent => 50% | 5 years => 5
    so $3 1/2 => 3.5 | 10 / 4 => 2.5 | 5 months and a day => 5 | 42 is right => 42
    6 or \boxed{7} => 7 | # 5 => 5 | it's 5 => 5 | 120 girls are not in it => 120 | 5 cm => 5 cm
"""
NOT_LENIENT = r"""
    6 apples, 7 pears | 10-5 => -5 | \boxed{7} then 6 | <think>it is 6. </think> none | <think>6
    no number | 6 #### \boxed{} | 6 #### | so \boxed{6 | 6 <answer></answer> | −5 => 5 | - 5 => 5
    10 - 5 => -5 | 10 − 5 => 5 | 5–10 => 10 | it is .5 => 5 | so 1/2. => 2 | so:⏎- 5 => -5
    10 -5 => -5 | so 3 1/2 => 0.5 | \frac{3}{4} => 4 | so 0.5% => 0.5 | 5 million => 5
    7 tenths => 7 | 5\text{ million} => 5 | 10 / 4 => 4
"""
NUMBERS = r"""
    5 | 5. | (5) | x=5 | x = 5 | 2 + 3 = 5 | 2+3=5 | Answer:5 | **5** | **5** apples
    is **5**. | \(5\) | \[5\] | so $x = 5$. | 5cm | => 5 | -> 5 | → 5 | ≈ 5
    5 (five) | 5 - that is it | Step 3: 5 | 5 \text{ apples}
    the 5 red ones | 10/2 | 10 / 2 | it is 5! | $5/hour | **Answer:** 5 | so 5 I think
    for a total of 5 clips | 5 a day | it is 5 m long | - Total: 5 | 5 and that is it
"""
PARTS_OF_EXPRESSIONS = r"""
    5\pi | 5 \pi | 5π | 2^5 | 2^{5} | 1e5 | 2*(5) | minus 5 | negative 5 | x_{5} | 5x
    5 x | 5k | 5M | 5 + x | x + 5 | x+5 | 3 * 5 | \sqrt{5} | \sqrt 5 | √5 | f(5)
    log 5 | 5² | x < 5 | x ≤ 5 | x != 5 | x >= 5 | ≠ 5 | divided by 5 | the root of 5 | half of 5
    to the power of 5 | 3 \cdot 5 | a/5 | 5/a | 5 / a | 5 - x | x - 5 | 3:5 | 5th
    twice 5 | plus 5 | mod 5 | not 5 | it isn't 5 | 5 is wrong | 5, which is incorrect
    5 is not the answer | 5 thirds | 3 x 5 | 7 or 5 | 5 xy | > 5 | 5? No
    the result - 5 | 2* 5 | 1 /5 | 5 squared
"""
SOLUTIONS = r"""
    3*5-2 | 5*3-2 | -2+3*5 | 3×5−2 | 3\times5-2 | 3\cdot 5 - 2 | 3*5-2=13 | 13 = 3*5-2
    3*5-2 = 13. | ((3*5))-2 | $3*5-2$ | +3*5-2 | 5*3+-2
"""
NO_SOLUTIONS = r"""
    13 | 3*5 | 3*5-2+0 | 3*5-2-2+2 | 5+5+3 | 35-2*11 | 3*5-1-1 | 3*5+2 | 3**5-2 | 3^5-2
    3//5*2 | 3*5-2=14 | 13=13=3*5-2 | 13=3*5-2=13 | 14=3*5-2 | 3*5-2.. | 13=13 | 3*5-2 or 3+5+2
    3*5-2;3 | 3*5-2,13 | int('3')*5-2 | 3 5 2 | ３*5-2 | 3*5-(2 | 3*5-2) | 3.0*5-2 | 3*5-2%1
    abs(3)*5-2 | 9**9**9**9 | (3)(5)-2 | <think>3*5-2 | the solution is 3*5-2 | 3*5-2⏎13
"""
CHOSEN = r"""
    B | b | (B) | B. | B) | **B** | \boxed{B} | \boxed{\text{B}} | \boxed{\textbf{(B)}}
    <answer>B</answer> | <answer>(B) Paris</answer> | B. Paris | B: the capital
    The answer is B. | The correct option is (B). | the final answer is B | <think>A</think>B
    #### B | B. A dog | B. I think so | B - Paris | --- B ---
    B – Paris | (B) - a dog | B. f(a) is 2 | option B | (B) is correct | (B) because it fits
    B. Not given | B. Not enough information | B. False | B. None of the above | (B) No
    B. Cannot be determined | (B) is the one | \boxed{\textrm{B}} | the best choice is B
"""
NOT_CHOSEN = r"""
    A | A or B | B or A | A, B | B and C | (A)(B) | B. or A. | B) C) D) | B) 1⏎(c) 2
    AB | BB | Berlin | a big dog | not B | I think B is wrong | <think>B</think>A | <answer>B | Б
    1 | the answer | \boxed{A} B | B? A? | B. Or rather C | B. C is the answer
    B. A is the answer | B. On reflection C is right | B) 1 c) 2 | B - no, C is right | A - B | B-52
    (B) is not correct | B: incorrect | B. Wrong, because | (B) isn't right | (B) isn’t it
    B. This is not the answer | (B) cannot be right | (B) can't be it | (B)? No | ≠ B | ¬B
    ❌ B | B ❌ | ~~B~~ | (B) is false | B, no | (B), which is wrong | B. Never the right choice
    (B) is ruled out | not (B) | Option (B) was eliminated | B- Paris | B) wrong since it leaks
    B++ | \boxed{B#}
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
    18.00 => 18 | \$1,080 => 1080 | 1{,}080 => 1080 | 1\,080 => 1080 | 70,000 => 70000 | $18$ => 18
    18 dollars => 18 | 540\,\text{m} => 540 | \text{18 dollars} => 18 | \mathbf{18} => 18 | −3 => -3
    .5 => 1/2 | \frac12 => 0.5 | 2½ => 2.5 | 2 1/2 => 5/2 | 2\frac{1}{2} => 2.5 | 25\% => 25
    25% => 0.25 | 25 percent => 25 | 25%. => 25 | 25 => 25\% | 1.2 \times 10^3 => 1200 | 9+9 => 18
    18\text{ eggs/day} => 18 | 3cm => 3 | \text{Total} = 21 => 21 | n = 21 => 21
    the answer is 21 => 21 | （２５） => 25 | \frac{3}{\sqrt{2}} => \frac{3\sqrt2}{2}
    Friday => friday | \sqrt[3]{125} => 5 | 2π => 2 \pi | (x+1)^2 => x^2+2x+1
    \frac{x+1}{2} => \frac{x}{2}+\frac12 | xy => yx | x² => x \cdot x | 90^\circ => 90
    9\pi\text{ cm}^2 => 9\pi | (1.0, \frac{4}{2}) => (1,2) | (x,y)=(1,2) => (1,2)
    (3,\infty) \cup (-\infty,3] => (-\infty,3]\cup(3,\infty) | x \in [1,2] => [1,2]
    \{1, 2\} => \{2,1\} | 1, 2, and 3 => 3,2,1 | x=1 or x=2 => 2, 1
    1 \pm \frac1{\sqrt2} => 1-\sqrt{.5}, 1+\sqrt{.5} | 2x+1 => y=1+2x | f(x) = x^2 => x^2
    x_1 => x_{1} | 4i+3 => 3+4i | e^{i\pi} => -1 | \lambda+1 => 1+\lambda
    \begin{pmatrix}1 & 2\\3 & 4\\ \end{pmatrix} => \begin{bmatrix}1&2\\3&4.0\end{bmatrix}
    \textbf{(A)} => A | \text{no solution} => No solution | x \ge 3 => x>=3 | 2516_8 => 2516_{8}
"""
DIFFERENT = r"""
    3 dozen => 3 | 5 hundred => 5 | 5 thousand => 5 | \sqrt[3]{8} => 2.1
    180 => 18 | -18 => 18 | 18 or 19 => 18 | 18, 19 => 18 | \pm 18 => 18 | 18 million => 18
    18k => 18 | 0.7% => 0.7 | 0.25 => 25 | 0.25% => 25 | 60\% => 6 | 1,08 => 108 | 0,05 => 0,5
    0.33 => 1/3 | 2\frac12 => 1 | 18^2 => 18 | 18x => 18 | x+18 => 18 | x => 18 | 18 is wrong => 18
    1 8 => 18 | 2 hours 30 minutes => 2 | 5 ft => 5 inches | 5\text{ cm}^2 => 5\text{ cm}
    18\sqrt => 18 | \sqrt5 = 18 => 18 | 5 ms => 5 m | 18 halves => 18 | 7 tenths => 7
    5 squared => 5 | twice 18 => 18 | 18 = 19 => 19
    18/ => 18 | (1,2) => (2,1) | (1,2) => [1,2] | [1,2) => (1,2] | (1,2) => \{1,2\} | 1,1 => 1
    (1,234) => 1234 | x>3 => x<3 | x\ge3 => x>3 | \pm 2 => 2 | 3+4i => 3-4i | y=2x+1 => 2x
    x=5, y=6 => 5 | \begin{pmatrix}1&2\end{pmatrix} => \begin{pmatrix}1\\2\end{pmatrix}
    f(2) => f(3) | n! => n | \sin x \cos y => \cos x \sin y | 11_2 => 11 | \sqrt{x^2} => x
    |x| => x | \gamma => \Gamma | \infty => -\infty | \infty - \infty => 0 | 3.14159265 => \pi
    e^{-1000} => 0 | 9^{9^9} => 9 | 7)(5 => 35 | 5)+(1 => 6 | *5 => 5 | 2**3 => 23 | 1_000 => 1000
    5j => 5 | 0x5 => 5 | 5, x => 5 | 5 if 1 else 6 => 5 | lambda: 5 => 5 | AB => BA | no => on
    C++ => C | A or B => A | (A)(B) => A | 12\frac => 12 | 7][5 => 5 | xy = 0 => x = 0
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
    ("math_lenient", "1 and 2.\n{}", "5", 1, NUMBERS),
    ("math_lenient", "{}", "5", 1, NUMBERS),
    ("math_lenient math", "{}", "5", 0, PARTS_OF_EXPRESSIONS),
    ("math_lenient", "so {}.", "5", 0, PARTS_OF_EXPRESSIONS),
    ("math", "{}", "5", 0, NUMBERS),  # nothing is marked
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


def test_answers_of_any_length_have_no_effect_but_their_own():
    """No tail window: an answer may stand far from the end. One of 10,001 characters is none."""
    far = ["x" * 500_000 + "\\boxed{6}" + "x" * 500_000, "<answer>6</answer>" + "x" * 500_000]
    assert [VERIFY["math"](text, "6") for text in far] == [1, 1]
    assert VERIFY["math_lenient"]("so 42" + " and on" * 1000, "42") == 1
    assert VERIFY["math_lenient"]("7" * 2000, "7") == VERIFY["choice"]("B" * 1000, "B") == 0
    for text in ("(" * 5000 + "3*5-2" + ")" * 5000, "3*5-2" + "+0" * 5000, "1" * 1_000_000):
        assert VERIFY["countdown"](text, COUNTDOWN) == 0
    assert rewards.final_answer(boxed("5" * 10_000), marked=True) == "5" * 10_000
    assert rewards.final_answer(boxed("5" * 10_001), marked=True) == ""
    assert VERIFY["exact"]("7", 7) == VERIFY["exact"]("0.5", 0.5) == 1


def test_countdown_is_exact():
    """In fractions, of numbers that are not joined."""
    texts = {"1/3*3": 1, "8/(3-8/3)": 24, "8÷(3−8÷3)": 24, "2-5=-3": -3}
    wrong = {"1/2": 0, "1/(2-2)": 0, "3 1/2*2": 7, "2 2+1": 23}
    for text, target in [*texts.items(), *wrong.items()]:
        numbers = [int(digit) for digit in text.partition("=")[0] if digit.isdigit()]
        answer = {"numbers": numbers, "target": target}
        assert VERIFY["countdown"](text, answer) == (text in texts), text


# ---- totality and time


MANY = (
    "\0|1|\\boxed{|<answer>|<think>|</answer>|<answer></answer>|<think></think>|#|####\n|7+5=2;"
    "|<calc>1*2</calc>|`|~|```\n|```a|```python\nx = 1\n```\n| |\n|a |the cat, |\\|\ud800|é∑漢"
    "|😀|e\u0301|٣|[|*|5 |5 - |2^|5? |?|not |is |B) |$5|x="
)


def hostile():
    """Long, deep and strange texts. (`same_answer` has its own in test_answers.)"""
    texts = MANY.split("|")
    many = [*texts, "\\boxed{" + "{" * 2000, "\\boxed{" + "{}" * 200]
    found = [piece * (200_000 // len(piece)) for piece in many]
    found += ["", boxed("1" * 999_000), "\\boxed{" * 20_000 + "}" * 20_000]
    found += [boxed("9**9**9**9"), boxed("(" * 490 + "1" + ")" * 490)]
    found += [f"<answer>{piece}x</answer>" for piece in ("the answer is " * 600, " " * 9000)]
    rng = random.Random(0)
    for _ in range(20):
        letters = bytes(rng.randrange(256) for _ in range(5000)).decode("latin-1")
        found.append(letters * rng.randint(1, 20))
    pieces = [*texts, *"{}^(),.x=<+-*/!%;_B", "\\frac", "and", "minus", "\\sqrt[0]{", "1/0", "i"]
    found += ["".join(rng.choices(pieces, k=rng.randint(1, 200))) for _ in range(300)]
    short = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(1000)]
    return found + short + list(map(boxed, short))


HOSTILE = hostile()


def is_a_verdict(value):
    """Whether it is a number from 0 to 1, or a list of (position, such a number)."""
    if type(value) is list:
        return all(type(end) is int and is_a_verdict(part) for end, part in value)
    return type(value) in (bool, float) and 0 <= value <= 1


@pytest.mark.parametrize("name", [*RUNS_NOTHING, "code"])
def test_verifier_is_total_and_takes_no_time_on_hostile_text(name):
    """Usual are 0.2 s of processor time. Hardly any text has a program, and `code` tries fewer."""
    for text in HOSTILE[:80] if name == "code" else HOSTILE:
        start = time.process_time()
        verdict = VERIFY[name](text, GOLD.get(name, "6"))
        assert time.process_time() - start < 3, text[:100]
        assert is_a_verdict(verdict), text[:100]


@pytest.mark.parametrize("name", RUNS_NOTHING)
def test_a_gold_answer_is_usable_or_a_user_error(name):
    golds = [None, True, 0, -1, 3.5, float("inf"), float("nan"), 10**4000, "", "x" * 100_000]
    golds += ["\\frac{1}{", "\0", [], [1], {}, {"numbers": 3}, object(), b"", ()]
    for gold, text in itertools.product(golds, ["", "6", "\\boxed{6}", "#6", "<answer>x</answer>"]):
        with contextlib.suppress(UserError):
            assert is_a_verdict(VERIFY[name](text, gold)), (text, gold)


PATTERNS = ["rewards.py", "support/tasks.py"]
PATTERNS += [f"support/extras/{name}.py" for name in ("answers", "programs")]


@pytest.mark.parametrize("path", PATTERNS)
def test_no_expression_backtracks_without_end(path, tmp_path):
    """Each on repetitions of its own pieces. Exponential growth would not end within the limit."""
    out = tmp_path / "out"
    process = fork(program, COMMAND, "tests/patterns.py", path, out=out, folder=ROOT)
    process.join(120)
    process.kill()  # if it has no end
    process.join()
    assert process.exitcode == 0, out.read_text().splitlines()[-1:]


@pytest.mark.parametrize("path", ["rewards.py", "support/extras/answers.py"])
def test_verifiers_are_fast_on_pieces_of_their_own_expressions(path):
    """On 10,000 characters, and on 900. 0.02 s of processor time are usual."""
    for pattern, length in itertools.product(patterns.expressions(path).values(), (900, 9_900)):
        texts = patterns.texts(pattern, samples=1, length=length)
        texts += list(map(boxed, texts))
        for text, name in itertools.product(texts, ("math", "math_lenient", "choice")):
            start = time.process_time()
            VERIFY[name](text, "B")
            assert time.process_time() - start < 0.5, (name, pattern.pattern[:50], text[:50])


# ---- rewards

ROW = {"prompt": "1+5?", "answer": "6"}


def scored(spec, *completions, **row):
    """The scores of completions by a reward, and its verdicts: (scores, rewarded, correct)."""
    reward = rewards.parse_reward(spec)
    scores = reward.verify(list(completions), [ROW | row] * len(completions))
    reward.note_shaping(scores)
    return scores, *reward.without_shaping(scores)


def test_reward_is_a_weighted_sum_of_which_shaping_is_not_right():
    """0.5 * 1 + 0.1 * 1 = 0.6. `format` moves the policy, and makes no completion right."""
    right, wrong = "<think>a</think><answer>6</answer>", "<think>a</think><answer>7</answer>"
    (good, bad), rewarded, correct = scored(" 0.5*math+0.1 * format", right, wrong)
    assert good.terms == bad.terms | {"math": 1.0} == {"math": 1.0, "format": 1.0}
    assert (good.reward, bad.reward) == (pytest.approx(0.6), pytest.approx(0.1))
    assert (rewarded, correct) == ([0.5, 0.0], [1.0, 0.0])
    assert scored("format", right, wrong)[1:] == ([1.0, 1.0], None)  # there is nothing but it
    assert rewards.parse_reward("math").verify([], []) == []


@pytest.fixture
def own(tmp_path):
    """own(source) -> the path of a user's file with it."""

    def write(source):
        (tmp_path / "own.py").write_text(textwrap.dedent(source))
        return f"{tmp_path}/own.py"

    return write


@pytest.fixture
def mine(own):
    return own("""
        SCALE = 2
        def whole(completion, answer, **row):
            return len(row) + (row["prompt"] == "1+5?") * 10
        def double(completion, answer): return SCALE * (completion == answer)
        def two_to_four(completion, answer): return 2 + len(completion) % 3
        def below(completion, answer): return -5 - len(completion) % 3
        def short(completion, answer): return -len(completion) / 50
        def share(completion, answer): return min(len(completion) / 10, 1)
        share.shaping = False
        def long(completion, answer, tokens, marker='**'): return tokens / 100
        def steps(completion, answer):
            return [(1, 0.5), (2, len(completion)), (3, completion == answer)]
        def style(completion, answer): return completion.islower()
        style.shaping = True
        def changes(completion, answer, level):
            from neighbour_of_mine import HALF
            level.append(1)
            return answer.pop("target") * HALF
    """)


def test_reward_calls_users_functions_with_copies_of_the_fields_that_they_name(mine, tmp_path):
    """train.py adds the number of tokens. The file
    imports its neighbour while it runs. Nothing that it changes changes the row."""
    (tmp_path / "neighbour_of_mine.py").write_text("HALF = 0.5\n")
    assert scored(f"{mine}:whole", "6", level=3)[0][0].reward == 12
    (score,), _, _ = scored(f"math + 0.5*{mine}:double", "\\boxed{6}")
    assert (score.reward, score.terms) == (1.0, {"math": 1.0, "double": 0.0})
    assert scored(f"{mine}:long", "6", tokens=50)[0][0].reward == 0.5
    rewards.parse_reward(f"{mine}:long").check([ROW])  # before there are tokens
    row = {"prompt": "?", "answer": {"target": 1}, "level": [0]}
    reward = rewards.parse_reward(f"{mine}:changes")
    reward.check([row])
    assert [score.reward for score in reward.verify(["a", "b"], [row, row])] == [0.5, 0.5]
    assert row == {"prompt": "?", "answer": {"target": 1}, "level": [0]}


def test_a_term_that_once_was_above_1_no_longer_counts(mine):
    """In a run the earlier values of a term decide for later steps, on every process alike."""
    reward = rewards.parse_reward(f"exact + {mine}:double")
    first, second = reward.verify(["7", "6"], [ROW, ROW])
    reward.note_shaping([first])
    assert reward.without_shaping([first]) == ([0.0], [0.0]) and reward.shaping == set()
    reward.note_shaping([first, second])
    assert reward.without_shaping([first, second]) == ([0.0, 1.0], [0.0, 1.0])
    reward.note_shaping([first])
    assert reward.without_shaping([first]) == ([0.0], [0.0]) and reward.shaping == {"double"}


SUMS = [  # sum, completions, reward, rewarded, correct
    ("exact + 0.2*{}:short", ["6", " 6 ", "7"], [0.996, 0.988, -0.004], [1, 1, 0], [1, 1, 0]),
    ("3*exact + {}:share", ["6", "seven"], [3.1, 0.5], [3.1, 0.5], [3.1 / 4, 0.5 / 4]),
    # values outside 0 to 1, whose sum does not tell which completions are right
    ("{}:two_to_four", ["a", "bb", "ccc"], [3, 4, 2], [3, 4, 2], None),
    ("{}:below", ["a", "bb", "ccc"], [-6, -7, -5], [-6, -7, -5], None),
    # marked functions and negative weights are shaping, though they are worth between 0 and 1
    ("exact + 0.5*{}:style", ["6", "seven"], [1, 0.5], [1, 0], [1, 0]),
    ("-0.1*{}:share + exact", ["6", "seven"], [0.99, -0.05], [1, 0], [1, 0]),
    ("-1*{}:share", ["6", "seven"], [-0.1, -0.5], [-0.1, -0.5], None),
]


@pytest.mark.parametrize("spec, completions, reward, rewarded, correct", SUMS)
def test_only_what_is_no_shaping_says_what_is_right(
    spec, completions, reward, rewarded, correct, mine
):
    """A value outside 0 to 1 is rewarded, and does not count in `solved`. Shares count in part."""
    scores, *verdicts = scored(spec.format(mine), *completions)
    assert [score.reward for score in scores] == pytest.approx(reward)
    assert verdicts == [pytest.approx(rewarded), correct and pytest.approx(correct)]


def test_steps_are_weighted_and_rewarded_and_the_last_entry_is_the_outcome(mine):
    scores, rewarded, correct = scored(f"2*{mine}:steps + 0.5*exact", "6", "77")
    assert scores[0].terms == {"steps": 1.0, "exact": 1.0}
    assert (scores[0].reward, scores[0].steps) == (2.5, [(1, 1.0), (2, 2.0)])
    assert (scores[1].reward, scores[1].steps) == (0.0, [(1, 1.0), (2, 4.0)])
    assert rewarded == [2.5 + 1 + 2, 0.0 + 1 + 4]  # no dead group: other steps, other gradients
    assert correct == [1.0, 0.0]


FAULTS = r"""
    raise KeyError('x\n\x1b[31m') | return None | return 'a' | return float('nan')
    return float('inf') | return [(1, float('nan'))] | return [] | return [1] | return 1/0
    raise SystemExit(3) | return 10 ** 400 | return [(1, 1e300), (2, 1.0)]
"""


@pytest.mark.parametrize("body", cells(FAULTS))
def test_reward_survives_a_users_faults(body, own):
    path = own(f"def broken(completion, answer):\n    {body}\n")
    reward = rewards.parse_reward(f"math + {path}:broken")
    scores = reward.verify(["\\boxed{6}", "\x1b[31m" + "long " * 1000], [ROW, ROW])
    assert [score.reward for score in scores] == [1.0, 0.0]
    assert scores[0].terms == {"math": 1.0, "broken": 0.0}
    for score, shown in zip(scores, ("boxed{6}", "long"), strict=True):
        assert "broken" in score.fault and shown in score.fault
        assert score.fault.isprintable() and len(score.fault) < 500


WRONG_REWARDS = {  # a sum, or the source of a user's file, and words of the sentence
    "mth": "rewards.py has no verifier 'mth'; did you mean math?",
    "": "rewards.py has no verifier ''",
    "x*math": "could not convert string to float: 'x'",
    "0*math": "a weight is not 0 and at most 1e6",
    "nan*math": "a weight is not 0",
    "math+math": "a name stands there twice",
    "nowhere.py:fn": "FileNotFoundError: ",
    "def f(:": "(own.py, line 1)",
    "raise RuntimeError('one\\ntwo')": "one",
    "f = 3": "f is no function",
}


@pytest.mark.parametrize("broken, words", WRONG_REWARDS.items())
def test_parse_reward_says_what_is_wrong(broken, words, own):
    """And the expected form."""
    spec = f"{own(broken)}:f" if " " in broken else broken
    with pytest.raises(UserError) as error:
        rewards.parse_reward(spec)
    message = str(error.value)
    assert message.startswith(f"--reward {spec}: expected a sum of [weight*]file.py:function")
    assert words in message and "countdown" in message and "\n" not in message


def test_a_verifier_is_added_by_a_decorator(monkeypatch):
    """`need` refuses a gold answer. A bug of the verifier is a fault, which the run tells."""
    monkeypatch.setattr(rewards, "VERIFIERS", dict(rewards.VERIFIERS))

    @rewards.verifier
    def shorter(completion, answer, prompt=""):
        need(answer > 0, "a length is positive")
        return len(completion) < answer * len(prompt)

    assert shorter("abc", 1, "abcd") is True
    reward = rewards.parse_reward("shorter + 0.5*exact")
    score, zero = reward.verify(["abc", "abc"], [{"prompt": "abcd", "answer": n} for n in (1, 0)])
    assert score.terms == {"shorter": 1.0, "exact": 0.0} and score.fault == ""
    assert zero.reward == 0 and zero.fault.startswith("shorter: a length is positive")
    reward.check_answer(1)
    with pytest.raises(UserError, match="shorter.*a length is positive"):
        reward.check_answer(-1)


def test_a_users_function_may_have_the_name_of_a_verifier(own):
    """It takes any answer, and has no lenient twin."""
    reward = rewards.parse_reward(
        own("def math(completion, answer): return answer == {}") + ":math"
    )
    assert reward.check_answer({}) is None and reward.lenient_twin() is None
    assert reward.verify(["x"], [{"prompt": "", "answer": {}}])[0].reward == 1.0


CHECKED = {  # a user's function, and words of the sentence that refuses it
    "def f(completion): return 1": ["f(completion)", "def f(completion, answer)", "TypeError"],
    "def f(completion, answer, level): return 1": ["'level'", "prompt, answer"],
    "def f(completion, answer): return '1.0'": ["'1.0'", "a text is no number"],
    "def f(completion, answer): return [1.0, 0.5]": ["[1.0, 0.5]", "number"],
    "def f(completion, answer): return anwser": ["anwser"],
    "def f(completion, answer): return None": ["returned None", "expected a number"],
    "def f(answer, completion): return 1.0": ["the completion comes first"],
    "async def f(completion, answer): return 1.0": ["returned <coroutine object f"],
}


@pytest.mark.parametrize("source", CHECKED)
def test_check_refuses_functions_that_cannot_work(source, own):
    """In one sentence, before any model is loaded."""
    reward = rewards.parse_reward(f"math + {own(source)}:f")
    with pytest.raises(UserError) as error:
        reward.check([ROW])
    message = str(error.value)
    assert message.startswith("--reward f") and "\n" not in message and len(message) < 400
    assert all(word in message for word in CHECKED[source])


WORKING = [
    "def f(text, gold, prompt): return len(prompt) > 3",
    "def f(completion, answer, **row): return row['prompt'] == '1+5?'",
    "def f(*arguments): return len(arguments) / 2",
    "def f(completion, answer): return int(completion)",  # raises on some alone
    "class F:\n    def __call__(self, completion, answer): return 1\nf = F()",
]


@pytest.mark.parametrize("source", WORKING)
def test_check_accepts_functions_that_can_work(source, own):
    reward = rewards.parse_reward(f"{own(source)}:f")
    assert reward.check([ROW]) is None
    [score] = reward.verify(["6"], [ROW])
    assert score.reward != 0 and score.fault == ""


def test_a_reward_has_a_lenient_twin_where_it_has_math():
    """The same sum, weights and shaping."""
    texts = ["so \\boxed{6}", "so 6", "so 7"]
    reward = rewards.parse_reward("2*math + 0.1*format + exact")
    reward.shaping.add("exact")  # as if it had returned 2
    assert reward.without_shaping(reward.verify(texts, [ROW] * 3))[1] == [1, 0, 0]
    twin = reward.lenient_twin()
    assert twin.without_shaping(twin.verify(texts, [ROW] * 3)) == ([2, 2, 0], [1, 1, 0])
    assert rewards.parse_reward("exact + format").lenient_twin() is None


def test_rewards_can_be_copied_with_one_small_file(tmp_path):
    """It has `math` then, and imports no torch. A deleted extra is an ImportError of Python's."""
    (tmp_path / "support").mkdir()
    for name in ("rewards.py", "support/user.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    program = """if True:
        import sys, rewards
        reward = rewards.parse_reward("math + countdown + choice")
        assert reward.verify(["\\\\boxed{1/2}"], [{"prompt": "", "answer": "0.5"}])[0].reward == 1
        assert not {"torch", "mpmath"} & sys.modules.keys()
        rewards.parse_reward("math_symbolic")
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)
    error = done.stderr.decode().splitlines()[-1]
    assert error == "ModuleNotFoundError: No module named 'support.extras'", done.stderr.decode()


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
    assert reward.check([{"prompt": "?", "answer": "6"}]) is None  # it is for users' functions
    for answer in UNUSABLE.get(name, []):
        with pytest.raises(UserError, match=name) as error:
            reward.check_answer(answer)
        assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_functions_of_one_file_share_its_globals(own):
    """The file runs once. Changed, it runs again."""
    source = "SEEN = []\ndef f(completion, answer):\n    SEEN.append(1)\n    return 1.0\n"
    path = own(source + "def g(completion, answer):\n    return 0.25 * len(SEEN)\n")
    [both] = rewards.parse_reward(f"{path}:f + {path}:g").verify(["6"], [ROW])
    assert both.terms == {"f": 1.0, "g": 0.25}
    own(source + "def g(completion, answer):\n    return 0.5\n")
    [changed] = rewards.parse_reward(f"{path}:g").verify(["6"], [ROW])
    assert changed.terms == {"g": 0.5}


def test_a_result_that_is_no_number_is_blamed_on_no_line(own):
    """The line would be one of our own. An error inside the function has its line."""
    path = own(
        "def f(completion, answer):\n    return None\ndef g(completion, answer):\n    1 / 0\n"
    )
    row = rewards.parse_reward(f"{path}:f").verify(["6"], [ROW])[0]
    assert "it returned None" in row.fault and ", line" not in row.fault
    row = rewards.parse_reward(f"{path}:g").verify(["6"], [ROW])[0]
    assert "ZeroDivisionError" in row.fault and "line 4" in row.fault


# ---- command line


def test_command_prints_the_mean_and_the_disagreements_or_the_unusable_gold_answer(tmp_path):
    """As a program: extras register with the module, not with __main__."""
    path = tmp_path / "answers.jsonl"

    def command():
        out, err = tmp_path / "out", tmp_path / "err"
        given = ["rewards.py", str(path), "--reward", "math_symbolic"]
        process = fork(program, COMMAND, *given, out=out, err=err, folder=ROOT)
        process.join()
        return process.exitcode, out.read_text(), err.read_text()

    path.write_text('{"completion": "a", "answer": ""}')
    status, said, error = command()
    assert (status, said, error.count("\n")) == (2, "", 1)
    assert re.search("line 1.*cannot be used by math_symbolic", error)
    rows = [{"completion": f"#### {n}", "answer": "3" if n == 2 else str(n)} for n in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    status, said, _ = command()
    assert status == 0 and "reward 0.7500 of 4" in said
    assert "row 3: '3' from '#### 2'" in said and "row 2" not in said
