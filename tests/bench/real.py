"""Trains a pretrained model on sums, with room for its answers, and counts those cut off.

    python tests/bench/real.py --model FOLDER --out real.jsonl                  # every missing run
    python tests/bench/real.py --model FOLDER --out real.jsonl --parts coin     # of this part alone

192 of 695 questions are held out, the same ones for every seed. A finished run is a line in --out.
docs/results.md, "The real model", has the results."""

import functools
import itertools
import json
import os
import random
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch

import common
import train
from long import ROWS
from support import mathematics

HELD_OUT, LIMIT = 192, 24
COIN = '''
import zlib


def coin(completion, answer, prompt):
    """1 or 0 by a checksum of both texts."""
    return float(zlib.crc32((prompt + completion).encode()) % 2)


coin.shaping = True  # it does not tell right from wrong
'''
FOUR_UPDATES = "--steps 12 --completions-per-update 32"
SIXTEEN_UPDATES = "--steps 8 --completions-per-update 8"
ORDERED = ("gspo", "gspo, 3e-3", "luspo", "grpo")  # rows of long.py
# part -> row -> flags
PARTS = {
    "limit": {"gspo": f"--algo gspo --lr 1e-5 {FOUR_UPDATES}"},
    "coin": {
        "coin": f"--algo gspo --lr 1e-5 {FOUR_UPDATES} --reward coin.py:coin+1e-9*math_lenient"
    },
    "order": {
        f"{name}, 16 updates, {lr}": f"{ROWS[name]} --lr {lr} {SIXTEEN_UPDATES}"
        for lr, name in itertools.product(("1e-5", "3e-5", "6e-5"), ORDERED)
    },
}


def write_questions(folder: Path) -> None:
    """Write 695 different sums, differences and products of small numbers, some held out."""
    rng = random.Random(3)
    rows = [(f"{a} + {b}", a + b) for a in range(2, 21) for b in range(2, 21)]
    rows += [(f"{a} * {b}", a * b) for a in range(2, 13) for b in range(2, 13)]
    for a in range(5, 41):
        rows += [(f"{a} - {b}", a - b) for b in rng.sample(range(2, a + 1), min(6, a - 1))]
    rng.shuffle(rows)
    for name, some in (("test", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        with open(folder / f"{name}.jsonl", "w") as file:
            for question, answer in some:
                prompt = f"What is {question}? Answer with just the number."
                file.write(json.dumps({"prompt": prompt, "answer": str(answer)}) + "\n")


def shares(rollout, verdicts: list) -> dict:
    """Return the share of greedy answers that are right, the share that are cut off, the share of
    the others that are right, and the mean length."""
    right = [mathematics.math_lenient(each.completion, each.row["answer"]) for each in verdicts]
    right, cut = torch.tensor(right).float(), rollout.truncated
    return {
        "right": float(right.mean()),
        "cut": float(cut.float().mean()),
        "right_of_whole": float(right[~cut].mean()),
        "length": float(rollout.lengths.float().mean()),
    }


def train_once(model: Path, run: dict) -> tuple[dict, str]:
    """Run train.py to its end. Return accuracies before and after, and metrics of each step."""
    sample, evaluations = train.sample_and_verify, []

    def sample_and_note(run, model, problems, group_size, temperature, seed):
        found = sample(run, model, problems, group_size, temperature, seed)
        if temperature == 0:
            evaluations.append(shares(*found))
        return found

    train.sample_and_verify = sample_and_note  # in this process, which makes one run
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_questions(folder)
        (folder / "coin.py").write_text(COIN)
        os.chdir(folder)
        flags = f"--model {model} --data train.jsonl --eval-data test.jsonl --save-every 0 "
        flags += f"--max-new-tokens {LIMIT} --prompts-per-step 16 --warmup-steps 0 "
        flags += f"--eval-every 4 --eval-prompts {HELD_OUT} --eval-samples 0 "
        flags += f"--reward math_lenient --seed {run['seed']} {run['flags']}"
        _, metrics = common.train(flags.split())
    found = {"before": evaluations[0], "after": evaluations[-1]}
    for metric in ("reward", "truncated", "length_mean", "clip_fraction", "policy_kl", "grad_norm"):
        found[metric] = [float(f"{row.get(metric, 0.0):.4g}") for row in metrics]
    return found, f"{found['before']}, {found['after']}"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a pretrained model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    given = parser.parse_args()
    wanted = [
        {"row": row, "flags": flags, "seed": seed}
        for part, seed in itertools.product(given.parts, given.seeds)
        for row, flags in PARTS[part].items()
    ]
    work = functools.partial(train_once, given.model.resolve())
    common.run_missing(work, wanted, given.out.resolve(), given.jobs)


if __name__ == "__main__":
    main()
