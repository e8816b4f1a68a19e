"""Rule-based verifiers, and the rewards that are sums of them.

    python rewards.py FILE --reward math      # try a verifier on completions of known worth

A completion is adversarial input: it is never evaluated, and no text takes long. A verifier is
defined for every completion. A gold answer that it cannot use is an error before training. Read
`exact`, then `Reward`. `same_answer` compares mathematics, and its patterns can wait. This file
needs support/user.py alone, its command also support/data.py."""

import argparse
import ast
import cmath
import concurrent.futures
import copy
import functools
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
VERIFIERS: dict[str, Callable] = {}  # name in --reward -> function
EXTRAS = ("math_symbolic", "code", "judge:FOLDER")  # imported where they are named


def verifier(function: Callable) -> Callable:
    """Register `function(completion, answer)` for `--reward`, under its own name.

    For every completion it returns a number in [0, 1], or a list of (end in characters, reward) of
    steps, the outcome last. Further parameters receive the fields of the row that they name, and
    `tokens` the length. `need(...)` inside it refuses a gold answer, before training."""
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
    opened, content = [], default  # opened: starts of open boxes, None for other braces
    for brace in BRACES.finditer(text):
        if brace[1] or brace[2] == "{":
            opened.append(brace[1] and brace.end())
        elif brace[2] and opened and (start := opened.pop()):
            content = text[start : brace.start()]
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
        found = last_box(text, text.rpartition("####")[2].partition("\n")[0])
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


def think_format(completion: str, answer: object = None) -> bool:
    """1 for `<think>...</think><answer>...</answer>` and nothing else, opening tag optional."""
    text = completion.strip().removeprefix("<think>")
    match [part.strip() for part in re.split("(</?(?:think|answer)>)", text)]:
        case [thought, "</think>", "", "<answer>", said, "</answer>", ""]:
            return thought != "" and said != ""
    return False


think_format.shaping = True  # it moves the policy, and does not say whether an answer is right
VERIFIERS["format"] = think_format


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
        is_digit = re.fullmatch("[0-9]", value) is not None
        is_right = is_digit and step == f"{value}{operation}={exact_value(value + operation) % 10}"
        steps.append((end, float(is_right)))
        value = step[-1:]
    return [*steps, (len(completion), float(arithmetic(completion, answer)))]


@verifier
def countdown(completion: str, answer: dict) -> bool:
    """1 if an expression in + - * / ( ) takes each of `numbers` once and gives `target` exactly."""
    with expecting('expected {"numbers": [3, 5, 2], "target": 13}'):
        numbers, target = sorted(answer["numbers"]), answer["target"]
        are_whole = all(type(number) is int for number in [*numbers, target])
        need(are_whole and numbers and numbers[0] >= 0, "they are whole, and no number is below 0")

    text = our_signs(final_answer(completion).removesuffix("."))
    text = re.sub(rf"\A *{target} *=|= *{target} *\Z", "", text, count=1)  # 3*5-2 = 13
    try:
        is_right = exact_value(text) == target
    except UNREADABLE:  # 1/0, open brackets, other signs
        return False
    return is_right and sorted(map(int, re.findall("[0-9]+", text))) == numbers


def exact_value(text: str) -> Fraction:
    """Return the value of an expression in + - * / ( ) and whole numbers, or raise."""
    need(re.fullmatch(r"(?!.*\*\*)[-+*/() 0-9]{1,1000}", text), f"{text!r:.80} is no arithmetic")
    return value_of(ast.parse(text.strip(), mode="eval").body)  # parsed, never evaluated


# ---- rewards -------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """A completion, the problem that it answers, its reward, and the parts of that."""

    completion: str
    row: dict  # of the data, with "tokens", the completion's length
    reward: float  # the weighted sum, without the rewards of steps
    terms: dict[str, float]  # verifier -> its value, before the weight
    steps: list[tuple[int, float]]  # (end in characters, weighted reward) of all but the last step
    with_steps: dict[str, float]  # verifier -> its value plus its steps, weighted
    fault: str  # of the first verifier that raised or returned no number: it counts as 0


class Term(NamedTuple):
    """One verifier of a reward."""

    weight: float
    function: Callable
    signature: inspect.Signature

    def call(self, completion: str, row: dict) -> tuple[float, list[tuple[int, float]]]:
        """Return (outcome, steps before it). The function gets copies of the fields it names."""
        parameters = self.signature.parameters
        names = row.keys() & list(parameters)[2:]
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            names = row.keys() - {"completion", "answer"}
        fields = copy.deepcopy({name: row[name] for name in names})
        value = self.function(completion, copy.deepcopy(row["answer"]), **fields)
        with expecting(f"it returned {value!r:.80}; expected a number, or (end, number) of steps"):
            steps = value if isinstance(value, (list, tuple)) else [(0, value)]
            need(not any(isinstance(number, str) for _, number in steps), "a text is no number")
            numbers = [(int(end), float(number)) for end, number in steps]
            need(all(abs(number) <= 1e6 for _, number in numbers), "it is no number up to 1e6")
            *before, (_, outcome) = numbers
        return outcome, before


class Reward:
    """A weighted sum of verifiers."""

    def __init__(self, terms: dict[str, Term]):
        self.terms = terms
        self.reads_steps = True  # whether rewards of steps before the outcome count
        self.shaping = set()  # terms that do not say whether an answer is right
        for name, term in terms.items():
            if term.weight < 0 or getattr(term.function, "shaping", False):
                self.shaping.add(name)
        self.shaping_at_first = frozenset(self.shaping)

    def verify(self, completions: list[str], rows: list[dict]) -> list[Verdict]:
        """Verify completions, each with its row of the data ("prompt", "answer", ...)."""
        for term in self.terms.values():
            if hasattr(term.function, "read"):
                term.function.read(completions, rows)
        if any(hasattr(term.function, "threads") for term in self.terms.values()):
            # torchrun: how many processes of this run share the machine's cores
            workers = max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                return list(pool.map(self.verify_one, completions, rows))
        return list(map(self.verify_one, completions, rows))

    def verify_one(self, completion: str, row: dict) -> Verdict:
        terms, steps, with_steps, fault = {}, [], {}, ""
        for name, term in self.terms.items():
            try:
                value, parts = term.call(completion, row)
            except (Exception, SystemExit) as error:  # a user's function may do anything
                fault = fault or f"{name}: {raised(error)} on {completion!r:.80}"
                value, parts = 0.0, []
            terms[name] = value
            weighted = [(end, term.weight * part) for end, part in parts if self.reads_steps]
            steps += weighted
            with_steps[name] = term.weight * value + sum(part for _, part in weighted)
        reward = sum(self.terms[name].weight * value for name, value in terms.items())
        return Verdict(completion, row, reward, terms, steps, with_steps, fault)

    def note_shaping(self, verdicts: list[Verdict]) -> None:
        """Take each term that gave a value below 0 or above 1 for shaping, from now on."""
        for each in verdicts:
            self.shaping |= {name for name, value in each.terms.items() if not 0 <= value <= 1}

    def without_shaping(self, verdicts: list[Verdict]) -> tuple[list[float], list[float] | None]:
        """Return (reward, correctness in [0, 1]) of each completion, by the terms that are not
        shaping. If all are, return (whole reward, None)."""
        counting = [name for name in self.terms if name not in self.shaping]
        earned = [sum(one.with_steps[name] for name in counting or self.terms) for one in verdicts]
        if not counting:
            return earned, None
        weights = {name: self.terms[name].weight for name in counting}
        right = [sum(weights[name] * each.terms[name] for name in counting) for each in verdicts]
        return earned, [value / sum(weights.values()) for value in right]

    def lenient_twin(self) -> "Reward | None":
        """Return this sum with `math_lenient` instead of `math`. None without `math`."""
        term = self.terms.get("math")
        if not term or term.function is not math:
            return None
        twin = Reward(self.terms | {"math": term._replace(function=math_lenient)})
        twin.shaping |= self.shaping  # some terms became shaping during the run
        return twin

    def check_answer(self, answer: object) -> None:
        """Raise UserError if a verifier of ours cannot use a gold answer."""
        for name, term in self.terms.items():
            if term.function is VERIFIERS.get(name):
                with expecting(f"field answer: {str(answer)[:80]!r} cannot be used by {name}"):
                    term.function("<answer>A</answer>", answer)

    def check(self, rows: list[dict]) -> None:
        """Try users' functions on the first row. Raise UserError if one never gives a reward."""
        row = {**rows[0], "tokens": 1}  # train.py adds the number of tokens of the completion
        texts = ["", str(row["answer"]), "so <answer>1</answer> \\boxed{1}"]
        for name, term in self.terms.items():
            if term.function is VERIFIERS.get(name):
                continue
            expected = f"def f(completion, answer) and fields by name: {', '.join(row)}"
            with expecting(f"--reward {name}{term.signature}: expected {expected}"):
                need([*term.signature.parameters][:1] != ["answer"], "the completion comes first")
                faults = [Reward({name: term}).verify_one(text, row).fault for text in texts]
                need(not all(faults), faults[0])


def parse_reward(spec: str, device: str = "cpu") -> Reward:
    """Read `--reward`, a sum of `[weight*]verifier`. `device` is for `judge:FOLDER_OR_NAME`."""
    terms = {}
    for part in spec.split("+"):
        weight, _, place = (text.strip() for text in part.rpartition("*"))
        name, function = place.rpartition(":")[2], None
        if place.startswith("judge:"):
            from support.extras.judge import Judge

            name, function = "judge", Judge(place.removeprefix("judge:"), device)
        elif place == "math_symbolic":
            from support.extras import answers  # noqa: F401 - it registers its verifier
        elif place == "code":
            from support.extras import programs  # noqa: F401
        known = [*VERIFIERS, *EXTRAS]
        with expecting(f"--reward {spec}: expected a sum of [weight*]file.py:function or {known}"):
            need(name not in terms, "a name stands there twice")
            function = function or (function_of(place) if ":" in place else VERIFIERS.get(place))
            need(function, f"rewards.py has no verifier {place!r}{did_you_mean(place, known)}")
            terms[name] = Term(float(weight or 1), function, inspect.signature(function))
            need(0 < abs(terms[name].weight) <= 1e6, "a weight is not 0 and at most 1e6")
        if hasattr(function, "prepare"):
            function.prepare()
    return Reward(terms)


# ---- mathematics ---------------------------------------------------------------------------------


@verifier
def math(completion: str, answer: str | int | float) -> bool:
    """1 if the marked answer is the gold one: as numbers, algebra, points, sets, lists, or text."""
    return same_answer(final_answer(completion, marked=True), gold_answer(answer))


def same_answer(given: str, gold: str) -> bool:
    """Compare two answers, as text if one is no mathematics. 25% is 1/4 and 25; 0.7% is not 0.7."""
    if max(len(given), len(gold)) > MAX_EXPRESSION:
        return given == gold
    given, gold = in_our_signs(given), in_our_signs(gold)
    bare, bare_gold = given.removesuffix("%").strip(), gold.removesuffix("%").strip()
    is_percentage = (bare, bare_gold) != (given, gold) and re.match("-?[1-9][0-9.]*$", bare)
    try:
        is_same = in_any_order(parts_of(given), parts_of(gold), same)
    except UNREADABLE:
        texts = [re.sub(r'"|\((\w+)\)|(?<!\d) | (?!\d)', r"\1", text) for text in (given, gold)]
        is_same = texts[0] == texts[1] != ""
    return is_same or bool(is_percentage) and same_answer(bare, bare_gold)


def table(rows: str) -> dict[str, str]:
    """Return {"\\\\times": "*", "×": "*", ...} of the row `*←\\\\times,×`."""
    pairs = [row.split("←") for row in rows.split()]
    return {other: ours for ours, others in pairs for other in others.split(",")}


UNREADABLE = (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError)  # `need`, too
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
    r"(?<![\w.^}])([0-9]+) ?\\frac ?\{([0-9]+)\} ?\{([0-9]+)\}": r"(\1+\2/\3)",  # 3\frac12
    r"(?<![\w.^}])([0-9]+) ([0-9]+) ?/ ?([0-9]+)": r"(\1+\2/\3)",  # 3 1/2
    r"\\?sqrt ?\[(\w+)\]": r" root{\1}",
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
    | (?P<call> (?: sqrt | root | frac ) [ ]? \( )
    | (?P<words> {UNIT} (?: [ ]* {UNIT} | [ ]?/[ ]?[a-zA-Z]+ )*+ (?: [ ]? \^ \(? [23] \)? )? )
    | (?P<letter> (?: [fghFGHNPT][ ]?\(\w+\) | \\ (?:{GREEK}) (?![a-zA-Z]) | pi
        | (?! [fghFGHNPT][ ]?\( ) [a-zA-Z] ) (?: _\(?\w\)? )? )
    | (?P<sign> \*\* | [<>!]= | [-+*/^(),=<>[\]{{}}|%] )
    | \S
    """,
    re.VERBOSE,
)
NO_UNIT = re.compile(  # words that change a value
    r"(?i)hal(?:f|ves)|third|quarter|(?:[0-9]|fif|six|eigh|ten)th|dozen|hundred|thousand"
    r"|[bmtr]illion|squared|cubed|factorial|\b(?:below|not?|is|sqrt|root|frac)\b"
)
IN_PYTHON = {"^": "**", "=": "==", "%": "/100", "[": "('[',", "]": ",']')"}


def python_of(text: str, token: re.Pattern = TOKEN) -> str:
    """Return an answer as Python: `(2) * x_ @ 'cm'` for 2x cm, `('[', (1), (2), ']')` for [1,2]."""
    code, last = "", ""
    for found in token.finditer(text):
        kind, piece = found.lastgroup, found[0]
        follows = last in ("number", "letter", "words", ")", "]", "}", "%")  # a value
        need(kind and not (follows and kind == "number"), f"{piece} is no mathematics")
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


def parts_of(text: str) -> list[ast.expr]:
    """Return the items of an answer that is a list: one item or more."""
    match ast.parse(f"_({python_of(text)})", mode="eval").body:
        case ast.Call(ast.Name("_"), [_, *_] as items, []):
            return items
    raise ValueError("it is empty, or its brackets do not match")


def same(given: ast.expr, gold: ast.expr) -> bool:
    """Compare two parts of answers. A name or a unit may be missing on one side."""
    match given, gold:
        case ast.Compare(left, signs, sides), ast.Compare(other, other_signs, other_sides):
            kinds, other_kinds = list(map(type, signs)), list(map(type, other_signs))
            return kinds == other_kinds and all(map(same, [left, *sides], [other, *other_sides]))
        case ast.Compare(ast.Name() | ast.Tuple() | ast.Constant(str()), [ast.Eq()], [value]), _:
            return same(value, gold)
        case _, ast.Compare():
            return same(gold, given)
        case ast.BinOp(value, ast.MatMult(), unit), ast.BinOp(other, ast.MatMult(), other_unit):
            return same(value, other) and same(unit, other_unit)
        case ast.BinOp(value, ast.MatMult()), _:
            return same(value, gold)
        case _, ast.BinOp(value, ast.MatMult()):
            return same(given, value)
        case ast.BinOp(left, ast.BitOr(), right), ast.BinOp(other, ast.BitOr(), other_right):
            return in_any_order([left, right], [other, other_right], same)
        case ast.Set(parts), ast.Set(others):
            return in_any_order(parts, others, same)
        case ast.Tuple(parts), ast.Tuple(others):
            return len(parts) == len(others) and all(map(same, parts, others))
        case ast.Constant(str(words)), ast.Constant(str(others)):
            return words == others
    return all(near(value_of(given, point), value_of(gold, point)) for point in (-1, 0, 1))


def in_any_order(parts: Sequence, others: Sequence, same: Callable) -> bool:
    """Return whether each part is the same as one of the others, and all are used once."""
    others = list(others)
    for part in parts:
        found = next((other for other in others if same(part, other)), None)
        if found is None:
            return False
        others.remove(found)
    return not others


def near(left: Fraction | complex, right: Fraction | complex) -> bool:
    """Compare rationals exactly, other numbers to 12 digits."""
    are_exact = isinstance(left, Fraction) and isinstance(right, Fraction)
    return left == right or not are_exact and abs(left - right) < 1e-12 * abs(left)


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
OPERATORS = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Pow: power, ast.Add: operator.add}
OPERATORS |= {ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@functools.lru_cache(10_000)  # by node: each part of a list is compared with many
def value_of(node: ast.expr, point: int = 0) -> Fraction | complex:
    """Return the value of an expression. Its letters lie between point and point + 1."""
    match node:
        case ast.Constant(int(number)):
            return Fraction(number)
        case ast.Name(letter):
            share = random.Random(f"{letter} {point}").randint(1, 10**6)
            return CONSTANTS.get(letter, point + Fraction(share, 10**6 + 3))
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
    raise ValueError(f"{ast.dump(node):.80} is no arithmetic")


# an answer among words: the patterns of `math_lenient` and `choice`
DENIAL = (  # words behind an answer that take it back. "Not given" may be the answer
    r"(?i:\b(?:(?:can)?not(?!\ (?:given|enough|be\ d))|never\ \w+|wrong|incorrect|eliminated|ruled"
    r"|is\ false)\b|n['’]t\b|\?\W{0,9}no\b|[≠¬✗❌👎]|~~)"
)
BEFORE = r"""(?: \A | \n | (?<![<>!])= | [-=]> | → | [:.,;!?"][ ] | (?<![0-9])[:.,"] | \#[ ]
    | (?: 's | \b a ) [ ] | (?<!\\) \b
      (?! (?: minus | negative | plus | or | not | mod | log | by | twice ) [ ] )
      (?<! half[ ] ) (?<! root[ ] ) (?<! power[ ] ) [a-zA-Z]{2,}+ [ ] ) [ ]{0,3} \(?"""
VALUE = r"""(?: (?<!\n) - [ ]? | - )? (?: [0-9]* \\frac \{[0-9]+\} \{[0-9]+\}
    | (?:[0-9]+[ ])? [0-9]+ [ ]?/[ ]? [0-9]+ | [0-9][0-9,]*(\.[0-9]+)?(e-?[0-9]+)? | \.[0-9]+ )"""
PART = r"[+*/^_<>\\{×·÷≤≥≠±√] | :[0-9] | -[ ]?+(?![a-zA-Z]{2}) | [nxyz]{1,2}\b"  # of an expression
LAST_NUMBER = re.compile(  # behind a word or a sign, no part of an expression, not taken back
    rf"""{BEFORE} (?P<number> (?>{VALUE}) [a-zA-Z²]*+ (?: [ ]?% )?+ (?! [ ]?+ (?: {PART} ) )
      (?! \W* (?: which[ ] )? (?: is[ ](?!false) | \w+(?=n['’]t) )? {DENIAL} )
      (?: (?<!%) [ ]++ [a-zA-Z]{{3,}}+ )?+ )  # 5 million
    [^0-9]* \Z""",
    re.VERBOSE,
)


@verifier
def math_lenient(completion: str, answer: str | int | float) -> bool:
    """As `math`. If nothing is marked, the last number is the answer, if it stands alone."""
    gold, text = gold_answer(answer), after_thinking(completion)
    if re.search(r"<answer>|\\boxed|####", text):
        return math(completion, answer)
    text = our_signs(text[-MAX_TEXT:]).replace(r"\text{", " ")
    text = re.sub(r"\\[,;!]|\*\*|`|(?<=[0-9])/[a-z]{3,}", "", text)
    found = LAST_NUMBER.search(text)
    return found is not None and same_answer(found["number"], gold)


OTHER_LETTER = r"(?: (?<! \w\( ) \b [a-j]\) | (?-i: \b (?! [AI][ ](?!is\b)[a-z] ) [A-Z] \b ) )"
MARKS = r"(?:[^\w≠¬~❌+]|_)*+"
CHOICE = re.compile(  # a letter behind nothing but some words, and no other letter behind it
    rf"""{MARKS} (?: (?: the | final | correct | best | answer | option | choice | is
      | (?: text | math ) (?: bf | rm )? ) \b {MARKS} )*+ (?P<letter> [a-z] ) (?! \# )
    (?: {MARKS} | [*_}}\]]*+ (?: [).:] | [ ][-–][ ] ) (?! .* {DENIAL} | .* {OTHER_LETTER} ) .* )""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


@verifier
def choice(completion: str, answer: str) -> bool:
    """1 if the answer commits to the gold letter and names no other: `B`, `(B)`, `B. Paris`."""
    gold = CHOICE.fullmatch(gold_answer(answer))
    need(gold, "it names no letter")
    given = CHOICE.fullmatch(final_answer(completion))
    return given is not None and given["letter"].upper() == gold["letter"].upper()


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

    verdicts = reward.verify([row["completion"] for row in rows], rows)
    mean = sum(each.reward for each in verdicts) / len(rows)
    print(f"reward {mean:.4f} of {len(rows)}; those of less than 1:")
    for number, (row, each) in enumerate(zip(rows, verdicts), 1):
        if each.reward < 1:
            completion = row["completion"][-160:]
            print(f"row {number}: {row['answer']!r:.80} from {completion!r} {each.fault}")


if __name__ == "__main__":
    from rewards import main  # not the copy called __main__: extras register with `rewards`

    main()
