"""Verifiers, rewards and built-in tasks: what must pay, what must not, and what must not hang."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import rewards

ROOT = Path(rewards.__file__).parent

VERIFY = {name: f for name, f in rewards.VERIFIERS.items() if name != "model"}  # it reads no text


def outcome(value):
    """What a verifier says of the whole: the last of a list of (position, reward)."""
    if type(value) is list:
        assert all(
            type(end) is int and type(part) is float and 0 <= part <= 1 for end, part in value
        )
        return value[-1][1]
    return value


ADD = {"fn": "add", "cases": [[[1, 2], 3], [[20, 22], 42]]}
RIGHT = "def add(a, b):\n    return a + b"
GOLD = {  # a usable gold answer for every verifier
    "countdown": {"numbers": [3, 5, 2], "target": 13},
    "code": ADD,
    "code_strict": ADD,
    "choice": "B",
    "arithmetic": "6",
}


def rows(text):
    """Lines `left | right` of a table; `#` starts a comment line."""
    lines = [line.strip() for line in textwrap.dedent(text).strip().split("\n")]
    return [
        tuple(cell.strip() for cell in line.split(" | "))
        for line in lines
        if line and not line.startswith("# ")
    ]


def boxed(answer):
    return "so \\boxed{" + answer + "}"


def fenced(source):
    return "Here it is:\n```python\n" + textwrap.dedent(source) + "\n```\nDone."


# ---------------------------------------------------------------------- extraction

EXTRACTED = [
    ("<answer>6</answer>", "6"),
    ("<think>2+3=5</think> <answer>6</answer>", "6"),
    ("2+3=5</think> <answer>6</answer>", "6"),  # the opening tag stands in the prompt
    ("<think>\\boxed{5}</think> \\boxed{6}", "6"),
    ("<think>a</think><think>b</think>\\boxed{6}", "6"),
    ("<answer>5</answer> no, <answer>6</answer>", "6"),
    ("<answer>the answer is \\boxed{6}</answer>", "6"),
    ("\\boxed{5} <answer>6</answer>", "6"),
    ("<answer>6</answer> \\boxed{5}", "6"),
    ("<answer>\n6\n</answer>", "6"),
    ("\\boxed{5} or rather \\boxed{6}", "6"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed{\\boxed{6}}", "6"),
    ("\\boxed{5 \\boxed{6}", "6"),  # the outer one is open
    ("\\boxed{6} and \\boxed{5", "6"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
    ("{ } } { \\boxed{6} {", "6"),
    ("#### 6", "6"),
    ("a\n#### 5\nb\n#### 6\nc", "6"),
    ("#### 1 234 dollars\n", "1 234 dollars"),
    ("#### 5\n\\boxed{6}", "6"),
    ("\\boxed{6}\n#### 5", "6"),
    ("####6", "6"),
    ("  \\boxed{  6  }  ", "6"),
    ("x" * 500_000 + "\\boxed{6}" + "x" * 500_000, "6"),  # no tail window
    ("<answer>6</answer>" + "x" * 500_000, "6"),
]
NOT_EXTRACTED = [
    "",
    "6",
    "the answer is 6",
    "<think>\\boxed{6}",
    "<think>\\boxed{6}</think>",
    "\\boxed{6}</think>",
    "<think>#### 6</think>done",
    "<think>a</think><think>\\boxed{6}",
    "<answer>6",
    "<answer>5</answer> <answer>6",
    "\\boxed{6",
    "\\boxed 6",
    "\\boxed{}",
    "<answer></answer>",
    "<answer> </answer>\\boxed{6}",
    "####",
    "####\n6",
    "</answer>6<answer>",
    "\\fbox{6}",
    "\\boxed{5}\\boxed{6}</think>",
    "<answer>6</answer></think>",
    "<answer>\\boxed{6</answer>"[:20],
]


@pytest.mark.parametrize("completion, answer", EXTRACTED)
def test_extraction_finds_the_answer(completion, answer):
    assert rewards.final_answer(completion, marked=True) == answer
    assert VERIFY["math"](completion, answer) == 1.0
    assert VERIFY["exact"](completion, answer) == 1.0


@pytest.mark.parametrize("completion", NOT_EXTRACTED)
def test_extraction_finds_nothing(completion):
    assert rewards.final_answer(completion, marked=True) == ""
    assert VERIFY["math"](completion, "6") == 0.0


@pytest.mark.parametrize(
    "completion", ["<answer>5</answer>", "\\boxed{5} 6", "6\n#### 5", "6 \\boxed{}"]
)
def test_extraction_ignores_what_is_not_marked(completion):
    assert VERIFY["math"](completion, "6") == 0.0


# ---------------------------------------------------------------------- math

EQUAL = rows(r"""
    # integers, decimals, signs
    5 | 5
    5 | 5.0
    5 | 05
    5. | 5
    +5 | 5
    −5 | -5
    .5 | 0.5
    0.50 | 0.5
    -0 | 0
    123456789012345678901234567890 | 123456789012345678901234567890.0
    # fractions
    1/2 | 0.5
    \frac{1}{2} | 0.5
    \frac12 | .5
    \frac1{2} | 1/2
    \dfrac{3}{4} | \tfrac34
    \cfrac{3}{4} | 6/8
    -\frac{1}{2} | \frac{-1}{2}
    \frac{1}{-2} | -0.5
    \frac{\frac{1}{2}}{3} | 1/6
    1/3 | 2/6
    -1/3 | \frac{-2}{6}
    # mixed numbers
    3\frac{1}{2} | 3.5
    3 \frac{1}{2} | 7/2
    3 1/2 | 7/2
    -3\frac12 | -3.5
    # separators
    1,234 | 1234
    1{,}234 | 1234
    1\,234 | 1234
    1\!234 | 1234
    12,345,678.5 | 12345678.5
    \$1,234.50 | 1234.5
    1,000,000 | 10^6
    # percent and currency
    50\% | 0.5
    50% | 1/2
    50 percent | 0.5
    12.5\% | 1/8
    60\% | 60%
    \$72 | 72
    $72$ | 72
    €72 | 72
    72\$ | 72
    # powers of ten
    10^{-30} | 1e-30
    1.5\times 10^3 | 1500
    1.5 × 10^3 | 1500
    1.5e3 | 1500
    1.5E+3 | 1500
    2.5 \cdot 10^{-2} | 0.025
    2^{10} | 1024
    2**10 | 1024
    # wrapping
    $5$ | 5
    \(5\) | 5
    \[5\] | 5
    **5** | 5
    \text{5} | 5
    \mathbf{5} | 5
    \displaystyle 5 | 5
    5\quad | 5
    (5) | 5
    {5} | 5
    # names
    x=5 | 5
    x = 5 | 5
    f(x)=x^2 | x^2
    y = 2x+1 | 2x+1
    x' = 5 | 5
    x \in (1,2) | (1,2)
    # units
    5 cm | 5
    5\text{ cm} | 5
    5 \text{ cm}^2 | 5
    5\,\text{m} | 5
    5\mathrm{kg} | 5
    72 dollars | \$72
    60 miles per hour | 60
    5 cm | 5\text{ cm}
    3.5 hours | 3.5
    \frac{1}{2} cup | 0.5
    90^\circ | 90
    90^{\circ} | 90
    90° | 90
    (5\text{ cm}, 6\text{ cm}) | (5,6)
    # tuples, intervals, sets, lists
    (1,2) | ( 1 , 2 )
    \left(1,\frac12\right) | (1,0.5)
    (1, -2, 3) | (1,-2,3)
    (-\infty, 3] | (-\infty,3]
    [1,2) | [ 1, 2 )
    (-\infty,\infty) | (-∞, ∞)
    \langle 1,2\rangle | (1,2)
    \{1,2,3\} | \{3,2,1\}
    \left\{1,2\right\} | \{2,1\}
    1,2,3 | 3, 1, 2
    1, 2 | \{1, 2\}
    1; 2 | 2; 1
    1 and 2 | 2,1
    1 or 2 | 2, 1
    1 \text{ and } 2 | 1,2
    x=1 or x=2 | 2,1
    (1,2),(3,4) | (3,4),(1,2)
    (1,2)\cup(3,4) | (3,4) \cup (1,2)
    (1,2)∪(3,4) | (1,2)\cup(3,4)
    \pm 3 | 3,-3
    2\pm\sqrt3 | 2+\sqrt3, 2-\sqrt3
    x = \pm 2 | \pm 2
    # matrices
    \begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
    \begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix} 2/2 \\ 2 \end{pmatrix}
    # roots and constants
    2\sqrt{3} | \sqrt{12}
    \frac{1}{\sqrt{2}} | \frac{\sqrt2}{2}
    \sqrt{4} | 2
    \sqrt[3]{8} | 2
    \sqrt[3]{16} | 2\sqrt[3]{2}
    sqrt(2) | \sqrt{2}
    2^{1/2} | \sqrt2
    2\pi | \pi\cdot 2
    \frac{\pi}{2} | 0.5\pi
    2pi | 2\pi
    2π | \pi*2
    5! | 120
    3 + \sqrt{2} | \sqrt{2} + 3
    \sqrt{-4} | 2\sqrt{-1}
    # algebra
    x+1 | 1+x
    (x+1)^2 | x^2+2x+1
    x^2-1 | (x-1)(x+1)
    \frac{x}{2} | x/2
    \frac{2}{3}x | \frac{2x}{3}
    3x^2y | 3yx^2
    ab | ba
    2(x+y) | 2x+2y
    \frac{x^2-1}{x-1} | x+1
    x_1+x_2 | x_{2}+x_{1}
    e^2 | e \cdot e
    2^{n+1} | 2\cdot2^n
    \sqrt{x^2+1} | (x^2+1)^{1/2}
    # equations and inequalities
    y=2x+1 | 2x+1=y
    y=2x+1 | y=1+2x
    x^2+y^2=4 | 4=y^2+x^2
    x > 5 | 5 < x
    x \ge 5 | 5 \le x
    x >= 5 | x \geq 5
    1<x<3 | 3>x>1
    1 \le x \leq 3 | 1 ≤ x ≤ 3
    x \ne 3 | 3 \neq x
    # text
    \text{Tuesday} | tuesday
    \text{yes} | Yes
    Tuesday | \textbf{Tuesday}
    \text{even} | even
    man bites dog | Man  bites dog
    x_1+x_2 = a_n | x_1 + x_2=a_n
    \sin x + 1 | \sin x+1
    5 million | 5 Million
    \emptyset | \emptyset
""")

UNEQUAL = rows(r"""
    5 | 6
    5 | -5
    5 | 50
    5 | 5.01
    0 | 1
    1/2 | 0.6
    1/2 | 2
    \frac{1}{2} | \frac{2}{1}
    10^{-30} | 10^{-31}
    10^{-30} | 0
    1e-30 | 1.0001e-30
    0.1 | 0.10000000000000001
    123456789012345678901 | 123456789012345678902
    1,234 | 1235
    1,234 | 1
    1234 | 123,4
    1,23 | 123
    (1,234) | (1,235)
    50\% | 0.51
    50\% | 5
    0.5\% | 0.5
    3\frac{1}{2} | 3/2
    3 1/2 | 31/2
    2 3 | 6
    2 3 | 23
    # units, scale words
    5 million | 5
    5 thousand | 5
    5 dozen | 5
    5 billion dollars | 5
    5 hundred | 5
    5 cm | 5 km
    5 cm^2 | 5 cm
    5 cm | 6 cm
    5m | 5
    2xy | 2
    2x | 2
    5 apples and 3 pears | 5
    5 plus 3 | 5
    # hedges
    5 or 6 | 5
    5, 6 | 5
    5, 6 | 6
    \{5, 6\} | 5
    5 = 6 | 5
    \pm 5 | 5
    (5,6) | 5
    # tuples, intervals, sets
    (1,2) | (2,1)
    (1,2) | \{1,2\}
    (1,2) | 1,2
    [1,2) | (1,2)
    (1,2] | (1,2)
    [1,2] | [2,1]
    (1,2) | (1,2,2)
    \{1,2\} | \{1,3\}
    \{1,1,2\} | \{1,2,2\}
    \{1,2\} | \{1,2,3\}
    1,2 | 1
    1,1,2 | 1,2,3
    (-\infty,3) | (\infty,3)
    (1,2)\cup(3,4) | (1,2)\cup(3,5)
    (1,2),(3,4) | (2,1),(3,4)
    \begin{pmatrix}1&2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
    \begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&2\\3&5\end{pmatrix}
    \begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix}
    # roots and constants
    \sqrt2 | 1.41421356
    \sqrt{2} | \sqrt{3}
    \sqrt{2} | -\sqrt{2}
    \sqrt[3]{8} | \sqrt{8}
    \pi | 22/7
    2\pi | 2
    5! | 5
    5! | 121
    # algebra
    x | y
    x | X
    x | 2x
    x^2 | x^3
    x^2 | 2x
    2x | x2+1
    \sqrt{x^2} | x
    (x+1)^2 | x^2+1
    x_1 | x_2
    \frac{x}{y} | \frac{y}{x}
    \sin x | x
    2\sin x | \sin 2x
    \log 2 | 2\log
    x+y | xy
    # equations and inequalities
    x=5 | y=5
    x=5 | x=6
    y=2x | y=3x
    x>5 | x<5
    x>5 | 5>x
    x\ge5 | x>5
    x\ne5 | x=5
    1<x<3 | 1<x<4
    1<x<3 | 1<x\le3
    x>5 | 5
    # text
    \text{Tuesday} | Wednesday
    yes | no
    man bites dog | dog bites man
    evil | live
    dog | god
    \text{yes or no} | yes
    # no value
    9^{9^9} | 1
    (9^9)^9^9 | 3
    1e400 | 1e500
    10^{400} | 10^{500}
    \frac{1}{0} | \frac{2}{0}
    \frac{1}{0} | 1
    0/0 | 1
    1000000! | 1
    (1 | 1
    \frac{1} | 1
    1+ | 1
    x^ | x
    ((((5 | 5
    __import__ | 1
    None | 0
    nan | 0
    inf | 1e999
""")


PAIRS = r"""
    # numbers
    7,425,000 ≡ 7425000
    1,000.0 ≡ 1000
    1 000 ≡ 1000
    1\,000\,000 ≡ 1000000
    10\ 000 ≡ 10000
    12{,}345 ≡ 12345
    14{,}916 ≡ 14916
    32,\! 349 ≡ 32349
    11,\! 111,\! 111,\! 100 ≡ 11111111100
    16,\!386.20 ≡ 16386.2
    -1{,}000 ≡ -1000
    .185 ≡ 0.185
    016 ≡ 16
    185. ≡ 185
    185\\ ≡ 185
    3.0000 ≡ 3
    1.0E3 ≡ 1000
    -0.25 ≡ -\frac14
    0.\overline{3} ≡ \frac{1}{3}
    0.1\overline{6} ≡ \frac16
    2.\overline{45} ≡ \frac{27}{11}
    0.\overline{9} ≡ 1
    32, 349 ≢ 32349
    0,125 ≢ 125
    3{,}14 ≢ 314
    4\,2 ≢ 42
    1 00 ≢ 100
    12 34 ≢ 1234
    1,2345 ≢ 12345
    1,234,56 ≢ 123456
    01,234 ≢ 1234
    0.33 ≢ \frac13
    0.\overline{3} ≢ 0.3
    0.\overline{36} ≢ 0.36
    1.5.2 ≢ 1.5
    2^{10}. ≢ 2
    # percent
    28\% ≡ 28 percent
    28\% ≡ 28\text{ percent}
    28\,\% ≡ 0.28
    28 \% ≡ \frac{7}{25}
    $28\%$ ≡ 0.28
    12.5\% ≡ \frac18
    100\% ≡ 1
    33\frac{1}{3}\% ≡ \frac13
    0.28\% ≢ 0.28
    28\% ≢ 2.8
    # money
    \$5 ≡ 5
    \textdollar 5 ≡ 5
    \$1,000.99 ≡ 1000.99
    1,000.99\$ ≡ 1000.99
    \text{\$}18 ≡ 18
    5 dollars ≡ \$5
    18.50\text{ dollars} ≡ 18.5
    €3 ≡ 3
    \$5 ≢ 500
    \$5 ≢ 5.01
    # units
    15\mbox{ cm}^2 ≡ 15
    15\text{ cm}^2 ≡ 15\text{ square cm}
    125\textnormal{ miles} ≡ 125
    18\pi\text{ cm}^3 ≡ 18\pi
    \frac{1}{3}\text{ meters} ≡ \frac13
    12\ \text{cm} ≡ 12
    12\,\mathrm{m} ≡ 12
    5cm ≡ 5
    72 km ≡ 72
    3\sqrt{13}\text{ units} ≡ 3\sqrt{13}
    60\text{ mph} ≡ 60
    20 \text{ square units} ≡ 20
    150 sq ft ≡ 150
    45 minutes ≡ 45
    17\text{ any thing} ≡ 17
    8 apples ≡ 8
    10 m/s ≡ 10
    10\text{ m/s}^2 ≡ 10
    5\text{ cm} ≡ 5\text{ centimeters} .
    25\text{ cm}^2 ≢ 5\text{ cm}^2
    5\text{ cm} ≢ 5\text{ km}
    5\text{ cm}^2 ≢ 5\text{ cm}^3
    5\text{ m/s} ≢ 5\text{ m}
    18\text{ cm}^3 ≢ 18\pi
    5m ≢ 5
    3 pq ≢ 3
    2 xy ≢ 2
    # words that change a value
    20\text{ million} ≡ 20000000
    20 million ≡ 20,000,000
    2.5\text{ billion} ≡ 2500000000
    5\text{ thousand} ≡ 5000
    3 hundred ≡ 300
    2 dozen ≡ 24
    3\text{ million dollars} ≡ 3000000
    \$3\text{ million} ≡ 3000000
    20\text{ million} ≢ 20
    20 millions ≢ 20
    2.5\text{ billion} ≢ 2.5
    5\text{ thousand} ≢ 5
    3\text{ hundred} ≢ 3
    2\text{ dozen} ≢ 2
    4\text{ lakh} ≢ 4
    4 crore ≢ 4
    7\text{ tenths} ≢ 7
    7 hundredths ≢ 7
    2\text{ thirds} ≢ 2
    3\text{ halves} ≢ 3
    1\text{ half} ≢ 1
    3 quarters ≢ 3
    1 and a half ≢ 1
    5\text{ and a half} ≢ 5
    5\text{ squared} ≢ 5
    5 cubed ≢ 5
    5\text{ factorial} ≢ 5
    5\text{ is wrong} ≢ 5
    5 is wrong ≢ 5
    5\text{ or so} ≢ 5
    5 or so ≢ 5
    5\text{ or }6 ≢ 5
    5\text{ plus } 3 ≢ 5
    5 minus 2 ≢ 5
    5\text{ not} ≢ 5
    5 more than x ≢ 5
    5\text{ less than }x ≢ 5
    about 5 or 6 ≢ 5
    5\text{ times }3 ≢ 5
    5 over 3 ≢ 5
    5\text{ to }7 ≢ 5
    5\text{ mod }7 ≢ 5
    5 point 3 ≢ 5
    5\text{ base }7 ≢ 5
    5 double ≢ 5
    5\text{ million} ≢ 5\text{ billion}
    # fractions
    \frac {1}{2} ≡ 0.5
    \frac{10}{9} ≡ 10/9
    -\frac{10}{9} ≡ -10/9
    \frac94\pi ≡ \frac{9}{4}\pi
    \frac3{3} ≡ 1
    \frac{1}2 ≡ \frac12
    \frac1x ≡ \frac{1}{x}
    \left(\frac{1}{3}\right) ≡ 1/3
    \frac{x+2}{7} ≡ \frac{x}{7}+\frac{2}{7}
    \frac{28}{6} ≡ \frac{14}{3}
    1/3 ≢ 3
    \frac{1}{3} ≢ \frac{1}{33}
    \frac12 ≢ 12
    1/2/2 ≢ 1
    # mixed numbers
    918\frac{1}{2} ≡ 918.5
    2\ \frac{1}{4} ≡ \frac94
    1\frac{3}{4}\text{ cups} ≡ 1.75
    -2 \frac{1}{3} ≡ -\frac{7}{3}
    5\frac{1}{2} ≢ \frac52
    2\frac{1}{4} ≢ \frac24
    # roots
    \sqrt 2+\sqrt 5 ≡ \sqrt{2}+\sqrt{5}
    \sqrt[3]{-8} ≡ -2
    \sqrt[3]{-27}+1 ≡ -2
    \sqrt[3]{x} ≡ x^{1/3}
    \frac{1}{3\sqrt[3]{x}^2} ≡ \frac{1}{3x^{2/3}}
    \frac{10\sqrt{10.5}}{27} ≡ \frac{5\sqrt{42}}{27}
    \frac{\sqrt{\sqrt{11}+\sqrt{7}}}{15+\sqrt{33}} ≡ \frac{\sqrt{\sqrt{7}+\sqrt{11}}}{\sqrt{33}+15}
    \sqrt{\frac{1}{2}} ≡ \frac{\sqrt{2}}{2}
    3√13 ≡ 3\sqrt{13}
    \sqrt[4]{16} ≡ 2
    4\sqrt{2} ≢ 4
    1\sqrt{19} ≢ 1
    \frac{1+\sqrt5}{2} ≢ 2
    \frac{1+\sqrt5}{2} ≢ \frac{1-\sqrt5}{2}
    \sqrt[3]{-8} ≢ 2
    \sqrt{-4} ≢ -2
    \sqrt{17} ≢ 4.1231
    # functions
    \tan^2(y)+1 ≡ \tan^2 y + 1
    2 \sin b \cos a ≡ 2\cos(a)\sin(b)
    2 \sin b \cos a ≡ 2\sin{b}\cos{a}
    \sin x ≡ \sin(x)
    \sin x ≡ \sin{x}
    sin x ≡ \sin x
    \sin^2 x + \cos^2 x ≡ 1
    \sin 2x ≡ 2 \sin x \cos x
    \sin\left(\frac{\pi}{6}\right) ≡ \frac12
    \cos\frac{\pi}{3} ≡ 0.5
    \cos \pi ≡ -1
    \sin \pi ≡ 0
    \sin 30^\circ ≡ \frac{1}{2}
    \cos(60^{\circ}) ≡ 0.5
    \tan\frac{\pi}{4} ≡ 1
    \tan 45^\circ ≡ 1
    \cos 72^\circ ≡ \frac{\sqrt5-1}{4}
    \arctan 1 ≡ \frac{\pi}{4}
    \arcsin\frac12 ≡ \frac{\pi}{6}
    \tan^{-1}(1) ≡ \frac{\pi}{4}
    \cos^{-1} 0 ≡ \frac{\pi}{2}
    \arctan\frac{1}{2} ≡ \tan^{-1}(0.5)
    \ln e^2 ≡ 2
    \ln(e) ≡ 1
    \ln 8 ≡ 3\ln 2
    \ln\frac{1}{2} ≡ -\ln 2
    \ln 6 ≡ \ln 2 + \ln 3
    \ln{2} ≡ \ln(2)
    \ln 2 ≡ \log_e 2
    e^{\ln 3} ≡ 3
    \exp(2) ≡ e^2
    \exp{x} ≡ e^{x}
    \log_2 8 ≡ 3
    \log_{2}{8} ≡ 3
    \log_3 \frac{1}{9} ≡ -2
    \log_{10} 1000 ≡ 3
    \frac{\log 8}{\log 2} ≡ 3
    \log_2 3 ≡ \frac{\ln 3}{\ln 2}
    \log 100 ≡ 2
    1-\frac{1}{\mathrm{e}} ≡ 1 - e^{-1}
    \sec x ≡ \frac{1}{\cos x}
    \tan^2(y)+1 ≡ \sec^2(y)
    \cot x ≡ \frac{\cos x}{\sin x}
    \sin(x)y ≡ y\sin x
    \operatorname{arctan} 1 ≡ \frac{\pi}{4}
    \sin x ≢ \cos x
    \sin x ≢ \sin y
    \sin x ≢ x
    \sin 2x ≢ 2\sin x
    \sin^2 x ≢ \sin x^2
    \sin^{-1} x ≢ \frac{1}{\sin x}
    \sin(x+y) ≢ \sin x + \sin y
    \sin 30 ≢ \frac12
    \ln 2 ≢ 0.693147
    \ln 2 ≢ \log 2
    \ln 2 ≢ 2
    \log_2 8 ≢ \log 28
    \log_2 8 ≢ \log_8 2
    1 - \frac{1}{\mathrm{e}} ≢ 1 + \frac{1}{\mathrm{e}}
    \arctan 2 ≢ \frac{\pi}{4}
    \cos x ≢ \cos(-2x)
    e^2 ≢ 7.389056
    # absolute values
    |x| ≡ |-x|
    |-5| ≡ 5
    \lvert x-1 \rvert ≡ |1-x|
    \left|\frac{-3}{2}\right| ≡ 1.5
    2|x| ≡ |2x|
    |x||y| ≡ |xy|
    ||x|-1| ≡ |1-|x||
    \sqrt{x^2} ≡ |x|
    |x| ≢ x
    |x+y| ≢ |x|+|y|
    # infinity
    \infty ≡ ∞
    +\infty ≡ \infty
    -\infty ≡ -∞
    (-\infty, \infty) ≡ \left(-\infty, +\infty\right)
    \infty ≢ -\infty
    \infty - \infty ≢ 0
    0 \cdot \infty ≢ 0
    \frac{\infty}{\infty} ≢ 1
    \infty ≢ 10^{300}
    \frac{1}{\infty} ≢ \infty
    # names in front
    \theta = \frac{\pi}{3} ≡ \frac{\pi}{3}
    a_{10} = 55 ≡ 55
    a_n = 2^n ≡ 2^n
    f^{-1}(x) = \frac{x-1}{2} ≡ \frac{x-1}{2}
    (x,y) = (3,4) ≡ (3,4)
    (x, y, z) = (1,2,3) ≡ (1,2,3)
    |AB| = 5 ≡ 5
    \frac{NO}{BO} = \frac{2}{3} ≡ \frac23
    f(3) = 7 ≡ 7
    P(A) = \frac{1}{6} ≡ \frac16
    x' = 5 ≡ 5
    k=1 ≡ 1
    11 ≡ x = 11
    z = 1 + 1 = 2 ≡ 2
    x \approx 11 ≡ 11
    x = \frac13 \approx 0.33 ≡ \frac13
    \frac{\sqrt3}{3} \approx 0.577 ≡ \frac{\sqrt3}{3}
    \angle ABC = 60^\circ ≡ 60
    AB = 12 ≡ 12
    x\in\{1,2\} ≡ \{1,2\}
    p(x) = x^2 - 1 ≡ (x-1)(x+1)
    \text{Area} = 24 ≡ 24
    \text{The answer is } 24 ≡ 24
    \alpha = 30^\circ ≡ 30
    y = 3x ≡ 3x
    n=1, 2, 3 ≡ n = 3, 2, 1
    D = (0, 1) ≡ (0,1)
    2x = 10 ≢ 10
    x^2 = 4 ≢ 4
    x + y = 5 ≢ 5
    7 = 11a+c ≢ 11a+c
    a + 3z = 0 ≢ 0
    x = 5 ≢ y = 5
    5 = 6 ≢ 6
    x = 5 = 6 ≢ 6
    x = 2 + 3 = 6 ≡ 6
    x = 5 + 5 + 1 = 7 = 11 ≡ x = 11
    x = y + 3 = 5 ≢ x = 5
    x = 5 = 6 ≢ 5
    x = 11 ≢ 12
    n=2, 3, 4 ≢ n=1, 2, 3
    D = (0, 1.5) ≢ (0,1)
    3 \approx 3.14 ≢ 3.14
    \frac{1}{3} \approx 0.33 ≢ 0.33
    # equations
    34x+45y-20z+100=0 ≡ -34x-45y+20z-100=0
    2x+4y-3=0 ≡ y=-\frac{1}{2}x+\frac{3}{4}
    x^2/4 + y^2/3 = 1 ≡ x^2/16 + y^2/12 = 1/4
    x-2y+z-1=0 ≡ x+z=2y+1
    2x = 10 ≡ x = 5
    y-1 = 2(x-3) ≡ y = 2x - 5
    4x^2 + 9y^2 = 36 ≡ \frac{x^2}{9}+\frac{y^2}{4} = 1
    y = x ≡ x = y
    f(y) = y ≡ f(y) = y
    a_3 = 2, a_{37} = 19 ≡ a_{37} = 19, \quad a_3 = 2
    x=1, y=2 ≡ y=2, x=1
    y = 2x ≢ y = 2x + 1
    y = 2x ≢ y = -2x
    xy = 0 ≢ x = 0
    x^2 = 1 ≢ x = 1
    x^2 + y^2 = 4 ≢ x^2 + y^2 = 2
    1 = 1 ≢ 2 = 2
    5 = 6 ≢ 7 = 8
    x = x ≢ y = y
    x=1, y=2 ≢ x=2, y=1
    # inequalities
    x \geq 5 ≡ x >= 5
    x \lt 3 ≡ x < 3
    x \leqslant 2 ≡ x <= 2
    x \neq 5 ≡ x != 5
    x \le 5 ≡ 5 \geq x
    x < 1 ≡ -x > -1
    x <= 1 ≡ -x >= -1
    2x > 4 ≡ x > 2
    x - 3 > 0 ≡ x > 3
    -2 \le x \le 7 ≡ 7 \ge x \ge -2
    -2 \le x \le 7 ≡ x \in [-2,7]
    -793 < a < 10 ≡ (-793, 10)
    x > 5 ≡ (5, \infty)
    x \le 3 ≡ (-\infty, 3]
    f(2) < f(1) < f(4) ≡ f(2) < f(1) < f(4)
    x < 1 ≢ x > -1
    x > 5 ≢ x < 5
    x \ge 5 ≢ x \le 5
    x < 1 ≢ -x > 1
    2x > 4 ≢ x < 2
    -2x > 4 ≢ x > -2
    x > 5 ≢ x \ge 5
    -2 \le x \le 7 ≢ (-2, 7)
    -2 \le x \le 7 ≢ x \in [-2,8]
    x > 5 ≢ [5, \infty)
    f(2) < f(1) < f(4) ≢ f(1) < f(2) < f(4)
    x > 5 ≢ 5
    # intervals
    x \in [0,100] ≡ [0,100]
    x \in (1,234) ≡ (1,234)
    [0,1) ≡ \left[0, 1\right)
    \left[-1,-\tfrac12\right) \cup (0,1) ≡ [-1, -\frac{1}{2}) \cup (0, 1)
    (2, 12) \cup (12, 102) ≡ (12, 102) \cup (2, 12)
    \{-1\} \cup [0,7) ≡ [0,7) \cup \{-1\}
    (\frac{3}{5},\frac{8}{3}] ≡ (0.6,\frac{16}{6}]
    k \in [-36,104] ≡ [-36, 104]
    x \in (-\infty,2)\cup(3,\infty) ≡ (-\infty,2)\cup(3,\infty)
    \displaystyle [1,234] ≡ [1, 234]
    ]0,1[ ≡ ]0, 1[
    x \in (1,234) ≢ 1234
    \displaystyle (1,234) ≢ 1234
    (1,234) ≢ 1234
    [0,9) ≢ [0,1)
    (0,9) ≢ [0,9)
    1 ≢ -[0,1)
    (1,2) \cup (3,4) ≢ (1,2)
    (1,2) \cap (0,3) ≢ (1,2) \cup (0,3)
    (2, 12) \cup (12, 102) ≢ (2, 102)
    # tuples
    (3, \frac{\pi}{2}) ≡ \left( 3, \frac{\pi}{2} \right)
    (1,\frac{9}{2}) ≡ (1,4.5)
    (6,31,-1) ≡ ( 6, 31, -1 )
    (0;0;6) ≡ (0, 0, 6)
    (p,q)=(3,2) ≡ (3,2)
    (2,2),(1,3),(3,3) ≡ (3,3), (2,2), (1,3)
    (37,3),(17,3) ≡ (17,3),(37,3)
    \left(\frac{1}{5},\frac{1}{6}\right) ≡ (1/5, 1/6)
    (1,2) \text{ and } (3,4) ≡ (3,4),(1,2)
    (-6, 10) ≢ (10, -6)
    (1,2),(3,4) ≢ (1,4),(3,2)
    (1,2,3) ≢ (1,2)
    (3,1) ≢ \{1,3\}
    (0,0) ≢ (\frac{27}{8},\frac{15}{8})
    # lists and sets
    -2,1 ≡ 1, -2
    19, 46, and 82 ≡ 19, 46, \text{ and } 82
    12\text{ and }13 ≡ 12, 13
    1\text{or}2 ≡ 1, 2
    x=1\text{or}x=2 ≡ x = 2, x = 1
    1 or 2 ≡ 2 or 1
    1,2, ≡ 1,2
    \{2,3,5\} ≡ 5,3,2
    \{1,1,2\} ≡ \{1,2\}
    2, 2, 3 ≡ 3, 2, 2
    \sqrt2, 1, \sqrt2 ≡ 1, \sqrt{2}, \sqrt{2}
    1 \pm \sqrt{19} ≡ 1+\sqrt{19}, 1-\sqrt{19}
    1 \pm \sqrt{19}. ≡ 1 \pm \sqrt{19}
    \{1\pm\sqrt{5},-2\} ≡ \{-2, 1+\sqrt5, 1-\sqrt5\}
    \pm 2021 ≡ \{-2021, 2021\}
    x = \pm 2 ≡ x = 2, x = -2
    x = 2 \pm i ≡ 2+i, 2-i
    \pm 1, \pm 3 ≡ -3,-1,1,3
    \frac{1 \pm \sqrt5}{2} ≡ \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}
    \pm 2021 ≢ 2021
    3 \pm 2\sqrt2 ≢ 3 + 2\sqrt2
    19, 46, 82 ≢ 21, 36, 82
    1, 2, 3 ≢ 1, 2
    1, 2, 3, ... ≢ 1, 2, 3
    1, 2, \ldots ≢ 1, 2
    \{1,2\} ≢ \{1,2,3\}
    1, 1, 2 ≢ 1, 2
    5\text{ or }6 ≢ 6
    1\text{or}2 ≢ 1
    # matrices
    \begin{pmatrix} 0 & 3 \\ 0 & -1 \end{pmatrix} ≡ \begin{bmatrix}0&3\\0&-1\end{bmatrix}
    \left[\begin{array}{cc}1 & 2 \\3 & 4\end{array}\right] ≡ \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \left(\begin{array}{cc}1&2\\3&4\end{array}\right) ≡ \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \begin{pmatrix}-\frac{7}{4}&-2\\4&1\\\end{pmatrix} ≡ \begin{pmatrix}-1.75&-2\\4&1\end{pmatrix}
    \begin{pmatrix} 1 \\ 2 \\ \end{pmatrix} ≡ \begin{pmatrix}1\\2\end{pmatrix}
    \begin{pmatrix}\frac{1}{2}x & \sin x\end{pmatrix} ≡ \begin{pmatrix}x/2&\sin(x)\end{pmatrix}
    \begin{matrix}1&2\end{matrix} ≡ \begin{pmatrix}1&2\end{pmatrix}
    A = \begin{pmatrix}1&2\\3&4\end{pmatrix} ≡ \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix} ≢ \begin{pmatrix}1 & 2 \\ 3 & 5\end{pmatrix}
    \begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix} ≢ \begin{pmatrix}1 & 3 \\ 2 & 4\end{pmatrix}
    \begin{pmatrix}1\\2\end{pmatrix} ≢ \begin{pmatrix}1&2\end{pmatrix}
    \begin{pmatrix}1&2&3&4\end{pmatrix} ≢ \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \begin{pmatrix}1\\2\end{pmatrix} ≢ \begin{pmatrix}1\\2\\3\end{pmatrix}
    # bases and subscripts
    2516_{8} ≡ 2516_8
    204_5 ≡ 204_{5}
    1112112_3 ≡ 1112112_{3}
    52_8 ≡ 52_{8}
    x_{12} ≡ x_{12}
    a_{n+1} ≡ a_{n+1}
    2516_8 ≢ 2516_7
    1112122_3 ≢ 1112112_3
    204_5 ≢ 204
    204_5 ≢ 2045
    x_{1} ≢ x_{2}
    x_{12} ≢ 12x
    # algebra
    x^2+2x+1 ≡ x^2 + 2*x - (-1)
    y = x^2+2x+1 ≡ 2x+ 1+x^2
    (r+5)(r+5) ≡ (r+5)^2
    2-2p ≡ -2p+2
    \frac{\pi r}{h+r} ≡ \frac{r\pi}{r+h}
    6r^2-4r-24 ≡ 2(3r^2-2r-12)
    x^3+3x-6 ≡ 3x-6+x^3
    -x^4-7x^3+3 ≡ 3 - 7x^3 - x^4
    2^{98} ≡ 4^{49}
    9 \times 10^{3} ≡ 9000
    3ab ≡ 3ba
    x(x+1) ≡ x^2+x
    \frac{n(n+1)}{2} ≡ \frac{n^2+n}{2}
    (x-1)(x^2+x+1) ≡ x^3-1
    a^{-1} ≡ \frac1a
    2i ≡ i \cdot 2
    1+2i ≡ 2i+1
    \lambda\mu ≡ \mu \lambda
    x+2n+1 ≢ x+1
    (a+5)(b+2) ≢ (+5)(b+2)
    x^2+2x+1 ≢ x^2+2x-1
    2x ≢ x^2
    6r^2-4r-24 ≢ 6r^2-4r+24
    3-4i ≢ 3+4i
    x(x+1) ≢ x^2+1
    \frac{1}{2^{99}} ≢ \frac{1}{2^{98}}
    n! ≢ n
    (n+1)! ≢ n!
    # angles and ratios
    90^\circ ≡ 90
    90^{\circ} ≡ 90°
    45\text{ degrees} ≡ 45
    90\,^\circ ≡ 90
    3:5 ≡ 6:10
    1:2:3 ≡ 2:4:6
    3:5 ≡ \frac35
    12:00 ≡ 12:00
    90^\circ ≢ \frac{\pi}{2}
    180 ≢ \pi
    3:5 ≢ 5:3
    3:5 ≢ 3.5
    12:00 ≢ 1:00
    3:30 ≢ 1:10
    1:2:3 ≢ 1:2
    # sets that have names
    \mathbb{R} ≡ (-\infty,\infty)
    \mathbb{R} ≡ \text{all real numbers}
    x \in \mathbb{R} ≡ \mathbb{R}
    \emptyset ≡ \varnothing
    \emptyset ≡ \{\}
    ∅ ≡ \emptyset
    \mathbb{R} ≢ \mathbb{Z}
    \emptyset ≢ 0
    \emptyset ≢ \{0\}
    \mathbb{R} ≢ R
    # words
    \text{Evelyn} ≡ Evelyn
    \text{(C)} ≡ \text{C}
    (C) ≡ C
    \text{E} ≡ E
    \mathrm{E} ≡ E
    \textbf{A} ≡ A
    \textbf{(B)} ≡ B
    \text{Yes} ≡ yes
    \text{ Navin } ≡ \text{navin}
    f' ≡ f'
    \text{The points form a hexagon} ≡ the points form a hexagon
    p - q ≡ -q + p
    \text{C} ≢ \text{D}
    (C) ≢ (D)
    C ≢ c
    \text{Evelyn} ≢ \text{Briana}
    \text{odd} ≢ \text{even}
    \text{not even} ≢ \text{even}
    5\text{ is the answer} ≢ 6
    # garbage
    \sum_{k=0}^{n-1} F_k ≡ \sum_{k=0}^{n-1} F_k
    \sum_{k=0}^{n-1} F_k ≢ \sum_{k=0}^{n-2} F_k
    \boxed{} ≢ 0
    \frac{1}{0} ≢ 0
    \frac{}{} ≢ 1
    \sqrt{} ≢ 0
    \left( ≢ 1
    \infty\infty ≢ 1
    = ≢ 0
    5 5 ≢ 55
    5 5 ≢ 25
    1 2/3 ≢ 12/3
    x_ ≢ x
    _ ≢ 1
    ... ≢ 1
    # completions of models
    \dfrac{7}{12} ≡ \frac{14}{24}
    \frac{1}{2}(x+1) ≡ \frac{x+1}{2}
    \frac{\sqrt{3}}{3} ≡ \frac{1}{\sqrt{3}}
    x^{2} - 5x + 6 ≡ (x-2)(x-3)
    \left( -\infty, -2 \right) \cup \left( 2, \infty \right) ≡ (-\infty,-2)\cup(2,\infty)
    1{,}234{,}567 ≡ 1234567
    \$1{,}250 ≡ 1250
    -\sqrt{2} ≡ -2^{1/2}
    3\times 10^{-4} ≡ 0.0003
    6.02\cdot 10^{23} ≡ 602000000000000000000000
    \text{6 inches} ≡ 6
    6\text{ inches} ≡ 6\text{ in}
    24\text{ cm}^2 ≡ 24 \text{ cm}^{2}
    \frac{15}{2}\text{ cm} ≡ 7.5
    \boxed{42} ≡ 42
    42. ≡ 42
    \mathbf{42} ≡ 42
    \underline{\underline{42}} ≡ 42
    \fbox{42} ≡ 42
    {\bf 42} ≡ 42
    \large 42 ≡ 42
    \color{red}{42} ≡ 42
    \color{red}42 ≡ 42
    {\color{blue} x+1} ≡ x+1
    \frac{\textcolor{red}{1}}{2} ≡ 1/2
    \text{\color{red}42} ≡ 42
    \color{red}{43} ≢ 42
    \color{42} ≢ 42
    \emph{Tuesday} ≡ Tuesday
    \mathrm{42} ≡ 42
    {42} ≡ 42
    42\text{.} ≡ 42
    \text{42} ≡ 42
    42^{\circ} ≡ 42
    42^\circ\text{C} ≡ 42
    -42^\circ ≡ -42
    \frac{a}{b} ≡ a/b
    \frac{a+b}{c} ≡ (a+b)/c
    a+b/c ≢ (a+b)/c
    x = -\frac{1}{2} ≡ -0.5
    x=\frac{-b\pm\sqrt{b^2-c}}{2a} ≡ \frac{-b+\sqrt{b^2-c}}{2a}, \frac{-b-\sqrt{b^2-c}}{2a}
    y=x^2 ≡ x^2
    (0, 2) ≡ (0,2.0)
    (0, 2) ≢ (2, 0)
    (0, 2) ≢ [0, 2]
    \left[0, 2\right) ≡ [0,2)
    0 \leq x < 2 ≡ [0,2)
    0 < x < 2 ≢ [0,2]
    x \geq 0 ≡ [0, \infty)
    x > 0 ≢ [0,\infty)
    x\neq 2 ≡ x \ne 2
    x \neq 2 ≢ x = 2
    \{x \mid x > 2\} ≡ \{x \mid x > 2\}
    \{1, 3, 5\} ≡ \{5,3,1\}
    \{1, 3, 5\} ≢ (5,3,1)
    1, 3, 5 ≡ \{1,3,5\}
    \text{1, 3, and 5} ≡ 1,3,5
    1\frac{1}{2} ≢ \frac{11}{2}
    1\frac12 ≡ \frac32
    \log_{10}(100) ≡ 2
    \ln(x^3) ≢ \ln x
    2^x \cdot 2^y ≡ 2^{x+y}
    (2^x)^y ≢ 2^{x^y}
    e^{x+1} ≡ e \cdot e^x
    e^{i\pi} ≢ 1
    i^2 ≡ -1
    (1+i)^2 ≡ 2i
    \frac{1}{i} ≡ -i
    |3+4i| ≡ 5
    \sqrt{-1} ≡ i
    3 + 4i ≡ 4i+3
    -1 + \sqrt{3}i ≡ -1+i\sqrt{3}
    \cos 20^\circ ≡ \sin 70^\circ
    \cos(-x) ≡ \cos x
    \sin(-x) ≢ \sin x
    \tan x ≡ \frac{\sin x}{\cos x}
    2\cos^2 x - 1 ≡ \cos 2x
    1 - \sin^2\theta ≡ \cos^2 \theta
    \sin^2 x ≡ (\sin x)^2
    \sin x^2 ≡ \sin(x^2)
    \sqrt{2}\sin x ≢ \sin\sqrt{2}x
    10! ≡ 3628800
    \binom{5}{2} ≡ \binom{5}{2}
    \binom{5}{2} ≢ \binom{6}{3}
    5 \choose 2 ≢ 5
    \lfloor 3.5 \rfloor ≢ 3.5
    \overline{AB} ≡ \overline{AB}
    \vec{v} = (1,2) ≡ (1,2)
    \mathbf{v} = \begin{pmatrix} 1 \\ 2 \end{pmatrix} ≡ \begin{pmatrix} 1 \\ 2 \end{pmatrix}
    \begin{vmatrix}1&2\\3&4\end{vmatrix} ≢ \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \begin{cases} x=1 \\ y=2 \end{cases} ≢ 1
    x=1,\ y=2 ≡ x=1, y=2
    x=1 \text{ and } y=2 ≡ y=2, x=1
    a=1, b=2 ≢ a=2, b=1
    a=1,b=2 ≢ 2, 1
    m\angle A = 30^\circ ≡ 30
    \sin A = \frac{3}{5} ≡ \frac35
    n = 12 \text{ sides} ≡ 12
    12 \text{ sides} ≡ n=12
    about 12 ≢ 13
    \approx 12 ≢ 13
    12 (twelve) ≢ 13
    twelve ≢ 13
    twelve ≡ Twelve
    A ≡ \textbf{A}
    (A) ≡ A
    A, B ≡ B, A
    A, B ≢ A
    \text{A and B} ≢ A
    A) 5 ≢ 5
    \text{None of the above} ≡ none of the above
    \text{true} ≡ True
    \text{true} ≢ \text{false}
    \text{undefined} ≡ undefined
    \text{undefined} ≢ 0
    \text{no solution} ≡ No solution
    \text{no solution} ≢ \text{infinitely many solutions}
    x ≢ -x
    -x ≢ |x|
    p ≢ -|p|
    u ≢ -|u|
    \sqrt{x^2} ≢ x
    \sqrt{u^2} ≢ -u
    x^2 ≢ 2^x
    x^y ≢ y^x
    \frac{x}{y} ≢ \frac{y}{x}
    x^{-2} ≡ \frac{1}{x^2}
    x^{0} ≡ 1
    \frac{x}{x} ≡ 1
    \frac{x^2-4}{x-2} ≡ x+2
    0.1+0.2 ≡ 0.3
    1/3+1/3 ≡ 2/3
    1e-10 ≢ 0
    100000000000000000001 ≢ 100000000000000000000
    0.30000000000000004 ≢ 0.3
    9.99999999999999999 ≢ 10
    5^{\circ}30' ≢ 5
    5'6'' ≢ 5
    7:00\text{ PM} ≢ 7
    7:00 \text{ PM} ≡ 7:00\text{ PM}
    July 4 ≢ 4
    4\text{ July} ≢ 5
    Monday ≡ \text{Monday}
    1st ≢ 2nd
    2/3\text{ cup} ≡ \frac23
    \frac{2}{3}\text{ of a cup} ≢ \frac{3}{2}
    3\text{ red and }2\text{ blue} ≢ 3
    2:3 ≡ 4:6
    2:3 ≢ 3:2
    2\text{ to }3 ≢ 2
    5 + 0i ≡ 5
    +7 ≡ 7
    --7 ≡ 7
    (-7) ≡ -7
    -(-7) ≡ 7
    -7 ≢ 7
    2 - 3 ≢ 2, -3
    2-3 ≡ -1
    \frac{-3}{-4} ≡ 3/4
    4 \frac{0}{5} ≡ 4
    \sqrt[3]{2}\sqrt[3]{4} ≡ 2
    \sqrt{8} ≡ 2\sqrt{2}
    \sqrt{2}\sqrt{3} ≡ \sqrt6
    (\sqrt{2}+1)(\sqrt{2}-1) ≡ 1
    \sqrt{3+2\sqrt{2}} ≡ 1+\sqrt{2}
    \frac{1+\sqrt{5}}{2} ≡ \frac{2}{\sqrt{5}-1}
    2\sqrt{3} ≢ 3\sqrt{2}
    \sqrt{12} ≢ 3.46
    \frac{22}{7} ≢ \pi
    3.14159 ≢ \pi
    \pi^2 ≢ 10
    \frac\pi2 ≡ \frac{\pi}{2}
    \frac{\pi}2 ≡ \frac12\pi
    2\pi r ≡ 2r\pi
    \pi r^2h ≡ hr^2\pi
    4\pi\text{ square units} ≡ 4\pi
    36\pi \text{ cubic feet} ≡ 36\pi
    36\pi\text{ ft}^3 ≡ 36\pi\text{ cubic feet}
    36\pi\text{ ft}^3 ≢ 36\pi\text{ square feet}
    # further completions
    = 5 ≡ 5
    \approx 5 ≡ 5
    approximately 5 ≡ 5
    \text{about } 12 ≡ 12
    The answer is 12 ≡ 12
    \text{The final answer is } 12 ≡ 12
    5 slices of pizza ≡ 5
    5\text{ more apples} ≡ 5
    5\text{ times} ≡ 5
    7\text{ boys and 8 girls} ≢ 7
    5\text{ times }3 ≢ 5
    5 more than 3 ≢ 5
    5 mil ≢ 5
    5 feet 6 inches ≢ 5
    5 dollars and 50 cents ≢ 5
    \text{not } 5 ≢ 5
    The answer is not 5 ≢ 5
    5th ≢ 5
    5k ≢ 5
    5M ≢ 5
    between 5 and 6 ≢ 5
    5-6 ≢ 5
    5--6 ≢ 5
    5? ≢ 6
    5 \neq 6 ≢ 5
    |x| = -5 ≢ 5
    -x = 5 ≡ x = -5
    x = 5 ≡ x - 5 = 0
    x = 5y ≢ x = 5
    \frac{dy}{dx} = 2x ≡ 2x
    \lim_{x \to 0} f(x) = 3 ≢ 4
    \sum_{n=1}^{10} n = 55 ≢ 54
    \sqrt{2} \approx 1.414 ≡ \sqrt2
    \sqrt{2} \approx 1.414 ≢ 1.414
    1.414 ≢ \sqrt2
    0.5 \text{ or } \frac{1}{2} ≢ 0.25
    \pi\text{ cm}^2 ≡ \pi
    \pi \text{ square units} ≡ π
    \pi\text{ cm}^2 ≢ \pi\text{ cm}^3
    x\text{ cm} ≢ x
    No ≡ no
    no ≡ \text{No}
    no ≢ on
    2no ≢ 2
    5 tens ≢ 5
    5 twelfths ≢ 5
    5\text{ sixteenths} ≢ 5
    5 ten-thousandths ≢ 5
    7 twentieths ≢ 7
    5\text{ millionths} ≢ 5
    5\text{ score} ≢ 5
    5\text{ below zero} ≢ 5
    5 months ≡ 5
    5\text{ widths} ≡ 5
    5 teeth ≡ 5
    \frac{1}{2} = 0.5 ≢ 0.25
    \ln|x| ≡ \ln|-x|
    x\ln x - x ≡ x(\ln x - 1)
    \ln|x| + C ≡ C + \ln|x|
    e^{-x^2} ≡ \frac{1}{e^{x^2}}
    \frac{e^x + e^{-x}}{2} ≡ \frac{e^{2x}+1}{2e^x}
    \sqrt{1-x^2} ≢ 1-x
    \sin\theta\cos\theta ≡ \frac{1}{2}\sin 2\theta
    \sin(2x)\cos(x) ≡ 2\sin x\cos^2 x
    \tan\frac{x}{2} ≡ \frac{\sin x}{1+\cos x}
    \cos 2x ≡ \cos^2 x - \sin^2 x
    \sin 3x ≢ 3\sin x
    \arcsin x + \arccos x ≢ \pi
    \log_3 81 ≡ 4
    \log_9 27 ≡ 1.5
    \log_2 \frac18 ≡ -3
    \log_4 2 ≢ 2
    \left(\frac{3}{2}\right)^3 ≡ \frac{27}{8}
    (\sqrt{3})^4 ≡ 9
    8^{2/3} ≡ 4
    (-8)^{1/3} ≡ -2
    4^{-1/2} ≡ \frac12
    2^{10} - 1 ≡ 1023
    \frac{10!}{8!} ≡ 90
    5 \cdot 4! ≡ 120
    3^{20} ≡ 3486784401
    7^{-2} ≡ \frac{1}{49}
    1{,}000{,}000 ≡ 10^{6}
    \frac{1{,}000}{3} ≡ \frac{1000}{3}
    x = \frac{1}{2}, y = -3 ≡ y=-3, x=0.5
    \left(\frac12, -3\right) ≡ (0.5, -3)
    (\frac12, -3) ≢ (-\frac12, 3)
    (1, 2, 3) ≢ \{1, 2, 3\}
    \left\{-\frac12, 3\right\} ≡ \{3, -0.5\}
    -\frac12, 3 ≡ x = 3, x = -\frac12
    x = -\frac12 \text{ or } x = 3 ≡ -\frac12, 3
    x<-2 \text{ or } x>2 ≡ x > 2, x < -2
    (-\infty,-2)\cup(2,\infty) ≢ (-2,2)
    [2,\infty) ≢ (2,\infty)
    x\geq 2 ≡ [2,\infty)
    2\le x ≡ [2,+\infty)
    y\in(-\infty,0] ≡ (-\infty,0]
    \{0\}\cup[1,2] ≢ [0,2]
    \mathbb{R}\setminus\{0\} ≡ \mathbb{R} \setminus \{0\}
    \mathbb{R}\setminus\{0\} ≢ \mathbb{R}
    \begin{pmatrix}1\\-1\end{pmatrix} ≢ \begin{pmatrix}-1\\1\end{pmatrix}
    \begin{pmatrix}1&0\\0&1\end{pmatrix} ≡ \left(\begin{matrix}1&0\\0&1\end{matrix}\right)
    \begin{bmatrix} \frac{1}{2} \\ 0.25 \end{bmatrix} ≡ \begin{pmatrix} 0.5 \\ \frac14 \end{pmatrix}
    110_2 ≢ 110
    110_2 ≢ 6
    \text{A, C, D} ≡ A, C, D
    \text{A, C} ≢ \text{A, D}
    \text{(A) and (C)} ≡ A, C
    \text{B, because } x=5 ≢ 5
    \text{Friday} ≢ \text{Monday}
    \text{Friday, May 5} ≢ 5
    \text{increasing} ≡ Increasing
    \text{infinite} ≢ \infty
    10\% ≡ \frac{1}{10}
    \$10 ≢ 10\%
    10\text{ cents} ≢ 10\text{ dollars}
    1 \text{ hour } 30 \text{ minutes} ≢ 1
    90\text{ minutes} ≢ 1.5\text{ hours}
    20^\circ ≢ 20\%
    1:2 ≡ \frac{1}{2}
    2:1 ≢ \frac12
    \frac{1}{5}\begin{pmatrix}3\\4\end{pmatrix} ≡ \begin{pmatrix}0.6\\\frac45\end{pmatrix}
    -\begin{pmatrix}1&2\end{pmatrix} ≡ \begin{pmatrix}-1&-2\end{pmatrix}
    \begin{matrix}1&2\end{matrix}+\begin{matrix}t&0\end{matrix} ≡ \begin{matrix}1+t&2\end{matrix}
    t\begin{matrix}3\\4\end{matrix} ≡ \begin{matrix}3t\\4t\end{matrix}
    \begin{pmatrix}1&2\end{pmatrix}+\begin{pmatrix}1\\2\end{pmatrix} ≢ \begin{matrix}2&4\end{matrix}
    2\begin{pmatrix}1\\2\end{pmatrix} ≢ \begin{pmatrix}1\\2\end{pmatrix}
    14 {, }916 ≡ 14916
    (1,2), (3,4), (1,2) ≡ (3,4), (1,2)
    5, 5, 6 ≢ 5, 6
    # many digits
    10^{15}+\sqrt2 ≢ 10^{15}+\sqrt3
    10^{60}+\sqrt2 ≢ 10^{60}+\sqrt3
    10^{100}+\sqrt2 ≢ 10^{100}+\sqrt3
    \ln(10^{15}+1) ≢ \ln(10^{15})
    \sqrt{10^{30}+1} ≢ 10^{15}
    \sin(10^{-25}) ≢ 10^{-25}
    e^{10^{-15}} ≢ 1
    1 + e^{-60} ≢ 1
    \pi ≢ \frac{355}{113}
    \sqrt[3]{60}+\sqrt{7}-\frac{1}{10^{20}} ≢ \sqrt[3]{60}+\sqrt{7}
    99-70\sqrt2 ≡ (\sqrt2-1)^6
    22619537-15994428\sqrt2 ≡ (\sqrt2-1)^{20}
    \sqrt{10^{20}+2\cdot 10^{10}+1} ≡ 10^{10}+1
    \sqrt{5+2\sqrt6}-\sqrt3 ≡ \sqrt2
    \sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5} ≡ 1
    e^{100} ≡ (e^{50})^2
    # pi and e
    e^{i\pi} ≡ -1
    e^{\frac{i\pi}{2}} ≡ i
    e^{2\pi i/3} ≡ -\frac12+\frac{\sqrt3}{2}i
    \sin(x+2\pi) ≡ \sin x
    \cos(x+\pi) ≡ -\cos x
    \sin(\frac{\pi}{2}-x) ≡ \cos x
    \ln(-1) ≡ i\pi
    \cos\frac{2\pi}{5} ≡ \frac{\sqrt5-1}{4}
    \arctan 2+\arctan 3 ≡ \frac{3\pi}{4}
    \arcsin x+\arccos x ≡ \frac{\pi}{2}
    \cos(i) ≡ \frac{e+e^{-1}}{2}
    \sqrt{i} ≡ \frac{1+i}{\sqrt2}
    x \in (0,\pi] ≡ 0 < x \le \pi
    e^{i\pi} ≢ 1
    \sin(x+\pi) ≢ \sin x
    \tan\frac{\pi}{2} ≢ 1
    \sin e ≢ 0
    # chains
    2+3=5 ≡ 5
    \frac{10}{2} = 5 ≡ 5
    (x+1)^2 = x^2+2x+1 ≡ x^2+2x+1
    2+3=6 ≢ 6
    2+3=5=6 ≢ 5
    2x = 10 ≢ 10
    x+y = 5 ≢ 5
    # notation
    {1\over2} ≡ \frac12
    {x+1 \over 2} ≡ \frac{x+1}{2}
    \begin{pmatrix}1\\[4pt]2\end{pmatrix} ≡ \begin{pmatrix}1\\2\end{pmatrix}
    \begin{pmatrix}\frac12\\[0.5em]-1\end{pmatrix} ≡ \begin{pmatrix}0.5\\-1\end{pmatrix}
    \binom{5}{2} ≡ 10
    \dbinom{n}{2} ≡ \frac{n(n-1)}{2}
    {5 \choose 2} ≡ 10
    2\binom{10}{3} ≡ 240
    ½ ≡ 0.5
    3½ ≡ 3.5
    ¾x ≡ \frac{3x}{4}
    x⁴ ≡ x^4
    x¹² ≡ x^{12}
    10⁻³ ≡ 0.001
    2ⁿ⁺¹ ≡ 2^{n+1}
    x₁+x₂ ≡ x_1+x_2
    α ≡ \alpha
    2πr ≡ 2\pi r
    λ+1 ≡ 1+\lambda
    5^\circ C ≡ 5
    5°C ≡ 5^\circ\text{C}
    5 m² ≡ 5
    1,000.99m² ≡ 1000.99
    12 cm² ≡ 12\text{ cm}^2
    All real numbers ≡ \mathbb{R}
    all real numbers ≡ (-\infty,\infty)
    \text{all real numbers} ≡ (-\infty, \infty)
    {1\over2} ≢ \frac{1}{3}
    x¹² ≢ x^1 \cdot 2
    5°C ≢ 5°F
    5 m² ≢ 5 cm²
    \binom{5}{2} ≢ \frac52
    \binom{n}{2} ≢ \frac{n^2}{2}
    all real numbers except zero ≢ \mathbb{R}
    # products of matrices, series, sizes
    \begin{matrix}1&2\end{matrix}\begin{matrix}3&0\\4&1\end{matrix} ≡ \begin{matrix}11&2\end{matrix}
    \begin{pmatrix}1&2\end{pmatrix}\begin{pmatrix}3\\4\end{pmatrix} ≡ \begin{pmatrix}11\end{pmatrix}
    \begin{matrix}0&1\\0&0\end{matrix}\begin{matrix}1\\0\end{matrix} ≢ \begin{matrix}1\end{matrix}
    \begin{pmatrix}1&2\end{pmatrix}\begin{pmatrix}3&4\end{pmatrix} ≢ \begin{pmatrix}3&8\end{pmatrix}
    \sum_{k=0}^{n-1} F_k F_{n-k-1} ≡ \sum_{k=0}^{n-1} F_{n-k-1} F_k
    F_n = \sum_{k=0}^{n-1} F_k F_{n-k-1} ≡ F_n = \sum_{k=0}^{n-1} F_{n-k-1}F_k
    \prod_{k=1}^{n} (2k-1) ≡ \prod_{k=1}^{n} (-1+2k)
    \sum_{k=0}^{n-1} F_k ≢ \sum_{k=1}^{n-1} F_k
    \sum_{k=1}^{n} k ≢ \prod_{k=1}^{n} k
    \sum_{k=1}^{n} k^2 ≢ \sum_{k=1}^{n} k^3
    1\leq|z|\leq \frac{3}{2} ≡ z \in [-\frac{3}{2}, -1] \cup [1, \frac{3}{2}]
    |x| < 3 ≡ (-3, 3)
    |x| \ge 2 ≡ (-\infty,-2] \cup [2,\infty)
    x < -2 \text{ or } x > 2 ≡ (-\infty,-2)\cup(2,\infty)
    |x| < 3 ≢ [-3, 3]
    |x| > 3 ≢ (-3, 3)
    1 < |x| \le 2 ≢ (1, 2]
    # words
    bca ≢ abc
    xyz ≢ zyx
    xyz ≡ x \cdot yz
    2abc ≡ 2cab
    \text{half of x is }5 ≢ 5
    \text{twice the answer is }10 ≢ 10
    \text{the answer isn't about }5 ≢ 5
    \text{the wrong answer is }5 ≢ 5
    \text{The value is }5 ≡ 5
    \text{The area of the triangle is }5 ≡ 5
    \text{one of the roots is }5 ≢ 5
    5\text{ thirty-seconds} ≢ 5
    3 sixty-thirds ≢ 3
    # decimal commas
    1000,99 ≡ 1000.99
    1,22 ≡ 1.22
    0,125 ≡ 0.125
    -3,14 ≡ -3.14
    2,5 ≡ 5, 2
    1,234 ≢ 1.234
    0,125 ≢ 125
    2, 5 ≢ 2.5
    (2,5) ≢ 2.5
    # plain sympy golds, second suite
    7 \sin(\frac{\pi}{5}x) + 1 ≡ 7*sin(pi*x/5)+1
    a^x \ln a ≡ ln(a)*a^x
    7z - \cos z + 11 ≡ 7*z-cos(z)+11
    3\cos(2\sqrt{35}t) ≡ 3*cos(sqrt(980/7)*t)
    \dfrac{8}{5 - 4\cos(q^2)} ≡ 2*8/(2 + 1*8 - 1*8*cos(q^2))
    -162\pi ≡ -pi*2*9^2
    e^{-8x} \cos(9x) ≡ x^0*e^(-8*x)*cos(9*x)
    5 - 5c ≡ -5*c+5*1
    \frac{\sqrt{3}}{3} ≡ 1/sqrt(3)
    (-\infty, 5) ≡ (-infinity,5)
    (-\infty, 5] ≢ (-infinity,5)
    T = 1.02x + 10 ≡ T = 1.02*x+10
    10\sqrt{2} ≢ 5*(1+sqrt(2))
    \sin(x) ≢ cos(x)
    e^{x} ≢ e^{2x}
    \frac{1}{x} ≢ \frac{1}{x^2}
    -1 + exp(16) ≡ e^{16} - 1
    pi/2 ≡ \dfrac{\pi}{2}
    14.0 + -1.0i ≡ 14 - i
    -2*pi ≡ -2\pi
    Theta(log log n) ≢ O(\log \log n)
    (0, 2\cos x \sin x) ≡ (0,2*cos(x)*sin(x))
    x**2 - 4*x + 4 ≡ (x-2)^2
    sqrt(x^2+1)/x ≡ \frac{\sqrt{1+x^2}}{x}
    # contest answers, second suite
    12^{10} ≡ 2^{20} \cdot 3^{10}
    847288609444 ≡ 3^{25} + 1
    1/2,1,2 ≡ \left\{\frac{1}{2}, 1, 2\right\}
    180 - 2\alpha ≡ 180^\circ - 2\alpha
    A(x)=\frac{1}{2}(x^2-x-4) ≡ \frac{1}{2}x^2 - \frac{1}{2}x - 2
    f(x)=2x^3+c ≢ f(x)=2x^3
    \{1,2,3\} ≢ \{1,2,4\}
    1 and odd prime numbers ≢ 1 and even prime numbers
    \frac{1}{2004!} ≢ \frac{1}{2006!}
    \frac{2^{2005}+1}{3 \cdot 2^{2006}} ≢ \frac{1}{3 \cdot 2^{2006}}
    1, 2, \ldots, n ≢ 1, 3, 5, \ldots, 2n-1
    1:2:3:\ldots ≢ 1:4:9:\ldots
    \sqrt{1/n} ≡ \frac{1}{\sqrt{n}}
    f(x) = 0 ≢ \forall x>0, f(x) = 0
    3*x-1*y+13=0 ≢ 3x + 4y + 14=0
    a=1 \text{ or } a=-2 ≡ a = -2, 1
    \{1,3\} \cup \{2,4\} ≡ \{1,2,3,4\}
    2^{u-2} ≡ \frac{2^u}{4}
    \frac{4}{\sqrt{3}} ≡ \frac{4\sqrt{3}}{3}
    \lfloor n/2 \rfloor ≢ n/2
    \left\lfloor \frac{n}{2} \right\rfloor ≡ \lfloor n/2 \rfloor
    \lceil \frac{n+1}{2} \rceil ≢ \lfloor \frac{n+1}{2} \rfloor
    2^{2024}-1 ≡ 2^{2024} - 1
    2^{2024} ≢ 2^{2023}
    3 \cdot 2^{1011} ≢ 2^{1011}
    \binom{2n}{n} ≢ \binom{2n}{n-1}
    \binom{2024}{1012} ≡ \binom{2024}{1012}
    \gcd(m,n) ≡ \gcd(m, n)
    n \equiv 1 \pmod{4} ≡ n\equiv 1 \pmod 4
    n \equiv 1 \pmod{4} ≢ n\equiv 3 \pmod 4
    2^{n-1}(n+2) ≡ (n+2)2^{n-1}
    (n-1)! ≢ n!
    \frac{(2n)!}{n!(n+1)!} ≢ \frac{(2n)!}{n!n!}
    n=p^k ≢ n=p
    # mixed numbers and fractions, second suite
    4 4/9 ≡ 40/9
    -4 4/9 ≡ -\frac{40}{9}
    +11 5/6 ≡ \frac{71}{6}
    4 4/9 ≢ 4
    0 4/9 ≡ \frac49
    4 4/0 ≢ 4
    11 + 4/9 ≢ 11 - 4/9
    4 4/9\% ≡ \frac{40}{900}
    4\,\frac{4}{9} ≡ \frac{40}{9}
    -1\frac{1}{2} ≢ -\frac12
    \frac{ 7 }{ 8 } ≡ 0.875
    7 / 8 ≡ \frac78
    \frac{\frac{3}{4}}{\frac{1}{2}} ≡ 1.5
    \frac{-3x+2}{-5} ≡ \frac{3x-2}{5}
    \frac{3}{4}x ≡ \frac{3x}{4}
    # letters and choices, second suite
    E ≢ \mathrm{E}*2
    C ≡ \text{C}
    \sqrt{67},-\sqrt{85} ≢ \sqrt{67}
    \textbf{(C) } ≡ C
    \text{(A) and (C)} ≢ \text{(A) and (D)}
    \mathrm{(D)}\ 12 ≢ 13
    \text{No} ≡ no
    \text{True} ≢ \text{Yes}
    \text{odd} ≢ \text{oddd}
    \text{Alice, Bob} ≢ \text{Alice}
    \text{Thursday} ≡ \text{thursday}.
    \text{red} ≢ \text{blue}
    MONDAY ≡ Monday
    \text{acute} ≢ \text{obtuse}
    parallelogram ≡ \text{Parallelogram}
    \text{cannot be determined} ≡ \text{Cannot be determined}
    (B) ≢ (E)
    # word problems, second suite
    \$4{,}500 ≡ 4500
    4500 \text{ USD} ≡ 4500
    \text{Rs. } 450 ≡ 450
    Rs 450 ≡ 450
    ₹450 ≡ 450
    ¥1200 ≡ 1200
    72 km/h ≡ 72
    72 \text{ km/h} ≡ 72\text{ km per hour}
    72 \text{ km/h} ≢ 72\text{ m/s}
    3\text{ hours and }20\text{ minutes} ≢ 3
    10 \mathrm{~cm} ≡ 10
    10 \mathrm{~cm}^2 ≡ 10
    10 \mathrm{~cm} ≢ 10 \mathrm{~mm}
    25 \mathrm{~km} / \mathrm{h} ≡ 25
    8 \, \text{N} ≡ 8
    9.8\ \mathrm{m/s^2} ≡ 9.8
    5 pm ≢ 5
    5:30 p.m. ≡ 5:30 p.m.
    25 years old ≡ 25
    17 students ≡ 17
    about 17 students ≡ 17
    at least 17 ≢ 17
    17 or more ≢ 17
    17+ ≢ 17
    ~17 ≡ 17
    17 (seventeen) ≢ 18
    1.5 dozen ≡ 18
    five ≢ 6
    half ≢ 2
    5/8 of the cake ≢ 8/5
    6 \text{ out of } 10 ≢ 6
    -\$20 ≡ -20
    \$-20 ≡ -20
    20\% \text{ off} ≢ 20
    increased by 20 ≢ 30
    # calculus and linear algebra, second suite
    \frac{x^3}{3}+C ≡ \frac{1}{3}x^3 + C
    \frac{x^3}{3}+C ≢ \frac{x^3}{3}
    y = Ce^{2x} ≡ y = C e^{2 x}
    y=C_1e^{x}+C_2e^{-x} ≡ y = C_1 e^x + C_2 e^{-x}
    \sinh x ≡ \frac{e^x-e^{-x}}{2}
    \arctan(x)+C ≡ \tan^{-1}x + C
    \ln|\sec x| ≡ -\ln|\cos x|
    \int_0^1 x\,dx ≢ 1
    \lim_{n\to\infty} a_n = 1 ≢ 2
    \frac{\partial f}{\partial x} = 2x ≡ 2x
    \begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix}^{-1} ≢ \begin{bmatrix} 1 & 2 \\ 0 & 1 \end{bmatrix}
    \langle 1, 2, 3 \rangle ≡ (1,2,3)
    \mathbf{i} + 2\mathbf{j} ≡ 2\mathbf{j}+\mathbf{i}
    \hat{i} + 2\hat{j} ≢ \hat{i} - 2\hat{j}
    \det A = -2 ≡ -2
    \log_{2}{3} \cdot \log_{3}{4} ≡ 2
    \sin^4 x - \cos^4 x ≡ -\cos 2x
    \csc^2 x - \cot^2 x ≡ 1
    e^{2\ln x} ≡ x^2
    \sqrt{2+\sqrt{3}} ≡ \frac{\sqrt6+\sqrt2}{2}
    \sqrt[4]{4} ≡ \sqrt{2}
    \cos\frac{\pi}{7}\cos\frac{2\pi}{7}\cos\frac{4\pi}{7} ≡ -\frac18
    \tan 15^\circ ≡ 2-\sqrt3
    \sin 18° ≡ \frac{\sqrt5-1}{4}
    # sets, intervals, domains, second suite
    x \neq 2 ≡ x \ne 2
    x\in\mathbb{R}, x\ne 2 ≢ x \in \mathbb{R}
    (-\infty, 2) \cup (2, \infty) ≢ (-\infty,\infty)
    \mathbb{R} \setminus \{2\} ≡ (-\infty,2)\cup(2,\infty)
    \{x : x > 2\} ≡ \{x:x>2\}
    [2, 3) \cup (3, 4] ≡ (3,4] \cup [2,3)
    2 < x < 3 \text{ or } x > 5 ≡ (2,3)\cup(5,\infty)
    x > 2 \text{ and } x < 5 ≢ (-\infty, 5)
    \{-2, 0, 2\} ≡ 0, \pm 2
    \{(1,2),(3,4)\} ≡ \{(3,4),(1,2)\}
    \{(1,2),(3,4)\} ≡ (1,2),(3,4)
    \{1, \ldots, 10\} ≢ \{1, 10\}
    [0, \pi] ≡ 0 \le \theta \le \pi
    \left(0,\frac{1}{e}\right) ≡ (0, e^{-1})
    0<a<1 ≡ (0,1)
    1 \leq x ≡ [1,\infty)
    \varnothing ≡ \emptyset
    x \in \emptyset ≡ \emptyset
    (2, \infty) ≢ [2, \infty)
"""  # by class: `same ≡ same`, `one ≢ another`; the verdicts were written before the code ran


def pairs(table):
    """(class, given, gold, verdict) of lines with a sign between two answers."""
    kind, found = "", []
    for line in filter(None, map(str.strip, table.splitlines())):
        if line.startswith("# "):
            kind = line[2:]
            continue
        sign = "≡" if " ≡ " in line else "≢"
        given, gold = line.split(f" {sign} ")
        found.append((kind, given, gold, sign == "≡"))
    return found


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, *_ in pairs(PAIRS)))
def test_math_judges_pairs_both_ways(kind):
    wrong = []
    for _, given, gold, verdict in (pair for pair in pairs(PAIRS) if pair[0] == kind):
        for left, right in ((given, gold), (gold, given)):
            if VERIFY["math"](boxed(left), right) != verdict:
                wrong.append((left, right, verdict))
    assert wrong == []


CONVENTIONS = r"""
    # percent
    50\% ≡ 0.5
    50\text{ percent} ≡ 0.5
    # decimals
    1,234 ≡ 1\,234
    3,14 ≡ 3.14
    1,234 ≢ 1.234
    3,14 ≡ 14, 3
    0.33 ≢ 1/3
    3.1416 ≢ \pi
    # brackets
    (1,234) ≡ (1, 234)
    # order
    \{1, 2, 2\} ≡ \{2, 1\}
    1, 2 ≡ 2, 1
    1, 2, 2 ≢ 1, 2
    (1, 2), (3, 4), (1, 2) ≡ (3, 4), (1, 2)
    (1, 2) ≢ (2, 1)
    # names
    x = 5 ≡ 5
    a = 1, b = 2 ≢ 1, 2
    2 + 3 = 5 ≡ 5
    2 + 3 = 6 = 5 ≢ 5
    \frac13 \approx 0.33 ≡ \frac13
    # units
    5\text{ cm} ≡ 5
    5\text{ cm} ≢ 5\text{ m}
    5 million ≡ 5000000
    5\text{ halves} ≢ 5
    # angles
    \sin 30 ≢ \frac12
    \sin 30^\circ ≡ \frac12
    90^\circ ≡ 90
    \log 100 ≡ 2
    # ratios
    3:5 ≡ 6:10
    3:5 ≡ \frac35
    3:30 ≢ 1:10
    # reals
    \sqrt{x^2} ≡ |x|
    i^2 ≡ -1
    \ln e^2 ≡ 2
    \sqrt[3]{-8} ≡ -2
    \mathbb{R} ≡ (-\infty, \infty)
    1 < x \le 2 ≡ (1, 2]
    \infty - \infty ≢ 0
    # empty set
    \emptyset ≡ \{\}
    \emptyset ≢ \text{none}
    \emptyset ≢ 0
    204_5 ≡ 204_{5}
    204_5 ≢ 54
    # words
    abc ≢ bca
    3abc ≡ 3bca
    abc ≡ a \cdot bc
"""  # for every line of the docstring of `same_answer`


@pytest.mark.parametrize("kind, given, gold, verdict", pairs(CONVENTIONS))
def test_math_keeps_its_conventions(kind, given, gold, verdict):
    assert rewards.same_answer(given, gold) == rewards.same_answer(gold, given) == verdict


ONE_WAY = rows(r"""
    28 | 28\%
    28 | 28\text{ percent}
    50 | 50\%
    12.5 | 12.5\%
    100 | 100 percent
""")  # right beside the gold answer as it is written, but not the other way round
LONG_DECIMALS = rows(r"""
    1/3 | 0.333333333333333
    \frac{1}{7} | 0.142857142857142857
    \sqrt{17} | 4.123105625617661
    \sqrt{10} | 3.16227766016838
    \ln 2 | 0.69314718055994531
    e | 2.718281828459045
    \frac{\pi}{2} | 1.5707963267948966
    -\sqrt2 | -1.4142135623730951
""")
NO_WAY = rows(r"""
    0.5 | 0.5\%
    2800 | 28\%
    29 | 28\%
    28\text{ cm} | 28\%
    \$28 | 28\%
    28^\circ | 28\%
    x | 28\%
    \sqrt2 | 1.4142
    \sqrt2 | 1.414213562
    \sqrt2 | 1.41421356239
    -\sqrt2 | 1.4142135623730951
    i\sqrt2 | 1.4142135623730951
    x | 0.333333333333333
    \infty | 0.333333333333333
    0.3 | 0.30000000000000004
    \frac13 | 0.33
    0.0000000000 | 1/10^{12}
    0.333333333 | 1/3
    1,234 | 1.234
    1,23 | 1.24
    1,23 | 123
    12,34,5 | 12.345
""")


def test_math_ignores_a_backslash_at_the_end():
    assert VERIFY["math"]("<answer>185\\</answer>", "185") == 1.0
    assert VERIFY["math"]("<answer>185\\</answer>", "18") == 0.0


@pytest.mark.parametrize("given, gold", ONE_WAY)
def test_math_reads_a_gold_percentage_as_it_is_written(given, gold):
    assert VERIFY["math"](boxed(given), gold) == 1.0
    assert VERIFY["math"](boxed(gold), given) == 0.0


@pytest.mark.parametrize("value, rounded", LONG_DECIMALS)
def test_math_reads_long_decimals_as_rounded(value, rounded):
    assert VERIFY["math"](boxed(value), rounded) == 1.0
    assert VERIFY["math"](boxed(rounded), value) == 1.0


@pytest.mark.parametrize("given, gold", NO_WAY)
def test_math_reads_no_more_into_percentages_and_decimals(given, gold):
    assert VERIFY["math"](boxed(given), gold) == 0.0


@pytest.mark.parametrize("given, gold", EQUAL)
def test_math_pays_equal_answers_both_ways(given, gold):
    assert VERIFY["math"](boxed(given), gold) == 1.0
    assert VERIFY["math"](boxed(gold), given) == 1.0


@pytest.mark.parametrize("given, gold", UNEQUAL)
def test_math_does_not_pay_unequal_answers_either_way(given, gold):
    assert VERIFY["math"](boxed(given), gold) == 0.0
    assert VERIFY["math"](boxed(gold), given) == 0.0


@pytest.mark.parametrize(
    "answer", sorted({cell for row in EQUAL + UNEQUAL for cell in row} - {"nan"})
)
def test_math_pays_an_answer_for_itself(answer):
    assert rewards.same_answer(answer, answer)


@pytest.mark.parametrize(
    "piece", ["√", "\\sqrt", "\\sqrt{", "\\frac", "\\frac1", "\\sin^", "\\log_", "\\sin(", "-"]
)
def test_math_reads_no_deeper_than_python_can(piece):
    times = rewards.MAX_EXPRESSION // len(piece)
    for text in (piece * times, piece * (times - 1) + "5"):
        assert not rewards.same_answer(text, "5")
        assert not rewards.same_answer("5", text)


def test_math_reads_a_few_roots_and_fractions_within_one_another():
    assert rewards.same_answer("√" * 10 + "1", "1")
    assert rewards.same_answer("\\sqrt{" * 25 + "1" + "}" * 25, "1")
    assert rewards.same_answer("\\frac{1}{" * 25 + "2" + "}" * 25, "\\frac12")


def test_math_is_exact_on_random_rationals():
    """a/b against the same number written otherwise, and against its neighbour a/b + 10^-60."""
    rng = random.Random(0)
    for _ in range(200):
        a, b, k = rng.randint(-(10**9), 10**9), rng.randint(1, 10**9), rng.randint(2, 99)
        given = boxed(f"\\frac{{{a * k}}}{{{b * k}}}")
        assert VERIFY["math"](given, f"{a}/{b}") == 1.0
        assert VERIFY["math"](given, f"{a * 10**60 + b}/{b * 10**60}") == 0.0


@pytest.mark.parametrize(
    "gold", [5, 5.0, "5", "so it is 5.\n#### 5", "thus $\\boxed{5}$", "<answer>5</answer>"]
)
def test_math_takes_numbers_and_whole_solutions_as_gold(gold):
    assert VERIFY["math"]("\\boxed{5}", gold) == 1.0
    assert VERIFY["math"]("\\boxed{6}", gold) == 0.0


@pytest.mark.parametrize("gold", [None, "", " ", True, [], {}, ["5"], b"5", object(), float("nan")])
def test_math_never_pays_an_unusable_gold_answer(gold):
    for text in ("", " ", "5", "True", "None", "[]", "{}", "nan", "NaN", str(gold)):
        assert VERIFY["math"](boxed(text), gold) == 0.0


@pytest.mark.parametrize(
    "completion, gold, paid",
    [
        ("the answer is 6", "6", 1),
        ("6 apples, 7 pears", "7", 1),
        ("6 apples, 7 pears", "6", 0),
        ("it costs $1,234.50.", "1234.5", 1),
        ("x = -5", "-5", 1),
        ("10-5", "5", 1),
        ("10-5", "-5", 0),
        ("6 or \\boxed{7}", "7", 1),
        ("\\boxed{7} then 6", "6", 0),
        ("<think>6</think> none", "6", 0),
        ("<think>6", "6", 0),
        ("no number", "6", 0),
        ("", "6", 0),
        ("7" * 2000, "7", 0),
        ("so 42" + " and on" * 1000, "42", 1),
        ("6 #### \\boxed{}", "6", 0),
        ("6 ####", "6", 0),
        ("6 <answer></answer>", "6", 0),
        ("so \\boxed{6", "6", 0),
        ("−5", "-5", 1),
        ("−5", "5", 0),
        ("it is –5", "-5", 1),
        ("- 5", "-5", 1),
        ("- 5", "5", 0),
        ("x = - 5.", "-5", 1),
        ("the answer is - 5", "-5", 1),
        ("the answer is -$5", "-5", 1),
        ("10 - 5", "-5", 0),
        ("10 − 5", "5", 1),
        ("5–10", "10", 1),
        ("so:\n- 5", "5", 1),
        ("it is .5", "0.5", 1),
        ("it is .5", "5", 0),
        ("so 1/2", "0.5", 1),
        ("so 1/2.", "2", 0),
        ("10 / 4", "2.5", 1),
        ("so 3 1/2", "3.5", 1),
        ("so 3 1/2", "0.5", 0),
        ("\\frac{3}{4}", "0.75", 1),
        ("so $-\\dfrac{3}{4}$", "-3/4", 1),
        ("2\\frac{3}{4}", "2.75", 1),
        ("\\frac{3}{4}", "4", 0),
        ("so 50%", "0.5", 1),
        ("so 50\\%", "1/2", 1),
        ("50 percent", "50%", 1),
        ("so 50%", "50", 0),
        ("5 million", "5", 0),
        ("5 million", "5000000", 1),
        ("2 Dozen eggs", "24", 1),
        ("7 tenths", "7", 0),
        ("2 thirds", "2", 0),
        ("2 and a half", "2", 0),
        ("5 squared", "5", 0),
        ("5 seconds", "5", 1),
        ("5 months and a day", "5", 1),
        ("42 is right", "42", 1),
    ],
)
def test_math_lenient_falls_back_on_the_last_number(completion, gold, paid):
    assert VERIFY["math_lenient"](completion, gold) == paid
    if "\\boxed{7}" not in completion:
        assert VERIFY["math"](completion, gold) == 0


# ---------------------------------------------------------------------- the other verifiers

COUNTDOWN = {"numbers": [3, 5, 2], "target": 13}


@pytest.mark.parametrize(
    "text",
    [
        "3*5-2",
        "5*3-2",
        "(3*5)-2",
        "-2+3*5",
        "3 * 5 - 2",
        "3×5−2",
        "3\\times5-2",
        "3\\cdot 5 - 2",
        "3*5-2=13",
        "3*5-2 = 13",
        "13=3*5-2",
        "13 = 3*5-2",
        "3*5-2.",
        "3*5-2 = 13.",
        "((3*5))-2",
        "$3*5-2$",
        "(3)(5)-2",
        "+3*5-2",
        "5*3+-2",
        "03*5-2",
    ],
)
@pytest.mark.parametrize(
    "wrap", ["{}", "<answer>{}</answer>", "\\boxed{{{}}}", "<think>3+5</think>{}"]
)
def test_countdown_pays_a_solution(text, wrap):
    assert VERIFY["countdown"](wrap.format(text), COUNTDOWN) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "13",
        "3*5",
        "3*5-2+0",
        "3*5-2-2+2",
        "5+5+3",
        "35-2*11",
        "3*5-1-1",
        "3*5+2",
        "3**5-2",
        "3^5-2",
        "3//5*2",
        "15-2",
        "3*5-2=14",
        "13=13=3*5-2",
        "13=3*5-2=13",
        "14=3*5-2",
        "13=",
        "3*5-2..",
        "13=13",
        "3*5-2 or 3+5+2",
        "3*5-2;3",
        "3*5-2,13",
        "int('3')*5-2",
        "3*5-2!",
        "3 5 2",
        "3*5-2\n13",
        "３*5-2",
        "3*٥-2",
        "3*5-(2",
        "3*5-2)",
        "3.0*5-2",
        "3e0*5-2",
        "3*5-2%1",
        "3*5-\\frac{2}{1}",
        "abs(3)*5-2",
        "3*5-2#",
        "9**9**9",
        "9**9**9**9",
        "98**97**96",
        "3*5-x",
        "<think>3*5-2</think>",
        "<think>3*5-2",
        "the solution is 3*5-2",
        "(" * 5000 + "3*5-2" + ")" * 5000,
        "3*5-2" + "+0" * 5000,
        "3 *5 -2 13",
        "1" * 1_000_000,
    ],
)
def test_countdown_does_not_pay(text):
    assert VERIFY["countdown"](text, COUNTDOWN) == 0.0


@pytest.mark.parametrize(
    "text, numbers, target, paid",
    [
        ("1/3*3", [1, 3, 3], 1, 1),
        ("8/(3-8/3)", [8, 3, 8, 3], 24, 1),
        ("8÷(3−8÷3)", [3, 3, 8, 8], 24, 1),
        ("1/2", [1, 2], 0, 0),
        ("1/(2-2)", [1, 2, 2], 0, 0),
        ("0/0", [0, 0], 0, 0),
        ("3 1/2*2", [3, 1, 2, 2], 7, 0),
        ("2 2+1", [2, 2, 1], 23, 0),
        ("12", [1, 2], 12, 0),
        ("2-5", [2, 5], -3, 1),
        ("2-5=-3", [2, 5], -3, 1),
    ],
)
def test_countdown_is_exact(text, numbers, target, paid):
    assert VERIFY["countdown"](text, {"numbers": numbers, "target": target}) == paid


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        13,
        [],
        {},
        {"numbers": [3, 5, 2]},
        {"target": 13},
        {"numbers": [], "target": 13},
        {"numbers": None, "target": 13},
        {"numbers": "352", "target": 13},
        {"numbers": [3, "5", 2], "target": 13},
        {"numbers": [3, 5, 2.5], "target": 13},
        {"numbers": [3, 5, 2], "target": "13"},
        {"numbers": [3, 5, 2], "target": None},
        {"numbers": [3, 5, 2], "target": True},
        {"numbers": [3, 5, 2], "target": float("nan")},
    ],
)
def test_countdown_refuses_malformed_problems(answer):
    assert VERIFY["countdown"]("3*5-2", answer) == 0.0
    with pytest.raises(rewards.UserError, match="countdown") as error:
        rewards.parse_reward("countdown").check_answer(answer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "B",
        "b",
        "(B)",
        "B.",
        "B)",
        "**B**",
        "\\boxed{B}",
        "\\boxed{\\text{B}}",
        "\\boxed{\\textbf{(B)}}",
        "<answer>B</answer>",
        "<answer>(B) Paris</answer>",
        "B. Paris",
        "B: the capital",
        "Answer: B",
        "The answer is B.",
        "The correct option is (B).",
        "the final answer is B",
        "<think>A</think>B",
        "#### B",
        "B. A dog",
        "B. I think so",
        "B. Vitamin B",
        "b) Vitamin B",
        "B - Paris",
        "--- B ---",
        "B – Paris",
        "(B) - a dog",
        "B. f(a) is 2",
        "option B",
    ],
)
def test_choice_pays(text):
    assert VERIFY["choice"](text, "B") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A",
        "C",
        "A or B",
        "B or A",
        "A, B",
        "B, A",
        "B and C",
        "A B C D",
        "(A)(B)",
        "B. or A.",
        "B) C) D)",
        "AB",
        "BB",
        "Berlin",
        "a big dog",
        "not B",
        "I think B is wrong",
        "<think>B</think>A",
        "<think>B",
        "<answer>B",
        "Б",
        "1",
        "B" * 1000,
        "the answer",
        "\\boxed{A} B",
        "B? A?",
        "B. Or rather C",
        "B. C is the answer",
        "B. A is the answer",
        "B. No: C is correct",
        "B. On reflection C is right",
        "B) 1\n(c) 2",
        "B) 1 c) 2",
        "B - C",
        "B - no, C is right",
        "A - B",
        "B-52",
    ],
)
def test_choice_does_not_pay(text):
    assert VERIFY["choice"](text, "B") == 0.0


@pytest.mark.parametrize(
    "completion, gold, paid",
    [
        ("Paris", "paris", 1),
        (" Paris \n", "Paris", 1),
        ("<answer>new   york</answer>", "New York", 1),
        ("7", 7, 1),
        ("Straße", "STRASSE", 1),
        ("\\boxed{a b}", "a b", 1),
        ("<think>x</think>Paris", "Paris", 1),
        ("Paris.", "Paris", 0),
        ("in Paris", "Paris", 0),
        ("", "Paris", 0),
        ("Pari", "Paris", 0),
        ("<think>Paris", "Paris", 0),
        ("", "", 0),
        (" ", " ", 0),
        ("None", None, 0),
        ("0.5", "1/2", 0),
    ],
)
def test_exact_compares_up_to_case_and_whitespace(completion, gold, paid):
    assert VERIFY["exact"](completion, gold) == paid


@pytest.mark.parametrize(
    "completion, gold, value",
    [
        ("the cat", "cat", 1),
        ("The cat sat.", "a cat sat", 1),
        ("cat", "dog", 0),
        ("", "dog", 0),
        ("the", "the", 0),
        ("a b", "b c", 2 / 3),  # the article goes: P = 1/1, R = 1/2
        ("red cat sat down", "red cat", 2 / 3),  # P = 2/4, R = 2/2
        ("cat cat cat", "cat", 1 / 2),  # counted once: P = 1/3, R = 1
        ("<answer>cat</answer> dog", "cat", 1),
        ("<think>cat</think>", "cat", 0),
        ("x-ray", "xray", 1),
    ],
)
def test_f1_is_the_harmonic_mean_of_word_overlap(completion, gold, value):
    assert VERIFY["f1"](completion, gold) == pytest.approx(value)


@pytest.mark.parametrize(
    "completion",
    [
        "<think>a</think><answer>b</answer>",
        "a</think><answer>b</answer>",
        " <think>\na\n</think>\n\n<answer>\nb</answer>\n",
        "<think>a < b > c</think> <answer><b></answer>",
    ],
)
def test_format_pays(completion):
    assert VERIFY["format"](completion) == 1.0
    assert VERIFY["format"](completion, "anything") == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "a",
        "<answer>b</answer>",
        "<think>a</think>",
        "<think>a</think>b",
        "<think>a<answer>b</answer>",
        "<think>a</think><answer>b",
        "<think></think><answer>b</answer>",
        "<think>a</think><answer> </answer>",
        "x<think>a</think><answer>b</answer>",
        "<think>a</think>x<answer>b</answer>",
        "<think>a</think><answer>b</answer>x",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a</think></think><answer>b</answer>",
        "<think><think>a</think><answer>b</answer>",
        "<think>a</think><answer><think></answer>",
        "<answer>b</answer><think>a</think>",
        "</think><answer>b</answer>",
        "<THINK>a</THINK><ANSWER>b</ANSWER>",
    ],
)
def test_format_does_not_pay(completion):
    assert VERIFY["format"](completion) == 0.0


@pytest.mark.parametrize(
    "completion, paid",
    [
        ("7+5=2;2*3=6#6", 1),
        ("#6", 1),
        ("#5#6", 1),
        ("6", 0),
        ("#6 ", 0),
        ("# 6", 0),
        ("#", 0),
        ("", 0),
        ("#66", 0),
        ("#6#", 0),
        ("#６", 0),
        ("6#5", 0),
    ],
)
def test_arithmetic_pays_the_digit_after_the_last_mark(completion, paid):
    assert VERIFY["arithmetic"](completion, "6") == paid


def test_arithmetic_takes_a_number_as_answer():
    assert rewards.VERIFIERS["arithmetic"]("7+5=2#2", 2) == 1.0
    assert rewards.VERIFIERS["arithmetic"]("7+5=2#2", 3) == 0.0


# ---------------------------------------------------------------------- code


@pytest.mark.parametrize(
    "source",
    [
        "def add(a, b):\n    return a + b",
        "add = lambda a, b: a + b",
        "print('noise')\ndef add(a, b):\n    print(a)\n    return a + b",
        "import math, collections, heapq, re\ndef add(a, b):\n    return math.floor(a + b)",
        "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    print(input())",
        "import sys\nsys.stdout.write('no newline')\ndef add(a, b):\n    return a + b",
    ],
)
def test_code_pays_a_right_function(source):
    assert VERIFY["code"](fenced(source), ADD) == 1.0


@pytest.mark.parametrize(
    "source",
    [
        "def add(a, b):\n    return a - b",
        "def add(a, b):\n    return 3",
        "def add(a, b):\n    return float(a + b)",
        "def add(a, b):\n    return str(a + b)",
        "def sub(a, b):\n    return a + b",
        "def add(a, b)\n    return a + b",
        "add = 3",
        "",
        "def add(a, b):\n    return None",
        "def add(a):\n    return a",
        "raise SystemExit(0)",
        "x = " + "(" * 300 + ")" * 300,
    ],
)
def test_code_does_not_pay_a_wrong_function(source):
    assert VERIFY["code"](fenced(source), ADD) == 0.0


def test_code_runs_the_last_closed_block_after_the_thinking():
    right = fenced("def add(a, b):\n    return a + b")
    wrong = fenced("def add(a, b):\n    return 0")
    assert VERIFY["code"](wrong + right, ADD) == 1.0
    assert VERIFY["code"]("```\ndef add(a, b):\n    return a + b\n```", ADD) == 1.0
    assert VERIFY["code"](f"<think>{wrong}</think>{right}", ADD) == 1.0
    for text in (
        right + wrong,
        f"<think>{right}</think>",
        f"<think>{right}",
        right + "```python\n",
        right.replace("`", ""),
        right[: right.rindex("```")],
        "",
        "```",
        "``````",
    ):
        assert VERIFY["code"](text, ADD) == 0.0


@pytest.mark.parametrize(
    "result, expected, paid",
    [
        ("1", 1, 1),
        ("True", 1, 0),
        ("1", True, 0),
        ("1.0", 1, 0),
        ("1", 1.0, 0),
        ("'1'", 1, 0),
        ("None", None, 1),
        ("[1, 2]", [1, 2], 1),
        ("(1, 2)", [1, 2], 1),
        ("[2, 1]", [1, 2], 0),
        ("[1, [2, True]]", [1, [2, 1]], 0),
        ("{'b': 1, 'a': 2}", {"a": 2, "b": 1}, 1),
        ("float('nan')", float("nan"), 0),
        ("float('inf')", float("inf"), 0),
        ("{1, 2}", [1, 2], 0),
        ("'ä'", "ä", 1),
        ("0.1 + 0.2", 0.3, 0),
        ("10 ** 5000", 1, 0),
        ("10 ** 40", 10**40, 1),
        ("''", None, 0),
    ],
)
def test_code_compares_type_strictly(result, expected, paid):
    answer = {"fn": "f", "cases": [[[], expected]]}
    assert VERIFY["code"](fenced(f"def f():\n    return {result}"), answer) == paid


@pytest.mark.parametrize(
    "source, paid",
    [
        ("a, b = map(int, input().split())\nprint(a + b)", 1),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), end='')", 1),
        ("print(3)", 0),
        ("print(sum(map(int, open(0).read().split())))", 1),
        ("a, b = map(int, input().split())\nprint(a + b)\nexit()", 1),
        ("a, b = map(int, input().split())\nprint(a + b)\nraise ValueError", 0),
        ("a, b = map(int, input().split())\nprint(a + b, a)", 0),
    ],
)
def test_code_runs_whole_programs(source, paid):
    assert VERIFY["code"](fenced(source), {"stdin": [["1 2\n", "3\n"], ["20 22", "42"]]}) == paid


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        [],
        {},
        {"fn": "add"},
        {"fn": "add", "cases": []},
        {"stdin": []},
        {"cases": ADD["cases"]},
        {"fn": "add", "cases": [[1]]},
        {"fn": "add", "cases": 3},
        {"stdin": [["1"]]},
        {"stdin": [["1", 1]]},
        {"stdin": [[1, "1"]]},
        {"fn": "add", "cases": [[1, 1]]},
        {"fn": "add", "cases": [["ab", 1]]},
        {"fn": "add", "cases": [[[1, 2], 3], [[1, 2], float("nan")]]},
        {"fn": "add", "cases": [[[1, 2], [float("inf")]]]},
        {"fn": "add(1, 2) or add", "cases": ADD["cases"]},
        {"fn": "class", "cases": ADD["cases"]},
        {"fn": "", "cases": ADD["cases"]},
        {"fn": 3, "cases": ADD["cases"]},
    ],
)
def test_code_refuses_malformed_tests(answer):
    assert VERIFY["code"](fenced("def add(a, b):\n    return a + b"), answer) == 0.0
    with pytest.raises(rewards.UserError, match="code"):
        rewards.parse_reward("code").check_answer(answer)


@pytest.mark.parametrize(
    "completion",
    [
        fenced(RIGHT) + "It prints:\n```\n3\n```\n",
        fenced(RIGHT) + "Output:\n```text\ndef add(a, b): ...\n```\n",
        fenced(RIGHT) + "Run it:\n```bash\npython add.py\n```\n",
        "1. So:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n",
        "```py\n" + RIGHT + "\n```",
        "```Python\r\n" + RIGHT + "\r\n```",
        "```\nprint('noise')\n```\n```\n" + RIGHT + "\n```\n```\n42\n```",
        "As ```add``` is short:\n" + fenced(RIGHT),
        fenced(RIGHT) + "Try:\n```\nresult = add(1, 2)\n```\n",
        '```python title="add.py"\n' + RIGHT + "\n```",
        "````python\n" + RIGHT + '\ntext = """\n```\n"""\n````',
        "~~~python\n" + RIGHT + "\n~~~",
        "~~~\n" + RIGHT + "\n~~~\n",
        "Between ``` and the like is code.\n" + fenced(RIGHT),
    ],
)
def test_code_runs_the_last_block_of_python(completion):
    assert VERIFY["code"](completion, ADD) == 1.0


@pytest.mark.parametrize(
    "body",
    [
        "import threading\n    found = []\n"
        "    thread = threading.Thread(target=lambda: found.append(a + b))\n"
        "    thread.start()\n    thread.join()\n    return found[0]",
        "from concurrent.futures import ThreadPoolExecutor\n"
        "    with ThreadPoolExecutor(4) as pool:\n        return sum(pool.map(abs, (a, b)))",
        "import asyncio\n    async def later(): return a + b\n    return asyncio.run(later())",
        "import decimal, fractions, itertools, random, datetime, string, bisect, functools\n"
        "    return int(decimal.Decimal(a) + b)",
    ],
    ids=["thread", "pool of threads", "asyncio", "modules"],
)
def test_code_runs_honest_programs(body):
    assert VERIFY["code"](fenced(f"def add(a, b):\n    {body}"), ADD) == 1.0


def test_code_runs_the_idiom_of_contests():
    source = """
        import sys, threading
        sys.setrecursionlimit(10 ** 6)
        threading.stack_size(1 << 26)
        def main():
            print(sum(map(int, sys.stdin.readline().split())))
        threading.Thread(target=main).start()"""
    assert VERIFY["code"](fenced(source), {"stdin": [["1 2\n", "3"]]}) == 1.0


def test_code_may_import_numpy_where_it_is_installed():
    pytest.importorskip("numpy")
    source = "import numpy\ndef add(a, b):\n    return int(numpy.array([a, b]).sum())"
    assert VERIFY["code"](fenced(source), ADD) == 1.0


def test_code_has_a_writable_folder_of_bounded_size():
    needs("namespaces")
    source = """
        import os, tempfile
        def add(a, b):
            with tempfile.TemporaryFile() as file:
                file.write(b'x')
            with open('mine', 'w') as file:
                file.write(str(a + b))
            with open('mine') as file:
                return int(file.read())"""
    assert VERIFY["code"](fenced(source), ADD) == 1.0
    source = """
        written = 0
        try:
            for name in range(1000):
                with open(str(name), 'wb') as file:
                    written += file.write(bytes(1 << 19))
        except OSError:
            print('full', written)"""
    word, written = run_program(source).split()
    assert word == "full" and int(written) < 32 * rewards.CODE_BYTES


@pytest.mark.slow
def test_code_cases_of_stdin_share_one_budget_of_time(monkeypatch):
    monkeypatch.setattr(rewards, "CODE_SECONDS", 1.5)
    source = fenced("import time\ntime.sleep(0.4)\nprint(input())")
    cases = [["1", "1"]] * 20
    start = time.monotonic()
    assert VERIFY["code"](source, {"stdin": cases}) == 0.0
    assert time.monotonic() - start < 6
    assert VERIFY["code"](source, {"stdin": cases[:1]}) == 1.0


@pytest.mark.slow
def test_code_does_not_charge_the_start_of_the_interpreter(monkeypatch):
    monkeypatch.setattr(rewards, "CODE_SECONDS", 0.4)
    cases = [["1", "1"]] * 40
    assert VERIFY["code"](fenced("print(input())"), {"stdin": cases}) == 1.0


@pytest.mark.parametrize(
    "line",
    [
        "import sys\ninput = sys.stdin.readline",
        "def print(*words): pass",
        "json = 0",
        "results = 0",
    ],
)
def test_code_calls_functions_whatever_names_the_program_takes(line):
    assert VERIFY["code"](fenced(f"{line}\n{RIGHT}"), ADD) == 1.0
    answer = {"fn": "json", "cases": ADD["cases"]}
    assert VERIFY["code"](fenced(RIGHT.replace("add", "json")), answer) == 1.0


def test_code_with_a_function_and_a_stdin_calls_the_function():
    assert VERIFY["code"](fenced(RIGHT), ADD | {"stdin": [["1", "1"]]}) == 1.0


def test_code_takes_a_program_longer_than_an_argument_may_be():
    long = f"text = '{'x' * 200_000}'\ndef add(a, b):\n    return a + b"
    assert VERIFY["code"](fenced(long), ADD) == 1.0


def layers():
    return json.loads(rewards.run_program("")[0])


def needs(*names):
    """Skips where the kernel lacks what a test is about."""
    missing = [name for name in names if not layers().get(name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)} for unprivileged processes here")


def run_program(source):
    """Output of a program, which must end in time."""
    start = time.monotonic()
    output = rewards.run_program(textwrap.dedent(source))[1]
    assert time.monotonic() - start < rewards.CODE_SECONDS + 5
    return output


def test_sandbox_names_its_layers():
    assert tuple(layers()) == rewards.LAYERS


@pytest.mark.parametrize("version, protects", [(1, False), (2, False), (3, True), (9, True)])
def test_sandbox_counts_on_landlock_only_where_it_forbids_to_truncate(version, protects):
    class Kernel:
        """One where every call succeeds."""

        def syscall(self, call, attributes, *arguments):
            return version if attributes is None else 0

    sandbox = rewards.Sandbox({"layers": ["landlock files"], "folder": ""})
    sandbox.libc, sandbox.allow = Kernel(), lambda *arguments: None
    sandbox.restrict_files()
    assert sandbox.layers == {"landlock files": protects}


def test_sandbox_reads_no_folder_that_a_user_put_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), sys.prefix + "-of-another"])
    found = rewards.Sandbox({"layers": []}).readable_folders()
    assert os.path.dirname(os.__file__) in found and "/usr/lib" in found
    assert not {str(tmp_path), sys.prefix + "-of-another"} & set(found)


def test_sandbox_allows_pairs_of_streams():
    source = """
        import socket
        a, b = socket.socketpair()
        a.send(b'through')
        print(b.recv(9).decode())"""
    assert run_program(source) == "through\n"


def test_code_strict_pays_only_with_every_layer(monkeypatch):
    completion = fenced(RIGHT)
    assert VERIFY["code_strict"](completion, ADD) == float(all(layers().values()))
    with monkeypatch.context() as patch:
        patch.setattr(rewards, "run_program", without_layer(rewards.run_program))
        with pytest.raises(rewards.UserError, match="layers are missing"):
            rewards.parse_reward("code_strict")
        rewards.parse_reward("code")


def without_layer(run):
    """run_program as it is where the kernel lacks one layer."""

    def missing(source, given="", **settings):
        found, output = run(source, given, **settings)
        return json.dumps(json.loads(found) | {"seccomp": False}), output

    return missing


ATTACKS = {  # each would pay if the verifier trusted the child
    "early exit": "import os\nos._exit(0)",
    "early exit in the function": "def add(a, b):\n    import os\n    os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "always equal": "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()",
    "int always equal": """
        class E(int):
            def __eq__(self, other):
                return True
        def add(a, b):
            return E(7)""",
    "text always equal": """
        class E(str):
            __eq__ = lambda self, other: True
            __hash__ = str.__hash__
        def add(a, b):
            return E('3')""",
    "forged line": "print('[3, 3]')\nimport os\nos._exit(0)",
    "forged line at exit": """
        import atexit
        atexit.register(lambda: print('[true, true]'))
        def add(a, b):
            return 0""",
    "forged output": """
        import os
        def add(a, b):
            os.lseek(1, 0, 0)
            os.write(1, b'{"namespaces": true}\\n[true, true]\\n')
            os._exit(0)""",
    "every small answer": """
        import itertools
        for pair in itertools.product(range(3), repeat=2):
            print(list(pair))
        def add(a, b):
            return 0""",
    "patched json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 0",
    "patched builtins": """
        import builtins
        builtins.all = lambda x: True
        builtins.float = lambda x: 1.0
        def add(a, b):
            return 0""",
    "patched input": """
        import builtins
        builtins.input = lambda: '[]'
        def add(a, b):
            return 0""",
    "frames": """
        import sys
        def add(a, b):
            frame, found = sys._getframe(), []
            while frame:
                found += [v for v in frame.f_locals.values() if isinstance(v, list)]
                found += [v for v in frame.f_globals.values() if isinstance(v, list)]
                frame = frame.f_back
            for values in found:
                for value in values:
                    if isinstance(value, list) and len(value) == 2 and value[0] == [a, b]:
                        return value[1]
            return 0""",
    "garbage collector": """
        import gc
        def add(a, b):
            for thing in gc.get_objects():
                if isinstance(thing, list) and len(thing) == 2 and thing[0] == [a, b]:
                    return thing[1]
            return 0""",
    "open files": """
        import os
        def add(a, b):
            for number in range(64):
                try:
                    print(os.pread(number, 10000, 0))
                except OSError:
                    pass
            return 0""",
    "a thread that goes on": """
        import threading, time
        def later():
            time.sleep(0.2)
            print('[3, 42.0]')
        threading.Thread(target=later).start()
        def add(a, b):
            return 0""",
}


# every layer, and then all but one of them
SWITCHED_OFF = [None, *[pytest.param(layer, marks=pytest.mark.slow) for layer in rewards.LAYERS]]


@pytest.mark.parametrize("off", SWITCHED_OFF)
def test_code_does_not_pay_attacks(off, monkeypatch):
    """With any one layer switched off, too: verdicts rest on none of them."""
    monkeypatch.setattr(rewards, "LAYERS", tuple(x for x in rewards.LAYERS if x != off))
    reward = rewards.parse_reward("code")
    texts = [fenced(source) for source in ATTACKS.values()]
    scores = reward.score(texts, [{"prompt": "", "answer": ADD}] * len(texts))
    assert [name for name, score in zip(ATTACKS, scores) if score.reward] == []


ALL = rewards.LAYERS
SPACES, FILES, TCP, SCOPES, CALLS = ALL
IN_A_CHILD = """
import os
child = os.fork()
if child == 0:
    {}
    os._exit(0)
check(-os.waitpid(child, 0)[1])
"""  # the program itself leads a session
EFFECTS = {  # what reaches out of the sandbox: the program, and the layers each of which stops it
    "reads a file": ("print(open('FOLDER/secret').read())", [FILES]),
    "lists a folder": ("import os\nassert 'secret' in os.listdir('FOLDER')", [FILES]),
    "reads an environment": ("print(open('/proc/PID/environ').read())", [FILES]),
    "reads memory": ("open('/proc/PID/mem', 'rb')", [FILES]),
    "writes a file": ("open('FOLDER/new', 'w').write('x')", [FILES]),
    "appends": ("open('FOLDER/secret', 'a').write('x')", [FILES]),
    "truncates": ("import os\nos.truncate('FOLDER/secret', 0)", [FILES, CALLS]),
    "removes a file": ("import os\nos.remove('FOLDER/secret')", [FILES]),
    "renames": ("import os\nos.rename('FOLDER/secret', 'FOLDER/other')", [FILES]),
    "makes a folder": ("import os\nos.mkdir('FOLDER/new')", [FILES]),
    "makes a link": ("import os\nos.link('FOLDER/secret', 'FOLDER/new')", [FILES]),
    "makes a symbolic link": ("import os\nos.symlink('/', 'FOLDER/new')", [FILES]),
    "makes a device": ("import os\nos.mkfifo('FOLDER/new')", [FILES]),
    "changes a mode": ("import os\nos.chmod('FOLDER/secret', 0o777)", [CALLS]),
    "changes an owner": ("import os\nos.chown('FOLDER/secret', UID, GID)", [CALLS]),
    "changes times": ("import os\nos.utime('FOLDER/secret', (1, 1))", [CALLS]),
    "sets an attribute": ("import os\nos.setxattr('FOLDER/secret', 'user.a', b'1')", [CALLS]),
    "signals": ("import os\nos.kill(PID, 0)", [SPACES, SCOPES, CALLS]),
    "stops a process": ("import os\nos.kill(PID, 19)", [SPACES, SCOPES, CALLS]),
    "changes a priority": ("import os\nos.setpriority(os.PRIO_PROCESS, PID, 19)", [SPACES, CALLS]),
    "changes a limit": (
        "import resource\nresource.prlimit(PID, resource.RLIMIT_CORE, (0, 0))",
        [SPACES, CALLS],
    ),
    "connects": (
        "import socket\nsocket.create_connection(('127.0.0.1', PORT))",
        [SPACES, TCP, CALLS],
    ),
    "listens": ("import socket\nsocket.create_server(('127.0.0.1', 0))", [TCP, CALLS]),
    "sends a datagram": (
        "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))",
        [SPACES, CALLS],
    ),
    "sends to a service by a pair": (
        "import socket\na, b = socket.socketpair(type=socket.SOCK_DGRAM)\n"
        "a.sendto(b'x', 'FOLDER/datagrams')",
        [CALLS],
    ),
    "connects a pair to a service": (
        "import socket\na, b = socket.socketpair(type=socket.SOCK_DGRAM)\n"
        "a.connect('FOLDER/datagrams')",
        [CALLS],
    ),
    "calls a service": ("import socket\nsocket.socket(1).connect('FOLDER/service')", [CALLS]),
    "calls an abstract service": (
        "import socket\nsocket.socket(1).connect('\\0ABSTRACT')",
        [SPACES, SCOPES, CALLS],
    ),
    "starts a process": ("import os\nif os.fork() == 0: os._exit(0)", [CALLS]),
    "becomes a program": (
        "import os\nos.execv(PYTHON, ['python', '-c', 'print(\"done\")'])",
        [CALLS],
    ),
    "leaves its session": (IN_A_CHILD.format("os.setsid()"), [CALLS]),
    "leaves its group": (IN_A_CHILD.format("os.setpgid(0, 0)"), [CALLS]),
    "makes namespaces": ("check(libc.unshare(0x10000000))", [CALLS]),
    "mounts": ("check(libc.mount(b'tmpfs', b'FOLDER', b'tmpfs', 0, None))", [FILES, CALLS]),
    "traces": ("check(libc.ptrace(0x4206, PID, 0, 0))", [SPACES, CALLS]),
    "shares memory": ("check(libc.shmget(0, 4096, 0o1600))", [CALLS]),
    "calls by a ring": ("check(libc.syscall(425, 1, ctypes.create_string_buffer(120)))", [CALLS]),
    "calls clone3": ("check(libc.syscall(435, ctypes.create_string_buffer(64), 64))", [CALLS]),
}
if os.uname().machine == "x86_64":
    EFFECTS |= {
        "calls by another table": ("check(libc.syscall(0x40000000 + 39))", [CALLS]),
        "calls as 32 bits do": (
            "import mmap\n"
            "page = mmap.mmap(-1, 4096, prot=7)\n"
            "page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))\n"  # getpid(), int 0x80
            "start = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
            "check(ctypes.CFUNCTYPE(ctypes.c_int)(start)())",
            [CALLS],
        ),
    }
PREPARED = """
import ctypes
libc = ctypes.CDLL(None)
def check(result):
    if result < 0:
        raise OSError
"""


@pytest.fixture
def outside(tmp_path):
    """What a program might reach on this machine, and the words of EFFECTS that stand for it."""
    (tmp_path / "secret").write_text("a secret")
    os.chmod(tmp_path, 0o755)
    abstract = f"test-of-the-sandbox-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        victim = subprocess.Popen(["sleep", "600"])
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        datagrams = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        datagrams.bind(("127.0.0.1", 0))
        letters = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        letters.bind(str(tmp_path / "datagrams"))
        for name in (str(tmp_path / "service"), "\0" + abstract):
            service = stack.enter_context(socket.socket(socket.AF_UNIX))
            service.bind(name)
            service.listen()
        yield {
            "FOLDER": str(tmp_path),
            "PYTHON": repr(sys.executable),
            "PID": str(victim.pid),
            "PORT": str(server.getsockname()[1]),
            "UDP": str(datagrams.getsockname()[1]),
            "UID": str(os.getuid()),
            "GID": str(os.getgid()),
            "ABSTRACT": abstract,
        }


def state(folder):
    """All that is outside, as far as a test can see it."""
    files = {}
    for path in sorted(Path(folder).iterdir()):
        found = path.lstat()
        files[path.name] = (found.st_mode, found.st_uid, found.st_mtime_ns, found.st_nlink)
    return files, (Path(folder) / "secret").read_text(), os.listxattr(Path(folder) / "secret")


def reached(names, words):
    """Effects, of those named, whose programs say that they were done."""

    def run(name):
        source = PREPARED + EFFECTS[name][0] + "\nprint('done')"
        for word, value in words.items():
            source = source.replace(word, value)
        return "done" in rewards.run_program(source)[1]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [name for name, done in zip(names, pool.map(run, names)) if done]


@pytest.mark.parametrize("off", SWITCHED_OFF)
def test_sandbox_has_no_effect_outside(off, monkeypatch, outside):
    """With every layer, and with one switched off: what the others stop does not happen."""
    there = {name for name, works in layers().items() if works and name != off}
    names = [name for name, (_, guards) in EFFECTS.items() if there & set(guards)]
    monkeypatch.setattr(rewards, "LAYERS", tuple(x for x in ALL if x != off))
    before = state(outside["FOLDER"])
    assert reached(names, outside) == []
    assert state(outside["FOLDER"]) == before


RARE = {  # not for every user, or not on every kernel, even without a sandbox
    *("reads an environment", "reads memory", "changes a priority", "changes a limit", "traces"),
    *("starts a process", "becomes a program", "makes namespaces", "mounts", "sets an attribute"),
    *("makes a device", "calls by a ring", "calls clone3", "calls by another table"),
    *("calls as 32 bits do", "changes an owner", "leaves its session", "leaves its group"),
}


@pytest.mark.parametrize("name", [name for name in EFFECTS if name not in RARE])
def test_sandbox_effects_happen_without_layers(name, monkeypatch, outside):
    """Else the test above would show nothing."""
    monkeypatch.setattr(rewards, "LAYERS", ())
    assert reached([name], outside) == [name]


def test_sandbox_keeps_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "a secret")
    assert "a secret" not in run_program("import os\nprint(dict(os.environ))")


def processes():
    """Ids of the children of `run_program`, told by the source that they were started with."""
    found = set()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it may end meanwhile
            if "class Sandbox" in (process / "cmdline").read_text():
                found.add(process.name)
    return found


def test_processes_of_the_sandbox_are_found(monkeypatch):
    """The tests below rely on it."""
    monkeypatch.setattr(rewards, "CODE_SECONDS", 10)
    runner = threading.Thread(target=rewards.run_program, args=("import time\ntime.sleep(2)",))
    runner.start()
    found = set()
    while len(found) < 3 and runner.is_alive():  # a busy machine starts them late
        found = processes()
    runner.join()
    assert len(found) == 3 and not processes() & found


LASTING = {
    "fork bomb": """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass""",
    "fork bomb of sessions": """
        import ctypes, os
        while True:
            try:
                if os.fork() == 0:
                    os.setsid()
                    ctypes.CDLL(None).prctl(1, 0)
            except OSError:
                pass""",
    "threads without end": """
        import _thread, threading, time
        threading.stack_size(32768)
        while True:
            _thread.start_new_thread(time.sleep, (60,))""",
    "daemon": """
        import os, time
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            pass
        time.sleep(60)""",
    "own session": """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            os.setsid()
        except OSError:
            pass
        time.sleep(60)""",
    "outlives its parent": """
        import ctypes, os, time
        ctypes.CDLL(None).prctl(1, 0)
        try:
            os.setsid()
        except OSError:
            pass
        hoard = bytearray(1 << 28)
        time.sleep(60)""",
    "twice orphaned": """
        import ctypes, os, time
        for _ in range(2):
            try:
                if os.fork():
                    os._exit(0)
                os.setsid()
            except OSError:
                pass
            ctypes.CDLL(None).prctl(1, 0)
        time.sleep(60)""",
    "stops itself": "import os, signal\nsignal.raise_signal(signal.SIGSTOP)",
    "blocks signals": """
        import signal, time
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        time.sleep(60)""",
    "kills its parent": """
        import os, signal, time
        for pid in (os.getppid(), 1, -1):
            try:
                if pid != 1 or os.getppid() == 1:
                    os.kill(pid, signal.SIGKILL) if pid > 1 else None
            except OSError:
                pass
        time.sleep(60)""",
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()",
    "busy loop": "while True: pass",
}


def left_running(before):
    """Children of `run_program` beyond those before; they get five seconds to be gone."""
    for _ in range(100):
        if not processes() - before:
            break
        time.sleep(0.05)
    return processes() - before


@pytest.mark.parametrize(
    "off", [None, *[pytest.param(off, marks=pytest.mark.slow) for off in (SPACES, CALLS)]]
)
def test_sandbox_leaves_nothing_running(off, monkeypatch):
    """With namespaces, or by seccomp and a hunt through the tree of processes, in their place."""
    monkeypatch.setattr(rewards, "CODE_SECONDS", 1)
    monkeypatch.setattr(rewards, "LAYERS", tuple(x for x in ALL if x != off))
    before = processes()
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(run_program, LASTING.values()))
    assert outputs == [""] * len(LASTING)
    assert time.monotonic() - start < 20
    assert left_running(before) == set()


ENDLESS = ["fork bomb", "fork bomb of sessions", "threads without end"]
TREES = ["daemon", "own session", "outlives its parent", "twice orphaned", *ENDLESS[:2]]


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("layers", [ALL, (CALLS,), ()], ids=["all", "seccomp alone", "none"])
def test_sandbox_counts_threads_and_processes(name, layers, monkeypatch):
    """It ends long before its time is over, whoever runs it, and few were there at once."""
    if os.getuid() and name != "threads without end":
        pytest.skip("the kernel allows no process at all")
    if CALLS in layers and name != "threads without end":
        pytest.skip("seccomp allows no process at all")
    monkeypatch.setattr(rewards, "LAYERS", layers)
    monkeypatch.setattr(rewards, "CODE_SECONDS", 20)
    before = processes()
    start = time.monotonic()
    assert rewards.run_program(LASTING[name])[1] == ""
    assert time.monotonic() - start < 10
    assert left_running(before) == set()


def test_sandbox_allows_dozens_of_threads():
    source = """
        import threading
        barrier = threading.Barrier(33)
        for _ in range(32):
            threading.Thread(target=barrier.wait).start()
        barrier.wait()
        print('done')"""
    assert run_program(source) == "done\n"


def test_sandbox_gives_the_program_no_priority():
    """Its watcher takes one, where it may."""
    source = "import os\nprint(os.getpriority(os.PRIO_PROCESS, 0))"
    assert run_program(source) == f"{os.getpriority(os.PRIO_PROCESS, 0)}\n"


GENERIC_CALLS = """
    setxattr 5 lsetxattr 6 fsetxattr 7 removexattr 14 lremovexattr 15 fremovexattr 16 ioctl 29
    ioprio_set 30 umount2 39 mount 40 pivot_root 41 truncate 45 chroot 51 fchmod 52 fchmodat 53
    fchownat 54 fchown 55 utimensat 88 unshare 97 syslog 116 ptrace 117 sched_setparam 118
    sched_setscheduler 119 sched_setaffinity 122 kill 129 tkill 130 tgkill 131 rt_sigqueueinfo 138
    setpriority 140 setpgid 154 setsid 157 mq_open 180 msgget 186 semget 190 shmget 194 socket 198
    socketpair 199 add_key 217 request_key 218 keyctl 219 clone 220 execve 221 migrate_pages 238
    move_pages 239 rt_tgsigqueueinfo 240 perf_event_open 241 prlimit64 261 setns 268
    process_vm_readv 270 process_vm_writev 271 kcmp 272 sched_setattr 274 bpf 280 execveat 281
    userfaultfd 282 pidfd_send_signal 424 io_uring_setup 425 io_uring_enter 426
    io_uring_register 427 open_tree 428 move_mount 429 fsopen 430 fsmount 432 pidfd_open 434
    clone3 435 pidfd_getfd 438 process_madvise 440 mount_setattr 442 fchmodat2 452 setxattrat 463
    removexattrat 466 open_tree_attr 467 file_setattr 469
"""  # of Linux's table for newer architectures, scripts/syscall.tbl, which aarch64 has


def test_sandbox_knows_the_numbers_of_calls_on_aarch64():
    words = GENERIC_CALLS.split()
    expected = dict(zip(words[::2], map(int, words[1::2])))
    sandbox = rewards.Sandbox
    table = [line.split() for line in sandbox.REFUSED.strip().splitlines()]
    found = {row[0]: int(row[2]) for row in table if row[0] != "#" and row[2] != "-"}
    for name in ("clone", "tgkill", "prlimit64", "ioctl", "socketpair"):
        found[name] = getattr(sandbox, name.upper())["aarch64"]
    found["clone3"] = sandbox.CLONE3
    assert found == expected
    missing = {row[0] for row in table if row[0] != "#" and row[2] == "-"}
    assert missing == {"fork", "vfork", "chmod", "chown", "lchown", "utime", "utimes", "futimesat"}


def test_sandbox_knows_the_numbers_of_calls_on_this_machine():
    """As far as the headers of the system's own C library are there, and know them."""
    if os.uname().machine != "x86_64" or not Path("/usr/include").is_dir():
        pytest.skip("no headers")
    headers = Path("/usr/include").glob("**/asm/unistd_64.h")
    known = dict(re.findall(r"#define __NR_(\w+) (\d+)", "".join(p.read_text() for p in headers)))
    table = [line.split() for line in rewards.Sandbox.REFUSED.strip().splitlines()]
    wrong = [row for row in table if row[0] in known and row[1] != known[row[0]]]
    assert wrong == []


@pytest.mark.parametrize("name", TREES)
def test_sandbox_finds_the_whole_tree_of_processes(name, monkeypatch):
    """Where there is no layer at all: its own process is the one that orphans come to."""
    monkeypatch.setattr(rewards, "CODE_SECONDS", 1)
    monkeypatch.setattr(rewards, "LAYERS", ())
    before = processes()
    assert run_program(LASTING[name]) == ""
    assert left_running(before) == set()


@pytest.mark.slow
def test_sandbox_leaves_nothing_running_after_200_hostile_programs(monkeypatch):
    monkeypatch.setattr(rewards, "CODE_SECONDS", 1)
    sources = [
        *LASTING.values(),
        *ATTACKS.values(),
        *(PREPARED + source for source, _ in EFFECTS.values()),
    ]
    before = processes()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(run_program, itertools.islice(itertools.cycle(sources), 200)))
    assert left_running(before) == set()


def test_sandbox_does_not_wait_for_who_holds_its_output(monkeypatch):
    monkeypatch.setattr(rewards, "CODE_SECONDS", 2)
    source = """
        import os, time
        try:
            child = os.fork()
        except OSError:
            child = 1
        if child == 0:
            time.sleep(60)
        print('done')"""
    start = time.monotonic()
    assert run_program(source) in ("done\n", "")
    assert time.monotonic() - start < 8


@pytest.mark.parametrize(
    "source",
    [
        "while True: print('x' * 100_000)",
        "x = [0] * (1 << 30)",
        "x = 'a' * (1 << 40)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "files = [open('/dev/null') for _ in range(1000)]\nprint('opened')",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=[9]).start()",
        "def f(): return f()\nf()",
        "import time\nwhile True: 9 ** 9 ** 9",
    ],
    ids=["output", "memory", "string", "parts", "open files", "threads", "recursion", "power"],
)
def test_sandbox_bounds_resources(source, monkeypatch):
    monkeypatch.setattr(rewards, "CODE_SECONDS", 2)
    assert rewards.run_program(source)[1] == ""


def test_sandbox_fills_no_disk(tmp_path):
    needs("landlock files")
    source = f"""
        import os
        for folder in ({str(tmp_path)!r}, '/tmp', '/dev/shm', '/var/tmp'):
            try:
                with open(os.path.join(folder, 'filled-by-a-program'), 'wb') as file:
                    file.write(b'x')
                print('wrote', folder)
            except OSError:
                pass
        print('done')"""
    assert run_program(source) == "done\n"
    assert not os.listdir(tmp_path)


def test_sandbox_bounds_a_file_even_without_landlock():
    source = "import resource\nprint(resource.getrlimit(resource.RLIMIT_FSIZE))"
    assert run_program(source) == f"({rewards.CODE_BYTES}, {rewards.CODE_BYTES})\n"


@pytest.mark.slow
def test_sandbox_programs_run_side_by_side():
    """Eight programs that sleep half a second each take about as long as the slowest."""
    reward = rewards.parse_reward("code")
    answer = {"fn": "f", "cases": [[[], 1]]}
    texts = [fenced("import time\ndef f():\n    time.sleep(0.5)\n    return 1")] * 8
    start = time.monotonic()
    scores = reward.score(texts, [{"prompt": "", "answer": answer}] * 8)
    assert [score.correct for score in scores] == [1.0] * 8
    if (os.cpu_count() or 1) > 1:
        assert time.monotonic() - start < 4 + 0.5 * 8 / 2


# ---------------------------------------------------------------------- totality and time


def hostile():
    rng = random.Random(0)
    yield from {
        "empty": "",
        "nul": "\0" * 1_000_000,
        "digits": "1" * 1_000_000,
        "boxed digits": boxed("1" * 999_000),
        "tag digits": "<answer>" + "9" * 1_000_000 + "</answer>",
        "open boxes": "\\boxed{" * 140_000,
        "open boxes and braces": "\\boxed{" + "{" * 999_000,
        "boxes of braces": ("\\boxed{" + "{" * 2000) * 490,
        "closed braces": "\\boxed{" + "{}" * 490_000,
        "nested boxes": "\\boxed{" * 120_000 + "}" * 120_000,
        "open tags": "<answer>" * 120_000,
        "200000 unclosed tags": "<think>" * 200_000,
        "closed tags": "</answer>" * 110_000,
        "both tags": "<answer></answer>" * 58_000,
        "thinking": "<think></think>" * 66_000,
        "hashes": "#" * 1_000_000,
        "hash lines": "####\n" * 200_000,
        "steps": "7+5=2;" * 160_000,
        "semicolons": ";" * 1_000_000,
        "backticks": "`" * 1_000_000,
        "fences": "```\n" * 250_000,
        "spaces": " " * 1_000_000,
        "lines": "\n" * 1_000_000,
        "words": "a " * 500_000,
        "text": "the cat, " * 110_000,
        "backslashes": "\\" * 1_000_000,
        "surrogates": "\ud800" * 300_000,
        "unicode": "é∑漢😀" * 120_000,
        "combining": "e\u0301" * 300_000,
        "digits of other scripts": "٣" * 500_000,
        "power": boxed("9^" * 400 + "9"),
        "tower": boxed("9**9**9**9"),
        "power tower": boxed("((((9^9)^9)^9)^9)^9"),
        "big power": boxed("(" + "9" * 290 + ")^{999}"),
        "factorial": boxed("((169!)!)!"),
        "many factorials": boxed("169!*" * 190 + "1"),
        "exponents": boxed("1e999*" * 150 + "1"),
        "letters": boxed("x" * 999),
        "letter sums": boxed("+".join(["1/x", "1/y"] * 120)),
        "fraction sums": boxed("+".join(f"1/{n}" for n in range(7919, 8080))),
        "roots": boxed("\\sqrt{" * 140 + "2" + "}" * 140),
        "list": boxed("1," * 499 + "1"),
        "set": boxed("\\{" + "x," * 490 + "1\\}"),
        "nested lists": boxed("[" * 400 + "1" + "]" * 400),
        "nested parens": boxed("(" * 490 + "1" + ")" * 490),
        "open parens": boxed("(" * 990),
        "minus": boxed("-" * 990 + "1"),
        "fracs": boxed("\\frac" * 190),
        "commas": boxed("," * 990),
        "equals": boxed("=" * 990),
        "thousands": boxed("1,234" * 190),
        "units": boxed("5 " + "cm " * 300),
        "unit almost": boxed("5 " + "cm " * 300 + "!"),
        "ands": boxed(" and" * 240),
        "quotes": boxed('"' * 990),
        "texts": boxed("\\text{" * 160),
        "pm": boxed("\\pm" * 330),
        "wide pm": boxed(" \\pm 1" * 160),
        "choice words": "is " * 3000 + "!",
        "choice marks": "(" * 9000 + "B" + "." * 900,
        "choice rest": "B. " + "x " * 4000 + "C",
        "choice brackets": "A" + ")" * 9900 + "B",
        "choice gaps": "A" + ") " * 4900 + "B",
        "ties": "~" * 9900,
        "unit ties": boxed("1" + "~" * 990 + "x"),
        "answer in text": "<answer>" + "the answer is " * 600 + "B</answer>",
        "json": "[" * 500_000,
        "stars": "*" * 1_000_000,
        "equations": boxed("x=" * 400 + "x"),
        "spaces in tags": "<answer>" + " " * 9000 + "x</answer>",
        "mixed": boxed("3 " * 490),
        "mixed fractions": boxed("3 1/2 " * 160),
        "decimals": boxed("1." * 490),
        "subscripts": boxed("x_" * 490),
        "functions": boxed("\\sin x+" * 140 + "1"),
        "other functions": boxed("+".join(f"\\arcsin({n}x)" for n in range(2, 50))),
        "list of logarithms": boxed(",".join(f"\\ln({n}+x)" for n in range(2, 60))),
        "many digits": boxed("10^{70}\\ln 2+" * 60 + "1"),
        "tower of functions": boxed("e^" * 400 + "e"),
        "vulgar fractions": boxed("½" * 990),
        "percent signs": boxed("1" + "%" * 980),
        "products of matrices": boxed("\\begin{matrix}x&1\\\\1&x\\end{matrix}" * 25),
        "series": boxed("\\sum_{k=1}^{n}" * 60 + "k"),
        "binomials": boxed("\\binom{x}{99}+" * 60 + "1"),
        "powers of pi": boxed("\\pi^{299}*" * 90 + "1"),
        "floors": boxed("⌊" * 400 + "1" + "⌋" * 400),
        "excluded points": boxed("\\mathbb{R}\\setminus\\{" + "1," * 400 + "1\\}"),
    }.items()
    for seed in range(60):
        size = 10 ** rng.randint(0, 5)
        yield (
            f"bytes {seed}",
            bytes(rng.randrange(256) for _ in range(min(size, 5000))).decode("latin-1")
            * (size // 5000 + 1),
        )
    pieces = [
        "\\boxed{",
        "}",
        "{",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "####",
        "#",
        "\\frac",
        "\\sqrt",
        "^",
        "(",
        ")",
        "[",
        "]",
        ",",
        "1",
        "23",
        ".",
        "x",
        "=",
        "<",
        "+",
        "-",
        "*",
        "/",
        "!",
        "%",
        "\\pm",
        "\\\\",
        "&",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "\\{",
        "\\}",
        " ",
        "\n",
        "cm",
        "\\text{",
        "```",
        ";",
        "and",
        "|",
        "_",
        "e",
        "i",
        "\\pi",
        "\\infty",
        "B",
        '"',
        "√",
        "²",
    ]
    for seed in range(400):
        yield f"pieces {seed}", "".join(rng.choices(pieces, k=rng.randint(1, 200)))
        yield f"boxed pieces {seed}", boxed("".join(rng.choices(pieces[9:], k=rng.randint(1, 40))))


HOSTILE = dict(hostile())


@pytest.mark.parametrize("name", [name for name in VERIFY if not name.startswith("code")])
def test_verifier_is_total_and_takes_no_time_on_hostile_text(name):
    gold = GOLD.get(name, "6")
    slow = []
    for label, text in HOSTILE.items():
        start = time.monotonic()
        value = outcome(VERIFY[name](text, gold))
        taken = time.monotonic() - start
        assert type(value) is float and 0.0 <= value <= 1.0, label
        if taken > 2:
            slow.append((label, taken))
    assert not slow


@pytest.mark.parametrize("name", [name for name in VERIFY if not name.startswith("code")])
def test_verifier_is_total_over_answers(name):
    golds = [
        None,
        True,
        0,
        -1,
        3.5,
        float("inf"),
        float("nan"),
        10**5000,
        "",
        "x" * 100_000,
        "\\frac{1}{",
        "\0",
        [],
        [1],
        {},
        {"numbers": 3},
        object(),
        b"",
        (),
    ]
    for gold, text in itertools.product(
        golds, ["", "6", "\\boxed{6}", "#6", "<answer>x</answer>", 6, None, b"6", ["6"]]
    ):
        value = outcome(VERIFY[name](text, gold))
        assert type(value) is float and 0.0 <= value <= 1.0


@pytest.mark.parametrize(
    "label",
    [label for label in HOSTILE if not label.startswith(("bytes", "pieces", "boxed pieces"))],
)
def test_code_is_total_on_hostile_text(label):
    start = time.monotonic()
    assert VERIFY["code"](HOSTILE[label], ADD) == 0.0
    assert time.monotonic() - start < 8


PIECES = r"""
    1 2 12 1,234 0.5 x y n e i f(x) x_1 2x 3\frac12 abc yes \pi \theta \infty \emptyset \mathbb{R}
    + - * / ^ ! ° \% = < \le \ne \approx \cdot \pm \mp \cup \cap , ; : ' | ( ) [ ] { } \{ \}
    \left( \right) \frac \frac12 \sqrt \sqrt[3] \sin \sin^2 \ln \log_2 \arctan \overline{3} _ _2
    \begin{pmatrix} \end{pmatrix} & \\ \text{cm} \text{or} \text{A} cm million and is
"""


@pytest.mark.parametrize("seed", range(4))
def test_math_raises_nothing_and_is_symmetric_on_random_latex(seed):
    """Without the net around verifiers. An answer is always itself."""
    rng = random.Random(seed)
    pieces = PIECES.split()
    for _ in range(1000):
        left, right = (" ".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in "ab")
        if rng.random() < 0.5:
            right = left.replace(rng.choice(pieces), rng.choice(pieces))
        agree = rewards.same_meaning(left, right)
        assert agree == rewards.same_meaning(right, left), (left, right)
        assert rewards.same_answer(left, right) >= agree
        assert rewards.same_answer(left + " ", left), left


# ---------------------------------------------------------------------- rewards

ROW = {"prompt": "1+5?", "answer": "6"}


def test_reward_weighs_terms_and_keeps_correctness_apart_from_format():
    """0.5 * 1 + 0.1 * 1 = 0.6; `format` is no part of correctness unless it stands alone."""
    reward = rewards.parse_reward(" 0.5*math+0.1 * format")
    good, bad = reward.score(
        ["<think>a</think><answer>6</answer>", "<think>a</think><answer>7</answer>"], [ROW, ROW]
    )
    assert good.terms == bad.terms | {"math": 1.0} == {"math": 1.0, "format": 1.0}
    assert (good.reward, good.correct, bad.correct) == (pytest.approx(0.6), 1.0, 0.0)
    assert bad.reward == pytest.approx(0.1)
    assert (
        rewards.parse_reward("format")
        .score(["<think>a</think><answer>7</answer>"], [ROW])[0]
        .correct
        == 1.0
    )
    half = rewards.parse_reward("3*math + exact").score(["\\boxed{6.0}"], [ROW])[0]
    assert (half.reward, half.correct) == (3.0, 0.75)
    assert reward.score([], []) == []


def test_reward_calls_users_functions_with_the_row(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent('''
        """A user's own."""
        SCALE = 2
        def whole(completion, answer, **row):
            return len(row) + (row["prompt"] == "1+5?") * 10
        def short(completion, answer):
            return SCALE * (completion == answer)
        def named(completion, answer, prompt, missing="none"):
            return prompt == "1+5?" and missing == "none"
        def negative(completion, answer):
            return -3
    ''')
    )

    def score(name, text="6"):
        return rewards.parse_reward(f"{path}:{name}").score([text], [ROW | {"level": 3}])[0]

    assert score("whole").reward == 12 and score("whole").correct == 1.0
    assert score("short").reward == 2 and score("short", "7").reward == 0
    assert score("named").terms == {"named": 1.0}
    assert score("negative").reward == -3 and score("negative").correct == 0.0
    both = rewards.parse_reward(f"math + 0.5*{path}:short").score(["\\boxed{6}"], [ROW])[0]
    assert (both.reward, both.correct, both.terms) == (
        1.0,
        pytest.approx(2 / 3),
        {"math": 1.0, "short": 0.0},
    )


@pytest.mark.parametrize(
    "body",
    [
        "raise KeyError('x\\n\\x1b[31m')",
        "return None",
        "return 'a'",
        "return float('nan')",
        "return float('inf')",
        "return [(1, float('nan'))]",
        "return []",
        "return [1]",
        "return 1/0",
    ],
)
def test_reward_survives_a_users_faults(body, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"def broken(completion, answer):\n    {body}\n")
    reward = rewards.parse_reward(f"math + {path}:broken")
    scores = reward.score(["\\boxed{6}", "\x1b[31m" + "long " * 1000], [ROW, ROW])
    assert [score.reward for score in scores] == [1.0, 0.0]
    assert scores[0].terms == {"math": 1.0, "broken": 0.0}
    assert reward.faults == 2
    assert "broken" in reward.fault and "boxed{6}" in reward.fault
    assert reward.fault.isprintable() and len(reward.fault) < 500


@pytest.mark.parametrize(
    "spec, words",
    [
        ("mth", ["mth", "'math'"]),
        ("", ["expected"]),
        ("math + ", ["expected"]),
        ("x*math", ["x"]),
        ("0*math", ["weight"]),
        ("nan*math", ["weight"]),
        ("-1*math", ["weight"]),
        ("nowhere.py:fn", ["nowhere.py"]),
        ("math + fromat", ["fromat", "'format'"]),
        ("math:fn", ["math"]),
    ],
)
def test_parse_reward_says_what_is_wrong(spec, words):
    with pytest.raises(ValueError) as error:
        rewards.parse_reward(spec)
    message = str(error.value)
    assert message.startswith("--reward") and "\n" not in message
    assert all(word in message for word in words)
    assert "file.py:function" in message
    assert ("countdown" in message) == (".py:" not in spec)  # ours are no help for a file's


def test_a_verifier_is_added_by_a_decorator(monkeypatch):
    """Registered under its name, total there, itself as it was; `need` refuses a gold answer."""
    monkeypatch.setattr(rewards, "VERIFIERS", dict(rewards.VERIFIERS))

    @rewards.verifier
    def shorter(completion, answer, prompt=""):
        rewards.need(answer > 0, "a length is positive")
        return len(completion) < answer * len(prompt)

    assert shorter("abc", 1, "abcd") is True
    reward = rewards.parse_reward("shorter + 0.5*exact")
    score, zero = reward.score(["abc", "abc"], [{"prompt": "abcd", "answer": n} for n in (1, 0)])
    assert score.terms == {"shorter": 1.0, "exact": 0.0} and zero.reward == 0
    reward.check_answer(1)
    with pytest.raises(rewards.UserError, match="shorter.*a length is positive"):
        reward.check_answer(-1)


def test_check_answer_leaves_a_users_function_alone(tmp_path):
    """A user's function may have the name of a verifier, and take any answer."""
    (tmp_path / "mine.py").write_text("def math(completion, answer): return answer == {}\n")
    reward = rewards.parse_reward(f"{tmp_path / 'mine.py'}:math")
    assert reward.check_answer({}) is None
    assert reward.score(["x"], [{"prompt": "", "answer": {}}])[0].correct == 1.0


def test_parse_reward_names_the_users_file_and_its_error(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "lines.py").write_text("raise RuntimeError('one\\ntwo')\n")
    (tmp_path / "fine.py").write_text("def f(completion, answer): return 1\nNUMBER = 3\n")
    for spec, words in (
        ("broken.py:f", ["broken.py", "nothing_of_that_name"]),
        ("syntax.py:f", ["syntax.py"]),
        ("lines.py:f", ["lines.py", "one"]),
        ("fine.py:g", ["fine.py", "'g'"]),
        ("fine.py:NUMBER", ["NUMBER"]),
    ):
        with pytest.raises(ValueError) as error:
            rewards.parse_reward(str(tmp_path / spec))
        assert all(word in str(error.value) for word in ["--reward", *words])
        assert "\n" not in str(error.value)


def test_a_name_stands_once_in_a_sum(tmp_path):
    """Two functions of one name would else overwrite each other in silence."""
    for name, value in (("a", 1.0), ("b", 0.0)):
        (tmp_path / f"{name}.py").write_text(f"def f(completion, answer):\n    return {value}\n")
    with pytest.raises(rewards.UserError, match="twice"):
        rewards.parse_reward(f"{tmp_path}/a.py:f + {tmp_path}/b.py:f")


CHECKED = {  # a user's function, and words of the sentence that refuses it
    "def f(completion): return 1": ["f(completion)", "def f(completion, answer)"],
    "def f(): return 1": ["f()", "def f(completion, answer)"],
    "def f(completion, answer, level): return 1": ["'level'", "prompt, answer"],
    "def f(completion, answer, *, level): return 1": ["'level'", "prompt, answer"],
    "def f(completions, **kwargs): return [1.0 for _ in completions]": ["TRL", "def f(completion"],
    "def f(prompts, completions, **kwargs): return [1.0]": ["TRL", "def f(completion"],
    "def f(data_source, solution_str, ground_truth, extra_info=None): return 1": ["verl"],
    "async def f(completion, answer): return 1": ["async"],
    "def f(completion, answer): return None": ["None", "number"],
    "def f(completion, answer): return 1 if completion == answer else None": ["None", "number"],
    "def f(completion, answer): return float('nan')": ["nan", "number"],
    "def f(completion, answer): return 1e300": ["1e+300", "number"],
    "def f(completion, answer): return '1'": ["'1'", "number"],
    "def f(completion, answer): return {'score': 1}": ["score", "number"],
    "def f(completion, answer): yield 1": ["generator", "number"],
    "def f(completion, answer): return [1.0, 0.5]": ["[1.0, 0.5]", "number"],
    "def f(completion, answer): return []": ["[]", "number"],
    "def f(completion, answer): return anwser": ["raises", "anwser"],
    "def f(completion, answer): raise SystemExit(3)": ["raises", "SystemExit"],
}


@pytest.mark.parametrize("source", CHECKED)
def test_check_refuses_functions_that_cannot_work(source, tmp_path):
    """In one sentence, before any model is loaded."""
    (tmp_path / "mine.py").write_text(source)
    reward = rewards.parse_reward(f"math + {tmp_path}/mine.py:f")
    with pytest.raises(rewards.UserError) as error:
        reward.check([ROW])
    message = str(error.value)
    assert message.startswith("--reward f") and "\n" not in message and len(message) < 400
    assert all(word in message for word in CHECKED[source])


@pytest.mark.parametrize(
    "source",
    [
        "def f(completion, answer): return completion == answer",
        "def f(text, gold, prompt): return len(prompt) > 3",
        "def f(completion, answer, *, prompt='', level=0): return -1",
        "def f(completion, answer, **row): return row['prompt'] == '1+5?'",
        "def f(*arguments): return len(arguments) / 2",
        "def f(completion, answer): return [(1, 0.5), (2, 1)]",
        "def f(completion, answer): return int(completion)",  # raises on some alone
        "class F:\n    def __call__(self, completion, answer): return 1\nf = F()",
    ],
)
def test_check_accepts_functions_that_can_work(source, tmp_path):
    (tmp_path / "mine.py").write_text(source)
    reward = rewards.parse_reward(f"{tmp_path}/mine.py:f")
    assert reward.check([ROW]) is None and reward.faults == 0
    assert reward.score(["6"], [ROW])[0].reward != 0


def test_check_asks_nothing_of_our_own_verifiers():
    for name in rewards.VERIFIERS:
        if not name.startswith("code"):
            assert rewards.parse_reward(name).check([{"prompt": "?", "answer": "6"}]) is None


def test_a_users_file_can_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("RIGHT = 1\n")
    (tmp_path / "later_neighbour_of_mine.py").write_text("HALF = 0.5\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour_of_mine import RIGHT\n"
        "def f(completion, answer):\n"
        "    from later_neighbour_of_mine import HALF\n"
        "    return HALF * RIGHT\n"
    )
    reward = rewards.parse_reward(f"{tmp_path}/mine.py:f")
    assert reward.score(["x"], [ROW])[0].reward == 0.5


@pytest.mark.parametrize(
    "spec, first",
    [
        ("mth", "--reward mth: rewards.py has no verifier 'mth', did you mean 'math'?"),
        ("0*math", "--reward 0*math: a weight is positive"),
        ("math+math", "--reward math+math: a name stands there twice"),
        ("nowhere.py:f", "--reward nowhere.py:f: FileNotFoundError: "),
        ("mine.py", "--reward mine.py: of which function? mine.py:FUNCTION"),
    ],
)
def test_parse_reward_puts_the_reason_first(spec, first):
    with pytest.raises(rewards.UserError) as error:
        rewards.parse_reward(spec)
    assert str(error.value).startswith(first)


@pytest.mark.parametrize("value", ["1e300", "-1e300", "10 ** 400", "[(1, 1e300), (2, 1.0)]"])
def test_no_reward_is_beyond_float32(value, tmp_path):
    """Else its square, in a standard deviation, is infinite."""
    (tmp_path / "mine.py").write_text(f"def f(completion, answer): return {value}\n")
    reward = rewards.parse_reward(f"{tmp_path}/mine.py:f")
    (score,) = reward.score(["x"], [ROW])
    assert score == (0.0, 0.0, {"f": 0.0}, []) and reward.faults == 1
    with pytest.raises(rewards.UserError, match="weight"):
        rewards.parse_reward("1e300*math")


@pytest.mark.parametrize(
    "content, words",
    [
        ('[{"prompt": "a", "answer": "1"}]', ["JSON array", "an object a line"]),
        ('[\n  {"prompt": "a",\n   "answer": "1"}\n]', ["JSON array", "an object a line"]),
        ("prompt,answer\na,1", ["line 1", "JSON"]),
        ('{"prompt": "a", "solution": "1"}', ["line 1", "answer", "found prompt, solution"]),
        ('{"prompt": "a", "answer": null}', ["line 1", "None", "math"]),
        ("[" * 100_000, ["JSON array"]),
        ('{"a":' * 100_000, ["line 1"]),
        ("PAR1\0\1", ["line 1"]),
        ("3", ["line 1", "found 3"]),
        ("\n\n", ["empty"]),
        ('{"prompt": 12, "answer": "1"}', ["line 1", "field prompt: found 12, expected text"]),
        ('{"prompt": [], "answer": "1"}', ["line 1", "messages", "found none"]),
        ('{"prompt": ["a"], "answer": "1"}', ["line 1", "role", "found 'a'"]),
        (
            '{"prompt": [{"role": "user"}], "answer": "1"}',
            ["line 1", "content", "{'role': 'user'}"],
        ),
        (
            '{"prompt": [{"role": "user", "content": ["a"]}], "answer": "1"}',
            ["line 1", "with texts", "['a']"],
        ),
        (
            '{"prompt": [{"role": "user", "content": "a\\ud800"}], "answer": "1"}',
            ["line 1", "surrogates"],
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}, '
            '{"role": "assistant", "content": "b"}], "answer": "1"}',
            ["line 1", "last message is the assistant's"],
        ),
    ],
)
def test_read_rows_says_what_to_do_in_one_sentence(content, words, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(rewards.UserError) as error:
        rewards.read_rows(str(path), "--data", rewards.parse_reward("math"))
    message = str(error.value)
    assert message.startswith(f"--data {path}") and "\n" not in message and len(message) < 700
    assert all(word in message for word in words)


def test_users_function_gets_the_fields_it_asks_for(tmp_path):
    """Two stars in a default ask for nothing; `question` stays where it also is the prompt; and a
    function that exits is one that raises."""
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "def bold(completion, answer, marker='**'): return marker in completion\n"
        "def asks(completion, answer, question, **row): return question == row['prompt'] == 'q'\n"
        "def exits(completion, answer): sys.exit(3)\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    mine = rewards.parse_reward(f"{tmp_path}/mine.py:bold + {tmp_path}/mine.py:asks")
    rows = rewards.read_rows(str(tmp_path / "rows.jsonl"), "--data", mine)
    assert mine.score(["**x**"], rows)[0].terms == {"bold": 1.0, "asks": 1.0}
    exits = rewards.parse_reward(f"{tmp_path}/mine.py:exits")
    assert exits.score(["x"], rows)[0].reward == 0 and exits.faults == 1
    (tmp_path / "gone.py").write_text("raise SystemExit\n")
    with pytest.raises(rewards.UserError):
        rewards.parse_reward(f"{tmp_path}/gone.py:f")


@pytest.mark.parametrize("name", list(VERIFY))
def test_check_answer_accepts_what_can_be_used(name):
    assert rewards.parse_reward(name).check_answer(GOLD.get(name, "6")) is None


@pytest.mark.parametrize(
    "name, answer",
    [
        (name, answer)
        for name in ("math", "math_lenient", "exact", "f1", "choice", "arithmetic")
        for answer in (None, "", "  ", [], {}, True)
    ]
    + [("choice", "Paris"), ("f1", "the"), ("math", "<think>5"), ("math", "x" * 20_000)],
)
def test_check_answer_refuses_what_cannot(name, answer):
    with pytest.raises(rewards.UserError) as error:
        rewards.parse_reward(f"{name} + 0.1*format").check_answer(answer)
    reason = str(error.value)
    assert name in reason and "\n" not in reason and len(reason) < 200


def test_scoring_1024_gsm8k_like_completions_is_fast():
    """Far under a second; asserted loosely, for a loaded machine."""
    solution = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n" * 8
    texts = [f"<think>{solution}</think>\nThe answer is \\boxed{{{n:,}}}." for n in range(1024)]
    table = [{"prompt": "?", "answer": str(n)} for n in range(1024)]
    start = time.monotonic()
    scores = rewards.parse_reward("math + 0.1*format").score(texts, table)
    assert time.monotonic() - start < 2
    assert all(score.correct == 1.0 for score in scores)


# ---------------------------------------------------------------------- rewards of single steps


@pytest.mark.parametrize(
    "completion, expected",
    [
        ("7+5=2;2*3=6#6", [(6, 1), (12, 1), (13, 1)]),
        (
            "7+5=3;3*3=9#9",
            [(6, 0), (12, 1), (13, 0)],
        ),  # an error costs its own step, and the outcome
        ("7+5=2;2*3=5#6", [(6, 1), (12, 0), (13, 1)]),
        ("7+5=2;3*3=9#9", [(6, 1), (12, 0), (13, 0)]),  # does not take up the last result
        ("7+5=2;2+3=5#5", [(6, 1), (12, 0), (13, 0)]),  # not the prompt's operation
        ("7+5=2;2*3=6;6+0=6#6", [(6, 1), (12, 1), (19, 1)]),  # more operations earn nothing
        ("7+5=2#2", [(6, 1), (7, 0)]),
        ("7+5=2;2*3", [(6, 1), (10, 0), (9, 0)]),
        ("#6", [(1, 0), (2, 1)]),
        ("", [(1, 0), (0, 0)]),
        ("7+5=٢;٢*3=6#6", [(6, 0), (12, 0), (13, 1)]),
        ("7+5=2;2*3=6", [(6, 1), (12, 1), (11, 0)]),
    ],
)
def test_arithmetic_steps_pay_each_operation(completion, expected):
    """(end in characters, reward), the outcome last: 7+5*3 from left to right modulo 10 is 6."""
    assert VERIFY["arithmetic_steps"](completion, "6", prompt="7+5*3=") == expected


def test_arithmetic_steps_of_every_right_answer_are_all_right():
    task = rewards.TASKS["arithmetic"]
    for row in itertools.islice(rewards.problems(task, seed=5), 200):
        steps = VERIFY["arithmetic_steps"](
            rewards.solve(row["prompt"]), row["answer"], row["prompt"]
        )
        assert len(steps) == len(re.findall("[+*]", row["prompt"])) + 1
        assert all(value == 1 for _, value in steps)


def test_a_list_of_steps_is_weighted_and_its_last_entry_is_the_reward(tmp_path):
    (tmp_path / "steps.py").write_text(
        "def steps(completion, answer):\n    return [(1, 0.5), (2, True), (3, 0.25)]\n"
        "def wrong(completion, answer):\n    return [(1, float('nan')), (2, 1.0)]\n"
        "def empty(completion, answer):\n    return []\n"
    )
    reward = rewards.parse_reward(f"2*{tmp_path / 'steps.py'}:steps + 0.5*exact")
    (score,) = reward.score(["6"], [{"answer": "6"}])
    assert score == (
        1.0,
        pytest.approx((2 * 0.25 + 0.5) / 2.5),
        {"steps": 0.25, "exact": 1.0},
        [(1, 1.0), (2, 2.0)],
    )
    for name in ("wrong", "empty"):
        reward = rewards.parse_reward(f"{tmp_path / 'steps.py'}:{name}")
        (score,) = reward.score(["6"], [{"answer": "6"}])
        assert score == (0.0, 0.0, {name: 0.0}, []) and reward.faults == 1


def test_the_verifier_of_reward_models_needs_a_score():
    """0 and a fault where nobody scored; the score itself, and its sigmoid as correctness, else."""
    reward = rewards.parse_reward("model")
    (missing,) = reward.score(["x"], [{"prompt": "", "answer": ""}])
    assert missing.reward == missing.correct == 0 and reward.faults == 1 and "nan" in reward.fault
    found = reward.score(["x", "y"], [{"answer": "", "reward_model": x} for x in (7.0, 9.0)])
    assert [score.reward for score in found] == [7.0, 9.0]
    assert [score.correct for score in found] == pytest.approx(
        [1 / (1 + 2.718281828459045**-x) for x in (7, 9)], abs=1e-12
    )


# ---------------------------------------------------------------------- shaping


def test_soft_overlong_penalty_is_eq_13():
    """L_max 20, L_cache 4: 0 up to 16, (16 - |y|) / 4 up to 20, -1 beyond."""
    values = [
        rewards.soft_overlong_penalty(length, 20, 4)
        for length in (0, 15, 16, 17, 18, 19, 20, 21, 100)
    ]
    assert values == [0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1]


def test_repetition_penalty_is_the_share_of_repeated_ngrams():
    assert (
        rewards.repetition_penalty([], 2)
        == rewards.repetition_penalty([1], 2)
        == rewards.repetition_penalty([1, 2, 3], 2)
        == 0
    )
    assert rewards.repetition_penalty([1, 2, 1, 2], 2) == pytest.approx(-1 / 3)  # (1 2) (2 1) (1 2)
    assert rewards.repetition_penalty([7] * 101, 2) == pytest.approx(-0.99)
    assert rewards.repetition_penalty([1, 2, 3, 4] * 2) == pytest.approx(
        -1 / 5
    )  # 5 four-grams, 4 kinds


# ---------------------------------------------------------------------- built-in tasks


DEMONSTRATED = [name for name, task in rewards.TASKS.items() if task.demonstration]


def test_the_built_in_policies_have_tasks():
    assert set(DEMONSTRATED) >= {"arithmetic", "countdown"}


@pytest.mark.parametrize("name", DEMONSTRATED)
def test_task_demonstrations_are_well_formed_and_often_wrong(name):
    task = rewards.TASKS[name]
    reward = rewards.parse_reward(task.verifier)
    rng = random.Random(0)
    correct = 0
    for problem in itertools.islice(rewards.problems(task, seed=0), 1000):
        demonstration = task.demonstration(problem, rng)
        assert set(problem["prompt"] + demonstration) <= set(task.alphabet)
        assert len(demonstration) < task.max_new_tokens
        assert reward.check_answer(problem["answer"]) is None
        correct += reward.score([demonstration], [problem])[0].correct
    assert 0.05 < correct / 1000 < 0.6
    assert reward.faults == 0


@pytest.mark.parametrize("name", list(rewards.TASKS))
def test_task_problems_are_deterministic_and_held_out_ones_apart(name):
    task = rewards.TASKS[name]

    def take(seed, held_out=False):
        return list(itertools.islice(rewards.problems(task, seed, held_out), 500))

    assert take(3) == take(3) != take(4)
    train = {problem["prompt"] for seed in range(4) for problem in take(seed)}
    held_out = {problem["prompt"] for seed in range(4) for problem in take(seed, True)}
    assert not train & held_out and len(held_out) > 100


def test_arithmetic_problems_are_chains_from_left_to_right():
    for problem in itertools.islice(rewards.problems(rewards.TASKS["arithmetic"], 0), 300):
        value, rest = int(problem["prompt"][0]), problem["prompt"][1:-1]
        assert rewards.ARITHMETIC_OPERATIONS[0] <= len(rest) / 2 <= rewards.ARITHMETIC_OPERATIONS[1]
        for symbol, digit in zip(rest[::2], rest[1::2]):
            value = (value + int(digit) if symbol == "+" else value * int(digit)) % 10
        assert problem["answer"] == str(value)


def test_arithmetic_demonstrations_err_at_products_alone():
    task, rng = rewards.TASKS["arithmetic"], random.Random(0)
    wrong = {"+": [], "*": []}
    for problem in itertools.islice(rewards.problems(task, 0), 500):
        chain = task.demonstration(problem, rng)
        for left, symbol, right, result in re.findall(r"(\d)([+*])(\d)=(\d)", chain):
            product = symbol == "*"
            right_result = int(left) * int(right) if product else int(left) + int(right)
            wrong[symbol].append(right_result % 10 != int(result))
    assert not any(wrong["+"])
    assert 0.4 < sum(wrong["*"]) / len(wrong["*"]) < 0.7


def test_countdown_problems_can_be_solved():
    for problem in itertools.islice(rewards.problems(rewards.TASKS["countdown"], 0), 20):
        numbers, target = problem["answer"]["numbers"], problem["answer"]["target"]
        assert problem["prompt"] == f"{' '.join(map(str, numbers))}={target}:"
        assert any(
            VERIFY["countdown"](
                str(first) + "".join(map("".join, zip(symbols, map(str, rest)))), problem["answer"]
            )
            for first, *rest in itertools.permutations(numbers)
            for symbols in itertools.product("+-*", repeat=len(rest))
        )


# ---------------------------------------------------------------------- command line


def command(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "rewards.py", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def test_command_prints_accuracy_and_first_disagreements(tmp_path):
    path = tmp_path / "answers.jsonl"
    lines = [
        {"completion": f"\\boxed{{{n}}}", "answer": str(n + (n == 2)), "prompt": "?"}
        for n in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    done = command("--reward", "math", path)
    assert done.returncode == 0 and "0.75" in done.stdout and "of 4" in done.stdout
    assert "row 3" in done.stdout and "'3'" in done.stdout and "row 2" not in done.stdout


@pytest.mark.parametrize(
    "content, spec, words",
    [
        (None, "math", ["answers.jsonl"]),
        ("{}", "math", ["line 1", "answer"]),
        ('{"completion": "a", "answer": "1"}\n{"comp', "math", ["line 2"]),
        ('{"completion": 3, "answer": "1"}', "math", ["line 1", "completion"]),
        ('{"completion": "a", "answer": ""}', "math", ["line 1", "math"]),
        ("[]", "math", ["line 1"]),
        ('{"answer": "1"}', "math", ["line 1", "completion"]),
        ('{"completion": "a", "answer": "1"}', "mth", ["--reward", "mth", "'math'"]),
    ],
)
def test_command_says_what_is_wrong_in_one_sentence(content, spec, words, tmp_path):
    path = tmp_path / "answers.jsonl"
    if content is not None:
        path.write_text(content)
    done = command("--reward", spec, path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and all(word in done.stderr for word in words)
