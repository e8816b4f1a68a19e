"""`--reward math_symbolic`: do two answers mean the same? `same_answer(given, gold)` reads LaTeX.

Both answers become trees. Trees are compared by their values where they have values (letters get
numbers, at several points), piece by piece where they are points, sets and the like, else as text.
Answers come from models that are trained on the verdict: nothing is evaluated, no call is slow."""

import itertools
import random
import re
import unicodedata
from fractions import Fraction
from functools import lru_cache, partial
from math import comb, factorial
from typing import NamedTuple

import mpmath

from rewards import final_answer, gold_answer, in_any_order, table, verifier
from support.user import need

MAX_EXPRESSION = 1_000  # characters of an answer that is read. A longer one is compared as text
MAX_BITS = 40_000  # of a numerator or denominator, so that 9^9^9 takes no time
MAX_WORK = 22_000  # of a comparison, in something like microseconds


@verifier
def math_symbolic(completion: str, answer: str | int | float) -> bool:
    """1 if the marked answer is the gold one: `same_answer`."""
    return same_answer(final_answer(completion, marked=True), gold_answer(answer))


# ---------------------------------------------------------------------- reading

SYMBOLS = r"""
    *←\cdot,\times,\ast,×,·,⋅  /←\div,÷  -←−,–  ^←**  %←\%  °←^\circ,^{\circ},\degree
    \frac←\dfrac,\tfrac,\cfrac  \sqrt←√  ±←\pm  ∓←\mp  \frac12←½  \frac13←⅓  \frac34←¾
    ∞←\infty  (-∞,∞)←ℝ  ∅←\varnothing,\emptyset  ∪←\cup  :←\colon  =←\in,∈  ≈←\approx  <←\lt
    ≤←<=,\le,\leq,\leqslant  ≥←>=,\ge,\geq,\geqslant  ≠←!=,\ne,\neq
    (←\langle  )←\rangle  ⟨←\{,\lbrace  ⟩←\},\rbrace  |←\lvert,\rvert,\vert,\|
    \epsilon←\varepsilon  \phi←\varphi  dollar←\$,\textdollar  euro←€  yen←¥  rupee←₹
"""  # our symbol, and how LaTeX, Unicode and programs write it
NOTHING = r"""
    \, \; \: ~ {,} \quad \qquad \left \right \mathbf \boldsymbol \underline \fbox \large
    \Large \bf \vec \angle \triangle \displaystyle \( \) \[ \]
"""  # 1{,}000 is 1 000
GREEK = """
    α alpha β beta γ gamma δ delta ε epsilon ζ zeta η eta θ theta κ kappa λ lambda μ mu ν nu ξ xi
    π pi ρ rho σ sigma τ tau φ phi ϕ phi χ chi ψ psi ω omega Γ Gamma Δ Delta Θ Theta Λ Lambda
    Σ Sigma Φ Phi Ψ Psi Ω Omega ℓ ell ℏ hbar
"""
SIGNS = GREEK.split()[::2]
NAMES = GREEK.split()[1::2]
SMALL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789+-n0123456789n")

MEANINGS = {other: f" {ours} " for other, ours in table(SYMBOLS).items()}
MEANINGS |= {sign: f" \\{name} " for sign, name in zip(SIGNS, NAMES)}
MEANINGS |= dict.fromkeys((r"\ ", "{, }", *NOTHING.split()), " ")

SYMBOL = re.compile(
    r"""
      \{,[ ]?\}                    # 1{,}000
    | (?P<raised> [⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+ )
    | (?P<lowered> [₀-₉ₙ]+ )
    | \^ (?: \\circ | \{\\circ\} )  # 90^\circ
    | \\ (?: [a-zA-Z]+ | . )       # any other command
    | [<>!]= | \*\*                # operators of programs
    | ~
    | [^\x00-\x7f]                 # Unicode
    """,
    re.VERBOSE | re.DOTALL,
)
TEXT_BOX = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|emph|mathrm|mbox|hbox|operatorname)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
BEFORE_NUMBER = r"^|(?<![\\a-zA-Z])[a-zA-Z]{2,} |[-=<>≤≥≠≈+*±([{⟨,;:&∪|\"] ?"
FRACTION = r"\\frac ?(?:\{ ?[0-9]+ ?\}|[0-9]) ?(?:\{ ?[0-9]+ ?\}|[0-9])|(?<= )[0-9]+ ?/ ?[0-9]+"


def our_symbol(found: re.Match) -> str:
    """Return ` \\frac12  *  \\pi ` for `½·π`, and `x^{4}` for `x⁴`."""
    if found["raised"]:
        return f"^{{{found[0].translate(SMALL)}}}"
    if found["lowered"]:
        return f"_{{{found[0].translate(SMALL)}}}"
    return MEANINGS.get(found[0], found[0])


REWRITES = {  # a pattern: its replacement. The order counts
    '"': " ",
    r"(?i)\bper cent\b": "percent",
    r"(?i)\b(?:all|any) (?:real numbers?|reals)(?! \w)": "ℝ",
    r"\\(?:mathbb|Bbb)\s*(?:R|\{\s*R\s*\})": "ℝ",
    r"(?<=[0-9.)}\s])([ckm]?m)(?=[²³])": r"\\text{\1}",  # 5m², but no x = m²
    r"\\(?:color|textcolor)\s*\{[^{}]*\}": "",  # \color{red}{42}
    r"-\s*\\\$": r"\\$-",  # -$20
    r"\\(?:left|right)\s*\.": "",  # a bracket that is not shown
    TEXT_BOX: r'"\1"',
    r"\\\\\s*\[\s*-?[0-9.]+\s*[a-z]{2}\s*\]": r"\\\\ ",  # \\[4pt]
    r"\\end\s*\{\w+\*?\}": r"\\end ",
    r"\\!\s*": "",  # 32,\! 349
    SYMBOL: our_symbol,  # from here on all is in our symbols
    r"\s+": " ",
    r"(?<![\s\\])(?:\s|\\|(?<!\.)\.)++\Z": "",  # a full stop, the end of a row
    r'(?i)\A"? ?(?:the )?(?:final )?(?:answer|value)(?: is\b|:)[": ]*(?=.)': "",
    r'" ?\^ ?\{?(-?[1-3])\}?': r'^\1"',  # "cm"^2
    '" ?/ ?"': "/",  # "km"/"h"
    r", ?(?=(?:[^()[\]⟨⟩]|\([^()]*\))*[)\]⟩])": ", ",  # (1,234) is a pair
    r', ?(?="? ?(?:and|or)\b)': " ",  # 1, 2, and 3
    rf"({BEFORE_NUMBER})([0-9]+) ?({FRACTION})": r"\1{\2+\3}",  # 3\frac12, 3 1/2
}
RANGE_OR_TIME = re.compile(r'[0-9.,]+ ?[-:] ?[0-9.,]+ ("|[a-zA-Z]{2})')  # 10-20 years, 3:30 PM
UNIT_WORD = re.compile(r"(?:/?[a-zA-Z]++(?:\^\{?-?[1-3]\}?)?)++|[/*]")
UNIT_WITH_POWER = re.compile(r"(?:(?:[a-zA-Z]{2,}+|[hmsgJKN/* ])(?:\^\{?-?[1-3]\}?)?)++")
TOKEN = re.compile(
    r"""
      [0-9]+ _ (?: [0-9]+ | \{[0-9]+\} )                     # 204_5
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
    | \\begin \s* \{ (?: (?: [pbB] | small )? matrix | array ) \} (?: \s* \{[lcr|\s]*\} )?
    | (?: cm | m | km | ft | mi ) / (?: h | hr | min | s (?: \^2 )? ) \b  # 10 m/s
    | \\ (?! log | ln | lim | sum | prod ) [a-zA-Z]+ [ ]? _ (?: \w | \{[^{}]*\} )  # \mu_0
    | \\ (?: [a-zA-Z]+ | \\ )                                # a command, or the end of a row
    | (?! [abcxyz]+ (?![a-zA-Z]) ) [a-zA-Z]{3,}             # a word; but xyz is a product
    | (?<=[ ]) (?: is | of | to | so | in ) (?= [ ] | $ )    # short words
    | (?<=[0-9 ]) (?: [cmk]m | kg | mL | ft | sq | in(?=\^) ) (?: \^ \{?[23]\}? )? (?![a-zA-Z])
    | \A [Nn]o \Z                                            # yes, or no
    | (?: pi | ln | or ) (?![a-zA-Z])
    | [fghy] \^ \{ (?: -1 | \([^()]\) ) \} (?= [ ]? \( )     # f^{-1}(x), y^{(4)}(0)
    | [a-zA-Z] '* (?: _ (?: \w | \{[^{}]*\} ) )?             # a letter, perhaps with a subscript
    | \S
    """,
    re.VERBOSE,
)
WORD = re.compile(r"[a-zA-Z]{2,}|[a-z]+/[a-z]+(\^2)?|[a-z]{2}\^\{?[23]\}?")
CLOSING = (")", "]", "⟩")
MEANINGS_OF_WORDS = {"and": ["and"], "or": ["or"], "infinity": ["∞"], "pi": ["\\pi"]}
MEANINGS_OF_WORDS |= {"sqrt": ["\\sqrt"]} | dict.fromkeys(("%", "percent", "pct"), ["/", "100"])


def tokenise(text: str) -> list[str]:
    """Return the tokens of an answer. A word, or a text in a box, starts with `"`."""
    for pattern, meaning in REWRITES.items():
        text = re.sub(pattern, meaning, text)
        need(len(text) <= 2 * MAX_EXPRESSION, "too long")
    need(not RANGE_OR_TIME.match(text), "it has no value")
    tokens = []
    for token in TOKEN.findall(text):
        word = token.strip('" ')
        meaning = MEANINGS_OF_WORDS.get(word.strip(" ,").lower())
        is_symbol = token[0] != '"' and not WORD.fullmatch(token)
        if meaning:
            tokens += meaning
        elif is_symbol or word in FUNCTIONS or word in ("e", "i"):
            tokens.append(word)
        elif UNIT_WITH_POWER.fullmatch(word) or not re.search(r"[0-9]|\A\W*\Z", word):
            tokens.append('"' + word)
        else:  # \text{5 cm}
            tokens += tokenise(word)
    return tokens


# ---------------------------------------------------------------------- parsing


class Node(NamedTuple):
    """A piece of an answer: its kind, the pieces inside it, and a value of its own.

    number (value: a Fraction), infinity, minus infinity, letter, word
    call (value: its name): of arguments. A known function: argument, perhaps a base
    sum, product, ratio, union: of two pieces or more
    negative, inverse, absolute, factorial: of one
    power: base, exponent. root: degree, radicand. binomial: above, below
    quantity (value: its unit): of one. ±, ∓: of two, until `alternatives` makes two nodes
    list (value: "and", "or" or ","), set, "()", "[]", "(]", "[)": of items. matrix: of rows
    =, ≠: of sides. < (value: the signs between them): of sides from small to large"""

    kind: str
    items: tuple = ()
    value: object = None


def number(value) -> Node:
    return Node("number", value=Fraction(value))


ZERO = number(0)
INFINITY, MINUS_INFINITY = Node("infinity"), Node("minus infinity")
PRECEDENCE = {"∪": 1, ":": 1, "\\over": 1, "+": 2, "-": 2, "±": 2, "∓": 2, "*": 3, "/": 3, "^": 4}
RELATIONS = ("=", "≠", "<", ">", "≤", "≥", "≈")
SEPARATORS = (",", ";", "and", "or")
TURNED = {">": "<", "≥": "≤"}
COMMANDS = "|".join([*NAMES, "partial", "nabla", "det", "dim", "deg"])
LETTER = re.compile(rf"(?:\\(?:{COMMANDS})|[a-zA-Z]'*)(?: ?_.+|\^.+)?", re.DOTALL)
CALLED = (*"fghFGHNTPVEIWJ", "\\Gamma", "\\zeta", "\\Phi", "\\delta", "\\psi")  # before a bracket
PAIRS = ("()", "[]", "(]", "[)")  # intervals, points
ANGLES = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = (*ANGLES, "arcsin", "arccos", "arctan", "sinh", "cosh", "ln", "log", "exp")
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
SCALES |= {"trillion": 10**12, "dozen": 12, "lakh": 10**5, "crore": 10**7}
POWERS = {"square": "2", "cubic": "3"}
CURRENCIES = ("dollar", "euro", "yen", "rupee")
SAME_UNIT = table("""
    cm←centimeter  m←meter  ft←feet,foot  in←inche,inch  mi←mile  mL←milliliter,ml  L←liter
    min←minute  s←second,sec  h←hour,hr,hrs  lb←lbs  /←per  mi·/·h←mph  square←sq  degree←°
    dollar←USD,usd  rupee←Rs,rs
""")  # other ways to write a unit


def read(text: str) -> Node:
    """Return the tree of an answer. Raise ValueError if our grammar has none.

    It is the item of a list of one, x = (1, 2, 3) for x = 1, 2, 3 and for x = 1, x = 2, x = 3,
    and (x, y) = (3, -2) for x = 3, y = -2 in the order of the names."""
    parser = Parser(tokenise(text))
    node = alternatives(parser.listed())
    parser.take("")
    if len(node.items) == 1:
        return node.items[0]
    named = [item.items for item in node.items if is_named(item)]
    values = [item.items[-1] if is_named(item) else item for item in node.items]
    if not is_named(node.items[0]) or any(value.kind == "=" for value in values):
        return node
    names = {name for name, _ in named}
    if len(names) == 1:
        return Node("=", (*names, node._replace(items=tuple(values))))
    if len(names) == len(values) and node.value != "or":
        names, values = zip(*sorted(named, key=str))
        return Node("=", (Node("()", names), Node("()", values)))
    return node


class Parser:
    """Recursive descent over a stack of tokens. The next token is the last; "" is the end."""

    def __init__(self, tokens: list[str]):
        self.tokens = ["", *tokens[::-1]]
        self.last = ""  # the token taken last
        self.bars = 0  # open | of absolute values
        self.angles = 0  # functions of an angle that are open: there 30° is pi/6

    def next_is(self, *symbols: str) -> bool:
        return self.tokens[-1] in symbols

    def take(self, *expected: str) -> str:
        """Take the next token, which must be one of those expected, if any are."""
        need(not expected or self.next_is(*expected), "another sign is expected")
        self.last = self.tokens.pop()
        return self.last

    def taken(self, *symbols: str) -> str:
        """Take the next token if it is one of these, else nothing."""
        return self.take() if self.next_is(*symbols) else ""

    # lists, relations, quantities

    def listed(self) -> Node:
        """Read a list of items, perhaps of one."""
        found, separator = [self.relation()], ","
        while sign := self.taken(*SEPARATORS):
            if sign in ("and", "or"):
                separator = sign
            found.append(self.relation())
        return Node("list", tuple(found), separator)

    def relation(self) -> Node:
        """Read x = 1, 1 < x <= 2, or a quantity without a relation."""
        self.taken("=", "≈")  # = 5
        sides, signs = [self.quantity()], []
        while sign := self.taken(*RELATIONS):
            signs.append(sign)
            sides.append(self.quantity())
        if "≈" in signs:
            end = signs.index("≈")
            if not has_unknowns(sides[end]):  # 1/3 ≈ 0.33 is 1/3
                sides, signs = sides[: end + 1], signs[:end]
            signs = [sign.replace("≈", "=") for sign in signs]  # P(X = 5) ≈ 0.17
        if not signs:
            return sides[0]
        if set(signs) == {"="} or signs == ["≠"]:
            return Node(signs[0], tuple(sides))
        if set(signs) <= TURNED.keys():  # a > b is b < a
            sides = sides[::-1]
            signs = [TURNED[sign] for sign in signs[::-1]]
        need(set(signs) <= {"<", "≤"}, "relations of several kinds")
        return Node("<", tuple(sides), tuple(signs))

    def quantity(self) -> Node:
        """Read words, or an expression with a currency before it or a unit after it.

        Scale words such as million multiply the value."""
        currency = ""
        if words := self.words().strip(" ().:,"):
            if self.next_is("", *RELATIONS, *SEPARATORS, *CLOSING, "&", "\\\\"):
                return Node("word", value=words)
            currency = SAME_UNIT.get(words.lower(), words.lower())
            need(currency in CURRENCIES, "words before a value")
        value = self.expression()
        words = self.words().split()
        is_unknown = value.kind == "letter" and has_unknowns(value)
        need(not words or not is_unknown, "a unit without a number")
        while words and words[0].lower().rstrip("s") in SCALES:
            scale = SCALES[words.pop(0).lower().rstrip("s")]
            value = combine("*", value, number(scale))
        are_units = all(map(UNIT_WORD.fullmatch, words))
        need(are_units and len(words) <= 3, "no unit")
        unit = unit_of(" ".join([currency, *words]))
        return Node("quantity", (value,), unit) if unit else value

    def words(self) -> str:
        found = []
        while self.tokens[-1].startswith('"'):
            found.append(self.take()[1:])
        return " ".join(found)

    # expressions

    def expression(self, level: int = 1) -> Node:
        """Read an operand, and everything bound to it at least as tightly as `level`."""
        value = self.postfixed(self.operand())
        while True:
            symbol = "*" if self.product_without_sign() else self.tokens[-1]
            if PRECEDENCE.get(symbol, 0) < level:
                return value
            self.taken(symbol)
            level_of_right = PRECEDENCE[symbol] + (symbol != "^")  # 2^3^2 is 2^9
            value = combine(symbol, value, self.expression(level_of_right))

    def product_without_sign(self) -> bool:
        """Return whether the next token is a factor: 2x, 2(x + 1), 2\\sqrt 3, (n + 1)2^n."""
        token = self.tokens[-1]
        if self.last in (")", "}") and token.isdigit():
            return self.tokens[-2:-1] == ["^"]
        if token == "|":
            return self.bars == 0
        if token in ("(", "{", "\\frac", "\\sqrt", "\\binom"):
            return True
        return token.strip("\\") in FUNCTIONS or LETTER.fullmatch(token) is not None

    def operand(self) -> Node:
        """Read the text between two signs. Roots and functions end there without brackets."""
        token = self.take()
        if token in ("+", "-", "±", "∓"):
            return combine(token, ZERO, self.expression(PRECEDENCE["^"]))
        if token == "\\frac":
            return combine("/", self.digit_or_operand(), self.digit_or_operand())
        if token == "\\sqrt":
            degree = number(2)
            if self.taken("["):
                degree = self.expression()
                self.take("]")
            return Node("root", (degree, self.operand()))
        if token == "\\binom":
            return Node("binomial", (self.digit_or_operand(), self.digit_or_operand()))
        if token in ("(", "[", "⟨", "{"):
            return self.bracket(token)
        if token == "|":
            self.bars += 1
            inside = self.expression()
            self.take("|")
            self.bars -= 1
            return Node("absolute", (inside,))
        if token.startswith("\\begin") and token.endswith("}"):
            return self.matrix()
        if token.strip("\\") in FUNCTIONS:
            return self.function(token.strip("\\"))
        if token == "∞":
            return INFINITY
        if LETTER.fullmatch(token):
            return self.letter_or_call(re.sub("[{} ]", "", token))
        # 204_5 is of another base, and 0,05 is neither 0 and 5 nor 0.05
        need(re.fullmatch(r"(?!0[0-9])\.?[0-9][^_]*", token), "it is no number")
        return number(re.sub("[, ]", "", token))

    def letter_or_call(self, name: str) -> Node:
        """Read f(x + 1) and N(0) as calls, but x(x + 1) and a(b + c) as products."""
        if not self.next_is("(") or re.match(r"\\?[a-zA-Z]+", name)[0] not in CALLED:
            return Node("letter", value=name)
        argument = self.bracket(self.take())
        return Node("call", argument.items if argument.kind == "()" else (argument,), name)

    def postfixed(self, value: Node) -> Node:
        """Read 5! and 30°. 5!! is no factorial of a factorial."""
        if self.taken("!"):
            return Node("factorial", (value,))
        if not self.taken("°"):
            return value
        if self.angles:
            return Node("product", (value, Node("letter", value="\\pi"), number("1/180")))
        return Node("quantity", (value,), unit_of("° " + self.taken("C", "F", '"C', '"F')))

    def digit_or_operand(self) -> Node:
        """Read the argument of a LaTeX command: without braces one digit, as in \\frac12."""
        if self.tokens[-1].isdigit():
            digits = self.take()
            if digits[1:]:
                self.tokens.append(digits[1:])
            return number(digits[0])
        return self.operand()

    def bracket(self, opening: str) -> Node:
        bars, self.bars = self.bars, 0
        items = self.listed().items
        self.bars = bars
        kind = opening + self.take("}", *CLOSING)
        only_groups = kind in ("()", "{}") or items[0].kind == "matrix"
        if only_groups and len(items) == 1:
            return items[0]
        if kind in ("{}", "⟨⟩"):
            return alternatives(Node("set", items))
        return Node(kind, items)  # (1, 2} has no value

    def matrix(self) -> Node:
        rows = []
        while not self.taken("\\end"):
            row = [self.quantity()]
            while self.taken("&"):
                row.append(self.quantity())
            rows.append(Node("row", tuple(row)))
            if not self.next_is("\\end"):
                self.take("\\\\")
        return Node("matrix", tuple(rows))

    def function(self, name: str) -> Node:
        """Read sin x, sin^2(x), sin^{-1} x, log_2 8."""
        base, power = [], None
        if self.taken("_"):
            base = [self.digit_or_operand()]
        if self.taken("^"):
            power = self.operand()
        if power == Node("negative", (number(1),)) and "arc" + name in FUNCTIONS:
            name, power = "arc" + name, None
        self.angles += name in ANGLES
        if self.next_is("(", "{"):
            argument = self.postfixed(self.operand())
        else:  # a product up to the next sign or function: sin 2x cos y
            factors = [self.expression(PRECEDENCE["^"])]
            while self.product_without_sign() and self.tokens[-1].strip("\\") not in FUNCTIONS:
                if self.next_is("("):
                    break
                factors.append(self.expression(PRECEDENCE["^"]))
            argument = Node("product", tuple(factors))
        self.angles -= name in ANGLES
        value = Node(name, (argument, *base))
        return value if power is None else Node("power", (value, power))


KINDS = {"+": "sum", "*": "product", "^": "power", ":": "ratio", "∪": "union"}
GROWING = ("sum", "product", "ratio", "union")


def combine(symbol: str, left: Node, right: Node) -> Node:
    """Return a node of one operation. Sums, products and unions grow and do not nest."""
    if symbol == "-":
        symbol = "+"
        right = MINUS_INFINITY if right == INFINITY else Node("negative", (right,))
    if symbol in ("/", "\\over"):
        symbol, right = "*", Node("inverse", (right,))
    if symbol == "+" and left == ZERO:
        return right
    kind = KINDS.get(symbol, symbol)
    if kind in GROWING and left.kind == kind:
        return Node(kind, (*left.items, right))
    return Node(kind, (left, right))


def unit_of(text: str) -> str:
    """Return one way to write a unit: `mi·/·h` for miles per hour and for mph."""
    found = []
    for part in re.findall(r"[a-zA-Z°]+|-?[0-9]|/", text):
        word = part.lower().removesuffix("s") if len(part) > 3 else part  # ms is not m
        found.append(SAME_UNIT.get(word, word))
    if found[1:] and found[0] in POWERS:  # square inches are in^2
        found = [found[1], POWERS[found[0]], *found[2:]]
    return "·".join(found)


def is_name(node: Node) -> bool:
    """Return whether a node may be left out before `=`: x, AB, f(x), (x, y), Area."""
    if node.kind in ("product", "()"):
        return all(map(is_name, node.items))
    return node.kind in ("letter", "call", "word")


def is_named(node: Node) -> bool:
    """Return whether a node is like x = 5."""
    return node.kind == "=" and is_name(node.items[0]) and len(node.items) == 2


def has_unknowns(node: Node) -> bool:
    """Return whether a node has letters other than pi, e and i."""
    is_unknown = node.kind in ("letter", "word", "call") and node.value not in CONSTANTS
    return is_unknown or any(map(has_unknowns, node.items))


def alternatives(node: Node) -> Node:
    """Return a list or set in which two items replace each item with ±."""
    items = []
    for item in node.items:
        plus, minus = {"±": "+", "∓": "-"}, {"±": "-", "∓": "+"}
        items += dict.fromkeys([with_signs(item, plus), with_signs(item, minus)])
    return node._replace(items=tuple(items))


def with_signs(node: Node, signs: dict[str, str]) -> Node:
    items = tuple(with_signs(item, signs) for item in node.items)
    if node.kind in signs:
        return combine(signs[node.kind], *items)
    return node._replace(items=items)


# ---------------------------------------------------------------------- values

POINTS = ("negative", "positive", "58")  # at "58" x and y differ in sign, as do most pairs
MP = mpmath.MPContext()  # of our own: other code may change the digits of mpmath's
MP.dps = 250  # digits, of which the last 20 may be wrong
CONSTANTS = {"i": MP.mpc(0, 1), "e": +MP.e, "\\pi": +MP.pi}
NOISE = MP.mpf(10) ** -230
LARGEST_EXPONENT = 350  # of 2: beyond 10^105 a digit next to the point would not be seen


@lru_cache(maxsize=1000)
def unknown(name: str, point: str) -> Fraction:
    """Return the value of a letter at a point, a number that nobody would write.

    All are negative at the first point, so that sqrt(x^2) is not x. All are positive at the second,
    so that |x| is not -x. The third has both signs, so that |x| + |y| is not |x + y|. The
    denominator is odd, so that (-2)^n is real."""
    rng = random.Random(f"{name} {point}")
    size = Fraction(rng.randint(1, 2**17), 2**15 - 19)
    sign = {"negative": -1, "positive": 1}.get(point, rng.choice((-1, 1)))
    return sign * size


def are_exact(*found) -> bool:
    return all(isinstance(value, Fraction) for value in found)


def inexact(value):
    """Return a number of mpmath. Raise ValueError if others would be lost beside it."""
    if are_exact(value):  # mpmath's own conversion looks for a common divisor, slowly
        value = MP.mpf(value.numerator) / value.denominator
    need(not value or abs(MP.mag(value)) <= LARGEST_EXPONENT, "too large, or too small")
    return value


def bits_of(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def bounded(value):
    """Return the value, 0 as a Fraction. Raise ValueError if computing with it would take long."""
    if not are_exact(value):
        return inexact(value) or Fraction(0)
    need(bits_of(value) <= MAX_BITS, "too large")
    return value


def add(left, right):
    """Return the sum, and exactly 0 if only the error of the last digits is left."""
    if are_exact(left, right):
        return bounded(left + right)
    left, right = inexact(left), inexact(right)
    total = left + right
    if abs(total) <= NOISE * max(abs(left), abs(right)):
        return Fraction(0)
    return bounded(total)


def multiply(left, right):
    if not are_exact(left, right):
        left, right = inexact(left), inexact(right)
    return bounded(left * right)


def power(base, exponent):
    """Return base^exponent, for a negative base and an odd root the real one."""
    degree = exponent.denominator if are_exact(exponent) else 0
    if degree == 1:
        size = bits_of(base) if are_exact(base) else abs(MP.mag(base)) + 1
        need(size * abs(exponent) <= MAX_BITS, "9^9^9")
        return bounded(base ** int(exponent))
    if degree % 2 and base.imag == 0 and inexact(base) < 0:
        return multiply(power(-base, exponent), Fraction((-1) ** exponent.numerator))
    return bounded(MP.chop(inexact(base) ** inexact(exponent), NOISE))


def small_whole(value) -> int:
    is_whole = are_exact(value) and value.denominator == 1
    need(is_whole and 0 <= value < 3000, "no factorial, and no binomial coefficient")
    return int(value)


def called(compute, *arguments):
    """Call a function of mpmath: a result that is only the error of the last digits becomes 0."""
    return bounded(MP.chop(compute(*map(inexact, arguments)), NOISE))


OPERATIONS = {  # kind of a node -> its function of one or two values
    "sum": add,
    "product": multiply,
    "negative": lambda value: -value,
    "inverse": lambda value: bounded(1 / value),
    "ratio": lambda left, right: multiply(left, 1 / right),
    "power": power,
    "root": lambda degree, radicand: power(radicand, 1 / degree),
    "absolute": lambda value: bounded(abs(value)),
    "factorial": lambda value: bounded(Fraction(factorial(small_whole(value)))),
    "binomial": lambda above, below: Fraction(comb(small_whole(above), small_whole(below))),
    **{name: partial(called, getattr(MP, name.replace("arc", "a"))) for name in FUNCTIONS},
    "log": partial(called, lambda value, base=10: MP.log(value, base)),
}
SLOW = (*FUNCTIONS, "power", "root")  # if the value is not exact


def equal(left, right) -> bool:
    """Compare rationals exactly, other numbers as far as our digits go."""
    if are_exact(left, right):
        return left == right
    return add(left, -right) == 0


# ---------------------------------------------------------------------- comparing

# kinds without a value of their own: compared piece by piece
STRUCTURES = {*PAIRS, "matrix", "row", "word", "list", "set", "union", "=", "≠", "<"}
STRUCTURES |= {"infinity", "minus infinity"}  # infinity - infinity is not 0


class Comparison:
    """Compare two trees. Each value is computed once, and the work is bounded."""

    def __init__(self):
        self.known = {}  # (id of a node, point) -> the node (it keeps the id alive), its value
        self.work = 0

    def pay(self, work: int) -> None:
        self.work += work
        need(self.work <= MAX_WORK, "too much work")

    def value(self, node: Node, point: str):
        """Return the value of an expression at a point: a Fraction if exact, else of mpmath."""
        key = (id(node), point)
        if key not in self.known:
            self.known[key] = node, self.computed(node, point)
        return self.known[key][1]

    def computed(self, node: Node, point: str):
        if node.kind == "number":
            return node.value
        if node.kind == "letter":
            return CONSTANTS.get(node.value) or unknown(node.value, point)
        if node.kind == "call" or (node.kind in ("factorial", "binomial") and has_unknowns(node)):
            arguments = [MP.nstr(inexact(self.value(item, point)), 30) for item in node.items]
            self.pay(80)
            return unknown(f"{node.kind} {node.value} {arguments}", point)
        values = [self.value(item, point) for item in node.items]
        if node.kind == "quantity":
            return values[0]
        if node.kind == "sum":
            values.sort(key=are_exact, reverse=True)  # 10^30 + pi - 10^30 is pi
        need(node.kind in OPERATIONS, "it has no value")
        operation = OPERATIONS[node.kind]
        if node.kind in ("sum", "product"):
            steps = itertools.accumulate(values, operation)
        else:
            steps = [operation(*values)]
        for value in steps:
            if are_exact(value):  # most is for the greatest common divisor
                bits = min(value.numerator.bit_length(), value.denominator.bit_length())
                self.pay(5 + 8 * (bits // 1000) ** 2 + bits_of(value) // 20)
            else:
                self.pay(300 if node.kind in SLOW else 15)
        return value

    def same(self, left: Node, right: Node) -> bool:
        """Return whether two trees have the same values, or pieces."""
        self.pay(20)
        if left.kind == "quantity":  # without its unit
            return self.same(left.items[0], right)
        if right.kind == "quantity":
            return self.same(left, right.items[0])
        kinds = {left.kind, right.kind}
        if kinds <= {"list", "set"} or kinds == {"union"}:
            return self.same_collection(left, right)
        if not kinds & STRUCTURES:
            return self.same_values(left, right)
        alike = left.kind == right.kind and left.value == right.value
        if not alike or len(left.items) != len(right.items):
            return False
        if all(map(self.same, left.items, right.items)):
            return True
        turned = right.items[::-1]  # 2x + 1 = y
        return left.kind in ("=", "≠") and all(map(self.same, left.items, turned))

    def same_values(self, left: Node, right: Node) -> bool:
        """Compare values at every point, or at one if there is no letter.

        Points where neither is real count if there are no others: sqrt(1/n) is 1/sqrt(n)."""
        points = POINTS if has_unknowns(left) or has_unknowns(right) else POINTS[:1]
        pairs = [(self.value(left, point), self.value(right, point)) for point in points]
        real = [pair for pair in pairs if not all(value.imag for value in pair)]
        return all(itertools.starmap(equal, real or pairs))

    def without_name(self, node: Node, other: Node) -> Node:
        """Return 5 for x = 5, z = 1 + 4 = 5 and 1 + 4 = 5, if the other side is no equation."""
        if node.kind != "=" or other.kind == "=" or any(map(is_named, other.items)):
            return node
        sides = node.items[1:] if is_name(node.items[0]) else node.items
        is_true = all(self.same(side, sides[-1]) for side in sides)  # 2 + 3 = 5 is 5
        return sides[-1] if is_true else node

    def same_collection(self, left: Node, right: Node) -> bool:
        """Return whether the items of both sides are equal, in any order."""
        has_conditions = any(item.kind in ("<", "≠") for item in left.items)
        if has_conditions and left.value != right.value and "or" in (left.value, right.value):
            return False
        are_as_many = len(left.items) == len(right.items)
        return are_as_many and in_any_order(left.items, right.items, self.same)


def units_of(node: Node) -> set[str]:
    found = {node.value} if node.kind == "quantity" else set()
    return found.union(*map(units_of, node.items))


def as_interval(node: Node, other: Node) -> Node:
    """Return (1, 2] for 1 < x <= 2 and (1, ∞) for x > 1, if the other side is an interval."""
    sides, signs = node.items, node.value
    if other.kind not in (*PAIRS, "union"):
        return node
    if node.kind == "list" and signs == "or" and all(side.kind == "<" for side in sides):
        return Node("union", tuple(as_interval(side, other) for side in sides))  # x < 1 or x > 2
    if node.kind != "<":
        return node
    if len(sides) == 2 and has_unknowns(sides[0]):  # x < 2
        sides, signs = (MINUS_INFINITY, *sides), ("<", *signs)
    elif len(sides) == 2:  # 1 < x
        sides, signs = (*sides, INFINITY), (*signs, "<")
    if len(sides) != 3 or sides[1].kind != "letter" or not has_unknowns(sides[1]):
        return node
    kind = {"<": "(", "≤": "["}[signs[0]] + {"<": ")", "≤": "]"}[signs[1]]
    return Node(kind, (sides[0], sides[2]))


# ---------------------------------------------------------------------- answers

BARE_NUMBER = re.compile(r"-?[1-9](?:[0-9]*|[0-9]{0,2}(?:,[0-9]{3})+)(?:\.[0-9]+)?")
PERCENT = re.compile(r"\s*(?:\\?%|percent|\\text\s*\{\s*(?:percent|\\?%)\s*\})\.?\Z")
# words by their look: a vowel, one capital or all
ORDINARY = re.compile(r"\b(?=\w*[aeiouyAEIOUY])(?:[A-Z]?[a-z]+|[A-Z]{3,})\b")


def same_answer(given: str, gold: str) -> bool:
    """Return whether two answers mean the same, as expressions if both can be read, else as text.

    Algebra is compared at POINTS, rationals exactly, other numbers to 230 digits. docs/verifiers.md
    lists the conventions about percent, order, names, units and so on."""
    given, gold = without_math_signs(given), without_math_signs(gold)
    if max(len(given), len(gold)) > MAX_EXPRESSION:
        return given == gold
    bare, bare_gold = PERCENT.sub("", given), PERCENT.sub("", gold)
    are_large = all(map(BARE_NUMBER.fullmatch, (bare, bare_gold)))  # 25% is 25. 0.7% is not 0.7
    return same_meaning(given, gold) or are_large and same_meaning(bare, bare_gold)


def without_math_signs(text: str) -> str:
    """Return 8\\% for $8\\%$, and 8 for **8** and for a wide ８. A lone $ is money."""
    text = re.sub("[！-～]+", lambda wide: unicodedata.normalize("NFKC", wide[0]), text)
    text = re.sub(r"\A\*\*([^*]+)\*\*\Z", r"\1", text)
    signs = re.findall(r"(?<!\\)\$", text)
    return re.sub(r"(?<!\\)\$", r"\\$" if len(signs) == 1 else "", text).strip()


def same_meaning(given: str, gold: str) -> bool:
    """Return whether two answers mean the same, whichever is the gold one."""
    if given == gold:
        return given not in ("", "nan")
    pair = f"{given} {gold}"
    if re.fullmatch("[a-z]{3,} [a-z]{3,}|[A-Z]{2,} [A-Z]{2,}", pair):  # abc and AC are words
        return False
    try:
        left, right = read(given), read(gold)
        if "word" in (left.kind, right.kind):  # \text{(C)} is C, as a word or as a letter
            are_names = not left.items + right.items
            return are_names and left.value == right.value or same_text(given, gold)
        units, other_units = units_of(left), units_of(right)
        if units and other_units and units != other_units:
            return False
        compare = Comparison()
        left, right = compare.without_name(left, right), compare.without_name(right, left)
        return compare.same(as_interval(left, right), as_interval(right, left))
    except (ArithmeticError, ValueError, TypeError, RecursionError):  # 1/0, no grammar, 1±1±1...
        return same_text(given, gold)


def same_text(given: str, gold: str) -> bool:
    """Compare texts up to boxes, white space around punctuation, and case in plain words."""
    words = []
    for text in (given, gold):
        text = SYMBOL.sub(our_symbol, TEXT_BOX.sub(r" \1 ", text.replace('"', " ")))
        is_plain = re.fullmatch(r"[a-zA-Z\s.,;:!?'()-]*", text)
        text = re.sub(r"_\{(\w+)\}", r"_\1", " ".join(text.split()))  # 204_{5}
        text = re.sub(r"\{(\w)\}", r" \1 ", text)  # \pmod{4} is \pmod 4
        text = re.sub(r" *([^\w ]) *", r"\1", text).rstrip(".")
        if is_plain:
            text = ORDINARY.sub(lambda found: found[0].lower(), text)
        words.append(text.split())
    return words[0] == words[1] and words[0] not in ([], ["nan"])
