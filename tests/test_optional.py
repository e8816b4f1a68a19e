"""Flags of a run that most users never set: a sampler of one's own, the schedule of the learning
rate, the lenient twin of a reward."""

import math

import pytest
import torch

from tools import BASE, good, metrics, write_rows

pytestmark = pytest.mark.usefixtures("place")

SAMPLER = '''
import rollout

def sampler(model, prompts, uniforms, **options):
    """Half of the uniforms: other samples than rollout.generate's."""
    with open("calls", "a") as file:
        file.write(f"{len(prompts)} {options['temperature']} ")
    return rollout.generate(model, prompts, uniforms / 2, **options)
'''


def test_a_sampler_of_ones_own_samples_rollouts_and_evaluations(place, tmp_path):
    (place / "mine.py").write_text(SAMPLER)
    one = good(tmp_path / "one", f"{BASE} --steps 1 --sampler mine.py:sampler").folder
    assert (place / "calls").read_text() == "8 0.0 4 1.0 8 0.0 "
    other = good(tmp_path / "other", f"{BASE} --steps 1").folder
    assert metrics(one)[0]["reward"] != metrics(other)[0]["reward"]


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [0.5, 1, 1, 1]),
        ("linear", [0.5, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, *((1 + math.cos(math.pi * done / 4)) / 2 for done in (1, 2, 3))]),
    ],
)
def test_a_schedule_of_the_learning_rate(schedule, expected, tmp_path):
    """Two steps of warm-up, times the fraction of the four steps that is left as a step begins."""
    flags = f"{BASE} --steps 4 --warmup-steps 2 --lr 1e-3 --lr-schedule {schedule}"
    rows = metrics(good(tmp_path, flags).folder)
    assert [row["lr"] / 1e-3 for row in rows] == pytest.approx(expected)


def test_the_lenient_twin_judges_the_same_completions(tmp_path):
    """math wants a mark, and finds none. math_lenient takes the last number."""
    rows = [{"prompt": f"{i}+1=", "answer": str(n)} for i in range(5) for n in range(10)]
    write_rows("rows.jsonl", rows)
    flags = f"{BASE} --data rows.jsonl --eval-data rows.jsonl --reward math --eval-prompts 50"
    result = good(tmp_path, f"{flags} --steps 1")
    [row] = metrics(result.folder)
    assert row["eval_solved"] == 0 < row["eval_solved_lenient"] < 0.5
    assert "lenient" in result.out


def test_dynamic_sampling_reads_the_rewards_that_the_algorithm_reads(seen, tmp_path):
    """pay.py:steps rewards steps, too. dapo reads outcomes alone: equal ones make a dead group."""
    good(tmp_path, f"{BASE} --algo dapo --reward pay.py:steps")
    for step in seen.steps:
        outcomes = torch.tensor([each.score.reward for each in step.batch.samples]).view(-1, 4)
        assert (outcomes.amin(1) < outcomes.amax(1)).all()
        assert step.fixed.advantages.view(-1, 4).any(1).all()
