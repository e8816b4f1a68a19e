"""Properties of whole runs that a small fault would break without an error."""

import pytest
import torch

from tools import BASE, digests, good, metrics, newest, same_run, timeless, write_rows

pytestmark = pytest.mark.usefixtures("place")


@pytest.mark.parametrize("flags", ["--dtype bfloat16", "--dtype bfloat16 --stale-steps 2"])
def test_an_evaluation_is_that_of_the_checkpoint_and_changes_nothing_in_training(flags, tmp_path):
    """The sampler is a copy: it must have the weights after the step, or else stay stale."""
    flags = f"{flags} --lr 1e-2"
    often = good(tmp_path / "often", f"{BASE} --steps 3 --eval-every 1 {flags}").folder
    never = good(tmp_path / "never", f"{BASE} --steps 3 --eval-every 0 {flags}").folder
    for row, expected in zip(timeless(often)[:-1], timeless(never)[:-1], strict=True):
        del row["eval_solved"]
        assert row == expected
    assert digests(often) == digests(never)

    model = f"--model {newest(often)} --reward pay.py:even --steps 1"
    again = good(tmp_path / "again", f"{model} {flags}").folder
    [before], [start] = metrics(again, "starts"), metrics(often, "starts")
    assert before["eval_solved"] == metrics(often)[-1]["eval_solved"] != start["eval_solved"]


def test_each_step_has_its_own_order_of_updates(seen, tmp_path):
    """Whole groups in a random order, which the seed and the step decide, like all else."""
    write_rows("same.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 40)
    flags = "--prompts-per-step 8 --group-size 2 --completions-per-update 4 --eval-samples 2"
    flags += " --data same.jsonl --eval-data same.jsonl"
    orders, folders, texts = [], [], []
    for number, seed in enumerate((0, 0, 1)):
        seen.steps.clear()
        run = good(tmp_path / str(number), f"{BASE} {flags} --seed {seed}")
        folders.append(run.folder)
        texts.append([each.completion for step in seen.steps for each in step.batch.verdicts])
        for step in seen.steps:
            order = torch.cat([update.rows for update in step.updates]).tolist()
            assert sorted(order) == list(range(16))
            assert all(a % 2 == 0 and b == a + 1 for a, b in zip(order[::2], order[1::2]))
            orders.append(tuple(order))
    assert orders[:2] == orders[2:4]
    assert len({*orders, tuple(range(16))}) == 5
    same_run(folders[0], folders[1])
    assert texts[0][:16] not in (texts[0][16:], texts[2][:16])  # of the first step
