"""Rule-based verifiers, the rewards that are made of them, and the built-in tasks.

A verifier maps (completion, answer) to correctness in [0, 1]; `model` alone may say any number.
Completions are adversarial: no verifier raises on one, takes more than linear time, or runs one
outside the sandbox of `code`.

    python rewards.py --reward math FILE    # tries a verifier on completions of known worth

In order: the registry, and how answers are found; `math`, which reads two answers into trees and
compares these; the other verifiers of text; programs and their sandbox; rewards, which are sums of
verifiers; penalties; the tasks. To add a verifier, write a function under `@verifier`.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import decimal
import difflib
import functools
import inspect
import json
import keyword
import operator
import os
import random
import re
import runpy
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from math import ceil, factorial, floor, inf, isqrt, nan, tanh
from pathlib import Path
from typing import NamedTuple

MAX_TEXT = 10_000  # characters of an answer; a longer one is none
MAX_EXPRESSION = 1_000  # characters of an answer that is evaluated
MAX_DEPTH = 60  # brackets within brackets of an answer that is evaluated
MAX_ITEMS = 40  # of a list whose order does not matter
LARGEST = 10**300  # numerator or denominator, so that 9^9^9 takes no time
PRECISIONS = (  # digits of what is no fraction; the more where numbers are far from 1
    decimal.Context(prec=60),
    decimal.Context(prec=200),
)
GUARD_DIGITS = 20  # the last of them, which may be wrong
MAX_NODES = 2_000  # of a product of matrices
MAX_FUNCTIONS = 50  # logarithms, sines and the like of an answer that is evaluated
LARGEST_REWARD = 1e6  # of one verifier, and of its weight: squares of sums must stay float32
CODE_SECONDS = 5  # of wall clock, and of CPU, for one run of a program
START_SECONDS = 0.2  # of a run that are its interpreter's, not the program's
CODE_BYTES = 1 << 20  # of a program's output; its memory may be a thousand times that
ARITHMETIC_OPERATIONS = (2, 4)  # fewest and most operations of a chain of the built-in task
ARITHMETIC_TIMES_ERROR = 0.6  # share of its demonstrations' multiplications that add instead
CALCULATOR_GUESS = 0.4  # share of its demonstrations that do without the calculator
CALCULATOR_ERROR = 0.15  # of the others' calls with a wrong digit, and of second calls left out


# ---------------------------------------------------------------------- mistakes of the user


class UserError(ValueError):
    """A mistake of the user's, in one sentence: the scripts print it and exit with status 2."""


def need(condition: object, message: str) -> None:
    """Raises UserError with the message where the condition is false."""
    if not condition:
        raise UserError(message)


def reason(error: BaseException) -> str:
    """A line that says what went wrong."""
    text = f"{type(error).__name__}: {error}".removeprefix("UserError: ")
    return f"{text.splitlines()[0]:.300}"


@contextlib.contextmanager
def expecting(what: str) -> Iterator[None]:
    """Whatever goes wrong within is a UserError: what was expected, and a line of why it is not."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UserError(f"{what}: {reason(error)}") from error


def printable(text: str) -> str:
    """Text without control characters: a terminal would obey those of a completion."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What a sentence about an unknown word may end with."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


# ---------------------------------------------------------------------- the registry


VERIFIERS: dict[str, Callable] = {}  # what --reward knows by name


def verifier(function: Callable) -> Callable:
    """Registers `function(completion, answer)` for `--reward`, under its own name.

    It returns a number in [0, 1], or a list of (end in characters, reward) of steps, the outcome
    last. A parameter beyond the two takes that field of the row. `need(...)` inside it says which
    gold answers it cannot use: data is checked before training, and a completion earns nothing.
    """

    @functools.wraps(function)
    def guarded(*arguments, **fields):
        try:
            value = function(*arguments, **fields)
            return value if isinstance(value, list) else float(value)
        except Exception:  # what a verifier cannot judge earns nothing
            return 0.0

    VERIFIERS[function.__name__] = guarded
    return function  # as it is: called by its name in this file it still raises


# ---------------------------------------------------------------------- finding the answer


def after_thinking(completion: str) -> str:
    """Text after the last `</think>`; none where a `<think>` is still open."""
    text = completion.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def last_box(text: str, default: str) -> str:
    """Content of the last balanced `\\boxed{}` of the last five, `default` without one."""
    candidates = text.rsplit("\\boxed{", 5)[1:]  # a few: an open one may end no earlier one
    for opened in reversed(candidates):
        depth = 1
        for brace in re.finditer(r"\\.|[{}]", opened[:MAX_TEXT], re.DOTALL):
            if brace[0] == "{":
                depth += 1
            elif brace[0] == "}":
                depth -= 1
            if depth == 0:
                return opened[: brace.start()]
    return default


def final_answer(completion: object, marked: bool = False) -> str:
    """The answer that a text ends with, white space collapsed. Gold answers are read by it, too.

    The last `<answer>` after the thinking (or the last box in it; one that is not closed is no
    answer), else the last box, else the line after the last `####`, else all the text, or "" if it
    must be `marked`.
    """
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
    """The final answer of a row's gold answer; UserError where it has none."""
    text = final_answer(answer)
    need(text, "it has no final answer")
    return text


# ---------------------------------------------------------------------- math: reading


SYMBOLS = {  # LaTeX and Unicode -> our grammar
    # arithmetic
    r"\cdot": "*",
    r"\times": "*",
    r"\ast": "*",
    "×": "*",
    "·": "*",
    "⋅": "*",
    r"\div": "/",
    "÷": "/",
    "−": "-",
    "–": "-",
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\dbinom": r"\binom",
    r"\tbinom": r"\binom",
    "**": "^",
    "√": r"\sqrt ",
    r"\pm": "±",
    r"\mp": "∓",
    r"\%": "%",
    r"^\circ": "°",
    r"^{\circ}": "°",
    r"\degree": "°",
    # letters
    r"\infty": "∞",
    r"\varnothing": "∅",
    r"\emptyset": "∅",
    # relations
    "<=": "≤",
    r"\le": "≤",
    r"\leq": "≤",
    r"\leqslant": "≤",
    ">=": "≥",
    r"\ge": "≥",
    r"\geq": "≥",
    r"\geqslant": "≥",
    "!=": "≠",
    r"\ne": "≠",
    r"\neq": "≠",
    r"\lt": "<",
    r"\gt": ">",
    r"\in": "=",
    "∈": "=",
    r"\approx": "≈",
    # brackets
    r"\langle": "(",
    r"\rangle": ")",
    r"\{": "⟨",
    r"\}": "⟩",
    r"\lbrace": "⟨",
    r"\rbrace": "⟩",
    r"\lvert": "|",
    r"\rvert": "|",
    r"\vert": "|",
    r"\|": "|",
    r"\lfloor": "⌊",
    r"\rfloor": "⌋",
    r"\lceil": "⌈",
    r"\rceil": "⌉",
    # unions and ratios
    r"\backslash": r"\setminus",
    r"\cup": "∪",
    r"\cap": "∩",
    r"\colon": ":",
    # white space
    "~": " ",
    r"\ ": " ",
    r"\,": " ",
    r"\;": " ",
    r"\:": " ",
    "{,}": " ",  # 1{,}000 is 1 000
    "{, }": " ",
    r"\quad": " ",
    r"\qquad": " ",
    # what means nothing
    r"\left": "",
    r"\right": "",
    r"\big": "",
    r"\Big": "",
    r"\bigl": "",
    r"\bigr": "",
    r"\Bigl": "",
    r"\Bigr": "",
    r"\mathbf": "",
    r"\boldsymbol": "",
    r"\underline": "",
    r"\fbox": "",
    r"\large": "",
    r"\Large": "",
    r"\bf": "",
    r"\vec": "",
    r"\angle": "",
    r"\triangle": "",
    r"\displaystyle": "",
    r"\textdollar": "",
    "$": "",
    r"\$": "",
    "€": "",
    "£": "",
    "¥": "",
    "₹": "",
    r"\(": "",
    r"\)": "",
    r"\[": "",
    r"\]": "",
}
GREEK = "α β γ δ ε ζ η θ κ λ μ ν ξ π ρ σ τ φ ϕ χ ψ ω Γ Δ Θ Λ Σ Φ Ψ Ω ℓ"
GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau phi phi"
    " chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell"
)
SYMBOLS |= {sign: f"\\{name} " for sign, name in zip(GREEK.split(), GREEK_NAMES.split())}


def vulgar_fraction(sign: str) -> str:
    value = Fraction(unicodedata.numeric(sign)).limit_denominator(10)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


SYMBOLS |= {sign: vulgar_fraction(sign) for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"}
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n")
SYMBOL = re.compile(
    r"""
      \{,[ ]?\}                    # 1{,}000
    | (?P<raised> [⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+ )
    | (?P<lowered> [₀₁₂₃₄₅₆₇₈₉ₙ]+ )
    | \^ (?: \\circ | \{\\circ\} )  # 90^\circ
    | \\ (?: [a-zA-Z]+ | . )       # any other command
    | [<>!]= | \*\*                # operators of programs
    | [$~]
    | [^\x00-\x7f]                 # Unicode
    """,
    re.VERBOSE | re.DOTALL,
)
TEXT_BOX = re.compile(
    r"""
    \\ (?: text (?:bf|it|rm|normal|sf|tt)? | emph | mathrm | mbox | hbox | operatorname )
    \s* \{ ([^{}]*) \}
    """,
    re.VERBOSE,
)
REALS_SIGN = re.compile(r"\\ (?: mathbb | Bbb ) \s* (?: R | \{ \s* R \s* \} )", re.VERBOSE)
ALL_REALS = re.compile(r"\b(?:all|any) (?:real numbers?|reals)", re.IGNORECASE)
METERS = re.compile(r"(?<= [0-9.)}\s] ) ( [ckm]? m ) (?= [²³] )", re.VERBOSE)  # 5m², but no x = m²
ROW_SPACE = re.compile(r"\\\\ \s* \[ \s* -? [0-9.]+ \s* [a-z]{2} \s* \]", re.VERBOSE)  # \\[4pt]
COLOR = re.compile(r"\\ (?: color | textcolor ) \s* \{ [^{}]* \}", re.VERBOSE)  # \color{red}{42}
REWRITES = (  # what stands in the text, for speed; what to look for; what it becomes
    ('"', re.compile('"'), " "),
    ("eal", ALL_REALS, "ℝ"),
    ("\\", REALS_SIGN, "ℝ"),
    ("²", METERS, r"\\text{\1}"),
    ("³", METERS, r"\\text{\1}"),
    ("olor", COLOR, ""),
    ("Rs", re.compile(r"\bRs\b\.?\s*(?=[0-9])"), ""),
    ("\\", TEXT_BOX, r'"\1"'),
    ("\\\\", ROW_SPACE, r"\\\\ "),
    ("\\!", re.compile(r"\\!\s*"), ""),  # 32,\! 349
)

TOKEN = re.compile(
    r"""
      [0-9]* \. [0-9]* \\overline \s* \{ [0-9]+ \}           # 0.1\overline{6}
    | [0-9]+ _ (?: [0-9]+ | \{[0-9]+\} )                     # 204_5
    | (?:
          (?:
              [1-9][0-9]{0,2} (?: ,[0-9]{3} )+ (?! ,?[0-9] )  # 1,234
            | [1-9][0-9]{0,2} (?: [ ][0-9]{3} )+ (?! [0-9] | [ ]?/ )  # 1 234
            | [0-9]+
          )
          (?: \.[0-9]* )?
        | \.[0-9]+
      )
      (?: [eE] [-+]? [0-9]{1,3} (?![0-9]) )?                 # 1.5e-3
    | "[^"]*"                                                # \text{...}
    | \\begin \s* \{\w+\*?\} (?: \s* \{[lcr|\s]*\} )?        # a matrix, with its columns
    | \\end \s* \{\w+\*?\}
    | (?: cm | m | km | ft | mi ) / (?: s | h | hr | min ) \b  # 10 m/s
    | \\ (?: [a-zA-Z]+ | \\ )                                # a command, or the end of a row
    | (?! [abcxyz]+ (?![a-zA-Z]) ) [a-zA-Z]{3,}             # a word; but xyz is a product
    | (?<=[ ]) (?: is | of | to | so ) (?= [ ] | $ )         # short words
    | (?<=[0-9 ]) (?: cm | mm | km | kg | mL | ft | sq ) (?![a-zA-Z])
    | \A [Nn]o \Z                                            # yes, or no
    | (?: pi | ln | or ) (?![a-zA-Z])
    | [a-zA-Z] '* (?: _ (?: \w | \{[^{}]*\} ) )?             # a letter, perhaps with a subscript
    | \S
    """,
    re.VERBOSE,
)
WORD = re.compile("[a-zA-Z]{2,}|[a-z]+/[a-z]+")
CHOICES = re.compile(r"\W*[A-Z] (?: (?: \W | and | or )+ [A-Z] )+ \W*", re.VERBOSE)  # (A) and (C)
OPENING, CLOSING = ("(", "[", "⟨"), (")", "]", "⟩")


def tokenise(text: str) -> list[str]:
    """Tokens of an answer in LaTeX or plain text. A word, or a text in a box, begins with `"`."""
    for hint, pattern, meaning in REWRITES:
        if hint in text:
            text = pattern.sub(meaning, text)
    text = " ".join(with_our_symbols(text).split())
    if len(text) > 2 * MAX_EXPRESSION:
        raise Unreadable("too long")
    if text.startswith("^") and text.endswith("^"):  # **5**, in bold
        text = text[1:-1]

    tokens, depth = [], 0
    for token in TOKEN.findall(without_end(text)):
        if token in OPENING:
            depth += 1
        elif token in CLOSING:
            depth -= 1
        if token == "%":
            tokens += ["/", "100"]
        elif depth > 0 and re.fullmatch("[0-9,.]+", token):  # (1,234) is a pair
            tokens += re.findall("[0-9.]+|,", token)
        elif token[0] == '"' or WORD.fullmatch(token):
            tokens += word_tokens(token.strip('" '), tokens[-1:])
        else:
            tokens.append(token)
    return tokens


def with_our_symbols(text: str) -> str:
    """`\\dfrac12·π` is `\\frac12*\\pi `, and `x⁴` is `x^4`."""
    return SYMBOL.sub(our_symbol, text)


def our_symbol(found: re.Match) -> str:
    if found["raised"]:
        return "^" + braced(found[0].translate(RAISED))
    if found["lowered"]:
        return "_" + braced(found[0].translate(LOWERED))
    return SYMBOLS.get(found[0], found[0])


def braced(text: str) -> str:
    return text if len(text) == 1 else f"{{{text}}}"


def without_end(text: str) -> str:
    """The text without a full stop, or what is left of a space or a row, at its end."""
    while True:
        shorter = text.strip().removesuffix("\\")
        if not shorter.endswith(".."):
            shorter = shorter.removesuffix(".")
        if shorter == text:
            return text
        text = shorter


def word_tokens(word: str, before: list[str]) -> list[str]:
    """Tokens of a word or of the text in a box: what it means in our grammar, else itself."""
    meaning = word.strip(" ,").lower()
    if meaning in ("and", "or"):
        return [] if before == [","] else [","]
    if meaning in ("percent", "pct"):
        return ["/", "100"]
    if meaning == "ℝ":
        return ["ℝ"]
    if meaning == "infinity":
        return ["∞"]
    if meaning in ("pi", "sqrt"):
        return ["\\" + meaning]
    if word in FUNCTIONS or word in ("e", "i"):
        return [word]
    plain = re.search("[0-9]", word) or not re.search(r"\w", word)  # \text{5 cm}
    if plain or CHOICES.fullmatch(word):
        return tokenise(word)
    return ['"' + word]


# ---------------------------------------------------------------------- math: parsing


class Unreadable(ValueError):
    """The text is no expression of our grammar, or has no value: it is compared as text."""


def bounded(value: Fraction) -> Fraction:
    """The value; raises Unreadable for one so large that computing with it would take long."""
    if max(abs(value.numerator), value.denominator) > LARGEST:
        raise Unreadable("too large")
    return value


class Node(NamedTuple):
    """A piece of an answer: its kind, the pieces that it is made of, and a value of its own.

    number (value: a Fraction, or infinity), letter, word, numeral (value: as written, 204_5)
    sum, product, ratio, union, intersection: of two pieces or more
    negative, inverse, absolute, floor, ceiling, factorial, group (in brackets): of one
    power: base, exponent. root: degree, radicand. binomial: above, below
    A function: argument, or argument and base
    series (value: \\sum or \\prod): first index, last index, term. difference: of two sets
    quantity (value: its unit): of one. ±, ∓: of two, until `alternatives` makes two nodes of them
    list, set, "()", "[]", "(]", "[)": of items. matrix: of rows. row: of items
    =, ≠: of sides. < (value: the signs between them): of sides from small to large
    """

    kind: str
    items: tuple = ()
    value: object = None


def number(value) -> Node:
    return Node("number", value=bounded(Fraction(value)))


ZERO = number(0)
MINUS_ONE = Node("negative", (number(1),))
INFINITY = Node("number", value=inf)
REALS = Node("()", (Node("number", value=-inf), INFINITY))

PRECEDENCE = {
    "∪": 1,
    "∩": 1,
    ":": 1,
    "\\setminus": 1,
    "\\over": 1,
    "\\choose": 1,
    "+": 2,
    "-": 2,
    "±": 2,
    "∓": 2,
    "*": 3,
    "/": 3,
    "^": 4,
}
RELATIONS = ("=", "≠", "<", ">", "≤", "≥", "≈")
TURNED = {">": "<", "≥": "≤"}
LETTER = re.compile(
    r"""
    \\ (?: alpha | beta | gamma | delta | epsilon | varepsilon | zeta | eta | theta | kappa | lambda
         | mu | nu | xi | rho | sigma | tau | phi | varphi | chi | psi | omega | pi
         | Gamma | Delta | Theta | Lambda | Sigma | Phi | Psi | Omega | ell
         | partial | nabla | det | dim | deg )
    | [a-zA-Z] '* (?: _.+ )?
    """,
    re.VERBOSE,
)
PAIRS = ("()", "[]", "(]", "[)")  # intervals, points
SERIES = ("\\sum", "\\prod")
MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array")
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
    "lakh": 10**5,
    "crore": 10**7,
}
MULTIPLIES = re.compile(  # words behind a number that make another one of it
    r"""
    (?: and [ ] an? [ ] )?
    (?:
        hal(?:f|ves) | (?: third | quarter ) s? | [a-z]+ty-(?: first | second | third ) s?
      | [a-z-]* (?: four | fif | six | seven | eigh | nin | ten | eleven | twelf | teen | tie
        | hundred | thousand | illion ) ths?
      | squared | cubed | factorial | tens | score | gross | below
    ) \b
    """,
    re.VERBOSE,
)
CHANGES_VALUE = re.compile(  # words behind a number that are no unit of it
    rf"""
    \b (?:
        {MULTIPLIES.pattern}
      | double | twice | triple | plus | minus | negative | over
      | point | base | modulo | mod | choose | percent (?:age)? | mil | mill | mn | bn
      | and | or | so | not | is | are | was | wrong | false | incorrect | to | by | than | less
      | least | most | about | approximately | roughly | almost | nearly | maybe | perhaps
    ) \b
    """,
    re.VERBOSE,
)
POWERS = {"square": "2", "sq": "2", "cubic": "3"}
SAME_UNIT = {  # other ways to write a unit
    "centimeter": "cm",
    "millimeter": "mm",
    "kilometer": "km",
    "meter": "m",
    "kilogram": "kg",
    "gram": "g",
    "inches": "in",
    "inch": "in",
    "feet": "ft",
    "hour": "h",
    "hr": "h",
    "minute": "min",
    "second": "s",
    "mile": "mi",
    "mph": "mi/h",
    "kph": "km/h",
    "per": "/",
    "degree": "",
}
LEAD_IN = re.compile(  # words that may stand before a value
    r"(?: .*\s )? (?: is | are | equals | answer:? | about | approximately | Rs\.? | USD | EUR )",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
NO_LEAD_IN = re.compile(  # words before it that may say something else than that it is the answer
    rf"""
    \b (?:
        {MULTIPLIES.pattern}
      | double | twice | triple | times | minus | negative | over | one [ ] of
      | percent (?:age)? | root | square | cube | inverse | reciprocal | opposite | logarithm
      | not | no | never | neither | wrong | false | incorrect | if | unless | than | except
    ) \b | n't \b
    """,
    re.VERBOSE | re.IGNORECASE,
)


def read(text: str) -> Node:
    """The tree of an answer; raises Unreadable where our grammar has none."""
    parser = Parser(tokenise(text))
    items = parser.items()
    if parser.tokens:
        raise Unreadable(f"{parser.tokens[-1]} is left over")
    if sum(map(count_functions, items)) > MAX_FUNCTIONS:
        raise Unreadable("too many functions")
    if len(items) == 1:
        return collected(alternatives(items[0]))
    return collected(alternatives(Node("list", tuple(items))))


def collected(node: Node) -> Node:
    """x = (1, 2, 3) for x = 1, 2, 3 and for x = 1, x = 2, x = 3."""
    if node.kind != "list" or not is_named(node.items[0]):
        return node
    name = node.items[0].items[0]
    found = []
    for item in node.items:
        if is_named(item) and item.items[0] == name:
            item = item.items[1]
        elif item.kind == "=":
            return node
        found.append(item)
    return Node("=", (name, Node("list", tuple(found))))


class Parser:
    """Recursive descent over a stack of tokens: the next one is the last."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens[::-1]
        self.last = ""  # the token taken last
        self.depth = 0  # of recursion
        self.bars = 0  # open | of absolute values
        self.angles = 0  # functions of an angle that are open: there 30° is pi/6

    def next_is(self, *symbols: str) -> bool:
        return bool(self.tokens) and self.tokens[-1] in symbols

    def next_is_word(self) -> bool:
        return bool(self.tokens) and self.tokens[-1][0] == '"'

    def take(self, *expected: str) -> str:
        """The next token, which must be one of those expected, if any are."""
        if not self.tokens:
            raise Unreadable("something is missing at the end")
        if expected and self.tokens[-1] not in expected:
            raise Unreadable(f"expected {expected}")
        self.last = self.tokens.pop()
        return self.last

    def items(self) -> list[Node]:
        """Items of a list, as far as it goes."""
        found = [self.relation()]
        while self.next_is(",", ";"):
            self.take()
            if not self.tokens or self.next_is(*CLOSING):  # 1, 2,
                break
            found.append(self.relation())
        return found

    def relation(self) -> Node:
        """x = 1, 1 < x <= 2, or a quantity without a relation."""
        if self.next_is("=", "≈"):  # = 5
            self.take()
        sides, signs = [self.quantity()], []
        while self.next_is(*RELATIONS):
            signs.append(self.take())
            sides.append(self.quantity())
        if "≈" in signs:
            sides, signs = before_approximation(sides, signs)
        if not signs:
            return sides[0]
        if set(signs) == {"="} or signs == ["≠"]:
            return Node(signs[0], without_steps(sides))
        if set(signs) <= TURNED.keys():  # a > b is b < a
            sides = sides[::-1]
            signs = [TURNED[sign] for sign in signs[::-1]]
        if set(signs) <= {"<", "≤"}:
            return Node("<", tuple(sides), tuple(signs))
        raise Unreadable("relations of several kinds")

    def quantity(self) -> Node:
        """An expression, perhaps with words before it and a unit after it."""
        if self.next_is_word():
            words = self.words()
            ends = not self.tokens or self.next_is(*RELATIONS, *CLOSING, ",", ";", "&", "\\\\")
            if ends:
                return Node("word", value=words.strip(" ().:,"))
            if not LEAD_IN.fullmatch(words) or NO_LEAD_IN.search(words):  # the answer is 5
                raise Unreadable("words before a value")
        value = self.expression()
        if not self.next_is_word():
            return value
        is_unknown = value.kind == "letter" and value.value != "\\pi"
        if is_unknown or value.kind == "group" or value == REALS:
            raise Unreadable("a unit without a number")
        return self.with_unit(value)

    def words(self) -> str:
        found = []
        while self.next_is_word():
            found.append(self.take()[1:])
        return " ".join(found)

    def with_unit(self, value: Node) -> Node:
        """The value with the unit that follows; scale words such as million multiply it."""
        words = self.words().lower().split()
        while words and words[0].rstrip("s") in SCALES:
            scale = SCALES[words.pop(0).rstrip("s")]
            value = combine("*", value, number(scale))
        if CHANGES_VALUE.search(" ".join(words)):
            raise Unreadable("words that change the value")
        unit = unit_of(words)
        while len(self.tokens) > 1 and self.next_is("/") and self.tokens[-2][0] == '"':  # km / h
            self.take()
            unit += "/" + unit_of(self.words().lower().split())
        if self.next_is("^"):  # cm^2
            self.take()
            unit += self.square_or_cube()
        if not unit:
            return value
        return Node("quantity", (value,), unit)

    def square_or_cube(self) -> str:
        power = self.take("2", "3", "{")
        if power == "{":
            power = self.take("2", "3")
            self.take("}")
        return power

    def expression(self, level: int = 1, mixed: bool = True) -> Node:
        """An operand, and all that operators bind to it at least as tightly as `level`.

        mixed: a number may be a mixed one, 3 1/2; in an exponent it is not."""
        self.deepen()
        value = self.postfixed(self.operand(mixed))
        powers = 0
        while True:
            implied = self.product_without_sign()
            if not implied and not self.next_is(*PRECEDENCE):
                break
            symbol = "*" if implied else self.tokens[-1]
            if PRECEDENCE[symbol] < level:
                break
            if not implied:
                self.take()
            powers += symbol == "^"
            if powers > 10:
                raise Unreadable("a tower")
            right = self.expression(PRECEDENCE[symbol] + 1, mixed=symbol != "^")
            value = combine(symbol, value, right)
        self.depth -= 1
        return value

    def deepen(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")

    def product_without_sign(self) -> bool:
        """Whether the next token multiplies as it stands: 2x, 2(x + 1), 2\\sqrt 3, (n + 1)2^n."""
        if not self.tokens:
            return False
        token = self.tokens[-1]
        if self.last in (")", "}") and token.isdigit():
            return self.tokens[-2:-1] == ["^"]
        if token == "|":
            return self.bars == 0
        if token in ("(", "{", "⌊", "⌈", "\\frac", "\\sqrt", "\\binom", "∞", *SERIES):
            return True
        if token.startswith("\\begin"):
            return True
        return token.strip("\\") in FUNCTIONS or LETTER.fullmatch(token) is not None

    def operand(self, mixed: bool) -> Node:
        token = self.take()
        if token in "+-±∓":
            return combine(token, ZERO, self.expression(PRECEDENCE["^"]))
        if token == "\\frac":
            return self.fraction()
        if token == "\\sqrt":
            return self.root()
        if token == "\\binom":
            return Node("binomial", (self.digit_or_operand(), self.digit_or_operand()))
        if token in SERIES:
            return self.series(token)
        if token in ("(", "[", "⟨", "{"):
            return self.bracket(token)
        if token == "|":
            return self.absolute()
        if token in ("⌊", "⌈"):
            return self.rounded(token)
        if token.startswith("\\begin"):
            return self.matrix(token.partition("{")[2].partition("}")[0])
        if token.strip("\\") in FUNCTIONS:
            return self.function(token.strip("\\"))
        if token == "∞":
            return INFINITY
        if token == "∅":
            return Node("set")
        if token == "ℝ":
            return REALS
        if LETTER.fullmatch(token):
            return Node("letter", value=re.sub("[{} ]", "", token))
        return self.number(token, mixed)

    def postfixed(self, value: Node) -> Node:
        """5! and 30°"""
        while self.next_is("!", "°"):
            if self.take() == "!":
                if value.kind == "factorial":
                    raise Unreadable("several !")
                value = Node("factorial", (value,))
            elif self.angles:
                value = Node("product", (value, Node("letter", value="\\pi"), number("1/180")))
            elif self.next_is("C", "F"):  # 20°C
                value = Node("quantity", (value,), self.take().lower())
        return value

    def number(self, token: str, mixed: bool) -> Node:
        if not re.match(r"[0-9]|\.[0-9\\]", token):
            raise Unreadable(f"{token} has no value")
        if "_" in token:
            return Node("numeral", value=re.sub("[{}]", "", token))
        if "\\overline" in token:
            return number(repeating_decimal(token))
        value = number(re.sub("[, ]", "", token))
        if mixed and token.isdigit():
            return self.mixed_number(value)
        return value

    def mixed_number(self, whole: Node) -> Node:
        """3\\frac12 and 3 1/2 are sums; 3\\frac{x}{2} is a product."""
        if self.next_is("\\frac"):
            self.take()
            fraction = self.fraction()
            over, under = fraction.items[0], fraction.items[1].items[0]
            if is_whole(over) and is_whole(under):
                return combine("+", whole, fraction)
            return combine("*", whole, fraction)
        if re.fullmatch(r"[0-9]+ / [0-9]+", " ".join(self.tokens[:-4:-1])):
            over, _, under = (self.take() for _ in range(3))  # no more: 3 1/2% is 3.5%
            return combine("+", whole, combine("/", number(over), number(under)))
        return whole

    def fraction(self) -> Node:
        numerator = self.digit_or_operand()
        return Node("product", (numerator, Node("inverse", (self.digit_or_operand(),))))

    def digit_or_operand(self) -> Node:
        """What a LaTeX command takes without braces: one digit of \\frac12."""
        if self.tokens and self.tokens[-1].isdigit():
            digits = self.take()
            if digits[1:]:
                self.tokens.append(digits[1:])
            return number(digits[0])
        return ungrouped(self.bare_operand())

    def bare_operand(self) -> Node:
        """What a root, a fraction or a function takes, with or without brackets."""
        self.deepen()
        value = self.operand(mixed=False)
        self.depth -= 1
        return value

    def root(self) -> Node:
        degree = number(2)
        if self.next_is("["):
            self.take()
            degree = self.expression()
            self.take("]")
        return Node("root", (degree, self.bare_operand()))

    def series(self, sign: str) -> Node:
        """\\sum_{k=0}^{n} k^2, as far as the next + or -."""
        self.take("_")
        self.take("{")
        first = self.relation()
        self.take("}")
        self.take("^")
        last = self.digit_or_operand()
        return Node("series", (first, last, self.expression(PRECEDENCE["*"])), sign)

    def bracket(self, opening: str) -> Node:
        if opening == "⟨" and self.next_is("⟩"):
            self.take()
            return Node("set")
        bars, self.bars = self.bars, 0
        items = tuple(self.items())
        self.bars = bars
        kind = opening + self.take("}", *CLOSING)
        if len(items) == 1 and items[0].kind == "matrix":
            return items[0]
        if len(items) == 1 and kind in ("()", "{}"):
            return Node("group", items)
        if kind == "{}":
            return alternatives(Node("list", items))
        if kind == "⟨⟩":
            return alternatives(Node("set", items))
        if kind in PAIRS:
            return Node(kind, items)
        raise Unreadable(f"{kind} is no bracket")

    def absolute(self) -> Node:
        self.bars += 1
        value = self.expression()
        self.take("|")
        self.bars -= 1
        return Node("absolute", (value,))

    def rounded(self, opening: str) -> Node:
        value = self.expression()
        self.take("⌋" if opening == "⌊" else "⌉")
        return Node("floor" if opening == "⌊" else "ceiling", (value,))

    def matrix(self, kind: str) -> Node:
        if kind not in MATRICES:
            raise Unreadable(kind)
        rows, row = [], []
        while not self.at_end_of_matrix():
            row.append(self.quantity())
            if self.next_is("&"):
                self.take()
                continue
            if not self.at_end_of_matrix():
                self.take("\\\\")
            rows.append(Node("row", tuple(row)))
            row = []
        self.take()
        return Node("matrix", tuple(rows))

    def at_end_of_matrix(self) -> bool:
        return bool(self.tokens) and self.tokens[-1].startswith("\\end")

    def function(self, name: str) -> Node:
        """sin x, sin^2(x), sin^{-1} x, log_2 8"""
        base = power = None
        if self.next_is("_"):
            self.take()
            base = self.digit_or_operand()
        if self.next_is("^"):
            self.take()
            power = ungrouped(self.bare_operand())
        if power == MINUS_ONE and "arc" + name in FUNCTIONS:
            name, power = "arc" + name, None
        self.angles += name in ANGLES
        items = [self.argument()]
        self.angles -= name in ANGLES
        if base is not None:
            if name != "log":
                raise Unreadable("a base")
            items.append(base)
        value = Node(name, tuple(items))
        if power is None:
            return value
        return Node("power", (value, power))

    def argument(self) -> Node:
        """In brackets, or a product as far as the next sign or function: sin 2x cos y."""
        if self.next_is("(", "{"):
            return self.postfixed(self.bare_operand())
        factors = [self.expression(PRECEDENCE["^"])]
        while self.product_without_sign() and self.tokens[-1].strip("\\") not in FUNCTIONS:
            if self.next_is("("):
                break
            factors.append(self.expression(PRECEDENCE["^"]))
        return Node("product", tuple(factors))


KINDS = {  # of a node for a sign between two
    "\\choose": "binomial",
    "\\setminus": "difference",
    "+": "sum",
    "*": "product",
    "^": "power",
    ":": "ratio",
    "∪": "union",
    "∩": "intersection",
    "±": "±",
    "∓": "∓",
}


SIDES_DIFFER = ("power", "binomial", "difference", "±", "∓")


def combine(symbol: str, left: Node, right: Node) -> Node:
    """A node of one operation. Sums, products and unions grow instead of nesting."""
    if "matrix" in (left.kind, right.kind):
        return combine_matrix(symbol, left, right)
    if symbol == "-":
        symbol, right = "+", Node("negative", (right,))
    if symbol in ("/", "\\over"):
        symbol, right = "*", Node("inverse", (right,))
    if symbol == "+" and left == ZERO:
        return right
    kind = KINDS[symbol]
    if kind in SIDES_DIFFER or left.kind != kind:
        return Node(kind, (left, right))
    return Node(kind, (*left.items, right))


def combine_matrix(symbol: str, left: Node, right: Node) -> Node:
    """A matrix, by its entries: A + B, A - B, -A, 2A, A/2, AB."""
    if left == ZERO:
        return each_entry(right, lambda entry: combine(symbol, ZERO, entry))
    if symbol == "*" and left.kind != "matrix":
        return each_entry(right, lambda entry: combine("*", left, entry))
    if symbol in "*/" and right.kind != "matrix":
        return each_entry(left, lambda entry: combine(symbol, entry, right))
    widths = [[len(row.items) for row in side.items] for side in (left, right)]
    if symbol == "*" and set(widths[0]) == {len(widths[1])} and len(set(widths[1])) == 1:
        return product_of_matrices(left, right)
    if symbol not in "+-" or left.kind != right.kind or widths[0] != widths[1]:
        raise Unreadable("no operation on these matrices")
    others = iter([entry for row in right.items for entry in row.items])
    return each_entry(left, lambda entry: combine(symbol, entry, next(others)))


def product_of_matrices(left: Node, right: Node) -> Node:
    """Rows times columns."""
    columns = list(zip(*(row.items for row in right.items)))
    rows = []
    for row in left.items:
        entries = []
        for column in columns:
            products = tuple(combine("*", *pair) for pair in zip(row.items, column))
            entries.append(Node("sum", products))
        rows.append(Node("row", tuple(entries)))
    product = Node("matrix", tuple(rows))
    if size(product) > MAX_NODES:  # of many factors it would grow without bound
        raise Unreadable("too many products of matrices")
    return product


def size(node: Node) -> int:
    """Number of its nodes, or more than MAX_NODES."""
    total = 1
    for item in node.items:
        total += size(item)
        if total > MAX_NODES:
            break
    return total


def each_entry(matrix: Node, function: Callable[[Node], Node]) -> Node:
    rows = [Node("row", tuple(map(function, row.items))) for row in matrix.items]
    return Node("matrix", tuple(rows))


def repeating_decimal(token: str) -> Fraction:
    """0.1\\overline{6} is 1/6."""
    written, repeated = token.rstrip("}").split("\\overline")
    repeated = repeated.strip(" {")
    places = len(written.partition(".")[2])
    once = Fraction(int(repeated), 10 ** len(repeated) - 1)
    return Fraction(written + "0") + once / 10**places


def unit_of(words: list[str]) -> str:
    """One way to write a unit: square centimeters are cm2."""
    unit, power = "", ""
    for word in words:
        if word in POWERS:
            power = POWERS[word]
        else:
            singular = word.removesuffix("s")
            unit += SAME_UNIT.get(word, SAME_UNIT.get(singular, singular))
    return re.sub("[^a-z0-9/^]", "", unit) + power


def without_steps(sides: list[Node]) -> tuple[Node, ...]:
    """x = 5 for x = 2 + 3 = 5: what comes of a computation is its last number, whatever its steps
    are. x = 5 = 6 computes nothing: it says two things."""
    name, *numbers = sides
    computes = len(numbers) > 1 and numbers[0].kind in ("sum", "product", "ratio")
    if computes and is_name(name) and not any(map(has_unknowns, numbers)):
        return name, numbers[-1]
    return tuple(sides)


def before_approximation(sides: list[Node], signs: list[str]) -> tuple[list, list]:
    """1/3 for 1/3 ≈ 0.33, and x = 11 for x ≈ 11."""
    end = signs.index("≈")
    if end == 0 and is_name(sides[0]):
        return sides[:2], ["="]
    return sides[: end + 1], signs[:end]


def count_functions(node: Node) -> int:
    """How many of its pieces take long to compute."""
    takes_long = node.kind in FUNCTIONS
    if node.kind == "power":
        takes_long = not is_whole(ungrouped(node.items[1]))
    if node.kind == "root":
        takes_long = node.items[0] != number(2)
    return takes_long + sum(map(count_functions, node.items))


def is_whole(node: Node) -> bool:
    return isinstance(node.value, Fraction) and node.value.denominator == 1


def ungrouped(node: Node) -> Node:
    """A node without brackets that only group."""
    while node.kind == "group":
        node = node.items[0]
    return node


def is_name(node: Node) -> bool:
    """What may stand before `=` and be left out: x, f(x), f^{-1}(x), (x, y), |AB|, NO/BO."""
    if node.kind in ("letter", "word"):
        return True
    if node.kind == "product":
        first, *others = node.items
        calls = all(is_name(item) or is_argument(item) for item in others)
        return is_name(first) and calls
    if node.kind == "power":
        return is_name(node.items[0]) and ungrouped(node.items[1]) == MINUS_ONE
    grows = node.kind in FUNCTIONS or node.kind in (
        *("group", "()", "absolute", "inverse", "ratio", "union", "intersection", "matrix", "row"),
    )
    return grows and all(map(is_name, node.items))


def is_argument(node: Node) -> bool:
    """(3) of f(3)"""
    if node.kind not in ("group", "()"):
        return False
    numbers = ("number", "negative")
    return all(is_name(item) or item.kind in numbers for item in node.items)


def is_named(node: Node) -> bool:
    """x = 5"""
    return node.kind == "=" and is_name(node.items[0]) and len(node.items) == 2


def has_unknowns(node: Node) -> bool:
    """Whether there are letters in it, but for pi, e and i."""
    is_letter = node.kind in ("letter", "word") and node.value not in CONSTANTS
    return is_letter or any(map(has_unknowns, node.items))


def alternatives(node: Node) -> Node:
    """The node without ±: where it has one, the list of what it stands for."""
    if node.kind in ("list", "set"):
        items = []
        for item in map(alternatives, node.items):
            if item.kind == "list":
                items += item.items
            else:
                items.append(item)
        return Node(node.kind, tuple(items))
    if not has_sign(node):
        return node
    return Node("list", (with_sign(node, "±", "∓"), with_sign(node, "∓", "±")))


def has_sign(node: Node) -> bool:
    return node.kind in ("±", "∓") or any(map(has_sign, node.items))


def with_sign(node: Node, plus: str, minus: str) -> Node:
    """The node with + for one of the signs and - for the other."""
    items = tuple(with_sign(item, plus, minus) for item in node.items)
    if node.kind == plus:
        return combine("+", *items)
    if node.kind == minus:
        return combine("-", *items)
    return node._replace(items=items)


# ---------------------------------------------------------------------- math: values


# at each, letters have other values; the numbers were chosen so that somewhere the signs of x and
# y differ, as of almost any two common letters
POINTS = ("negative", "positive", "33", "132", "243", "387")


class Imprecise(Exception):
    """A number is too large or too small for the digits that we compute with: more are needed."""


class Approximation(NamedTuple):
    """A complex number, to as many digits as the decimal context has. 0 is always a Fraction."""

    real: Decimal
    imag: Decimal = Decimal(0)


ONE, TWO = Fraction(1), Fraction(2)
IMAGINARY = Approximation(Decimal(0), Decimal(1))  # i
CONSTANTS = ("\\pi", "e", "i")


def values(node: Node) -> list:
    """A node's value at each point; raises Unreadable where it has none."""
    return [value_at(node, point) for point in POINTS]


def value_at(node: Node, point: str) -> Fraction | Approximation | float:
    """The value of an expression where every letter has the value that `point` gives it.

    A Fraction is exact. Of the floats there are infinity and its opposite alone.
    """
    if node.kind == "number":
        return node.value
    if node.kind == "letter":
        return letter_value(node.value, point)
    operands = [value_at(item, point) for item in node.items]
    if node.kind in ("group", "quantity"):
        return operands[0]
    if node.kind == "sum":
        return functools.reduce(add, operands)
    if node.kind == "product":
        return functools.reduce(multiply, operands)
    if node.kind == "ratio" and len(operands) == 2:
        return divide(*operands)
    if node.kind in OPERATIONS:
        return OPERATIONS[node.kind](*operands)
    if node.kind in FUNCTIONS:
        return FUNCTIONS[node.kind](*operands)
    raise Unreadable(f"{node.kind} has no value")


def letter_value(name: str, point: str) -> Fraction | Approximation:
    if name == "i":
        return IMAGINARY
    if name == "e":
        return exp(ONE)
    if name == "\\pi":
        return Approximation(circle_constant(digits()))
    return unknown(name, point)


@functools.lru_cache(maxsize=1000)
def unknown(name: str, point: str) -> Fraction:
    """A number that nobody would write.

    Letters are all negative at the first point, so that sqrt(x^2) is not x, all positive at the
    second, so that |x| is not -x, and of either sign at the others, so that |x| + |y| is not
    |x + y|.
    """
    rng = random.Random(f"{name} {point}")
    size = Fraction(rng.randint(1, 2**32), 2**30 + 3)
    sign = {"negative": -1, "positive": 1}.get(point, rng.choice((-1, 1)))
    return sign * size


def digits() -> int:
    """How many we compute with."""
    return decimal.getcontext().prec


def bounded_approximation(real: Decimal, imag: Decimal = Decimal(0)) -> Fraction | Approximation:
    """The number, as far as a digit next to the point would still be seen beside it."""
    size = max(abs(real), abs(imag))
    if not size:
        return Fraction(0)
    if abs(size.adjusted()) > (digits() - 2 * GUARD_DIGITS) // 2:
        raise Imprecise
    return Approximation(real, imag)


def parts(value: Fraction | Approximation) -> tuple[Decimal, Decimal]:
    """Real and imaginary part."""
    if isinstance(value, Approximation):
        return value
    number = bounded_approximation(Decimal(value.numerator) / value.denominator)
    if isinstance(number, Fraction):  # 0
        return Decimal(0), Decimal(0)
    return number


def are_exact(*found) -> bool:
    return all(isinstance(value, Fraction) for value in found)


def is_real(value) -> bool:
    return not isinstance(value, Approximation) or value.imag == 0


def is_infinite(value) -> bool:
    return isinstance(value, float)


def operation(function: Callable) -> Callable:
    """The function on finite values, as far as its own are numbers of a reasonable size."""

    @functools.wraps(function)
    def bounded_function(*operands):
        if any(map(is_infinite, operands)):  # infinity - infinity is not 0
            raise Unreadable("arithmetic with infinity")
        try:
            value = function(*operands)
        except (ArithmeticError, ValueError) as error:
            raise Unreadable("no value, or one beyond all bounds") from error
        if isinstance(value, Fraction):
            return bounded(value)
        return bounded_approximation(*value)

    return bounded_function


@operation
def add(left, right):
    """What is left of both after they cancel, but for the error of their last digits, is 0."""
    if are_exact(left, right):
        return left + right
    (a, b), (c, d) = parts(left), parts(right)
    total = Approximation(a + c, b + d)
    noise = max(map(abs, (a, b, c, d))).scaleb(GUARD_DIGITS - digits())
    if max(map(abs, total)) <= noise:
        return Fraction(0)
    return total


@operation
def multiply(left, right):
    if are_exact(left, right):
        return left * right
    (a, b), (c, d) = parts(left), parts(right)
    return Approximation(a * c - b * d, a * d + b * c)


@operation
def invert(value):
    if are_exact(value):
        return 1 / value
    size = value.real * value.real + value.imag * value.imag
    return Approximation(value.real / size, -value.imag / size)


def divide(left, right):
    return multiply(left, invert(right))


def negate(value):
    if is_infinite(value):
        return -value
    return multiply(-ONE, value)


@operation
def power(base, exponent):
    """base^exponent; the real root of a negative number where its degree is odd."""
    if not are_exact(exponent):
        return exp(multiply(exponent, ln(base)))
    if abs(exponent) > 300:
        raise Unreadable("9^9^9")
    if exponent.denominator == 1:
        return whole_power(base, int(exponent))
    if are_exact(base):
        exact = exact_root(base, exponent.denominator)
        if exact is not None:
            return exact**exponent.numerator
    if is_real(base) and parts(base)[0] < 0:
        opposite = power(negate(base), exponent)
        if exponent.denominator == 2:
            return multiply(opposite, whole_power(IMAGINARY, exponent.numerator))
        if exponent.denominator % 2 == 1:
            return multiply(opposite, (-ONE) ** exponent.numerator)
    elif is_real(base) and exponent.denominator == 2:
        return whole_power(Approximation(parts(base)[0].sqrt()), exponent.numerator)
    return exp(multiply(exponent, ln(base)))


def whole_power(base, exponent: int):
    if are_exact(base):
        return base**exponent
    if exponent < 0:
        return whole_power(invert(base), -exponent)
    if is_real(base):
        return Approximation(base.real**exponent)
    result = ONE
    for digit in f"{exponent:b}":
        result = multiply(result, result)
        if digit == "1":
            result = multiply(result, base)
    return result


def exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The root of a rational where that is rational, and real."""
    if value < 0:
        opposite = exact_root(-value, degree) if degree % 2 == 1 else None
        return None if opposite is None else -opposite
    roots = []
    for part in (value.numerator, value.denominator):
        nearest = isqrt(part) if degree == 2 else round(part ** (1 / degree))
        if nearest**degree != part:
            return None
        roots.append(nearest)
    return Fraction(*roots)


@operation
def root(degree, radicand):
    return power(radicand, invert(degree))


@operation
def absolute(value):
    if are_exact(value):
        return abs(value)
    if is_real(value):
        return Approximation(abs(value.real))
    return Approximation((value.real * value.real + value.imag * value.imag).sqrt())


@operation
def floor_of(value):
    return Fraction(floor(rounding(value)))


@operation
def ceiling_of(value):
    return Fraction(ceil(rounding(value)))


def rounding(value) -> Fraction | Decimal:
    """The real number; the whole one that it is, but for the error of its last digits."""
    if are_exact(value):
        return value
    if not is_real(value):
        raise Unreadable("no floor")
    nearest = Fraction(round(value.real))
    if add(value, negate(nearest)) == 0:
        return nearest
    return value.real


@operation
def factorial_of(value) -> Fraction:
    if not are_exact(value) or value not in range(170):
        raise Unreadable("no factorial")
    return Fraction(factorial(int(value)))


@operation
def binomial(above, below):
    """above (above - 1) ... / below!, which has a value for any `above`."""
    if not are_exact(below) or below not in range(100):
        raise Unreadable("no binomial coefficient")
    factors = [add(above, Fraction(-n)) for n in range(int(below))]
    product = functools.reduce(multiply, factors, ONE)
    return divide(product, Fraction(factorial(int(below))))


OPERATIONS = {  # kind of a node -> what it computes
    "negative": negate,  # of infinity, too
    "inverse": invert,
    "power": power,
    "root": root,
    "absolute": absolute,
    "floor": floor_of,
    "ceiling": ceiling_of,
    "factorial": factorial_of,
    "binomial": binomial,
}


# `digits` is the precision of the decimal context, in which these functions compute anyway: it is
# part of their caches' keys, so that nothing comes from there that has fewer


@functools.lru_cache(maxsize=10)
def circle_constant(digits: int) -> Decimal:
    """pi, by John Machin's formula."""
    return 16 * arctangent_series(1 / Decimal(5)) - 4 * arctangent_series(1 / Decimal(239))


def arctangent_series(x: Decimal) -> Decimal:
    """x - x^3/3 + x^5/5 - ..., for small x."""
    total, before, power, n = x, None, x, 1
    while total != before:
        before, power, n = total, -power * x * x, n + 2
        total += power / n
    return total


@functools.lru_cache(maxsize=1000)
def arctangent(x: Decimal, digits: int) -> Decimal:
    for _ in range(4):
        x /= 1 + (1 + x * x).sqrt()  # the tangent of half the angle
    return 16 * arctangent_series(x)


@functools.lru_cache(maxsize=1000)
def sine_of_real(x: Decimal, digits: int) -> Decimal:
    """x - x^3/3! + x^5/5! - ...; exactly 0 at multiples of pi."""
    x = x.remainder_near(2 * circle_constant(digits))
    total, before, term, n = x, None, x, 1
    while total != before:
        before, term, n = total, -term * x * x / ((n + 1) * (n + 2)), n + 2
        total += term
    return Decimal(0) if abs(total).adjusted() < GUARD_DIGITS - digits else total


@functools.lru_cache(maxsize=1000)
def exp_of_real(x: Decimal, digits: int) -> Decimal:
    if abs(x) > 1000:
        raise Imprecise
    return x.exp()


@functools.lru_cache(maxsize=1000)
def ln_of_real(x: Decimal, digits: int) -> Decimal:
    return x.ln()


@operation
def sine(angle):
    """Of radians."""
    if is_real(angle):
        return Approximation(sine_of_real(parts(angle)[0], digits()))
    forth = exp(multiply(IMAGINARY, angle))
    back = invert(forth)
    return divide(add(forth, negate(back)), multiply(TWO, IMAGINARY))


def cosine(angle):
    quarter = Approximation(circle_constant(digits()) / 2)
    return sine(add(angle, quarter))


@operation
def exp(value):
    real, imag = parts(value)
    size = exp_of_real(real, digits())
    if not imag:
        return Approximation(size)
    quarter = circle_constant(digits()) / 2
    real, imag = (sine_of_real(x, digits()) for x in (imag + quarter, imag))
    return Approximation(size * real, size * imag)


@operation
def ln(value):
    """Of the number's size, and its angle from -pi to pi as the imaginary part."""
    real, imag = parts(value)
    if not imag and real > 0:
        return Approximation(ln_of_real(real, digits()))
    size = ln_of_real(real * real + imag * imag, digits()) / 2
    pi = circle_constant(digits())
    if not imag:
        return Approximation(size, pi)
    if real > 0:
        return Approximation(size, arctangent(imag / real, digits()))
    quarter = (pi / 2).copy_sign(imag)
    return Approximation(size, quarter - arctangent(real / imag, digits()))


def log(value, base=Fraction(10)):
    return divide(ln(value), ln(base))


def arcsine(value):
    """-i ln(i z + sqrt(1 - z^2))"""
    other = add(ONE, negate(multiply(value, value)))
    turned = ln(add(multiply(IMAGINARY, value), power(other, ONE / 2)))
    return multiply(negate(IMAGINARY), turned)


def arccosine(value):
    quarter = Approximation(circle_constant(digits()) / 2)
    return add(quarter, negate(arcsine(value)))


def arctangent_of(value):
    """(ln(1 + i z) - ln(1 - i z)) / 2i"""
    turned = multiply(IMAGINARY, value)
    forth = ln(add(ONE, turned))
    back = ln(add(ONE, negate(turned)))
    return divide(add(forth, negate(back)), multiply(TWO, IMAGINARY))


def tan(angle):
    return divide(sine(angle), cosine(angle))


def cot(angle):
    return divide(cosine(angle), sine(angle))


def sec(angle):
    return invert(cosine(angle))


def csc(angle):
    return invert(sine(angle))


def sinh(value):
    return divide(add(exp(value), negate(exp(negate(value)))), TWO)


def cosh(value):
    return divide(add(exp(value), exp(negate(value))), TWO)


FUNCTIONS = {  # of values
    "sin": sine,
    "cos": cosine,
    "tan": tan,
    "cot": cot,
    "sec": sec,
    "csc": csc,
    "arcsin": arcsine,
    "arccos": arccosine,
    "arctan": arctangent_of,
    "sinh": sinh,
    "cosh": cosh,
    "ln": ln,
    "log": log,
    "exp": exp,
}
ANGLES = ("sin", "cos", "tan", "cot", "sec", "csc")


def evaluate(text: str) -> Fraction | Approximation | float:
    """The value of an expression without letters; raises Unreadable where there is none."""
    return value_at(read(text), POINTS[0])


# ---------------------------------------------------------------------- math: comparing


TIME = re.compile(r"\s*[0-2]?[0-9]:[0-5][0-9]\s*")
DECIMAL_COMMA = re.compile(r"(-? (?: 0 | [1-9][0-9]* ) ),( [0-9]+ )", re.VERBOSE)
THOUSANDS = re.compile(r"-? [1-9][0-9]{0,2} , [0-9]{3}", re.VERBOSE)
DECIMAL_POINT = re.compile(r"-?[0-9]*\.[0-9]+")
LONG_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]{10,}")
BARE_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
PERCENT = re.compile(
    r"(.*?) \s* (?: \\?% | percent | \\text \s* \{ \s* percent \s* \} )", re.VERBOSE
)


def same_answer(given: str, gold: str) -> bool:
    """Whether two answers mean the same: as expressions where both can be read, else as text.

    Algebra is compared at POINTS, rationals exactly, the rest to PRECISIONS. By convention:

    percent    p% is p/100: 50% is 1/2, and not 50; but 50 is right where the gold answer is 50%
    decimals   the point is the decimal mark; commas and thin spaces group thousands: 1,234 is
               1 234, and 3,14 is 3.14, or a list. A written decimal is exact: 0.33 is not 1/3, nor
               3.1416 pi; but one of ten digits or more may be rounded
    brackets   a comma inside of them always separates
    order      none in sets and in lists without brackets; repeats may be left out of sets, and of
               lists of anything but numbers
    names      x = 5 is 5, but a = 1, b = 2 is not 1, 2. 2 + 3 = 5 is 5, and 2 + 3 = 6 = 5 nothing;
               after a name a computation's last number counts: x = 2 + 3 = 6 = 5 is 5, but
               x = 6 = 5 is nothing. What stands before an approximation counts
    units      may stand on one side alone. Million multiplies; words like half are no units
    angles     in radians: sin 30 is not 1/2. sin 30° is, and 90° is 90. log is to the base 10
    ratios     3:5 is 6:10 and 3/5; two times of day, as 3:30, are compared as text
    reals      letters are real, but i^2 = -1, e and pi are numbers; the cube root of -8 is -2; R is
               (-∞, ∞), and 1 < x <= 2 is (1, 2]. There is no arithmetic with infinity
    empty set  ∅ is {}, and no word and no number. 204_5 is 204_{5} and no other number
    words      abc is no bca, but a product beside 3abc or a * bc
    """
    if max(len(given), len(gold)) > MAX_EXPRESSION:
        return given == gold
    return same_meaning(given, gold) or gold_allows(given, gold)


def same_meaning(given: str, gold: str) -> bool:
    """What of `same_answer` is symmetric."""
    if given == gold:
        return given not in ("", "nan")
    if TIME.fullmatch(given) and TIME.fullmatch(gold):  # 3:30 is not 1:10
        return given.strip() == gold.strip()
    if is_whole_number(given) and is_whole_number(gold):  # the usual answers, and fast
        return int(given) == int(gold)
    if is_plain_word(given) and is_plain_word(gold):
        return given.strip() == gold.strip()
    try:
        left, right = read(given), read(gold)
        if "word" in (left.kind, right.kind):
            return same_word(left, right) or same_text(given, gold)
        return same_precisely(left, right)
    except Unreadable:
        return same_text(given, gold)


def is_whole_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def is_plain_word(text: str) -> bool:
    """Of three letters or more: xy is a product."""
    text = text.strip()
    return text.isascii() and text.isalpha() and text.islower() and len(text) > 2


def gold_allows(given: str, gold: str) -> bool:
    """What of `same_answer` is about how answers are written: a decimal comma, a percentage as the
    gold answer, a decimal of ten digits or more, which may be rounded."""
    given, gold = given.strip(), gold.strip()
    if "," in given or "," in gold:
        commas = DECIMAL_COMMA.fullmatch(given), DECIMAL_COMMA.fullmatch(gold)
        points = [with_decimal_point(text) for text in (given, gold)]
        return any(commas) and all(map(DECIMAL_POINT.fullmatch, points)) and same_meaning(*points)
    try:
        if percent := PERCENT.fullmatch(gold):
            return is_of_percent(given, percent[1])
        if LONG_DECIMAL.fullmatch(gold):
            return rounds_to(given, gold)
        if is_computed(given):
            return rounds_to(gold, given)
    except (Unreadable, Imprecise):
        pass
    return False


def with_decimal_point(text: str) -> str:
    """3.14 for 3,14; but 1,234 groups thousands."""
    return text if THOUSANDS.fullmatch(text) else text.replace(",", ".")


def is_of_percent(given: str, bare: str) -> bool:
    """50 for 50%. Below 1 it would be the share as often as the percentage: 0.5 is not 0.5%."""
    value = evaluate(bare)
    is_large = are_exact(value) and value >= 1
    return is_large and BARE_NUMBER.fullmatch(given) is not None and same_meaning(given, bare)


def is_computed(given: str) -> bool:
    """0.0833333333333333, which nobody writes who guesses 1/12: ten digits that count."""
    digits = given.lstrip("-0.").replace(".", "")
    return LONG_DECIMAL.fullmatch(given) is not None and len(digits) >= 10


def rounds_to(exact: str, rounded: str) -> bool:
    """Whether a decimal may stand for the value: it is off by less than one in its last place."""
    places = len(rounded.partition(".")[2])
    node = read(exact)
    if has_unknowns(node):
        return False
    with decimal.localcontext(PRECISIONS[0]):
        value = value_at(node, POINTS[0])
        if is_infinite(value) or not is_real(value):
            return False
        return abs(parts(value)[0] - Decimal(rounded)) < Decimal(1).scaleb(-places)


def same_precisely(left: Node, right: Node) -> bool:
    """Whether two trees mean the same, computing with as many digits as their numbers need."""
    for precision in PRECISIONS:
        try:
            with decimal.localcontext(precision):
                return same(left, right)
        except Imprecise:
            continue
    raise Unreadable("numbers too far from 1")


def same_word(left: Node, right: Node) -> bool:
    """\\text{(C)} is C, as a word or as a letter."""
    left, right = ungrouped(left), ungrouped(right)
    are_words = {left.kind, right.kind} <= {"word", "letter"}
    return are_words and left.value == right.value


def same_text(given: str, gold: str) -> bool:
    """Equality up to case, boxes of text, and white space around punctuation."""
    words = text_words(given)
    return words == text_words(gold) and words not in ([], ["nan"])


def text_words(text: str) -> list[str]:
    text = with_our_symbols(TEXT_BOX.sub(r" \1 ", text.replace('"', " ")))
    text = " ".join(text.casefold().split())
    text = re.sub(r"\{(\w)\}", r" \1 ", text)  # \pmod{4} is \pmod 4
    return re.sub(r" ?([^\w ]) ?", r"\1", text).rstrip(".").split()


def same(left: Node, right: Node) -> bool:
    """Whether two trees mean the same."""
    left, right = ungrouped(left), ungrouped(right)
    if left == right:  # it may have no value
        return True
    left, right = without_name(left, right), without_name(right, left)
    left, right = united(left), united(right)
    left, right = as_interval(left, right), as_interval(right, left)
    kinds = {left.kind, right.kind}
    if "quantity" in kinds:
        return same_quantity(left, right)
    if kinds <= {"list", "set"}:
        return same_collection(left, right)
    if kinds == {"union"} or kinds == {"intersection"}:
        return same_in_any_order(left.items, right.items)
    if kinds == {"ratio"}:
        return same_ratio(left, right)
    if kinds <= {"=", "≠", "<"}:
        return len(kinds) == 1 and same_relation(left, right)
    if kinds & STRUCTURES:
        return len(kinds) == 1 and left.value == right.value and same_items(left, right)
    return same_values(left, right)


def same_values(left: Node, right: Node) -> bool:
    """At every point, or at one where there is no letter.

    Points where neither is real are left out, if there are others: there sqrt(1/n) = 1/sqrt(n).
    """
    compare = equal
    if is_long_decimal(left) or is_long_decimal(right):
        compare = operator.eq
    if not has_unknowns(left) and not has_unknowns(right):
        return compare(value_at(left, POINTS[0]), value_at(right, POINTS[0]))
    verdicts = []  # of points where neither is real
    some_are_real = False
    for point in POINTS:
        pair = value_at(left, point), value_at(right, point)
        if not any(map(is_real, pair)):
            verdicts.append(compare(*pair))
        elif compare(*pair):
            some_are_real = True
        else:
            return False
    return some_are_real or all(verdicts)


def is_long_decimal(node: Node) -> bool:
    """3.16227766016838: an approximation of whatever it is close to."""
    while node.kind in ("negative", "group"):
        node = node.items[0]
    if node.kind != "number" or is_infinite(node.value):
        return False
    return max(node.value.numerator, node.value.denominator) > 10**12


STRUCTURES = {  # kinds without a value of their own: compared piece by piece
    *("()", "[]", "(]", "[)", "matrix", "row", "numeral", "word", "series"),
    *("list", "set", "union", "intersection", "difference", "=", "≠", "<"),
}


def equal(left, right) -> bool:
    """Exact for rationals, else as far as our digits go."""
    if left == right or are_exact(left, right):
        return left == right
    if is_infinite(left) or is_infinite(right):
        return False
    return add(left, negate(right)) == 0


def same_items(left: Node, right: Node) -> bool:
    return len(left.items) == len(right.items) and all(map(same, left.items, right.items))


def without_name(node: Node, other: Node) -> Node:
    """5 for x = 5, for z = 1 + 4 = 5, and for 1 + 4 = 5, where the other side is no equation."""
    if other.kind == "=" or any(map(is_named, other.items)):
        return node
    if node.kind == "=":
        sides = node.items[1:] if is_name(node.items[0]) else node.items
        if all(same(side, sides[-1]) for side in sides):  # 2 + 3 = 5 is 5
            return ungrouped(sides[-1])
    return node


def united(node: Node) -> Node:
    """One set for a union of sets."""
    if node.kind == "union" and all(item.kind == "set" for item in node.items):
        return Node("set", tuple(item for part in node.items for item in part.items))
    return node


def as_interval(node: Node, other: Node) -> Node:
    """(1, 2] for 1 < x <= 2, where the other side is an interval, or a union of some."""
    if other.kind not in (*PAIRS, "union"):
        return node
    if node.kind == "list" and all(item.kind == "<" for item in node.items):  # x < 1 or x > 2
        return Node("union", tuple(interval(item) for item in node.items))
    if node.kind == "difference" and node.items[0] == REALS and node.items[1].kind == "set":
        return without_points(node, node.items[1].items)
    if node.kind == "≠" and is_unknown_letter(node.items[0]):
        return without_points(node, node.items[1:])
    return interval(node)


def without_points(node: Node, points: tuple) -> Node:
    """(-∞, 1) ∪ (1, ∞), of one point or more; the node where they are no real numbers."""
    if len(points) > MAX_ITEMS or any(map(has_unknowns, points)):
        return node
    places = [(value_at(point, POINTS[0]), point) for point in points]
    if any(is_infinite(value) or not is_real(value) for value, _ in places):
        return node
    places.sort(key=lambda place: parts(place[0])[0])
    low, high = REALS.items
    ends = [low, *(point for _, point in places), high]
    return Node("union", tuple(Node("()", pair) for pair in zip(ends, ends[1:])))


def interval(node: Node) -> Node:
    """(1, ∞) for x > 1, [-1, 1] for |x| <= 1; the node where it is none of one letter."""
    if node.kind != "<":
        return node
    sides, signs = list(node.items), list(node.value)
    is_unknown = [is_unknown_letter(side) or is_size_of_letter(side) for side in sides]
    if is_unknown == [True, False]:  # x < 2
        sides, signs, is_unknown = [REALS.items[0], *sides], ["<", *signs], [False, *is_unknown]
    elif is_unknown == [False, True]:  # 1 < x
        sides, signs, is_unknown = [*sides, REALS.items[1]], [*signs, "<"], [*is_unknown, False]
    if is_unknown != [False, True, False]:
        return node
    low, unknown, high = sides
    if has_unknowns(low) or has_unknowns(high):
        return node
    opening = {"<": "(", "≤": "["}
    closing = {"<": ")", "≤": "]"}
    above = Node(opening[signs[0]] + closing[signs[1]], (low, high))
    if unknown.kind == "letter":
        return above
    if low == REALS.items[0]:  # |x| < 2
        return Node(opening[signs[1]] + closing[signs[1]], (opposite(high), high))
    below = Node(opening[signs[1]] + closing[signs[0]], (opposite(high), opposite(low)))
    return Node("union", (below, above))


def is_unknown_letter(node: Node) -> bool:
    return node.kind == "letter" and node.value not in CONSTANTS


def is_size_of_letter(node: Node) -> bool:
    """|x|"""
    return node.kind == "absolute" and is_unknown_letter(node.items[0])


def opposite(node: Node) -> Node:
    return combine("-", ZERO, node)


def same_quantity(left: Node, right: Node) -> bool:
    """A unit may stand on one side alone."""
    if left.kind == right.kind and left.value != right.value:
        return False
    return same(without_unit(left), without_unit(right))


def without_unit(node: Node) -> Node:
    if node.kind == "quantity":
        return node.items[0]
    return node


def same_collection(left: Node, right: Node) -> bool:
    """In any order. A repeat may be left out, but of numbers only in a set: 5, 5, 6 is not 5, 6."""
    fewer, more = sorted((left.items, right.items), key=len)
    is_set = "set" in (left.kind, right.kind) or all(item.kind in STRUCTURES for item in more)
    if len(fewer) < len(more) <= MAX_ITEMS and is_set:
        more = distinct(more)
    return same_in_any_order(fewer, more)


def distinct(items: tuple) -> tuple:
    found = []
    for item in items:
        if not any(same(item, other) for other in found):
            found.append(item)
    return tuple(found)


def same_in_any_order(left: tuple, right: tuple) -> bool:
    """Whether each item has one of its own on the other side; long lists must be in order."""
    if len(left) != len(right):
        return False
    if len(left) > MAX_ITEMS:
        return all(map(same_item, left, right))
    remaining = list(right)
    for item in left:
        found = [n for n, other in enumerate(remaining) if same_item(item, other)]
        if not found:
            return False
        del remaining[found[0]]
    return True


def same_item(left: Node, right: Node) -> bool:
    """Of lists in any order: there a = 1, b = 2 is not 2, 1."""
    if "=" in (left.kind, right.kind) and left.kind != right.kind:
        return False
    return same(left, right)


def same_ratio(left: Node, right: Node) -> bool:
    """Up to a common factor."""
    if len(left.items) != len(right.items):
        return False
    factors = [combine("/", *pair) for pair in zip(left.items, right.items)]
    return all(same(factor, factors[0]) for factor in factors)


def same_relation(left: Node, right: Node) -> bool:
    """Side by side, the other way round, or up to a common factor of what differs."""
    if left.value != right.value or len(left.items) != len(right.items):
        return False
    turned = right._replace(items=right.items[::-1])
    if same_sides(left, right) or (left.kind != "<" and same_sides(left, turned)):
        return True
    if len(left.items) != 2:
        return False
    return proportional(difference(left), difference(right), positive=left.kind == "<")


def same_sides(left: Node, right: Node) -> bool:
    try:
        return same_items(left, right)
    except Unreadable:  # a side without a value
        return False


def difference(relation: Node) -> list:
    """Values of the left side minus the right one."""
    return values(combine("-", *relation.items))


def proportional(left: list, right: list, positive: bool) -> bool:
    """Whether one is the other times a constant, at points where both vary."""
    if equal(left[0], left[1]) or equal(right[0], right[1]) or 0 in right:
        return False
    factors = list(map(divide, left, right))
    if not all(equal(factor, factors[0]) for factor in factors):
        return False
    return not positive or (is_real(factors[0]) and parts(factors[0])[0] > 0)


# ---------------------------------------------------------------------- verifiers of text


NUMBER = re.compile(
    r"""
    (?:
        (?<! [\w)] ) -                        # but 10-5 ends in 5
      | (?: \A | (?<= [=:(≈][ ] ) | (?<= \bis[ ] ) ) - [ ]
    )?
    (?: (?<= - ) \\? \$ )?                    # -$5
    (?:
        (?: [0-9]+ [ ]? )? \\ [dt]? frac \{ -? [0-9]+ \} \{ [0-9]+ \}
      | [0-9]+ [ ] [0-9]+ / [0-9]+            # 3 1/2
      | (?: [0-9][0-9,]* (?: \.[0-9]+ )? | (?<! [\w.] ) \.[0-9]+ ) (?: [ ]? / [ ]? [0-9]+ )?
    )
    (?: [ ]? \\? % )?
    """,
    re.VERBOSE,
)
NEXT_WORD = re.compile("[ -]?([a-z]+)")
CHOICE = re.compile(
    r"""
    [\W_]*
    (?:                              # words before it
        (?i: the | final | correct | best | answer | option | choice | is | text (?:bf)? ) \b [\W_]*
    )*
    (?P<letter> [A-Za-z] )
    (?: [^\w).:–—-] | _ )*+
    (?:
        (?: [).:] | (?<= [ ] ) [-–—] (?= [ ] ) )
        (?:                          # and after it a text in which no other letter is named
            (?!
                (?! \b (?i: (?P=letter) ) \b )
                (?:
                    \b (?! [AI][ ] (?! is\b | was\b ) [a-z] ) [A-Z] \b     # A dog, and I think
                  | (?<! \w ) (?<! \w[(] ) [a-j] [)]                       # (b), but not f(b)
                )
            ) .
        )*+
    )?
    [\W_]*+
    """,
    re.VERBOSE | re.DOTALL,
)
TAG = re.compile("(</?(?:think|answer)>)")


@verifier
def math(completion: str, answer: str | int | float) -> bool:
    """1 if the marked answer is the gold one: `same_answer`."""
    return same_answer(final_answer(completion, marked=True), gold_answer(answer))


@verifier
def math_lenient(completion: str, answer: str | int | float) -> bool:
    """1 if the marked answer, or the last number where none is marked, is the gold one."""
    gold = gold_answer(answer)
    given = final_answer(completion, marked=True)
    text = after_thinking(completion)
    if not any(mark in text for mark in ("<answer>", "\\boxed", "####")):
        given = last_number(text[-MAX_TEXT:].strip())
    return same_answer(given, gold)


def last_number(text: str) -> str:
    """`-5`, `1/2`, `50%`, `5 million`; nothing where the next word makes another number of it."""
    text = text.replace("−", "-").replace("–", "-")
    found = collections.deque(NUMBER.finditer(text), maxlen=1)
    if not found:
        return ""
    number = found[0]
    behind = text[number.end() :].lower()
    next_word = NEXT_WORD.match(behind)
    word = next_word[1] if next_word else ""
    if word.rstrip("s") in SCALES or word == "percent":
        return f"{number[0]} {word}"
    if MULTIPLIES.match(behind.lstrip(" -")):
        return ""
    return number[0]


@verifier
def exact(completion: str, answer: str | int | float) -> bool:
    """1 if the final answer, or all text, is the gold one up to case and white space."""
    return final_answer(completion).casefold() == gold_answer(answer).casefold()


@verifier
def f1(completion: str, answer: str | int | float) -> float:
    """Harmonic mean of the precision and recall of words, normalised as SQuAD does."""
    given, gold = counted_words(final_answer(completion)), counted_words(gold_answer(answer))
    need(gold, "it has no word but articles")
    return 2 * (given & gold).total() / (given + gold).total()


def counted_words(text: str) -> collections.Counter:
    """Words in lower case, without punctuation and articles, and how often each stands there."""
    text = re.sub(r"[^\w\s]|_", "", text.lower())
    return collections.Counter(re.sub(r"\b(a|an|the)\b", "", text).split())


@verifier
def choice(completion: str, answer: str) -> bool:
    """1 if the answer commits to the gold letter and names no other: `B`, `(B)`, `B. Paris`."""
    gold = chosen_letter(gold_answer(answer))
    need(gold, "it names no letter")
    return chosen_letter(final_answer(completion)) == gold


def chosen_letter(text: str) -> str:
    found = CHOICE.fullmatch(text)
    return found["letter"].upper() if found else ""


@verifier
def format(completion: str, answer: object = None) -> bool:
    """1 for `<think>...</think><answer>...</answer>` and nothing else, opening tag optional."""
    text = completion.strip().removeprefix("<think>")
    parts = [part.strip() for part in TAG.split(text)]
    if len(parts) != 7:
        return False
    thought, *frame, said, ends, after = parts
    if [*frame, ends, after] != ["</think>", "", "<answer>", "</answer>", ""]:
        return False
    return thought != "" and said != ""


@verifier
def countdown(completion: str, answer: dict) -> bool:
    """1 if an expression in + - * / ( ) takes each of `numbers` once and gives `target` exactly."""
    keys = answer.keys() if isinstance(answer, dict) else set()
    need({"numbers", "target"} <= keys, 'expected {"numbers": [3, 5, 2], "target": 13}')
    numbers, target = sorted(answer["numbers"]), answer["target"]
    need(numbers and min(numbers) >= 0, "expected numbers from 0 up")
    need(all(number == int(number) for number in numbers), "expected whole numbers")
    is_number = isinstance(target, (int, float)) and not isinstance(target, bool)
    need(is_number and abs(target) < inf, f"target {target!r:.80} is no number")

    text = with_our_symbols(final_answer(completion)).removesuffix(".")
    left, _, right = text.partition("=")
    if right.strip() == str(target):  # 3*5-2 = 13
        text = left
    elif left.strip() == str(target):  # 13 = 3*5-2
        text = right
    if len(text) > MAX_EXPRESSION or not re.fullmatch("[-+*/() 0-9]+", text):
        return False
    if re.search("[0-9] +[0-9]", text):  # two numbers, no mixed one
        return False
    if sorted(map(int, re.findall("[0-9]+", text))) != numbers:
        return False
    try:
        return evaluate(text) == target
    except Unreadable:  # 1/0, or brackets left open
        return False


@verifier
def arithmetic(completion: str, answer: str) -> bool:
    """1 if the text after the last `#` is the answer, to the letter: the built-in task's."""
    gold_answer(answer)  # raises where there is none
    return completion.rpartition("#")[1:] == ("#", str(answer))


@verifier
def arithmetic_steps(completion: str, answer: str, prompt: str = "") -> list[tuple[int, float]]:
    """(end in characters, reward) of each operation that stands there, and then of the outcome.

    An operation pays 1 where it takes up the last result, is the prompt's next one, and is right.
    """
    value, end, steps = prompt[:1], 0, []
    operations = re.findall("[+*][0-9]", prompt)
    written = completion.partition("#")[0].split(";")
    for operation, step in zip(operations, written):
        end += len(step) + 1
        is_digit = value in tuple("0123456789")
        right = is_digit and step == solve(value + operation).partition("#")[0]
        steps.append((end, float(right)))
        value = step[-1:]
    return [*steps, (len(completion), float(arithmetic(completion, answer)))]


@verifier
def calculator_steps(completion: str, answer: str, prompt: str = "") -> list[tuple[int, float]]:
    """(end in characters, reward) of each call of the calculator, and then of the outcome.

    A call pays 1 where it is what `12*34+56=` needs next: `12*34`, then `408+56`."""
    product, sign, number = re.match("([0-9*]*)([+-]?)([0-9]*)", prompt).groups()
    value = calculate(f"<calc>{product}</calc>").removeprefix("=")
    needed = (product, f"{value}{sign}{number}")
    end, steps = 0, []
    *calls, _ = completion.split("</calc>")
    for call, expression in zip(calls, needed):
        end += len(call + "</calc>")
        steps.append((end, float(call.rpartition("<calc>")[2] == expression)))
    return [*steps, (len(completion), float(arithmetic(completion, answer)))]


@verifier
def model(completion: str, answer: object = None, reward_model: float = nan) -> float:
    """What `--reward-model` said of it: train.py adds that to the row. Without one, a fault."""
    return reward_model


# ---------------------------------------------------------------------- verifiers of programs


LAYERS = ("namespaces", "landlock files", "landlock network", "landlock scopes", "seccomp")


class Sandbox:
    """The child's side of `run_program`. Its source is all that the child has of this file.

    Three processes. The first makes namespaces and waits. The second is the first of them, and so
    nothing outlives it: it ends when the program does, or when its time is over. The third takes
    rights away from itself, then becomes the program. `layers` says which protections are there.
    """

    # unshare(2): namespaces of its own, so that others' are out of reach
    CLONE_NEWNS = 0x00020000  # mounts: for a folder of its own
    CLONE_NEWIPC = 0x08000000  # shared memory and semaphores
    CLONE_NEWUSER = 0x10000000  # users: what lets an unprivileged process have the others
    CLONE_NEWPID = 0x20000000  # processes
    CLONE_NEWNET = 0x40000000  # network
    # mount(2)
    MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
    # prctl(2)
    PR_SET_PDEATHSIG = 1  # a signal when the parent dies
    PR_SET_SECCOMP = 22
    PR_SET_CHILD_SUBREAPER = 36  # orphans become children
    PR_SET_NO_NEW_PRIVS = 38  # both Landlock and seccomp demand it
    # capset(2)
    CAPABILITY_VERSION_3 = 0x20080522
    # landlock(7): its calls have the same numbers on every architecture
    LANDLOCK_CREATE_RULESET = 444
    LANDLOCK_ADD_RULE = 445
    LANDLOCK_RESTRICT_SELF = 446
    LANDLOCK_CREATE_RULESET_VERSION = 1
    LANDLOCK_RULE_PATH_BENEATH = 1
    LANDLOCK_VERSIONS = {1: (13, 8), 2: (14, 8), 3: (15, 8), 4: (15, 16), 5: (16, 16)}
    LANDLOCK_TRUNCATE = 15  # rights that are known where that is one: else files can be emptied
    LANDLOCK_LATEST = (16, 24)  # how many rights on files it knows; bytes of its attributes
    READ = 0b00_0000_0000_1100  # to read files, to list folders
    WRITE = 0b100_0001_1011_0010  # to write, remove, make folders and files, truncate
    TCP = 0b11  # to bind, to connect
    SCOPES = 0b11  # abstract sockets, and signals, to those outside
    # seccomp(2): programs of the classic packet filter, over a struct of the call
    SECCOMP_MODE_FILTER = 2
    CALL, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in the struct; an argument has 8 bytes
    LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
    ALLOW = 0x7FFF0000
    KILL = 0x80000000
    NOT_PERMITTED = 0x00050000 | 1  # the call fails with EPERM
    NO_SUCH_CALL = 0x00050000 | 38  # with ENOSYS: libraries then take the older call
    X32 = 0x40000000  # from here on numbers are those of another table
    MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
    REFUSED = """
        # call              x86_64  aarch64
        # starts processes, or becomes another program
        fork                57      -
        vfork               58      -
        execve              59      221
        execveat            322     281
        # leaves the group of processes that is ended together
        setpgid             109     154
        setsid              112     157
        # reaches other processes
        kill                62      129
        tkill               200     130
        rt_sigqueueinfo     129     138
        rt_tgsigqueueinfo   297     240
        pidfd_send_signal   424     424
        pidfd_open          434     434
        pidfd_getfd         438     438
        ptrace              101     117
        process_vm_readv    310     270
        process_vm_writev   311     271
        process_madvise     440     440
        kcmp                312     272
        setpriority         141     140
        ioprio_set          251     30
        sched_setparam      142     118
        sched_setscheduler  144     119
        sched_setaffinity   203     122
        sched_setattr       314     274
        migrate_pages       256     238
        move_pages          279     239
        # reaches the network, or a service by a socket in the file system
        socket              41      198
        # does what is refused here on the kernel's own account
        io_uring_setup      425     425
        io_uring_enter      426     426
        io_uring_register   427     427
        # changes files that it cannot open
        truncate            76      45
        chmod               90      -
        fchmod              91      52
        fchmodat            268     53
        fchmodat2           452     452
        chown               92      -
        fchown              93      55
        lchown              94      -
        fchownat            260     54
        utime               132     -
        utimes              235     -
        futimesat           261     -
        utimensat           280     88
        setxattr            188     5
        lsetxattr           189     6
        fsetxattr           190     7
        setxattrat          463     463
        removexattr         197     14
        lremovexattr        198     15
        fremovexattr        199     16
        removexattrat       466     466
        file_setattr        469     469
        # undoes the namespaces
        mount               165     40
        umount2             166     39
        pivot_root          155     41
        chroot              161     51
        unshare             272     97
        setns               308     268
        open_tree           428     428
        open_tree_attr      467     467
        move_mount          429     429
        fsopen              430     430
        fsmount             432     432
        mount_setattr       442     442
        # memory, queues and keys that are shared with other processes
        shmget              29      194
        semget              64      190
        msgget              68      186
        mq_open             240     180
        add_key             248     217
        request_key         249     218
        keyctl              250     219
        # what a kernel's bugs are reached by, and no honest program needs
        bpf                 321     280
        perf_event_open     298     241
        userfaultfd         323     282
        syslog              103     116
    """
    # no limit of the kernel's counts threads without forbidding them, or processes of root's
    MAX_THREADS = 256  # of all processes of a program
    WATCH_SECONDS = 0.02  # between two counts
    END_SECONDS = 4  # for killing what is left
    CLONE3 = 435  # on both; its flags lie in memory, where a filter cannot see them
    CLONE = {"x86_64": 56, "aarch64": 220}
    CLONE_THREAD = 0x00010000
    TGKILL = {"x86_64": 234, "aarch64": 131}
    PRLIMIT64 = {"x86_64": 302, "aarch64": 261}
    IOCTL = {"x86_64": 16, "aarch64": 29}
    SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
    # connected for good; one of datagrams could send to any service that has a path
    STREAM_PAIRS = (0x1, 0x801, 0x80001, 0x80801)  # with or without not to wait, to close
    HARMLESS_IOCTLS = (
        0x5401,  # is it a terminal?
        0x541B,  # how many bytes can be read?
        0x5421,  # to wait, or not
        0x5450,  # not to close it when a program starts
        0x5451,  # to close it then
    )

    def __init__(self, task: dict):
        self.task = task
        self.libc = ctypes.CDLL(None)
        self.layers = dict.fromkeys(task["layers"], False)
        self.has_folder = False  # one of its own, of bounded size

    def run(self) -> None:
        priority = os.getpriority(os.PRIO_PROCESS, 0)
        self.take_priority()
        if "namespaces" in self.layers:
            self.own_namespaces()
        self.wait_for_second()
        self.wait_for_third()
        os.setpriority(os.PRIO_PROCESS, 0, priority)
        self.libc.prctl(self.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        self.drop_capabilities()
        self.restrict_files()
        if "seccomp" in self.layers:
            self.refuse_calls()
        self.bound_resources()

        os.write(1, json.dumps(self.layers).encode() + b"\n")
        if self.task["strict"] and not all(self.layers.values()):
            return
        sys.argv = ["program.py"]
        program = compile(self.task["source"], "program.py", "exec")
        exec(program, {"__name__": self.task["name"]})

    def take_priority(self) -> None:
        """To be faster than what forks for ever. Root alone may, and no other user need: of its
        processes alone the kernel does not limit the number."""
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -20)
            with open("/proc/self/autogroup", "w") as file:  # among sessions, where they share
                file.write("-20")
        except OSError:
            return

    def own_namespaces(self) -> None:
        user, group = os.getuid(), os.getgid()
        flags = self.CLONE_NEWUSER | self.CLONE_NEWPID | self.CLONE_NEWNET
        flags |= self.CLONE_NEWIPC | self.CLONE_NEWNS
        self.layers["namespaces"] = self.libc.unshare(flags) == 0
        if not self.layers["namespaces"]:
            return
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        try:
            for name, text in maps.items():  # without them no file can be made
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError:  # a container may forbid it: then there is no folder
            return
        folder = self.task["folder"].encode()
        options = f"size={self.task['folder_bytes']},nr_inodes=1000,mode=700".encode()
        flags = self.MS_NOSUID | self.MS_NODEV | self.MS_NOEXEC
        self.has_folder = self.libc.mount(b"tmpfs", folder, b"tmpfs", flags, options) == 0
        os.chdir(folder)

    def wait_for_second(self) -> None:
        """Returns in the second process alone."""
        second = os.fork()
        if second:
            status = os.waitpid(second, 0)[1]
            os._exit(status != 0)
        self.libc.prctl(self.PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait_for_third(self) -> None:
        """Returns in the third process alone; the second ends when it does, or in time."""
        self.libc.prctl(self.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        child_ends = {signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, child_ends)  # it waits until it is asked for
        third = os.fork()
        if third == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, child_ends)
            self.libc.prctl(self.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()  # a group that can be killed, with a priority of its own
            return
        deadline = time.monotonic() + self.task["seconds"]
        failed = True
        while (left := deadline - time.monotonic()) > 0:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == third:
                failed = status != 0
                break
            if self.has_too_many_threads():
                break
            if ended == 0:
                signal.sigtimedwait(child_ends, min(left, self.WATCH_SECONDS))
        if not self.layers.get("namespaces"):  # else the kernel does, as the first process ends
            self.end_children(third)
        os._exit(failed)

    def descendants(self) -> Iterator[tuple[int, int]]:
        """(process, how many threads it has) of all that come from this one, where the kernel
        lists them."""
        parents = ["/proc/thread-self"]
        while parents:
            try:
                with open(f"{parents.pop()}/children") as file:
                    children = file.read().split()
            except OSError:  # there is no such list, or it has ended meanwhile
                continue
            for child in children:
                try:
                    threads = os.listdir(f"/proc/{child}/task")
                except OSError:
                    continue
                yield int(child), len(threads)
                parents += [f"/proc/{child}/task/{thread}" for thread in threads]

    def has_too_many_threads(self) -> bool:
        found = 0
        for _, threads in self.descendants():
            found += threads
            if found > self.MAX_THREADS:
                return True
        return False

    def end_children(self, group: int) -> None:
        """Kills a group at once, then whoever left it, until there is nobody: they may go on
        forking, but orphans of those who are killed become children of this process."""
        self.libc.kill(-group, signal.SIGKILL)
        deadline = time.monotonic() + self.END_SECONDS
        while time.monotonic() < deadline:
            for process, _ in self.descendants():
                self.libc.kill(process, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            except ChildProcessError:  # there are no more
                return

    def drop_capabilities(self) -> None:
        """A trainer that runs as root, and the owner of a namespace, have them."""
        header = struct.pack("Ii", self.CAPABILITY_VERSION_3, 0)
        self.libc.capset(header, struct.pack("6I", 0, 0, 0, 0, 0, 0))

    def restrict_files(self) -> None:
        """Landlock: Python's own folders can be read, a folder of its own written, nothing else."""
        version = self.libc.syscall(
            self.LANDLOCK_CREATE_RULESET, None, 0, self.LANDLOCK_CREATE_RULESET_VERSION
        )
        rights, size = self.LANDLOCK_VERSIONS.get(version, self.LANDLOCK_LATEST)
        handled = {
            "landlock files": (1 << rights) - 1,
            "landlock network": self.TCP,
            "landlock scopes": self.SCOPES,
        }
        for name in handled.keys() - self.layers.keys():  # switched off
            handled[name] = 0
        attributes = struct.pack("QQQ", *handled.values())
        ruleset = self.libc.syscall(self.LANDLOCK_CREATE_RULESET, attributes, size, 0)
        if "landlock files" in self.layers:
            for path in self.readable_folders():
                self.allow(ruleset, path, self.READ)
            if self.has_folder:
                writable = self.READ | self.WRITE & handled["landlock files"]
                self.allow(ruleset, self.task["folder"], writable)
        restricted = self.libc.syscall(self.LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
        for place, name in enumerate(handled):
            if name in self.layers:
                is_known = size > 8 * place  # else the kernel did not see it
                self.layers[name] = restricted and is_known
        if rights < self.LANDLOCK_TRUNCATE and "landlock files" in self.layers:
            self.layers["landlock files"] = False

    def readable_folders(self) -> list[str]:
        """System libraries, and where Python's modules lie; not what a user added to its path."""
        own = tuple(os.path.realpath(root) + os.sep for root in (sys.prefix, sys.base_prefix))
        modules = [path for path in sys.path if os.path.realpath(path).startswith(own)]
        return [*modules, "/lib", "/lib64", "/usr/lib"]

    def allow(self, ruleset: int, path: str, rights: int) -> None:
        if os.path.isdir(path):
            folder = os.open(path, os.O_PATH)
            beneath = struct.pack("=Qi", rights, folder)
            self.libc.syscall(
                self.LANDLOCK_ADD_RULE, ruleset, self.LANDLOCK_RULE_PATH_BENEATH, beneath, 0
            )
            os.close(folder)

    def refuse_calls(self) -> None:
        """seccomp: the calls above are not permitted, and all of another architecture kill."""
        machine = os.uname().machine
        if machine not in self.MACHINES:
            return
        lines = [
            (self.LOAD, 0, 0, self.ARCHITECTURE),  # a line: operation, jumps if true, false, value
            (self.EQUAL, 1, 0, self.MACHINES[machine]),
            (self.RETURN, 0, 0, self.KILL),
            (self.LOAD, 0, 0, self.CALL),
        ]
        if machine == "x86_64":
            lines += [(self.AT_LEAST, 0, 1, self.X32), (self.RETURN, 0, 0, self.KILL)]
        for call in self.refused(machine):
            lines += [(self.EQUAL, 0, 1, call), (self.RETURN, 0, 0, self.NOT_PERMITTED)]
        lines += [(self.EQUAL, 0, 1, self.CLONE3), (self.RETURN, 0, 0, self.NO_SUCH_CALL)]
        lines += self.only(self.CLONE[machine], 0, self.HAS_BITS, [self.CLONE_THREAD])
        lines += self.only(self.TGKILL[machine], 0, self.EQUAL, [os.getpid()])  # abort()
        lines += self.only(self.PRLIMIT64[machine], 0, self.EQUAL, [0])  # its own limits
        lines += self.only(self.IOCTL[machine], 1, self.EQUAL, self.HARMLESS_IOCTLS)
        lines += self.only(self.SOCKETPAIR[machine], 1, self.EQUAL, self.STREAM_PAIRS)
        lines.append((self.RETURN, 0, 0, self.ALLOW))
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
        program = struct.pack("HP", len(lines), ctypes.addressof(code))
        filtered = self.libc.prctl(self.PR_SET_SECCOMP, self.SECCOMP_MODE_FILTER, program)
        self.layers["seccomp"] = filtered == 0

    def refused(self, machine: str) -> list[int]:
        """Numbers of the calls that are refused."""
        column = 1 + list(self.MACHINES).index(machine)
        rows = [line.split() for line in self.REFUSED.strip().splitlines()]
        return [int(row[column]) for row in rows if row[0] != "#" and row[column] != "-"]

    def only(self, call: int, argument: int, test: int, values) -> list[tuple]:
        """Lines of a filter that allow a call where the test of an argument holds for a value."""
        lines = [(self.LOAD, 0, 0, self.ARGUMENTS + 8 * argument)]
        for value in values:
            lines += [(test, 0, 1, value), (self.RETURN, 0, 0, self.ALLOW)]
        lines.append((self.RETURN, 0, 0, self.NOT_PERMITTED))
        return [(self.EQUAL, 0, len(lines), call), *lines]

    def bound_resources(self) -> None:
        import resource  # not on every system

        size, seconds = self.task["bytes"], int(self.task["seconds"]) + 1
        limits = {
            resource.RLIMIT_AS: size << 10,  # bytes of memory
            resource.RLIMIT_CPU: seconds,
            resource.RLIMIT_FSIZE: size,  # bytes of a file, and so of the output
            resource.RLIMIT_NOFILE: 64,
        }
        if not self.layers.get("seccomp"):  # no processes; it would forbid threads, too
            limits[resource.RLIMIT_NPROC] = 0
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))


# read now, as the file may change while a run lasts; in the child nothing but this is imported
SANDBOX = f"""import ctypes, json, os, signal, struct, sys, time
from collections.abc import Iterator
{inspect.getsource(Sandbox)}
with open(int(sys.argv[1])) as task:
    sandbox = Sandbox(json.load(task))
sandbox.run()
"""


def run_program(
    source: str,
    given: str = "",
    name: str = "__main__",
    strict: bool = False,
    seconds: float | None = None,
) -> tuple[str, str]:
    """(layers, output) of a program, ("{}", "") if it fails.

    For Linux. Limits on time, memory and output always hold; threads and processes are counted
    every WATCH_SECONDS. Network, other processes and files but Python's own are out of reach where
    the kernel has every layer, and nothing is left running.
    Not protected: what Python's folders tell, what stat() tells of any file (names, sizes, times),
    and a kernel with a bug.
    """
    seconds = CODE_SECONDS if seconds is None else seconds
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as task,
        tempfile.TemporaryFile() as stdout,
    ):
        settings = {
            "source": source,
            "name": name,
            "strict": strict,
            "layers": LAYERS,
            "seconds": seconds,
            "bytes": CODE_BYTES,
            "folder": folder,
            "folder_bytes": 16 * CODE_BYTES,
        }
        json.dump(settings, task)
        task.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", SANDBOX, str(task.fileno())],
            stdin=subprocess.PIPE,
            stdout=stdout,  # a file: a pipe can be held open
            stderr=subprocess.DEVNULL,
            pass_fds=[task.fileno()],
            cwd=folder,
            env={
                "TMPDIR": folder,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "MALLOC_ARENA_MAX": "1",  # else each thread sets much of the memory aside
            },
            start_new_session=True,  # a group of processes that can be killed together
        )
        try:
            wait = seconds + Sandbox.END_SECONDS + 2
            child.communicate(given.encode(errors="replace"), timeout=wait)
        except subprocess.TimeoutExpired:  # its second process should have ended it
            os.killpg(child.pid, signal.SIGKILL)
        stdout.seek(0)
        layers, _, output = stdout.read().decode(errors="replace").partition("\n")
        return (layers, output) if child.wait() == 0 else ("{}", "")


# the program may have an input() and a json of its own
CALL_CASES = """
import builtins as _builtins, json as _json
_results = [{function}(*case) for case in _json.loads(_builtins.input())]
_results = _json.loads(_json.dumps(_results))
_builtins.print('\\n' + _json.dumps(_results, sort_keys=True))"""


@verifier
def code(completion: str, answer: dict) -> bool:
    """1 if the program passes every case: {"fn": name, "cases": [[arguments, result], ...]}
    (results as JSON: 1 is neither 1.0 nor true) or {"stdin": [[input, output], ...]}.

    The program is the last fenced block of Python; all its cases share CODE_SECONDS
    (without START_SECONDS a run)."""
    return passes(completion, answer, strict=False)


@verifier
def code_strict(completion: str, answer: dict) -> bool:
    """As `code`; nothing runs unless every layer of the sandbox is there."""
    return passes(completion, answer, strict=True)


def passes(completion: str, answer: dict, strict: bool) -> bool:
    """Whether a completion's program passes every case; UserError where none could."""
    need(isinstance(answer, dict), 'expected {"fn": ..., "cases": ...} or {"stdin": ...}')
    calls = "fn" in answer
    cases = answer.get("cases" if calls else "stdin")
    need(isinstance(cases, list) and cases, "it has no cases")
    for case in cases:
        need(isinstance(case, (list, tuple)) and len(case) == 2, f"{case!r:.80} is no pair")
    check_cases = check_call_cases if calls else check_stdin_cases
    check_cases(answer, cases)

    source = last_program(after_thinking(completion))
    if not source:
        return False
    if not calls:
        return passes_stdin(source, cases, strict)

    source += CALL_CASES.format(function=answer["fn"])
    arguments, results = zip(*cases)
    _, output = run_program(source, json.dumps(arguments), name="program", strict=strict)
    lines = output.splitlines()
    return bool(lines) and lines[-1] == as_json(results)


def check_call_cases(answer: dict, cases: list) -> None:
    """UserError where no function could pass."""
    name = answer["fn"]
    is_name = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
    need(is_name, f"fn {name!r:.80} is no name of a function")
    for arguments, result in cases:
        need(isinstance(arguments, (list, tuple)), f"arguments {arguments!r:.80} are no list")
        with expecting(f"result {result!r:.80} is no JSON"):
            as_json(result)


def check_stdin_cases(answer: dict, cases: list) -> None:
    """UserError where no program could pass."""
    for case in cases:
        are_texts = all(isinstance(part, str) for part in case)
        need(are_texts, f"input and output {case!r:.80} are no strings")


def as_json(value: object) -> str:
    """One way to write a value; raises where JSON has none, as for nan."""
    return json.dumps(value, allow_nan=False, sort_keys=True)


def passes_stdin(source: str, cases: list, strict: bool) -> bool:
    left = CODE_SECONDS
    for given, expected in cases:
        if left <= 0:
            return False
        start = time.monotonic()
        _, output = run_program(source, given, strict=strict, seconds=left)
        if output.split() != expected.split():
            return False
        taken = time.monotonic() - start
        left -= max(taken - START_SECONDS, 0)
    return True


STATEMENT = re.compile(
    r"""
    ^ [ \t]*
    (?: (?: def | class | import | from | for | while | if | with | try | print | return ) \b
      | [A-Za-z_] [\w.,\[\] ]* [-+*/]? = [^=] )
    """,
    re.VERBOSE | re.MULTILINE,
)


FENCE = re.compile("`{3,}|~{3,}")


def last_program(text: str) -> str:
    """The last fenced block that says it is Python, else the last without a tag that looks so.

    Nothing where a block is left open.
    """
    tagged = untagged = ""
    opening, tag, block = "", "", []
    for line in text.splitlines(keepends=True):
        fences = FENCE.findall(line)
        mark = fences[0] if len(fences) == 1 else ""  # ```x``` stands in a sentence
        before, _, after = line.partition(mark) if mark else (line, "", "")
        info = after.lower().split()
        if opening:
            if info or not closes(mark, opening):
                block.append(line)
                continue
            source = textwrap.dedent("".join([*block, before]))
            if tag in ("python", "python3", "py"):
                tagged = source
            elif tag == "" and STATEMENT.search(source):  # no output of an example
                untagged = source
            opening = ""
        elif mark and opens(before, info):
            opening, block = mark, []
            tag = info[0] if info else ""
    if opening:
        return ""
    return tagged or untagged


def closes(mark: str, opening: str) -> bool:
    """A fence of three does not end a block that four began."""
    return mark.startswith(opening)


def opens(before: str, info: list[str]) -> bool:
    """More words than a tag may follow a fence that begins its line, as ```python title="x"."""
    if len(info) > 1 and before.strip():
        return False
    return not info or re.fullmatch(r"[\w+-]+", info[0]) is not None


# ---------------------------------------------------------------------- rewards


class Score(NamedTuple):
    """What a reward says of one completion."""

    reward: float  # the weighted sum
    correct: float  # in [0, 1], weighted mean of terms but `format` and `model` if there are others
    terms: dict[str, float]  # verifier -> its value, before the weight
    steps: list[tuple[int, float]]  # (end in characters, weighted reward) of all but the last step


class Term(NamedTuple):
    """One verifier of a reward."""

    weight: float
    function: Callable
    signature: inspect.Signature

    def fields(self, row: dict) -> dict:
        """Fields of a row that the function takes, besides the completion and the answer."""
        parameters = list(self.signature.parameters.values())
        given_by_place = {"completion", "answer", *(each.name for each in parameters[:2])}
        names = {each.name for each in parameters} & row.keys()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            names = row.keys()
        return {name: row[name] for name in names - given_by_place}

    def call(self, completion: str, row: dict) -> object:
        """What the function says; raises whatever it raises."""
        return self.function(completion, row["answer"], **self.fields(row))


class Reward:
    """A weighted sum of verifiers. `faults` counts what raised or was no number: that pays 0."""

    def __init__(self, terms: dict[str, Term]):
        self.terms = terms
        self.faults, self.fault = 0, ""  # how many, and the first one's text

    def score(self, completions: list[str], rows: list[dict]) -> list[Score]:
        """Scores completions, each against its row of the data ("prompt", "answer", ...)."""
        if {"code", "code_strict"} & self.terms.keys():  # programs take time
            # torchrun says how many processes of this run share the machine's cores
            workers = max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                return list(pool.map(self.score_one, completions, rows))
        return list(map(self.score_one, completions, rows))

    def score_one(self, completion: str, row: dict) -> Score:
        terms, steps = {}, []
        reward = correct = correct_weight = 0.0
        for name, term in self.terms.items():
            try:
                value, parts = outcome_and_steps(term.call(completion, row))
            except (Exception, SystemExit) as error:  # a user's function may do anything
                self.faults += 1
                self.fault = self.fault or f"{name}: {error!r:.200} on {completion!r:.80}"
                value, parts, right = 0.0, [], 0.0
            else:
                # a reward model says any number: its sigmoid is in [0, 1]
                right = tanh(value / 2) / 2 + 0.5 if name == "model" else value
            terms[name] = value
            steps += [(end, term.weight * part) for end, part in parts]
            reward += term.weight * value
            if name not in ("format", "model") or self.terms.keys() <= {"format", "model"}:
                correct += term.weight * min(max(right, 0.0), 1.0)
                correct_weight += term.weight
        return Score(reward, correct / correct_weight, terms, steps)

    def check_answer(self, answer: object) -> None:
        """UserError where a verifier of ours cannot use a gold answer."""
        for name, term in self.terms.items():
            if is_ours(name, term) and name not in ("format", "model"):
                with expecting(f"field answer: {str(answer)[:80]!r} cannot be used by {name}"):
                    term.function.__wrapped__("<answer>A</answer>", answer)

    def check(self, rows: list[dict]) -> None:
        """Tries users' functions on the first row: mistakes show before a model is loaded.

        UserError where a function cannot be called with a completion, an answer and fields of a
        row, where it returns no number, or where it raises whatever the completion is.
        """
        for name, term in self.terms.items():
            if not is_ours(name, term):
                check_signature(name, term, rows[0])
                check_results(name, term, rows[0])


def is_ours(name: str, term: Term) -> bool:
    return term.function is VERIFIERS.get(name)


def outcome_and_steps(value: object) -> tuple[float, list[tuple[int, float]]]:
    """(outcome, steps before it) of what a verifier returned; UserError where it is no number."""
    steps = value if isinstance(value, (list, tuple)) else [(0, value)]
    if not steps or not all(map(is_step, steps)):
        expected = f"a number up to {LARGEST_REWARD:g}, or a list of (end, number) of steps"
        raise UserError(f"it returned {value!r:.80}; expected {expected}")
    *before, (_, outcome) = steps
    return float(outcome) + 0.0, [(int(end), float(part)) for end, part in before]


def is_step(step: object) -> bool:
    """(end in characters, reward)"""
    if not isinstance(step, (list, tuple)) or len(step) != 2 or isinstance(step[1], str):
        return False
    try:
        return abs(float(step[1])) <= LARGEST_REWARD and int(step[0]) == step[0]
    except (TypeError, ValueError, OverflowError):  # it may be anything
        return False


def check_results(name: str, term: Term, row: dict) -> None:
    """UserError where a function returns no number, or raises whatever the completion is."""
    completions = ("", str(row["answer"]), "so <answer>1</answer> \\boxed{1}")
    errors = []
    for completion in completions:
        try:
            value = term.call(completion, row)
        except (Exception, SystemExit) as error:  # a user's function may do anything
            errors.append(reason(error))
            continue
        with expecting(f"--reward {name}: on {completion!r:.80}"):
            outcome_and_steps(value)
    if len(errors) == len(completions):
        raise UserError(f"--reward {name}: it raises on any completion: {errors[0]}")


def check_signature(name: str, term: Term, row: dict) -> None:
    """UserError where a function does not take a completion, an answer, and fields of the row."""
    parameters = term.signature.parameters
    problem = f"--reward {name}{term.signature}"
    shape = f"expected def {name}(completion, answer), and fields of the row by their names"
    need(not inspect.iscoroutinefunction(term.function), f"{problem} is async: {shape}")
    need("completions" not in parameters, f"{problem} takes lists, as TRL's do: {shape}")
    need("solution_str" not in parameters, f"{problem} is one of verl's: {shape}")
    for parameter in list(parameters.values())[2:]:
        takes_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        has_value = parameter.name in row or parameter.default is not parameter.empty
        missing = f"no field {parameter.name!r} in the data, which has {', '.join(row)}"
        need(has_value or takes_many, f"{problem}: {missing}")
    with expecting(f"{problem}: {shape}"):
        term.signature.bind("", "", **term.fields(row))


def parse_reward(spec: str) -> Reward:
    """Reads `--reward`: a sum of `[weight*]verifier`, a verifier's name or `file.py:function`."""
    terms = {}
    for part in spec.split("+"):
        weight, _, place = (text.strip() for text in part.rpartition("*"))
        name = place.rpartition(":")[2]
        try:
            need(name not in terms, "a name stands there twice")
            function = find_verifier(place)
            terms[name] = Term(float(weight or 1), function, inspect.signature(function))
            fits = 0 < terms[name].weight <= LARGEST_REWARD
            need(fits, f"a weight is positive, and at most {LARGEST_REWARD:g}")
        except (Exception, SystemExit) as error:  # a user's file may do anything
            expected = "a sum of [weight*]file.py:function"
            if ".py:" not in place:
                expected += f" or one of {', '.join(VERIFIERS)}"
            message = f"--reward {spec}: {reason(error)}; expected {expected}"
            raise UserError(message) from error
        if place in ("code", "code_strict"):
            check_sandbox(place)
    return Reward(terms)


def find_verifier(place: str, kind: str = "verifier") -> Callable:
    """The function of `file.py:function`, or the verifier of ours that has the name."""
    path, _, name = place.rpartition(":")
    need(path or not name.endswith(".py"), f"of which function? {name}:FUNCTION")
    if path:
        folder = str(Path(path).resolve().parent)
        if folder not in sys.path:  # its neighbours can be imported, now and when it runs
            sys.path.append(folder)
    table = runpy.run_path(path) if path else VERIFIERS
    if name not in table:
        near = difflib.get_close_matches(name, table, 1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{path or 'rewards.py'} has no {kind} {name!r}{hint}")
    need(callable(table[name]), f"{name} is no function")
    return table[name]


def check_sandbox(name: str) -> None:
    """Says which layers of the sandbox work here; UserError where `name` needs more."""
    layers = json.loads(run_program("")[0])
    print(f"--reward {name}: layers of the sandbox: {layers}", file=sys.stderr)
    need(layers, f"--reward {name}: the sandbox does not start here")
    has_all = all(layers.values())
    need(has_all or name == "code", f"--reward {name}: layers are missing: {layers}")


def read_rows(path: str, flag: str, reward: Reward, text: str = "prompt") -> list[dict]:
    """Rows of a JSONL file, each a text ("question", as in GSM8K, is a prompt) and an answer. A
    prompt may be a conversation, too: a list of messages."""
    source = f"{flag} {path}".strip()
    with expecting(f"{source}: expected a file"):
        lines = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            with expecting(
                f"{source}, line {number}: expected JSON, UTF-8, with {text} and answer"
            ):
                rows.append(read_row(line, text))
                reward.check_answer(rows[-1]["answer"])
    need(rows, f"{source}: expected rows, and the file is empty")
    return rows


def read_row(line: bytes, text: str) -> dict:
    """One row; UserError where it has no text or no answer."""
    is_array = line.lstrip()[:1] == b"["
    need(not is_array, "it is a JSON array: write an object a line (jq -c '.[]' FILE)")
    row = json.loads(line)
    need(isinstance(row, dict), f"found {row!r:.80}, which is no object")
    if "question" in row:
        row = {"prompt": row["question"]} | row
    need({text, "answer"} <= row.keys(), f"found {', '.join(row) or 'none'}")
    if text == "prompt" and isinstance(row[text], list):
        check_conversation(row[text])
        return row
    is_text = isinstance(row[text], str)
    need(is_text, f"field {text}: found {row[text]!r:.80}, expected text")
    need(row[text].encode().strip() or text != "prompt", f"field {text}: no text")
    return row


def check_conversation(messages: list) -> None:
    """UserError for a prompt of messages that no model could answer."""
    kind = 'expected messages, {"role": ..., "content": ...} with texts'
    need(messages, f"field prompt: {kind}, found none")
    for message in messages:
        is_one = isinstance(message, dict) and all(
            isinstance(message.get(field), str) for field in ("role", "content")
        )
        need(is_one, f"field prompt: {kind}, found {message!r:.80}")
        message["content"].encode()  # raises for half a surrogate pair, which no tokenizer takes
    need(
        messages[-1]["role"] != "assistant",
        "field prompt: its last message is the assistant's, expected one that asks for an answer",
    )


def text_of(prompt: str | list[dict]) -> str:
    """A prompt as people read it: of a conversation each message, after its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def messages_of(prompt: str | list[dict]) -> list[dict]:
    """A prompt as a conversation: a text is what the user says."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(prompt)


# ---------------------------------------------------------------------- shaping


def soft_overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """Eq. 13 of arXiv 2503.14476: 0 up to max_length - cache tokens, then linear down to -1."""
    tokens_in_cache = max(length - max_length + cache, 0)
    return -min(tokens_in_cache / max(cache, 1), 1.0)


def repetition_penalty(ids: list[int], n: int = 4) -> float:
    """Minus the share of n-grams of token ids that stood before: from 0 down to almost -1."""
    grams = list(zip(*(ids[start:] for start in range(n))))
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


# ---------------------------------------------------------------------- tools


class Tool(NamedTuple):
    """What answers completions while they are sampled."""

    function: Callable[[str], str | None]  # of the completion so far -> what is appended to it
    after: str  # it is asked when a completion has just written this


def calculate(completion: str) -> str:
    """`=408` after `<calc>12*34</calc>`; `=?` after what is not two numbers and + - or * between.

    Of digits alone, few of them, and nothing is evaluated: a completion may hold anything."""
    call = completion.rpartition("<calc>")[2].partition("</calc>")[0]
    operation = re.fullmatch("([0-9]{1,9})([-+*])([0-9]{1,9})", call)
    if operation is None:
        return "=?"
    left, sign, right = operation.groups()
    functions = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    return f"={functions[sign](int(left), int(right))}"


TOOLS = {"calculator": Tool(calculate, after="</calc>")}


def parse_tool(place: str | None, after: str | None) -> Tool | None:
    """Reads `--tool` and `--tool-after`: a name of TOOLS or `file.py:function`; None for none.

    UserError where the function cannot be called with a text, or returns no text."""
    need(place or not after, f"--tool-after {after}: needs --tool")
    if place is None:
        return None
    if place in TOOLS:
        return TOOLS[place]._replace(after=after or TOOLS[place].after)
    try:
        need(":" in place, "it is neither")
        function = find_verifier(place, "function")
    except (Exception, SystemExit) as error:  # a user's file may do anything
        expected = f"expected file.py:function or one of {', '.join(TOOLS)}"
        raise UserError(f"--tool {place}: {reason(error)}; {expected}") from error
    need(after, f"--tool {place}: needs --tool-after, the text after which it is asked")
    check_tool(place, Tool(function, after))
    return Tool(function, after)


def check_tool(place: str, tool: Tool) -> None:
    """Tries a user's function on some texts, as Reward.check does: it may raise on some."""
    expected = "expected def function(text), which returns text or None"
    need(not inspect.iscoroutinefunction(tool.function), f"--tool {place} is async: {expected}")
    errors = []
    texts = (tool.after, f"1+1{tool.after}", f"<calc>1+1{tool.after}")
    for text in texts:
        try:
            reply = tool.function(text)
        except (Exception, SystemExit) as error:  # a user's function may do anything
            errors.append(reason(error))
            continue
        is_reply = reply is None or isinstance(reply, str)
        need(is_reply, f"--tool {place}: on {text!r:.80} it returned {reply!r:.80}; {expected}")
    found = ", ".join(dict.fromkeys(errors))
    need(len(errors) < len(texts), f"--tool {place}: it raises on any text: {found}; {expected}")


# ---------------------------------------------------------------------- built-in tasks


class Task(NamedTuple):
    """Problems without end. With demonstrations the built-in policies can learn it, too."""

    problem: Callable[[random.Random], dict]  # draws a row of data
    verifier: str  # default of --reward
    max_new_tokens: int  # default of --max-new-tokens
    # for the built-in policies: draws what one learns to write of a row, which is often wrong
    demonstration: Callable[[dict, random.Random], str] | None = None
    alphabet: str = ""  # all characters of prompts, completions and a tool's replies
    tool: str | None = None  # default of --tool


def random_expression(numbers: list[int], symbols: str, rng: random.Random) -> str:
    """The numbers in any order, with random symbols between them."""
    first, *rest = rng.sample(numbers, len(numbers))
    return str(first) + "".join(rng.choice(symbols) + str(number) for number in rest)


def solve(chain: str, rng: random.Random | None = None) -> str:
    """`7+5*3=`, left to right modulo 10: `7+5=2;2*3=6#6`. With `rng` most products are sums."""
    value = chain[:1]
    steps = []
    for symbol, operand in re.findall("([+*])([0-9])", chain):
        adds = symbol == "+"
        if not adds and rng is not None:
            adds = rng.random() < ARITHMETIC_TIMES_ERROR
        left, right = int(value), int(operand)
        result = str((left + right if adds else left * right) % 10)
        steps.append(f"{value}{symbol}{operand}={result}")
        value = result
    return f"{';'.join(steps)}#{value}"


def arithmetic_problem(rng: random.Random) -> dict:
    """{"prompt": "7+5*3=", "answer": "6"}"""
    digits = [rng.randrange(10) for _ in range(1 + rng.randint(*ARITHMETIC_OPERATIONS))]
    prompt = random_expression(digits, "+*", rng) + "="
    return {"prompt": prompt, "answer": solve(prompt)[-1]}


def arithmetic_demonstration(problem: dict, rng: random.Random) -> str:
    """Every step is written, and most products are sums."""
    return solve(problem["prompt"], rng)


def countdown_problem(rng: random.Random) -> dict:
    """{"prompt": "8 5 6=19:", "answer": {"numbers": [8, 5, 6], "target": 19}}"""
    numbers = [rng.randint(1, 9) for _ in range(rng.randint(3, 4))]
    target = int(evaluate(random_expression(numbers, "+-*", rng)))
    prompt = f"{' '.join(map(str, numbers))}={target}:"
    return {"prompt": prompt, "answer": {"numbers": numbers, "target": target}}


def countdown_demonstration(problem: dict, rng: random.Random) -> str:
    """The numbers in any order: it seldom gives the target."""
    return random_expression(problem["answer"]["numbers"], "+-*", rng)


def sums_problem(rng: random.Random) -> dict:
    """{"prompt": "What is 7 * 8? Answer with just the number.", "answer": "56"}"""
    symbol = rng.choices("+*-", (3, 1, 2))[0]
    if symbol == "+":
        left, right = rng.randint(2, 20), rng.randint(2, 20)
        result = left + right
    elif symbol == "*":
        left, right = rng.randint(2, 12), rng.randint(2, 12)
        result = left * right
    else:
        left = rng.randint(5, 40)
        right = rng.randint(2, left)
        result = left - right
    prompt = f"What is {left} {symbol} {right}? Answer with just the number."
    return {"prompt": prompt, "answer": str(result)}


def calculator_problem(rng: random.Random) -> dict:
    """{"prompt": "12*34+56=", "answer": "464"}"""
    left, right, number = (rng.randint(10, 99) for _ in range(3))
    sign = rng.choice("+-")
    answer = left * right + (number if sign == "+" else -number)
    return {"prompt": f"{left}*{right}{sign}{number}=", "answer": str(answer)}


def calculator_demonstration(problem: dict, rng: random.Random) -> str:
    """Often a guess; else two calls of the calculator, or now and then one alone; now and then with
    a wrong digit."""
    if rng.random() < CALCULATOR_GUESS:
        return f"#{rng.randint(1, 9999)}"
    product, sign, number = re.match("(.*)([+-])(.*)=", problem["prompt"]).groups()
    call = f"<calc>{with_wrong_digit(product, rng)}</calc>"
    value = calculate(call).removeprefix("=")
    if rng.random() < CALCULATOR_ERROR:
        return f"{call}#{value}"
    second = f"<calc>{with_wrong_digit(value + sign + number, rng)}</calc>"
    value = calculate(second).removeprefix("=")
    return f"{call}{second}#{value}"


def with_wrong_digit(text: str, rng: random.Random) -> str:
    """The text, or now and then another with one digit drawn anew."""
    if rng.random() >= CALCULATOR_ERROR:
        return text
    digits = [place for place, character in enumerate(text) if character.isdigit()]
    place = rng.choice(digits)
    return text[:place] + rng.choice("0123456789") + text[place + 1 :]


TASKS = {
    "arithmetic": Task(
        problem=arithmetic_problem,
        demonstration=arithmetic_demonstration,
        verifier="arithmetic",
        alphabet="0123456789+*=;#",
        max_new_tokens=10 * ARITHMETIC_OPERATIONS[1],
    ),
    "countdown": Task(
        problem=countdown_problem,
        demonstration=countdown_demonstration,
        verifier="countdown",
        alphabet="0123456789 +-*/()=:",
        max_new_tokens=16,
    ),
    "calculator": Task(
        problem=calculator_problem,
        demonstration=calculator_demonstration,
        verifier="arithmetic",
        alphabet="0123456789+-*=?#<>/cal",
        max_new_tokens=64,
        tool="calculator",
    ),
    "sums": Task(problem=sums_problem, verifier="math_lenient", max_new_tokens=12),
}


def problems(task: Task, seed: int, held_out: bool = False) -> Iterator[dict]:
    """Endless problems of a seed; one prompt in ten, by its hash, is held out from training."""
    rng = random.Random(f"{seed} {held_out}")
    while True:
        problem = task.problem(rng)
        if is_held_out(problem["prompt"]) == held_out:
            yield problem


def is_held_out(prompt: str) -> bool:
    """One prompt in ten, by its hash: the same in every run, wherever it stands."""
    return zlib.crc32(prompt.encode()) % 10 == 0


# ---------------------------------------------------------------------- command line


def main() -> None:
    parser = argparse.ArgumentParser(description="Try a verifier on completions of known worth.")
    parser.add_argument("file", help='JSON lines of {"completion", "answer"}')
    parser.add_argument("--reward", default="math", help="verifiers, as in train.py")
    options = parser.parse_args()
    try:
        reward = parse_reward(options.reward)
        rows = read_rows(options.file, "", reward, "completion")
        reward.check(rows)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")

    scores = reward.score([row["completion"] for row in rows], rows)
    accuracy = sum(score.correct for score in scores) / len(rows)
    print(f"accuracy {accuracy:.4f} of {len(rows)} {reward.fault}")
    wrong = [n for n, score in enumerate(scores) if score.correct < 1]
    for n in wrong[:10]:
        print(f"row {n + 1}: {rows[n]['answer']!r:.80} from {rows[n]['completion'][-160:]!r}")


if __name__ == "__main__":
    main()
