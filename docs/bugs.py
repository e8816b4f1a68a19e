"""Find the bug: six losses with one fault each, and the message of a colleague who saw a symptom.

    python docs/exercises.py bugs     # which of these are right?

Mend a loss here, in the folder of the exercises. The `gspo.py` that you copied from has the
originals.
"""

import torch

from gspo import as_columns, completion_mean, masked_mean, policy_metrics


def grpo_loss(logprobs, old_logprobs, advantages, mask, denom=None, *, clip_low=0.2, clip_high=0.2):
    """“The clip fraction is right, and still it collapses in ten steps. A token with A < 0 whose
    probability has halved keeps falling. One that rose by mistake never comes back.”"""
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
    """“Answers of one token train well. Half of those of 4,000 tokens are clipped after one
    update, and ratio_mean is sometimes 40, sometimes 0.01.”"""
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs.detach(), 0.0).sum(1, keepdim=True)
    advantages = completion_mean(as_columns(advantages), mask)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -masked_mean(torch.min(unclipped, clipped), mask, "completion", denom)
    stopped = clipped < unclipped
    return loss, policy_metrics(log_ratio, stopped, advantages, mask, "completion", denom)


def cispo_loss(logprobs, old_logprobs, advantages, mask, denom=None, per="token", *, ratio_max=5.0):
    """“The first update makes no sense to me. A token of probability 0.9 with A > 0 is pushed
    up, one of probability 0.1 with the same A is pushed down.”"""
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
    """“Our sampler now writes -inf behind the end token. The loss and its metrics are numbers, as
    before. After the update every weight is NaN. But these positions are masked!”"""
    log_ratio = (logprobs - old_logprobs.detach()) * mask
    advantages = as_columns(advantages)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -masked_mean(torch.min(unclipped, clipped), mask, per, denom)
    stopped = clipped < unclipped
    return loss, policy_metrics(log_ratio, stopped, advantages, mask, per, denom)


def sapo_loss(logprobs, old_logprobs, advantages, mask, denom=None, *, tau_pos=1.0, tau_neg=1.05):
    """“With half the micro-batch size the gradient norm is twice as large, and the same learning
    rate suddenly diverges. I changed nothing else.” Its formula is not the fault."""
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
    """“On answers of equal length it agrees with gspo_loss to the last digit. On real ones an
    answer of 900 tokens counts as much as nine of 100.”"""
    log_ratio = completion_mean(logprobs - old_logprobs.detach(), mask).detach()  # log s, (N, 1)
    advantages = as_columns(advantages)
    logprobs = torch.where(mask > 0, logprobs, 0.0)
    ratio = log_ratio.exp() * (logprobs - logprobs.detach()).exp()  # (N, T) s_t, eq. 14
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -masked_mean(torch.min(unclipped, clipped), mask, "token", denom)
    stopped = clipped < unclipped
    return loss, policy_metrics(log_ratio, stopped, advantages, mask, "completion", denom)
