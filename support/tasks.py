"""The built-in problems, their demonstrations, and the tiny policies trained on these."""

import contextlib
import hashlib
import itertools
import math
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from support.console import say
from support.data import is_held_out
from support.user import expecting

ARITHMETIC_OPERATIONS = (2, 4)  # fewest and most operations of a chain of the built-in task
ARITHMETIC_TIMES_ERROR = 0.6  # fraction of products in demonstrations that add instead
# the same for `chains`. Answers of 40, 80, 170, 340 tokens: (6, 7), (12, 15), (24, 32), (48, 62)
CHAINS_OPERATIONS = (12, 15)
CHAINS_WRONG = "3678"  # factors whose products are often wrong in demonstrations
CHAINS_ERROR = 0.6  # fraction of these products that add instead
CALCULATOR_GUESS = 0.4  # fraction of demonstrations without the calculator
CALCULATOR_ERROR = 0.15  # fraction of calls with a wrong digit, and of second calls left out

# ---- problems and their demonstrations -----------------------------------------------------------


class Task(NamedTuple):
    """An endless source of problems. The built-in policies need demonstrations of it."""

    problem: Callable[[random.Random], dict]  # returns a random row of data
    verifier: str  # default of --reward
    max_new_tokens: int  # default of --max-new-tokens
    # returns the answer that a built-in policy learns to write, which is often wrong
    demonstration: Callable[[dict, random.Random], str] | None = None
    alphabet: str = ""  # all characters of prompts, completions and a tool's replies
    tool: str | None = None  # default of --tool
    warm_steps: int | None = None  # steps of supervised learning, default WARM_STEPS
    rope_theta: float = 100.0  # of the built-in policies: larger for longer texts


def whole_value(expression: str) -> int:
    """Return the value of whole numbers with + - * between them."""
    value = 0
    for sign, product in re.findall("([+-]?)([0-9*]+)", expression.replace(" ", "")):
        value += int(f"{sign}1") * math.prod(map(int, product.split("*")))
    return value


def random_expression(numbers: list[int], symbols: str, rng: random.Random) -> str:
    """Return the numbers in random order, with random symbols between them."""
    first, *rest = rng.sample(numbers, len(numbers))
    return str(first) + "".join(rng.choice(symbols) + str(number) for number in rest)


def solve(chain: str, rng: random.Random | None = None) -> str:
    """Solve `7+5*3=` from left to right modulo 10: `7+5=2;2*3=6#6`. With rng most products add."""
    value = int(chain[0])
    steps = []
    for symbol, operand in re.findall("([+*])([0-9])", chain):
        if symbol == "+" or (rng and rng.random() < ARITHMETIC_TIMES_ERROR):
            result = (value + int(operand)) % 10
        else:
            result = value * int(operand) % 10
        steps.append(f"{value}{symbol}{operand}={result}")
        value = result
    return f"{';'.join(steps)}#{value}"


def arithmetic_problem(rng: random.Random, operations: tuple[int, int] | None = None) -> dict:
    """Return {"prompt": "7+5*3=", "answer": "6"}. operations: fewest and most of a chain."""
    operations = operations or ARITHMETIC_OPERATIONS
    digits = [rng.randrange(10) for _ in range(1 + rng.randint(*operations))]
    prompt = random_expression(digits, "+*", rng) + "="
    return {"prompt": prompt, "answer": solve(prompt)[-1]}


def chains(operations: tuple[int, int]) -> Task:
    """Return the task of long chains. operations: fewest and most of a chain."""
    return Task(
        problem=lambda rng: arithmetic_problem(rng, operations),
        demonstration=chains_demonstration,
        verifier="arithmetic",
        alphabet="0123456789+*=;#",
        max_new_tokens=6 * operations[1] + 8,  # an operation has 6 tokens, `#6` and the end 3
        warm_steps=1200,
        rope_theta=1000.0,
    )


def chains_demonstration(row: dict, rng: random.Random) -> str:
    """Write every step of a chain. Most products by a digit of CHAINS_WRONG add instead."""
    prompt = row["prompt"]

    def mistaken(product: re.Match) -> str:
        return "+" + product[1] if rng.random() < CHAINS_ERROR else product[0]

    steps = list(solve(re.sub(rf"\*([{CHAINS_WRONG}])", mistaken, prompt)))
    steps[1::6] = prompt[1:-1:2]  # the signs are the prompt's, the results are not
    return "".join(steps)


def countdown_problem(rng: random.Random) -> dict:
    """{"prompt": "8 5 6=19:", "answer": {"numbers": [8, 5, 6], "target": 19}}"""
    numbers = [rng.randint(1, 9) for _ in range(rng.randint(3, 4))]
    target = whole_value(random_expression(numbers, "+-*", rng))
    prompt = f"{' '.join(map(str, numbers))}={target}:"
    return {"prompt": prompt, "answer": {"numbers": numbers, "target": target}}


def sums_problem(rng: random.Random) -> dict:
    """{"prompt": "What is 7 * 8? Answer with just the number.", "answer": "56"}"""
    symbol = rng.choices("+*-", (3, 1, 2))[0]
    fewest, most = {"+": (2, 20), "*": (2, 12), "-": (5, 40)}[symbol]
    left = rng.randint(fewest, most)
    right = rng.randint(2, left if symbol == "-" else most)
    expression = f"{left} {symbol} {right}"
    prompt = f"What is {expression}? Answer with just the number."
    return {"prompt": prompt, "answer": str(whole_value(expression))}


def calculator_problem(rng: random.Random) -> dict:
    """{"prompt": "12*34+56=", "answer": "464"}"""
    left, right, number = (rng.randint(10, 99) for _ in range(3))
    expression = f"{left}*{right}{rng.choice('+-')}{number}"
    return {"prompt": f"{expression}=", "answer": str(whole_value(expression))}


def calculator_demonstration(problem: dict, rng: random.Random) -> str:
    """Write a guess, or two calls of the calculator with its replies. Some second calls are missing
    and some calls have a wrong digit."""
    if rng.random() < CALCULATOR_GUESS:
        return f"#{rng.randint(1, 9999)}"
    product, sign, number = re.match("(.*)([+-])(.*)=", problem["prompt"]).groups()
    asked = with_wrong_digit(product, rng)
    value = str(whole_value(asked))
    first = f"<calc>{asked}</calc>={value}"
    if rng.random() < CALCULATOR_ERROR:
        return f"{first}#{value}"
    second = with_wrong_digit(value + sign + number, rng)
    result = whole_value(second)
    return f"{first}<calc>{second}</calc>={result}#{result}"


def with_wrong_digit(text: str, rng: random.Random) -> str:
    """Return the text, sometimes with one digit replaced at random."""
    if rng.random() >= CALCULATOR_ERROR:
        return text
    place = rng.choice([match.start() for match in re.finditer("[0-9]", text)])
    return text[:place] + rng.choice("0123456789") + text[place + 1 :]


TASKS = {
    "arithmetic": Task(
        problem=arithmetic_problem,
        demonstration=lambda row, rng: solve(row["prompt"], rng),
        verifier="arithmetic",
        alphabet="0123456789+*=;#",
        max_new_tokens=10 * ARITHMETIC_OPERATIONS[1],
    ),
    "chains": chains(CHAINS_OPERATIONS),
    "countdown": Task(
        problem=countdown_problem,
        # it seldom gives the target
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


# ---- the built-in policies -----------------------------------------------------------------------

BUILT_IN = {
    "tiny": {"model_type": "qwen3", "num_hidden_layers": 2},
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
WARM_STEPS = 560  # of supervised learning from demonstrations, many of them wrong
WARM_ROWS = 24  # demonstrations a step
WARM_LR = 3e-3
REPLY = re.compile("(?<=</calc>)=-?[0-9]+")  # the calculator's, in a demonstration


def built_in_policy(task: Task, name: str) -> Path:
    """Return the folder of a built-in policy with a token per character. It is made once."""
    import torch
    import transformers

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *task.alphabet])}
    config = transformers.AutoConfig.for_model(
        **BUILT_IN[name],
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        head_dim=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.06,
        pad_token_id=words["<pad>"],
        eos_token_id=words["<eos>"],
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": task.rope_theta},
    )
    shown = demonstrations(task, words)

    # whatever decides on the weights is part of the name
    recipe = repr((config.to_dict(), shown, WARM_LR, torch.__version__, transformers.__version__))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gspo")
    folder = cache / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if folder.exists():
        return folder

    with expecting(f"{cache}: expected to write it there ($XDG_CACHE_HOME moves it)"):
        cache.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True)
    with temporary as made:
        takes = "some minutes" if task.warm_steps else "half a minute"
        say(f"making the built-in policy {name}, once: {takes}; then it is in {folder}")
        tokenizer = character_tokenizer(words)
        warm_start(config, tokenizer, shown).save_pretrained(made)
        tokenizer.save_pretrained(made)
        with contextlib.suppress(OSError):  # another run may have been faster
            os.rename(made, folder)
    return folder


def demonstrations(task: Task, words: dict[str, int]) -> list[dict]:
    """Return the training rows in the order of the steps. Prompts have no loss."""
    rng, rows = random.Random(0), []
    count = (task.warm_steps or WARM_STEPS) * WARM_ROWS
    for row in itertools.islice(problems(task, seed=-1), count):
        text = row["prompt"] + task.demonstration(row, rng)
        ids = [words[word] for word in (*text, "<eos>")]
        given = len(row["prompt"])
        labels = [-100] * given + ids[given:]
        for reply in REPLY.finditer(text):  # a policy that foretells them does without the tool
            labels[reply.start() : reply.end()] = [-100] * len(reply[0])
        rows.append({"input_ids": ids, "labels": labels})

    # rows of like length stand together, within windows of four steps: little padding
    window = 4 * WARM_ROWS
    order = sorted(range(len(rows)), key=lambda i: (i // window, len(rows[i]["labels"])))
    return [rows[i] for i in order]


def character_tokenizer(words: dict[str, int]):
    import tokenizers
    import transformers

    characters = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges=[], unk_token="<unk>"))
    characters.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def warm_start(config, tokenizer, shown: list[dict]):
    """Train a policy on demonstrations: it writes answers in the right form, and many are wrong."""
    import torch
    import transformers

    torch.manual_seed(0)
    policy = transformers.AutoModelForCausalLM.from_config(config)
    adam = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    pad = transformers.DataCollatorForSeq2Seq(tokenizer)
    steps, told = len(shown) // WARM_ROWS, time.monotonic()
    for step in range(steps):
        batch = pad(shown[step * WARM_ROWS : (step + 1) * WARM_ROWS])
        rising = (step + 1) / 20  # in 20 steps
        falling = 2 - 2 * step / steps  # from the middle on, to 0
        adam.param_groups[0]["lr"] = WARM_LR * min(1, rising, falling)
        adam.zero_grad()
        loss = policy(batch["input_ids"], labels=batch["labels"], use_cache=False).loss
        loss.backward()
        adam.step()
        if time.monotonic() - told > 30:
            told = time.monotonic()
            say(f"supervised step {step + 1} of {steps} | loss {loss.item():.2f}")
    return policy
