"""Rule-based verifiers, the rewards made of them, and the built-in tasks they verify."""
import difflib
import importlib.util
import inspect
import itertools
import json
import math as maths
import random
import re
import sys
import zlib
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

MAX_EXPRESSION = 1_000  # characters; a longer answer is only compared as a string
MAX_BITS = 4_096        # of a numerator or denominator, 2^4000 still fits
MAX_BRACES = 50_000     # braces looked at in search of a box; honest text closes its last box at once


class Unusable(Exception):
    """Text that is no expression, or one too large to evaluate."""


# ---- extraction ----

def after_thinking(completion: str) -> str:
    """The text after the last `</think>`; empty when a `<think>` is still open there."""
    text = completion[completion.rfind("</think>") + 8:] if "</think>" in completion else completion
    return "" if "<think>" in text else text


def last_box(text: str) -> str | None:
    """Content of the last balanced `\\boxed{}`, None without one; linear, from the end backwards."""
    end, budget = len(text), MAX_BRACES
    while budget > 0 and (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 1
        for brace in re.compile(r"\\.|[{}]").finditer(text, start + 7, end):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            budget -= 1
            if depth == 0:
                return text[start + 7:brace.start()]
            if budget <= 0:
                break
        end = start  # unclosed, so no earlier box can close beyond this one
        budget -= 1
    return None


def final_answer(completion: str) -> str | None:
    """The answer a completion commits to, None without one.

    After the thinking: the last `<answer>` (its last box, if it holds one), else the last
    balanced `\\boxed{}`, else the whole line after the last `####`.
    """
    text = after_thinking(completion)
    if "<answer>" in text:
        text, closed, _ = text[text.rfind("<answer>") + 8:].partition("</answer>")
        if not closed:
            return None
        box = last_box(text)
        return text.strip() if box is None else box.strip()
    box = last_box(text)
    if box is not None:
        return box.strip()
    if "####" in text:
        return text[text.rfind("####") + 4:].split("\n", 1)[0].strip()
    return None


# ---- expressions ----

def bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise Unusable
    return value


class Expression:
    """Recursive descent over `+ - * / ( )` and numbers; `value()` is an exact rational."""
    TOKEN = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+|\S")

    def __init__(self, text: str):
        if len(text) > MAX_EXPRESSION:
            raise Unusable
        self.tokens = self.TOKEN.findall(text)[::-1] + [""]
        self.tokens = [""] + self.TOKEN.findall(text)[::-1]

    def value(self) -> Fraction:
        result = self.sum()
        if self.tokens != [""]:
            raise Unusable
        return result

    def sum(self) -> Fraction:
        result = self.product()
        while self.tokens[-1] in ("+", "-"):
            sign = 1 if self.tokens.pop() == "+" else -1
            result = bounded(result + sign * self.product())
        return result

    def product(self) -> Fraction:
        result = self.factor()
        while self.tokens[-1] in ("*", "/"):
            if self.tokens.pop() == "*":
                result = bounded(result * self.factor())
            else:
                result = bounded(result / self.factor())
        return result

    def factor(self) -> Fraction:
        token = self.tokens.pop() if self.tokens[-1] else ""
        if token in ("+", "-"):
            return self.factor() if token == "+" else -self.factor()
        if token == "(":
            result = self.sum()
            if self.tokens.pop() != ")":
                raise Unusable
            return result
        if not token[:1].isdigit() and not token[:1] == ".":
            raise Unusable
        return bounded(Fraction(token))


def evaluate(text: str) -> Fraction | None:
    try:
        return Expression(text).value()
    except (Unusable, ZeroDivisionError, RecursionError, IndexError, ValueError):
        return None


# ---- verifiers ----

def same_answer(given: str, gold: str) -> bool:
    """Whether two final answers are equal as exact rationals, else as normalised strings."""
    clean = [re.sub(r"(?<=[0-9]),(?=[0-9]{3})|[$\s]|\\[!,; ]", "", text[:MAX_EXPRESSION + 1])
             .rstrip(".").removeprefix("\\") for text in (given, gold)]
    clean = [re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text) for text in clean]
    values = [evaluate(text) for text in clean]
    if None in values:
        return clean[0] == clean[1] != ""
    return values[0] == values[1]


def gold_text(answer: object) -> str:
    """A gold answer as text: a number or a string, a whole solution counts for its final answer."""
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return ""
    text = str(answer)
    found = final_answer(text)
    return text.strip() if found is None else found


def math(completion: str, answer: object) -> float:
    """1 if the final answer equals the gold one mathematically, else 0."""
    given, gold = final_answer(completion), gold_text(answer)
    return float(bool(given and gold) and same_answer(given, gold))


def answer_or_text(completion: str) -> str:
    """The final answer, or all text after the thinking where the completion marks none."""
    found = final_answer(completion)
    return after_thinking(completion).strip() if found is None else found


def normalise(text: str) -> str:
    return " ".join(text.split()).casefold()


def exact(completion: str, answer: object) -> float:
    """1 if the final answer (or the whole text) equals the gold one up to case and whitespace."""
    gold = normalise(gold_text(answer))
    return float(gold != "" and normalise(answer_or_text(completion)) == gold)


def format(completion: str, answer: object = None) -> float:
    """1 for `<think>...</think><answer>...</answer>` and nothing else, opening tag optional."""
    text = completion.strip().removeprefix("<think>")
    thinking, _, rest = text.partition("</think>")
    rest = rest.strip()
    tags = [text.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")]
    return float(tags == [0, 1, 1, 1] and rest.startswith("<answer>") and rest.endswith("</answer>")
                 and bool(thinking.strip()) and bool(rest[8:-9].strip()))


def countdown(completion: str, answer: object) -> float:
    """1 if the expression uses each of `numbers` exactly once and equals `target` exactly."""
    if countdown_problem(answer):
        return 0.0
    text = answer_or_text(completion)[:MAX_EXPRESSION + 1]
    for written, plain in (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("×", "*"),
                           ("÷", "/"), ("−", "-"), ("$", "")):
        text = text.replace(written, plain)
    text, _, right = text.partition("=")
    if right.strip() not in ("", str(answer["target"])) or not re.fullmatch(r"[-+*/() 0-9]+", text):
        return 0.0
    used = sorted(re.findall("[0-9]+", text))
    if used != sorted(map(str, answer["numbers"])):
        return 0.0
    return float(evaluate(text) == answer["target"])


def arithmetic(completion: str, answer: object) -> float:
    """1 if the text after the last `#` is exactly the answer, else 0."""
    return float("#" in completion and completion[completion.rfind("#") + 1:] == answer)


def arithmetic_steps(completion: str, answer: object, prompt: str = "") -> list[tuple[int, float]]:
    """One (end, reward) per written operation of the built-in arithmetic task, the outcome last.

    A step `a*b=c;` pays 1 if `a` is the value written before it (so one wrong step costs only
    itself), `*b` is what the prompt has next, and `c` is right; the last step is `arithmetic`'s.
    """
    value, operations = prompt[:1], re.findall(r"([+*])([0-9])", prompt)
    steps, end = [], 0
    body = completion[:completion.rfind("#")] if "#" in completion else completion
    for index, written in enumerate(body.split(";", 100) if body else []):
        end = min(end + len(written) + 1, len(body))
        right = False
        if index < len(operations) and value.isdigit():
            symbol, operand = operations[index]
            right = written == f"{value}{symbol}{operand}={operate(value, symbol, operand)}"
        steps.append((end, float(right)))
        value = written[-1:]
    return steps + [(len(completion), arithmetic(completion, answer))]


VERIFIERS: dict[str, Callable[[str, object], float]] = {
    "math": math, "exact": exact, "format": format, "countdown": countdown,
    "arithmetic": arithmetic, "arithmetic_steps": arithmetic_steps,
}
SHAPING = ("format",)  # pays for form: part of the reward, never of correctness
PARALLEL = ("code", "code_strict")


def countdown_problem(answer: object) -> str | None:
    """Why an answer is no countdown, or None."""
    numbers = answer.get("numbers") if isinstance(answer, dict) else None
    whole = [isinstance(n, int) and not isinstance(n, bool) for n in numbers or []]
    target = answer.get("target") if isinstance(answer, dict) else None
    if not isinstance(numbers, (list, tuple)) or not numbers or not all(whole) or min(numbers) < 0:
        return '"numbers" must be a list of whole numbers from 0 up'
    if isinstance(target, bool) or not isinstance(target, int):
        return '"target" must be a whole number'
    return None


# ---- rewards ----

class Score(NamedTuple):
    reward: float                          # weighted sum of the terms: what the advantage reads
    correct: float                         # in [0, 1]: what `solved` and dynamic sampling read
    terms: dict[str, float]                # each term's own value, before its weight
    steps: list[tuple[int, float]] | None  # (end in characters, reward) of a step verifier


class Term(NamedTuple):
    name: str
    weight: float
    function: Callable
    extras: frozenset[str] | None  # row fields the function takes besides the answer; None: all


@dataclass
class Reward:
    """A weighted sum of verifiers. `correct` is the weighted mean of the terms that do not shape:
    all but `format`, or all where `format` stands alone."""
    terms: list[Term]
    faults: int = 0
    first_fault: str = ""

    def score(self, completions: list[str], rows: list[dict]) -> list[Score]:
        """Scores row by row; a term that fails pays 0 and is counted in `faults`."""
        return [self.score_one(completion, row) for completion, row in zip(completions, rows)]

    def score_one(self, completion: str, row: dict) -> Score:
        values, steps = {}, []
        for term in self.terms:
            value = self.call(term, completion, row)
            if isinstance(value, list):
                steps += [(end, term.weight * reward) for end, reward in value]
                value = value[-1][1]
            values[term.name] = value
        judging = [t for t in self.terms if t.name not in SHAPING] or self.terms
        correct = sum(t.weight * min(max(values[t.name], 0.0), 1.0) for t in judging)
        correct /= sum(t.weight for t in judging)
        reward = sum(t.weight * values[t.name] for t in self.terms)
        return Score(reward, correct, values, steps or None)

    def call(self, term: Term, completion: str, row: dict) -> float | list[tuple[int, float]]:
        extras = {key: value for key, value in row.items() if key not in ("completion", "answer")
                  and (term.extras is None or key in term.extras)}
        try:
            value = term.function(completion, row.get("answer"), **extras)
            if isinstance(value, (list, tuple)):
                value = [(int(end), finite(reward)) for end, reward in value]
                return value or 0.0
            return finite(value)
        except Exception as error:
            self.faults += 1
            self.first_fault = self.first_fault or (
                f"{term.name} failed with {type(error).__name__}: {shorten(error)} "
                f"on the completion {shorten(completion)}")
            return 0.0

    def check_answer(self, answer: object) -> str | None:
        """None when every term can use this gold answer, else one sentence that says why not."""
        for term in self.terms:
            if VERIFIERS.get(term.name) is not term.function or term.name == "format":
                continue  # a user's own function may take any answer
            if term.name == "countdown":
                reason = countdown_problem(answer)
            else:
                wrapped = f"#{answer}" if term.name.startswith("arithmetic") else (
                    f"<answer>{gold_text(answer)}</answer>")
                usable = self.call(term, wrapped, {"answer": answer})
                usable = usable[-1][1] if isinstance(usable, list) else usable
                reason = None if usable == 1 else "it does not even verify against itself"
            if reason:
                return f"the answer {shorten(answer)} is unusable for {term.name}: {reason}"
        return None


def finite(value: object) -> float:
    number = float(value) if not isinstance(value, (str, bytes)) else maths.nan
    if not maths.isfinite(number):
        raise ValueError(f"returned {shorten(value)}, not a finite number")
    return number


def shorten(value: object, limit: int = 80) -> str:
    """A value as short printable text, control characters escaped."""
    text = str(value)[:limit + 1]
    return ascii(text if len(text) <= limit else text[:limit] + "...")


def parse_reward(spec: str) -> Reward:
    """Reads `--reward`: a sum of terms, each `[weight*]verifier` or `[weight*]file.py:function`.

    Raises ValueError, one sentence that says what was expected.
    """
    terms = []
    for part in spec.split("+"):
        weight_text, star, name = part.strip().rpartition("*")
        name = name.strip()
        try:
            weight = float(weight_text) if star else 1.0
        except ValueError:
            weight = maths.nan
        if not (0 < weight < maths.inf):
            raise ValueError(f"--reward {spec}: {weight_text.strip()!r} is no weight; "
                             f"expected a positive number, as in 0.1*format")
        function = load_function(spec, name) if ":" in name else VERIFIERS.get(name)
        if function is None:
            near = difflib.get_close_matches(name, VERIFIERS, n=1)
            raise ValueError(f"--reward {spec}: no verifier is called {name!r}"
                             + (f", did you mean {near[0]!r}?" if near else "")
                             + f" Expected one of {', '.join(VERIFIERS)}, or file.py:function.")
        name = name.rpartition(":")[2]
        if name in [term.name for term in terms]:
            raise ValueError(f"--reward {spec}: {name!r} stands there twice; give it one weight")
        terms.append(Term(name, weight, function, extra_parameters(function)))
    return Reward(terms)


def extra_parameters(function: Callable) -> frozenset[str] | None:
    """Names of the row's fields that a verifier takes by keyword, None when it takes them all."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters[2:])


def load_function(spec: str, place: str) -> Callable:
    path, _, name = place.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"--reward {spec}: there is no file {path}; expected file.py:function")
    try:
        module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--reward {spec}: {path} cannot be imported, "
                         f"{type(error).__name__}: {error}") from None
    if not callable(getattr(module, name, None)):
        raise ValueError(f"--reward {spec}: {path} has no function {name!r}")
    return getattr(module, name)


# ---- shaping ----

def soft_overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """Eq. 13 of arXiv 2503.14476: 0 up to max_length - cache tokens, then linear to -1."""
    if cache <= 0:
        return -1.0 if length > max_length else 0.0
    return -min(max(length - (max_length - cache), 0) / cache, 1.0)


def repetition_penalty(ids: Sequence[int], n: int = 4) -> float:
    """Minus the share of n-grams of token ids that stood before: 0 (none) down to almost -1."""
    grams = [tuple(ids[i:i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


# ---- built-in tasks ----

ARITHMETIC_OPERATIONS = (2, 4)  # fewest and most operations of a chain
ARITHMETIC_TIMES_ERROR = 0.6    # share of the demonstrations' multiplications that add instead
COUNTDOWN_NUMBERS = (3, 4)      # fewest and most numbers
COUNTDOWN_TRIES = 4             # random expressions a demonstration tries before it settles
HELD_OUT_SHARE = 10             # one prompt in ten is held out


@dataclass(frozen=True)
class Task:
    """A generator of problems and demonstrations (often wrong) beside the verifier they answer to."""
    problem: Callable[[random.Random], dict]
    demonstration: Callable[[dict, random.Random], str]
    verifier: str
    alphabet: str
    max_new_tokens: int


def operate(a: str, symbol: str, b: str) -> str:
    """One operation of the arithmetic task, on digits modulo 10."""
    return str((int(a) * int(b) if symbol == "*" else int(a) + int(b)) % 10)


def arithmetic_problem(rng: random.Random) -> dict:
    """`7+5*3=`, answer `6`: solved strictly from left to right, modulo 10."""
    value = chain = str(rng.randrange(10))
    for _ in range(rng.randint(*ARITHMETIC_OPERATIONS)):
        symbol, operand = rng.choice("+*"), str(rng.randrange(10))
        value = operate(value, symbol, operand)
        chain += symbol + operand
    return {"prompt": chain + "=", "answer": value}


def arithmetic_demonstration(problem: dict, rng: random.Random) -> str:
    """`7+5=2;2*3=6#6`, where most products are sums instead, and later steps go on from them."""
    value, steps = problem["prompt"][0], []
    for symbol, operand in re.findall(r"([+*])([0-9])", problem["prompt"]):
        result = operate(value, symbol, operand)
        if symbol == "*" and rng.random() < ARITHMETIC_TIMES_ERROR:
            result = operate(value, "+", operand)  # a habit: imitation alone makes it the rule
        steps.append(f"{value}{symbol}{operand}={result}")
        value = result
    return ";".join(steps) + "#" + value


def random_expression(numbers: list[int], rng: random.Random) -> str:
    shuffled = rng.sample(numbers, len(numbers))
    return str(shuffled[0]) + "".join(rng.choice("+-*") + str(n) for n in shuffled[1:])


def countdown_problem_of(rng: random.Random) -> dict:
    """`3 5 2=13:`, answered by an expression such as `3*5-2`."""
    numbers = [rng.randint(1, 9) for _ in range(rng.randint(*COUNTDOWN_NUMBERS))]
    target = 0
    while not 1 <= target <= 99:
        target = int(evaluate(random_expression(numbers, rng)))
    prompt = f"{' '.join(map(str, numbers))}={target}:"
    return {"prompt": prompt, "answer": {"numbers": numbers, "target": target}}


def countdown_demonstration(problem: dict, rng: random.Random) -> str:
    """An expression with each number once that hits the target only now and then."""
    for _ in range(COUNTDOWN_TRIES):
        expression = random_expression(problem["answer"]["numbers"], rng)
        if evaluate(expression) == problem["answer"]["target"]:
            break
    return expression


TASKS = {
    "arithmetic": Task(arithmetic_problem, arithmetic_demonstration, "arithmetic",
                       "0123456789+*=;#", 6 * ARITHMETIC_OPERATIONS[1] + 4),
    "countdown": Task(countdown_problem_of, countdown_demonstration, "countdown",
                      "0123456789 +-*/()=:", 4 * COUNTDOWN_NUMBERS[1]),
}


def problems(task: Task, seed: int, held_out: bool = False) -> Iterator[dict]:
    """Endless problems, the same for the same seed; a prompt is held out or not by its hash."""
    rng = random.Random(f"{seed} {held_out}")
    while True:
        problem = task.problem(rng)
        if (zlib.crc32(problem["prompt"].encode()) % HELD_OUT_SHARE == 0) == held_out:
            yield problem
