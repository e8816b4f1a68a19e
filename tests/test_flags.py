"""The command line of train.py: ranges of flags, one sentence for each mistake, defaults."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import gpu_report
import gspo
import train
from support import data
from support.flags import dashed, kinds_of
from support.user import UserError
from tools import (
    BASE,
    ROOT,
    Calls,
    character_tokenizer,
    copied,
    good,
    launch,
    needed,
    refused,
    spied,
    strict,
)

pytestmark = pytest.mark.usefixtures("place")
FIELDS = {field.name: field for field in dataclasses.fields(train.Config)}

# ---- bad input


@pytest.fixture(scope="module")
def wrong_models(models):
    """Model folders that cannot be trained, each for its own reason."""
    tiny, weights = models / "tiny", "model.safetensors"
    copied(tiny, models / "weightless", [weights])
    copied(tiny, models / "pickled", [weights], pytorch_model__bin=b"\x80\x02}q\x00.")
    copied(tiny, models / "tokenless", ["tokenizer.json", "tokenizer_config.json"])
    copied(tiny, models / "torn-config", config__json=b'{"model_type": ')
    copied(tiny, models / "torn-tokenizer", tokenizer__json=b'{"version": ')
    copied(tiny, models / "unheard-of", config__json={"model_type": "nonsense-9000"})
    bert = transformers.BertConfig(
        vocab_size=18, hidden_size=8, num_attention_heads=1, num_hidden_layers=1
    )
    copied(tiny, models / "bert", config__json=bert.to_dict())

    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    endless = {name: value for name, value in settings.items() if name != "eos_token"}
    without_end = json.loads((tiny / "config.json").read_text()) | {"eos_token_id": None}
    copied(
        tiny,
        models / "endless",
        ["generation_config.json"],
        tokenizer_config__json=endless,
        config__json=without_end,
    )
    strange = json.loads((tiny / "config.json").read_text()) | {"eos_token_id": "a"}
    copied(tiny, models / "strange-end", ["generation_config.json"], config__json=strange)
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


ROW = '{"prompt": "1+1=", "answer": "2"}\n'
DATA = f"{BASE} --data bad.jsonl"
MATH = "--model models/tiny --reward math --data bad.jsonl"
CHAT = f"{BASE} --model models/strict-chat"
# name -> flags, words of the sentence, and the content of bad.jsonl: one row a mechanism
BAD_INPUT = {
    # the parser
    "unknown-flag": (f"{BASE} --group_size 4", ["--group_size", "did you mean --group-size"]),
    "unknown-flags": (
        f"{BASE} --learning_rate 1 --wibble=2 --beta -1",
        ["--learning_rate, --wibble=2, --beta: there is no", "for --learning-rate use --lr"],
    ),
    "no-value": (f"{BASE} --lr", ["--lr", "expected"]),
    "wrong-type": (f"{BASE} --steps 1.5", ["--steps", "1.5"]),
    "wrong-choice": (f"{BASE} --algo gsop", ["--algo gsop", "expected one of", "mean gspo"]),
    # flags that do not fit each other, or would do nothing
    "not-dividing": (f"{BASE} --completions-per-update 7", ["--completions-per-update 7", "16"]),
    "zero-is-given": (f"{BASE} --algo reinforce --clip-low 0", ["--clip-low", "reinforce"]),
    "tis-of-sampler": (
        f"{BASE} --old-logprobs sampler --tis-cap 2",
        ["--tis-cap", "--old-logprobs trainer"],
    ),
    "a-judge-without-its-model": (f"{BASE} --reward judge", ["--reward", "judge:"]),
    "no-such-judge": (f"{BASE} --reward judge:/nowhere/at/all", ["judge", "/nowhere/at/all"]),
    "ref-without-kl": (f"{BASE} --ref-every 2", ["--ref-every", "--kl-coef"]),
    "eval-without-data": (f"{BASE} --eval-data bad.jsonl", ["--eval-data", "--data"]),
    "overlong-beyond-the-limit": (
        f"{BASE} --overlong-cache 9",
        ["--overlong-cache 9", "--max-new-tokens"],
    ),
    "replay-of-a-dense-model": (f"{BASE} --routing-replay", ["--routing-replay"]),
    "system-without-chat": (f"{BASE} --system 12", ["--system", "chat template"]),
    "template": (f"{BASE} --prompt-template 1+1=", ["--prompt-template", "{prompt}"]),
    "template-surrogate": (f"{BASE} --prompt-template \udcff{{prompt}}", ["--prompt-template"]),
    "chat-args-no-json": (f"{CHAT} --chat-template-args {{a}}", ["--chat-template-args", "JSON"]),
    "chat-without-system": (f"{CHAT} --system 12", ["System role not supported"]),
    "a-task-for-readers": ("--task sums", ["--task sums", "--model"]),
    # rewards
    "unknown-reward": ("--model models/tiny --reward maths", ["--reward", "did you mean", "math"]),
    "reward-file-raises": (
        "--model models/tiny --reward two-errors.py:f",
        ["--reward", "two-errors.py", "RuntimeError"],
    ),
    # data
    "data-missing": (f"{BASE} --data no.jsonl", ["--data", "no.jsonl", "no such file"]),
    "data-broken": (DATA, ["--data bad.jsonl", "line 3", "JSON"], ROW + "\n" + '{"prompt": \n'),
    "data-answer-type": (
        MATH,
        ["bad.jsonl", "line 2", "field answer"],
        ROW + '{"prompt": "1+1=", "answer": ["2"]}\n',
    ),
    "data-one-row": (DATA, ["--data bad.jsonl", "two prompts"], ROW),
    "eval-data-broken": (
        f"{BASE} --data good.jsonl --eval-data bad.jsonl",
        ["--eval-data bad.jsonl", "line 1"],
        "{\n",
    ),
    "prompts-too-long": (
        DATA,
        ["--max-new-tokens", "512"],
        "".join(f'{{"prompt": "{"1" * n}", "answer": "2"}}\n' for n in range(600, 612)),
    ),
    "no-room-for-a-prompt": (f"{BASE} --max-new-tokens 600", ["--max-new-tokens", "512"]),
    # models; an absolute folder where nothing must be found: about a name the hub would be asked
    "model-missing": ("--model /nowhere/at/all", ["--model /nowhere/at/all"]),
    "model-weightless": ("--model models/weightless", ["--model models/weightless"]),
    "model-pickled": ("--model models/pickled", ["--model models/pickled"]),
    "model-tokenless": ("--model models/tokenless", ["--model models/tokenless"]),
    "model-torn-config": ("--model models/torn-config", ["--model models/torn-config"]),
    "model-torn-tokenizer": ("--model models/torn-tokenizer", ["--model models/torn-tokenizer"]),
    "model-unheard-of": ("--model models/unheard-of", ["--model models/unheard-of"]),
    "model-not-causal": ("--model models/bert", ["--model models/bert", "causal"]),
    "model-without-end": ("--model models/endless", ["--model models/endless", "end"]),
    "model-strange-end": ("--model models/strange-end", ["--model models/strange-end", "eos"]),
    "model-with-own-code": ("--model models/own-code", ["--model models/own-code"]),
    # folders
    "run-exists": (f"{BASE} --runs runs-with-one", ["--name run", "--resume"]),
    "name": (f"{BASE} --name ../other", ["--name ../other"]),
    "runs-is-a-file": (f"{BASE} --runs file", ["file"]),
    "runs-not-utf-8": (f"{BASE} --runs r\udcff", ["--runs", "UTF-8"]),
    "resume-nothing": ("--resume --name nothing", ["--resume", "nothing"]),
    "resume-without-name": ("--resume", ["--resume", "--name"]),
}
PLAIN = ("resume-without-name", "a-task-for-readers")  # without the flags of the small run


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence(case, wrong_models, tmp_path, monkeypatch):
    """Exit status 2 and one line that names the mistake. No folder, no traceback."""
    flags, fragments, *content = BAD_INPUT[case]
    monkeypatch.setattr("builtins.input", lambda *args: "y")  # who asks is answered
    for text in content:
        Path("bad.jsonl").write_text(text)
    Path("good.jsonl").write_text(ROW * 12)
    Path("two-errors.py").write_text("raise RuntimeError('first line\\nsecond line')\n")
    Path("file").write_text("not a folder")
    Path("runs-with-one", "run").mkdir(parents=True)
    Path("runs-with-one/run/config.json").write_text("{}")

    before = sorted(tmp_path.rglob("*"))
    sentence = refused(tmp_path / "runs", flags, small=case not in PLAIN)
    assert len(sentence) < 1000
    for fragment in fragments:
        assert fragment.lower() in sentence.lower()
    left = [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts]
    assert left == before


@pytest.mark.parametrize("case", ["data-broken", "prompts-too-long", "chat-without-system"])
def test_bad_input_is_found_before_weights_load(case, wrong_models, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded before the input was looked at")

    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        monkeypatch.setattr(kind, "from_pretrained", refuse)
    test_bad_input_is_one_sentence(case, wrong_models, tmp_path, monkeypatch)


@pytest.mark.parametrize("theirs", train.ELSEWHERE)
def test_flags_of_other_projects_are_answered_with_ours(theirs, tmp_path):
    ours = train.ELSEWHERE[theirs]
    assert set(re.findall("--[a-z-]+", ours)) <= {dashed(name) for name in FIELDS}
    for given in (theirs, theirs.replace("-", "_").replace("__", "--"), f"{theirs}=1"):
        assert ours in refused(tmp_path, BASE, given, *["1"] * ("=" not in given))


def test_a_word_that_is_like_no_flag_gets_no_guess(tmp_path):
    assert "did you mean" not in refused(tmp_path, f"{BASE} --wibble-wobble 3")


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


def test_weights_that_are_torn_name_the_model(models, tmp_path):
    """This shows only while weights load. The sentence blames the user's folder."""
    data = (models / "tiny" / "model.safetensors").read_bytes()
    torn = copied(models / "tiny", tmp_path / "torn", ["model.safetensors"])
    (torn / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert f"--model {torn}" in refused(tmp_path / "runs", f"{BASE} --model {torn}")


FULL = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "python": MemoryError(),
}


@pytest.mark.parametrize("memory", FULL)
def test_memory_that_runs_out_is_one_sentence_with_what_helps(memory, monkeypatch, tmp_path):
    good(tmp_path, f"{BASE} --steps 1")

    def full(*args, **kwargs):
        raise FULL[memory]

    monkeypatch.setattr(train, "improve", full)
    result = launch(tmp_path, "--resume --name run --steps 2", small=False)
    assert result.status == 1 and result.err.count("\n") == 1 and "out of memory" in result.err
    for fragment in ("--micro-batch-tokens", "--cache-gb", "--resume --name run"):
        assert fragment in result.err


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), TypeError("7 arguments")])
def test_a_bug_keeps_its_traceback(error, monkeypatch, tmp_path):
    """Of a forker's own, in the loop, or before it, while the sampler is checked."""

    def broken(*args, **kwargs):
        raise error

    for module, name in ((train, "freeze"), (train.rollout, "check_scorer")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            with pytest.raises(type(error), match=str(error)):
                launch(tmp_path / name, BASE)


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


# ---- what flags take


def given(name: str, value):
    """The value of a flag as train.py reads it, nothing filled in."""
    config = train.parse(train.Config, "", [f"{dashed(name)}={value}"])
    return getattr(config, name)


@pytest.mark.parametrize("name", FIELDS)
def test_a_flag_takes_its_range_and_no_more(name):
    """Every number has a bound. Values within it are accepted. Values beyond it, and words that are
    no number, are refused by name."""
    kind, limits = kinds_of(FIELDS[name])[0], FIELDS[name].metadata
    if limits["choices"]:
        assert given(name, limits["choices"][0]) == limits["choices"][0]
        wrong = ["nonsense"]
    elif kind is bool:
        for word, value in ((dashed(name), True), (dashed(f"no_{name}"), False)):
            assert getattr(train.parse(train.Config, "", [word]), name) is value
        return
    elif kind in (str, list[str]):
        assert given(name, "text") in ("text", ["text"])
        return
    elif limits["low"] is not None:
        assert given(name, limits["low"]) == limits["low"]
        wrong = [limits["low"] - 1, "nan", "inf", "many"]
    else:
        assert given(name, limits["above"] + 0.5) == limits["above"] + 0.5
        wrong = [limits["above"], "nan", "inf", "many"]
    if limits["high"] is not None:
        assert given(name, limits["high"]) == limits["high"]
        wrong.append(limits["high"] + 0.1)
    for value in wrong:
        with pytest.raises(UserError, match=dashed(name)):
            given(name, value)


def test_a_list_that_is_given_replaces_the_one_of_a_resumed_run():
    for words, expected in (([], ["a"]), (["--stop", "b", "--stop", "c"], ["b", "c"])):
        config = train.parse(train.Config, "", words, defaults={"stop": ["a"]})
        assert config.stop == expected
    with pytest.raises(UserError, match="--stop: expected texts"):
        train.parse(train.Config, "", [], defaults={"stop": [1]})


def test_help_has_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit:
        train.main(["--help"])
    text = "".join(capsys.readouterr().out.split())  # names are broken over lines
    assert exit.value.code == 0
    for name, field in FIELDS.items():
        assert dashed(name) in text
        assert "".join(field.metadata["help"].split()) in text
    for name in gspo.ALGOS:
        assert name in text
    assert "samplingandinscoring;default1.0" in text  # temperature


def test_a_negative_weight_is_a_value_and_no_flag(tmp_path):
    flags = "--model models/tiny --steps 1 --reward -0.5*pay.py:even+pay.py:always"
    folder = good(tmp_path, flags).folder
    assert strict((folder / "config.json").read_text())["reward"].startswith("-0.5*")


# ---- what flags reach

# algorithm -> the functions of gspo.py that get its flags, with a value of each
REACHED = {
    "gspo": {"loss": {"clip_low": 0.01}},
    "cispo": {"loss": {"ratio_max": 2.0}},
    "sapo": {"loss": {"tau_pos": 0.7, "tau_neg": 1.3}},
    "dr-grpo": {"loss": {"max_new_tokens": 6}},
    "grpo": {"advantages": {"advantage_scale": "batch"}},
    "reinforce++": {"advantages": {"gamma": 0.9}},
    "ppo": {
        "loss": {"clip_high": 0.3, "dual_clip": 3.0},
        "advantages": {"gae_lambda": 0.5},
        "critic": {"value_clip": 0.4},
    },
}
VALUES = {}
for functions in REACHED.values():
    for values in functions.values():
        VALUES |= values


@pytest.mark.parametrize("algorithm", REACHED)
def test_flags_reach_their_functions(algorithm, monkeypatch, tmp_path):
    calls = {field: spied(monkeypatch, algorithm, field) for field in ("loss", "advantages")}
    calls["critic"] = Calls(gspo.value_loss)
    monkeypatch.setattr(gspo, "value_loss", calls["critic"].stand_in)
    words = []
    for values in REACHED[algorithm].values():
        words += [f"{dashed(flag)}={value}" for flag, value in values.items()]
    good(tmp_path, f"{BASE} --steps 1 --algo {algorithm}", *words)
    for field, values in REACHED[algorithm].items():
        assert calls[field]
        for _, keyword, _ in calls[field]:
            assert values.items() <= keyword.items()


def test_the_scripts_of_published_runs_are_accepted(tmp_path):
    """Their flags, the template that bash makes of them, and the points that they name."""
    scripts = sorted((ROOT / "docs/runs/published").glob("*.sh"))
    assert len(scripts) == 2
    for script in scripts:
        assert script.read_text() in gpu_report.reference_runs()
        stub = "python() { printf '%s\\0' \"$@\"; printf '\\1'; }\n"
        output = subprocess.check_output(["bash", "-c", stub + script.read_text()]).decode()
        _, trained, drawn = [each.split("\0")[1:-1] for each in output.split("\1")[:-1]]
        config = train.parse_flags(trained)
        published = f"docs/runs/published/{script.stem}.csv"
        assert drawn == ["--report", f"runs/{config.name}", published]
        assert (ROOT / published).exists()
        form = data.PromptFormat(character_tokenizer(), config)
        assert "{prompt}\n" in form.template and "\\n" not in form.template


def resolved(flags: str) -> train.Config:
    return train.parse_flags(flags.split())


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--algo gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "ratio_max": None, "gamma": None}),
        ("--algo dapo", {"clip_low": 0.2, "clip_high": 0.28, "advantage_scale": "group"}),
        ("--algo dr-grpo", {"advantage_scale": "none", "kl_coef": 0.0}),
        ("--algo grpo", {"kl_coef": 0.04, "dynamic_sampling": False}),
        ("--algo ppo", {"gamma": 1.0, "gae_lambda": 0.95, "value_clip": 0.2, "dual_clip": None}),
        ("--algo ppo --lr 0.1", {"critic_lr": 1.0}),
        ("--algo dapo --max-new-tokens 10", {"overlong_cache": 2, "dynamic_sampling": True}),
        ("--algo gspo --max-new-tokens 10", {"overlong_cache": 0, "dynamic_sampling": False}),
        ("--lora-rank 4", {"lr": 2e-3, "lora_alpha": 8.0}),
        ("--model models/tiny", {"lr": 1e-5, "warmup_steps": 3}),
        ("--model models/tiny --lora-rank 4", {"lr": 1e-4}),
        ("", {"lr": 2e-4, "warmup_steps": 0, "completions_per_update": 64}),
        ("--prompts-per-step 10 --group-size 5", {"completions_per_update": 25}),
        ("--prompts-per-step 3 --group-size 3", {"completions_per_update": 3}),
        ("--prompts-per-step 1 --group-size 2", {"completions_per_update": 1}),
    ],
)
def test_flags_that_were_not_given_have_the_right_values(flags, expected):
    config = dataclasses.asdict(resolved(flags))
    assert {name: config[name] for name in expected} == pytest.approx(expected)


def test_a_flag_of_another_algorithm_is_refused():
    """Where nothing would read it: one sentence, for every algorithm that does not have it."""
    for flag in ["critic_lr", *sorted(VALUES.keys() - {"max_new_tokens"})]:
        refusals = 0
        value = VALUES.get(flag, 1e-3)
        for name, row in gspo.ALGOS.items():
            reached = train.keywords(row.loss).keys() | train.keywords(row.advantages).keys()
            if row.reads == "values":
                reached |= {"critic_lr", "value_clip"}
            words = f"--algo {name} {needed(name)} {dashed(flag)} {value}"
            if flag in reached:
                assert getattr(resolved(words), flag) == value
                continue
            refusals += 1
            with pytest.raises(UserError, match=f"{dashed(flag)} .*{re.escape(name)} has none"):
                resolved(words)
        assert 0 < refusals < len(gspo.ALGOS)
