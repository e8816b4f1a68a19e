"""`--reward math_symbolic`: do two answers mean the same? `same_answer(given, gold)` reads LaTeX.

It reads as `math` of rewards.py does, and more. Functions, |x|, n!, money and degrees are rewritten
first, as calls and words. Relations are turned around, units compared, values have 250 digits.
Answers come from models that are trained on the verdict: nothing is evaluated, no call is slow."""

import ast
import operator
import random
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from math import comb, factorial

import mpmath

from rewards import (
    MAX_EXPRESSION,
    UNREADABLE,
    final_answer,
    gold_answer,
    in_any_order,
    in_our_signs,
    python_of,
    table,
    verifier,
)
from support.user import need


@verifier
def math_symbolic(completion: str, answer: str | int | float) -> bool:
    """1 if the marked answer is the gold one: `same_answer`."""
    return same_answer(final_answer(completion, marked=True), gold_answer(answer))


def same_answer(given: str, gold: str) -> bool:
    """Return whether two answers mean the same, as parts if both can be read, else as text.

    docs/verifiers.md lists the conventions about percent, order, names, units and so on."""
    if max(len(given), len(gold)) > MAX_EXPRESSION:
        return given == gold
    given, gold = in_our_signs(rewritten(given)), in_our_signs(rewritten(gold))
    bare, bare_gold = given.removesuffix("%").strip(), gold.removesuffix("%").strip()
    # 25% is also 25, as a percentage may be asked. 0.7% is not 0.7
    are_large = all(re.fullmatch("-?[1-9][0-9.]*", text) for text in (bare, bare_gold))
    return same_meaning(given, gold) or are_large and same_meaning(bare, bare_gold)


def same_meaning(given: str, gold: str) -> bool:
    """Return whether two answers in our signs mean the same, whichever is the gold one."""
    if given == gold:
        return given not in ("", "nan")
    if re.fullmatch("[a-z]{3,} [a-z]{3,}|[A-Z]{2,} [A-Z]{2,}", f"{given} {gold}"):
        return False  # abc and AC are words
    try:
        return alike(meaning_of(given), meaning_of(gold))
    except (*UNREADABLE, TypeError):  # 1/0, words, frac(1)
        return in_plain_words(given) == in_plain_words(gold) != ""


# words by their look: a vowel, one capital or all
ORDINARY = re.compile(r"\b(?=\w*[aeiouyAEIOUY])(?:[A-Z]?[a-z]+|[A-Z]{3,})\b")


def in_plain_words(text: str) -> str:
    """Return a text without boxes, blanks around signs, and the case of plain words."""
    if "\\" not in text:
        text = ORDINARY.sub(lambda found: found[0].lower(), text)
    text = re.sub(r"\"|(?<!\d) | (?!\d)", "", text)
    return re.sub(r"_\((\w+)\)", r"_\1", text)  # 204_(5)


# ---------------------------------------------------------------------- reading

GREEK = """
    α alpha β beta γ gamma δ delta ε epsilon ζ zeta η eta θ theta κ kappa λ lambda μ mu ν nu ξ xi
    π pi ρ rho σ sigma τ tau φ phi χ chi ψ psi ω omega Γ Gamma Δ Delta Θ Theta Λ Lambda Ξ Xi
    Σ Sigma Φ Phi Ψ Psi Ω Omega
"""
NAMES = "|".join(re.findall("[a-zA-Z]+", GREEK))
OURS = {sign: f"\\{name} " for sign, name in re.findall(r"(\S) (\w+)", GREEK)}
OURS |= table(r"""
    (←\langle  )←\rangle  <←\lt  >←\gt  ∅←\emptyset,\varnothing  |←\lvert,\rvert,\vert,\|
    \epsilon←\varepsilon  \phi←\varphi  °←\degree  (-\infty,\infty)←ℝ  $←\$,\textdollar
    ←\large,\Large,\bf,\vec,\mathbf,\underline,\angle,\triangle,\left,\right
    \text←\emph,\fbox,\boldsymbol
""")  # LaTeX and Unicode that `in_our_signs` does not know
MONEY = {"$": "dollars", "€": "euros", "£": "pounds", "¥": "yen", "₹": "rupees"}

ELEMENTARY = "arcsin|arccos|arctan|sinh|cosh|sin|cos|tan|cot|sec|csc|ln|log|exp"
BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"
REWRITES = {  # a pattern: its replacement. The order counts
    # layout
    r"\\(?:color|textcolor) ?\{[^{}]*\}|\\(?:left|right) ?\.": "",  # \color{red}{42}
    r"\\\\ ?\[ ?-?[0-9.]+ ?[a-z]{2} ?\]": r"\\\\ ",  # \\[4pt]
    r"\\mathbb ?\{? ?R\b ?\}?|(?i:(?:\\text ?\{)? ?all real numbers ?\}?)\Z": "ℝ",
    rf"\\(?:operatorname|mathrm|text) ?\{{(e|i|{ELEMENTARY})\}}": r" \1",
    r"\^ ?\{? ?\\circ ?\}?": "°",
    r"\{,\}": ",",  # 1{,}000
    rf"(\\[dt]?frac|\\sqrt) ?(\\(?:{NAMES})(?![a-zA-Z]))": r"\1{\2}",  # \frac\pi4
    r"\\(?:[a-zA-Z]+|[|$])|[^\x00-\x7f]": lambda found: OURS.get(found[0], found[0]),
    r"\[? ?\\begin ?\{array\} ?\{[lcr| ]*\}": r"\\begin{pmatrix}",
    r"\\end ?\{array\} ?\]?": r"\\end{pmatrix}",
    r"\A(?:\\(?:text\w*|mathrm) ?\{)?[ ({[]*([A-Z])[ )}\].:]*\Z": r"\1",  # \text{(A)}
    # signs, units
    r"\A ?(?:=|\\approx|≈) ?": "",  # = 5
    r"\A((?:[^a-zA-Z≈]|\\(?:pi|sqrt|frac)\b)+)(?:≈|\\approx).*": r"\1",  # 2\pi ≈ 6.28
    r",? ?\\text ?\{ ?,? ?or ?\}|,? ?\bor\b": " ∨ ",
    r"\A([0-9]+) ?: ?([0-9]+)\Z": r"\1/\2",
    r"\binfinity\b": r"\\infty",
    r"([$€£¥₹]) ?(-?[0-9.,]*[0-9])": lambda found: f"{found[2]} {MONEY[found[1]]} ",
    r"(?<=[0-9 ])([ckm]?m)(?=[²³])": r"\\text{\1}",
    "°": " degrees ",
    "[⁰¹²³⁴-⁹⁺⁻ⁿ]+": lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}",
    "[₀-₉ₙ]+": lambda found: f"_{{{unicodedata.normalize('NFKC', found[0])}}}",
    "√ ?([0-9]+)": r"\\sqrt{\1}",
    r"\)(?=[0-9]+ ?\^)": ")*",  # (n + 1)2^n
    r"(?<![a-zA-Z])([a-zA-Z](?:_\w)?)'": r"\1_prime",
    # calls
    r"\|([^|]+)\|": r" abs(\1)",
    rf"\\[dt]?binom ?({BRACES}) ?({BRACES})": r" binom(\1,\2)",
    r"(?<![0-9.])([0-9]+|[a-zA-Z]|\((?:[^()]|\([^()]*\))*\)) ?!(?![=!])": r" factorial(\1)",
    r"\b([fgh]) ?\^ ?\{-1\} ?\(": r"\1inv(",
    r"\\(Gamma|Phi|zeta|psi|delta) ?\(": r"\1(",
    r"(?<![a-zA-Z])(sin|cos|tan) ?\^ ?\{-1\}": r"arc\1",
    r"(?<![a-zA-Z])log ?_": "logb^",
}
FUNCTION = re.compile(
    rf"""\\?(?<![a-zA-Z]) (?P<name> logb | {ELEMENTARY} ) [ ]?
    (?: \^[ ]? (?P<power> \w | {BRACES} ) [ ]? )? (?: \( | (?P<factors> (?: (?:
        [0-9.]++ | (?! or\b | {ELEMENTARY} ) [a-zA-Z] (?![a-zA-Z]{{2}}) | degrees
        | \\ (?: {NAMES} | [dt]?frac | sqrt ) (?![a-zA-Z]) | {BRACES} | [\^_]
        | (?: abs | factorial | binom ) \([^()]*\)
    ) [ ]? )++ ) )""",
    re.VERBOSE,
)


def with_calls(text: str) -> str:
    """Write \\sin^2 x as `sin(2,x)`, and \\log_2( as `logb(2,` with its bracket open."""

    def call_of(found: re.Match) -> str:
        call = f" {found['name']}("
        if found["power"]:
            call += f"{found['power']},"
        if found["factors"]:
            call += f"{with_calls(found['factors'])})"
        return call

    return FUNCTION.sub(call_of, text)


def rewritten(text: str) -> str:
    """Return an answer in the LaTeX that `in_our_signs` reads, but for calls, and ∨ for "or"."""
    if len(re.findall(r"(?<!\\)\$", text)) > 1:  # a single $ is money
        text = re.sub(r"(?<!\\)\$", "", text)
    for pattern, ours in REWRITES.items():
        text = re.sub(pattern, ours, text)
    return with_calls(text)


CALLED = "[fghFGHNTPVEIWJ]|[fgh]inv|Gamma|Phi|zeta|psi|delta"
UNIT = r"""(?:"[^"0-9'.∨-]*"|(?![abcxyz]+(?![a-zA-Z]))[a-zA-Z]{3,}+|\b(?:is|of|to|so|in|[nN]o)\b
    |(?<=[0-9 ])(?:[ckm]m|kg|mL|ft|sq|m(?=/(?:s|h|min)\b))(?![a-zA-Z]))"""
TOKEN = re.compile(
    rf"""
      (?P<number> (?!0[0-9]) (?: [0-9]+ (?:\.[0-9]*)? | \.[0-9]+ ) (?:[eE]-?[0-9]{{1,3}}\b)? )
    | (?P<call> (?: sqrt|root|frac|abs|binom|factorial|logb|{ELEMENTARY}|{CALLED} ) [ ]? \( )
    | (?P<words> {UNIT} (?: [ ]* {UNIT} | [ ]?/[ ]?[a-zA-Z]+ )*+ (?: [ ]? \^ \(? [23] \)? )? )
    | (?P<letter> (?: \\ (?:{NAMES}|infty|partial|nabla) (?![a-zA-Z]) | pi | [a-zA-Z] )
        (?: [ ]?_\(?\w+\)? )? )
    | (?P<sign> \*\* | [<>!]= | [-+*/^(),=<>[\]{{}}|%∨] )
    | \S
    """,
    re.VERBOSE,
)
SAME_UNIT = table("""
    cm←centimeter  m←meter  ft←feet,foot  in←inche,inch  mi←mile  mL←milliliter,ml  L←liter
    min←minute  s←second,sec  h←hour,hr  lb←lbs  dollar←usd,USD  square←sq
""")  # other ways to write a unit
POWERS = {"square": "2", "cubic": "3"}


def unit_of(text: str) -> str:
    """Return one way to write a unit: `ft 2` for square feet."""
    words = text.split()
    need(0 < sum(map(str.isalpha, words)) <= 3, "it says more than a unit")
    need(not {"lakh", "crore", "bil"} & {*words}, "it changes the value")
    words = [SAME_UNIT.get(word, word) for word in words]
    words = [SAME_UNIT.get(word.removesuffix("s"), word) for word in words]
    if words[0] in POWERS:
        words = [*words[1:], POWERS[words[0]]]
    return " ".join(words)


def meaning_of(text: str) -> tuple:
    """Return an answer as nested tuples of (kind, part, ...): its only part, or a list."""
    match ast.parse(f"_({python_of(text, TOKEN).replace('∨', ' or ')})", mode="eval").body:
        case ast.Call(ast.Name("_"), [*sides, ast.BoolOp(ast.Or(), last)], []):  # 1, 2 or 3
            return listed([*sides, *last], has_or=True)
        case ast.Call(ast.Name("_"), [side], []):
            return part_of(side)
        case ast.Call(ast.Name("_"), [_, *_] as sides, []):
            return listed(sides, has_or=False)
    raise ValueError("it is empty, or its brackets do not match")


def listed(sides: list[ast.expr], has_or: bool) -> tuple:
    """Return a list. x = 1, 2 is x = 1, x = 2, and x < 1 or x > 5 is a union of intervals.

    x = 3, y = -2 is (x, y) = (3, -2) in the order of the names."""
    parts = list(map(part_of, sides))
    names = [kind for kind, *_ in parts if kind.startswith("name ")]
    if not names:
        return ("list", *parts)
    values = [part[1] if part[0] in names else part for part in parts]
    if parts[0][0] in names and len({*names}) == 1:
        has_bounds = re.search("[<>]", ast.unparse(sides[0]))
        return (names[0], ("union" if has_or and has_bounds else "list", *values))
    need(len({*names}) == len(parts) and not has_or, "some names are missing")
    names, values = zip(*sorted(zip(names, values), key=lambda pair: pair[0]))
    texts = [name.removeprefix("name ") for name in names]
    return (f"name ({', '.join(texts)})", ("Tuple", *values))


def part_of(node: ast.expr) -> tuple:
    """Return one part. Plain words have none, so that they are compared as text."""
    match node:
        case ast.Constant("[" | "]" as bracket):
            return (bracket,)
        case ast.Name("infty_") | ast.UnaryOp(_, ast.Name("infty_")):
            return (ast.unparse(node).removeprefix("+"),)
        case ast.BinOp(value, ast.MatMult(), ast.Constant(str(unit))):
            need(not is_name(value), "a unit without a number")
            return (f"unit {unit_of(unit)}", part_of(value))
        case ast.BinOp(left, ast.BitOr(), right):
            return ("union", *members(part_of(left)), *members(part_of(right)))
        case ast.Tuple(items):
            return ("Tuple", *map(part_of, items))
        case ast.Set(items):
            return ("list", *map(part_of, items))
        case ast.Compare(left, signs, sides):
            return relation([left, *sides], [type(sign).__name__ for sign in signs])
    return ("value", *(value_of(node, point) for point in "abc"))


def members(part: tuple) -> list[tuple]:
    """Return the intervals of a union, or the only one."""
    need(part[0] in ("union", "Tuple"), "no interval")
    return part[1:] if part[0] == "union" else [part]


def is_name(node: ast.expr) -> bool:
    """Return whether a node may be left out before `=`: x, AB, f(x), (x, y), Area."""
    match node:
        case ast.Name(letter):
            return letter not in CONSTANTS
        case ast.Call(ast.Name(function)):
            return re.fullmatch(CALLED, function) is not None
        case ast.BinOp(left, ast.Mult(), right):
            return is_name(left) and is_name(right)
        case ast.Tuple(items):
            return all(map(is_name, items))
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


TURNED = {"Gt": "Lt", "GtE": "LtE"}
INFINITY = ast.Name("infty_")
MINUS_INFINITY = ast.UnaryOp(ast.USub(), INFINITY)


def relation(sides: list[ast.expr], signs: list[str]) -> tuple:
    """Return x = 5 as ("name x", 5), and 2 + 3 = 5 as 5. Turn a > b and 5 = x around."""
    if {*signs} <= {*TURNED}:
        sides, signs = sides[::-1], [TURNED[sign] for sign in signs[::-1]]
    if {*signs} <= {"Lt", "LtE"}:
        return inequality(sides, signs)
    if signs == ["Eq"] and is_name(sides[1]) and not is_name(sides[0]):
        sides = sides[::-1]
    if {*signs} == {"Eq"}:
        first, *others = sides
        parts = list(map(part_of, others))
        if is_name(first) and all(alike(part, parts[-1]) for part in parts):
            return (f"name {ast.unparse(first)}", parts[-1])
        if all(alike(part, part_of(first)) for part in parts):
            return parts[-1]
    return (" ".join(signs), *map(part_of, sides))


def inequality(sides: list[ast.expr], signs: list[str]) -> tuple:
    """Return x > 1 and 1 < x <= 2 as intervals with a name, (1, ∞) and (1, 2]."""
    if len(sides) == 2 and is_name(sides[0]) and not is_name(sides[1]):
        sides, signs = [MINUS_INFINITY, *sides], ["Lt", *signs]
    elif len(sides) == 2 and is_name(sides[1]) and not is_name(sides[0]):
        sides, signs = [*sides, INFINITY], [*signs, "Lt"]
    if len(sides) != 3 or not is_name(sides[1]):
        return (" ".join(signs), *map(part_of, sides))
    interval = [part_of(sides[0]), part_of(sides[2])]
    if signs[0] == "LtE":
        interval = [("[",), *interval]
    if signs[1] == "LtE":
        interval = [*interval, ("]",)]
    return (f"name {ast.unparse(sides[1])}", ("Tuple", *interval))


def alike(left: tuple, right: tuple) -> bool:
    """Compare two parts of answers. A name or a unit may be missing on one side.

    Points where neither value is real count if there are no others: sqrt(1/n) is 1/sqrt(n)."""
    for optional in ("name ", "unit "):
        if left[0].startswith(optional) and not right[0].startswith(optional):
            left = left[1]
        elif right[0].startswith(optional) and not left[0].startswith(optional):
            right = right[1]
    (kind, *parts), (other_kind, *others) = left, right
    if kind != other_kind or len(parts) != len(others):
        return False
    if kind == "value" and are_exact(*parts, *others):
        return parts == others
    if kind == "value":
        pairs = list(zip(parts, others))
        real = [pair for pair in pairs if not all(value.imag for value in pair)]
        return all(add(one, -other) == 0 for one, other in real or pairs)
    if kind in ("list", "union", "Eq", "NotEq"):
        return in_any_order(parts, others, alike)
    return all(map(alike, parts, others))


# ---------------------------------------------------------------------- values

MP = mpmath.MPContext()  # of our own: other code may change the digits of mpmath's
MP.dps = 250  # digits, of which the last 50 may be wrong
NOISE = MP.mpf(10) ** -200
CONSTANTS = {"i_": MP.mpc(0, 1), "e_": +MP.e, "pi_": +MP.pi, "infty_": MP.nan}
MAX_BITS = 10_000  # of a numerator or denominator, so that 9^9^9 takes no time
LARGEST_EXPONENT = 350  # of 2: beyond 10^105 a digit next to the point would not be seen


def unknown(name: str, point: str) -> Fraction:
    """Return the value of a letter or a call at a point, a number that nobody would write.

    All are negative at the first point, so that sqrt(x^2) is not x. All are positive at the second,
    so that |x| is not -x. The third has both signs, so that |x| + |y| is not |x + y|. The
    denominator is odd, so that (-2)^n is real."""
    rng = random.Random(f"{name} {point} 58")  # with 58 x and y differ in sign, as do most pairs
    size = Fraction(rng.randint(1, 2**17), 2**15 - 19)
    return size * {"a": -1, "b": 1}.get(point, rng.choice((-1, 1)))


def are_exact(*values) -> bool:
    return all(isinstance(value, Fraction) for value in values)


def bits_of(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def inexact(value):
    """Return a number of mpmath. Raise ValueError if others would be lost beside it."""
    if are_exact(value):  # mpmath's own conversion looks for a common divisor, slowly
        value = MP.mpf(value.numerator) / value.denominator
    need(not value or abs(MP.mag(value)) <= LARGEST_EXPONENT, "too large, or too small")
    return value


def bounded(value):
    """Return the value, 0 as a Fraction. Raise ValueError if computing with it would take long."""
    if not are_exact(value):
        return inexact(value) or Fraction(0)
    need(bits_of(value) <= MAX_BITS, "too large")
    return value


def without_noise(function: Callable) -> Callable:
    """Let a function of mpmath return 0 for a result that is only the error of the last digits."""
    return lambda *values: bounded(MP.chop(function(*map(inexact, values)), NOISE))


def add(left, right):
    """Return the sum, and exactly 0 if only the error of the last digits is left."""
    if are_exact(left, right):
        return left + right
    left, right = inexact(left), inexact(right)
    total = left + right
    return total if abs(total) > NOISE * max(abs(left), abs(right)) else Fraction(0)


def multiply(left, right):
    return left * right if are_exact(left, right) else inexact(left) * inexact(right)


def power(base, exponent):
    """Return base^exponent, for a negative base and an odd root the real one."""
    degree = exponent.denominator if are_exact(exponent) else 0
    if degree == 1:
        size = bits_of(base) if are_exact(base) else abs(MP.mag(base)) + 1
        need(size * abs(exponent) <= MAX_BITS, "9^9^9")
        return base ** int(exponent)
    if degree % 2 and base.imag == 0 and base.real < 0:
        return multiply(power(-base, exponent), Fraction((-1) ** exponent.numerator))
    return without_noise(operator.pow)(base, exponent)


def elementary(name: str) -> Callable:
    """Return a function of (value), or of (exponent, value) for sin^2 x."""
    compute = without_noise(getattr(MP, name))

    def function(*values):
        *exponents, value = values
        return power(compute(value), *exponents) if exponents else compute(value)

    return function


FUNCTIONS = {name: elementary(name.replace("arc", "a")) for name in ELEMENTARY.split("|")}
FUNCTIONS |= {
    "log": elementary("log10"),
    "logb": without_noise(lambda base, value: MP.log(value, base)),
    "abs": abs,
    "sqrt": lambda value: power(value, Fraction(1, 2)),
    "root": lambda degree, value: power(value, 1 / degree),
    "frac": lambda above, below: multiply(above, 1 / below),
}
OF_WHOLE = {"factorial": factorial, "binom": comb}
SMALL = frozenset(range(3000))  # whole numbers that these take
OPERATORS = {ast.Add: add, ast.Mult: multiply, ast.Div: FUNCTIONS["frac"], ast.Pow: power}
OPERATORS |= {ast.Sub: lambda left, right: add(left, -right)}
OPERATORS |= {ast.UAdd: operator.pos, ast.USub: operator.neg}


def value_of(node: ast.expr, point: str):
    """Return the value of an expression at a point: a Fraction if exact, else of mpmath."""
    match node:
        case ast.Constant(int(number)):
            return Fraction(number)
        case ast.Name(letter):
            return CONSTANTS.get(letter) or unknown(letter, point)
        case ast.BinOp(value, ast.MatMult(), ast.Constant("degree")):
            return multiply(value_of(value, point), CONSTANTS["pi_"] / 180)
        case ast.UnaryOp(sign, operand):
            return OPERATORS[type(sign)](value_of(operand, point))
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return bounded(OPERATORS[type(sign)](value_of(left, point), value_of(right, point)))
        case ast.Call(ast.Name(name), nodes):
            values = [value_of(argument, point) for argument in nodes]
            if name in FUNCTIONS:
                return bounded(FUNCTIONS[name](*values))
            if name in OF_WHOLE and {*values} <= SMALL:
                return bounded(Fraction(OF_WHOLE[name](*map(int, values))))
            return unknown(f"{name} {[MP.nstr(inexact(value), 30) for value in values]}", point)
    raise ValueError(f"{ast.dump(node):.80} is no arithmetic")
