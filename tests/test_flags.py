"""The command line of train.py: what its flags take, reach and refuse, each in one sentence."""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import gspo
import rewards
import train
from tools import BASE, ROOT, copied, good, launch, refused, spied, strict

pytestmark = pytest.mark.usefixtures("place")

# ------------------------------------------------------------------------------ bad input


@pytest.fixture(scope="module")
def wrong_models(models):
    """Model folders that cannot be trained, each for a reason of its own."""
    tiny, weights = models / "tiny", "model.safetensors"
    copied(tiny, models / "weightless", [weights])
    copied(tiny, models / "pickled", [weights], pytorch_model__bin=b"\x80\x02}q\x00.")
    copied(tiny, models / "tokenless", ["tokenizer.json", "tokenizer_config.json"])
    copied(tiny, models / "torn-config", config__json=b'{"model_type": ')
    copied(tiny, models / "torn-tokenizer", tokenizer__json=b'{"version": ')
    copied(tiny, models / "unheard-of", config__json={"model_type": "nonsense-9000"})
    bert = transformers.BertConfig(
        vocab_size=18,
        hidden_size=8,
        num_attention_heads=1,
        num_hidden_layers=1,
        architectures=["BertForMaskedLM"],
    )
    copied(tiny, models / "bert", config__json=bert.to_dict())

    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    endless = {name: value for name, value in settings.items() if name != "eos_token"}
    copied(tiny, models / "endless", tokenizer_config__json=endless)
    chat = (
        b"{% for m in messages %}{% if m.role == 'system' %}"
        b"{{ raise_exception('System role not supported') }}{% endif %}{{ m.content }}"
        b"{% endfor %}"
    )
    copied(tiny, models / "strict-chat", chat_template__jinja=chat)

    config = json.loads((tiny / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    code = (
        b"open('ran', 'w')\nfrom transformers import Qwen3Config\n\n"
        b"class Mine(Qwen3Config):\n    pass\n"
    )
    copied(tiny, models / "own-code", config__json=config, mine__py=code)

    two = transformers.Qwen3Config.from_pretrained(tiny, num_labels=2)
    copied(tiny, models / "two-labels", config__json=two.to_dict())
    one = transformers.Qwen3Config.from_pretrained(tiny, num_labels=1).to_dict()
    one |= {"architectures": ["Qwen3ForSequenceClassification"]}
    padless = {name: value for name, value in settings.items() if name != "pad_token"}
    copied(tiny, models / "padless", config__json=one, tokenizer_config__json=padless)


ROW = '{"prompt": "1+1=", "answer": "2"}\n'
DATA = f"{BASE} --data bad.jsonl"
MATH = "--model models/tiny --reward math --data bad.jsonl"
CHAT = "--model models/strict-chat"
JUDGE = "--model models/tiny --reward model --reward-model"
# name -> flags, what the sentence must contain, and what bad.jsonl holds: one row a mechanism
BAD_INPUT = {
    # the parser
    "unknown-flag": (f"{BASE} --group_size 4", ["--group_size", "did you mean --group-size"]),
    "no-value": (f"{BASE} --lr", ["--lr", "expected"]),
    "wrong-type": (f"{BASE} --steps 1.5", ["--steps", "1.5"]),
    "wrong-choice": (f"{BASE} --algo gsop", ["--algo gsop", "expected one of", "mean gspo"]),
    "too-small": (f"{BASE} --group-size 1", ["--group-size 1", "at least 2"]),
    "not-above": (f"{BASE} --temperature 0", ["--temperature 0", "above 0"]),
    "too-large": (f"{BASE} --algo ppo --gae-lambda 1.1", ["--gae-lambda", "at most 1"]),
    "nan": (f"{BASE} --lr nan", ["--lr", "nan", "above 0"]),
    "infinite": (f"{BASE} --lr inf", ["--lr", "inf"]),
    # flags that cannot go together, or do nothing
    "not-dividing": (f"{BASE} --completions-per-update 7", ["--completions-per-update 7", "16"]),
    "zero-is-given": (f"{BASE} --algo reinforce --clip-low 0", ["--clip-low", "reinforce"]),
    "no-refilling": (f"{BASE} --max-refills 3", ["--max-refills", "--dynamic-sampling"]),
    "tis-of-sampler": (
        f"{BASE} --old-logprobs sampler --tis-cap 2",
        ["--tis-cap", "--old-logprobs trainer"],
    ),
    "tis-level-alone": (f"{BASE} --tis-level completion", ["--tis-level", "--tis-cap"]),
    "model-not-in-the-reward": (
        f"{BASE} --reward-model models/judge --reward arithmetic",
        ["--reward-model", "arithmetic"],
    ),
    "model-in-the-reward-alone": (f"{BASE} --reward arithmetic+model", ["model"]),
    "ref-without-kl": (f"{BASE} --ref-every 2", ["--ref-every", "--kl-coef"]),
    "eval-without-data": (f"{BASE} --eval-data bad.jsonl", ["--eval-data", "--data"]),
    "task-beside-data": (f"{DATA} --task calculator", ["--task calculator", "--data"], ROW),
    "overlong-beyond-the-limit": (
        f"{BASE} --overlong-cache 9",
        ["--overlong-cache 9", "--max-new-tokens 8"],
    ),
    "mask-of-all-from-below": (
        f"{BASE} --mismatch-mask token --mismatch-low 6",
        ["--mismatch-low 6", "at most 1"],
    ),
    "mask-of-all-from-above": (
        f"{BASE} --mismatch-mask token --mismatch-high 0.3",
        ["--mismatch-high 0.3", "at least 1"],
    ),
    "replay-of-a-dense-model": (f"{BASE} --routing-replay", ["--routing-replay", "experts"]),
    "system-without-chat": (f"{BASE} --system 12", ["--system", "chat template"]),
    "template": (f"{BASE} --prompt-template 1+1=", ["--prompt-template", "{prompt}"]),
    "chat-args-no-json": (f"{CHAT} --chat-template-args {{a}}", ["--chat-template-args", "JSON"]),
    "chat-args-no-object": (f"{CHAT} --chat-template-args true", ["--chat-template-args", "JSON"]),
    "chat-args-clash": (
        f'{CHAT} --chat-template-args {{"tokenize":true}}',
        ["--chat-template-args", "tokenize"],
    ),
    "chat-without-system": (f"{CHAT} --system 12", ["System role not supported"]),
    # rewards
    "unknown-reward": ("--model models/tiny --reward maths", ["--reward", "did you mean", "math"]),
    "reward-file-raises": (
        "--model models/tiny --reward two-errors.py:f",
        ["--reward", "two-errors.py", "RuntimeError"],
    ),
    "judge-missing": (f"{JUDGE} /nowhere/judge", ["--reward-model", "/nowhere/judge"]),
    "judge-that-writes": (f"{JUDGE} models/tiny", ["--reward-model", "classifier", "CausalLM"]),
    "judge-without-padding": (f"{JUDGE} models/padless", ["--reward-model", "padding"]),
    "judge-with-two-labels": (f"{JUDGE} models/two-labels", ["--reward-model", "label"]),
    # tools
    "tool-without-a-marker": (f"{BASE} --tool good.py:f", ["--tool good.py:f", "--tool-after"]),
    "marker-without-a-tool": (f"{BASE} --tool-after ;", ["--tool-after ;", "--tool"]),
    "tool-unknown": (f"{BASE} --tool calc", ["--tool calc", "calculator", "file.py:function"]),
    "tool-not-in-the-file": (
        f"{BASE} --tool good.py:g --tool-after ;",
        ["--tool", "no function 'g'"],
    ),
    "tool-that-raises": (
        f"{BASE} --tool two-errors.py:f --tool-after ;",
        ["--tool", "two-errors.py", "RuntimeError"],
    ),
    "tool-that-returns-no-text": (
        f"{BASE} --tool good.py:number --tool-after ;",
        ["--tool good.py:number", "text or None"],
    ),
    "tool-of-other-characters": (f"{BASE} --tool calculator", ["--tool-after </calc>", "no token"]),
    # data
    "data-missing": (f"{BASE} --data no.jsonl", ["--data", "no.jsonl", "no such file"]),
    "data-empty": (DATA, ["--data bad.jsonl", "empty"], "\n \n\n"),
    "data-broken": (DATA, ["--data bad.jsonl", "line 3", "JSON"], ROW + "\n" + '{"prompt": \n'),
    "data-a-list": (DATA, ["bad.jsonl", "line 2", "JSON array"], ROW + '["1+1=", "2"]\n'),
    "data-nested": (DATA, ["bad.jsonl", "line 1"], "[" * 100_000 + "\n"),
    "data-utf8": (DATA, ["bad.jsonl", "line 2", "UTF-8"], ROW.encode() + b'{"prompt": "\xff"}\n'),
    "data-surrogate": (
        DATA,
        ["bad.jsonl", "line 2", "prompt"],
        ROW + '{"prompt": "\\ud800", "answer": "1"}\n' + ROW,
    ),
    "data-fields": (
        DATA,
        ["bad.jsonl", "line 1", "prompt", "answer", "input, output"],
        '{"input": "1+1=", "output": "2"}\n',
    ),
    "data-no-answer": (DATA, ["bad.jsonl", "line 2", "answer"], ROW + '{"prompt": "1+1="}\n'),
    "data-prompt-type": (
        DATA,
        ["bad.jsonl", "line 2", "field prompt"],
        ROW + '{"prompt": 7, "answer": "2"}\n',
    ),
    "data-prompt-empty": (
        DATA,
        ["bad.jsonl", "line 2", "field prompt"],
        ROW + '{"prompt": "", "answer": "2"}\n',
    ),
    "data-answer-type": (
        MATH,
        ["bad.jsonl", "line 2", "field answer"],
        ROW + '{"prompt": "1+1=", "answer": ["2"]}\n',
    ),
    "data-answer-for-another": (
        "--model models/tiny --reward countdown --data bad.jsonl",
        ["bad.jsonl", "line 1", "field answer", "countdown"],
        ROW,
    ),
    "data-huge-number": (
        DATA,
        ["bad.jsonl", "line 1", "digits"],
        '{"prompt": "1+1=", "answer": 1' + "0" * 5000 + "}\n",
    ),
    "data-one-row": (DATA, ["--data bad.jsonl", "two prompts"], ROW),
    "eval-data-broken": (
        f"{BASE} --data good.jsonl --eval-data bad.jsonl",
        ["--eval-data bad.jsonl", "line 1"],
        "{\n",
    ),
    "prompts-too-long": (
        DATA,
        ["--data", "504", "--max-new-tokens"],
        "".join(f'{{"prompt": "{"1" * n}", "answer": "2"}}\n' for n in range(600, 612)),
    ),
    "no-room-for-a-prompt": (f"{BASE} --max-new-tokens 600", ["--max-new-tokens", "512"]),
    # models; an absolute folder where nothing must be found: about a name the hub would be asked
    "model-missing": ("--model /nowhere/at/all", ["--model /nowhere/at/all"]),
    "model-weightless": ("--model models/weightless", ["--model models/weightless", "safetensors"]),
    "model-pickled": ("--model models/pickled", ["--model models/pickled", "pickle"]),
    "model-tokenless": ("--model models/tokenless", ["--model models/tokenless", "end token"]),
    "model-torn-config": ("--model models/torn-config", ["--model models/torn-config"]),
    "model-torn-tokenizer": ("--model models/torn-tokenizer", ["--model models/torn-tokenizer"]),
    "model-unheard-of": ("--model models/unheard-of", ["--model models/unheard-of"]),
    "model-not-causal": ("--model models/bert", ["--model models/bert", "causal", "bert"]),
    "model-without-end": ("--model models/endless", ["--model models/endless", "end token"]),
    "model-with-own-code": ("--model models/own-code", ["--model models/own-code"]),
    # folders
    "run-exists": (f"{BASE} --runs runs-with-one", ["runs-with-one/run", "--resume"]),
    "name": (f"{BASE} --name ../other", ["--name ../other"]),
    "runs-is-a-file": (f"{BASE} --runs file", ["--runs file"]),
    "resume-nothing": ("--resume --name nothing", ["--resume", "nothing"]),
    "resume-without-name": ("--resume", ["--resume", "--name"]),
}
PLAIN = ("resume-without-name",)  # cases that do without the flags of the small run


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence(case, wrong_models, tmp_path, monkeypatch):
    """Exit 2 and one line that says what is wrong where; no folder, no weights, no traceback."""
    flags, fragments, *content = BAD_INPUT[case]

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded before the input was looked at")

    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        monkeypatch.setattr(kind, "from_pretrained", refuse)
    monkeypatch.setattr("builtins.input", lambda *args: "y")  # who asks is answered
    for text in content:
        Path("bad.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    Path("good.jsonl").write_text(ROW * 12)
    Path("two-errors.py").write_text("raise RuntimeError('first line\\nsecond line')\n")
    Path("good.py").write_text(
        "def f(text):\n    return text\n\n\ndef number(text):\n    return len(text)\n"
    )
    Path("file").write_text("not a folder")
    Path("runs-with-one", "run").mkdir(parents=True)

    before = sorted(tmp_path.rglob("*"))
    sentence = refused(tmp_path / "runs", flags, small=case not in PLAIN)
    assert len(sentence) < 1000
    for fragment in fragments:
        assert fragment.lower() in sentence.lower()
    left = [path for path in sorted(tmp_path.rglob("*")) if path.name != "__pycache__"]
    assert [path for path in left if path.suffix != ".pyc"] == before


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_one_sentence(device, tmp_path):
    if getattr(torch, device).is_available():
        pytest.skip("it is there")
    assert f"--device {device}" in refused(tmp_path, f"{BASE} --device {device}")


@pytest.mark.parametrize("flag", ["--name", "--data", "--reward", "--model", "--prompt-template"])
def test_a_flag_with_a_line_break_stays_one_line(flag, tmp_path):
    """A file name may hold a line break or an escape sequence, and an error quotes it."""
    value = "./a\nb\x1b[31m" + ":f" * (flag == "--reward")
    assert "\x1b" not in refused(tmp_path / "runs", BASE, flag, value)


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_missing_says_how_to_install_it(tracker, tmp_path):
    if importlib.util.find_spec(tracker):
        pytest.skip("it is installed")
    assert f"pip install {tracker}" in refused(tmp_path / "runs", f"{BASE} --{tracker}")
    assert not (tmp_path / "runs").exists()


def test_weights_that_are_torn_name_the_model(models, tmp_path):
    """Cannot be seen before loading; still the user's folder is at fault, not a file of the run."""
    data = (models / "tiny" / "model.safetensors").read_bytes()
    torn = copied(models / "tiny", tmp_path / "torn", ["model.safetensors"])
    (torn / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert f"--model {torn}" in refused(tmp_path / "runs", f"{BASE} --model {torn}")


def test_out_of_gpu_memory_names_the_flags_that_help(monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(train, "improve", full)
    result = launch(tmp_path, f"{BASE} --micro-batch-tokens 4321 --max-slots 7")
    assert result.status == 1 and result.err.count("\n") == 1
    for fragment in ("--micro-batch-tokens 4321", "--max-slots 7", "--max-new-tokens 8"):
        assert fragment in result.err


def test_the_command_itself_refuses_in_one_line(tmp_path):
    """In a process of its own: nothing that an import prints may stand beside the sentence."""
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "--algo", "gsop"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: --algo")


# ------------------------------------------------------------------------------ what flags take

FIELDS = {field.name: field for field in train.FLAGS}


def given(name: str, value) -> dict:
    return train.parse_flags([train.dashed(name), str(value)])


@pytest.mark.parametrize("name", FIELDS)
def test_a_flag_takes_its_range_and_no_more(name):
    """Numbers have a bound; a value at it, or just past it, is taken; one on the other side, and
    what is no number, is refused by name."""
    kinds, limits = train.value_types(FIELDS[name]), FIELDS[name].metadata
    if limits["choices"]:
        assert given(name, limits["choices"][-1]) == {name: limits["choices"][-1]}
        wrong = ["nonsense"]
    elif kinds == [bool]:
        assert train.parse_flags([train.dashed(name)]) == {name: True}
        assert train.parse_flags([train.dashed(name).replace("--", "--no-", 1)]) == {name: False}
        return
    elif kinds == [str]:
        assert given(name, "text") == {name: "text"}
        return
    elif limits["at_least"] is not None:
        assert given(name, limits["at_least"]) == {name: limits["at_least"]}
        wrong = [limits["at_least"] - 1, "nan", "inf", "many"]
    else:
        assert given(name, limits["above"] + 0.5) == {name: limits["above"] + 0.5}
        wrong = [limits["above"], "nan", "inf", "many"]
    if limits["at_most"] < math.inf:
        assert given(name, limits["at_most"]) == {name: limits["at_most"]}
        wrong.append(limits["at_most"] + 0.1)
    for value in wrong:
        with pytest.raises(rewards.UserError, match=train.dashed(name)):
            given(name, value)


def test_help_has_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit:
        train.main(["--help"])
    text = "".join(capsys.readouterr().out.split())  # names are broken over lines
    assert exit.value.code == 0
    for name, field in FIELDS.items():
        assert train.dashed(name) in text
        assert "".join(field.metadata["help"].split()) in text
    for name in gspo.ALGOS:
        assert name in text
    assert "samplingandinscoring;default1.0" in text  # temperature


@pytest.mark.parametrize(
    "formatter",
    [["ruff", "format", "--isolated", "--line-length", "88"], ["black", "--line-length", "79"]],
    ids=["ruff", "black"],
)
def test_flags_survive_another_formatter(formatter, tmp_path, monkeypatch, capsys):
    """Names, types, defaults and help are data: the same wherever lines are broken."""
    if not importlib.util.find_spec(formatter[0]):
        pytest.skip(f"{formatter[0]} is not installed")
    path = tmp_path / "reformatted.py"
    path.write_text((ROOT / "train.py").read_text())
    command = [sys.executable, "-m", *formatter, "--quiet", str(path)]
    subprocess.run(command, check=True)
    assert path.read_text() != (ROOT / "train.py").read_text()

    spec = importlib.util.spec_from_file_location("reformatted", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "reformatted", module)  # dataclasses look there
    spec.loader.exec_module(module)
    described = []
    for each in (train, module):
        flags = dataclasses.fields(each.Config)
        described.append([(f.name, f.type, f.default, dict(f.metadata)) for f in flags])
        with pytest.raises(SystemExit):
            each.parse_flags(["--help"])
        described.append(capsys.readouterr().out)
    assert described[:2] == described[2:]


# ------------------------------------------------------------------------------ what flags reach

# flag -> algorithm that has it, the function of gspo.py that it sets, its parameter, a value
REACHED = {
    "clip_low": ("gspo", "loss", "clip_low", 0.01),
    "clip_high": ("ppo", "loss", "clip_high", 0.3),
    "dual_clip": ("ppo", "loss", "dual_clip", 3.0),
    "ratio_max": ("cispo", "loss", "ratio_max", 2.0),
    "tau_pos": ("sapo", "loss", "tau_pos", 0.7),
    "tau_neg": ("sapo", "loss", "tau_neg", 1.3),
    "max_new_tokens": ("dr-grpo", "loss", "max_completion_length", 6),
    "advantage_scale": ("grpo", "advantages", "scale", "batch"),
    "gamma": ("reinforce++", "advantages", "gamma", 0.9),
    "gae_lambda": ("ppo", "advantages", "lam", 0.5),
    "value_clip": ("ppo", "critic", "clip", 0.4),
}


@pytest.mark.parametrize("flag", REACHED)
def test_a_flag_reaches_its_function(flag, monkeypatch, tmp_path):
    algorithm, field, parameter, value = REACHED[flag]
    found = []
    if field == "critic":
        value_loss = gspo.value_loss

        @functools.wraps(value_loss)
        def keep(*positional, **keyword):
            found.append(keyword)
            return value_loss(*positional, **keyword)

        monkeypatch.setattr(gspo, "value_loss", keep)
    else:
        calls = spied(monkeypatch, algorithm, field)
    good(tmp_path, f"{BASE} --steps 1 --algo {algorithm} {train.dashed(flag)} {value}")
    if field != "critic":
        found = [keyword for _, keyword, _ in calls]
    assert found and all(keyword[parameter] == value for keyword in found)


@pytest.mark.parametrize("algorithm", gspo.ALGOS)
def test_without_flags_the_papers_numbers_hold(algorithm, monkeypatch, tmp_path):
    """They stand in the signatures alone; the run's config.json tells them."""
    row = gspo.ALGOS[algorithm]
    loss = spied(monkeypatch, algorithm, "loss")
    advantages = spied(monkeypatch, algorithm, "advantages")
    config = config_of(good(tmp_path, f"{BASE} --steps 1 --algo {algorithm}").folder)
    of_the_run = {"denom", "max_completion_length", "bootstrap"}
    for calls, function, flags in (
        (loss, row.loss, row.loss_flags),
        (advantages, row.advantages, row.advantage_flags),
    ):
        defaults = gspo.keyword_parameters(function)
        assert calls
        for _, keyword, _ in calls:
            for name in keyword.keys() - of_the_run:
                assert keyword[name] == defaults[name]
        for parameter in flags.keys() - of_the_run:
            assert config[flags[parameter]] == defaults[parameter]


def config_of(folder) -> dict:
    return strict((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "flags, resolved",
    [
        ("--algo gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "ratio_max": None, "gamma": None}),
        ("--algo dapo", {"clip_low": 0.2, "clip_high": 0.28, "advantage_scale": "group"}),
        ("--algo dr-grpo", {"advantage_scale": "none", "kl_coef": 0.0}),
        ("--algo ppo", {"gamma": 1.0, "gae_lambda": 0.95, "value_clip": 0.2, "dual_clip": None}),
        ("--mismatch-mask token", {"mismatch_low": 0.5, "mismatch_high": 5.0}),
        ("--mismatch-mask completion", {"mismatch_low": 0.99, "mismatch_high": 1.01}),
        ("", {"mismatch_low": None, "value_clip": None}),
    ],
)
def test_flags_that_were_not_given_are_told_with_their_values(flags, resolved):
    config = dataclasses.asdict(train.resolve(train.parse_flags(flags.split())))
    assert {name: config[name] for name in resolved} == resolved


@pytest.mark.parametrize(
    "flag", [flag for flag in REACHED if flag != "max_new_tokens"] + ["critic_lr"]
)
def test_a_flag_of_another_algorithm_is_refused(flag):
    """Given where nothing would read it: one sentence, for every algorithm that has it not."""
    refusals = 0
    value = REACHED[flag][3] if flag in REACHED else 1e-3
    for name, row in gspo.ALGOS.items():
        reached = {*row.loss_flags.values(), *row.advantage_flags.values()}
        if flag in reached or (row.critic and flag in ("critic_lr", "value_clip")):
            train.resolve({"algo": name, flag: value})
            continue
        refusals += 1
        with pytest.raises(
            rewards.UserError, match=f"{train.dashed(flag)} .*{re.escape(name)} has none"
        ):
            train.resolve({"algo": name, flag: value})
    assert 0 < refusals < len(gspo.ALGOS)


@pytest.mark.parametrize(
    "prompts, group, expected", [(32, 8, 64), (10, 5, 25), (3, 3, 3), (1, 2, 1)]
)
def test_a_rollout_is_at_most_four_updates_of_equal_size(prompts, group, expected):
    config = train.resolve({"prompts_per_step": prompts, "group_size": group})
    assert config.completions_per_update == expected


def test_dapo_punishes_the_last_fifth_and_refills_by_default():
    config = train.resolve({"algo": "dapo", "max_new_tokens": 10})
    assert config.overlong_cache == 2 and config.dynamic_sampling
    config = train.resolve({"algo": "gspo", "max_new_tokens": 10})
    assert config.overlong_cache == 0 and not config.dynamic_sampling
