"""Credit: at which of the policy's own tokens a reward stands, and where a step ends."""

import bisect

import torch
from torch import Tensor


def own_tokens(samples) -> Tensor:
    """(N, T) for each token the index of the last one up to it that is the policy's own: what a
    tool wrote is no action, so what would stand there goes to the action before."""
    mask = samples.completion_mask
    steps = torch.arange(mask.shape[1], device=mask.device)
    return (steps * mask).cummax(1).values


def placed(rewards: Tensor, steps: list, samples, tokenizer) -> tuple[Tensor, Tensor]:
    """Rewards where they are earned, and where steps end, (N, T) each: the outcome (N,) at the last
    token, the reward of a step, (end in characters, reward), at the token that completes its text.
    """
    own = own_tokens(samples)
    last = own[:, -1:]
    zeros = torch.zeros_like(samples.sampler_logprobs)
    token_rewards = zeros.scatter(1, last, rewards[:, None])
    step_ends = torch.zeros_like(samples.completion_mask).scatter(1, last, True)
    for i, steps_of_row in enumerate(steps):
        ids = samples.completions[i, : samples.lengths[i]].tolist()
        for end, reward in steps_of_row:
            token = own[i, token_that_completes(tokenizer, ids, end)]
            token_rewards[i, token] += reward
            step_ends[i, token] = True
    return token_rewards, step_ends


def token_that_completes(tokenizer, ids: list[int], characters: int) -> int:
    """Index of the token with which the text of a completion has so many characters."""

    def complete(token):
        text = tokenizer.decode(ids[: token + 1], skip_special_tokens=True)
        return len(text.rstrip("\ufffd"))  # the first bytes of a character

    found = bisect.bisect_left(range(len(ids)), characters, key=complete)
    return min(found, len(ids) - 1)
