"""Sentences name the problems of a step and of a run, and nothing that is healthy."""

from types import SimpleNamespace

from support.health import fault_warnings, health, warnings_of
from test_report import FLAGS


def step_row(step: int, **more) -> dict:
    row = {"step": step, "reward": 0.5, "solved": 0.5, "truncated": 0.0, "dead": 0.3}
    return row | {"dead_right": 0.2, "clip_fraction": 0.3, "entropy": 0.4} | more


# (a row, flags, a word of the only sentence, or "" if all is healthy)
STEPS = [
    ({"dead": 0.97, "dead_right": 0.95}, {}, "harder prompts"),
    ({"dead": 1.0, "dead_right": 0.0}, {}, "easier prompts"),
    ({"dead": 1.0, "dead_right": 0.0}, {"teacher": "models/large"}, ""),  # it needs no rewards
    ({"truncated": 0.4}, {}, "--max-new-tokens"),
    ({}, {"completions_per_update": 256}, "one update per step"),
    ({}, {"completions_per_update": 256, "clip_low": None}, ""),  # reinforce has no ratio
    ({"clip_fraction": 0.0}, {}, "nothing is clipped"),
    ({"clip_fraction": 0.0}, {"clip_low": None}, ""),
    ({"clip_fraction": 0.74}, {}, "almost everything is clipped"),
    ({"clip_fraction": 0.2}, {"completions_per_update": 256, "epochs": 2}, ""),
    ({"entropy": 0.001}, {}, "exploration is over"),
    ({"entropy": 0.001, "solved": 0.97}, {}, ""),  # all is solved: it may be sure
]


def test_health_names_what_is_wrong_and_that_alone():
    for row, flags, word in STEPS:
        found = health([step_row(1, **row)], FLAGS | flags)
        assert len(found) == bool(word) and all(word in sentence for sentence in found), row
    unjudged = step_row(1)  # no verifier says which completions are right
    del unjudged["solved"], unjudged["dead_right"]
    assert health([unjudged], FLAGS) == []


def test_steps_of_dead_groups_do_not_lower_the_mean_of_the_others():
    """They have no entropy: the mean of one step with 0.05 and nine without is 0.05."""
    rows = [step_row(step) for step in range(1, 11)]
    for row in rows[1:]:
        del row["entropy"]
    rows[0]["entropy"] = 0.05
    assert not any("exploration" in sentence for sentence in health(rows, FLAGS))


def run_of(rewards, **more) -> list[dict]:
    return [step_row(step, reward=reward, **more) for step, reward in enumerate(rewards, 1)]


def test_health_sees_a_collapse_and_no_slow_beginning():
    rows = run_of([0.1] * 10 + [0.8] * 20 + [0.3] * 10)
    [sentence] = health(rows, FLAGS)
    assert "fell from 0.80 to 0.30" in sentence
    assert health(rows[:30], FLAGS) == []
    below_0 = run_of(
        [-1.05, -1.01] * 5 + [-1.02] * 10 + [-1.04] * 10
    )  # half of a tiny rise is lost
    assert not any("fell" in sentence for sentence in health(below_0, FLAGS))


def test_a_reward_that_does_not_rise_names_the_learning_rate():
    """A rise by less than two standard errors is none: noise of 0.1 a step, ten steps, 0.045 twice.
    Few steps say nothing, and a task that is solved cannot rise."""
    noise = [0.1, -0.1] * 5
    flat = [0.3 + each for each in noise] * 2
    [sentence] = health(run_of(flat), FLAGS | {"lr": 1e-6})
    assert "0.30 in the first 10 steps, 0.30 in the last 10" in sentence
    assert "The usual cause is --lr 1e-06" in sentence
    for rise, sentences in ((0.08, 1), (0.1, 0)):
        rows = run_of(flat[:10] + [each + rise for each in flat[10:]])
        assert len(health(rows, FLAGS)) == sentences
    assert health(run_of(flat[:9]), FLAGS) == []
    assert health(run_of(flat, solved=0.95), FLAGS) == []


def test_health_sees_held_out_numbers_that_fall():
    """Below their best by more than twice the standard error; pass@8 below its start."""
    before = {"step": 0, "eval_solved": 0.2, "eval_pass@8": 0.91}
    rows = run_of([step / 20 for step in range(20)])
    rows[9]["eval_solved"] = 0.6
    rows[19] |= {"eval_solved": 0.58, "eval_pass@8": 0.5}
    [sentence] = health(rows, FLAGS, before)
    assert "pass@8 fell from 91% to 50%" in sentence
    rows[19] |= {"eval_solved": 0.3, "eval_pass@8": 0.9}
    [sentence] = health(rows, FLAGS, before)
    assert "solved fell from 60% to 30%" in sentence


def test_health_sees_rewards_that_teach_nothing():
    same = run_of([0.7] * 20, reward_std=0.0, dead=1.0, dead_right=0.0)
    assert any("the same reward" in sentence for sentence in health(same, FLAGS))
    failed = run_of([0.1, 0.5] * 10, verifier_faults=100)
    assert any("verifiers fail" in sentence for sentence in health(failed, FLAGS))
    few = run_of([0.1, 0.5] * 10, verifier_faults=10)
    assert not any("verifiers fail" in sentence for sentence in health(few, FLAGS))


def test_the_console_warns_of_verifiers_that_fail():
    """Once for the first, again above a third of the completions."""
    verdicts = [SimpleNamespace(fault="KeyError: 'a'")] + [SimpleNamespace(fault="")] * 2
    [(kind, sentence)] = fault_warnings(verdicts).items()
    assert kind == "fault" and sentence.endswith("KeyError: 'a'")
    found = fault_warnings(verdicts[:2])
    assert "50% of completions" in found["faults"] and len(found) == 2
    assert fault_warnings(verdicts[1:]) == {}


def test_the_console_warns_of_a_step():
    """More than a third is many. With --stale-steps the sampler may be apart. A term whose
    values leave [0, 1] is named, declared shaping is not."""
    row = {"truncated": 0.4, "dead": 0.75, "prompts_drawn": 8.0, "sampler_kl": 0.003}
    flags = dict(dynamic_sampling=True, prompts_per_step=4, dtype="float32", stale_steps=1)
    config, progress = SimpleNamespace(**flags), SimpleNamespace(quiet_steps=10)
    reward = SimpleNamespace(shaping={"format", "bonus"}, out_of_range={"bonus", "late"})
    run = SimpleNamespace(config=config, progress=progress, reward=reward, turns=None)
    found = warnings_of(run, row | {"ratio_mean": 20.26})
    assert "2 of 8 groups have unequal rewards, expected 4" in found["refills"]
    assert found["truncated"] == "40% of completions are truncated: raise --max-new-tokens"
    assert "all rewards are equal" in found["quiet"]
    assert "another distribution, sampler_kl 0.003" in found["sampler"]
    assert "`per`" in found["ratio"] and "shaping format" not in found
    assert found["shaping bonus"].endswith("outside [0, 1]: `solved` leaves it out")
    assert "`solved` counts it as 0 or 1 (set `shaping = True`" in found["shaping late"]
    config.dtype = "bfloat16"  # where rounding alone makes up to 0.01
    assert "sampler" not in warnings_of(run, row)
    assert "sampler" in warnings_of(run, row | {"sampler_kl": 0.03})
    config.stale_steps, config.dynamic_sampling, progress.quiet_steps = 4, False, 11
    reward.out_of_range = set()
    assert warnings_of(run, row | {"truncated": 0.3, "ratio_mean": 1.2}) == {}
