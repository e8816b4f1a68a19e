"""Verifiers, rewards and built-in tasks: what must pay, what must not, and what must not hang."""
import itertools
import os
import random
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import rewards


@pytest.mark.parametrize("name", list(rewards.TASKS))
def test_task_demonstrations_are_well_formed_and_often_wrong(name):
    task = rewards.TASKS[name]
    reward = rewards.parse_reward(task.verifier)
    rng = random.Random(0)
    correct = 0
    for problem in itertools.islice(rewards.problems(task, seed=0), 500):
        demonstration = task.demonstration(problem, rng)
        assert set(problem["prompt"] + demonstration) <= set(task.alphabet)
        assert len(demonstration) < task.max_new_tokens
        assert reward.check_answer(problem["answer"]) is None
        correct += reward.score([demonstration], [problem])[0].correct
    assert 0.1 < correct / 500 < 0.6
    assert reward.faults == 0
