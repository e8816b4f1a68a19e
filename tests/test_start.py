"""How a run begins: failed starts leave nothing, prompts and console are as promised."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from support import console, models, pretrain, run_folder, shutdown
from support.data import IDS
from tools import (
    BASE,
    ROOT,
    SHAPE,
    byte_tokenizer,
    command_line,
    copied,
    good,
    launch,
    metrics,
    newest,
    random_policy,
    refused,
    strict,
    watched,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("place")


# ---- folders


def test_runs_are_numbered_atomically(tmp_path, monkeypatch):
    """Another run takes each number between our look and our mkdir, four times."""
    mkdir = Path.mkdir

    def slow(path, *args, **kwargs):
        if path.name in ("gspo-1", "gspo-2", "gspo-3", "gspo-4"):
            mkdir(path)
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", slow)
    mkdir(tmp_path / "runs")
    assert run_folder.make_folder(str(tmp_path / "runs"), None, "gspo").name == "gspo-5"


def test_a_cache_that_cannot_be_written_is_found_at_once(tmp_path, monkeypatch):
    """Before the warm start, which takes half a minute. The sentence does not blame --runs."""
    Path("cache").write_text("a file, and no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setattr(pretrain, "warm_start", None)
    sentence = refused(tmp_path / "runs", "--algo gspo")
    assert "cache/gspo" in sentence and "--runs" not in sentence
    assert not (tmp_path / "runs").exists()


def test_a_verifier_that_fails_on_all_of_the_first_evaluation_stops_the_run(tmp_path):
    """Nothing but zeros would come. This one works on the texts with which it is tried before."""
    late = "def late(completion, answer):\n    return float(completion == '' or int(answer))\n"
    Path("late.py").write_text(late)
    write_rows("rows.jsonl", [{"prompt": f"{i}+1=", "answer": "x"} for i in range(9)])
    flags = "--data rows.jsonl --eval-data rows.jsonl --reward late.py:late"
    sentence = refused(tmp_path / "runs", f"{BASE} {flags}")
    assert "every completion" in sentence and re.search("late.*ValueError", sentence)
    assert not (tmp_path / "runs").exists()


# ---- the command that asks the trained model


def arguments_in_bash(command: str) -> list[str]:
    """The arguments that a command gets which is pasted into bash."""
    script = f"python() {{ printf '%s\\0' \"$@\"; }}; {command}"
    return subprocess.check_output(["bash", "-c", script]).decode().split("\0")


def test_the_last_line_asks_the_same_prompt_and_moves_no_cursor(models, tmp_path):
    """The console shows codes of control characters, and bash gets the prompt as it is shown."""
    tokenizer = byte_tokenizer(pad_token="<pad>", eos_token="<eos>")
    config = transformers.Qwen3Config(**SHAPE | {"vocab_size": len(tokenizer)})
    policy = random_policy(models / "bytes", config, tokenizer)
    prompt = "Q:\n1\x1b[2J\x85a$(touch ran)`touch ran`\\n\\x0a\\'\"!ü=\n"
    write_rows("strange.jsonl", [{"prompt": prompt, "answer": "0"}] * 12)
    flags = f"--model {policy} --data strange.jsonl --eval-data strange.jsonl --steps 1"
    result = good(tmp_path, f"{BASE} {flags}", "--prompt-template", "{prompt}\n#")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\x85]", result.out)
    words = arguments_in_bash(result.out[result.out.rindex("python rollout.py") :])
    assert words[:2] == ["rollout.py", "--model"] and not Path("ran").exists()
    shown = prompt.replace("\x1b", "\\x1b").replace("\x85", "\\x85")
    assert words[words.index("--prompt") + 1] == shown
    assert words[words.index("--prompt-template") + 1] == "{prompt}\n#"


def test_the_last_line_has_the_system_message_and_the_stop_texts():
    messages = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "7+5?"}]
    flags = ["--model", "models/tiny", "--reward", "pay.py:even", "--stop", "\n\n", "--stop", "#"]
    words = arguments_in_bash(shutdown.command_to_try("x", train.parse_flags(flags), messages))
    asked = ["--prompt", "7+5?", "--system", "Be brief.\n", "--stop", "\n\n", "--stop", "#"]
    assert words[2:-1] == ["x", *asked]


# ---- the console


def test_the_console_says_what_a_scientist_looks_at(monkeypatch, tmp_path):
    """The device, the size, answers at evaluations, a line a step, where the results are."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    flags = "--steps 4 --eval-every 3 --eval-samples 2 --max-new-tokens 16 --kl-coef 0.05"
    result = good(tmp_path, f"{BASE} {flags}", "--reward", "pay.py:even + arithmetic")
    assert result.out.count("torch is built for CUDA 13.0, but finds no GPU\n") == 1
    lines = result.out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in steps] == [f"step {i}/4" for i in range(1, 5)]
    words = "reward solved len dead clip entropy"
    for line in steps:
        assert "loss" not in line and all(f"| {word} " in line for word in words.split())
        assert len(line) < 110 and re.search(r" \| \d+ (s|min|h) left$", line)
    assert sum("| eval " in line for line in steps) == 2
    assert result.out.count("\nevaluating 8 prompts, greedily and with 2 samples each\n") == 2
    shown = re.findall("\nheld out: '.*", result.out)  # an answer, where it changed
    assert 1 <= len(shown) <= 3 and all(map(str.__ne__, shown, shown[1:]))
    assert "M parameters" in result.out
    assert f"{result.folder.name}: " in result.out  # a sentence on the run's health
    assert re.search(r"pass@2 .* -> .* pass@2 .*, in \d+ s", lines[-3])
    assert f"{newest(result.folder)}, the report in {result.folder}/report.html;" in lines[-2]
    words = shlex.split(lines[-1])
    assert words[:4] == ["python", "rollout.py", "--model", str(newest(result.folder))]


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--reward pay.py:never --max-new-tokens 6", ["all rewards are equal"]),
        ("--overlong-filter", ["all completions are truncated"]),
        # a teacher has advantages for truncated completions
        ("--algo opd --teacher models/moe", []),
    ],
)
def test_ten_steps_that_teach_nothing_are_said_once(flags, said, tmp_path):
    small = "--steps 10 --prompts-per-step 2 --group-size 2 --max-new-tokens 1 --eval-prompts 1"
    result = good(tmp_path, f"{BASE} {small} {flags}")
    warnings = re.findall(r"warning: (10 steps[^(\n]*)", result.out)
    assert warnings == [f"10 steps in a row taught nothing: {why} " for why in said]


def test_losing_the_console_costs_the_console_alone(monkeypatch, tmp_path):
    """A reader that has gone, from the first step on."""

    class Broken(io.StringIO):
        def write(self, text):
            if "step 1" in text:
                raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Broken())
    assert train.main(command_line(tmp_path, BASE)) == 0
    assert len(metrics(tmp_path / "run")) == 2 and newest(tmp_path / "run").name == "step-2"


def test_console_lines_have_readable_numbers_and_characters(monkeypatch):
    """Also with LANG=C: a prompt with ü must not end the run."""
    row = {"step": 48, "reward": 0.5, "solved": 0.5, "length_mean": 199.9, "dead": 0.5}
    row |= {"clip_fraction": 0.5, "entropy": 0.123, "eval_solved": 0.5}
    line = console.step_line(row, 50, 3700)
    assert line.startswith("step 48/50 | solved 50% | len 200 | ")  # the reward is the same number
    assert line.endswith("entropy 0.12 | eval 50.0% | 62 min left") and len(line) < 100
    times = [console.duration(seconds) for seconds in (7, 119, 3000, 7100, 90000)]
    assert times == ["7 s", "119 s", "50 min", "118 min", "25 h"]
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    console.say("1ü=")
    assert written.getvalue().strip() == b"1\\xfc="


@pytest.mark.parametrize("given, found", [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_spin_briefly_before_torch_loads(given, found, tmp_path):
    """Without it, beside one busy process for each core, a run takes ten times as long."""
    (tmp_path / "torch.py").write_text("import os, sys; sys.exit(os.environ['GOMP_SPINCOUNT'])")
    usual = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment = usual | given | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "import train"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, f"{found}\n")


# ---- files of a run


def test_a_run_leaves_rows_answers_and_a_model_for_transformers(monkeypatch, seen, tmp_path):
    flags = "--steps 4 --save-every 1 --eval-every 2 --kl-coef 0.05 --lr 2e-4 --max-new-tokens 16"
    judged = watched(monkeypatch, train, "judge_groups")
    folder = good(tmp_path, f"{BASE} {flags} --eval-samples 2").folder
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert ["eval_solved" in row for row in rows] == [False, True, False, True]
    _, _, (_, correct) = judged[-1]
    assert rows[-1]["eval_pass@2"] == pytest.approx(float(correct.amax(1).mean()))
    for row in rows:
        assert 0 < row["memory_gb"] < 50 and row["lr"] == 2e-4
        assert 0 < row["entropy"] < 3 and 0.8 < row["ratio_mean"] < 1.2
        assert row["sampler_kl"] < 1e-6 < row["grad_norm"]
        assert row["prompts_drawn"] == 4 and row["kl"] >= 0
        total = 16 * row["length_mean"] / row["seconds_step"]
        assert row["tokens_per_second"] == pytest.approx(total, rel=1e-3)
    config = strict((folder / "config.json").read_text())
    assert (config["completions_per_update"], config["dtype"]) == (4, "float32")
    assert config["clip_low"] == 3e-4 and config["name"] == "run"
    samples = metrics(folder, "samples")
    group = [row for row in samples if "tokens" in row]
    assert {row["step"] for row in group} == {1, 2, 3, 4} and len(group) <= 16
    samples = [row for row in samples if "tokens" not in row]
    assert [row["step"] for row in samples] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    assert all(row["prompt"].endswith("=") for row in samples)
    assert not any("<eos>" in row["completion"] for row in samples)
    assert [row["step"] for row in metrics(folder, "evaluations")] == [0] * 4 + [2] * 4 + [4] * 4
    assert (folder / "report.html").exists()
    for path in folder.rglob("*"):  # no pickle, and no zip, which torch.save writes
        if path.is_file() and path.name != "lock":
            assert path.suffix in (".json", ".jsonl", ".safetensors", ".jinja", ".txt", ".html")

    loaded = AutoModelForCausalLM.from_pretrained(newest(folder), dtype=torch.float32).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(newest(folder)).encode("7+5*3=")])
    with torch.no_grad():
        torch.testing.assert_close(seen.run.models.policy(ids).logits, loaded(ids).logits)


def test_nothing_but_the_algorithm_is_needed(tmp_path, monkeypatch):
    """No model, data, reward or name, and no home, as in a container without a user."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    flags = "--algo gspo --steps 1 --prompts-per-step 2 --eval-prompts 4 --eval-samples 0"
    assert launch("runs", flags, small=False).status == 0
    config = strict(Path("runs/gspo-1/config.json").read_text())
    assert config["reward"] == "arithmetic" and len(metrics("runs/gspo-1")) == 1
    assert len(list(Path("cache/gspo").iterdir())) == 1


def test_a_resumed_run_keeps_the_date_of_its_start_and_its_tracker(
    models, seen, monkeypatch, tmp_path
):
    """A chat template may write the day. The run began on 9 September 2001."""
    starts, rows = [], []
    wandb = SimpleNamespace(__spec__="a module", init=lambda **settings: starts.append(settings))
    wandb.log = lambda row, step: rows.append(row)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    template = b"{{ strftime_now('%Y%m%d') }}+{{ messages[0].content }}"
    model = copied(models / "tiny", models / "dated", chat_template__jinja=template)
    flags = f"--model {model} --reward pay.py:even --track wandb --steps 1"
    folder = good(tmp_path, flags).folder
    path = newest(folder) / "trainer/progress.json"
    progress = strict(path.read_text()) | {"began": 1e9}
    del progress["seal"]  # of the files as they were
    path.write_text(json.dumps(progress))
    good(tmp_path, "--resume --steps 2 --name run", small=False)
    assert rows == metrics(folder)
    first, second = starts
    assert first["config"]["lr"] == 1e-3 and second["resume"] == "allow"
    assert second["name"] == second["id"] == "run-20010909-014640"
    assert "20010909+" in seen.run.tokenizer.decode(seen.run.held_out[0][IDS])


@pytest.mark.parametrize("dtype, then", [("bfloat16", ["high"]), ("float32", [])])
def test_tf32_is_for_bfloat16_on_a_gpu_after_the_check_in_float32(dtype, then, monkeypatch):
    """The float32 head takes most of the time there. The check compares to 1e-3, without TF32."""
    calls = []

    def check(*given):
        calls.append("check")
        config.device = "cuda"  # pretended from here on

    monkeypatch.setattr(torch, "set_float32_matmul_precision", calls.append)
    monkeypatch.setattr(train, "check_scorer", check)
    monkeypatch.setattr(train, "Models", Mock(side_effect=KeyboardInterrupt))
    config = train.parse_flags([*BASE.split(), "--dtype", dtype, "--device", "cpu"])
    with pytest.raises(KeyboardInterrupt):
        train.Run(config, train.Ranks())
    assert calls == ["check", *then]


@pytest.mark.parametrize(
    "flags, warns",
    [
        ("--algo gspo --dtype bfloat16", True),
        ("--algo gspo --dtype float32", False),
        ("--algo gspo --dtype bfloat16 --clip-low 0.03", False),
        ("--algo grpo --dtype bfloat16", False),
        ("--algo gspo --dtype bfloat16 --completions-per-update 256", False),  # every ratio is 1
    ],
)
def test_a_band_below_the_rounding_of_bfloat16_is_said(flags, warns, capsys, place):
    config = train.parse_flags([*BASE.split(), *flags.split()])
    train.Models(config, train.gspo.ALGOS[config.algo], models.load_model("models/tiny", "cpu"))
    assert ("rounding can exceed" in capsys.readouterr().out) == warns
