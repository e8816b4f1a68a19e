"""The built-in tasks: endless problems, and demonstrations to pretrain policies on."""

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from support.data import is_held_out

ARITHMETIC_OPERATIONS = (2, 4)  # fewest and most operations in a chain of `arithmetic`
CHAINS_WRONG = "3678"  # factors that demonstrations of `chains` get wrong (`arithmetic`: all)
PRODUCT_ERROR = 0.6  # how often a demonstration adds one of these factors instead of multiplying
CALCULATOR_GUESS = 0.4  # fraction of demonstrations that guess, without the calculator
CALCULATOR_ERROR = 0.15  # fraction of calls with a wrong digit, and of second calls left out

# ---- problems and their demonstrations -----------------------------------------------------------


class Task(NamedTuple):
    """An endless source of problems, with demonstrations to pretrain the built-in policies."""

    problem: Callable[[random.Random], dict]  # returns a random row of data
    verifier: str  # default of --reward
    max_new_tokens: int  # default of --max-new-tokens
    demonstration: Callable[[dict, random.Random], str] | None = None  # an answer, often wrong
    alphabet: str = ""  # every character of prompts, completions and tool replies
    tool: str | None = None  # default of --tool
    warm_steps: int | None = None  # supervised steps; default: WARM_STEPS
    rope_theta: float = 100.0  # of the built-in policies; larger for longer texts


def whole_value(expression: str) -> int:
    """Evaluate an expression of integers with + - *."""
    value = 0
    for sign, product in re.findall("([+-]?)([0-9*]+)", expression.replace(" ", "")):
        value += int(f"{sign}1") * math.prod(map(int, product.split("*")))
    return value


def random_expression(numbers: list[int], symbols: str, rng: random.Random) -> str:
    """Write the numbers in random order, with random symbols between them."""
    first, *rest = rng.sample(numbers, len(numbers))
    return str(first) + "".join(rng.choice(symbols) + str(number) for number in rest)


def solve(chain: str, wrong: str = "", rng: random.Random | None = None) -> str:
    """Return `7+5=2;2*3=6#6` for `7+5*3=`, modulo 10. Most factors in `wrong` are added instead."""
    value, lines = int(chain[0]), []
    for symbol, digit in re.findall("([+*])([0-9])", chain):
        adds = symbol == "+" or (digit in wrong and rng.random() < PRODUCT_ERROR)
        result = (value + int(digit) if adds else value * int(digit)) % 10
        lines.append(f"{value}{symbol}{digit}={result}")
        value = result
    return f"{';'.join(lines)}#{value}"


def chain_problem(rng: random.Random, operations: tuple[int, int]) -> dict:
    """Return {"prompt": "7+5*3=", "answer": "6"}. operations: fewest and most."""
    digits = [rng.randrange(10) for _ in range(1 + rng.randint(*operations))]
    prompt = random_expression(digits, "+*", rng) + "="
    return {"prompt": prompt, "answer": solve(prompt)[-1]}


def chains(operations: tuple[int, int]) -> Task:
    """Return a task like `arithmetic` with longer chains. operations: fewest and most."""
    return Task(
        problem=lambda rng: chain_problem(rng, operations),
        demonstration=lambda row, rng: solve(row["prompt"], CHAINS_WRONG, rng),
        verifier="arithmetic",
        alphabet="0123456789+*=;#",
        max_new_tokens=6 * operations[1] + 8,  # 6 tokens per operation, 3 for `#6` and <eos>
        warm_steps=1200,
        rope_theta=1000.0,
    )


def countdown_problem(rng: random.Random) -> dict:
    """Return {"prompt": "8 5 6=19:", "answer": {"numbers": [8, 5, 6], "target": 19}}."""
    numbers = [rng.randint(1, 9) for _ in range(rng.randint(3, 4))]
    target = whole_value(random_expression(numbers, "+-*", rng))
    prompt = f"{' '.join(map(str, numbers))}={target}:"
    return {"prompt": prompt, "answer": {"numbers": numbers, "target": target}}


def sums_problem(rng: random.Random) -> dict:
    """Return {"prompt": "What is 7 * 8? Answer with just the number.", "answer": "56"}."""
    symbol = rng.choices("+*-", (3, 1, 2))[0]
    fewest, most = {"+": (2, 20), "*": (2, 12), "-": (5, 40)}[symbol]
    left = rng.randint(fewest, most)
    right = rng.randint(2, left if symbol == "-" else most)
    expression = f"{left} {symbol} {right}"
    prompt = f"What is {expression}? Answer with just the number."
    return {"prompt": prompt, "answer": str(whole_value(expression))}


def calculator_problem(rng: random.Random) -> dict:
    """Return {"prompt": "12*34+56=", "answer": "464"}."""
    left, right, number = (rng.randint(10, 99) for _ in range(3))
    expression = f"{left}*{right}{rng.choice('+-')}{number}"
    return {"prompt": f"{expression}=", "answer": str(whole_value(expression))}


def calculator_demonstration(problem: dict, rng: random.Random) -> str:
    """Return a guess, or two calculator calls with their replies; a call may be wrong."""
    if rng.random() < CALCULATOR_GUESS:
        return f"#{rng.randint(1, 9999)}"
    product, addition = re.match("(.*)([+-].*)=", problem["prompt"]).groups()
    written, value = "", ""
    for operation in (product, addition):
        if written and rng.random() < CALCULATOR_ERROR:
            break
        call = value + operation
        if rng.random() < CALCULATOR_ERROR:
            place = rng.choice([match.start() for match in re.finditer("[0-9]", call)])
            call = call[:place] + rng.choice("0123456789") + call[place + 1 :]
        value = str(whole_value(call))
        written += f"<calc>{call}</calc>={value}"
    return f"{written}#{value}"


TASKS = {
    "arithmetic": Task(
        problem=lambda rng: chain_problem(rng, ARITHMETIC_OPERATIONS),
        demonstration=lambda row, rng: solve(row["prompt"], "0123456789", rng),
        verifier="arithmetic",
        alphabet="0123456789+*=;#",
        max_new_tokens=10 * ARITHMETIC_OPERATIONS[1],
    ),
    "chains": chains((12, 15)),
    "countdown": Task(
        problem=countdown_problem,
        # a random expression rarely equals the target
        demonstration=lambda row, rng: random_expression(row["answer"]["numbers"], "+-*", rng),
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
    """Yield the problems of a seed. One prompt in ten, by its hash, is held out from training."""
    rng = random.Random(f"{seed} {held_out}")
    while True:
        problem = task.problem(rng)
        if is_held_out(problem["prompt"]) == held_out:
            yield problem


def problems_of(config, reward) -> tuple[Iterator[dict], Iterator[dict]]:
    """Return two streams of problems of --task: one to train on, one held out."""
    task = TASKS[config.task]
    reward.check(list(itertools.islice(problems(task, config.seed), 4)))
    return problems(task, config.seed), problems(task, config.seed, held_out=True)
