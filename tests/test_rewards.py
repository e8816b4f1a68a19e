"""Verifiers and rewards: answers to reward, answers not to reward, texts that must not hang."""

import itertools
import json
import os
import random
import re
import runpy
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
from support import mathematics
from support.errors import UserError

pytest.importorskip("support.extras.programs")  # it registers a verifier

ROOT = Path(rewards.__file__).parent
VERIFY = rewards.VERIFIERS
RIGHT = "def add(a, b):\n    return a + b"
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
    <answer>6</answer> | 2+3=5</think> <answer>6</answer> | <think>\boxed{5}</think> \boxed{6}
    <answer>5</answer> no, <answer>6</answer> | <answer>the answer is \boxed{6}</answer>
    <answer>6</answer> \boxed{5} | \boxed{5} or rather \boxed{6} | \\boxed{6} | so $\boxed 6.$
    \boxed{\frac{1}{2}} => \frac{1}{2} | \boxed{5 \boxed{6} | \boxed{6} and \boxed{5
    { } } { \boxed{6} { | \boxed{\{1,2\}} => \{1,2\} | \boxed{[0,1\}} => [0,1\}
    #### 1 234 dollars => 1 234 dollars | a⏎#### 5⏎b⏎#### 6⏎c | #### 5⏎\boxed{6}
"""
NOT_EXTRACTED = r"""
    the answer is 6 | <think>\boxed{6} | \boxed{6}</think> | <think>a</think><think>\boxed{6}
    <think>#### 6</think>done | <answer>5</answer> <answer>6 | </answer>6<answer> | ####⏎6
    \boxed{6 | \boxed 56 | \boxed{} | <answer> </answer>\boxed{6} | \fbox{6}
    \boxed{either \boxed{5} or \boxed{6}} | <answer>\boxed{5 or \boxed{6}}</answer>
"""
LENIENT = r"""
    6 apples, 7 pears => 7 | it costs $1,234.50. => 1234.5 | −5 => -5 | the answer is -$5 => -5
    it is .5 => 0.5 | so 1/2 => 0.5 | so $-\dfrac{3}{4}$ => -3/4 | so 50\% => 1/2 | 5 cm => 5 cm
    6 or \boxed{7} => 7 | **6** | 10-6
"""
NOT_LENIENT = r"""
    6 apples, 7 pears | 10-6 => -6 | \boxed{7} then 6 | <think>it is 6. </think> none | no number
    so \boxed{6 | 6 #### | 6 <answer></answer> | −5 => 5 | so 0.5% => 0.5 | it is .5 => 5
    \frac{3}{4} => 4
"""
SOLUTIONS = r"""
    3*5-2 | -2+3*5 | 3×5−2 | 3\cdot 5 - 2 | 3*5-2=13 | 3*5-2 = 13. | ((3*5))-2 | $3*5-2$ | +3*5-2
"""
NO_SOLUTIONS = r"""
    13 | 3*5 | 3*5-2+0 | 3*5-2-2+2 | 35-2*11 | 3*5+2 | 3^5-2 | 3//5*2 | 3*5-2=14 | 13=3*5-2=13
    3*5-2;3 | int('3')*5-2 | 3 5 2 | ３*5-2 | 3*5-(2 | 3*5-2%1 | 9**9**9**9 | (3)(5)-2
    <think>3*5-2 | the solution is 3*5-2 | 3*5-2⏎13
"""
CHOSEN = r"""
    b | (B) | B. | **B** | \boxed{\textbf{(B)}} | <answer>(B) Paris</answer> | B: the capital
    The answer is B. | the final answer is B | <think>A</think>B | #### B | B. A dog | B - Paris
    --- B --- | option B | (B) because it fits | B. None of the above | the best choice is B
"""
NOT_CHOSEN = r"""
    A | A or B | A, B | (A)(B) | B) C) D) | B) 1⏎(c) 2 | AB | Berlin | a big dog | not B | Б
    I think B is wrong | <answer>B | the answer | \boxed{A} B | B? A? | A - B | B-52 | B++
    B. C is the answer | (B) is not correct | B: incorrect | (B) isn't right | (B) isn’t it
    (B) cannot be right | (B)? No | ≠ B | B ❌ | ~~B~~ | (B), which is wrong | \boxed{B#}
    B. Never the right choice | (B) is ruled out | B. False
"""
EXACT = r"""
    Paris => paris | <answer>new   york</answer> => New York | Straße => STRASSE
    \boxed{a b} => a b | <think>x</think>Paris => Paris | ⏎ Paris ⏎ => Paris
"""
NOT_EXACT = "Paris. => Paris | in Paris => Paris | Pari => Paris | <think>6 | 0.5 => 1/2"
FORMED = """
    <think>a</think><answer>b</answer> | a</think><answer>b</answer>
    <think>⏎a⏎</think>⏎⏎<answer>⏎b</answer>⏎ | <think>a < b > c</think> <answer><b></answer>
"""
NOT_FORMED = """
    a | <answer>b</answer> | <think>a</think>b | <think>a<answer>b</answer>
    <think>a</think><answer>b | <think></think><answer>b</answer>
    <think>a</think><answer> </answer> | x<think>a</think><answer>b</answer>
    <think>a</think>x<answer>b</answer> | <think>a</think><answer>b</answer>x
    <think>a</think><answer>b</answer><answer>c</answer> | <think><think>a</think><answer>b</answer>
    <answer>b</answer><think>a</think>
"""
EQUAL = r"""
    18.00 => 18 | \$1,080 => 1080 | 1{,}080 => 1080 | 1\,080 => 1080 | 016 => 16 | −3 => -3
    .5 => 1/2 | \frac12 => 0.5 | 2 1/2 => 5/2 | 2\frac{1}{2} => 2.5 | 1.2 \times 10^3 => 1200
    25\% => 25 | 25% => 0.25 | 25 => 25\% | 9+9 => 18 | 18\text{ eggs/day} => 18 | \approx 42 => 42
    \text{Total} = 21 => 21 | the answer is 21 => 21 | Friday => friday | \lambda + 1 => λ+1
    \frac{3}{\sqrt{2}} => \frac{3\sqrt2}{2} | \sqrt{0} => 0 | e^{i\pi} => -1 | 2π => 2 \pi
    (x+1)^2 => x^2+2x+1 | xy => yx | x² => x \cdot x | 90^\circ => 90 | x_1 => x_{1}
    (1.0, \frac{4}{2}) => (1,2) | (x,y)=(1,2) => (1,2) | x \in [1,2] => [1,2]
    (3,\infty) \cup (-\infty,3] => (-\infty,3]\cup(3,\infty) | x \ge 3 => x>=3
    \{1, 2\} => \{2,1\} | \{1, 2\} => 1,2 | 1, 2, and 3 => 3,2,1 | x=1 or x=2 => 2, 1
    1 \pm \frac1{\sqrt2} => 1-\sqrt{.5}, 1+\sqrt{.5} | 2x+1 => y=1+2x | f(x) = x^2 => x^2
    \begin{pmatrix}1 & 2\\3 & 4\\ \end{pmatrix} => \begin{bmatrix}1&2\\3&4.0\end{bmatrix}
    5\text{ cm}^2 => 5\text{ cm}^{2} | \frac{-63209876544}{7901234496} => -987654321/123456789
"""
DIFFERENT = r"""
    180 => 18 | -18 => 18 | 18 or 19 => 18 | 18x => 18 | 18 = 19 => 19 | 18 is wrong => 18
    3 dozen => 3 | 18 million => 18 | 5 squared => 5 | twice 18 => 18 | 5\text{ isn't it} => 5
    0.25 => 25 | 0.25% => 25 | 60\% => 6 | 1,08 => 108 | 0,05 => 0,5 | 0.33 => 1/3 | 1 8 => 18
    2\frac12 => 1 | 12\frac => 12 | 18\sqrt => 18 | \sqrt{2}3 => \sqrt{23} | \sqrt[3]{8} => 2.1
    2 hours 30 minutes => 2 | 5 ft => 5 inches | 5 m² => 5 cm² | 5 ms => 5 m | x\text{ cm} => x
    (1,2) => (2,1) | (1,2) => [1,2] | [1,2) => (1,2] | (1,2) => \{1,2\} | (1,234) => 1234
    1,1 => 1 | \pm 2 => 2 | (1,2),(2,1) => (1,2) | x=1 or y=2 => (1,2) | x=5, y=6 => 5
    y=2x+1 => 2x | x^2 = 4 => 4 | x>3 => x<3 | x\ge3 => x>3 | 0 < x < 2 => [0,2] | 3+4i => 3-4i
    \begin{pmatrix}1&2\end{pmatrix} => \begin{pmatrix}1\\2\end{pmatrix} | 7)(5 => 35 | 7][5 => 5
    \begin{vmatrix}1&2\\3&4\end{vmatrix} => \begin{pmatrix}1&2\\3&4\end{pmatrix} | f(2) => f(3)
    f(2) => 2f | n! => n | (2n)! => 2n! | |x| => x | -x => |x| | \sqrt{x^2} => x | \gamma => \Gamma
    \sin x \cos y => \cos x \sin y | \log^2 x => \log_2 x | \sin^{-1} x => \frac{1}{\sin x}
    \infty => -\infty | \infty - \infty => 0 | \frac{1}{\infty} => 0.1 | \frac{1}{0} => \frac{2}{0}
    3.14159265 => \pi | e^{-500} => 0 | 9^{9^9} => 9 | 10^{400} => \pi | 11_2 => 11
    \frac{1000000000000000000000000000001}{3000000000000000000000000000000} => 1/3 | 2**3 => 23
    1_000 => 1000 | 5j => 5 | 5 if 1 else 6 => 5 | C++ => C | A or B => A | (A)(B) => A | ¬B => B
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
    box, answer = "\\boxed{6}", "<answer>6</answer>"
    for text in ("x" * 500_000 + box + "x" * 500_000, answer + "x" * 500_000):
        assert VERIFY["math"](text, "6") == 1
    assert VERIFY["math_lenient"]("so 42" + " and on" * 1000, "42") == 1
    for text in ("(" * 5000 + "3*5-2" + ")" * 5000, "3*5-2" + "+0" * 5000):
        assert VERIFY["countdown"](text, COUNTDOWN) == 0
    assert rewards.final_answer(boxed("5" * 10_000), marked=True) == "5" * 10_000
    assert rewards.final_answer(boxed("5" * 10_001), marked=True) == ""


def test_countdown_computes_in_fractions_and_does_not_join_digits():
    right = {"1/3*3": 1, "8÷(3−8÷3)": 24, "2-5=-3": -3}
    wrong = {"1/2": 0, "1/(2-2)": 0, "3 1/2*2": 7, "2 2+1": 23}
    for text, target in (right | wrong).items():
        numbers = [int(digit) for digit in text.partition("=")[0] if digit.isdigit()]
        answer = {"numbers": numbers, "target": target}
        assert VERIFY["countdown"](text, answer) == (text in right), text


# ---- totality and time

# Repeated, each of these costs time somewhere: marks, brackets, what a regular expression repeats
MARKS = (
    "\0|1|\\boxed{|\\boxed 1|.1|<answer>|<think>|</answer>|<answer></answer>|#|####\n|7+5=2;|```a"
    "|```python\nx = 1\n```\n| |\n|the |the cat, |(x|, x|**= 0. |. |{}|\\|\ud800|é∑漢|e\u0301|٣|B) "
)
# roots, powers, long lists, products of long numbers, letters at every place
SLOW = (
    r"\sqrt{|9^|9^{99}*|9^{9999999}*|x_1+|(x+1)^{9}*|1,|x,|x*|\frac{1}{|(|{|[|2^{-|1 1/|(x,x)="
    r"|\text{ cm}|x/| and |1,000,| 5 cm|f(x)=|x=|±1|e^|i^|-|%|^{}|¦{|.5"
)
PIECES = [*MARKS.split("|"), *SLOW.split("|")]


def repeated(piece, length):
    return piece * (length // len(piece))


def hostile():
    """Long, deep and random texts of these pieces, and the longest that are read as an answer."""
    rng = random.Random(0)
    pieces = PIECES + ["".join(rng.choices(PIECES, k=2)) for _ in range(20)]
    texts = [boxed(piece * 25 + "!") for piece in PIECES]  # short: an exponential time may end
    texts += [repeated(piece, 20_000) for piece in PIECES]
    texts += [boxed(repeated(piece, 9_900)) for piece in pieces]
    texts += [boxed("1" * 400_000), boxed("(" * 490 + "1" + ")" * 490), boxed("9**9**9**9")]
    texts += ["", "\\boxed{" * 5000 + "}" * 5000, "\\boxed{" + "{" * 2000 + "{}" * 20_000]
    short = ["".join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(300)]
    return texts + short + list(map(boxed, short))


HOSTILE = hostile()


def is_a_verdict(value):
    """Whether it is a number from 0 to 1, or a list of (position, such a number)."""
    if type(value) is list:
        return all(type(end) is int and is_a_verdict(part) for end, part in value)
    return type(value) in (bool, float) and 0 <= value <= 1


@pytest.mark.parametrize("name", VERIFY)
def test_verifier_is_total_and_takes_no_time_on_hostile_text(name):
    """Hardly any text has a program: `code` tries fewer."""
    for text in HOSTILE[: 2 * len(PIECES)] if name == "code" else HOSTILE:
        start = time.process_time()
        verdict = VERIFY[name](text, GOLD.get(name, "6"))
        assert time.process_time() - start < 0.2, text[:100]
        assert is_a_verdict(verdict), text[:100]


def test_no_comparison_takes_long():
    """Of texts up to the length that is read as mathematics, with several ends, both ways."""
    ends = ("", "5", "x}", ")" * 20 + "5")
    for piece, size, end in itertools.product(SLOW.split("|"), (40, 280), ends):
        text = repeated(piece, size) + end
        for given, gold in ((text, "5"), ("5", text), (text, text[1:] + text[0])):
            start = time.process_time()
            mathematics.same_answer(given, gold)
            assert time.process_time() - start < 0.2, (given, gold)


# ---- rewards

ROW = {"prompt": "1+5?", "answer": "6"}


@pytest.fixture
def own(tmp_path):
    """own(source) -> the path of a user's file with it."""

    def write(source):
        (tmp_path / "own.py").write_text(textwrap.dedent(source))
        return f"{tmp_path}/own.py"

    return write


def scored(spec, *completions):
    """The verdicts on completions by a reward: (verdicts, rewarded, correct)."""
    reward = rewards.parse_reward(spec)
    reward.check([ROW])
    verdicts = reward.verify(list(completions), [ROW] * len(completions))
    return verdicts, *reward.without_shaping(verdicts)


MINE = """
    def double(completion, answer): return 2 * (completion == answer)
    def short(completion, answer): return -len(completion) / 50
    def share(completion, answer): return min(len(completion) / 10, 1)
    share.shaping, share.threads, share.prepare, share.read = False, False, None, None
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
    # marked functions and negative weights are shaping, though they are worth between 0 and 1
    ("exact + 0.5*{}:style", ["6", "seven"], [1, 0.5], [1, 0], [1, 0]),
    ("-0.1*{}:share + exact", ["6", "seven"], [0.99, -0.05], [1, 0], [1, 0]),
]


@pytest.mark.parametrize("spec, completions, reward, rewarded, correct", SUMS)
def test_only_what_is_no_shaping_says_what_is_right(
    spec, completions, reward, rewarded, correct, own
):
    """A few answers to row 1 decide, on which a function may raise. Shares count in part."""
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


PARAMETERS = {  # of a user's function, and what they get, by their name where the row has it
    "text, gold": {"text": "c", "gold": "6"},
    "prompt, completion, answer": {"prompt": "1+5?", "completion": "c", "answer": "6"},
    "answer, completion": {"answer": "6", "completion": "c"},
    "solution_str, gold, extra=None": {"solution_str": "c", "gold": "6", "extra": None},
    "completion": {"completion": "c"},
    "text, /, *, tokens": {"text": "c", "tokens": 3},
    "*both": {"both": ("c", "6")},
    "text, gold, **row": {"text": "c", "gold": "6", "row": {"prompt": "1+5?", "tokens": 3}},
}


@pytest.mark.parametrize("parameters, expected", PARAMETERS.items())
def test_parameters_receive_the_fields_of_their_names(parameters, expected, own):
    path = own(f"SEEN = []\ndef f({parameters}):\n    SEEN.append(locals())\n    return 1\n")
    reward = rewards.parse_reward(f"{path}:f")
    assert reward.verify(["c"], [ROW | {"tokens": 3}])[0].fault == ""
    assert reward.terms["f"].function.__globals__["SEEN"] == [expected]


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


FAULTS = r"""
    raise KeyError('x\n\x1b[31m') | raise SystemExit(3) | 1 / 0 | return None | return 'a'
    return float('nan') | return [1, 2] | return [] | return [(1, float('nan'))] | return 10 ** 400
"""


@pytest.mark.parametrize("body", cells(FAULTS))
def test_a_completion_whose_verifier_fails_abstains(body, own):
    """It has no reward, not even of the verifiers that did not fail, and the others have theirs."""
    own_zero = "def broken(completion, answer):\n    if completion == '6': return 0\n"
    path = own(f"{own_zero}    {body}\n")
    reward = rewards.parse_reward(f"exact + -1*{path}:broken")
    verdicts = reward.verify(["6", "\x1b[31m" + "long " * 1000], [ROW, ROW])
    assert verdicts[0].terms == {"exact": 1.0, "broken": 0.0} and verdicts[0].fault == ""
    assert [str(verdict.reward) for verdict in verdicts] == ["1.0", "nan"]
    assert str(verdicts[1].terms) == "{'exact': nan, 'broken': nan}"
    assert str(reward.without_shaping(verdicts)) == "([1.0, nan], [1.0, nan])"
    fault = verdicts[1].fault
    assert fault.startswith("broken: ") and "long" in fault and fault.isprintable()
    assert len(fault) < 500 and ("own.py, line 3" in fault) == (not body.startswith("return"))


def test_a_child_process_of_a_verifier_ends_with_it(own):
    """Otherwise it would go on training beside its parent."""
    path = own("""
        import os, sys
        def f(completion, answer):
            child = os.fork()
            if child == 0 and completion == "exit":
                sys.exit(7)
            if child == 0:
                return 1
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    """)
    process = os.getpid()
    with warnings.catch_warnings(action="ignore"):  # of forks beside threads
        verdicts = rewards.parse_reward(f"{path}:f").verify(["exit", "return"], [ROW, ROW])
    if os.getpid() != process:
        os._exit(99)
    assert [verdict.reward for verdict in verdicts] == [7, 0]


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


ONE = "for one completion, return a number"
WRONG_REWARDS = {  # a sum, or the source of a user's file, and words of the sentence
    "mth": ["--reward mth: no such verifier; did you mean math?; expected file.py:function"],
    "x*math": ["could not convert string to float: 'x'"],
    "0*math": ["--reward 0*math: expected 0 < |weight| <= 1e6"],
    "nan*math": ["--reward nan*math: expected 0 < |weight|"],
    "math+math": ["math is given twice"],
    "nowhere.py:fn": ["--reward nowhere.py:fn: FileNotFoundError: "],
    "def f(:": ["own.py:f: SyntaxError: invalid syntax (own.py, line 1)"],
    "raise RuntimeError('one\\ntwo')": ["own.py:f: RuntimeError: one"],
    "ff = 3": ["own.py has no f"],
    "def f(text, answer, level): return 1": ["f: ", "'level' on ''; expected def f(completion, an"],
    "def f(completion, answer): return '1.0'": [f"f: it returned '1.0'; {ONE}"],
    "def f(completion, answer): return anwser": ["f: ", "anwser", "own.py, line 1)", "prompt, ans"],
    "async def f(completion, answer): return 1.0": ["it returned <coroutine object f", ONE],
    # of TRL and verl: lists in, lists out
    "def f(completions, answer, **kw): return [1.0 for text in completions + '.']": ["[1.0]", ONE],
    "def f(data_source, solution_str, ground_truth): return 1": ["f: ", "'ground_truth'"],
}


@pytest.mark.parametrize("broken", WRONG_REWARDS)
def test_a_reward_that_cannot_work_is_refused_in_one_sentence(broken, own):
    """The cause comes first, before any model is loaded and without a warning of Python's."""
    spec = f"math + {own(broken)}:f" if " " in broken else broken
    with warnings.catch_warnings(action="error"), pytest.raises(UserError) as error:
        rewards.parse_reward(spec).check([ROW])
    message = str(error.value)
    assert message.startswith("--reward ") and "\n" not in message and len(message) < 400
    assert all(word in message for word in WRONG_REWARDS[broken]), message


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


def test_command_prints_the_mean_and_the_disagreements(tmp_path, monkeypatch, capsys):
    """As a program: verifiers register with the module, not with __main__."""
    path = tmp_path / "answers.jsonl"
    monkeypatch.setattr(sys, "argv", ["rewards.py", str(path), "--reward", "math"])
    rows = [{"completion": f"#### {n}", "answer": "3" if n == 2 else str(n)} for n in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    runpy.run_path(rewards.__file__, run_name="__main__")
    said = capsys.readouterr().out
    assert "reward 0.7500 over 4 rows;" in said
    assert "row 3: '3' from '#### 2'" in said and "row 2" not in said

    path.write_text('{"completion": "a", "answer": ""}')
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(rewards.__file__, run_name="__main__")
    said, error = capsys.readouterr()
    assert said == "" and error.count("\n") == 1
    assert re.search("line 1.*cannot be used by math", error)
