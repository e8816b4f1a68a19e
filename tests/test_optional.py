"""Flags of a run that most users never set: a sampler of one's own, the schedule of the learning
rate, the lenient twin of a reward, what a resumed run may change."""

import math

import pytest

import train
from tools import BASE, good, metrics, refused, write_rows

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
    (place / "calls").unlink(missing_ok=True)
    one = good(tmp_path / "one", f"{BASE} --steps 1 --sampler mine.py:sampler").folder
    assert (place / "calls").read_text() == "8 0.0 4 1.0 8 0.0 "
    other = good(tmp_path / "other", f"{BASE} --steps 1").folder
    assert metrics(one)[0]["reward"] != metrics(other)[0]["reward"]


@pytest.mark.parametrize("flag", ["none.py:sampler", "mine.py:nothing", "mine.py"])
def test_a_sampler_that_is_not_there_is_refused(flag, place, tmp_path):
    (place / "mine.py").write_text(SAMPLER)
    words = f"--sampler {flag}: expected file.py:function"
    assert words in refused(tmp_path, f"{BASE} --sampler {flag}")


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [0.5, 1, 1, 1]),
        ("linear", [0.5, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, *((1 + math.cos(math.pi * done / 4)) / 2 for done in (1, 2, 3))]),
    ],
)
def test_a_schedule_of_the_learning_rate(schedule, expected, tmp_path):
    """Two steps of warm-up, times what is left of four steps when a step begins."""
    flags = f"{BASE} --steps 4 --warmup-steps 2 --lr 1e-3 --lr-schedule {schedule}"
    rows = metrics(good(tmp_path, flags).folder)
    assert [row["lr"] / 1e-3 for row in rows] == pytest.approx(expected)


def test_a_schedule_ends_with_the_steps_of_its_run(tmp_path):
    flags = f"{BASE} --steps 2 --lr-schedule linear"
    good(tmp_path, flags)
    more = refused(tmp_path, "--resume --name run --steps 4", small=False)
    assert "--steps: --lr-schedule linear ends after 2 steps" in more
    other = refused(tmp_path, "--resume --name run --lr-schedule cosine", small=False)
    assert "--lr-schedule: a resumed run keeps its own, linear" in other


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--kl-coef 0.1", "--kl-coef 0.1: a resumed run keeps its models; it began with 0.0"),
        ("--stale-steps 2", "--stale-steps 2: a resumed run keeps its models; it began with 1"),
        ("--lora-rank 2", "--lora-rank: a resumed run keeps its own, 0"),
    ],
)
def test_a_flag_that_a_checkpoint_does_not_allow_is_named(flags, words, tmp_path):
    good(tmp_path, BASE)
    assert words in refused(tmp_path, f"--resume --name run --steps 4 {flags}", small=False)


def test_the_lenient_twin_judges_the_same_completions(place, seen, tmp_path):
    """math wants a mark, and finds none; math_lenient takes the last number."""
    rows = [{"prompt": f"{i}+1=", "answer": str(n)} for i in range(5) for n in range(10)]
    write_rows(place / "rows.jsonl", rows)
    flags = f"{BASE} --data rows.jsonl --eval-data rows.jsonl --reward math --eval-prompts 50"
    result = good(tmp_path, f"{flags} --steps 1")
    row = metrics(result.folder)[0]
    assert row["eval_solved"] == 0 < row["eval_solved_lenient"] < 0.5
    assert "lenient" in result.out
    assert seen.run.lenient.terms.keys() == {"math_lenient"}


def test_a_page_that_cannot_be_written_costs_a_warning(monkeypatch, tmp_path):
    page = train.extra("report")

    def broken(folders, path):
        assert list((tmp_path / "run/checkpoints").iterdir())  # it was saved before
        raise KeyError("date")

    monkeypatch.setattr(page, "write_report", broken)
    result = good(tmp_path, f"{BASE} --steps 1")
    assert "warning: report.html was not written: KeyError: 'date'" in result.out


def test_dynamic_sampling_reads_the_rewards_that_the_algorithm_reads(seen, tmp_path):
    """pay.py:steps rewards steps, too. dapo reads outcomes alone: equal ones make a dead group."""
    good(tmp_path, f"{BASE} --algo dapo --reward pay.py:steps --steps 2")
    for batch in seen.batches:
        outcomes = [score.reward for score in batch.samples.scores]
        for group in range(0, len(outcomes), 4):
            assert len(set(outcomes[group : group + 4])) > 1
        advantages = batch.advantages.view(-1, 4)
        assert (advantages != 0).any(1).all()


def test_truncated_completions_that_teach_are_no_reason_for_a_warning(tmp_path):
    """A teacher has advantages for them. Without one nothing is left after the overlong filter."""
    flags = f"{BASE} --max-new-tokens 1 --steps 10 --prompts-per-step 2"
    taught = good(tmp_path / "one", f"{flags} --algo opd --teacher models/moe")
    assert metrics(taught.folder)[0]["truncated"] > 0.5 and "taught nothing" not in taught.out
    quiet = good(tmp_path / "other", f"{flags} --overlong-filter --group-size 2")
    assert "taught nothing: all completions are truncated" in quiet.out


def test_a_tracker_that_fails_costs_a_warning(monkeypatch, tmp_path):
    def fails(row):
        assert list((tmp_path / "run/checkpoints").iterdir())  # it was saved before
        raise OSError("no network")

    claim_folder = train.claim_folder

    def with_tracker(run):
        claim_folder(run)
        run.tracker = fails

    monkeypatch.setattr(train, "claim_folder", with_tracker)
    result = good(tmp_path, f"{BASE} --steps 1")
    assert result.out.count("warning: --track was not written: OSError: no network") == 1
