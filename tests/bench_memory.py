"""Memory of training: counted for models of any size, and measured on the machine at hand.

python tests/bench_memory.py                        # the table of memory.md: some minutes
python tests/bench_memory.py --write                # the same, put into tests/memory.md
python tests/bench_memory.py --measure small        # trains 25 M random weights on this machine
python tests/bench_memory.py --measure 0.6B --lora-rank 16    # of that shape: wants a GPU

Counted are the bytes of all floating-point tensors that live at a time (counting.py), while our own
functions sample, evaluate, score and train in bfloat16 autocast, as on a GPU with its fused
attention. Not counted: CUDA itself, fragmentation, and a kernel's own workspace; ROOM is for them.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import gspo  # noqa: E402
import rewards  # noqa: E402
import rollout  # noqa: E402
import train  # noqa: E402
from counting import Counting  # noqa: E402

GB = 1e9
CARDS = (24, 80)  # GB
ROOM = 1.5  # GB of a card that we do not count on
CACHE_GB = 2  # keys and values while sampling, in the table: with less, few completions run at once
LORA_RANK = 16
PROMPT, LONGEST = 200, 1024  # tokens
MANY = 24  # prompts: a quarter of CACHE_GB, which is theirs, has room for 21 of the 0.6B model's

COMMON = dict(
    vocab_size=151936,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=40960,
)
SHAPES = {  # of Qwen3
    "0.6B": COMMON | dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28),
    "1.7B": COMMON | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28),
    "4B": COMMON
    | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "8B": COMMON
    | dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "small": dict(
        vocab_size=18,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        head_dim=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    ),
    "tiny": dict(
        vocab_size=18,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    ),
}
PUBLISHED = [name for name in SHAPES if name.endswith("B")]


# ------------------------------------------------------------------------------ counted


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
    """What rollout.py does on a GPU alone, but graphs, which share the memory of a step; steps are
    of all slots and attend to all positions."""
    pace = rollout.Pace(span=2**20, steps=1, rows=2**20, graphs=False)
    with (
        mock.patch.dict(rollout.PACE, cpu=pace),
        mock.patch.object(rollout, "EXPAND_HEADS", {"cpu"}),
    ):
        yield


def count_memory(shape: dict, *flags: str) -> Memory:
    """What a run with these flags of train.py holds at most, phase by phase."""
    given = ["--model", str(ROOT), "--device", "cpu", "--dtype", "bfloat16", *flags]
    with Counting() as counting, as_on_a_gpu():
        run = new_run(train.complete(train.parse_flags(given)), shape)
        weights = counting.bytes_now
        batch = one_update(run)
        updating = counting.peak_of(
            lambda: train.accumulate_gradients(run, batch, batch.updates[0])
        )

        before = counting.bytes_now
        run.optimizer.step()
        moments = counting.bytes_now - before
        train.forget_gradients(run)
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
    """Its three policies and its optimiser as train.py makes them, of a model without numbers."""
    policy = AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.float32).eval()
    nothing = dict(folder=None, lock=None, checkpoint=None, prompts=None, held_out=None)
    nothing |= dict(reward=None, reward_model=None, replies=None)
    run = train.Run(
        config=config,
        algorithm=gspo.ALGOS[config.algo],
        ranks=train.Ranks(),
        done=0,
        tokenizer=SimpleNamespace(eos_token_id=0, pad_token_id=0),
        **nothing,
    )
    # numbers that are not there cannot be compared
    with (
        mock.patch.object(rollout, "load_model", lambda *args, **kwargs: policy),
        mock.patch.object(train, "check_model", lambda run: None),
        mock.patch.object(train, "check_dtype", lambda run: None),
    ):
        train.load_weights(run, source=None)
    return run


def one_update(run: train.Run) -> train.Batch:
    """Two micro-batches of a group each, as long as --micro-batch-tokens lets it be: when the
    second runs, the gradients of the first are there."""
    size = run.config.group_size
    length = min(LONGEST, (run.config.micro_batch_tokens - PROMPT) // size)
    rows = torch.arange(2 * size)
    prompts = 5 + rows[:, None] // size  # groups differ in it
    tokens = prompts.repeat(1, PROMPT + length)
    tokens[:, PROMPT] = 2 + rows % size  # completions differ from their first token on
    samples = rollout.Rollout(
        tokens=tokens,
        prompt_lengths=torch.full_like(rows, PROMPT),
        lengths=torch.full_like(rows, length),
        sampler_logprobs=torch.zeros(len(rows), length),
        truncated=torch.zeros_like(rows, dtype=torch.bool),
    )
    zeros = torch.zeros(len(rows), length)
    update = train.Update(rows, [train.MicroBatch(part) for part in rows.split(size)])
    return train.Batch(
        step=1,
        samples=samples,
        rows=[],
        texts=[],
        scores=[],
        rewards=torch.zeros(len(rows)),
        mask=samples.completion_mask,
        correct=torch.zeros(2, size),
        live=torch.ones_like(samples.truncated),
        updates=[update, update],  # the first of a step is not scored before
        advantages=torch.zeros(len(rows)),
        old_logprobs=zeros,
        ref_logprobs=zeros,
        values=zeros,
        new_logprobs=zeros.clone(),
    )


def sample(run: train.Run) -> None:
    """More prompts than have room at once, so that an evaluation or a rollout takes no more.

    Every token that is sampled is 0 (`some_integers`), and so each completion ends at once: it
    makes no difference to the memory of slots, and all prompts are read."""
    rollout.generate(
        run.old_policy,
        [[2 + i % 8, 2 + i // 8] + [2] * (PROMPT - 2) for i in range(MANY)],  # no two begin alike
        group_size=1,
        max_new_tokens=LONGEST,
        eos_ids=[0],
        pad_id=0,
        cache_gb=run.config.cache_gb,
    )


def cache_bytes_per_token(config: Qwen3Config) -> int:
    """Keys and values of one token in bfloat16, while sampling only."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2


# ------------------------------------------------------------------------------ the table

LESS = "--gradient-checkpointing"  # the flag that needs less memory
HEAD = [
    "",
    "trained",
    "weights",
    "AdamW",
    "gradients",
    f"sampling, {CACHE_GB} GB of keys and values",
    "updating",
    f"updating, `{LESS}`",
    *[f"{card} GB" for card in CARDS],
]


def memory_table(names: list[str] | None = None) -> str:
    """Markdown rows in GB, for micro-batches of 4,096 tokens; whether it fits, with which flag."""
    lines = [HEAD, ["---"] * len(HEAD)]
    for name in names or PUBLISHED:
        for trained, flags in (("all", []), ("LoRA", ["--lora-rank", str(LORA_RANK)])):
            lines.append([f"Qwen3-{name}", trained, *cells(SHAPES[name], flags)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cells(shape: dict, flags: list[str]) -> list[str]:
    flags = [*flags, "--micro-batch-tokens", "4096", "--cache-gb", str(CACHE_GB)]
    memory, less = count_memory(shape, *flags), count_memory(shape, *flags, LESS)
    numbers = [memory.weights, memory.moments, memory.gradients, memory.sampling]
    numbers += [memory.updating, less.updating]
    fits = [which_fits(card, memory, less) for card in CARDS]
    return [f"{number / GB:.1f}" for number in numbers] + fits


def which_fits(card: float, memory: Memory, less: Memory) -> str:
    room = (card - ROOM) * GB
    if memory.peak <= room:
        return "yes"
    if less.peak <= room:
        return f"with `{LESS}`"
    return "no"


def write_table(path: Path, table: str) -> None:
    """Replaces what stands between the markers."""
    begin, end = "<!-- memory -->\n", "<!-- end -->"
    text = path.read_text()
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    assert after, f"{path}: expected {begin.strip()} and {end}"
    path.write_text(before + begin + table + "\n" + end + after)


# ------------------------------------------------------------------------------ measured


@dataclasses.dataclass
class Measured:
    algo: str
    parameters: int
    process_gb: float
    device_gb: float | None  # None: no GPU
    row: dict  # the metrics of the last step

    def __str__(self) -> str:
        seconds = {
            name.removeprefix("seconds_"): round(value, 3)
            for name, value in self.row.items()
            if name.startswith("seconds_")
        }
        device = ""
        if self.device_gb is not None:
            device = f"of the GPU {self.device_gb:.2f} GB, "
        return (
            f"{self.algo}, {self.parameters / 1e6:.0f} M parameters: peak of the process "
            f"{self.process_gb:.2f} GB, {device}seconds of a step {seconds}, "
            f"{self.row['tokens_per_second']:.0f} tokens a second"
        )


# pays differently for almost every text: where all rewards are equal, there is nothing to train
REWARD = "def by_text(completion, answer):\n    return sum(completion.encode()) % 7 / 6\n"


def measure(name: str, algo: str, extra: tuple[str, ...] = ()) -> Measured:
    """Trains random weights of a shape for two steps in a process of its own: nothing is learned,
    but memory and seconds are those of a real model of that shape."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = save_random_model(SHAPES[name], f"{folder}/model")
        Path(folder, "pay.py").write_text(REWARD)
        small = name not in PUBLISHED
        flags = {
            "--algo": algo,
            "--model": f"{folder}/model",
            "--reward": f"{folder}/pay.py:by_text",
            "--steps": 2,
            "--eval-samples": 0,
            "--eval-prompts": 8,
            "--max-new-tokens": 28 if small else LONGEST,
            "--prompts-per-step": 8 if small else 32,
            "--micro-batch-tokens": 1024 if small else 4096,
            "--cache-gb": CACHE_GB,
            "--runs": folder,
            "--name": "run",
        }
        words = [str(word) for pair in flags.items() for word in pair]
        process = subprocess.Popen([*interpreter(), str(ROOT / "train.py"), *words, *extra])
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            sys.exit(f"training {name} ended with status {os.waitstatus_to_exitcode(status)}")
        row = json.loads(Path(folder, "run", "metrics.jsonl").read_text().splitlines()[-1])
        return Measured(algo, parameters, usage.ru_maxrss / 1e6, row["memory_gb"] or None, row)


def interpreter() -> list[str]:
    """Of a process like this one: on the pretended device, where this one is."""
    pretended = torch.cuda.is_available() and torch.cuda.get_device_name() == "pretended"
    return [sys.executable, str(ROOT / "tests/pretend.py")] if pretended else [sys.executable]


def save_random_model(shape: dict, folder: str) -> int:
    """A model of random weights, with the tokenizer of the built-in policy; its parameters."""
    built_in = train.built_in_policy(rewards.TASKS["arithmetic"], "tiny")
    tokenizer = AutoTokenizer.from_pretrained(built_in)
    ends = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, **ends))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", choices=list(SHAPES), help="train this shape")
    parser.add_argument("--algos", nargs="+", default=["gspo"])
    parser.add_argument("--shapes", nargs="+", choices=PUBLISHED, help="rows of the table")
    parser.add_argument("--write", action="store_true", help="put the table into tests/memory.md")
    arguments, extra = parser.parse_known_args()
    if extra and not arguments.measure:
        parser.error(f"{extra[0]}: flags of train.py go with --measure")
    transformers.utils.logging.disable_progress_bar()
    if arguments.measure:
        for algo in arguments.algos:
            print(measure(arguments.measure, algo, tuple(extra)), flush=True)
        return
    table = memory_table(arguments.shapes)
    print(table)
    if arguments.write:
        write_table(ROOT / "tests/memory.md", table)


if __name__ == "__main__":
    main()
