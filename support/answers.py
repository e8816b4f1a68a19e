"""Do two answers mean the same?"""

import decimal
import functools
import operator
import random
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from math import ceil, factorial, floor, inf, isqrt
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
