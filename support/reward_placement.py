"""Credit assignment: decide which token of a completion gets which reward."""

import bisect
from collections.abc import Callable

import torch
from torch import Tensor


def place_rewards(
    read: Callable[[list[int]], str], rollout, outcomes: Tensor, steps: list[list]
) -> tuple[Tensor, Tensor]:
    """Return the reward of each token and whether a step ends there, (N, T) each.

    read: turns token ids into the text that the verifier read
    outcomes: (N,), the rewards of the last tokens
    steps: for each completion, (end in characters, reward) pairs. The reward goes to the token that
        completes the step's text
    """
    latest = rollout.latest_action
    last = latest[:, -1:]
    zeros = torch.zeros_like(rollout.sampler_logprobs)
    token_rewards = zeros.scatter(1, last, outcomes[:, None])
    step_ends = zeros.bool().scatter(1, last, True)
    for i, steps_of_row in enumerate(steps):
        if not steps_of_row:
            continue
        ids = rollout.completions[i, : rollout.lengths[i]].tolist()
        for end, reward in steps_of_row:
            token = latest[i, token_that_completes(read, ids, end)]
            token_rewards[i, token] += reward
            step_ends[i, token] = True
    return token_rewards, step_ends


def token_that_completes(read, ids: list[int], characters: int) -> int:
    """Index of the first token whose decoded prefix reaches `characters` characters."""

    def length_up_to(token):
        # the first bytes of a character are decoded as U+FFFD until the others follow
        return len(read(ids[: token + 1]).rstrip("\ufffd"))

    return bisect.bisect_left(range(len(ids) - 1), characters, key=length_up_to)
