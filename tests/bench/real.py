"""Trains a pretrained model on sums, with room for its answers, and counts what is cut off.

    python tests/bench/real.py --model FOLDER --out real.jsonl                  # every missing run
    python tests/bench/real.py --model FOLDER --out real.jsonl --parts coin     # of this part alone

192 of 695 questions are held out, the same ones for every seed. A finished run is a line of --out.
docs/results.md, "The real model", has the results."""

import itertools
import json
import os
import random
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
import transformers

import common
import rewards
import rollout
from long import ROWS
from support.models import end_and_pad_ids

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
    """Write 695 different sums, differences and products of small numbers, a part held out."""
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


@torch.no_grad()
def measure(model_folder: Path, folder: Path) -> dict:
    """Answer the held-out questions greedily. Return the share that is right, the share that is cut
    off, the share that is right of those that are not, and the mean length."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    rows = common.read_rows(folder / "test.jsonl")
    prompts = []
    for row in rows:
        chat = [{"role": "user", "content": row["prompt"]}]
        options = {"add_generation_prompt": True, "return_dict": False}
        prompts.append(tokenizer.apply_chat_template(chat, **options))
    uniforms = torch.zeros(len(prompts), 1, LIMIT)
    ends = end_and_pad_ids(model, tokenizer)
    answers = rollout.generate(model, prompts, uniforms, temperature=0.0, **ends)
    right = []
    for row, ids, length in zip(rows, answers.completions.tolist(), answers.lengths.tolist()):
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        right.append(float(rewards.math_lenient(text, row["answer"])))
    right, cut = torch.tensor(right), answers.truncated
    return {
        "right": float(right.mean()),
        "cut": float(cut.float().mean()),
        "right_of_whole": float(right[~cut].mean()),
        "length": float(answers.lengths.float().mean()),
    }


def train_once(run: dict) -> tuple[dict, str]:
    """Run train.py to its end. Return accuracies before and after, and metrics of each step."""
    model = Path(run["model"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_questions(folder)
        (folder / "coin.py").write_text(COIN)
        os.chdir(folder)
        flags = f"--model {model} --data train.jsonl --eval-data test.jsonl --seed {run['seed']} "
        flags += f"--max-new-tokens {LIMIT} --prompts-per-step 16 --warmup-steps 0 "
        flags += f"--eval-every 4 --eval-prompts {HELD_OUT} --eval-samples 0 --save-every 0 "
        if "--reward" not in run["flags"]:
            flags += "--reward math_lenient "
        kept = folder / "kept"  # the folder of the run, with its checkpoint
        _, metrics = common.train((flags + run["flags"]).split(), kept)
        (trained,) = kept.glob("run/checkpoints/step-*")
        found = {"row": run["row"], "seed": run["seed"]}
        found |= {"before": measure(model, folder), "after": measure(trained, folder)}
    found["solved"] = {row["step"]: row["eval_solved"] for row in metrics if "eval_solved" in row}
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
    done = {(row["row"], row["seed"]) for row in common.read_rows(given.out)}
    wanted = [
        {"model": str(given.model.resolve()), "row": row, "flags": flags, "seed": seed}
        for part, seed in itertools.product(given.parts, given.seeds)
        for row, flags in PARTS[part].items()
        if (row, seed) not in done
    ]
    common.run_each(train_once, wanted, given.out.resolve(), given.jobs)


if __name__ == "__main__":
    main()
