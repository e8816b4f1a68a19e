"""Verifiers, and rewards, which are weighted sums of verifiers.

    python rewards.py FILE --reward math      # try a verifier on completions of your own

A verifier maps (completion, gold answer) to a number in [0, 1]. Completions are adversarial input:
never eval() them, return a value for any string, and bound the running time. Unusable gold answers
are refused before training. This file needs support/errors.py and support/user_code.py."""

import argparse
import concurrent.futures
import math
import os
import re
from collections.abc import Callable
from typing import NamedTuple

from support.errors import UserError, did_you_mean, expecting, need
from support.user_code import call, function_of, raised

VERIFIERS: dict[str, Callable] = {}  # name in --reward -> function
MATHEMATICS = ("math", "math_lenient", "countdown")  # defined in support/mathematics.py


def verifier(function: Callable) -> Callable:
    """Register `function(completion, answer)` under its own name, for use in `--reward`.

    The function must return a number in [0, 1] for any completion, and may call `need(...)` to
    refuse a gold answer. For a process reward, return a list of (end, reward) pairs instead, one
    per step and the outcome last; a step ends at character `end`. A parameter named after a field
    of the row receives that field, and `tokens` the completion's number of tokens."""
    VERIFIERS[function.__name__] = function
    return function


def after_thinking(completion: str) -> str:
    """Return the text after the last `</think>`, or "" if a `<think>` was never closed."""
    text = completion.rpartition("</think>")[2]
    return "" if "<think>" in text else text


BARE_BOX = re.compile(r"\\boxed +(-?\w+(?:[.,/]\d+)*)", re.ASCII)  # \boxed 5 -> 5
BRACES = re.compile(r"(\\boxed ?\{)|\\[\\{}](?!boxed)|([{}])")  # \{ and \} are skipped


def last_box(text: str, default: str) -> str:
    """Return the content of the last balanced `\\boxed{...}`, or `default` if there is none."""
    text = BARE_BOX.sub(r"\\boxed{\1}", text)
    starts, content = [], default  # where open boxes start; None for other open braces
    for brace in BRACES.finditer(text):
        if brace[1] or brace[2] == "{":
            starts.append(brace.end() if brace[1] else None)
        elif brace[2] and starts and (start := starts.pop()):
            content = text[start : brace.start()]
    return content


def final_answer(completion: object, marked: bool = False) -> str:
    """Return the final answer of a completion or gold solution, whitespace collapsed.

    This is the last `<answer>` after the thinking (or the last box inside it), else the last
    `\\boxed{}`, else the rest of the line after the last `####`. Without any of these, it is the
    whole text, or "" if `marked`. An unclosed `<answer>` also yields ""."""
    if type(completion) not in (str, int, float):
        return ""
    text = after_thinking(str(completion))
    if "<answer>" in text:
        content, closed, _ = text.rpartition("<answer>")[2].partition("</answer>")
        answer = last_box(content, content) if closed else ""
    elif "####" in text:
        answer = last_box(text, text.rpartition("####")[2].partition("\n")[0])
    else:
        answer = last_box(text, "" if marked else text)
    return " ".join(answer.split()) if len(answer) <= 10_000 else ""


def gold_answer(answer: object) -> str:
    """Return the final answer of a gold solution. Raises UserError if it has none."""
    text = final_answer(answer)
    need(text, "it has no final answer")
    return text


@verifier
def exact(completion: str, answer: str | int | float) -> bool:
    """1 if the final answer, or else the whole text, equals the gold one, ignoring case."""
    return final_answer(completion).casefold() == gold_answer(answer).casefold()


@verifier
def choice(completion: str, answer: str) -> bool:
    """1 if the final answer chooses the gold letter and no other: `B`, `(b)` or `B. Paris`."""
    gold = chosen_letter(gold_answer(answer))
    need(gold, "it names no letter")
    return chosen_letter(final_answer(completion)) == gold


LETTER = re.compile(  # "The answer is (B) because" names B, "Berlin" and "not B" name none
    r"(?i)[^\w≠¬~❌]*(?:(?:the|final|correct|best|answer|option|choice|is)\b[^\w≠¬~❌]*)*([a-z])\b(?![#+-])"
)
OTHER = re.compile(r"\b[B-HJ-Z]\b|\b[AI]\b(?! (?!is)[a-z])|\b[a-j]\)")  # C, c), but not "A dog"
DENIAL = re.compile(  # "B is wrong", "not (B)", "B?"
    r"(?i)\b(?:not|cannot|never|no|wrong|incorrect|false|or|ruled|eliminated)\b|n['’]t\b|[❌≠~?]"
)


def chosen_letter(text: str) -> str:
    """Return the letter that an answer commits to, or "" if another letter or a denial follows."""
    text = re.sub(r"\\[a-z]+|[{}*_$]", " ", text).strip()  # \textbf{(B)} -> (B)
    found = LETTER.match(text)
    if not found or OTHER.search(text, found.end()) or DENIAL.search(text, found.end()):
        return ""
    return found[1].upper()


def think_format(completion: str, answer: object = None) -> bool:
    """1 for `<think>...</think><answer>...</answer>` and nothing else. `<think>` is optional."""
    text = completion.strip().removeprefix("<think>")
    match [part.strip() for part in re.split("(</?(?:think|answer)>)", text)]:
        case [thought, "</think>", "", "<answer>", said, "</answer>", ""]:
            return thought != "" and said != ""
    return False


think_format.shaping = True  # it doesn't judge the answer, so `solved` ignores it
VERIFIERS["format"] = think_format


# ---- verifiers of the built-in tasks -------------------------------------------------------------


@verifier
def arithmetic(completion: str, answer: str) -> bool:
    """1 if the text after the last `#` is exactly the answer."""
    need(type(answer) in (str, int, float) and str(answer).strip(), "it has no final answer")
    return completion.rpartition("#")[1:] == ("#", str(answer))


@verifier
def arithmetic_steps(completion: str, answer: str, prompt: str = "") -> list[tuple[int, float]]:
    """Return (end, reward) for each step of `7+5=2;2*3=6#6` and for the outcome. A step earns 1 if
    it applies the prompt's next operation to the previous result, modulo 10."""
    value, end, steps = prompt[:1], 0, []
    written = completion.partition("#")[0].split(";")
    for (sign, digit), step in zip(re.findall("([+*])([0-9])", prompt), written):
        end += len(step) + 1
        is_right = False
        if re.fullmatch("[0-9]", value):
            result = int(value) + int(digit) if sign == "+" else int(value) * int(digit)
            is_right = step == f"{value}{sign}{digit}={result % 10}"
        steps.append((end, float(is_right)))
        value = step[-1:]
    return [*steps, (len(completion), float(arithmetic(completion, answer)))]


# ---- rewards -------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """The reward of one completion, or NaN, an abstention, if a verifier failed."""

    completion: str
    row: dict  # its row of the data, plus "tokens", the completion's number of tokens
    reward: float  # the weighted sum, without the rewards of steps
    terms: dict[str, float]  # verifier -> its value, unweighted
    steps: list[tuple[int, float]]  # (end, weighted reward) of every step but the outcome
    with_steps: dict[str, float]  # verifier -> its weighted value, plus its weighted steps
    fault: str  # why a verifier failed, or ""

    @staticmethod
    def abstention(completion: str, row: dict, terms, fault: str) -> "Verdict":
        """Return the abstention on a completion. terms: the names of the verifiers."""
        nothing = dict.fromkeys(terms, math.nan)
        return Verdict(completion, row, math.nan, nothing, [], nothing, fault)


class Term(NamedTuple):
    weight: float
    function: Callable


class Reward:
    """A weighted sum of verifiers."""

    def __init__(self, terms: dict[str, Term]):
        self.terms = terms
        self.reads_steps = True  # whether the algorithm uses step rewards
        self.shaping = set()  # terms that `solved` ignores: they don't judge the answer
        self.out_of_range = set()  # terms with values outside [0, 1], for a warning
        for name, term in terms.items():
            if term.weight < 0 or getattr(term.function, "shaping", False):
                self.shaping.add(name)

    def verify(self, completions: list[str], rows: list[dict]) -> list[Verdict]:
        """Score completions, each with its row of the data ("prompt", "answer", ...)."""
        functions = [term.function for term in self.terms.values()]
        for function in functions:
            if read := getattr(function, "read", None):
                read(completions, rows)
        if not any(getattr(function, "threads", False) for function in functions):
            return list(map(self.verify_one, completions, rows))
        # under torchrun, the processes of this run share the machine's cores
        workers = max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return list(pool.map(self.verify_one, completions, rows))

    def verify_one(self, completion: str, row: dict) -> Verdict:
        terms, steps, with_steps = {}, [], {}
        for name, (weight, function) in self.terms.items():
            try:
                *before, (_, value) = call(function, completion, row)
            except (Exception, SystemExit) as error:  # a user's function may do anything
                fault = f"{name}: {raised(error)} on {completion!r:.80}"
                return Verdict.abstention(completion, row, self.terms, fault)
            if name not in self.shaping and not 0 <= value <= 1:
                self.out_of_range.add(name)  # and not to shaping: `solved` would change mid-run
            terms[name] = value
            weighted = [(end, weight * part) for end, part in before if self.reads_steps]
            steps += weighted
            with_steps[name] = weight * value + sum(part for _, part in weighted)
        reward = sum(self.terms[name].weight * value for name, value in terms.items())
        return Verdict(completion, row, reward, terms, steps, with_steps, "")

    def without_shaping(self, verdicts: list[Verdict]) -> tuple[list[float], list[float] | None]:
        """Return each completion's reward and its correctness in [0, 1], both without shaping terms
        and NaN if unjudged. If every term is shaping, return the whole rewards and None."""
        judging = [name for name in self.terms if name not in self.shaping]
        earned = [sum(one.with_steps[name] for name in judging or self.terms) for one in verdicts]
        if not judging:
            return earned, None
        correct = []
        total = sum(self.terms[name].weight for name in judging)
        for verdict in verdicts:  # values are clamped to [0, 1], but NaN stays NaN
            values = {name: min(max(verdict.terms[name], 0.0), 1.0) for name in judging}
            correct.append(sum(self.terms[name].weight * values[name] for name in judging) / total)
        return earned, correct

    def lenient_twin(self) -> "Reward | None":
        """Return this reward with `math_lenient` for `math`, or None if it has no `math`."""
        term = self.terms.get("math")
        if term is None or term.function is not VERIFIERS.get("math"):
            return None
        twin = Reward(self.terms | {"math": term._replace(function=VERIFIERS["math_lenient"])})
        twin.shaping = self.shaping
        return twin

    def check_answer(self, answer: object) -> None:
        """Raise UserError if one of our verifiers can't use this gold answer."""
        for name, term in self.terms.items():
            if term.function is VERIFIERS.get(name):
                with expecting(f"field answer: {str(answer)[:80]!r} cannot be used by {name}"):
                    term.function("<answer>A</answer>", answer)

    def check(self, rows: list[dict]) -> None:
        """Try users' functions on right and wrong answers to the first row. Raises UserError if one
        never returns a reward. A function whose values leave [0, 1] counts as shaping."""
        row = rows[0] | {"tokens": 1}  # train.py adds the number of tokens
        answers = [str(other["answer"]) for other in rows[:4]]
        marked = [f"<answer>{text}</answer> \\boxed{{{text}}}" for text in answers]
        texts = ["", "1", *answers, *marked]
        for name, term in self.terms.items():
            if term.function is VERIFIERS.get(name):
                continue
            alone = Reward({name: term})
            faults = [verdict.fault for verdict in alone.verify(texts, [row] * len(texts))]
            fields = f"def f(completion, answer) and, by name, any of {', '.join(row)}"
            need(not all(faults), f"--reward {faults[0]}; expected {fields}")
            self.shaping |= alone.out_of_range
            self.out_of_range |= alone.out_of_range


def parse_reward(spec: str, device: str = "cpu") -> Reward:
    """Parse `--reward`, a sum of `[weight*]verifier`. `device` is where a judge runs."""
    terms = {}
    for part in spec.split("+"):
        weight, _, place = (text.strip() for text in part.rpartition("*"))
        with expecting(f"--reward {part.strip()}"):
            name, function = find_verifier(place, device)
            need(name not in terms, f"{name} is given twice")
            terms[name] = Term(float(weight or 1), function)
            need(0 < abs(terms[name].weight) <= 1e6, "expected 0 < |weight| <= 1e6")
            if prepare := getattr(function, "prepare", None):
                prepare()
    return Reward(terms)


def find_verifier(place: str, device: str) -> tuple[str, Callable]:
    """Return a verifier's name and function, importing the file that defines it."""
    if place.startswith("judge:"):
        from support.extras.reward_model import Judge

        return "judge", Judge(place.removeprefix("judge:"), device)
    if ":" in place:
        return place.rpartition(":")[2], function_of(place)
    if place in MATHEMATICS:
        from support import mathematics  # noqa: F401 - it registers its verifiers
    elif place == "code":
        from support.extras import programs  # noqa: F401
    known = sorted({*VERIFIERS, *MATHEMATICS, "code"})
    expected = f"expected file.py:function, judge:FOLDER or one of {', '.join(known)}"
    need(place in VERIFIERS, f"no such verifier{did_you_mean(place, known)}; {expected}")
    return place, VERIFIERS[place]


def main() -> None:
    from support.data import read_rows

    parser = argparse.ArgumentParser(description="Try a verifier on completions of your own.")
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
    rewards = [verdict.reward for verdict in verdicts if not verdict.fault]
    mean = sum(rewards) / max(len(rewards), 1)
    print(f"reward {mean:.4f} over {len(rewards)} rows; those below 1 or without a verdict:")
    for number, verdict in enumerate(verdicts, 1):
        if not verdict.reward >= 1:  # NaN, too
            answer, text = verdict.row["answer"], verdict.completion[-160:]
            print(f"row {number}: {answer!r:.80} from {text!r} {verdict.fault}")


if __name__ == "__main__":
    from rewards import main  # the verifiers register with `rewards`, not with `__main__`

    main()
