"""Rule-based verifiers, and the rewards that are made of them.

    python rewards.py FILE --reward math      # what it says of completions of known worth

A completion is adversarial input: nothing in it is evaluated, whatever it holds costs little time,
and what a verifier cannot judge earns nothing. A gold answer that cannot be used is a mistake of
the user's, and is said before training."""

import argparse
import collections
import concurrent.futures
import functools
import inspect
import os
import re
import runpy
import sys
import traceback
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from support.data import UserError, did_you_mean, expecting, need, read_rows, reason
from support.flags import extra
from support.tasks import arithmetic, arithmetic_steps, exact_value

MAX_TEXT = 10_000  # characters of an answer
LARGEST_REWARD = 1e6

# ---- the registry --------------------------------------------------------------------------------

VERIFIERS: dict[str, Callable] = {}  # what --reward knows by name
EXTRAS = {  # files in support/ without which a verifier of ours is none
    "math": ["answers"],
    "math_lenient": ["answers"],
    "code": ["sandbox", "programs"],  # the second imports the first
    "code_strict": ["sandbox", "programs"],
    "judge": ["judge"],
}


def verifier(function: Callable) -> Callable:
    """Registers `function(completion, answer)` for `--reward`, under its own name.

    It returns a number in [0, 1], or a list of (end in characters, reward) of steps, the outcome
    last. A parameter beyond the two takes that field of the row, or `tokens`, how many the
    completion has. `need(...)` inside it says which gold answers it cannot use: data is checked
    before training, and a completion earns nothing."""

    @functools.wraps(function)
    def guarded(*arguments, **fields):
        try:
            value = function(*arguments, **fields)
            return value if isinstance(value, list) else float(value)
        except Exception:  # what a verifier cannot judge earns nothing
            return 0.0

    VERIFIERS[function.__name__] = guarded
    return function  # as it is: called by its name in this file it still raises


# ---- finding the answer --------------------------------------------------------------------------


def after_thinking(completion: str) -> str:
    """Text after the last `</think>`; none where a `<think>` is still open."""
    text = completion.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def last_box(text: str, default: str) -> str:
    """Content of the last balanced `\\boxed{}` of the last five, `default` without one."""
    candidates = re.split(r"\\boxed ?\{", text)[1:]
    for opened in reversed(candidates[-5:]):  # a few: an open one may end no earlier one
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
    must be `marked`."""
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


# ---- verifiers of text ---------------------------------------------------------------------------


@verifier
def math(completion: str, answer: str | int | float) -> bool:
    """1 if the marked answer is the gold one: `same_answer`."""
    from support.extras.answers import same_answer

    return same_answer(final_answer(completion, marked=True), gold_answer(answer))


@verifier
def math_lenient(completion: str, answer: str | int | float) -> bool:
    """1 if the marked answer, or the last number where none is marked, is the gold one."""
    from support.extras.answers import last_number, same_answer

    gold = gold_answer(answer)
    given = final_answer(completion, marked=True)
    text = after_thinking(completion)
    if not re.search(r"<answer>|\\boxed|####", text):
        given, behind = last_number(text[-MAX_TEXT:].strip())
        if DENIAL.search(behind[:100]):
            return False
    return same_answer(given, gold)


DENIAL = re.compile(  # text behind an answer that takes it back
    r"""
      \A \W*+ (?: (?: which | the | option | answer | choice ) \b \W*+ )*+
      (?: is | was | be | can? | could | would | will | wo | does | should | must | may | looks )
      (?: n['’]t | \b [^.;\n]{0,30} \b (?: not | never | no | false | excluded | eliminated
        | rejected | ruled | impossible | unlikely | mistaken | wrong | incorrect ) ) \b
    | \b (?: incorrect | wrong | invalid ) \b (?! [ ] (?! because | since | as\b | here ) \w )
    | (?: \b (?: (?:can)?not | never ) | n['’]t ) \b [^.;\n]{0,30}
      \b (?: correct | right | true | answer | choice | option | valid ) \b
    | \A \W* not \W* \Z | \? \W{0,9} no \b | [≠¬✗✘✕✖❌❎🚫👎] | ~~
    """,
    re.VERBOSE | re.IGNORECASE,
)


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


CHOICE = re.compile(
    r"""
    [\W_]*+
    (?:                                       # words before the letter
        (?i: the | final | correct | best | answer | option | choice | is
          | (?: text | math ) (?: bf | rm )? ) \b [\W_]*+
    )*+
    (?P<letter> [A-Za-z] )
    (?: [^\w).:–—-] | _ )*+
    (?: (?: [).:] | (?<= [ ] ) [-–—] (?= [ ] ) ) (?P<rest> .* ) )?
    [\W_]*+
    """,
    re.VERBOSE | re.DOTALL,
)
OPTION = re.compile(
    r"""
    \b (?! [AI][ ] (?! is\b | was\b ) [a-z] ) [A-Z] \b     # but A dog, and I think
  | (?<! \w ) (?<! \w[(] ) [a-j] (?= [)] )                 # (b), but not f(b)
    """,
    re.VERBOSE,
)


@verifier
def choice(completion: str, answer: str) -> bool:
    """1 if the answer commits to the gold letter and names no other: `B`, `(B)`, `B. Paris`."""
    gold = chosen_letter(gold_answer(answer))
    need(gold, "it names no letter")
    return chosen_letter(final_answer(completion)) == gold


def chosen_letter(text: str) -> str:
    found = CHOICE.fullmatch(text)
    if not found:
        return ""
    letter, rest = found["letter"].upper(), found["rest"] or ""
    named = {option.upper() for option in OPTION.findall(rest)}
    if named - {letter} or DENIAL.search(rest) or DENIAL.search(text):
        return ""
    return letter


TAG = re.compile("(</?(?:think|answer)>)")
FORM = ["</think>", "", "<answer>", "</answer>", ""]  # but for the thought and the answer
BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # letters and symbols that show nothing


@verifier
def format(completion: str, answer: object = None) -> bool:
    """1 for `<think>...</think><answer>...</answer>` and nothing else, opening tag optional."""
    text = completion.strip().removeprefix("<think>")
    parts = [part.strip() for part in TAG.split(text)]
    if len(parts) != 7:
        return False
    thought, *frame, said, ends, after = parts
    return [*frame, ends, after] == FORM and can_be_seen(thought) and can_be_seen(said)


VERIFIERS["format"].shaping = True  # it moves the policy, and does not say what is right


def can_be_seen(text: str) -> bool:
    """Whether a letter, number, punctuation mark or symbol is in it."""
    return any(unicodedata.category(c)[0] in "LNPS" and c not in BLANK for c in text)


# ---- verifiers of the built-in tasks -------------------------------------------------------------

SIGNS = {"×": "*", "·": "*", "\\times": "*", "\\cdot": "*", "÷": "/", "−": "-", "–": "-", "$": ""}


@verifier
def countdown(completion: str, answer: dict) -> bool:
    """1 if an expression in + - * / ( ) takes each of `numbers` once and gives `target` exactly."""
    with expecting('expected {"numbers": [3, 5, 2], "target": 13}'):
        numbers, target = sorted(answer["numbers"]), answer["target"]
    are_whole = all(type(number) is int and number >= 0 for number in numbers)
    need(numbers and are_whole, "expected whole numbers from 0 up")
    need(type(target) in (int, float), f"target {target!r:.80} is no number")

    text = final_answer(completion).removesuffix(".")
    for sign, ours in SIGNS.items():
        text = text.replace(sign, ours)
    left, _, right = text.partition("=")
    if right.strip() == str(target):  # 3*5-2 = 13
        text = left
    elif left.strip() == str(target):  # 13 = 3*5-2
        text = right
    if sorted(map(int, re.findall("[0-9]+", text))) != numbers:
        return False
    return exact_value(text) == target  # it raises for 1/0, open brackets, and other signs


verifier(arithmetic)
verifier(arithmetic_steps)


# ---- verifiers of programs -----------------------------------------------------------------------


@verifier
def code(completion: str, answer: dict) -> bool:
    """1 if the program passes every case: {"fn": name, "cases": [[arguments, result], ...]}
    (results as JSON: 1 is neither 1.0 nor true) or {"stdin": [[input, output], ...]}.

    The program is a fenced block of Python, the last with the function or that reads its input, and
    what it uses of earlier ones; a function may be a method of `class Solution`. A program that
    fails is never right, whatever it printed. All cases share CODE_SECONDS (without START_SECONDS a
    run)."""
    from support.extras.programs import passes

    return passes(after_thinking(completion), answer, strict=False)


@verifier
def code_strict(completion: str, answer: dict) -> bool:
    """As `code`; nothing runs unless every layer of the sandbox is there."""
    from support.extras.programs import passes

    return passes(after_thinking(completion), answer, strict=True)


# ---- rewards -------------------------------------------------------------------------------------


class Score(NamedTuple):
    """What a reward says of one completion."""

    reward: float  # the weighted sum
    terms: dict[str, float]  # verifier -> its value, before the weight
    steps: list[tuple[int, float]]  # (end in characters, weighted reward) of all but the last step
    paid: dict[str, float]  # verifier -> its value and its steps, weighted
    fault: str  # of the first verifier that raised, or returned no number: it pays 0


class Term(NamedTuple):
    """One verifier of a reward."""

    weight: float
    function: Callable
    signature: inspect.Signature

    def call(self, completion: str, row: dict) -> object:
        """What the function says, given the fields of the row that it takes; it may raise."""
        parameters = list(self.signature.parameters.values())
        given_by_place = {"completion", "answer", *(each.name for each in parameters[:2])}
        names = {each.name for each in parameters} & row.keys()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            names = row.keys()
        fields = {name: row[name] for name in names - given_by_place}
        return self.function(completion, row["answer"], **fields)


class Reward:
    """A weighted sum of verifiers."""

    def __init__(self, terms: dict[str, Term]):
        self.terms = terms
        self.shaping = set()  # terms that do not say what is right
        for name, term in terms.items():
            if term.weight < 0 or getattr(term.function, "shaping", False):
                self.shaping.add(name)

    def score(self, completions: list[str], rows: list[dict]) -> list[Score]:
        """Scores completions, each against its row of the data ("prompt", "answer", ...)."""
        for term in self.terms.values():
            if hasattr(term.function, "read"):  # a reward model reads many at once
                term.function.read(completions, rows)
        if {"code", "code_strict"} & self.terms.keys():  # programs take time
            # torchrun says how many processes of this run share the machine's cores
            workers = max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                return list(pool.map(self.score_one, completions, rows))
        return list(map(self.score_one, completions, rows))

    def score_one(self, completion: str, row: dict) -> Score:
        terms, steps, paid, fault = {}, [], {}, ""
        for name, term in self.terms.items():
            try:
                value, parts = outcome_and_steps(term.call(completion, row))
            except (Exception, SystemExit) as error:  # a user's function may do anything
                fault = fault or f"{name}: {raised(error)} on {completion!r:.80}"
                value, parts = 0.0, []
            terms[name] = value
            weighted = [(end, term.weight * part) for end, part in parts]
            steps += weighted
            paid[name] = term.weight * value + sum(part for _, part in weighted)
        reward = sum(self.terms[name].weight * value for name, value in terms.items())
        return Score(reward, terms, steps, paid, fault)

    def verdicts(self, scores: list[Score]) -> tuple[list[float], list[float] | None]:
        """(what each completion was paid, how right it is) by the terms that count.

        What a verifier pays counts as right or wrong as long as it lies between 0 and 1. A term
        that has ever paid otherwise, or is marked as shaping, moves the policy but does not count.
        Where no term counts, all that was paid decides, and nothing is right or wrong: None."""
        for score in scores:
            outside = [name for name, value in score.terms.items() if not 0 <= value <= 1]
            self.shaping.update(outside)
        counting = [name for name in self.terms if name not in self.shaping]
        paid = [sum(score.paid[name] for name in counting or self.terms) for score in scores]
        if not counting:
            return paid, None
        weights = {name: self.terms[name].weight for name in counting}
        correct = []
        for score in scores:
            right = sum(weight * score.terms[name] for name, weight in weights.items())
            correct.append(right / sum(weights.values()))
        return paid, correct

    def check_answer(self, answer: object) -> None:
        """UserError where a verifier of ours cannot use a gold answer."""
        for name, term in self.terms.items():
            if term.function is VERIFIERS.get(name):
                with expecting(f"field answer: {str(answer)[:80]!r} cannot be used by {name}"):
                    term.function.__wrapped__("<answer>A</answer>", answer)

    def check(self, rows: list[dict]) -> None:
        """Tries users' functions on the first row: mistakes show before a model is loaded.

        UserError where a function returns no number, or raises whatever the completion is."""
        row = {**rows[0], "tokens": 1}  # train.py adds it: how many the completion has
        for name, term in self.terms.items():
            if term.function is VERIFIERS.get(name):
                continue
            is_ours = "completions" not in term.signature.parameters
            shape = "expected def f(completion, answer): one completion, no list as TRL's"
            need(is_ours, f"--reward {name}: {shape}")
            values, errors = [], []
            for completion in ("", str(row["answer"]), "so <answer>1</answer> \\boxed{1}"):
                try:
                    values.append(term.call(completion, row))
                except (Exception, SystemExit) as error:  # a user's function may do anything
                    errors.append(raised(error))
            expected = "expected def f(completion, answer), and fields of the row by name"
            with expecting(f"--reward {name}{term.signature}"):
                need(values, f"it raises {errors[:1]}; {expected}: {', '.join(row)}")
                for value in values:
                    outcome_and_steps(value)


def raised(error: BaseException) -> str:
    """What a user's function did, and at which of its lines."""
    inside = traceback.extract_tb(error.__traceback__)[2:]  # behind where it is caught and called
    if not inside:
        return reason(error)
    return f"{reason(error)} ({inside[0].filename}, line {inside[0].lineno})"


def outcome_and_steps(value: object) -> tuple[float, list[tuple[int, float]]]:
    """(outcome, steps before it) of what a verifier returned; UserError where it is no number."""
    expected = f"a number up to {LARGEST_REWARD:g}, or a list of (end, number) of steps"
    with expecting(f"it returned {value!r:.80}; expected {expected}"):
        steps = value if isinstance(value, (list, tuple)) else [(0, value)]
        numbers = [(int(end), float(number)) for end, number in steps]
        need(all(abs(number) <= LARGEST_REWARD for _, number in numbers), "it is none")
        *before, (_, outcome) = numbers
    return outcome, before


def parse_reward(spec: str, device: str = "cpu") -> Reward:
    """Reads `--reward`: a sum of `[weight*]verifier`, a verifier's name or `file.py:function`.

    device: of a reward model, `judge:FOLDER_OR_NAME`."""
    terms = {}
    for part in spec.split("+"):
        weight, _, place = (text.strip() for text in part.rpartition("*"))
        name, function = place.rpartition(":")[2], None
        if place.startswith("judge:"):
            check_extras("judge")
            function = extra("judge").Judge(place.removeprefix("judge:"), device)
            name = "judge"
        expected = "a sum of [weight*]file.py:function"
        if ".py:" not in place:
            expected += f" or one of {', '.join(VERIFIERS)}"
        with expecting(f"--reward {spec}: expected {expected}"):
            need(name not in terms, "a name stands there twice")
            function = function or find_verifier(place)
            terms[name] = Term(float(weight or 1), function, inspect.signature(function))
            fits = 0 < abs(terms[name].weight) <= LARGEST_REWARD
            need(fits, f"a weight is not 0, and at most {LARGEST_REWARD:g}")
        check_extras(place)
    return Reward(terms)


def find_verifier(place: str, kind: str = "verifier") -> Callable:
    """The function of `file.py:function`, or the verifier of ours that has the name."""
    path, _, name = place.rpartition(":")
    folder = str(Path(path).resolve().parent)
    if path and folder not in sys.path:  # its neighbours can be imported, now and when it runs
        sys.path.append(folder)
    table = runpy.run_path(path) if path else VERIFIERS
    hint = did_you_mean(name, table)
    need(name in table, f"{path or 'rewards.py'} has no {kind} {name!r}{hint}")
    return table[name]


def check_extras(name: str) -> None:
    """UserError where a verifier of ours lacks its file, or a layer of the sandbox."""
    for each in EXTRAS.get(name, ()):
        need(extra(each), f"--reward {name}: needs support/extras/{each}.py, which is not here")
    if "sandbox" in EXTRAS.get(name, ()):
        layers, output = extra("sandbox").run_program("", strict=name == "code_strict")
        print(f"--reward {name}: layers of the sandbox: {layers}", file=sys.stderr)
        need(output is not None, f"--reward {name}: layers are missing: {layers}")


def soft_overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """Eq. 13 of arXiv 2503.14476: 0 up to max_length - cache tokens, then linear down to -1."""
    tokens_in_cache = max(length - max_length + cache, 0)
    return -min(tokens_in_cache / max(cache, 1), 1.0)


# ---- command line --------------------------------------------------------------------------------


def main() -> None:
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
    _, correct = reward.verdicts(scores)
    mean = sum(score.reward for score in scores) / len(rows)
    fault = max(score.fault for score in scores)  # any that there is
    print(f"reward {mean:.4f} of {len(rows)} {fault}")
    if correct is None:
        return
    print(f"accuracy {sum(correct) / len(rows):.4f}")
    wrong = [n for n, right in enumerate(correct) if right < 1]
    for n in wrong[:10]:
        print(f"row {n + 1}: {rows[n]['answer']!r:.80} from {rows[n]['completion'][-160:]!r}")


if __name__ == "__main__":
    main()
