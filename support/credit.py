"""Credit assignment: which token of a completion gets which reward."""

import bisect

import torch
from torch import Tensor


def token_that_completes(tokenizer, ids: list[int], characters: int) -> int:
    """Return the index of the token with which a completion's text has so many characters."""

    def count(token):
        text = tokenizer.decode(ids[: token + 1], skip_special_tokens=True)
        return len(text.rstrip("\ufffd"))  # the first bytes of a character

    return bisect.bisect_left(range(len(ids) - 1), characters, key=count)


def place_rewards(tokenizer, rollout, outcomes: Tensor, steps: list[list]) -> tuple[Tensor, Tensor]:
    """Return rewards at tokens and the ends of steps, (N, T) each. The outcome (N,) is at the last
    token, the reward of a step, (end in characters, reward), at the token that completes it."""
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
            token = latest[i, token_that_completes(tokenizer, ids, end)]
            token_rewards[i, token] += reward
            step_ends[i, token] = True
    return token_rewards, step_ends
