"""How a run begins: what is looked at before weights load, and what a start that fails leaves.

Nothing, that is: one sentence, status 2, and the disk as it was."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, OpenAIGPTConfig

import rollout
import train
from tools import (
    BASE,
    ROOT,
    SMALL,
    command_line,
    copied,
    good,
    launch,
    metrics,
    newest,
    random_policy,
    refused,
    strict,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("place")
NAMELESS = SMALL.replace("--name run", "")
MINUTES = 300  # seconds that a process may take on a busy machine

# ------------------------------------------------------------------------------ tools


def started(arguments: list[str], folder: Path = Path(), **environment) -> subprocess.Popen:
    """train.py in a process of its own."""
    return subprocess.Popen(
        [sys.executable, ROOT / "train.py", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_disk(folder: Path) -> list[Path]:
    """What stands below a folder, but for what python compiles."""
    found = folder.rglob("*")
    return sorted(path for path in found if "__pycache__" not in path.parts)


def refused_and_nothing_left(tmp_path, flags, *more) -> str:
    """The sentence of a start that fails, which must leave the disk as it was."""
    before = on_disk(tmp_path)
    sentence = refused(tmp_path / "runs", flags, *more)
    assert on_disk(tmp_path) == before
    return sentence


@pytest.fixture
def no_weights(monkeypatch):
    """Neither a warm start nor the loading of weights may begin."""

    def refuse(*args, **kwargs):
        raise AssertionError("too late: weights are made or loaded")

    monkeypatch.setattr(train, "warm_start", refuse)
    monkeypatch.setattr(rollout, "load_model", refuse)


# ------------------------------------------------------------------------------ what is held out


def held_out_and_trained(seen):
    trained = {row["prompt"] for batch in seen.batches for row in batch.rows}
    return {row["prompt"] for row in seen.run.held_out}, trained


def test_a_prompt_that_comes_twice_is_held_out_wherever_it_stands(seen, tmp_path):
    """37 distinct prompts, each ten times: none is both trained on and evaluated on."""
    write_rows(Path("often.jsonl"), [{"prompt": f"{i % 37}+1=", "answer": "0"} for i in range(370)])
    good(tmp_path, f"{BASE} --data often.jsonl --steps 2 --prompts-per-step 160 --group-size 2")
    held_out, trained = held_out_and_trained(seen)
    assert held_out and len(trained) > 20
    assert not held_out & trained


def test_the_split_does_not_move_with_other_flags(tmp_path):
    """A resumed run with shorter prompts, or a file in another order, holds the same ones out."""
    rows = [{"prompt": f"{'1+' * (i % 7)}{i}=", "answer": "0"} for i in range(60)]
    held_out = train.hold_out(rows, "")[1]
    short = [row for row in rows if len(row["prompt"]) < 9]
    assert train.hold_out(short, "")[1] == [row for row in held_out if row in short]
    backwards = train.hold_out(rows[::-1], "")[1]
    assert backwards[::-1] == held_out and 2 <= len(held_out) <= 12


def test_a_small_file_holds_out_one_prompt():
    """Where the hash of none, or of all, says so; two prompts at least are needed."""
    for count in range(2, 9):
        rows = [{"prompt": f"{i}="} for i in range(count)]
        kept, held_out = train.hold_out(rows, "")
        assert kept and held_out
        assert sorted(row["prompt"] for row in kept + held_out) == [f"{i}=" for i in range(count)]


# ------------------------------------------------------------------------------ folders


def test_a_copy_of_a_checkpoint_is_no_checkpoint(tmp_path):
    """`cp -r step-1 step-1-good`: neither the next save nor a resume falls over it, or removes it,
    and it is not the newest, whatever it is called."""
    flags = f"{BASE} --save-every 1 --keep 1"
    folder = good(tmp_path, f"{flags} --steps 1").folder
    first = folder / "checkpoints/step-1"
    copies = [first.with_name(name) for name in ("step-1-good", "step-99x", "best")]
    for copy in copies:
        shutil.copytree(first, copy)
    good(tmp_path, "--resume --name run --steps 3", small=False)
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3]
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"step-3", *[copy.name for copy in copies]}


@pytest.mark.slow
def test_three_runs_at_once_get_a_number_each(tmp_path):
    arguments = [*NAMELESS.split(), *BASE.split(), "--steps", "1", "--runs", "runs"]
    processes = [started(arguments) for _ in range(3)]
    told = [process.communicate(timeout=MINUTES) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], told
    assert sorted(path.name for path in Path("runs").iterdir()) == ["gspo-1", "gspo-2", "gspo-3"]
    for folder in Path("runs").iterdir():
        assert len(metrics(folder)) == 1


def test_runs_are_numbered_atomically(tmp_path, monkeypatch):
    """Another run takes each number between our look and our mkdir, four times."""
    mkdir, rivals = Path.mkdir, []

    def slow(path, *args, **kwargs):
        if path.name.startswith("gspo-") and len(rivals) < 4:
            rivals.append(path)
            mkdir(path)
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", slow)
    result = launch(tmp_path / "runs", f"{NAMELESS} {BASE} --steps 1", small=False)
    assert result.status == 0, result.err
    assert len(rivals) == 4 and (tmp_path / "runs/gspo-5/metrics.jsonl").exists()


TEXTS = [
    train.dashed(field.name)
    for field in train.FLAGS
    if str in train.value_types(field) and not field.metadata["choices"] and field.name != "system"
]


@pytest.mark.parametrize("flag", TEXTS)
def test_an_empty_text_is_refused(flag, no_weights, tmp_path):
    """--data "$FILE" where nobody set FILE would train on the built-in problems."""
    arguments = [*SMALL.split(), *BASE.split(), "--lora-rank", "2"]
    arguments += ["--runs", str(tmp_path / "runs"), flag, ""]
    before = on_disk(tmp_path)
    result = launch_only(arguments)
    assert result.returncode == 2 and f"{flag}: it is empty" in result.stderr
    assert on_disk(tmp_path) == before


def launch_only(arguments: list[str]) -> subprocess.CompletedProcess:
    """train.main with these arguments alone; in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = train.main(arguments)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def test_a_cache_that_cannot_be_written_is_found_at_once(no_weights, tmp_path, monkeypatch):
    """Before the warm start, which takes half a minute; --runs is not at fault."""
    Path("cache").write_text("a file, and no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    sentence = refused_and_nothing_left(tmp_path, "--algo gspo")
    assert "cache/gspo" in sentence and "XDG_CACHE_HOME" in sentence
    assert "--runs" not in sentence


@pytest.mark.parametrize(
    "prompts, template, strange",
    [
        (["1+1=", "1+1=", "one plus one="], None, "eelnnoopsu"),
        (["1+1=", "1+2="], "Q{prompt}", "Q"),
        (None, "{prompt}?", "?"),
    ],
)
def test_characters_that_tiny_lacks_are_found_at_once(
    prompts, template, strange, no_weights, tmp_path
):
    flags = ["--algo", "gspo"]
    if prompts:
        write_rows(Path("rows.jsonl"), [{"prompt": text, "answer": "2"} for text in prompts])
        flags += ["--data", "rows.jsonl"]
    if template:
        flags += ["--prompt-template", template]
    sentence = refused_and_nothing_left(tmp_path, "", *flags)
    assert "--model" in sentence
    for character in set(strange):
        assert character in sentence


# ------------------------------------------------------------------------------ verifiers


def test_a_verifier_that_fails_on_all_of_the_first_evaluation_stops_the_run(tmp_path, monkeypatch):
    """Nothing but zeros would come. This one works until weights are there: an earlier look at it
    cannot find it out."""
    Path("late.py").write_text(
        "import os\n\n\ndef late(completion, answer):\n    return float(os.environ['LATE'])\n"
    )
    load_model = rollout.load_model

    def spoil(*args, **kwargs):
        monkeypatch.delenv("LATE")
        return load_model(*args, **kwargs)

    monkeypatch.setenv("LATE", "1")
    monkeypatch.setattr(rollout, "load_model", spoil)
    sentence = refused_and_nothing_left(tmp_path, f"{BASE} --reward late.py:late")
    assert "late" in sentence and "every completion" in sentence and "KeyError" in sentence


@pytest.fixture
def openai_gpt(tmp_path):
    """Flags of a model that has no gradient checkpointing, and keeps positions in float32."""
    shape = dict(vocab_size=18, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=1)
    folder = random_policy(tmp_path / "openai", OpenAIGPTConfig(**shape))
    return f"--model {folder} --reward pay.py:even"


def test_a_model_without_gradient_checkpointing_is_one_sentence(openai_gpt, tmp_path):
    sentence = refused(tmp_path / "runs", f"{openai_gpt} --gradient-checkpointing")
    assert "--gradient-checkpointing" in sentence and "OpenAIGPT" in sentence
    good(tmp_path / "runs", f"{openai_gpt} --steps 1")


@pytest.mark.parametrize("lora", ["", "--lora-rank 2 --lora-targets o_proj"])
def test_a_model_that_cannot_run_in_bfloat16_is_one_sentence(lora, openai_gpt, tmp_path):
    """OpenAI's GPT keeps positions in float32 among weights in bfloat16; other models go on."""
    sentence = refused(tmp_path / "runs", f"{openai_gpt} --dtype bfloat16")
    assert "--dtype bfloat16" in sentence and "float32" in sentence
    good(tmp_path / "other", f"{BASE} --dtype bfloat16 --steps 1 {lora}")


def test_a_verifier_that_fails_on_some_is_told_and_the_run_goes_on(tmp_path):
    Path("some.py").write_text(
        "def some(completion, answer):\n    return 1.0 / (len(completion) % 2)\n"
    )
    result = good(tmp_path, f"{BASE} --reward some.py:some --steps 1")
    assert result.out.count("ZeroDivisionError") == 1
    assert 0 < metrics(result.folder)[0]["verifier_faults"] < 16


def test_a_reward_beyond_float32_is_a_fault(tmp_path):
    """1e300 is a number, and its mean in float32, or its square, is Infinity, which is no JSON.
    The look at it before the run begins, on the first row, finds nothing here."""
    write_rows(Path("rows.jsonl"), [{"prompt": f"{i}=", "answer": "0"} for i in range(9)])
    Path("vast.py").write_text(
        "def vast(completion, answer):\n"
        "    return 1e300 if completion[:1] in ('6', '8', '2') else 1.0\n"
    )
    result = good(
        tmp_path, f"{BASE} --reward vast.py:vast --data rows.jsonl --eval-data rows.jsonl"
    )
    assert "vast: " in result.out and "it returned 1e+300" in result.out
    for row in metrics(result.folder):  # strict JSON
        assert 0 < row["verifier_faults"] < 16 and 0 <= row["reward"] <= 1


# ------------------------------------------------------------------------------ resuming


def test_a_resumed_run_keeps_its_model(models, tmp_path):
    good(tmp_path, f"{BASE} --steps 1")
    sentence = refused(tmp_path, "--resume --name run --steps 2 --model models/moe", small=False)
    assert "--model models/moe" in sentence and "models/tiny" in sentence
    good(tmp_path, "--resume --name run --steps 2 --model models/tiny", small=False)


def test_a_resumed_built_in_policy_keeps_its_task(tmp_path):
    """It knows the characters of no other; any other model may change."""
    good(tmp_path, "--model tiny --steps 1")
    sentence = refused(tmp_path, "--resume --name run --steps 2 --task countdown", small=False)
    assert "--task countdown" in sentence and "arithmetic" in sentence
    good(tmp_path, "--resume --name run --steps 2 --task arithmetic", small=False)

    good(tmp_path / "other", f"{BASE} --steps 1")
    result = good(tmp_path / "other", "--resume --name run --steps 2 --task sums", small=False)
    assert "task was arithmetic, from now on it is sums" in result.out


def test_a_task_gives_way_to_data_that_come_with_a_resume(seen, tmp_path):
    """At the start the two are refused together; but what a run was given cannot be taken back."""
    write_rows(Path("rows.jsonl"), [{"prompt": f"{i}+1=", "answer": "0"} for i in range(9)])
    good(tmp_path, f"{BASE} --task calculator --tool-after = --steps 1")
    good(tmp_path, "--resume --name run --steps 2 --data rows.jsonl --tool calculator", small=False)
    assert all(row["prompt"].endswith("+1=") for row in seen.batches[-1].rows)


def test_a_reference_that_comes_with_a_resume_is_the_model_of_the_start(seen, tmp_path):
    """Not the checkpoint, from which the KL would be 0."""
    good(tmp_path, f"{BASE} --steps 1")
    good(tmp_path, "--resume --name run --steps 2 --kl-coef 0.1", small=False)
    first = AutoModelForCausalLM.from_pretrained("models/tiny", dtype=torch.float32)
    saved = newest(tmp_path / "run").with_name("step-1")
    moved = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    reference = seen.run.ref_policy.state_dict()
    for name, weight in first.state_dict().items():
        assert torch.equal(reference[name], weight)
    assert any(not torch.equal(reference[name], w) for name, w in moved.state_dict().items())


def test_defaults_are_resolved_anew_with_a_resume(tmp_path):
    """A dtype that nobody asked for is the device's: float32 here, though the run began on a GPU.
    What was given stays."""
    folder = good(tmp_path, f"{BASE} --steps 1").folder
    config = strict((folder / "config.json").read_text())
    assert "dtype" not in config["given"] and "lr" in config["given"]
    config |= {"dtype": "bfloat16", "device": "cuda"}
    (folder / "config.json").write_text(json.dumps(config))
    result = good(tmp_path, "--resume --name run --steps 2 --device cpu", small=False)
    now = strict((folder / "config.json").read_text())
    assert (now["device"], now["dtype"], now["lr"]) == ("cpu", "float32", 1e-3)
    assert "dtype was bfloat16, from now on it is float32" in result.out


def test_two_resumes_of_one_run_at_once(tmp_path):
    """The second one finds the lock, and leaves the rows alone; the lock goes with its process."""
    folder = good(tmp_path, f"{BASE} --steps 1").folder
    rows = (folder / "metrics.jsonl").read_bytes()
    with open(folder / "lock", "w") as held:
        assert train.take_lock(held)
        sentence = refused(tmp_path, "--resume --name run --steps 2", small=False)
    assert "another process" in sentence and str(folder) in sentence
    assert (folder / "metrics.jsonl").read_bytes() == rows
    good(tmp_path, "--resume --name run --steps 2", small=False)


def test_a_lock_is_of_its_process(tmp_path):
    """kill -9 of a run frees it: nothing must be removed by hand."""
    flags = f"{BASE} --steps 10000 --save-every 1"
    process = started(command_line("runs", flags))
    while process.poll() is None and len(train.checkpoints(Path("runs/run"))) == 0:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    assert "another process" in refused("runs", "--resume --name run", small=False)
    process.kill()
    process.communicate(timeout=MINUTES)
    step = train.steps_of(train.checkpoints(Path("runs/run"))[-1])
    good("runs", f"--resume --name run --steps {step + 1}", small=False)


@pytest.mark.parametrize(
    "change, word",
    [
        (lambda config: config | {"clip_middle": 1}, "clip_middle"),
        (lambda config: {k: v for k, v in config.items() if k != "lr"}, "lr"),
        (lambda config: [], "config.json"),
    ],
    ids=["unknown", "missing", "list"],
)
def test_a_config_of_another_train_py_is_one_sentence(change, word, tmp_path):
    folder = good(tmp_path, f"{BASE} --steps 1").folder
    config = change(strict((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    sentence = refused(tmp_path, "--resume --name run --steps 2", small=False)
    assert "config.json" in sentence and word in sentence


@pytest.mark.parametrize("rows", ["", '{"step": 1}\n{"step": 2}\n'], ids=["lost", "changed"])
def test_a_run_that_lost_its_rows_does_not_draw_its_prompts_again(rows, tmp_path):
    """The rows say how many were drawn. Without them the first ones would come once more."""
    folder = good(tmp_path, f"{BASE} --steps 2").folder
    path = folder / "metrics.jsonl"
    path.write_text(rows)
    config = (folder / "config.json").read_bytes()
    sentence = refused(tmp_path, "--resume --name run --steps 3", small=False)
    assert f"{path}: expected a row" in sentence and "prompts_drawn" in sentence
    assert (folder / "config.json").read_bytes() == config


@pytest.mark.parametrize("garbage", ["what is this\n", "[1]\n", '{"reward": 1}\n', "\x00\x00\n"])
def test_garbage_in_the_metrics_is_one_sentence(garbage, tmp_path):
    folder = good(tmp_path, f"{BASE} --steps 2").folder
    path = folder / "metrics.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + garbage + second)
    before = path.read_bytes()
    sentence = refused(tmp_path, "--resume --name run --steps 3", small=False)
    assert f"{path}, line 2" in sentence
    assert path.read_bytes() == before


# ------------------------------------------------------------------------------ what the model sees


@pytest.fixture(scope="module")
def spoken(models):
    """The tiny policy with a chat template that reads one variable."""
    template = (
        b"{% for m in messages %}{{ '#' if m.role == 'system' else ';' }}{{ m.content }}"
        b"{% endfor %}{{ mark | default('') }}{% if add_generation_prompt %}={% endif %}"
    )
    return copied(models / "tiny", models / "spoken", chat_template__jinja=template)


def test_the_first_prompt_is_shown_as_the_model_sees_it(spoken, seen, tmp_path):
    flags = '--system 12 --prompt-template 3+{prompt} --chat-template-args {"mark":"**"}'
    result = good(tmp_path, f"{BASE} --model models/spoken --steps 1 {flags}")
    first = seen.run.held_out[0]
    text = f"#12;3+{first['prompt']}**="
    assert f"first held-out prompt, {len(text)} tokens: '{text}'\n" in result.out
    assert result.out.count("first held-out prompt") == 1


def test_chat_template_args_that_the_template_does_not_read_are_refused(
    spoken, no_weights, tmp_path
):
    """Jinja would take them without a word."""
    flags = '--model models/spoken --reward pay.py:even --chat-template-args {"marks":"**"}'
    assert "does not use marks" in refused_and_nothing_left(tmp_path, flags)


def test_a_line_break_in_a_template_is_two_characters_in_a_shell(models, seen, tmp_path):
    r"""--prompt-template '1\n{prompt}': the model sees a line break, and no backslash."""
    result = good(tmp_path, f"{BASE} --steps 1", "--prompt-template", r"1\n{prompt}")
    expected = "1\n" + seen.run.held_out[0]["prompt"]
    assert seen.run.held_out[0]["ids"] == seen.run.tokenizer.encode(expected)
    assert "\\\\n" not in result.out.split("first held-out prompt")[1].splitlines()[0]


def test_a_line_break_of_the_first_prompt_is_escaped_once(capsys):
    tokenizer = SimpleNamespace(decode=lambda ids: "user\n'Hi'")
    train.show_first_prompt(SimpleNamespace(held_out=[{"ids": [1, 2]}], tokenizer=tokenizer))
    assert capsys.readouterr().out == "first held-out prompt, 2 tokens: 'user\\n'Hi''\n"


def test_the_command_to_try_has_the_flags_of_the_prompt(spoken, tmp_path):
    """Word for word: with other templates the model would be asked something else."""
    flags = ["--system", "12", "--prompt-template", "3+{prompt}"]
    flags += ["--chat-template-args", '{"mark": "**"}']
    result = good(tmp_path, f"{BASE} --model models/spoken --steps 1", *flags)
    words = shlex.split(result.out.splitlines()[-1])
    assert words[:3] == ["python", "rollout.py", "--model"]
    for flag, value in zip(flags[::2], flags[1::2]):
        assert words[words.index(flag) + 1] == value


# ------------------------------------------------------------------------------ Ctrl-C


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_ctrl_c_during_the_imports_is_silent():
    """In the seconds before main: no traceback of some library's import."""
    process = started(["--algo", "gspo"], PYTHONVERBOSE="1")
    seen = []
    for line in process.stderr:  # the interpreter names every module that it imports
        seen.append(line)
        if re.match(r"import 'torch\.", line):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    process.wait(timeout=MINUTES)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in "".join(seen) + rest
    assert "KeyboardInterrupt" not in rest


WATCH_TORCH = """
import os, sys

class Watch:
    def find_spec(name, path, target=None):
        if name == "torch":
            print(os.environ["GOMP_SPINCOUNT"])

sys.meta_path.insert(0, Watch)
import train
"""


@pytest.mark.parametrize(("given", "found"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_are_told_to_spin_briefly_before_torch_loads(given, found):
    """Without it, beside one busy process for each core, a run takes ten times as long."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", WATCH_TORCH]
    output = subprocess.check_output(command, cwd=ROOT, env=environment | given, text=True)
    assert output.split() == [found]
