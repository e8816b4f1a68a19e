"""The command line of train.py: ranges of flags, one sentence for each mistake, defaults."""

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import train
from forks import fork, program
from support.command_line import kinds_of, parse
from support.errors import UserError, dashed
from tools import BASE, ROOT, copied, good, launch, refused, spied

pytestmark = pytest.mark.usefixtures("place")
FIELDS = {field.name: field for field in dataclasses.fields(train.Config)}

# ---- bad input


@pytest.fixture(scope="module")
def wrong_models(models):
    """Model folders that cannot be trained, each for its own reason."""
    tiny = models / "tiny"

    def wrong(name, without=(), **files):
        copied(tiny, models / name, without, **files)

    def settings(name, **changes):
        return json.loads((tiny / name).read_text()) | changes

    without_end = settings("tokenizer_config.json", eos_token=None)
    wrong("tokenless", ["tokenizer.json", "tokenizer_config.json"])
    wrong("torn-config", config__json=b'{"model_type": ')
    wrong("reshaped", config__json=settings("config.json", intermediate_size=80))
    bert = dict(vocab_size=18, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
    wrong("bert", config__json=transformers.BertConfig(**bert).to_dict())
    config = settings("config.json", eos_token_id=None)
    files = dict(tokenizer_config__json=without_end, config__json=config)
    wrong("endless", ["generation_config.json"], **files)
    template = b"{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
    wrong("strict-chat", chat_template__jinja=template)
    weights, pickled = load_file(tiny / "model.safetensors"), io.BytesIO()
    torch.save(weights, pickled)
    wrong("pickled", ["model.safetensors"], pytorch_model__bin=pickled.getvalue())
    del weights["model.layers.0.mlp.up_proj.weight"]
    wrong("incomplete", model__safetensors=save(weights, {"format": "pt"}))
    wrong("torn-weights", model__safetensors=(tiny / "model.safetensors").read_bytes()[:5000])
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    quantized = settings("config.json", quantization_config=quantized)
    wrong("quantized", config__json=quantized)
    (models / "a-run/checkpoints").mkdir(parents=True)
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    wrong("own-code", config__json=settings("config.json", **own), mine__py=b"open('ran', 'w')")


ROW = '{"prompt": "1+1=", "answer": "2"}\n'
LISTED = '{"prompt": "1+1=", "answer": ["2"]}\n'
MISSING = "mps" if torch.cuda.is_available() else "cuda"
# a row a mechanism: flags after those of BASE, words of the sentence, the content of bad.jsonl
BAD_INPUT = [
    # the parser
    ("--group_size 4", "--group_size: .*did you mean --group-size"),
    ("--learning_rate 1 --wib=2 --beta -1", "--learning_rate, --wib=2, --beta: no such flag"),
    ("--wibble-wobble 3", r"--wibble-wobble: no such flag$"),
    ("--lr", "--lr: expected"),
    ("--group-size 9999999999999", "--group-size 9999999999999: .*at most 1000000"),
    ("--algo gsop", "--algo gsop: expected one of .*mean gspo"),
    ("--reward -1*mth", "--reward -1.mth: .*mean math"),
    # flags that do not fit each other, or would do nothing
    ("--ratio-max 2", "--ratio-max 2.0: gspo doesn't use it; it is for cispo"),
    ("--algo grpo --critic-lr 1e-3", "--critic-lr 0.001: grpo has no critic; ppo"),
    ("--algo rloo --teacher models/moe", "--teacher models/moe: rloo has no teacher; opd"),
    ("--completions-per-update 7", "--completions-per-update 7: doesn't divide 16"),
    ("--old-logprobs sampler --tis-cap 2", "--tis-cap: .*--old-logprobs trainer"),
    ("--ref-every 2", "--ref-every: .*--kl-coef"),
    ("--eval-data bad.jsonl", "--eval-data: .*--data"),
    ("--algo ppo --overlong-cache 4", "--overlong-cache: not with a critic"),
    ("--routing-replay", "--routing-replay: "),
    ("--algo opd", "--algo opd: needs a --teacher"),
    (f"--device {MISSING}", f"--device {MISSING}: this machine has none"),
    ("--prompt-template 1+1=", "--prompt-template: .*{prompt}"),
    ("--model models/strict-chat --system 12", "No system"),
    ("--model tiny --task sums", "--task sums: .*--model"),
    ("--track trackio", "--track trackio: needs pip install trackio"),
    # files with functions
    ("--reward two-errors.py:f", "--reward .*two-errors.py.*RuntimeError"),
    ("--reward judge", "--reward .*judge:"),
    ("--reward judge:/nowhere/at/all", "judge.*/nowhere/at/all"),
    ("--sampler pay.py:no", "--sampler pay.py:no: expected vllm or file.py:function"),
    # data
    ("--data no.jsonl", "--data no.jsonl: .*No such file"),
    ("--data bad.jsonl", "--data bad.jsonl, line 3: .*JSON", ROW + "\n" + '{"prompt": \n'),
    ("--reward math --data bad.jsonl", "bad.jsonl, line 2: .*field answer", ROW + LISTED),
    ("--data good.jsonl --eval-data bad.jsonl", "--eval-data bad.jsonl, line 1", "{\n"),
    ("--max-new-tokens 510", "more than 2 tokens, .*context, 512, minus --max-new-tokens"),
    # models. A folder that does not exist is absolute: the hub would be asked for another name
    ("--model /nowhere/at/all", "--model /nowhere/at/all: expected .* folder .*Repo id"),
    ("--model models/pickled", "--model models/pickled: .*safetensors"),
    ("--model models/tokenless", "--model models/tokenless: "),
    ("--model models/torn-config", "--model models/torn-config: "),
    ("--model models/reshaped", "layers.0.mlp.down_proj.weight"),
    ("--model models/bert", "--model models/bert: expected weights that fit"),
    ("--model models/endless", "--model models/endless: .*end token"),
    ("--model models/quantized", "--model models/quantized: its weights are quantized"),
    ("--model models/own-code", "--model models/own-code: "),
    ("--model models/incomplete", "1 are missing or have wrong shapes, .*layers.0.mlp.up_proj"),
    ("--model models/torn-weights", "--model models/torn-weights: "),
    ("--model models/a-run", "for a run: a checkpoint"),
    # folders
    ("--runs runs-with-one", "--name run: .*--resume"),
    ("--name ../other", "--name ../other: "),
    ("--runs file", "--runs file --name run: expected a writable folder: "),
    ("--runs /proc/x", "--runs /proc/x --name run: expected a writable folder: "),
    ("--resume --name=", "--resume: needs the --name"),
    ("--resume --name nothing", "--resume: .*nothing"),
]


@pytest.mark.parametrize("flags, words, content", [(*case, "")[:3] for case in BAD_INPUT])
def test_bad_input_is_one_sentence(flags, words, content, wrong_models, tmp_path, monkeypatch):
    """Exit status 2 and one line that names the mistake. No folder, no traceback."""
    monkeypatch.setattr("builtins.input", lambda *args: "y")  # who asks is answered
    Path("bad.jsonl").write_text(content)
    Path("good.jsonl").write_text(ROW * 12)
    Path("two-errors.py").write_text("raise RuntimeError('first line\\nsecond line')\n")
    Path("file").write_text("not a folder")
    Path("runs-with-one", "run").mkdir(parents=True)
    Path("runs-with-one/run/config.json").write_text("{}")
    if "models/" not in flags:  # found before weights load
        for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
            monkeypatch.setattr(kind, "from_pretrained", None)

    before = sorted(tmp_path.rglob("*"))
    sentence = refused(tmp_path / "runs", f"{BASE} {flags}")
    assert re.search(words, sentence) and len(sentence) < 1000, sentence
    left = [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts]
    assert left == before


def test_a_flag_with_a_line_break_stays_one_line(tmp_path):
    """A file name may hold a line break or an escape sequence, and an error quotes it."""
    for flag in ("--name", "--data", "--reward", "--model", "--prompt-template"):
        value = "./a\nb\x1b[31m" + ":f" * (flag == "--reward")
        assert "\x1b" not in refused(tmp_path / "runs", BASE, flag, value)


def raising(error):
    def raises(*args, **kwargs):
        raise error

    return raises


def test_memory_that_runs_out_is_one_sentence_with_what_helps(monkeypatch, tmp_path):
    good(tmp_path, f"{BASE} --steps 1")
    of_cpus = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes."
    for error in (torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(of_cpus)):
        monkeypatch.setattr(train, "score", raising(error))
        result = launch(tmp_path, "--resume --name run --steps 2", small=False)
        assert result.status == 1 and result.err.count("\n") == 1
        for words in ("out of memory", "--micro-batch-tokens", "--cache-gb", "--resume --name run"):
            assert words in result.err


def test_a_bug_keeps_its_traceback(monkeypatch, tmp_path):
    """While the sampler is checked. In the loop it would be the same."""
    monkeypatch.setattr(train, "check_scorer", raising(RuntimeError("size mismatch")))
    with pytest.raises(RuntimeError, match="size mismatch"):
        launch(tmp_path, BASE)
    monkeypatch.setenv("GSPO_TRACEBACK", "1")  # for a bug that looks like a mistake of the user
    with pytest.raises(UserError, match="--lr -1.0"):
        launch(tmp_path, f"{BASE} --lr -1")


def test_the_command_itself_refuses_in_one_line(tmp_path):
    """In a process of its own: nothing that an import prints may stand beside the sentence."""
    command = "import runpy\nrunpy.run_path('train.py', run_name='__main__')\n"
    out, err = tmp_path / "out", tmp_path / "err"
    process = fork(program, command, "--algo", "gsop", out=out, err=err, folder=ROOT)
    process.join()
    assert process.exitcode == 2 and out.read_text() == ""
    assert err.read_text().count("\n") == 1 and err.read_text().startswith("error: --algo")


# ---- values of flags


def given(name: str, value):
    """The value of a flag as train.py reads it, nothing filled in."""
    config = parse(train.Config, "", [f"{dashed(name)}={value}"])
    return getattr(config, name)


@pytest.mark.parametrize("name", FIELDS)
def test_a_flag_takes_its_range_and_no_more(name):
    """Values beyond it, and words that are no number, are refused by name."""
    kind = kinds_of(FIELDS[name])[0]
    limits = dict.fromkeys(("choices", "low", "above", "high")) | FIELDS[name].metadata
    right, wrong = [], []
    if limits["choices"]:
        right, wrong = [limits["choices"][0]], ["nonsense"]
    elif kind is bool:
        for word, value in ((dashed(name), True), (dashed(f"no_{name}"), False)):
            assert getattr(parse(train.Config, "", [word]), name) is value
    elif kind in (str, list[str]):
        assert given(name, "text") in ("text", ["text"])
    elif limits["low"] is not None:
        right, wrong = [limits["low"]], [limits["low"] - 1, "nan", "many"]
    elif limits["above"] is not None:
        right, wrong = [limits["above"] + 0.5], [limits["above"], "nan", "many"]
    else:  # a number without bounds
        right, wrong = [-0.5, 0.5], ["many"]
    if limits["high"] is not None:
        right.append(limits["high"])
        wrong.append(limits["high"] + 0.1)
    for value in right:
        assert given(name, value) == value
    for value in wrong:
        with pytest.raises(UserError, match=dashed(name)):
            given(name, value)


def test_a_list_that_is_given_replaces_the_one_of_a_resumed_run():
    for words, expected in (([], ["a"]), (["--stop", "b", "--stop", "c"], ["b", "c"])):
        assert parse(train.Config, "", words, defaults={"stop": ["a"]}).stop == expected


def test_help_has_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = "".join(capsys.readouterr().out.split())  # names are broken over lines
    for name, field in FIELDS.items():
        assert dashed(name) in text and "".join(field.metadata["help"].split()) in text
    assert "alsousedforscoring,default:1.0" in text  # temperature
    assert "token'sweight,default:cispo5.0;dppo20.0" in text  # of each algorithm
    assert "default:gspo,gspo-token0.0003;luspo0.002;" in text


# ---- functions that flags reach

REACHED = {  # algorithm -> each of its functions with flags that it gets
    "dr-grpo": {"loss": {"max_new_tokens": 6}, "advantages": {"advantage_scale": "batch"}},
    "ppo": {
        "loss": {"clip_high": 0.3, "dual_clip": 3.0},
        "advantages": {"gae_lambda": 0.5, "gamma": 0.9},
        "value_loss": {"value_clip": 0.4},
    },
}


@pytest.mark.parametrize("algorithm", REACHED)
def test_flags_reach_their_functions(algorithm, monkeypatch, tmp_path):
    words, calls = [f"--algo={algorithm}"], {}
    for function, values in REACHED[algorithm].items():
        calls[function] = spied(monkeypatch, algorithm, function)
        words += [f"{dashed(flag)}={value}" for flag, value in values.items()]
    good(tmp_path, f"{BASE} --steps 1", *words)
    for function, values in REACHED[algorithm].items():
        assert calls[function]
        assert all(values.items() <= keyword.items() for _, keyword, _ in calls[function])


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--algo gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "ratio_max": None, "gamma": None}),
        ("--algo dapo", {"clip_low": 0.2, "clip_high": 0.28, "advantage_scale": "group"}),
        ("--algo dr-grpo", {"advantage_scale": "none", "kl_coef": 0.0}),
        ("--algo grpo", {"kl_coef": 0.04, "dynamic_sampling": False}),
        ("--algo ppo", {"gamma": 1.0, "gae_lambda": 0.95, "value_clip": 0.2, "dual_clip": None}),
        ("--algo ppo --lr 0.1", {"critic_lr": 1.0}),
        ("--algo dapo --max-new-tokens 20", {"overlong_cache": 4, "dynamic_sampling": True}),
        ("--algo opd --teacher models/moe", {"reward_coef": 0}),
        ("--algo opd --teacher models/moe --reward exact", {"reward_coef": 1}),
        ("--lora-rank 4", {"lr": 2e-3, "lora_alpha": 8.0}),
        ("--model models/tiny", {"lr": 1e-5, "warmup_steps": 3}),
        ("", {"lr": 2e-4, "warmup_steps": 0, "completions_per_update": 64}),
        ("--prompts-per-step 3 --group-size 3", {"completions_per_update": 3}),
        ("--prompts-per-step 1 --group-size 2", {"completions_per_update": 1}),
    ],
)
def test_flags_that_were_not_given_have_the_right_values(flags, expected):
    config = vars(train.parse_flags(flags.split()))
    assert {name: config[name] for name in expected} == pytest.approx(expected)
