"""How a run begins: failed starts leave nothing, prompts and console are as promised."""

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

import pytest
import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollout
import train
from forks import fork
from support import console, data, folders, tasks
from tools import (
    BASE,
    ROOT,
    SHAPE,
    SMALL,
    command_line,
    copied,
    furnish,
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


def on_disk(folder: Path) -> list[Path]:
    """List all files of a folder, without Python's caches."""
    found = folder.rglob("*")
    return sorted(path for path in found if "__pycache__" not in path.parts)


def refused_and_nothing_left(tmp_path, flags, *more) -> str:
    """Return the sentence of a start that fails, and check that the disk is as before."""
    before = on_disk(tmp_path)
    sentence = refused(tmp_path / "runs", flags, *more)
    assert on_disk(tmp_path) == before
    return sentence


@pytest.fixture
def no_weights(monkeypatch):
    """Fail the test if a warm start or the loading of weights begins."""

    def refuse(*args, **kwargs):
        raise AssertionError("too late: weights are made or loaded")

    monkeypatch.setattr(tasks, "warm_start", refuse)
    monkeypatch.setattr(rollout, "load_model", refuse)


# ---- folders


def test_a_copy_of_a_checkpoint_is_no_checkpoint(tmp_path):
    """After `cp -r step-1 step-1-good` neither a save nor a resume fails on the copy, removes it or
    takes it for the newest. The newest two of the run's own stay."""
    folder = good(tmp_path, f"{BASE} --save-every 1 --steps 1").folder
    first = folder / "checkpoints/step-1"
    copies = [first.with_name(name) for name in ("step-1-good", "step-99x", "best")]
    for copy in copies:
        shutil.copytree(first, copy)
    good(tmp_path, "--resume --name run --steps 4", small=False)
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"step-3", "step-4", *[copy.name for copy in copies]}


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


def test_a_start_that_is_killed_leaves_nothing_that_stands_in_the_way(monkeypatch, tmp_path):
    """A kill while weights load or the policy is evaluated: the same --name works again."""

    def killed(*args, **kwargs):
        raise SystemExit(9)

    for where in ("evaluate", "claim_folder"):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(train, where, killed)
            launch(tmp_path, BASE)
    (tmp_path / "run").mkdir(exist_ok=True)  # and not one further
    assert len(metrics(good(tmp_path, BASE).folder)) == 2


def test_no_home_is_no_matter_where_a_cache_is_named(models, tmp_path, monkeypatch):
    """In a container without a user Path.home() raises."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    good(tmp_path, "--model tiny --steps 1")


def test_a_cache_that_cannot_be_written_is_found_at_once(no_weights, tmp_path, monkeypatch):
    """Before the warm start, which takes half a minute. The sentence does not blame --runs."""
    Path("cache").write_text("a file, and no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    sentence = refused_and_nothing_left(tmp_path, "--algo gspo")
    assert "cache/gspo" in sentence and "XDG_CACHE_HOME" in sentence
    assert "--runs" not in sentence


# ---- verifiers


def test_a_verifier_that_fails_on_all_of_the_first_evaluation_stops_the_run(tmp_path, monkeypatch):
    """Nothing but zeros would come. This one works until weights are there."""
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


def test_a_reward_beyond_float32_is_a_fault(tmp_path):
    """1e300 is a number, and its mean in float32, or its square, is Infinity, which is no JSON."""
    write_rows(Path("rows.jsonl"), [{"prompt": f"{i}=", "answer": "0"} for i in range(9)])
    Path("vast.py").write_text(
        "def vast(completion, answer):\n"
        "    return 1e300 if completion[:1] in ('6', '8', '2') else 1.0\n"
    )
    result = good(
        tmp_path, f"{BASE} --reward vast.py:vast --data rows.jsonl --eval-data rows.jsonl"
    )
    for row in metrics(result.folder):  # strict JSON
        assert 0 < row["verifier_faults"] < 16 and 0 <= row["reward"] <= 1


# ---- prompts


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
    text = f"#12;3+{seen.run.held_out[0]['prompt']}**="
    assert seen.run.tokenizer.decode(seen.run.held_out[0][data.IDS]) == text
    assert result.out.count(f"'{text}'\n") == 1


@pytest.fixture(scope="module")
def any_text(models):
    """Flags of a policy that reads bytes: all texts, that is."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *sorted(alphabet)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    policy = transformers.Qwen3Config(**SHAPE | {"vocab_size": len(words)})
    random_policy(models / "bytes", policy)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(models / "bytes")
    return "--model models/bytes --reward pay.py:even"


def arguments_in_bash(command: str) -> list[str]:
    """The arguments that a command gets which is pasted into bash."""
    script = f"python() {{ printf '%s\\0' \"$@\"; }}; {command}"
    return subprocess.check_output(["bash", "-c", script]).decode().split("\0")


def test_the_last_line_asks_the_same_prompt_and_moves_no_cursor(any_text, tmp_path):
    """The prompt has line breaks, control characters, quotes and commands. The console shows no
    control character, and the command in bash gets the same prompt."""
    prompt = "Q:\n\t1\x1b[2J\x07\r\x85a$(touch ran)`touch ran`\\n\\x0a\\'\"!ü=\n"
    write_rows(Path("strange.jsonl"), [{"prompt": prompt, "answer": "0"}] * 12)
    flags = "--data strange.jsonl --eval-data strange.jsonl --steps 1"
    result = good(tmp_path, f"{any_text} {flags}", "--prompt-template", "{prompt}\n#")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\x85]", result.out)
    words = arguments_in_bash(result.out.splitlines()[-1])
    assert words[:2] == ["rollout.py", "--model"] and not Path("ran").exists()
    assert words[words.index("--prompt") + 1] == prompt
    assert words[words.index("--prompt-template") + 1] == "{prompt}\n#"


def test_the_last_line_has_the_system_message_and_the_stop_texts():
    messages = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "7+5?"}]
    flags = ["--model", "models/tiny", "--reward", "pay.py:even", "--stop", "\n\n", "--stop", "#"]
    words = arguments_in_bash(console.command_to_try("x", train.parse_flags(flags), messages))
    asked = ["--prompt", "7+5?", "--system", "Be brief.\n", "--stop", "\n\n", "--stop", "#"]
    assert words[2:-1] == ["x", *asked]


# ---- the console


def test_the_console_says_what_a_scientist_looks_at(tmp_path, monkeypatch):
    """The size, an answer at each evaluation, a line a step, and where the results are."""
    flags = "--steps 4 --eval-every 2 --eval-samples 2 --max-new-tokens 16 --kl-coef 0.05"
    result = good(tmp_path, f"{BASE} {flags}", "--reward", "pay.py:even + arithmetic")
    lines = result.out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in steps] == [f"step {i}/4" for i in range(1, 5)]
    words = "reward solved len truncated dead ratio clip kl entropy grad"
    for line in steps:
        assert "loss" not in line and all(f"| {word} " in line for word in words.split())
        assert re.search(r"\| [\d,]+ tok/s \| [\d.]+ s \| \d+ (s|min|h) left$", line)
    assert sum("held out" in line for line in steps) == 2
    assert sum("evaluating 8 prompts, greedy and 2 samples each" in line for line in lines) == 2
    assert sum(line.startswith("held out: '") for line in lines) == 3  # an answer each time
    assert "M parameters" in result.out
    assert re.search(r"pass@2 .* -> .* pass@2 .*, in \d+ s", lines[-3])
    assert (
        str(newest(result.folder)) in lines[-2] and str(result.folder / "report.html") in lines[-2]
    )
    words = shlex.split(lines[-1])
    assert words[:4] == ["python", "rollout.py", "--model", str(newest(result.folder))]


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--lora-rank 2", r"0\.0 of 0\.0 M parameters"),
        (
            "--reward pay.py:never --steps 10",
            "10 steps taught nothing.*rewards of a group are equal",
        ),
        ("--reward pay.py:never", "2 steps taught nothing"),
        (
            "--max-new-tokens 1 --overlong-filter --steps 10 --group-size 2",
            "taught nothing.*--max-new-tokens",
        ),
    ],
)
def test_what_cannot_teach_is_said_once(flags, said, tmp_path):
    result = good(tmp_path, f"{BASE} --prompts-per-step 2 {flags}")
    assert len(re.findall(said, result.out)) == 1


def test_a_live_run_is_not_warned_about(tmp_path):
    result = good(tmp_path, f"{BASE} --steps 12 --prompts-per-step 2 --max-new-tokens 24")
    assert "warning" not in result.out and "smoke" not in result.out


class Broken(io.StringIO):
    """A console whose reader has gone, from the first step on."""

    def write(self, text):
        if "step 1" in text:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_losing_the_console_costs_the_console_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", Broken())
    status = train.main(command_line(tmp_path, f"{BASE} --steps 3"))
    assert status == 0
    assert len(metrics(tmp_path / "run")) == 3 and newest(tmp_path / "run").name == "step-3"


def test_a_console_of_few_characters_gets_others_escaped(any_text, monkeypatch, tmp_path):
    """LANG=C, or a Windows console: a prompt with ü must not end the run."""
    rows = [{"prompt": f"{i}ü=", "answer": "ü"} for i in range(12)]
    write_rows(Path("umlaut.jsonl"), rows)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    flags = f"{any_text} --data umlaut.jsonl --eval-data umlaut.jsonl --steps 1"
    assert train.main(command_line(tmp_path, flags)) == 0
    sys.stdout.flush()
    assert b"\\xfc" in written.getvalue() and b"step 1/1" in written.getvalue()


def test_the_line_of_a_step_has_readable_numbers():
    row = {"step": 3, "tokens_per_second": 31234.5}
    assert console.step_line(row, 12, 3700) == "step 3/12 | 31,234 tok/s | 62 min left"
    times = [console.duration(seconds) for seconds in (7, 119, 3000, 7100, 90000)]
    assert times == ["7 s", "119 s", "50 min", "118 min", "25 h"]


# ---- the environment


def test_a_lock_is_of_its_process(tmp_path):
    """kill -9 of a run frees it: nothing must be removed by hand. Meanwhile it is refused."""
    arguments = command_line("runs", f"{BASE} --steps 10000 --save-every 1")
    process = fork(train.main, arguments, out="log")
    while process.is_alive() and not folders.checkpoints(Path("runs/run")):
        time.sleep(0.05)
    assert process.is_alive(), Path("log").read_text()
    os.kill(process.pid, signal.SIGSTOP)  # or its next checkpoint might take this one's place
    sentence = refused("runs", "--resume --name run", small=False)
    assert "another process" in sentence and "runs/run" in sentence
    process.kill()
    process.join()
    step = int(newest("runs/run").name[5:])
    good("runs", f"--resume --name run --steps {step + 1}", small=False)


@pytest.mark.parametrize(("given", "found"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_spin_briefly_before_torch_loads(given, found):
    """Without it, beside one busy process for each core, a run takes ten times as long."""
    watch = (
        "import os, sys\n\nclass Watch:\n    def find_spec(name, path, target=None):\n"
        "        if name == 'torch':\n            print(os.environ['GOMP_SPINCOUNT'])\n"
        "            os._exit(0)\n\nsys.stdout.reconfigure(line_buffering=True)\n"
        "sys.meta_path.insert(0, Watch)\nimport train\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", watch]
    output = subprocess.check_output(command, cwd=ROOT, env=environment | given, text=True)
    assert output.split() == [found]


# ---- files of a run


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    """A run with an evaluation in its middle. `policy` is the trained model from memory."""
    here, kept, start = tmp_path_factory.mktemp("finished"), [], train.start
    furnish(here, models)

    def keep(config, ranks):
        kept.append(start(config, ranks))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setattr(train, "start", keep)
        flags = "--steps 4 --save-every 1 --eval-every 2 --kl-coef 0.05 --lr 2e-4"
        result = good(here / "runs", f"{BASE} {flags} --max-new-tokens 16 --eval-samples 2")
    result.policy = kept[0].policy
    return result


def test_a_run_leaves_rows_answers_and_a_config(finished):
    rows = metrics(finished.folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert ["eval_solved" in row for row in rows] == [False, True, False, True]
    for row in rows:
        assert 0 < row["memory_gb"] < 50 and row["lr"] == 2e-4
        assert 0 < row["entropy"] < 3 and 0.8 < row["ratio_mean"] < 1.2
        assert row["sampler_kl"] < 1e-6 < row["grad_norm"]
        assert row["prompts_drawn"] == 4 and row["kl"] >= 0
    config = strict((finished.folder / "config.json").read_text())
    assert (config["completions_per_update"], config["dtype"]) == (4, "float32")
    assert config["clip_low"] == 3e-4 and config["name"] == "run"
    samples = (finished.folder / "samples.jsonl").read_text().splitlines()
    samples = [strict(line) for line in samples]
    assert [row["step"] for row in samples] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    assert all(row["prompt"].endswith("=") for row in samples)
    assert not any("<eos>" in row["completion"] for row in samples)
    shown = (finished.folder / "evaluations.jsonl").read_text().splitlines()
    steps = [strict(line)["step"] for line in shown]
    assert sorted(set(steps)) == [0, 2, 4] and steps == sorted(steps)
    assert (finished.folder / "report.html").exists()
    for path in finished.folder.rglob("*"):  # no pickle, and no zip, which torch.save writes
        if path.is_file() and path.name != "lock":
            assert path.suffix in (".json", ".jsonl", ".safetensors", ".jinja", ".txt", ".html")
            start = path.read_bytes()[:2]
            assert start != b"PK" and not start.startswith(b"\x80"), path


def test_the_model_loads_in_transformers_with_the_same_logits(finished, models):
    folder = newest(finished.folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder).encode("7+5*3=")])
    with torch.no_grad():
        torch.testing.assert_close(finished.policy.eval()(ids).logits, loaded(ids).logits)
    before = AutoModelForCausalLM.from_pretrained(models / "tiny", dtype=torch.float32)
    assert not torch.allclose(before(ids).logits, loaded(ids).logits)  # it was trained


def test_nothing_but_the_algorithm_is_needed(tmp_path, monkeypatch):
    """`train.py --algo gspo`, two steps of it: no model, no data, no reward, no name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    flags = "--algo gspo --steps 2 --prompts-per-step 4 --eval-prompts 4 --eval-samples 2"
    result = launch("runs", flags, small=False)
    assert result.status == 0, result.err
    config = strict(Path("runs/gspo-1/config.json").read_text())
    assert config["reward"] == "arithmetic" and len(metrics("runs/gspo-1")) == 2
    assert len(list(Path("cache/gspo").iterdir())) == 1
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", None)  # the second run starts at once
    good("runs", f"{flags} --name run", small=False)


def test_a_tracker_that_is_not_installed_is_refused_before_a_model_loads(monkeypatch, tmp_path):
    monkeypatch.setattr(rollout, "load_model", None)
    sentence = refused_and_nothing_left(tmp_path, f"{BASE} --track trackio")
    assert "--track trackio" in sentence and "pip install trackio" in sentence


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_row_and_goes_on_after_a_resume(name, monkeypatch, tmp_path):
    """The packages are not among ours: a module with their functions stands in for them."""
    Path(f"{name}.py").write_text(
        "import json\n\ndef keep(*call):\n    with open('calls', 'a') as file:\n"
        "        file.write(json.dumps(call) + '\\n')\n\n"
        "def init(**settings):\n    keep('init', settings)\n\n"
        "def log(row, step):\n    keep('log', row)\n"
    )
    monkeypatch.syspath_prepend(".")
    good(tmp_path, f"{BASE} --track {name}")
    result = good(tmp_path, "--resume --steps 3 --name run", small=False)
    calls = [json.loads(line) for line in Path("calls").read_text().splitlines()]
    assert [each[1] for each in calls if each[0] == "log"] == metrics(result.folder)
    first, second = [each[1] for each in calls if each[0] == "init"]
    assert first["name"] == second["name"] and first["name"].startswith("run-")
    assert first["config"]["lr"] == 1e-3 and second["resume"] == "allow"
    sys.modules.pop(name)
