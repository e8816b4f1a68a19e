"""Memory of training: counted for models of any size, and measured on the machine at hand.

    python tests/bench/bench_memory.py                  # the table of docs/memory.md: some minutes
    python tests/bench/bench_memory.py --write          # the same, put into the page
    python tests/bench/bench_memory.py --measure 0.6B --lora-rank 16    # of that shape: wants a GPU

It counts the bytes of all floating-point tensors that live at a time (counting.py). Meanwhile our
own functions sample, score and train in bfloat16 autocast, as on a GPU with its fused attention.
CUDA itself, fragmentation and a kernel's own workspace are not counted. ROOM is for them."""

import argparse
import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import gspo  # noqa: E402
import rollout  # noqa: E402
import train  # noqa: E402
from counting import Counting  # noqa: E402
from support import data, tasks  # noqa: E402
from support.ranks import Ranks  # noqa: E402

GB = 1e9
CARDS = (24, 80)  # GB
ROOM = 1.5  # GB of a card that we do not count on
CACHE_GB = 2  # KV caches while sampling, in the table. With less, few completions run at once
LORA_RANK = 16
LIMITS = ["--micro-batch-tokens", "4096", "--cache-gb", str(CACHE_GB)]
PROMPT, LONGEST = 200, 1024  # tokens
MANY = 24  # prompts: CACHE_GB has room for 14 completions of the 0.6B model, of others for fewer


NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NAMES += ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
SIZES = {  # of Qwen3, in the order of NAMES
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "4B": (2560, 9728, 36, 32, 8, 128, 151936, True),
    "8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
    "tiny": (64, 128, 2, 4, 2, 16, 18, True),
}
SHAPES = {name: dict(zip(NAMES, sizes)) for name, sizes in SIZES.items()}
PUBLISHED = [name for name in SHAPES if name.endswith("B")]


# ---- counted -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Memory:
    """Bytes on the device. The last three are peaks: they have weights and moments in them."""

    parameters: int  # their number
    weights: int  # policy and sampler
    moments: int  # AdamW's
    gradients: int
    sampling: int
    scoring: int  # without gradients
    updating: int  # a micro-batch that is not the first: gradients are there

    @property
    def peak(self) -> int:
        return max(self.sampling, self.scoring, self.updating)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Run without a check of the scorer, and with the updates that are given."""
    with (
        mock.patch.object(rollout, "check_scorer", lambda *_: True),
        mock.patch.object(train, "plan", lambda run, batch: batch.updates),
    ):
        yield


def count_memory(shape: dict, *flags: str) -> Memory:
    """Return the most bytes of a run with these flags of train.py, phase by phase."""
    given = ["--model", str(ROOT), "--device", "cpu", "--dtype", "bfloat16", *flags]
    with Counting() as counting, as_on_a_gpu():
        run = new_run(train.parse_flags(given), shape)
        weights = counting.bytes_now
        batch = one_update(run)
        [update] = batch.updates
        updating = counting.peak_of(lambda: train.accumulate_gradients(run, batch, update))

        before = counting.bytes_now
        run.optimizer.step()
        moments = counting.bytes_now - before
        run.optimizer.zero_grad()
        gradients = before + moments - counting.bytes_now

        return Memory(
            parameters=run.old_policy.num_parameters(),
            weights=weights,
            moments=moments,
            gradients=gradients,
            sampling=counting.peak_of(lambda: sample(run)),
            scoring=counting.peak_of(lambda: train.freeze(run, batch)),
            updating=updating + moments,
        )


def new_run(config: train.Config, shape: dict) -> train.Run:
    """Make the policies and the optimiser as train.py does, of a model without numbers."""
    policy = AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.float32).eval()
    run = train.Run(
        config=config,
        algorithm=gspo.ALGOS[config.algo],
        ranks=Ranks(),
        tokenizer=None,
        eos_ids=[0],
        pad_id=0,
        stops=None,
        reward=None,
        lenient=None,
        prompts=iter([]),
        held_out=[{data.IDS: [1]}],
        policy=policy,
        **train.frozen_policies(config, policy),
    )
    train.plug_in(run)
    run.optimizer = train.make_optimizer(run)
    return run


def one_update(run: train.Run) -> train.Batch:
    """Two micro-batches of a group each, as long as --micro-batch-tokens lets it be: when the
    second runs, the gradients of the first are there."""
    size = run.config.group_size
    length = min(LONGEST, (run.config.micro_batch_tokens - PROMPT) // size)
    rows = torch.arange(2 * size)
    prompts = [[5 + row // size] * PROMPT for row in rows.tolist()]  # groups differ in them
    tokens = (2 + rows % size)[:, None].repeat(1, length)  # completions from their first token on
    zeros = torch.zeros(len(rows), length)
    lengths = torch.full_like(rows, length)
    samples = rollout.Rollout.of(prompts, tokens, zeros, lengths, lengths > 0, pad_id=0)
    batch = train.Batch(
        step=1,
        rollout=samples,
        samples=[],
        mask=samples.completion_mask,
        dead=torch.zeros(2, dtype=torch.bool),
        correct=None,
        faults=[],
    )
    parts = []
    for part in rows.split(size):
        [each] = rollout.micro_batches(samples[part], tokens.numel() + PROMPT * len(rows), True)
        parts.append(each._replace(rows=part[each.rows]))
    batch.updates = [train.Update(rows, rows, parts)]
    batch.advantages = torch.zeros(len(rows))
    batch.old_logprobs = batch.ref_logprobs = batch.values = batch.returns = zeros
    batch.new_logprobs = zeros.clone()
    return batch


def sample(run: train.Run) -> None:
    """More prompts than have room at once, so that an evaluation or a rollout takes no more.

    Every token that is sampled is 0 (`some_integers`), and so each completion ends at once: it
    makes no difference to the memory of slots, and all prompts are read."""
    prompts = [[2 + i % 8, 2 + i // 8] + [2] * (PROMPT - 2) for i in range(MANY)]
    uniforms = torch.zeros(MANY, 1, LONGEST)
    limits = {"cache_gb": run.config.cache_gb, "eos_ids": run.eos_ids, "pad_id": run.pad_id}
    run.generate(run.old_policy, prompts, uniforms, **limits)


# ---- the table -----------------------------------------------------------------------------------

LESS = "--gradient-checkpointing"  # the flag that needs less memory
HEAD = ["", "trained", "weights", "AdamW", "gradients"]
HEAD += [f"sampling, {CACHE_GB} GB of KV cache", "updating", f"updating, `{LESS}`"]
HEAD += ["a reference (KL) adds", "a critic (PPO) adds", *[f"{card} GB" for card in CARDS]]


def memory_table(names: list[str]) -> str:
    """Return Markdown rows in GB, and whether a card has room, with which flag."""
    lines = [HEAD, ["---"] * len(HEAD)]
    for name in names:
        for trained, flags in (("all", []), ("LoRA", ["--lora-rank", str(LORA_RANK)])):
            memory = count_memory(SHAPES[name], *LIMITS, *flags)
            less = count_memory(SHAPES[name], *LIMITS, *flags, LESS)
            numbers = [memory.weights, memory.moments, memory.gradients, memory.sampling]
            # a frozen bfloat16 copy, and float32 weights, gradients and AdamW's moments
            reference, critic = 2 * memory.parameters, 16 * memory.parameters
            numbers += [memory.updating, less.updating, reference, critic]
            cells = [f"{number / GB:.1f}" for number in numbers]
            for card in CARDS:
                ways = ((memory, "yes"), (less, f"with `{LESS}`"))
                room = (card - ROOM) * GB
                cells.append(next((way for each, way in ways if each.peak <= room), "no"))
            lines.append([f"Qwen3-{name}", trained, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---- measured ------------------------------------------------------------------------------------

# almost every text gets another reward: where all rewards are equal, there is nothing to train
REWARD = "def by_text(completion, answer):\n    return sum(completion.encode()) % 7 / 6\n"


def measure(name: str, *extra: str) -> dict:
    """Train random weights of a shape for two steps in a process of its own. Return the last row of
    metrics: memory and seconds are those of a real model of that shape."""
    with tempfile.TemporaryDirectory() as folder:
        # random weights, with the tokenizer of the built-in policy
        built_in = tasks.built_in_policy(tasks.TASKS["arithmetic"], "tiny")
        tokenizer = AutoTokenizer.from_pretrained(built_in)
        ends = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPES[name], **ends))
        model.save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        Path(folder, "pay.py").write_text(REWARD)
        flags = f"--model {folder}/model --reward {folder}/pay.py:by_text --steps 2 "
        flags += f"--eval-samples 0 --eval-prompts 8 --runs {folder} --name run "
        flags += f"--max-new-tokens {LONGEST} --prompts-per-step 32 {' '.join(LIMITS)}"
        if name == "tiny":
            flags += " --max-new-tokens 28 --prompts-per-step 8 --micro-batch-tokens 1024"
        command = [sys.executable, str(ROOT / "train.py"), *flags.split(), *extra]
        subprocess.run(command, check=True)
        return json.loads(Path(folder, "run/metrics.jsonl").read_text().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", choices=list(SHAPES), help="train this shape")
    parser.add_argument("--write", action="store_true", help="put the table into docs/memory.md")
    arguments, extra = parser.parse_known_args()
    transformers.utils.logging.disable_progress_bar()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, *extra), indent=1))
        return
    table = memory_table(PUBLISHED)
    print(table)
    if arguments.write:
        path = ROOT / "docs/memory.md"
        pattern = r"(<!-- memory -->\n).*?(<!-- end -->)"
        path.write_text(re.sub(pattern, rf"\1{table}\n\2", path.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
