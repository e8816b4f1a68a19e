r"""`--reward math`: does the marked answer of a completion equal the gold one?

`plain` splits x = \frac12\text{ cm} into the expression ¦{1,2} and its unit, and `values_of` parses
frac((1),(2)) as Python and evaluates it, exactly if it is rational. Letters get random values.
Answers that it can't read (words, \sin x, 5!, x > 2, long ones) are compared as text."""

import ast
import operator
import random
import re
from fractions import Fraction
from math import e, inf, pi

from rewards import after_thinking, final_answer, gold_answer, verifier
from support.errors import expecting, need


@verifier
def math(completion: str, answer: str | int | float) -> bool:
    """1 if the marked answer equals the gold one, as a value or as text. Units are optional."""
    return same_answer(final_answer(completion, marked=True), gold_answer(answer))


@verifier
def math_lenient(completion: str, answer: str | int | float) -> bool:
    """Like `math`, but if nothing is marked, the last number counts. Not meant for training."""
    text = after_thinking(completion)
    if re.search(r"<answer>|\\boxed|####", text):
        return math(completion, answer)
    numbers = re.findall(NUMBERS, in_our_signs(text[-10_000:]))
    return bool(numbers) and same_answer(numbers[-1].rstrip(","), gold_answer(answer))


@verifier
def countdown(completion: str, answer: dict) -> bool:
    """1 if an expression in + - * / ( ) uses each of `numbers` once and equals `target` exactly."""
    with expecting('expected {"numbers": [3, 5, 2], "target": 13}'):
        numbers, target = sorted(answer["numbers"]), answer["target"]
        are_whole = all(type(number) is int for number in [*numbers, target])
        need(are_whole and numbers and numbers[0] >= 0, "all must be integers, numbers >= 0")
    text = in_our_signs(final_answer(completion)).removesuffix(".")
    text = re.sub(rf"\A *{target} *=|= *{target} *\Z", "", text, count=1)  # 3*5-2 = 13
    try:
        need(re.fullmatch(r"(?!.*\*\*)[-+*/() 0-9]{1,1000}", text), "not arithmetic")
        value = number_of(ast.parse(text.strip(), mode="eval").body, "")
    except Exception:  # 1/0, unclosed brackets, other signs
        return False
    return value == target and sorted(map(int, re.findall("[0-9]+", text))) == numbers


def same_answer(given: str, gold: str) -> bool:
    """Return whether two answers agree. 25% is both 1/4 and 25, but 0.7% is not 0.7."""
    if max(len(given), len(gold)) > 300:  # bounds the running time
        return given == gold
    (given, unit), (gold, gold_unit) = plain(given), plain(gold)
    if unit and gold_unit and unit != gold_unit:
        return False
    bare, bare_gold = given.removesuffix("%"), gold.removesuffix("%")
    is_percentage = (bare, bare_gold) != (given, gold) and re.match("-?[1-9]", bare_gold)
    return same(given, gold) or bool(is_percentage) and same(bare, bare_gold)


def same(given: str, gold: str) -> bool:
    """Compare two answers as lists of values in any order or, if they have none, as text."""
    try:
        values, others = values_of(given), values_of(gold)
        for value in values:
            counterpart = next((other for other in others if alike(value, other)), None)
            if counterpart is None:
                return False
            others.remove(counterpart)  # 1,1,2 is not 1,2,2
        return not others
    except Exception:  # words, 1/0, unclosed brackets, 9^9^9, 10^400 beside a float
        given, gold = (re.sub(r"(?<!\d) | (?!\d)", "", text) for text in (given, gold))
        return given == gold != "" or given.isalpha() and given.lower() == gold.lower()


def alike(value, other) -> bool:
    """Compare two results of `value_of`: rationals exactly, other numbers to 12 digits."""
    match value, other:
        case ([*parts], [*others]):
            return len(parts) == len(others) and all(map(alike, parts, others))
        case (str() | [*_], _) | (_, str() | [*_]) | (Fraction(), Fraction()):
            return value == other
    return value == other or abs(value - other) < 1e-12 * abs(value)


SIGNS = {  # our sign: the LaTeX, Unicode and words that mean it
    "*": r"\times \cdot × · ⋅", "/": r"\div ÷ ⁄", "-": "− –", "±": r"\pm", "%": r"\% percent",
    "<=": r"\le \leq ≤", ">=": r"\ge \geq ≥", "=": r"\in ∈ \approx ≈", ",": r"\cup ∪ & ; and or",
    "√": r"\sqrt sqrt", "¦": r"\frac \dfrac \tfrac \cfrac", "),(": r"\\", " ": r"\, \; \quad ~",
    "∞": r"\infty", "π": r"\pi pi", "θ": r"\theta", "α": r"\alpha", "β": r"\beta",
    "λ": r"\lambda", "^2": "²",
    "": r"$ \$ € £ \! \( \) \{ \} \left \right \displaystyle \circ \degree °",
}  # fmt: skip
OUR_SIGNS = {"\\ ": " "} | {other: ours for ours in SIGNS for other in SIGNS[ours].split()}


def in_our_signs(text: str) -> str:
    """Replace the signs of LaTeX and Unicode with ours."""
    signs = r"\\(?:[a-zA-Z]+|.)|\b[a-z]+\b|[^\x00-\x7f]|[$&;~]"  # \times, \%, and, ×, $
    return re.sub(signs, lambda sign: OUR_SIGNS.get(sign[0], sign[0]), text)


REWRITES = [  # (pattern, replacement), for text in our signs. Order matters
    (r"\\(?:text\w*|mathrm|mathbf|mbox) ?\{([^{}]*)\}", r" \1"),  # 5\text{cm} -> 5 cm
    (r"\\begin ?\{[pb]matrix\}", "(("),  # \begin{pmatrix}1 -> ((1
    (r"(?:\),\()? ?\\end ?\{[pb]matrix\}", "),)"),  # 1,2\end{pmatrix} -> 1,2),)
    (r"\^ ?(?:\{ ?\}|(?=[ ,%)]|\Z))", ""),  # 90^{} -> 90
    (r"\s+", " "),  # 1   + 1 -> 1 + 1
    (r"(?i)\A ?(?:the )?(?:final )?(?:answer|value)(?: is|:) ?", ""),  # the answer is 5 -> 5
    (r"\A(?:[= ]|\*\*|0(?=\d))+|(?:[. ]|\*\*)+\Z", ""),  # = **05**. -> 5
    (r"\{,\}|,[ ,]*,", ","),  # 1{,}000 -> 1,000
    (r"([√¦]) ?(\w)", r"\1{\2}"),  # √2 -> √{2}
    (r"(¦ ?\{(?:[^{}]|\{[^{}]*\})*\}) ?(\w)", r"\1{\2}"),  # ¦{1}2 -> ¦{1}{2}
    (r"(?<![\w.^}])(\d+) ?¦ ?\{(\d+)\} ?\{(\d+)\}", r"(\1+\2/\3)"),  # 3¦{1}{2} -> (3+1/2)
    (r"(?<![\w.^}])(\d+) (\d+) ?/ ?(\d+)", r"(\1+\2/\3)"),  # 3 1/2 -> (3+1/2)
    (r"\} ?\{", ","),  # ¦{1}{2} -> ¦{1,2}
    (r"([_^]) ?\{(\w)\}", r"\1\2"),  # x_{1} -> x_1
]
NUMBERS = r"(?:(?<!\w)-)?(?:¦\{\d+\}\{\d+\}|(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?%?)"  # -1,234.5
THOUSANDS = r"(?<![\d,.([])[1-9]\d{,2}(?:[, ]\d{3})+(?![\d,])"  # 1,234 567, but (1,234) is a pair
NAMED = r"(?:\A|(?<=,)) *([^\W\d]\w*(?:\(\w\))?|\(\w(?:, ?\w)+\)) ?="  # f(x) =, (x, y) =
VALUE_AND_UNIT = r"(.*?[\d)}%π]) ([a-zA-Z]{2,}(?:[ /][a-zA-Z]{2,}){,2}(?:\^[23])?)"  # 5 cm^2
NO_UNIT = r"hal(f|ves)|third|quarter|tenth|dozen|hundred|thousand|lakh|crore|[bmtr]illion"
NO_UNIT += r"|squared|cubed|factorial|\b(not?|is|below|negative)\b"  # 5 million, 5 is wrong


def plain(text: str) -> tuple[str, str]:
    r"""Split an answer into an expression in our signs and a unit: `x = 5~cm` into ("5", "cm")."""
    text = in_our_signs(text)
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    text = re.sub(THOUSANDS, lambda number: re.sub("[, ]", "", number[0]), text)
    if len(set(re.findall(NAMED, text))) == 1:  # x = 1, x = 2
        text = re.sub(NAMED, "", text)
    if "±" in text:
        text = text.replace("±", "+") + "," + text.replace("±", "-")
    found = re.fullmatch(VALUE_AND_UNIT, text)
    if found is None or re.search(NO_UNIT, found[2].lower()):
        return text.strip(), ""
    return found[1], found[2].lower().rstrip("s ")


UNREAD = r"[a-zA-Z]{3}|[fghFGHNPT]\(|(?<![\w.])0\d|[^0-9a-zA-Zα-ω_+*/^%,.(){}[\]√¦∞ -]"  # sin, f(
BETWEEN_FACTORS = r"(?<=[^\W_]|[)}%]) ?(?=[^\W\d_]|[(√¦∞])"  # 2x(y+1) -> 2*x*(y+1)
NUMBER = r"(?<![\w.])(?:\d+\.?\d*|\.\d+)"  # 5, 0.5 and .5, but not the 1 of x_1
PYTHON = {"{": "(", "}": ")", "^": "**", "%": "/100", "√": "sqrt", "¦": "frac", "∞": "inf"}
PYTHON |= {"[": "('[',", "]": ",']')"}  # brackets become strings: [1, 2) is ("[", 1, 2)


def values_of(text: str) -> list:
    """Evaluate the comma-separated parts of an answer. Raises if it is not arithmetic."""
    need(text and not re.search(UNREAD, text), "not arithmetic")
    text = re.sub(BETWEEN_FACTORS, "*", text)
    text = re.sub(NUMBER, lambda number: f"({Fraction(number[0])})", text)
    text = text.translate(str.maketrans(PYTHON))
    return list(map(value_of, ast.parse(f"[{text}]", mode="eval").body.elts))


def value_of(part: ast.expr) -> list | str:
    """Evaluate a number for three sets of letter values, or each part of a point or interval."""
    if isinstance(part, ast.Tuple):
        return list(map(value_of, part.elts))
    if isinstance(part, ast.Constant) and isinstance(part.value, str):
        return part.value
    return [number_of(part, point) for point in "abc"]


def number_of(node: ast.expr, point: str) -> Fraction | complex:
    """Evaluate an expression. `point` seeds the random values of its letters."""
    match node:
        case ast.Constant(int(number)):
            return Fraction(number)
        case ast.Name(letter):
            some = Fraction(random.Random(letter + point).randint(-9999, 9999), 997)
            return {"π": pi, "e": e, "i": 1j, "inf": inf}.get(letter, some)
        case ast.UnaryOp(sign, operand):
            return OPERATORS[type(sign)](number_of(operand, point))
        case ast.BinOp(left, sign, right):
            return OPERATORS[type(sign)](number_of(left, point), number_of(right, point))
        case ast.Call(ast.Name(name), arguments):
            return OPERATORS[name](*(number_of(argument, point) for argument in arguments))
    raise ValueError("not arithmetic")


def power(base: Fraction | complex, exponent: Fraction | complex) -> Fraction | complex:
    """Return base**exponent. Raises UserError if it is huge (9^9^9) or vanishes (e^{-999})."""
    bits = (base.numerator * base.denominator).bit_length() if isinstance(base, Fraction) else 0
    need(bits * abs(exponent) < 5000, "it has too many digits")
    result = base**exponent
    need(isinstance(result, Fraction) or base == 0 or 1e-50 < abs(result) < 1e50, "it vanishes")
    return result


OPERATORS = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Pow: power, ast.Add: operator.add}
OPERATORS |= {ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
OPERATORS |= {"sqrt": lambda radicand: power(radicand, Fraction(1, 2)), "frac": operator.truediv}
