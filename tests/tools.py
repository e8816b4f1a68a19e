"""Helpers of several test files: a small run of train.py, models of random weights, spies.

Most runs are train.main in this process, with a random policy of 18 characters, whose completions
end by chance after 1 to some 30 tokens. The reward `even` is the share of even digits: it hardly
ever gives a group equal rewards. The working directory (`place` in conftest.py) has the policies in
models and the rewards in pay.py.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import math
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gspo
import train

ROOT = Path(train.__file__).parent

# ------------------------------------------------------------------------------ a small run

BASE = "--model models/tiny --reward pay.py:even"
SMALL = (
    "--warmup-steps 0 --lr 1e-3 --steps 2 --prompts-per-step 4 --group-size 4 --max-new-tokens 8 "
    "--eval-prompts 8 --eval-samples 0 --eval-every 0 --name run"
)
PAY = '''
def even(completion, answer):
    return sum(c in "02468" for c in completion) / (len(completion) or 1)

def always(completion, answer):
    return 0.7

def never(completion, answer):
    return 0.0

def by_prompt(completion, answer, prompt):
    """1 for prompts that start with 1, 0 with 2, and something in between for the rest."""
    return {"1": 1.0, "2": 0.0}.get(prompt[0], even(completion, answer))

def far(completion, answer):
    return 2 + 2 * completion[:1].isdigit()

def first(completion, answer, prompt):
    """1 for prompts that start with 1, and for completions that start with an even digit."""
    return float(prompt[0] == "1" or completion[:1] in ("0", "2", "4"))

def broken(completion, answer):
    if len(completion) % 2:
        raise ArithmeticError("\\x1b[31mboom")
    return 0.0

def steps(completion, answer):
    return [(1, float(completion[:1] in "02468")), (len(completion), even(completion, answer))]
'''


def furnish(folder, models):
    """Put the models, the rewards and rows.jsonl into the working directory of a run: prompts on 1,
    which pay.py:by_prompt finds right, on 2, wrong, and on 3."""
    Path(folder, "models").symlink_to(models)
    Path(folder, "pay.py").write_text(PAY)
    prompts = [f"{1 + i % 3}+{i}=" for i in range(12)]
    rows = [{"prompt": prompt, "answer": "0"} for prompt in prompts]
    write_rows(Path(folder, "rows.jsonl"), rows)


def command_line(runs, flags="", *more, small=True) -> list[str]:
    """Arguments of train.main: the flags, split at spaces, and more, as they are."""
    words = SMALL.split() if small else []
    return [*words, "--runs", str(runs), *flags.split(), *map(str, more)]


def launch(runs, flags="", *more, small=True):
    """Run train.main on the small run. Return its status, its output and the folder of the run."""
    arguments = command_line(runs, flags, *more, small=small)
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = train.main(arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return SimpleNamespace(
        status=status, out=out.getvalue(), err=err.getvalue(), folder=Path(runs, "run")
    )


def good(runs, flags="", *more, small=True):
    """The same, which must end well."""
    result = launch(runs, flags, *more, small=small)
    assert result.status == 0, result.err
    return result


def refused(runs, flags="", *more, small=True) -> str:
    """The one sentence with which train.main refuses, at exit status 2."""
    result = launch(runs, flags, *more, small=small)
    assert result.status == 2, result
    assert result.err.count("\n") == 1 and result.err.startswith("error: "), result.err
    return result.err.strip()


# ------------------------------------------------------------------------------ files of a run


def strict(text):
    """JSON as the standard has it: NaN and Infinity, which python would take, are no JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON: {text[:2000]}")

    return json.loads(text, parse_constant=refuse)


def metrics(folder, name="metrics") -> list[dict]:
    """The rows of metrics.jsonl, or of another file of a run."""
    return [strict(line) for line in Path(folder, f"{name}.jsonl").read_text().splitlines()]


def timeless(folder) -> list[dict]:
    """The rows of metrics.jsonl without times, speed and memory."""
    clock = re.compile("seconds_|tokens_per_second|memory_gb")
    return [{name: row[name] for name in row if not clock.match(name)} for row in metrics(folder)]


def newest(folder) -> Path | None:
    """The newest checkpoint."""
    found = Path(folder).glob("checkpoints/step-*")
    return max(found, key=lambda path: int(path.name[5:]), default=None)


def digests(folder) -> dict[str, str]:
    """Path -> hash of every tensor file of the newest checkpoint."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in newest(folder).rglob("*.safetensors")
    }


def same_run(one, other):
    """Every metric, sample, answer and final tensor of two runs is the same, to the bit."""
    assert timeless(one) == timeless(other)
    assert digests(one) == digests(other)
    for name in ("samples.jsonl", "evaluations.jsonl"):
        assert Path(one, name).read_text() == Path(other, name).read_text()


def distance(one, other, file="model.safetensors") -> float:
    """The largest difference of numbers in two folders' tensors, which have the same names."""
    tensors, others = (load_file(Path(folder, file)) for folder in (one, other))
    assert tensors.keys() == others.keys()
    return max(float((tensors[name] - others[name]).abs().max()) for name in tensors)


def write_rows(path, rows) -> Path:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(path)


# ------------------------------------------------------------------------------ models

CHARACTERS = "0123456789+*=;#"
SIZES = dict(vocab_size=18, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
OTHER = dict(max_position_embeddings=512, tie_word_embeddings=True)
SHAPE = SIZES | HEADS | OTHER | dict(pad_token_id=0, eos_token_id=1)
MIXTURE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
EXPERTS = SHAPE | MIXTURE | dict(num_hidden_layers=2)


def character_tokenizer():
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    each = tokenizers.Regex(r"[\s\S]")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(each, "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def byte_tokenizer(merges=(), **special):
    """One token a byte, as byte-level BPE has it, and one for each pair of merges."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [*special.values(), *sorted(level.alphabet()), *map("".join, merges)]
    numbers = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, list(merges)))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def random_policy(folder, config, tokenizer=None) -> Path:
    """A policy in Hugging Face layout, with weights so large that it has opinions."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    (tokenizer or character_tokenizer()).save_pretrained(folder)
    return folder


def copy_of_project(folder) -> Path:
    """The project as a user has it, in another folder."""
    left = shutil.ignore_patterns(".*", "__pycache__", "runs", "shared")
    return shutil.copytree(ROOT, folder, ignore=left)


def copied(source, folder, without=(), **files) -> Path:
    """A copy of a model folder without some files and with others, name__json -> content."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name not in without:
            shutil.copy(path, folder)
    for key, content in files.items():
        path = folder / key.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


# ------------------------------------------------------------------------------ spies


def watched(monkeypatch, owner, name, change=None) -> list[tuple]:
    """Keep every call of owner.name from now on: (positional, keyword, result).

    change(number of the call, result) may replace a result."""
    calls, function = [], getattr(owner, name)

    @functools.wraps(function)
    def stand_in(*positional, **keyword):
        result = function(*positional, **keyword)
        if change is not None:
            result = change(len(calls), result)
        calls.append((positional, keyword, result))
        return result

    monkeypatch.setattr(owner, name, stand_in)
    return calls


def spied(monkeypatch, algorithm, field, change=None) -> list[tuple]:
    """The calls of a function that a row of ALGOS names."""
    row = gspo.ALGOS[algorithm]
    functions = SimpleNamespace(**{field: getattr(row, field)})
    calls = watched(monkeypatch, functions, field, change)
    monkeypatch.setitem(gspo.ALGOS, algorithm, dataclasses.replace(row, **vars(functions)))
    return calls


@contextlib.contextmanager
def gradients():
    """The gradients of every optimizer step, each a list with one tensor per parameter."""
    kept = []

    def keep(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kept.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters])

    hook = register_optimizer_step_pre_hook(keep)
    try:
        yield kept
    finally:
        hook.remove()


def rows_of(update) -> torch.Tensor:
    """Indices into the batch of the completions that an update learns from, in the order of its
    micro-batches."""
    return torch.cat([torch.tensor([], dtype=torch.long), *[part.rows for part in update.parts]])


# ------------------------------------------------------------------------------ advantages by hand


def z_scores(values):
    """(x - mean) / (std + 1e-6) in floats, ddof 1. Of equal values 0."""
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))
    return [0.0 if len(set(values)) == 1 else (x - mean) / (std + 1e-6) for x in values]


def centred(values):
    return [x - math.fsum(values) / len(values) for x in values]


def by_group(values, size, change):
    return [x for i in range(0, len(values), size) for x in change(values[i : i + size])]
