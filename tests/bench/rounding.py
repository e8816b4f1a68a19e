"""Measures what bfloat16 does to GSPO's ratio, in one thread: the data of docs/rounding.md.

    python tests/bench/rounding.py moves --model FOLDER --seeds 0 1   # log s within a step
    python tests/bench/rounding.py real --model FOLDER --data FOLDER  # short runs of the same model
    python tests/bench/rounding.py tiny                               # runs of the built-in policy
    python tests/bench/rounding.py vllm --model FOLDER --data FOLDER --seeds 0

Finished rows are appended to docs/runs/rounding/, so a command can be stopped and rerun. The
plan is docs/runs/rounding/PLAN.md."""

import collections
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from torch.nn import functional

import common
import gspo
import rollout as sampling
import train
from common import rounded
from long import ROWS as ROWS_OF_LONG
from support import models

FOLDER = common.ROOT / "docs/runs/rounding"
BANDS = {"3e-4, 4e-4": (3e-4, 4e-4), "3e-3": (3e-3, 3e-3), "3e-2": (3e-2, 3e-2)}

# ---- bfloat16 on a CPU that has none -------------------------------------------------------------


def rounded_linear(plain, values, weight, bias=None):
    """Multiply as a GPU does: rounded inputs, float32 sums, a rounded result. torch's own kernel
    rounds at the same places, and takes five to nine times as long on a CPU without bfloat16."""
    dtype = weight.dtype
    if torch.get_float32_matmul_precision() == "high" and not torch.is_autocast_enabled("cpu"):
        return plain(Tf32.apply(values), Tf32.apply(weight), bias)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    if dtype == torch.float32:
        return plain(values, weight, bias)
    with torch.autocast("cpu", enabled=False):
        bias = None if bias is None else bias.to(dtype).float()
        return plain(values.to(dtype).float(), weight.to(dtype).float(), bias).to(dtype)


class Tf32(torch.autograd.Function):
    """Round a float32 tensor to the ten bits of mantissa that TF32 products read."""

    @staticmethod
    def forward(ctx, values):
        return ((values.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def use_rounded_linear() -> None:
    functional.linear = functools.partial(rounded_linear, functional.linear)


# ---- log s within a step -------------------------------------------------------------------------

SUBJECTS = ("a lost dog", "a lighthouse", "two brothers", "a winter market", "an old violin")
SUBJECTS += ("a strange map", "a night train", "the last apple", "a river town", "a clever fox")
NEW_TOKENS, TRAINED_TOKENS, LENGTHS = 200, 32, (12, 64, 200)
DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": None}


def logprobs_in(model, parts: list, name: str) -> torch.Tensor:
    """Log-probs (N, T) of micro-batches, as train.py computes them with this --dtype."""
    found = []
    for part in parts:
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        dtype = DTYPES[name]
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            found.append(logprobs_of(model, part))
    return torch.cat(found)


def logprobs_of(model, part) -> torch.Tensor:
    return sampling.completion_logprobs(model, part.rollout, 1.0, part.trees, entropy="none")[0]


def sample(model, prompts: list, group_size: int, length: int, seed: int):
    """One micro-batch of completions of `length` tokens: no token ends them."""
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(len(prompts), group_size, length, generator=generator)
    rollout = sampling.generate(model, prompts, uniforms, eos_ids=[], pad_id=0)
    return sampling.MicroBatch(torch.arange(len(prompts) * group_size), rollout, trees=None)


def windows(log_ratio: torch.Tensor) -> dict[int, list[float]]:
    """Log s of every run of 12, 64 or 200 consecutive tokens, row by row."""
    return {
        length: [
            rounded(part.mean())
            for row in log_ratio
            for part in row.split(length)
            if len(part) == length
        ]
        for length in LENGTHS
    }


def load(folder: str, weights: str):
    """`rounded`: to bfloat16 numbers, as in released models. `stored`: as they come."""
    model = models.load_model(folder, "cpu")
    if weights == "rounded":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    return model


def moves(given) -> None:
    """Rows of moves.jsonl: log s of the same completions by float32, bfloat16 and float16 passes of
    the same weights after 1, 2 and 3 updates of 8 other completions each."""
    tokenizer, _ = models.inspect_model(given.model)
    ask = [{"role": "user", "content": f"Write a long story about {each}."} for each in SUBJECTS]
    encode = functools.partial(tokenizer.apply_chat_template, add_generation_prompt=True)
    prompts = [encode([each])["input_ids"] for each in ask]
    out, advantages = FOLDER / "moves.jsonl", gspo.group_advantages(torch.tensor([1.0, 0] * 4), 4)
    torch.set_num_threads(1)
    use_rounded_linear()
    cells = [("rounded", lr) for lr in (1e-6, 1e-5, 1e-4)] + [("stored", 1e-6)]
    for seed in given.seeds:
        # the same completions for both kinds of weights, and for every rate
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
        asked, model = [prompts[i] for i in order], load(given.model, "rounded")
        measured = sample(model, asked[:2], 2, NEW_TOKENS, seed)
        trained = [
            sample(model, asked[2 + 2 * k : 4 + 2 * k], 4, TRAINED_TOKENS, 100 * seed + k)
            for k in range(3)
        ]
        for weights, lr in cells:
            key = {"seed": seed, "weights": weights, "lr": lr}
            began = time.process_time()
            model = load(given.model, weights)
            for row in measure_updates(model, lr, measured, trained, advantages):
                common.add_row(out, key | row)
            print(key, f"{time.process_time() - began:.0f} CPU seconds", flush=True)


def measure_updates(model, lr: float, measured, trained: list, advantages) -> Iterator[dict]:
    """Update on one micro-batch of `trained` after another. Yield what the measured rows do."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
    with torch.no_grad():
        before = {name: logprobs_in(model, [measured], name) for name in DTYPES}
        old = [logprobs_in(model, [part], "bfloat16") for part in trained]
    for update, part in enumerate(trained, start=1):
        optimizer.zero_grad()
        logprobs = logprobs_in(model, [part], "bfloat16")
        mask = part.rollout.completion_mask
        loss, _ = gspo.gspo_loss(logprobs, old[update - 1], advantages, mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        names = list(DTYPES) if update == 3 else ["float32", "bfloat16"]
        with torch.no_grad():
            after = {name: logprobs_in(model, [measured], name) for name in names}
        row = {"update": update}
        for name in names:
            row[name] = windows(after[name] - before[name])
            if name != "float32":  # of the same weights: what a sampler of this dtype is off by
                gap = before[name] - before["float32"]
                row[f"{name} before"] = windows(gap)
                row[f"{name} token std"] = rounded(gap.std())
        yield row


# ---- runs of train.py ----------------------------------------------------------------------------

ROWS = {name: ROWS_OF_LONG[name] for name in ("gspo", "gspo, 3e-3", "gspo, 3e-2", "luspo", "grpo")}
CASES = list(itertools.product(("float32", "bfloat16"), ("trainer", "sampler")))
THREE = (CASES[0], CASES[2], CASES[3])
EVERY_ROW = [(row, *case) for row in ROWS for case in THREE]
# a float32 sampler differs from the trainer by 4e-8 a token: one row shows that it changes nothing
CELLS = {"tiny": [*EVERY_ROW, ("gspo", *CASES[1])], "real": EVERY_ROW}
CELLS["vllm"] = [("gspo", *CASES[2]), ("gspo", *CASES[3])]
TINY = "--steps 15 --eval-every 0 --eval-prompts 256"
REAL = "--steps 12 --eval-every 0 --eval-prompts 96 --prompts-per-step 8 --max-new-tokens 12 "
REAL += "--lr 1e-5 --warmup-steps 0 --reward math_lenient"


class Watch:
    """Recompute the log-probs of every update in float32, and count by update (1 to 4) the clip's
    decisions: all, those to stop, those to stop in float32, and those that differ."""

    def __init__(self):
        self.noise, self.sampler_noise = [], []
        self.counts = collections.defaultdict(lambda: [0, 0, 0, 0])
        self.score, self.logprobs_of = train.score, train.logprobs_of
        self.is_finite, self.policy_metrics = train.is_finite, gspo.policy_metrics
        train.score, train.logprobs_of = self.at_start, self.at_forward
        train.is_finite, gspo.policy_metrics = self.at_update, self.at_loss

    @torch.no_grad()
    def float32(self, part):
        with torch.autocast("cpu", enabled=False):
            return logprobs_of(self.run.models.policy, part)

    def at_start(self, run, rollout, parts):
        parts, self.run, self.update = list(parts), run, 1
        scores = self.score(run, rollout, parts)
        self.old, self.old_in_float32 = scores[0], torch.zeros_like(scores[0])
        for part in parts:
            self.old_in_float32[part.rows] = self.float32(part)
        return scores

    def at_forward(self, run, model, part, entropy="none"):
        found = self.logprobs_of(run, model, part, entropy)
        self.part, self.logprobs = part, found[0].detach()
        return found

    def at_loss(self, log_ratio, stopped, advantages, mask, per, denom):
        rows = self.part.rows
        if self.update == 1:
            log_s = gspo.completion_mean(self.logprobs - self.old[rows], mask)
            self.noise += log_s.flatten().tolist()
            log_s = self.logprobs - self.part.rollout.sampler_logprobs
            self.sampler_noise += gspo.completion_mean(log_s, mask).flatten().tolist()
        exact = self.float32(self.part) - self.old_in_float32[rows]
        if log_ratio.shape[1] == 1:
            exact, mask_of_ratio = gspo.completion_mean(exact, mask), mask.any(1, keepdim=True)
        else:
            mask_of_ratio = mask
        ratio, config = exact.exp(), self.run.config
        above, below = ratio > 1 + config.clip_high, ratio < 1 - config.clip_low
        outside = (advantages > 0) & above | (advantages < 0) & below
        said, right = stopped.expand_as(ratio)[mask_of_ratio], outside[mask_of_ratio]
        counts = len(said), int(said.sum()), int(right.sum()), int((said != right).sum())
        self.counts[self.update] = [a + b for a, b in zip(self.counts[self.update], counts)]
        return self.policy_metrics(log_ratio, stopped, advantages, mask, per, denom)

    def at_update(self, run, step, totals):
        self.update += 1
        return self.is_finite(run, step, totals)


def train_once(flags: str, simulated: bool, run: dict) -> tuple[dict, str]:
    """Run train.py to its end. Return held-out shares, what was counted, and words about them."""
    if simulated:
        use_rounded_linear()
    watch = Watch()
    given = f"{ROWS[run['row']]} --dtype {run['dtype']} --old-logprobs {run['old']} "
    given += f"--seed {run['seed']} --device cpu --eval-samples 0 --save-every 0 {flags}"
    began = time.process_time()
    before, metrics = common.train(given.split())
    noise = torch.tensor(watch.noise)
    solved = {row["step"]: row["eval_solved"] for row in metrics if "eval_solved" in row}
    found = {
        "solved": {0: before} | solved,
        "reward": [round(row["reward"], 4) for row in metrics],
        "clip_fraction": [rounded(row.get("clip_fraction", 0.0)) for row in metrics],
        "log s std at the first update": rounded(noise.std()),
        "log s |max| at the first update": rounded(noise.abs().max()),
        "sampler: log s at the first update": [rounded(each) for each in watch.sampler_noise],
        "decisions by update: all, stopped, stopped in float32, different": dict(watch.counts),
        "cpu_seconds": round(time.process_time() - began),
    }
    return found, str(found["solved"])


def rounded_copy(source: str, folder: str) -> str:
    """Save the model with its weights rounded to bfloat16 numbers, and its tokenizer."""
    load(source, "rounded").save_pretrained(folder)
    tokenizer, _ = models.inspect_model(source)
    tokenizer.save_pretrained(folder)
    return folder


def runs(given) -> None:
    """Rows of tiny.jsonl, real.jsonl or vllm.jsonl, all cells of one seed before the next."""
    key, flags = {}, TINY
    with tempfile.TemporaryDirectory() as folder:
        if given.part != "tiny":
            key = {"lr": 1e-5, "weights": "rounded", "steps": 12}
            flags = f"{REAL} --model {rounded_copy(given.model, folder)} "
            flags += "--sampler vllm " if given.part == "vllm" else ""
            flags += f"--data {given.data}/train.jsonl --eval-data {given.data}/test.jsonl"
        wanted = [
            key | {"seed": seed, "row": row, "dtype": dtype, "old": old}
            for seed, (row, dtype, old) in itertools.product(given.seeds, CELLS[given.part])
        ]
        work = functools.partial(train_once, flags, given.part != "vllm")
        common.run_missing(work, wanted, FOLDER / f"{given.part}.jsonl", jobs=1, start="spawn")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("part", choices=("moves", "real", "tiny", "vllm"))
    parser.add_argument("--model", help="folder of a pretrained model")
    parser.add_argument("--data", type=Path, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = parser.parse_args()
    moves(given) if given.part == "moves" else runs(given)


if __name__ == "__main__":
    main()
