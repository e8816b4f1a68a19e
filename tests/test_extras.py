"""The optional files of support/: in a copy of the project without one of them, and without all,
the default command trains. A flag that needs a missing file says so in a sentence."""

import json
import shutil
from pathlib import Path

import pytest

from forks import fork, program
from tools import ROOT

SMALL = "--steps 1 --prompts-per-step 2 --group-size 4 --eval-prompts 4 --eval-samples 0"
TRAINS = f"--algo gspo {SMALL}"
NEEDS = {  # extra -> flags that ask for it
    "experts": ["--routing-replay --model models/moe --reward arithmetic"],
    "lora": ["--lora-rank 4"],
    "fast_scoring": [],
    "fast_sampling": [],
    "report": [],
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


@pytest.mark.parametrize("name", CASES)
def test_a_project_without_it_trains_and_says_so_where_it_is_needed(name, models, tmp_path):
    """A mixture trains, too, though nobody counts its flips then."""
    copy, out, gone = tmp_path / "copy", tmp_path / "out", CASES[name]
    copy.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, copy)
    shutil.copytree(ROOT / "support", copy / "support")
    for extra in gone:
        Path(copy, f"support/extras/{extra}.py").unlink()
    Path(copy, "models").symlink_to(models)
    Path(copy, "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    trains = [f"{TRAINS} --name gspo"]
    if name in ("experts", "fast_scoring", "all"):
        trains.append(f"{MIXTURE} --name moe")
    needs = [line for extra in gone for line in NEEDS[extra]]

    cache = str(models / "cache")
    process = fork(program, PROGRAM, *trains, *needs, out=out, folder=copy, XDG_CACHE_HOME=cache)
    process.join()
    assert process.exitcode == 0, out.read_text()
    printed = json.loads(out.read_text())
    for line in trains:
        status, said, err = printed[line]
        assert status == 0 and "held out" in said, err or status
    for line in needs:
        status, _, err = printed[line]
        assert status == 2 and err.count("\n") == 1 and err.startswith("error: "), err or status
        sentences = [f"needs support/extras/{extra}.py, which is not here" for extra in gone]
        assert any(sentence in err for sentence in sentences), err  # two may be missing
