"""Rule-based verifiers, and the rewards that are sums of them.

    python rewards.py FILE --reward math      # try a verifier on completions of known worth

A completion is adversarial input. It is never evaluated, and no text takes long. A verifier is
defined for every completion. A gold answer that it cannot use is an error before training.

This file needs support/user.py alone. Its command also needs support/data.py."""

import argparse
import ast
import cmath
import collections
import concurrent.futures
import copy
import inspect
import operator
import os
import random
import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from support.user import UserError, did_you_mean, expecting, function_of, need, raised

MAX_TEXT = 10_000  # characters of an answer
LARGEST_REWARD = 1e6

VERIFIERS: dict[str, Callable] = {}  # name in --reward -> function
EXTRAS = ("math_symbolic", "code", "code_strict", "judge:FOLDER")  # imported where they are named


def verifier(function: Callable) -> Callable:
    """Register `function(completion, answer)` for `--reward`, under its own name.

    For every completion it returns a number in [0, 1], or a list of (end in characters, reward) of
    steps, the outcome last. Further parameters receive the fields of the row that they name.
    `tokens` is the length of the completion. `need(...)` inside it refuses a gold answer, before
    training. docs/verifiers.md lists the attributes that it may have."""
    VERIFIERS[function.__name__] = function
    return function


def after_thinking(completion: str) -> str:
    """Return the text after the last `</think>`, or "" if a `<think>` is still open."""
    text = completion.rpartition("</think>")[2]
    return "" if "<think>" in text else text


BARE_BOX = re.compile(r"\\boxed +(-?[0-9a-zA-Z]+(?:[.,/][0-9]+)*)")  # \boxed 5
BRACES = re.compile(r"(\\boxed ?\{)|\\[\\{}](?!boxed)|([{}])")


def last_box(text: str, default: str) -> str:
    """Return the content of the last balanced `\\boxed{}`, or `default` if there is none."""
    text = BARE_BOX.sub(r"\\boxed{\1}", text)
    opened = []  # starts of open boxes, None for other braces
    content = default
    for brace in BRACES.finditer(text):
        if brace[1] or brace[2] == "{":
            opened.append(brace[1] and brace.end())
        elif brace[2] and opened and (start := opened.pop()):
            content = text[start : brace.start()]
    # a box that holds a box and anything else names several answers: such a content equals none
    while len(content) <= MAX_TEXT and (box := re.fullmatch(r"\s*\\boxed ?\{(.*)\}\s*", content)):
        content = box[1]
    return content


def final_answer(completion: object, marked: bool = False) -> str:
    """Return the final answer of a text, white space collapsed. Gold answers are read by it, too.

    It is the last `<answer>` after the thinking (or the last box in it), else the last box, else
    the line after the last `####`. Else it is the text, or "" if the answer must be `marked`. An
    `<answer>` that is not closed is no answer."""
    if type(completion) not in (str, int, float):  # a bool is no answer
        return ""
    text = after_thinking(str(completion))
    if "<answer>" in text:
        content, closed, _ = text.rpartition("<answer>")[2].partition("</answer>")
        found = last_box(content, content) if closed else ""
    elif "####" in text:
        line = text.rpartition("####")[2].partition("\n")[0]
        found = last_box(text, line)
    else:
        found = last_box(text, "" if marked else text)
    return " ".join(found.split()) if len(found) <= MAX_TEXT else ""


def gold_answer(answer: object) -> str:
    """Return the final answer of a gold answer. Raise UserError if it has none."""
    text = final_answer(answer)
    need(text, "it has no final answer")
    return text


@verifier
def exact(completion: str, answer: str | int | float) -> bool:
    """1 if the final answer, or the whole text, is the gold one up to case and white space."""
    return final_answer(completion).casefold() == gold_answer(answer).casefold()


@verifier
def f1(completion: str, answer: str | int | float) -> float:
    """Harmonic mean of the precision and recall of words, normalised as SQuAD does."""
    given, gold = counted_words(final_answer(completion)), counted_words(gold_answer(answer))
    need(gold, "it has no word but articles")
    return 2 * (given & gold).total() / (given + gold).total()


def counted_words(text: str) -> collections.Counter:
    """Count the words in lower case, without punctuation and articles."""
    text = re.sub(r"[^\w\s]|_", "", text.lower())
    return collections.Counter(re.sub(r"\b(a|an|the)\b", "", text).split())


DENIAL = re.compile(  # words behind an answer that take it back
    r"""\A \W* (?: which \W+ )? (?: is | was | would | ca | can | could | wo | does )
      (?: n['’]t | [ ] (?:\w+[ ])?? (?: not | never | false | incorrect | wrong
        | ruled | eliminated ) ) \b
    | \b (?: incorrect | wrong ) \b (?! [ ] (?! because | since | here ) \w )
    | (?: \b (?: (?:can)?not | never ) | n['’]t ) \b [^.;\n]{0,30} \b (?: right | answer
        | choice ) \b | \A \W* not \W* \Z | \? \W{0,9} no \b | [≠¬✗✘✕✖❌❎🚫👎] | ~~""",
    re.VERBOSE | re.IGNORECASE,
)
# around a letter, but not ≠, ¬, ~~ and the like
MARKS = r"""[\s\\(){}[\]$*_.,:;!?"'`«»\#=>→–—-]*+"""
CHOICE = re.compile(  # a letter behind nothing but some words
    rf"""
    {MARKS} (?: (?: the | final | correct | best | answer | option | choice | is
      | (?: text | math ) (?: bf | rm )? ) \b {MARKS} )*+
    (?P<letter> [a-z] ) (?! \# )
    (?: {MARKS} | [*_}}\]]*+ (?: [).:] | [ ][-–][ ] ) .* )""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
# B and (b), but not A dog, I think, f(b)
OPTION = re.compile(r"\b(?![AI] (?!is\b|was\b)[a-z])[A-Z]\b|(?<!\w\()\b[a-j]\)")


@verifier
def choice(completion: str, answer: str) -> bool:
    """1 if the answer commits to the gold letter and names no other: `B`, `(B)`, `B. Paris`."""
    gold = chosen_letter(gold_answer(answer))
    need(gold, "it names no letter")
    return chosen_letter(final_answer(completion)) == gold


def chosen_letter(text: str) -> str:
    """Return the letter that a text commits to, in upper case, or ""."""
    found = CHOICE.fullmatch(text)
    if not found:
        return ""
    letter = found["letter"].upper()
    behind = text[found.end("letter") :]
    named = {option[0].upper() for option in OPTION.findall(behind)}
    if named - {letter} or DENIAL.search(behind):
        return ""
    return letter


TAG = re.compile("(</?(?:think|answer)>)")


def think_format(completion: str, answer: object = None) -> bool:
    """1 for `<think>...</think><answer>...</answer>` and nothing else, opening tag optional."""
    text = completion.strip().removeprefix("<think>")
    match [part.strip() for part in TAG.split(text)]:
        case [thought, "</think>", "", "<answer>", said, "</answer>", ""]:
            return thought != "" and said != ""
    return False


think_format.shaping = True  # it moves the policy, and does not say whether an answer is right
VERIFIERS["format"] = think_format

# ---- mathematics ---------------------------------------------------------------------------------


@verifier
def math(completion: str, answer: str | int | float) -> bool:
    """1 if the marked answer is the gold one: as numbers, algebra, points, sets, lists, or text."""
    return same_answer(final_answer(completion, marked=True), gold_answer(answer))


math.lenient = "math_lenient"

NUMBER = re.compile(
    r"""(?: [0-9]*+ \\[dt]?frac \{[0-9]+\} \{[0-9]+\} | (?:[0-9]++[ ])? [0-9]++ [ ]?/[ ]? [0-9]++
    | [0-9][0-9,]*+ (?:\.[0-9]+)? (?:e-?[0-9]+)? | \.[0-9]+ ) [a-zA-Zπ²]*+
    (?: [ ]? \\?% | [ ]++ (?i: percent | hundred | thousand | [bm]illion | dozen | halves | thirds
    | tenths | squared )\b )?""",
    re.VERBOSE,
)
PART = re.compile(  # the number, written #, is a part of an expression
    r"""(?: [\w)\]}] [ ]? [-+/] | [\d)\]}] [ ]? [*x] | [×·÷^_<≤≥≠±√{] | [!<>]= | (?<![=-])> | \w\(
    | \\(?!approx)[a-z]+ | \b(?: minus | negative | plus | or | not | mod | log | by | twice
    | (?:half|root|power)[ ]of ) | n't ) [ ]? \(? \# | \d:\#
    | \# [ ]? (?: [×·÷^_<>≤≥≠±√+*/\\] | -[ ]?[a-z]\b | [nxyz]{1,2}\b )""",
    re.VERBOSE,
)


@verifier
def math_lenient(completion: str, answer: str | int | float) -> bool:
    """As `math`. If nothing is marked, the last number is the answer, if it stands alone."""
    given, gold = final_answer(completion, marked=True), gold_answer(answer)
    text = after_thinking(completion)
    if not re.search(r"<answer>|\\boxed|####", text):
        given = last_number(text)
    return same_answer(given, gold)


def last_number(text: str) -> str:
    """Return the last number, or "" if it is a part of an expression, or taken back."""
    text = re.sub(r"\\[()[\],;!]|[$`]|\*\*|(?<=\d)/[a-z]{3,}", "", text[-MAX_TEXT:])
    text = re.sub("[−–]", "-", text.replace(r"\text{", " "))
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return ""
    last = numbers[-1]
    before = text[: last.start()][-20:]
    behind = text[last.end() :][:100]
    sign = re.search(r"(?:[=:(≈]|\bis) ?- ?\Z|(?<![0-9)]\s)(?<!\S)-\Z|\A- ?\Z", before)
    if PART.search(f"{'' if sign else before}#{behind}") or DENIAL.search(behind):
        return ""
    return "-" * bool(sign) + last[0]


def same_answer(given: str, gold: str) -> bool:
    """Compare two answers. 25% is 1/4 and 25, as a percentage may be asked; 0.7% is not 0.7."""
    if max(len(given), len(gold)) > MAX_EXPRESSION:
        return given == gold
    given, gold = in_our_signs(given), in_our_signs(gold)
    bare, bare_gold = given.removesuffix("%").strip(), gold.removesuffix("%").strip()
    is_percentage = (bare, bare_gold) != (given, gold) and re.match("-?[1-9][0-9.]*$", bare)
    try:
        is_same = alike(meaning_of(given), meaning_of(gold))
    except UNREADABLE:
        blanks = r"\((\w+)\)|\"|(?<!\d) | (?!\d)"  # compared as text
        texts = [re.sub(blanks, r"\1", text) for text in (given, gold)]
        if "\\" not in given:  # \gamma is not \Gamma
            texts = [text.casefold() for text in texts]
        is_same = texts[0] == texts[1] != ""
    return is_same or bool(is_percentage) and same_answer(bare, bare_gold)


def table(rows: str) -> dict[str, str]:
    """Return {"\\\\times": "*", "×": "*", ...} of the row `*←\\\\times,×`."""
    pairs = [row.split("←") for row in rows.split()]
    return {other: ours for ours, others in pairs for other in others.split(",")}


UNREADABLE = (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError)
MAX_EXPRESSION = 300  # characters of an answer that is read as mathematics
SIGNS = table(r"""
    *←×,·,⋅,\times,\cdot  /←÷,⁄,\div  -←−,–  ±←\pm  %←\%  |←∪,\cup  =←≈,\approx,∈,\in
    <=←≤,\le,\leq,\leqslant  >=←≥,\ge,\geq,\geqslant  !=←≠,\ne,\neq  \pi←π  \infty←∞  \sqrt←√
    \frac←\dfrac,\tfrac,\cfrac  ⟨←\{  ⟩←\}  ],[←\\
    ←$,\$,€,£,¥,°,\degree,\(,\),\[,\],\!,\left,\right,\displaystyle,\big,\Big,\bigl,\bigr
""")  # our sign, and others for it
TEXT = r"\\(?:text\w*|mathrm|mathbf|mbox|operatorname)\s*"
REWRITES = {  # from LaTeX towards the syntax of Python. The order counts
    r"\\[,;: ]|\\q?quad\b|~|\s+": " ",
    r"\^ ?\{?\\circ\b\}?|\A\*\*|\*\*\Z|[.。\\] ?\Z": "",
    rf"{TEXT}\{{([^{{}}]*[0-9][^{{}}]*)\}}": r" \1 ",  # \text{5 cm}
    rf"{TEXT}\{{([^{{}}]*)\}}": r' "\1" ',
    r'\A[\s("{[]*([A-Z])[\s)"}\].:,]*\Z': r"\1",  # (A)
    r"(?i)\A\W*(?:the )?(?:final )?(?:answer is|value is|answer:|so )[\s:]*": "",
    r'(?i)"? ?\bper ?cent\b ?"?': "%",
    r'(?:, ?)?"? ?\b(?:and|or)\b ?"?|[;&]|\{,\}': ",",
    r"\\begin ?\{[pb]matrix\}": "[[",
    r"(?:\],\[)? ?\\end ?\{[pb]matrix\}": "]]",
    r"\\(frac|sqrt) ?([0-9a-zA-Z])": r"\\\1{\2}",  # \frac12, \sqrt2
    r"(\\frac ?\{[^{}]*\}) ?([0-9])": r"\1{\2}",
    r"\\?sqrt ?\[(\w+)\]": r" root{\1}",
    r"(?<![\w.^}])([0-9]+) ?\\frac ?\{([0-9]+)\} ?\{([0-9]+)\}": r"(\1+\2/\3)",  # 3\frac12
    r"(?<![\w.^}])([0-9]+) ([0-9]+) ?/ ?([0-9]+)": r"(\1+\2/\3)",  # 3 1/2
    r"\\(frac|sqrt)\b": r" \1",
}


def our_signs(text: str) -> str:
    """Return a text with our signs for those of LaTeX and Unicode."""
    signs = r"\\(?:[a-zA-Z]+|.)|[^\x00-\x7f]|[$~&]"
    return re.sub(signs, lambda found: SIGNS.get(found[0], found[0]), text)


def in_our_signs(text: str) -> str:
    """Return an answer in LaTeX in the syntax of Python, but for its products and words."""
    text = re.sub("([⁰¹²³⁴-⁹]+)", r"^{\1}", re.sub("(?=[¼-¾⅐-⅞])", " ", text))  # x², 3½
    text = our_signs(unicodedata.normalize("NFKC", text))
    for pattern, ours in REWRITES.items():
        text = re.sub(pattern, ours, text)
    if not re.search(r"[(\[⟨]", text):  # 1,234 is a number, (1,234) is a pair
        text = re.sub(r"(?<=[0-9])(?<!\b0)(?<![0-9]{4})[, ](?=[0-9]{3}(?![0-9]))", "", text)
    if "±" in text:
        text = ",".join(part.replace("±", sign) for part in text.split(",") for sign in "+-")
    if re.search("frac|root", text):  # functions of two arguments
        text = re.sub(r"\} ?\{(?!\Z)", ",", text)
    return text.translate(str.maketrans("{}⟨⟩", "(){}")).strip()


GREEK = "pi|infty|alpha|beta|gamma|delta|theta|lambda|mu|sigma|phi|omega"
UNIT = r'(?:"[^"0-9]*"|[a-zA-Z]{3,}+|[A-Z]{2,}+|(?:[ckm]m|[km]g|ft|lb|in|of|[nN]o)\b)'
TOKEN = re.compile(
    rf"""
      (?P<number> (?!0[0-9]) (?: [0-9]+ (?:\.[0-9]*)? | \.[0-9]+ ) (?:[eE]-?[0-9]{{1,3}}\b)? )
    | (?P<call> (?: sqrt | root | frac | [fghFGHNPT] ) [ ]? \( )
    | (?P<words> {UNIT} (?: [ ]* {UNIT} | [ ]?/[ ]?[a-zA-Z]+ )*+ (?: [ ]? \^ \(? [23] \)? )? )
    | (?P<letter> (?: \\ (?:{GREEK}) (?![a-zA-Z]) | pi | [a-zA-Z] ) (?: _\(?\w\)? )? )
    | (?P<sign> \*\* | [<>!]= | [-+*/^(),=<>[\]{{}}|%] )
    | \S
    """,
    re.VERBOSE,
)
NO_UNIT = re.compile(  # words that change a value
    r"hal(?:f|ves)|third|quarter|(?:[0-9]|fif|six|eigh|ten)th|dozen|hundred"
    r"|thousand|[bmtr]illion|squared|cubed|factorial|\b(?:below|not?|is|sqrt|root|frac)\b",
    re.IGNORECASE,
)
IN_PYTHON = dict(zip("^=%[]", ["**", "==", "/100", "('[',", ",']')"]))  # [1,2) is ("[",1,2)


def python_of(text: str, token: re.Pattern = TOKEN) -> str:
    """Write the products and units of an answer as Python does: `(2) * x @ "cm"` for 2x cm."""
    code, last = "", ""
    for found in token.finditer(text):
        kind, piece = found.lastgroup, found[0]
        follows = last in ("number", "letter", "words", ")", "]", "}", "%")  # a value
        if kind is None or follows and (kind == "number" or last == "words" and piece == "("):
            raise ValueError(f"{piece} is no mathematics")
        if kind == "number":
            piece = f"({Fraction(piece)})"
        elif kind == "letter":
            piece = re.sub(r"\W", "", piece) + "_"  # lambda is a word of Python
        elif kind == "words":
            need(not follows or not NO_UNIT.search(piece), f"{piece} changes the value")
            words = " ".join(re.findall(r"[^\W_]+|/", piece))
            if len(words) > 3 or not follows:  # units such as ms and MHz stay
                words = words.casefold().removesuffix("s")
            piece = "@ " * follows + repr(words)
        multiplies = follows and (kind in ("call", "letter") or piece == "(")
        code += " * " * multiplies + IN_PYTHON.get(piece, piece) + " "
        last = piece if kind == "sign" else kind
    return code


def meaning_of(text: str) -> tuple:
    """Return an answer as nested tuples of (kind, part, ...): a list of one item or more."""
    match ast.parse(f"_({python_of(text)})", mode="eval").body:
        case ast.Call(ast.Name("_"), [_, *_] as items, []):
            return ("list", *map(part_of, items))
    raise ValueError("it is empty, or its brackets do not match")


def part_of(node: ast.expr) -> tuple:
    match node:
        case ast.Constant(str(words)):
            return (f"words {words}",)
        case ast.BinOp(value, ast.MatMult(), ast.Constant(str(unit))):
            return (f"unit {unit}", part_of(value))
        case ast.BinOp(left, ast.BitOr(), right):
            return ("union", part_of(left), part_of(right))
        case ast.Tuple(items) | ast.Set(items):
            return (type(node).__name__, *map(part_of, items))
        case ast.Call(ast.Name(function), items) if function not in ("sqrt", "root", "frac"):
            return (f"call {function}", *map(part_of, items))
        case ast.Compare(left, signs, sides):
            kinds = " ".join(type(sign).__name__ for sign in signs)
            first, *others = map(part_of, [left, *sides])
            is_name = isinstance(left, ast.Name) or re.match("call|Tuple|words", first[0])
            if kinds == "Eq" and is_name:
                return (f"name {ast.unparse(left)}", *others)
            return (kinds, first, *others)
    return ("value", *(value_of(node, point) for point in "abc"))


def alike(left: tuple, right: tuple) -> bool:
    """Compare two parts of answers. A name or a unit may be missing on one side."""
    for optional in ("name ", "unit "):
        if left[0].startswith(optional) and not right[0].startswith(optional):
            left = left[1]
        elif right[0].startswith(optional) and not left[0].startswith(optional):
            right = right[1]
    (kind, *parts), (other_kind, *others) = left, right
    if kind != other_kind or len(parts) != len(others):
        return False
    if kind == "value":
        return all(map(near, parts, others))
    if kind in ("list", "Set", "union", "Eq"):
        return in_any_order(parts, others, alike)
    return all(map(alike, parts, others))


def in_any_order(parts: Sequence, others: Sequence, same: Callable) -> bool:
    """Return whether each part is the same as one of the others, each of them used once."""
    others = list(others)
    for part in parts:
        found = next((other for other in others if same(part, other)), None)
        if found is None:
            return False
        others.remove(found)
    return True


def near(left: Fraction | complex, right: Fraction | complex) -> bool:
    """Compare rationals exactly, other numbers to 12 digits."""
    are_exact = isinstance(left, Fraction) and isinstance(right, Fraction)
    return left == right or not are_exact and abs(left - right) < 1e-12 * abs(left)


# ---- verifiers of the built-in tasks -------------------------------------------------------------


@verifier
def arithmetic(completion: str, answer: str) -> bool:
    """1 if the text after the last `#` is exactly the answer."""
    need(type(answer) in (str, int, float) and str(answer).strip(), "it has no final answer")
    return completion.rpartition("#")[1:] == ("#", str(answer))


@verifier
def arithmetic_steps(completion: str, answer: str, prompt: str = "") -> list[tuple[int, float]]:
    """Return (end in characters, reward) of each operation of the prompt, then of the outcome.

    In `7+5=2;2*3=6#6` each step takes the prompt's next operation, modulo 10. A step earns 1 if it
    continues from the last result and is right."""
    value, end, steps = prompt[:1], 0, []
    written = completion.partition("#")[0].split(";")
    for operation, step in zip(re.findall("[+*][0-9]", prompt), written):
        end += len(step) + 1
        right = None
        if re.fullmatch("[0-9]", value):
            right = f"{value}{operation}={exact_value(value + operation) % 10}"
        steps.append((end, float(step == right)))
        value = step[-1:]
    return [*steps, (len(completion), float(arithmetic(completion, answer)))]


@verifier
def countdown(completion: str, answer: dict) -> bool:
    """1 if an expression in + - * / ( ) takes each of `numbers` once and gives `target` exactly."""
    with expecting('expected {"numbers": [3, 5, 2], "target": 13}'):
        numbers, target = sorted(answer["numbers"]), answer["target"]
        are_whole = all(type(number) is int and number >= 0 for number in numbers)
        need(numbers and are_whole, "the numbers are whole, from 0 up")
        need(type(target) in (int, float), f"target {target!r:.80} is no number")

    text = our_signs(final_answer(completion).removesuffix("."))
    shown = re.escape(str(target))  # 3*5-2 = 13, or 13 = 3*5-2
    text = re.sub(rf"\A *{shown} *=|= *{shown} *\Z", "", text, count=1)
    try:
        is_right = exact_value(text) == target
    except UNREADABLE:  # 1/0, open brackets, other signs
        return False
    return is_right and sorted(map(int, re.findall("[0-9]+", text))) == numbers


def exact_value(text: str) -> Fraction:
    """Return the value of an expression in + - * / ( ) and whole numbers, or raise."""
    is_plain = re.fullmatch("[-+*/() 0-9]{1,1000}", text) and "**" not in text
    need(is_plain, f"{text!r:.80} is no arithmetic")
    text = re.sub(r"\b0+(?=[0-9])", "", text)  # Python does not parse 03
    return value_of(ast.parse(text.strip(), mode="eval").body)  # parsed, never evaluated


def power(base: Fraction | complex, exponent: Fraction | complex) -> Fraction | complex:
    """Return base**exponent. ValueError for values that take long, or that lose their digits."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        need(bits * abs(exponent) < 5000, "9^9^9 is too large")
        return base ** int(exponent)
    value = complex(base) ** complex(exponent)
    need(1e-50 < abs(value) < 1e50, f"{value} is too large or too small")
    return value


CONSTANTS = {"pi_": cmath.pi, "e_": cmath.e, "i_": 1j, "infty_": cmath.inf}
OPERATORS = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Pow: power}
OPERATORS |= {ast.Add: operator.add, ast.Sub: operator.sub}
OPERATORS |= {ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_of(node: ast.expr, point: str = "") -> Fraction | complex:
    """Return the value of an expression at a point. A Fraction is exact."""
    match node:
        case ast.Constant(int(number)):
            return Fraction(number)
        case ast.Name(letter):
            number = Fraction(random.Random(letter + point).randint(1, 10**6), 10**6 + 3)
            if point == "a":
                number -= 1  # below 0 there, so that sqrt(x^2) is not x
            return CONSTANTS.get(letter, number)
        case ast.UnaryOp(sign, operand):
            return OPERATORS[type(sign)](value_of(operand, point))
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](value_of(left, point), value_of(right, point))
        case ast.Call(ast.Name("sqrt"), [radicand]):
            return power(value_of(radicand, point), Fraction(1, 2))
        case ast.Call(ast.Name("frac"), [above, below]):
            return value_of(above, point) / value_of(below, point)
        case ast.Call(ast.Name("root"), [degree, radicand]):
            return power(value_of(radicand, point), 1 / value_of(degree, point))
        case ast.Call(left, [right]):  # (3)(5) is a product
            return value_of(left, point) * value_of(right, point)
    raise ValueError(f"{ast.dump(node):.80} is no arithmetic")


# ---- rewards -------------------------------------------------------------------------------------


class Score(NamedTuple):
    """The reward of one completion, and its parts."""

    reward: float  # the weighted sum
    terms: dict[str, float]  # verifier -> its value, before the weight
    steps: list[tuple[int, float]]  # (end in characters, weighted reward) of all but the last step
    rewarded: dict[str, float]  # verifier -> its value plus its steps, weighted
    fault: str  # of the first verifier that raised or returned no number: it counts as 0


class Term(NamedTuple):
    """One verifier of a reward."""

    weight: float
    function: Callable
    signature: inspect.Signature

    def call(self, completion: str, row: dict) -> object:
        """Call the function with copies of the fields of the row that it takes."""
        parameters = self.signature.parameters
        names = row.keys() & list(parameters)[2:]
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            names = row.keys() - {"completion", "answer"}
        fields = copy.deepcopy({name: row[name] for name in names})
        return self.function(completion, copy.deepcopy(row["answer"]), **fields)


class Reward:
    """A weighted sum of verifiers."""

    def __init__(self, terms: dict[str, Term]):
        self.terms = terms
        self.reads_steps = True  # whether rewards of steps before the outcome count
        self.shaping = set()  # terms that do not say whether an answer is right
        for name, term in terms.items():
            if term.weight < 0 or getattr(term.function, "shaping", False):
                self.shaping.add(name)

    def score(self, completions: list[str], rows: list[dict]) -> list[Score]:
        """Score completions, each with its row of the data ("prompt", "answer", ...)."""
        functions = [term.function for term in self.terms.values()]
        for function in functions:
            if hasattr(function, "read"):
                function.read(completions, rows)
        if any(hasattr(function, "threads") for function in functions):
            # torchrun: how many processes of this run share the machine's cores
            workers = max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                return list(pool.map(self.score_one, completions, rows))
        return list(map(self.score_one, completions, rows))

    def score_one(self, completion: str, row: dict) -> Score:
        terms, steps, rewarded, fault = {}, [], {}, ""
        for name, term in self.terms.items():
            try:
                value, parts = outcome_and_steps(term.call(completion, row))
            except (Exception, SystemExit) as error:  # a user's function may do anything
                fault = fault or f"{name}: {raised(error)} on {completion!r:.80}"
                value, parts = 0.0, []
            terms[name] = value
            weighted = [(end, term.weight * part) for end, part in parts if self.reads_steps]
            steps += weighted
            rewarded[name] = term.weight * value + sum(part for _, part in weighted)
        reward = sum(self.terms[name].weight * value for name, value in terms.items())
        return Score(reward, terms, steps, rewarded, fault)

    def note_shaping(self, scores: list[Score]) -> None:
        """Mark each term as shaping whose value was below 0 or above 1, for the rest of the run."""
        for score in scores:
            self.shaping |= {name for name, value in score.terms.items() if not 0 <= value <= 1}

    def verdicts(self, scores: list[Score]) -> tuple[list[float], list[float] | None]:
        """Return (reward, correctness in [0, 1]) of each completion, by the terms that are not
        shaping. If all are, return (whole reward, None)."""
        counting = [name for name in self.terms if name not in self.shaping]
        earned = [sum(score.rewarded[name] for name in counting or self.terms) for score in scores]
        if not counting:
            return earned, None
        weights = {name: self.terms[name].weight for name in counting}
        total = sum(weights.values())
        right = [sum(weights[name] * score.terms[name] for name in counting) for score in scores]
        return earned, [value / total for value in right]

    def lenient_twin(self) -> "Reward | None":
        """Return this sum with the lenient verifiers that its verifiers name, None without any."""
        terms = {}
        for name, term in self.terms.items():
            if twin := getattr(term.function, "lenient", ""):
                name, term = twin, term._replace(function=VERIFIERS[twin])
            terms[name] = term
        if terms.keys() == self.terms.keys():
            return None
        found = Reward(terms)
        found.shaping |= self.shaping & terms.keys()  # those that became shaping during the run
        return found

    def check_answer(self, answer: object) -> None:
        """Raise UserError if a verifier of ours cannot use a gold answer."""
        for name, term in self.terms.items():
            if term.function is VERIFIERS.get(name):
                with expecting(f"field answer: {str(answer)[:80]!r} cannot be used by {name}"):
                    term.function("<answer>A</answer>", answer)

    def check(self, rows: list[dict]) -> None:
        """Try users' functions on the first row. Raise UserError if one gives no reward."""
        row = {**rows[0], "tokens": 1}  # train.py adds the number of tokens of the completion
        for name, term in self.terms.items():
            if term.function is VERIFIERS.get(name):
                continue
            named = list(term.signature.parameters)
            said = f"--reward {name}{term.signature}: expected def f(completion, answer)"
            is_exchanged = named[:1] == ["answer"] or named[1:2] == ["completion"]
            need(not is_exchanged, f"{said}: the completion first")
            is_async = inspect.iscoroutinefunction(term.function)
            need(not is_async, f"{said}: found async def, which nothing awaits")
            values, errors = [], []
            for completion in ("", str(row["answer"]), "so <answer>1</answer> \\boxed{1}"):
                try:
                    values.append(term.call(completion, row))
                except (Exception, SystemExit) as error:  # a user's function may do anything
                    errors.append(raised(error))
            need(values, f"{said}, and fields by name: {', '.join(row)}; it raises {errors[:1]}")
            with expecting(said):
                list(map(outcome_and_steps, values))


def outcome_and_steps(value: object) -> tuple[float, list[tuple[int, float]]]:
    """Return (outcome, steps before it) of a verifier's value, or raise UserError."""
    expected = f"a number up to {LARGEST_REWARD:g}, or a list of (end, number) of steps"
    with expecting(f"it returned {value!r:.80}; expected {expected}"):
        steps = value if isinstance(value, (list, tuple)) else [(0, value)]
        need(not any(isinstance(number, str) for _, number in steps), "a text is no number")
        numbers = [(int(end), float(number)) for end, number in steps]
        need(all(abs(number) <= LARGEST_REWARD for _, number in numbers), "it is none")
        *before, (_, outcome) = numbers
    return outcome, before


def parse_reward(spec: str, device: str = "cpu") -> Reward:
    """Read `--reward`: a sum of `[weight*]verifier`, each a name, `file.py:function`, or a reward
    model, `judge:FOLDER_OR_NAME`, for which `device` is."""
    terms = {}
    for part in spec.split("+"):
        weight, _, place = (text.strip() for text in part.rpartition("*"))
        name, function = place.rpartition(":")[2], None
        if place.startswith("judge:"):
            from support.extras.judge import Judge

            name, function = "judge", Judge(place.removeprefix("judge:"), device)
        elif place == "math_symbolic":
            from support.extras import answers  # noqa: F401 - it registers its verifier
        elif place in ("code", "code_strict"):
            from support.extras import programs  # noqa: F401
        names = "" if ".py:" in place else f" or one of {', '.join([*VERIFIERS, *EXTRAS])}"
        with expecting(f"--reward {spec}: expected a sum of [weight*]file.py:function{names}"):
            need(name not in terms, "a name stands there twice")
            if ":" in place and not function:
                function = function_of(place, "verifier")
            function = function or VERIFIERS.get(place)
            hint = did_you_mean(place, [*VERIFIERS, *EXTRAS])
            need(function, f"rewards.py has no verifier {place!r}{hint}")
            terms[name] = Term(float(weight or 1), function, inspect.signature(function))
            fits = 0 < abs(terms[name].weight) <= LARGEST_REWARD
            need(fits, f"a weight is not 0, and at most {LARGEST_REWARD:g}")
        if hasattr(function, "prepare"):
            function.prepare()
    return Reward(terms)


def soft_overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """Eq. 13 of arXiv 2503.14476: 0 up to max_length - cache tokens, then linear down to -1."""
    return -min(max(length - max_length + cache, 0) / max(cache, 1), 1.0)


def main() -> None:
    from support.data import read_rows

    parser = argparse.ArgumentParser(description="Try a verifier on completions of known worth.")
    parser.add_argument("file", help='JSON lines of {"completion", "answer"}')
    parser.add_argument("--reward", default="math", help="verifiers, as in train.py")
    options = parser.parse_args()
    try:
        reward = parse_reward(options.reward)
        rows = read_rows(options.file, "", reward.check_answer, "completion")
        reward.check(rows)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")

    scores = reward.score([row["completion"] for row in rows], rows)
    mean = sum(score.reward for score in scores) / len(rows)
    print(f"reward {mean:.4f} of {len(rows)}; the first of less than 1:")
    poor = [n for n, score in enumerate(scores) if score.reward < 1]
    for n in poor[:10]:
        answer, completion = rows[n]["answer"], rows[n]["completion"]
        print(f"row {n + 1}: {answer!r:.80} from {completion[-160:]!r} {scores[n].fault}")


if __name__ == "__main__":
    from rewards import main  # not the copy called __main__: extras register with `rewards`

    main()
