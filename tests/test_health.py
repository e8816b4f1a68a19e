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


def run_of(rewards, **more) -> list[dict]:
    return [step_row(step, reward=reward, **more) for step, reward in enumerate(rewards, 1)]


NOISE = [0.1, -0.1] * 5  # ten steps: a standard error of 0.045 for the difference of two means
FLAT = [0.3 + each for each in NOISE] * 2
RISE_OF_8 = FLAT[:10] + [0.38 + each for each in NOISE]
RISE_OF_10 = FLAT[:10] + [0.40 + each for each in NOISE]
DULL = {"reward_std": 0.0, "dead": 1.0, "dead_right": 0.0}
RUNS = [  # rewards, more of each row, a word of the only sentence
    ([0.1] * 10 + [0.8] * 20 + [0.3] * 10, {}, "fell from 0.80 to 0.30"),
    ([0.1] * 10 + [0.8] * 20, {"verifier_faults": 10}, ""),
    (FLAT, {}, "0.30 in the first 10 steps, 0.30 in the last 10). The usual cause is --lr 1e-06"),
    (RISE_OF_8, {}, "--lr 1e-06"),  # by less than two standard errors
    (RISE_OF_10, {}, ""),
    (FLAT[:9], {}, ""),  # few steps say nothing
    (FLAT, {"solved": 0.95}, ""),  # what is solved cannot rise
    ([0.7] * 20, DULL, "the same reward"),
    ([0.1, 0.5] * 10, {"verifier_faults": 100}, "verifiers fail"),
]


def test_health_of_a_run_names_what_is_wrong():
    for rewards, more, word in RUNS:
        said = " ".join(health(run_of(rewards, **more), FLAGS | {"lr": 1e-6}))
        assert word in said
        assert bool(word) == bool(said)


def test_health_does_not_take_noise_or_missing_metrics_for_a_problem():
    half_of_a_tiny_rise_is_lost = [-1.05, -1.01] * 5 + [-1.02] * 10 + [-1.04] * 10
    assert "fell" not in " ".join(health(run_of(half_of_a_tiny_rise_is_lost), FLAGS))
    dead = run_of([0.5] * 10)  # steps without entropy do not lower the mean of the others
    for row in dead[1:]:
        del row["entropy"]
    dead[0]["entropy"] = 0.05
    assert "exploration" not in " ".join(health(dead, FLAGS))


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


def test_the_console_warns_of_verifiers_that_fail():
    """Once for the first, again above a third of the completions."""
    verdicts = [SimpleNamespace(fault="KeyError: 'a'")] + [SimpleNamespace(fault="")] * 2
    [(kind, sentence)] = fault_warnings(verdicts).items()
    assert kind == "fault" and sentence.endswith("KeyError: 'a'")
    found = fault_warnings(verdicts[:2])
    assert "50% of completions" in found["faults"] and len(found) == 2
    assert fault_warnings(verdicts[1:]) == {}


def test_the_console_warns_of_a_step():
    """With --stale-steps the sampler may be apart. Declared shaping may leave [0, 1]."""
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
