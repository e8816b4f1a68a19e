"""Answers that mean the same, answers that do not, and that no comparison takes long."""

import random
import re
import sys
import time
from pathlib import Path

import pytest

answers = pytest.importorskip("support.extras.answers")

import bench_answers  # noqa: E402

same_answer = answers.same_answer

# ≡ right, both ways. ≢ wrong, both ways. → right for that gold answer. ↛ wrong for that one.
# Four spaces separate two pairs. The verdicts were written before the code ran.

PAIRS = r"""
    # numbers, fractions, powers
    −5 ≡ -5    2π ≡ \pi*2    \infty ≡ ∞    50% ≡ 1/2    5% ≢ $5    -5.0! ≢ -5    5! ≡ 120
    1\frac{3}{4}\text{ cups} ≡ 1.75    \frac{1}{2004!} ≢ \frac{1}{2006!}    -1\frac{1}{2} ≢ -\frac12
    0.25 → 25\%    Ω₀ ≡ \Omega_0    μ_0 ≡ \mu_0    e^{-500} ≢ 0    200! ≢ 199!    e^{-2023} ≢ 0
    100 → 100 percent    \sqrt[3]{8} ≢ \sqrt{8}    5\frac{1}{2} ≢ \frac52    {1\over2} ≢ \frac{1}{3}
    50 per cent ≡ 50%    10⁻³ ≡ 0.001    \sqrt[3]{-8} ≡ -2    1.5 × 10^3 ≡ 1500    3√13 ≡ 3\sqrt{13}
    \$1{,}000 ≡ 1000    \fbox{42} ≡ 42    λ+1 ≡ 1+\lambda    \infty ≢ -\infty    5 \cdot 4! ≡ 120
    \underline{\underline{42}} ≡ 42    \frac{1}{0} ≢ \frac{2}{0}    \binom{10}{3} ≢ \binom{10}{4}
    \left. 5 \right. ≡ 5    \sqrt{2}3 ≢ \sqrt{23}    2\binom{10}{3} ≡ 240    e^{1000} ≢ e^{1001}
    # units, money, words behind a value
    15\mbox{ cm}^2 ≡ 15    5\text{ isn't it} ≢ 5    5\text{ halves} ≢ 5    5 is impossible ≢ 5
    25 years old ≡ 25    \textdollar 5 ≡ 5    5 m² ≢ 5 cm²    4\text{ lakh} ≢ 4    5\text{ bil.} ≢ 5
    9.8\ \mathrm{m/s^2} ≡ 9.8    5 m² ≡ 5    3\text{ ft} ≢ 3\text{ yd}    10\sqrt{2} ≢ 5*(1+sqrt(2))
    5\text{ } ≡ 5    150 sq ft ≡ 150    x\text{ cm} ≢ x    100°C ≢ 100°F    5 thousand ≢ 5
    ₹450 ≡ 450    17\text{ any thing} ≡ 17    5 big slices of pizza ≢ 5    5\text{ ms} ≢ 5\text{ m}
    2\text{ hours} ≡ 2\text{ hrs}    5\text{ mL} ≢ 5\text{ liters}    5\text{ hrs} ≡ 5\text{ hours}
    5\text{ in}^2 ≡ 5\text{ square inches}    5\text{ mL} ≡ 5\text{ milliliters}    20 millions ≢ 20
    5\text{ cm}^3 ≡ 5\text{ cubic centimeters}    36\pi\text{ ft}^3 ≢ 36\pi\text{ square feet}
    5 billion dollars ≢ 5    10 \mathrm{~cm} ≢ 10 \mathrm{~mm}    \frac{\textcolor{red}{1}}{2} ≡ 1/2
    \$5 ≢ €5    $5 ≢ 5 cents    3 or four ≢ 3    5 Feet ≡ 5 ft
    5\text{ euros} ≢ 5\text{ dollars}    5\text{ in}^2 ≢ 5\text{ inches}    {\color{blue} x+1} ≡ x+1
    60^\circ ≢ 60\text{ radians}    1\text{ kWh} ≢ 1\text{ kW}    5\text{ MHz} ≢ 5\text{ mHz}
    # algebra and letters
    \pi r^2h ≡ hr^2\pi    \mathrm{e}^x ≡ e^x    x₁+x₂ ≡ x_1+x_2    \dim V ≢ V    n! \cdot n ≢ (n!)^2
    \frac12 mg ≡ \frac{mg}{2}    x' ≢ x    2^{n-1}(n+2) ≡ (n+2)2^{n-1}    \varepsilon_0 ≡ \epsilon_0
    f'(2) ≢ f(2)    2ⁿ⁺¹ ≡ 2^{n+1}    \varphi ≡ \phi    no ≢ on    \partial f ≢ f    \sqrt{u^2} ≢ -u
    \color{red}{42} ≡ 42    \theta_1 - \theta_2 ≢ \theta_2-\theta_1    \binom{n}{k} ≢ \binom{n}{k+1}
    3-4i ≢ 3+4i    AC ≢ CA    n! ≢ (n+1)!    (2n)! ≢ 2n!    -x ≢ |x|
    # functions
    \log^2 x ≢ \log_2 x    \ln^2 x ≡ (\ln x)^2    \tan 45^\circ ≡ 1    \ln 2 ≡ \log_e 2
    \log_2^3 x ≢ \log_3^2 x    \sin^2(x)y ≢ \sin^2(xy)    \exp{x} ≡ e^{x}    \tan^2(y)+1 ≡ \sec^2(y)
    \frac\pi4 ≡ \arctan 1    \ln\frac{\ln 2}{2} ≡ \ln(\ln 2)-\ln 2    \sinh x ≡ \frac{e^x-e^{-x}}{2}
    \ln|\sec x| ≡ -\ln|\cos x|    \sin 2x ≡ 2 \sin x \cos x    \tan 15^\circ ≡ 2-\sqrt3
    \cos(60^{\circ}) ≡ 0.5    \log_{10} 1000 ≡ 3    a^x \ln a ≡ ln(a)*a^x    \csc^2 x - \cot^2 x ≡ 1
    \cos^{-1} 0 ≡ \frac{\pi}{2}    \sin^{-1} x ≢ \frac{1}{\sin x}    \sqrt{2}\sin x ≢ \sin\sqrt{2}x
    \log_{2}{8} ≡ 3
    \cos 2x ≡ \cos^2 x - \sin^2 x    x \in (0,\pi] ≡ 0 < x \le \pi    \sin x \cos x ≢ \sin(x\cos x)
    \cos\frac{2\pi}{5} ≡ \frac{\sqrt5-1}{4}    \operatorname{arctan} 1 ≡ \frac{\pi}{4}
    7 \sin(\frac{\pi}{5}x) + 1 ≡ 7*sin(pi*x/5)+1    3\cos(2\sqrt{35}t) ≡ 3*cos(sqrt(980/7)*t)
    # calls, floors, absolute values
    \Gamma(1/3) ≡ \Gamma\left(\frac{1}{3}\right)    T(n) = 2T(n/2)+n ≢ T(n) = T(n)+n    2|x| ≡ |2x|
    2\Phi(1)-1 ≡ -1+2\Phi(1)    f(x)=2x^3+c ≢ f(x)=2x^3    f^{-1}(3) ≢ \frac{3}{f}    |x||y| ≡ |xy|
    2\Phi(1)-1 ≢ \Phi(2)-1    f(1,234) ≢ f(1234)    |x+y| ≢ |x|+|y|
    (1,200,f(2)) ≢ (1200,f(2))    \lvert x-1 \rvert ≡ |1-x|    \sin x(x+1) ≢ \sin(x(x+1))
    # names, equations, approximations
    f^{-1}(x) = \frac{x-1}{2} ≡ \frac{x-1}{2}    a_3 = 2, a_{37} = 19 ≡ a_{37} = 19, \quad a_3 = 2
    mn = 12 → 12    2x = 10 ≢ 10    x^2 = 4 ≢ 4    y' = 2x ≡ 2x    1 = 1 ≢ 2 = 2    x = x ≢ y = y
    2\pi \approx 6.28 ≡ 2\pi    7 = 11a+c ≢ 11a+c    n=2, 3, 4 ≢ n=1, 2, 3    f(2) \approx 3 ≢ f(2)
    \approx 0.17 ≡ 0.17    x \approx 3 ≢ x    x = -3\frac14 ≢ -2.75    \text{Area} = 24 ≡ 24
    x + y = 5 ≢ 5    f(x) = 2x ≡ 2x    2 + 3 = 5 ≡ 5    y=2x+1 ≡ 2x+1=y    xy = 0 ≢ x = 0
    P(X=5) \approx 0.17 ≢ P(X=5) \approx 0.83    \text{speed} \approx 3 ≢ \text{speed} \approx 4
    a+b = c ↛ c    x = 3 ≡ 3    x=5 ≢ y=5    n=p^k ≢ n=p
    # inequalities
    x<1 or y>2 ≢ x<1 or x>2    x\ge5 ≢ x>5    -2 \le x \le 7 ≢ (-2, 7)    x<-1 or x>5 ≢ x<-1 and x>5
    x=1 or y=2 ≢ (1,2)    x \ne 3 ≡ 3 \neq x    x \le 3 ≡ (-\infty, 3]    x > 5 ≢ [5, \infty)
    a<b ≡ b>a    x<-1 or x>5 ≡ (-\infty,-1)\cup(5,\infty)    f(2) < f(1) < f(4) ≢ f(1) < f(2) < f(4)
    x<1, x>5 ≡ x>5, x<1    -2 \le x \le 7 ≡ 7 \ge x \ge -2    x>2, x<5 ≢ (2,\infty)\cup(-\infty,5)
    x \lt 3 ≡ x < 3    1<x<3 ≢ 1<x\le3    x \ge 5 ≢ x \le 5    -2x > 4 ≢ x > -2    0 < x < 2 ≢ [0,2]
    -2 \le x \le 7 ≡ x \in [-2,7]    -2 \le x \le 7 ≢ x \in [-2,8]    x<1 \text{ or } x>5 ≢ x<1, x>5
    x>5 ≢ x<5    x>5 ≢ 5>x    2x > 4 ≢ x < 2
    # intervals and sets
    (1,2)∪(3,4) ≡ (3,4)\cup(1,2)    (-\infty, 5) ≡ (-infinity,5)    (-\infty, 5] ≢ (-infinity,5)
    \frac{1}{\infty} ≢ 0    \mathbb{R} ≡ \text{all real numbers}    [0, \pi] ≡ 0 \le \theta \le \pi
    \{1,2\} ≡ \{2,1\}    \{1,2\} ≢ (1,2)    ∅ ≡ \emptyset    [1,2) ≢ (1,2)    x \in (1,234) ≢ 1234
    \emptyset ≡ \varnothing    (-\infty,3) ≢ (\infty,3)    \mathbb{R}^2 ≢ \mathbb{R}^3
    2 < x < 3 \text{ or } x > 5 ≡ (2,3)\cup(5,\infty)    x\in\mathbb{R}, x\ne 2 ≢ x \in \mathbb{R}
    # lists and points
    x = \pm 2 ≡ x = 2, x = -2    \langle 1,2\rangle ≡ (1,2)    5 apples and 3 pears ≢ 5
    1, 2, or 3 ≡ 3, 2, 1    \{1,234\} ≢ \{1234\}
    \text{1, 3, and 5} ≡ 1,3,5    7\text{ boys and 8 girls} ≢ 7    x = 1, y = 2, x = 3 ≢ 1, 2, 3
    x = 3, y = -2 ≡ (3,-2)    x=1, y=2, z=3 ≡ (1,2,3)    \vec{v} = (1,2) ≡ (1,2)
    (x, y) = (1, 2) ≡ x = 1, y = 2    3 \pm 2\sqrt2 ≢ 3 + 2\sqrt2    (\pm 1, \mp 2) ≢ (1,2), (-1,-2)
    1 and odd prime numbers ≢ 1 and even prime numbers    (1,2) \text{ or } (2,1) ≢ (1,2)
    x = 3, y = -2 ≢ (-2,3)    x = 3, y = -2 ≢ 3, -2    x = 1, y = 2 ≢ \{1,2\}
    # matrices and products whose order counts
    \left[\begin{array}{cc}1 & 2 \\3 & 4\end{array}\right] ≡ \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \begin{pmatrix}1\\[4pt]2\end{pmatrix} ≡ \begin{pmatrix}1\\2\end{pmatrix}    \det A ≢ A
    \begin{pmatrix}\frac12\\[0.5em]-1\end{pmatrix} ≡ \begin{pmatrix}0.5\\-1\end{pmatrix}
    x < -2 \text{ or } x > 2 ≡ (-\infty,-2)\cup(2,\infty)    \frac{PV}{nR} ≡ \frac{VP}{Rn}
    1 < |x| \le 2 ≢ (1, 2]    \begin{pmatrix}1\\-1\end{pmatrix} ≢ \begin{pmatrix}-1\\1\end{pmatrix}
    \begin{vmatrix}1&2\\3&4\end{vmatrix} ≢ \begin{pmatrix}1&2\\3&4\end{pmatrix}    A^TB ≢ B^TA
    \begin{pmatrix}1&2\end{pmatrix} ≢ \begin{pmatrix}1\\2\end{pmatrix}
    # words, times, choices
    3:5 ≡ 6:10    bca ≢ abc    xyz ≢ zyx    0,05 ≢ 0,5    |x| = 3 ≢ 3
    -60° ≢ -60 rad    \text{10-20 years} ≢ \text{20-30 years}    \textbf{(D) } 30 ≡ \textbf{(D)}\ 30
    \text{1:15 PM} ≢ \text{2:30 PM}    \text{No Solution} ≡ no solution    \text{The value is }5 ≡ 5
    man bites dog ≡ Man  bites dog    \emph{Tuesday} ≡ Tuesday    5\text{ thirty-seconds} ≢ 5
    ¬B ≢ B    Pari ≢ Paris    \mathbf{B} ≡ B    204_5 ≡ 204_{5}    2abc ≡ 2cab    (A) is wrong ↛ A
    xyz ≡ x \cdot yz    abc ≡ a \cdot bc    \boldsymbol{(D)} ≡ D    \text{pH} ≢ \text{PH}    007 ≢ 7
"""  # many were found by people who tried to be rewarded for a wrong answer


def judged(table: str) -> list[tuple[str, str, str, bool]]:
    """(class, given, gold, verdict) of every pair of a table, in the directions that it says."""
    kind, found = "", []
    for line in filter(None, map(str.strip, table.splitlines())):
        if line.startswith("# "):
            kind = line[2:]
            continue
        for pair in line.split("    "):
            sign = next(sign for sign in "≡≢→↛" if f" {sign} " in pair)
            given, gold = pair.split(f" {sign} ")
            found.append((kind, given, gold, sign in "≡→"))
            if sign in "≡≢":
                found.append((kind, gold, given, sign == "≡"))
    return found


JUDGED = judged(PAIRS)


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, *_ in JUDGED))
def test_answers_are_judged_as_written(kind):
    cases = [case for case in JUDGED if case[0] == kind]
    assert [case for case in cases if same_answer(*case[1:3]) != case[3]] == []


def test_every_answer_is_itself():
    nothing = {"", " ", "nan"}
    texts = {text for _, *pair, _ in JUDGED for text in pair} | nothing
    assert {text for text in texts if not same_answer(text, text)} == nothing


def test_known_limits_are_those_of_the_page():
    """Each row of its table: the answer, the gold answer, right or wrong, refused or rewarded."""
    page = (Path(answers.__file__).parents[2] / "docs/verifiers.md").read_text()
    rows = re.findall(r"(?m)^\| `(.+)` \| `(.+)` \| (right|wrong).* (refused|rewarded) \|$", page)
    assert len(rows) > 15
    for given, gold, *_, verdict in rows:
        given = given.replace("\\|", "|")  # as a table in Markdown writes it
        assert same_answer(given, gold) == (verdict == "rewarded"), (given, gold)


def test_rationals_are_exact():
    """a/b against the same number written otherwise, and against its neighbour a/b + 10^-60."""
    rng = random.Random(0)
    for _ in range(200):
        a, b, k = rng.randint(-(10**9), 10**9), rng.randint(1, 10**9), rng.randint(2, 99)
        given = f"\\frac{{{a * k}}}{{{b * k}}}"
        assert same_answer(given, f"{a}/{b}")
        assert not same_answer(given, f"{a * 10**60 + b}/{b * 10**60}")


PIECES = r"""
    1 2 x n \pi e i f( ( ) [ ] { } \{ \} \frac \sqrt ^ _ + - * / = < > \le \ne \approx , ; and or
    \cup \pm ! | \% ° \$ \text{ \text{cm} million \sin \ln ^{-1} \begin{pmatrix} & \\ \end{pmatrix}
    \lfloor \rfloor \binom \infty : . ½ ² √ \emptyset A B \hbar #
"""


def test_answers_raise_nothing_and_are_symmetric_on_random_text():
    rng = random.Random(0)
    for _ in range(1000):
        left, right = ("".join(rng.choices(PIECES.split(), k=rng.randint(1, 14))) for _ in range(2))
        for one, other in ((left, right), (left, left + " "), (left, f"({left})")):
            assert same_answer(one, other) == same_answer(other, one), (one, other)


def calls_of_python(given: str, gold: str) -> int:
    """Functions that a comparison calls: its time, as far as that is the same on every machine."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        same_answer(given, gold)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", bench_answers.HOSTILE)
def test_no_comparison_takes_long(name):
    """bench_answers.py measures seconds, of more sizes and more variants."""
    for size in (10, 20, 40, 60, 150, 9_990):
        text = bench_answers.HOSTILE[name](size)[:10_000]
        for other in (text[1:] + text[:1], text.replace("x", "(x+0)"), "1, 2, 3"):
            assert calls_of_python(text, other) < 100_000


@pytest.mark.parametrize(
    "text",
    [r"(\tan(x+10^9i))^x", r"\ln(\tan(x+10^8i))", r"\csc((\sin(10^{40}))^{(99^{99})^{7}})"],
)
def test_digits_that_do_not_count_take_no_time(text):
    """tan(x + 10^9 i) is i but for a real part of 10^-868588963, which would cost much."""
    start = time.process_time()
    assert not same_answer(text, "5")
    assert time.process_time() - start < 0.2


STARTS = r"√ \sqrt{ \frac1 \sin^ \log_ ( f( - | 1± 1:2∪ 1^ !"


@pytest.mark.parametrize("piece", STARTS.split())
def test_nothing_is_read_deeper_than_python_can(piece):
    times = answers.MAX_EXPRESSION // len(piece)
    for text in (piece * times, piece * (times - 1) + "5"):
        assert not same_answer(text, "5")
