"""The specification of train.py: what it refuses, the loop, runs, resuming, faults, the budgets.

Every run here is a real one, of a policy with 0.3 M parameters that was warm-started for a moment,
mostly by train.main in this process. Its reward is `even`, the share of even digits in a
completion: it pays differently for almost every sample, so hardly any group is dead.
"""

import ast
import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import gspo
import rewards
import rollout
import train

ROOT = Path(train.__file__).parent
SMALL = ("--lr 1e-3 --warmup-steps 0 --steps 2 --prompts-per-step 4 --group-size 4 "
         "--max-new-tokens 8 --eval-prompts 8 --eval-samples 0 --eval-every 0 --name run")
REWARDS = '''
def even(completion, answer):
    return sum(c in "02468" for c in completion) / (len(completion) or 1)

def always(completion, answer):
    return 0.7

def by_prompt(completion, answer, prompt):
    """1 for prompts that start with 1, 0 with 2, and something in between for the rest."""
    return {"1": 1.0, "2": 0.0}.get(prompt[0], even(completion, answer))

def broken(completion, answer):
    raise ArithmeticError("\\x1b[31mboom")

def steps(completion, answer):
    return [(1, float(completion[:1] in "02468")), (len(completion), even(completion, answer))]
'''


# ------------------------------------------------------------------------------ tools


def launch(runs, flags="", *more, small=True):
    """train.main on the small run; what it returned and printed, and the folder of the run."""
    arguments = f"{SMALL * small} --runs {runs} {flags}".split() + [*map(str, more)]
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = train.main(arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return SimpleNamespace(status=status, out=out.getvalue(), err=err.getvalue(),
                           folder=Path(runs, "run"))


def good(runs, flags="", *more, small=True):
    result = launch(runs, flags, *more, small=small)
    assert result.status == 0, result.err
    return result


def strict(text):
    """JSON as the standard has it: NaN and Infinity, which python would take, are no JSON."""
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON: {text[:2000]}")
    return json.loads(text, parse_constant=refuse)


def metrics(folder):
    return [strict(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def timeless(folder):
    """The rows of metrics.jsonl without what a clock says."""
    return [{name: value for name, value in row.items()
             if not name.startswith("seconds_") and name != "tokens_per_second"}
            for row in metrics(folder)]


def newest(folder):
    found = Path(folder).glob("checkpoints/step-*")
    return max(found, key=lambda path: int(path.name[5:]), default=None)


def digests(folder):
    """Path -> hash of every tensor file of the newest checkpoint, and its state."""
    checkpoint = newest(folder)
    files = [*checkpoint.rglob("*.safetensors"), checkpoint / "trainer" / "state.json"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files}


def same_run(one, other):
    assert timeless(one) == timeless(other)
    assert digests(one) == digests(other)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The policies are so small that a second thread costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the built-in policies, warm-started for a moment, and the rewards above."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "pay.py").write_text(REWARDS)
    (folder / "tiny").symlink_to(built("tiny", 40, folder), target_is_directory=True)
    return folder


def built(name, steps, home):
    """Folder of a built-in policy, made as a first run of --model NAME makes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        patch.setattr(train, "WARM_STEPS", steps)
        good(home / "first", f"--model {name} --steps 1 --name {name}")
    return next((home / "cache" / "gspo").glob(f"{name}-[0-9a-f]*"))


@pytest.fixture(scope="module")
def moe(home):
    return built("tiny-moe", 8, home)


@pytest.fixture(autouse=True)
def place(home, monkeypatch):
    """Tests stand in that folder, so that flags are short, and --model tiny is found at once."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setattr(train, "WARM_STEPS", 40)


BASE = "--model ./tiny --reward pay.py:even"


@pytest.fixture
def seen(monkeypatch):
    """Keeps the run and the batch of every step, as they come to the updates."""
    kept = SimpleNamespace(run=None, batches=[])
    improve = train.improve

    @functools.wraps(improve)
    def keep(run, batch, *rest):
        kept.run = run
        kept.batches.append(batch)
        return improve(run, batch, *rest)

    monkeypatch.setattr(train, "improve", keep)
    return kept


class Calls(list):
    """Stands in for a function and keeps every call of it: (positional, keyword, result)."""

    def __init__(self, function, change=None):
        super().__init__()

        @functools.wraps(function)
        def stand_in(*positional, **keyword):
            result = function(*positional, **keyword)
            if change is not None:
                result = change(len(self), result)
            self.append((positional, keyword, result))
            return result
        self.stand_in = stand_in


@pytest.fixture
def losses(monkeypatch):
    """losses(algorithm, change=None): the calls of its loss, whose results `change` may replace."""
    def spy(algorithm, change=None):
        row = gspo.ALGOS[algorithm]
        calls = Calls(row.loss, change)
        monkeypatch.setitem(gspo.ALGOS, algorithm, dataclasses.replace(row, loss=calls.stand_in))
        return calls
    return spy


@contextlib.contextmanager
def gradients():
    """The gradients of every optimiser step, each a list with one tensor per parameter."""
    kept = []

    def keep(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kept.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters])

    hook = register_optimizer_step_pre_hook(keep)
    try:
        yield kept
    finally:
        hook.remove()


# ------------------------------------------------------------------------------ bad input


def copied(home, name, without=(), **files):
    """A model folder without some files and with others, name__json -> content."""
    folder = home / name
    folder.mkdir()
    for path in (home / "tiny").iterdir():
        if path.name not in without:
            shutil.copy(path, folder)
    for key, content in files.items():
        path = folder / key.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


@pytest.fixture(scope="module")
def wrong_models(home):
    """Model folders that cannot be trained, each for a reason of its own."""
    weights = "model.safetensors"
    copied(home, "weightless", [weights])
    copied(home, "pickled", [weights], pytorch_model__bin=b"\x80\x02}q\x00.")
    copied(home, "tokenless", ["tokenizer.json", "tokenizer_config.json"])
    copied(home, "torn-config", config__json=b'{"model_type": ')
    copied(home, "torn-tokenizer", tokenizer__json=b'{"version": ')
    copied(home, "unheard-of", config__json={"model_type": "nonsense-9000"})
    bert = transformers.BertConfig(vocab_size=18, hidden_size=8, num_attention_heads=1,
                                   num_hidden_layers=1, architectures=["BertForMaskedLM"])
    copied(home, "bert", config__json=bert.to_dict())
    copied(home, "t5", config__json=transformers.T5Config(vocab_size=18).to_dict())
    settings = json.loads((home / "tiny" / "tokenizer_config.json").read_text())
    endless = {name: value for name, value in settings.items() if name != "eos_token"}
    copied(home, "endless", tokenizer_config__json=endless)
    copied(home, "strict-chat", tokenizer_config__json=settings, chat_template__jinja=(
        b"{% for m in messages %}{% if m.role == 'system' %}"
        b"{{ raise_exception('System role not supported') }}{% endif %}{{ m.content }}"
        b"{% endfor %}"))
    config = json.loads((home / "tiny" / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    folder = copied(home, "own-code", config__json=config)
    (folder / "mine.py").write_text("open('ran', 'w')\nfrom transformers import Qwen3Config as Mine\n")
    two = transformers.Qwen3Config.from_pretrained(home / "tiny", num_labels=2)
    copied(home, "two-labels", config__json=two.to_dict())
    (home / "two-errors.py").write_text("raise RuntimeError('first line\\nsecond line')\n")
    (home / "file").write_text("not a folder")
    (home / "runs-with-one" / "run").mkdir(parents=True)


ROW = '{"prompt": "1+1=", "answer": "2"}\n'
TINY = "--model tiny"
DATA = f"{BASE} --data bad.jsonl"
ARITHMETIC = "--model ./tiny --reward arithmetic"
# flags, what the sentence must contain, and what bad.jsonl holds
BAD_INPUT = {
    # the parser
    "unknown-flag": (f"{BASE} --group_size 4", ["--group_size", "--group-size"]),
    "misspelt-flag": (f"{BASE} --temprature 1", ["--temprature", "did you mean --temperature"]),
    "short-flag": (f"{BASE} -x", ["-x"]),
    "stray-word": (f"{BASE} gspo", ["gspo"]),
    "flag-without-value": (f"{BASE} --lr", ["--lr", "expected"]),
    "unknown-algorithm": (f"{BASE} --algo gsop", ["--algo", "gsop", "did you mean gspo"]),
    "unknown-task": (f"{TINY} --task arithmetics", ["--task", "did you mean arithmetic"]),
    "unknown-dtype": (f"{BASE} --dtype float31", ["--dtype", "float32"]),
    "unknown-device": (f"{BASE} --device gpu", ["--device", "cuda"]),
    "negative-lr": (f"{BASE} --lr -1", ["--lr", "-1", "(0, inf)"]),
    "zero-lr": (f"{BASE} --lr 0", ["--lr", "(0, inf)"]),
    "nan-lr": (f"{BASE} --lr nan", ["--lr", "nan", "(0, inf)"]),
    "infinite-lr": (f"{BASE} --lr inf", ["--lr", "inf"]),
    "wordy-lr": (f"{BASE} --lr fast", ["--lr", "fast"]),
    "greedy-training": (f"{BASE} --temperature 0", ["--temperature", "(0, inf)"]),
    "group-of-one": (f"{BASE} --group-size 1", ["--group-size", "[2, inf)"]),
    "half-a-step": (f"{BASE} --steps 1.5", ["--steps", "1.5"]),
    "no-steps": (f"{BASE} --steps 0", ["--steps", "[1, inf)"]),
    "negative-seed": (f"{BASE} --seed -1", ["--seed", "[0, inf)"]),
    "no-tokens": (f"{BASE} --max-new-tokens 0", ["--max-new-tokens", "[1, inf)"]),
    "no-checkpoints": (f"{BASE} --keep 0", ["--keep", "[1, inf)"]),
    "lambda-above-1": (f"{BASE} --algo ppo --gae-lambda 1.1", ["--gae-lambda", "[0, 1]"]),
    "negative-clip": (f"{BASE} --clip-low -0.1", ["--clip-low", "[0, inf)"]),
    # flags that cannot go together, or do nothing
    "not-dividing": (f"{BASE} --completions-per-update 7", ["--completions-per-update 7", "16"]),
    "more-than-a-rollout": (f"{BASE} --completions-per-update 32", ["--completions-per-update", "16"]),
    "clip-without-clip": (f"{BASE} --algo reinforce --clip-low 0.1", ["--clip-low", "reinforce"]),
    "clip-of-sapo": (f"{BASE} --algo sapo --clip-high 0.1", ["--clip-high", "sapo"]),
    "clip-of-cispo": (f"{BASE} --algo cispo --clip-high 4", ["--clip-high", "cispo"]),
    "lambda-without-critic": (f"{BASE} --gae-lambda 0.9", ["--gae-lambda", "gspo"]),
    "critic-lr-without-critic": (f"{BASE} --critic-lr 1e-3", ["--critic-lr", "gspo"]),
    "gamma-without-tokens": (f"{BASE} --gamma 0.9", ["--gamma", "gspo"]),
    "scale-of-rloo": (f"{BASE} --algo rloo --advantage-scale batch", ["--advantage-scale", "rloo"]),
    "tis-of-the-sampler": (f"{BASE} --old-logprobs sampler --tis-cap 2", ["--tis-cap", "sampler"]),
    "tis-level-alone": (f"{BASE} --tis-level completion", ["--tis-level", "--tis-cap"]),
    "refills-alone": (f"{BASE} --max-refills 2", ["--max-refills", "dynamic"]),
    "reward-model-weight-alone": (f"{BASE} --reward-model-weight 1", ["--reward-model-weight"]),
    "ref-without-kl": (f"{BASE} --ref-every 2", ["--ref-every", "--kl-coef"]),
    "eval-without-data": (f"{BASE} --eval-data bad.jsonl", ["--eval-data", "--data"]),
    "replay-of-a-dense-model": (f"{BASE} --routing-replay", ["--routing-replay", "xpert"]),
    "system-without-chat": (f"{BASE} --system 12", ["--system", "chat template"]),
    "template-without-prompt": (f"{BASE} --prompt-template 1+1=", ["--prompt-template", "{prompt}"]),
    "template-with-two": (f"{BASE} --prompt-template {{prompt}}{{prompt}}", ["--prompt-template"]),
    "chat-args-no-json": (f"{BASE} --chat-template-args true", ["--chat-template-args", "JSON"]),
    "loss-args-no-json": (f"{BASE} --loss-args ratio_max=4", ["--loss-args", "JSON"]),
    "loss-args-a-list": (f"{BASE} --loss-args [1]", ["--loss-args", "JSON object"]),
    "loss-args-misspelt": (f'{BASE} --algo cispo --loss-args {{"ratio_maxx":4}}',
                           ["--loss-args", "ratio_maxx", "ratio_max"]),
    "loss-args-a-text": (f'{BASE} --algo cispo --loss-args {{"ratio_max":"4"}}', ["--loss-args"]),
    "loss-args-nan": (f'{BASE} --algo cispo --loss-args {{"ratio_max":NaN}}', ["--loss-args"]),
    "loss-args-denom": (f'{BASE} --loss-args {{"denom":3}}', ["--loss-args", "denom"]),
    "loss-args-a-tensor": (f'{BASE} --loss-args {{"mask":1}}', ["--loss-args", "mask"]),
    "loss-args-kl": (f'{BASE} --algo grpo --loss-args {{"kl_coef":1}}', ["--loss-args", "kl_coef"]),
    # rewards
    "unknown-reward": ("--model ./tiny --reward maths", ["--reward", "did you mean", "math"]),
    "reward-file-missing": ("--model ./tiny --reward no.py:f", ["--reward", "no.py", "file"]),
    "reward-function-missing": ("--model ./tiny --reward pay.py:evn", ["--reward", "pay.py", "evn"]),
    "reward-file-raises": ("--model ./tiny --reward two-errors.py:f",
                           ["--reward", "two-errors.py", "RuntimeError"]),
    "reward-weight": ("--model ./tiny --reward 0*math", ["--reward", "weight"]),
    "reward-model-missing": (f"{BASE} --reward-model /nowhere/judge",
                             ["--reward-model", "/nowhere/judge"]),
    "reward-model-with-two-labels": (f"{BASE} --reward-model two-labels",
                                     ["--reward-model", "two-labels", "label"]),
    # data
    "data-missing": (f"{BASE} --data nowhere.jsonl", ["--data", "nowhere.jsonl", "no such file"]),
    "data-a-folder": (f"{BASE} --data tiny", ["--data tiny", "folder"]),
    "data-empty": (DATA, ["--data bad.jsonl", "empty"], ""),
    "data-blank": (DATA, ["--data bad.jsonl", "empty"], "\n \n\n"),
    "data-broken": (DATA, ["--data bad.jsonl", "line 3", "JSON"], ROW + "\n" + '{"prompt": \n'),
    "data-pretty": (DATA, ["--data bad.jsonl", "line 1", "JSON"], '[\n {"prompt": "1+1="}\n]\n'),
    "data-a-list": (DATA, ["bad.jsonl", "line 2", "object", "list"], ROW + '["1+1=", "2"]\n'),
    "data-a-number": (DATA, ["bad.jsonl", "line 1", "object"], "5\n"),
    "data-nested": (DATA, ["bad.jsonl", "line 1"], "[" * 100_000 + "\n"),
    "data-huge-line": (DATA, ["bad.jsonl", "line 2"], ROW + '{"prompt": "' + "1" * 10_000_000),
    "data-utf8": (DATA, ["bad.jsonl", "line 2", "UTF-8"], ROW.encode() + b'{"prompt": "\xff"}\n'),
    "data-utf16": (DATA, ["bad.jsonl", "line 1", "UTF-8"], ROW.encode("utf-16")),
    "data-surrogate": (DATA, ["bad.jsonl", "line 2", "prompt"],
                       ROW + '{"prompt": "\\ud800", "answer": "1"}\n' + ROW),
    "data-fields": (DATA, ["bad.jsonl", "line 1", "prompt", "answer", "input, output"],
                    '{"input": "1+1=", "output": "2"}\n'),
    "data-no-answer": (DATA, ["bad.jsonl", "line 2", "answer"], ROW + '{"prompt": "1+1="}\n'),
    "data-prompt-a-number": (DATA, ["bad.jsonl", "line 2", "field prompt"],
                             ROW + '{"prompt": 7, "answer": "2"}\n'),
    "data-prompt-empty": (DATA, ["bad.jsonl", "line 2", "field prompt"],
                          ROW + '{"prompt": "", "answer": "2"}\n'),
    "data-question-null": (DATA, ["bad.jsonl", "line 1", "prompt"],
                           '{"question": null, "answer": "2"}\n'),
    "data-answer-a-list": ("--model ./tiny --reward math --data bad.jsonl",
                           ["bad.jsonl", "line 2", "field answer"],
                           ROW + '{"prompt": "1+1=", "answer": ["2"]}\n'),
    "data-answer-empty": ("--model ./tiny --reward math --data bad.jsonl",
                          ["bad.jsonl", "line 1", "field answer"],
                          '{"prompt": "1+1=", "answer": ""}\n'),
    "data-answer-for-countdown": ("--model ./tiny --reward countdown --data bad.jsonl",
                                  ["bad.jsonl", "line 1", "field answer", "numbers"], ROW),
    "data-one-row": (DATA, ["--data bad.jsonl", "two rows"], ROW),
    "data-unreadable": (f"{BASE} --data /proc/self/mem", ["--data", "/proc/self/mem"]),
    "eval-data-broken": (f"{BASE} --data good.jsonl --eval-data bad.jsonl",
                         ["--eval-data bad.jsonl", "line 1"], "{\n"),
    "unknown-characters": (f"{TINY} --reward pay.py:even --data bad.jsonl",
                           ["--data bad.jsonl", "line 4", "'x'", "0123456789+*=;#"],
                           ROW * 2 + "\n" + '{"prompt": "x+1=", "answer": "2"}\n' + ROW * 9),
    "all-prompts-too-long": (f"{BASE} --data bad.jsonl", ["--data", "504", "--max-new-tokens"],
                             f'{{"prompt": "{"1" * 600}", "answer": "2"}}\n' * 12),
    "no-room-for-a-prompt": (f"{BASE} --max-new-tokens 600", ["--max-new-tokens", "512"]),
    # models
    # absolute folders where nothing must be found: about other names the hub would be asked
    "model-missing": ("--model /nowhere/at/all", ["--model /nowhere/at/all"]),
    "model-a-file": ("--model ./file", ["--model ./file"]),
    "model-without-weights": ("--model ./weightless", ["--model ./weightless", "safetensors"]),
    "model-pickled": ("--model ./pickled", ["--model ./pickled", "safetensors", "pickle"]),
    "model-without-tokenizer": ("--model ./tokenless", ["--model ./tokenless", "tokenizer"]),
    "model-torn-config": ("--model ./torn-config", ["--model ./torn-config"]),
    "model-torn-tokenizer": ("--model ./torn-tokenizer", ["--model ./torn-tokenizer"]),
    "model-unheard-of": ("--model ./unheard-of", ["--model ./unheard-of"]),
    "model-not-causal": ("--model ./bert", ["--model ./bert", "causal", "bert"]),
    "model-with-encoder": ("--model ./t5", ["--model ./t5", "causal", "t5"]),
    "model-without-end": ("--model ./endless", ["--model ./endless", "end token"]),
    "model-with-own-code": ("--model ./own-code", ["--model ./own-code"]),
    "model-without-system": ("--model ./strict-chat --system 12",
                             ["System role not supported"]),
    "chat-args-clash": ('--model ./strict-chat --chat-template-args {"tokenize":true}',
                        ["--chat-template-args", "tokenize"]),
    # folders
    "run-exists": (f"{BASE} --runs runs-with-one", ["runs-with-one/run", "--resume"]),
    "name-with-parent": (f"{BASE} --name ../other", ["--name ../other"]),
    "name-all-parent": (f"{BASE} --name ..", ["--name"]),
    "name-with-slash": (f"{BASE} --name a/b", ["--name a/b"]),
    "name-absolute": (f"{BASE} --name /tmp/elsewhere", ["--name /tmp/elsewhere"]),
    "name-too-long": (f"{BASE} --name {'n' * 300}", ["--name"]),
    "runs-is-a-file": (f"{BASE} --runs file", ["--runs file"]),
    "runs-below-a-file": (f"{BASE} --runs file/runs", ["--runs file/runs"]),
    "runs-read-only": (f"{BASE} --runs /proc/runs", ["--runs /proc/runs"]),
    "resume-nothing": ("--resume --name nothing", ["--resume", "nothing"]),
    "resume-without-name": ("--resume", ["--resume", "--name"]),
    "resume-of-a-foreign-folder": (f"{BASE} --resume --name ../home", ["--name"]),
    "watch-nothing": ("--watch nowhere", ["--watch nowhere"]),
}
PLAIN = ("resume-without-name",)  # cases that do without the flags of the small run


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence(case, wrong_models, home, tmp_path, monkeypatch):
    """Exit 2 and one line that says what is wrong where; no folder, no weights, no traceback."""
    flags, fragments, *content = BAD_INPUT[case]
    if "/proc" in flags and not Path("/proc/self/mem").exists():
        pytest.skip("no /proc here")

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded before the input was looked at")

    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        monkeypatch.setattr(kind, "from_pretrained", refuse)
    monkeypatch.setattr("builtins.input", lambda *args: "y")  # who asks is answered
    for text in content:
        Path("bad.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    Path("good.jsonl").write_text(ROW * 12)
    Path("ran").unlink(missing_ok=True)
    before = sorted(path for path in home.rglob("*") if path.is_dir())
    result = launch(tmp_path / "runs", flags, small=case not in PLAIN)
    assert result.status == 2, result
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.err
    assert len(lines[0]) < 1000
    for fragment in fragments:
        assert fragment in lines[0]
    assert not (tmp_path / "runs").exists()
    assert sorted(path for path in home.rglob("*") if path.is_dir()) == before
    assert not Path("ran").exists()


def test_bad_input_table_covers_forty_cases():
    assert len(BAD_INPUT) >= 40


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_one_sentence(device, tmp_path):
    if getattr(torch, device).is_available():
        pytest.skip("it is there")
    result = launch(tmp_path, f"{BASE} --device {device}")
    assert result.status == 2 and result.err.count("\n") == 1
    assert f"--device {device}" in result.err


@pytest.mark.parametrize("flag", ["--name", "--data", "--reward", "--model", "--prompt-template"])
def test_a_flag_with_a_line_break_stays_one_line(flag, tmp_path):
    """A file name may hold a line break or an escape sequence, and an error quotes it."""
    value = "./a\nb\x1b[31m" + ":f" * (flag == "--reward")
    result = launch(tmp_path / "runs", BASE, flag, value)
    assert result.status == 2 and result.err.count("\n") == 1 and "\x1b" not in result.err


@pytest.mark.skipif(bool(importlib.util.find_spec("tensorboard")), reason="it is installed")
def test_tensorboard_that_is_missing_says_how_to_install_it(tmp_path):
    result = launch(tmp_path / "runs", f"{BASE} --tensorboard")
    assert result.status == 2 and "pip install tensorboard" in result.err
    assert result.err.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_replay_needs_recorded_experts(moe, tmp_path):
    """Experts are recorded while the trainer scores pi_old, and not under checkpointing."""
    for flags, name in (("--old-logprobs sampler", "--old-logprobs"),
                        ("--gradient-checkpointing", "--gradient-checkpointing")):
        result = launch(tmp_path / "runs", f"--model {moe} --routing-replay {flags}")
        assert result.status == 2 and result.err.count("\n") == 1
        assert "--routing-replay" in result.err and name in result.err
        assert not (tmp_path / "runs").exists()


def test_weights_that_are_torn_name_the_model(home, tmp_path):
    """Cannot be seen before loading; still the user's folder is at fault, not a file of the run."""
    data = (home / "tiny" / "model.safetensors").read_bytes()
    folder = tmp_path / "torn"
    shutil.copytree(home / "tiny", folder)
    (folder / "model.safetensors").write_bytes(data[:len(data) // 2])
    result = launch(tmp_path / "runs", f"{BASE} --model {folder}")
    assert result.status == 2 and result.err.count("\n") == 1
    assert f"--model {folder}" in result.err


def test_the_command_itself_refuses_in_one_line(tmp_path):
    """In a process of its own: nothing that an import prints may stand beside the sentence."""
    done = subprocess.run([sys.executable, ROOT / "train.py", "--algo", "gsop"], cwd=tmp_path,
                          capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: --algo")


def test_help_has_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit:
        train.main(["--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0
    for field in dataclasses.fields(train.Config):
        assert "--" + field.name.replace("_", "-") in text
    for name in gspo.ALGOS:
        assert name in text
    assert "default 1.0" in text and "in GB" in text  # temperature, cache


# ------------------------------------------------------------------------------ the first ratio


@pytest.fixture(scope="module")
def dropout_model(home):
    """A GPT-2 whose configuration asks for dropout: it must be off wherever a model scores."""
    torch.manual_seed(0)
    shape = transformers.GPT2Config(vocab_size=18, n_embd=32, n_layer=2, n_head=2, n_positions=64,
                                    resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3,
                                    bos_token_id=1, eos_token_id=1, pad_token_id=0)
    folder = home / "dropout"
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    AutoTokenizer.from_pretrained(home / "tiny").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("algorithm, flags", [
    ("gspo", ""), ("gspo-token", "--reward pay.py:steps"), ("grpo", "--kl-coef 0.1"),
    ("dapo", ""), ("ppo", ""), ("reinforce++", "--kl-coef 0.1"), ("gmpo", "--epochs 2"),
    ("gspo", "--dtype bfloat16"), ("grpo", "--gradient-checkpointing"), ("gspo", "--stale-steps 2"),
    ("gspo", "--temperature 0.7"), ("grpo", "--model ./dropout"), ("grpo", "MOE"),
    ("grpo", "MOE --routing-replay"), ("gspo", "--overlong-filter --max-new-tokens 16")])
def test_the_first_ratio_is_exactly_1(algorithm, flags, losses, dropout_model, moe, tmp_path):
    """Old and new log-probs of the first update of each step are the same bits, row for row."""
    calls = losses(algorithm)
    good(tmp_path, f"{BASE} --algo {algorithm} --micro-batch-tokens 36 {flags}"
         .replace("MOE", f"--model {moe}"))
    epochs = 2 if "--epochs" in flags else 1
    seen, moved = 0, False
    micro_batches = 0
    for (logprobs, old_logprobs, _, mask), _, _ in calls:
        if seen % (16 * epochs) < 4:  # 16 completions a step, 4 an update
            assert torch.equal(logprobs[mask.bool()], old_logprobs[mask.bool()])
            micro_batches += 1
        else:
            moved |= not torch.equal(logprobs[mask.bool()], old_logprobs[mask.bool()])
        seen += len(logprobs)
    assert seen == 2 * 16 * epochs
    assert micro_batches > 2  # two first updates, of several micro-batches
    assert moved  # or the test could not fail


def test_sampler_logprobs_as_old_are_close_to_1(losses, tmp_path):
    calls = losses("gspo")
    good(tmp_path, f"{BASE} --old-logprobs sampler --completions-per-update 16 --steps 1")
    (logprobs, old_logprobs, _, mask), _, _ = calls[0]
    assert not torch.equal(logprobs, old_logprobs)
    torch.testing.assert_close(logprobs[mask], old_logprobs[mask], atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------ resuming


def interrupted(runs, flags, monkeypatch, at, number=signal.SIGTERM):
    """The run, stopped by a signal that comes while step `at` is reported."""
    report = train.report

    def stopping(run, batch, row):
        report(run, batch, row)
        if row["step"] == at:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(train, "report", stopping)
        return launch(runs, flags)


RESUMED = {
    "gspo": ("--eval-every 2 --save-every 2", 3),
    "warm-up": ("--warmup-steps 4 --epochs 2", 1),
    "grpo": ("--algo grpo --kl-coef 0.1 --ref-every 2", 3),
    "ppo": ("--algo ppo --kl-coef 0.1", 2),
    "dapo": ("--algo dapo --reward pay.py:by_prompt --max-refills 1", 2),
    "stale": ("--stale-steps 2", 1),
    "stale-bf16": ("--stale-steps 3 --dtype bfloat16", 2),
    "data": ("--data rows.jsonl", 2),
    "moe": ("MOE --algo grpo --routing-replay", 1),
}


@pytest.mark.parametrize("case", RESUMED)
def test_resuming_changes_nothing(case, moe, tmp_path, monkeypatch):
    """Interrupted and resumed: the rows of every step and all final tensors are the same bits."""
    flags, at = RESUMED[case]
    write_rows(Path("rows.jsonl"), [{"prompt": f"{i}+{j}=", "answer": "0"}
                                    for i in range(3) for j in range(5)])
    flags = f"{BASE} --steps 4 {flags}".replace("MOE", f"--model {moe}")
    whole = good(tmp_path / "whole", flags)
    stopped = interrupted(tmp_path / "stopped", flags, monkeypatch, at)
    assert stopped.status == 128 + signal.SIGTERM
    assert [row["step"] for row in metrics(stopped.folder)] == list(range(1, at + 1))
    resumed = good(tmp_path / "stopped", "--resume --name run", small=False)
    assert [row["step"] for row in metrics(whole.folder)] == [1, 2, 3, 4]
    same_run(whole.folder, resumed.folder)
    assert (whole.folder / "samples.jsonl").read_text() == (
        resumed.folder / "samples.jsonl").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(number, tmp_path, monkeypatch):
    stopped = interrupted(tmp_path, f"{BASE} --steps 4", monkeypatch, 2, number)
    assert stopped.status == 128 + number
    last = stopped.out.splitlines()[-1]
    assert str(stopped.folder / "checkpoints" / "step-2") in last
    command = re.search(r"python train\.py (.*)", last)[1]
    good(tmp_path, command, small=False)  # word for word, wherever the runs are
    assert [row["step"] for row in metrics(stopped.folder)] == [1, 2, 3, 4]


def test_resuming_a_finished_run_says_so(tmp_path):
    folder = good(tmp_path, BASE).folder
    before = digests(folder), timeless(folder)
    result = launch(tmp_path, "--resume --name run", small=False)
    assert "Traceback" not in result.err and result.err.count("\n") <= 1
    assert str(folder / "checkpoints" / "step-2") in result.out + result.err
    assert (digests(folder), timeless(folder)) == before


def test_a_finished_run_goes_on_with_more_steps(tmp_path):
    folder = good(tmp_path / "one", BASE).folder
    good(tmp_path / "one", "--resume --name run --steps 4", small=False)
    whole = good(tmp_path / "other", f"{BASE} --steps 4").folder
    drop = lambda rows: [{k: v for k, v in row.items() if not k.startswith("eval_")} for row in rows]
    assert drop(timeless(folder)) == drop(timeless(whole))
    assert digests(folder) == digests(whole)


def test_resuming_with_other_flags_says_which(tmp_path):
    folder = good(tmp_path, f"{BASE} --max-new-tokens 6").folder
    result = good(tmp_path, "--resume --name run --steps 3 --lr 1e-4 --max-new-tokens 6",
                  small=False)
    told = [line for line in result.out.splitlines() if line.startswith("resume:")]
    assert len(told) == 2  # max_new_tokens is what it was
    assert any("lr" in line and "0.001" in line and "0.0001" in line for line in told)
    assert any("steps" in line and "2" in line and "3" in line for line in told)
    assert metrics(folder)[-1]["lr"] == pytest.approx(1e-4)
    assert json.loads((folder / "config.json").read_text())["steps"] == 3


@pytest.mark.parametrize("tail", ['{"step": 2, "rew', '{"step": 1, "prompt": "a}', "\x00" * 40, "}"])
def test_a_torn_line_is_repaired_on_resume(tail, tmp_path, monkeypatch):
    """Power fails in the middle of a line: what is left of it is no JSON, whatever it ends with."""
    whole = good(tmp_path / "whole", f"{BASE} --steps 3").folder
    folder = interrupted(tmp_path / "torn", f"{BASE} --steps 3", monkeypatch, 1).folder
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(folder / name, "a") as file:
            file.write(tail)
    good(tmp_path / "torn", "--resume --name run", small=False)
    same_run(whole, folder)
    assert (whole / "samples.jsonl").read_text() == (folder / "samples.jsonl").read_text()


def test_resume_takes_the_newest_whole_checkpoint(tmp_path):
    """A checkpoint that lost files (a copy that broke off, say) is passed over."""
    folder = good(tmp_path / "one", f"{BASE} --steps 3 --save-every 1").folder
    whole = good(tmp_path / "other", f"{BASE} --steps 3").folder
    shutil.rmtree(folder / "checkpoints" / "step-3" / "trainer")
    good(tmp_path / "one", "--resume --name run", small=False)
    same_run(whole, folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"algo": "gspo"}'])
def test_resuming_with_a_broken_config_is_one_sentence(text, tmp_path):
    folder = good(tmp_path, BASE).folder
    (folder / "config.json").write_text(text)
    result = launch(tmp_path, "--resume --name run --steps 4", small=False)
    if text != '{"algo": "gspo"}':  # an older version's config may well lack fields
        assert result.status == 2 and "config.json" in result.err
    assert result.err.count("\n") <= 1


# a server that has imported everything forks the runs that are killed: no seconds for imports
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train"])


def forked(arguments, log, die_at, limit):
    """A run in a process of its own, which may die at its die_at-th touch of the disk."""
    import resource  # unix only
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(log, "a", buffering=1)
    left = [die_at or -1]

    def mortal(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call

    for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink"),
                         (os, "mkdir"), (train, "save_file"), (train, "append")):
        setattr(module, name, mortal(getattr(module, name)))
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    status = train.main(arguments)
    sys.stdout.flush()
    os._exit(status)


def fork(runs, flags, log, die_at=None, limit=None, small=True):
    arguments = f"{SMALL * small} --runs {runs} {flags}".split()
    with pytest.MonkeyPatch.context() as patch:  # read when the server starts, with its first fork
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{Path(__file__).parent}")
        patch.setenv("OMP_NUM_THREADS", "1")
        process = FORKS.Process(target=forked, args=(arguments, str(log), die_at, limit))
        process.start()
    return process


@pytest.mark.skipif(os.name != "posix", reason="needs fork and signals")
def test_killed_twenty_times_and_resumed_each_time(tmp_path):
    """SIGKILL at random moments, half of them between two touches of the disk of a checkpoint."""
    rng, log = random.Random(0), tmp_path / "log"
    runs, folder = tmp_path / "killed", tmp_path / "killed" / "run"
    flags = f"{BASE} --steps 1000 --save-every 1"
    kills, saved = 0, 0
    while kills < 20:
        die_at = (1 + kills // 2 if kills < 8 else rng.randrange(5, 70)) if kills % 2 == 0 else None
        resume = (folder / "config.json").exists()
        shutil.rmtree(folder, ignore_errors=True) if not resume else None
        process = fork(runs, "--resume --name run" if resume else flags, log, die_at,
                       small=not resume)
        process.join(60 if die_at else rng.uniform(0.3, 1.2))
        assert process.exitcode in (None, -signal.SIGKILL), log.read_text()[-2000:]
        process.kill()
        process.join()
        kills += 1
        step = int(newest(folder).name[5:]) if newest(folder) else 0
        assert step >= saved  # nothing is lost but the steps since the last checkpoint
        saved = step
    assert saved > 3, log.read_text()[-2000:]
    process = fork(runs, f"--resume --name run --steps {saved + 2}", log, small=False)
    process.join(60)
    assert process.exitcode == 0, log.read_text()[-2000:]
    assert [row["step"] for row in metrics(folder)] == list(range(1, saved + 3))
    assert not list(folder.rglob("*tmp*"))
    process = fork(tmp_path / "whole", f"{BASE} --steps {saved + 2}", log)
    process.join(60)
    assert process.exitcode == 0, log.read_text()[-2000:]
    same_run(tmp_path / "whole" / "run", folder)
