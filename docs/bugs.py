"""Find the bug! Here are six losses with one bug each, and messages from colleagues who met them.

None of the bugs raises an error, and several have been made in public code. Start from the symptom:
what would have to be wrong? Then fix the loss right here, in your copy of the project, and check
your fix:

    python docs/exercises.py bugs

Stuck? The originals are in the `gspo.py` of the project that you copied.
"""

import torch

from gspo import as_columns, completion_mean, masked_mean, policy_metrics


def grpo_loss(logprobs, old_logprobs, advantages, mask, denom=None, *, clip_low=0.2, clip_high=0.2):
    """“The clip fraction looks fine, but the policy collapses within ten steps. A token with A < 0
    whose probability has already halved keeps falling, and one that rose by mistake never comes
    back down.”"""
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs.detach(), 0.0)
    advantages = as_columns(advantages)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -masked_mean(torch.max(unclipped, clipped), mask, "completion", denom)
    stopped = clipped < unclipped
    return loss, policy_metrics(log_ratio, stopped, advantages, mask, "completion", denom)


def gspo_loss(
    logprobs, old_logprobs, advantages, mask, denom=None, *, clip_low=3e-4, clip_high=4e-4
):
    """“One-token completions train beautifully. Of our 4,000-token completions, half are clipped
    after a single update, and ratio_mean is 40 one minute and 0.01 the next.”"""
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs.detach(), 0.0).sum(1, keepdim=True)
    advantages = completion_mean(as_columns(advantages), mask)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -masked_mean(torch.min(unclipped, clipped), mask, "completion", denom)
    stopped = clipped < unclipped
    return loss, policy_metrics(log_ratio, stopped, advantages, mask, "completion", denom)


def cispo_loss(logprobs, old_logprobs, advantages, mask, denom=None, per="token", *, ratio_max=5.0):
    """“The very first update makes no sense to me. It pushes up a token of probability 0.9, as it
    should with A > 0, and pushes down one of probability 0.1 with the same A.”"""
    logprobs = torch.where(mask > 0, logprobs, 0.0)
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs.detach(), 0.0)
    advantages = as_columns(advantages)
    ratio = log_ratio.exp()
    loss = -masked_mean(ratio.clamp(max=ratio_max) * advantages * logprobs, mask, per, denom)
    bounded = ratio > ratio_max
    return loss, policy_metrics(log_ratio, bounded, advantages, mask, per, denom)


def dapo_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    denom=None,
    per="token",
    *,
    clip_low=0.2,
    clip_high=0.28,
):
    """“We switched to a sampler that writes -inf after the end token. The loss and its metrics are
    still ordinary numbers, but after one update all weights are NaN. How? We mask those!”"""
    log_ratio = (logprobs - old_logprobs.detach()) * mask
    advantages = as_columns(advantages)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -masked_mean(torch.min(unclipped, clipped), mask, per, denom)
    stopped = clipped < unclipped
    return loss, policy_metrics(log_ratio, stopped, advantages, mask, per, denom)


def sapo_loss(logprobs, old_logprobs, advantages, mask, denom=None, *, tau_pos=1.0, tau_neg=1.05):
    """“I halved the micro-batch size to save memory and changed nothing else. The gradient norm
    doubled, and now the old learning rate diverges.” Hint: the formula is fine."""
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs.detach(), 0.0)
    advantages = as_columns(advantages)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
    loss = -masked_mean(gate * advantages, mask, "completion")
    stopped = torch.zeros_like(mask, dtype=torch.bool)
    return loss, policy_metrics(log_ratio, stopped, advantages, mask, "completion", denom)


def gspo_token_loss(
    logprobs, old_logprobs, advantages, mask, denom=None, *, clip_low=3e-4, clip_high=4e-4
):
    """“If all completions have the same length, this loss matches gspo_loss to the last digit. On
    real data, a completion of 900 tokens counts as much as nine completions of 100.”"""
    log_ratio = completion_mean(logprobs - old_logprobs.detach(), mask).detach()  # log s, (N, 1)
    advantages = as_columns(advantages)
    logprobs = torch.where(mask > 0, logprobs, 0.0)
    ratio = log_ratio.exp() * (logprobs - logprobs.detach()).exp()  # (N, T) s_t, eq. 14
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -masked_mean(torch.min(unclipped, clipped), mask, "token", denom)
    stopped = clipped < unclipped
    return loss, policy_metrics(log_ratio, stopped, advantages, mask, "completion", denom)
