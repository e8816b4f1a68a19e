"""Files of support/ that can be deleted with what they do: in a copy of the project without one of
them, and without all, the default command trains, and what needs one says so in a sentence."""

import json
import shutil
from pathlib import Path

import pytest
import transformers

from forks import fork, program
from tools import ROOT, random_policy

SMALL = "--steps 1 --prompts-per-step 2 --group-size 4 --eval-prompts 4 --eval-samples 0"
TRAINS = f"--algo gspo {SMALL}"
NEEDS = {  # extra -> flags that ask for it
    "answers": ["--reward math", "--data rows.jsonl --model models/tiny"],
    "experts": ["--routing-replay --model models/moe --reward arithmetic"],
    "judge": ["--reward judge:models/judge"],
    "lenient": ["--reward math_lenient --data rows.jsonl --model models/tiny"],
    "lora": ["--lora-rank 4"],
    "fast_scoring": [],
    "fast_sampling": [],
    "programs": ["--reward code"],
    "report": [],
    "sandbox": ["--reward code"],
    "tools": ["--tool calculator", "--task calculator"],
    "trackers": ["--track wandb"],
}
MIXTURE = f"--model models/moe {SMALL}"
CASES = {extra: [extra] for extra in NEEDS} | {"all": list(NEEDS)}

PROGRAM = """
import contextlib, io, json, sys, traceback
import support.tasks, train

def run(line):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = train.main(line.split())
        except BaseException:
            status = traceback.format_exc()
    return status, out.getvalue(), err.getvalue()

support.tasks.WARM_STEPS = 4
print(json.dumps({line: run(line) for line in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def found(models, tmp_path_factory):
    """What was printed: copy -> command line -> status, stdout, stderr."""
    place, printed = tmp_path_factory.mktemp("extras"), {}
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "eos_token_id": 1}
    mamba = transformers.MambaConfig(vocab_size=18, pad_token_id=0, **shape)
    random_policy(models / "mamba", mamba)
    for name, extras in CASES.items():
        copy, out = place / name, place / f"{name}.out"
        copy.mkdir()
        for path in ROOT.glob("*.py"):
            shutil.copy(path, copy)
        shutil.copytree(ROOT / "support", copy / "support")
        for extra in extras:
            Path(copy, "support/extras", f"{extra}.py").unlink()
        Path(copy, "models").symlink_to(models)
        Path(copy, "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
        lines = [f"{TRAINS} --name gspo", *(line for extra in extras for line in NEEDS[extra])]
        if name in ("experts", "fast_scoring", "all"):
            lines.append(f"{MIXTURE} --name moe")
        cache = str(place / "cache")
        process = fork(program, PROGRAM, *lines, out=out, folder=copy, XDG_CACHE_HOME=cache)
        process.join()
        assert process.exitcode == 0, out.read_text()
        printed[name] = json.loads(out.read_text())
    return printed


@pytest.mark.parametrize("name", CASES)
def test_the_default_command_trains_without(name, found):
    """A mixture, too, though nobody counts its flips then."""
    commands = [line for line in found[name] if "--name" in line]
    for line in commands:
        status, out, err = found[name][line]
        assert status == 0, err or status
        assert "held out" in out
    assert len(commands) == 1 + (name in ("experts", "fast_scoring", "all"))


@pytest.mark.parametrize(
    "name, extra", [(n, extra) for n in CASES for extra in CASES[n] if NEEDS[extra]]
)
def test_what_needs_it_says_so(name, extra, found):
    for line in NEEDS[extra]:
        status, _, err = found[name][line]
        assert status == 2 and err.count("\n") == 1 and err.startswith("error: "), err or status
        others = CASES[name]  # two may be missing
        assert any(
            f"needs support/extras/{each}.py, which is not here" in err for each in others
        ), err
