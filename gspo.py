"""Policy optimisation for language models: every objective, advantage and KL estimator.

Torch only, tensors in and tensors out. `gspo_loss` is the one to read first: the other losses
have the same three paragraphs, so that a diff of two of them is the difference of two papers.

    weight     what a token or a completion counts in the mean
    objective  ratio and advantage, with the number of the paper's equation on its line
    metrics    0-d, detached, under the same keys in every loss of a policy

N completions in groups of G (rows of one group are contiguous), T tokens, right-padded; pi is the
policy that learns, pi_old what it was before the updates of the rollout, A an advantage, sg[x] is x
without its gradient.
No log-ratio is clamped, but for GMPO's clip. One above 88 makes a float32 ratio infinite, and may
make the gradient NaN, even where the clip stops it. The metric ratio_mean tells: a trainer has to
skip such an update.
A loss needs nothing but torch: copy its source alone. `ALGOS`, at the end, puts losses and
advantages together: reading that table is learning how the algorithms differ.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping

import torch

# ---- objectives ----------------------------------------------------------------------------------


def gspo_loss(
    logprobs, old_logprobs, advantages, mask, *, clip_low=3e-4, clip_high=4e-4, denom=None
):
    """GSPO: -min(s A, clip(s, 1-low, 1+high) A), mean over completions, arXiv 2507.18071 eq. 5;
    s = exp(mean_t(log pi - log pi_old)), eq. 7, is one ratio per completion.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first update
                  (where they are more than 88 apart the gradient may be NaN: skip such an update)
    advantages    (N,) or (N, T), of which a completion gets the mean over its tokens
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    denom         number of completions in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: N. A wrapper that averages gradients over W
                  ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction of completions whose
    gradient the clip stops, clip_fraction_high those with A > 0, ratio_mean and approx_kl of s."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    length = mask.sum(1).clamp(min=1)
    if denom is None:
        denom = len(mask)
    # an empty completion weighs 0, and still counts in N
    weight = mask.any(1).to(logprobs.dtype) / denom

    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).sum(1) / length
    ratio = log_ratio.exp()  # s, eq. 7; (N,)
    # the mean over a completion's tokens; (N,)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0).sum(1) / length
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.min(unclipped, clipped)  # eq. 5
    loss = -(weight * objective).sum()

    stopped = clipped < unclipped  # the minimum is the clipped branch there, a constant
    metrics = {
        "clip_fraction": (weight * stopped).sum(),
        "clip_fraction_high": (weight * (stopped & (advantages > 0))).sum(),
        "ratio_mean": (weight * ratio.detach()).sum(),
        "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum(),
    }
    return loss, metrics


def gspo_token_loss(
    logprobs, old_logprobs, advantages, mask, *, clip_low=3e-4, clip_high=4e-4, denom=None
):
    """GSPO-token: GSPO whose tokens may have advantages of their own, arXiv 2507.18071 eq. 13:
    -min(s_t A_t, clip(s_t, 1-low, 1+high) A_t), mean over a completion's tokens, then over
    completions; s_t = sg[s] pi / sg[pi], eq. 14 (sg: detached): value of s, gradient of the token.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first update
                  (where they are more than 88 apart the gradient may be NaN: skip such an update)
    advantages    (N,) or (N, T)
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    denom         number of completions in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: N. A wrapper that averages gradients over W
                  ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction of tokens whose
    gradient the clip stops, clip_fraction_high those with A > 0, ratio_mean and approx_kl of s."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    length = mask.sum(1, keepdim=True).clamp(min=1)
    if denom is None:
        denom = len(mask)
    weight = mask.to(logprobs.dtype) / length / denom

    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    log_ratio = log_ratio.sum(1, keepdim=True) / length
    logprobs = torch.where(mask > 0, logprobs, 0.0)
    one = (logprobs - logprobs.detach()).exp()  # pi / sg[pi]: value 1, gradient of the token
    ratio = log_ratio.detach().exp() * one  # s_t, eq. 14; (N, T)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.min(unclipped, clipped)  # eq. 13
    loss = -(weight * objective).sum()

    stopped = clipped < unclipped  # the minimum is the clipped branch there, a constant
    metrics = {
        "clip_fraction": (weight * stopped).sum(),
        "clip_fraction_high": (weight * (stopped & (advantages > 0))).sum(),
        "ratio_mean": (weight * ratio.detach()).sum(),
        "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum(),
    }
    return loss, metrics


def luspo_loss(
    logprobs, old_logprobs, advantages, mask, *, clip_low=2e-3, clip_high=2.5e-3, denom=None
):
    """LUSPO: GSPO whose completions weigh as much as they are long, arXiv 2602.05261:
    -L min(s A, clip(s, 1-low, 1+high) A), mean over completions of L tokens; s = exp(mean_t(log pi
    - log pi_old)). Checked against TRL's (loss_type="luspo", which also names the paper's band,
    its section 5.1) and Liger's.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first update
                  (where they are more than 88 apart the gradient may be NaN: skip such an update)
    advantages    (N,) or (N, T), of which a completion gets the mean over its tokens
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    denom         number of completions in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: N. A wrapper that averages gradients over W
                  ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction of completions whose
    gradient the clip stops, clip_fraction_high those with A > 0, ratio_mean and approx_kl of s;
    they are means over completions, whatever their length."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    length = mask.sum(1).clamp(min=1)
    if denom is None:
        denom = len(mask)
    metric_weight = mask.any(1).to(logprobs.dtype) / denom
    weight = metric_weight * length

    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).sum(1) / length
    ratio = log_ratio.exp()  # s; (N,)
    # the mean over a completion's tokens; (N,)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0).sum(1) / length
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.min(unclipped, clipped)
    loss = -(weight * objective).sum()

    stopped = clipped < unclipped  # the minimum is the clipped branch there, a constant
    metrics = {
        "clip_fraction": (metric_weight * stopped).sum(),
        "clip_fraction_high": (metric_weight * (stopped & (advantages > 0))).sum(),
        "ratio_mean": (metric_weight * ratio.detach()).sum(),
        "approx_kl": (metric_weight * (ratio - 1 - log_ratio).detach()).sum(),
    }
    return loss, metrics


def grpo_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    clip_low=0.2,
    clip_high=0.2,
    ref_logprobs=None,
    kl_coef=0.04,
    denom=None,
):
    """GRPO: -(min(r A, clip(r, 1-low, 1+high) A) - kl_coef k3), arXiv 2402.03300 eq. 3, mean over
    a completion's tokens, then over completions; r = pi / pi_old per token.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first update
                  (where they are more than 88 apart the gradient may be NaN: skip such an update)
    advantages    (N,) or (N, T)
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    ref_logprobs  (N, T) the same of the reference policy; None: no KL term (train.py leaves it None
                  and adds kl_penalty)
    denom         number of completions in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: N. A wrapper that averages gradients over W
                  ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction of tokens whose
    gradient the clip stops, clip_fraction_high those with A > 0, ratio_mean and approx_kl of r."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    length = mask.sum(1, keepdim=True).clamp(min=1)
    if denom is None:
        denom = len(mask)
    weight = mask.to(logprobs.dtype) / length / denom

    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.min(unclipped, clipped)
    if ref_logprobs is not None:
        x = torch.where(mask > 0, ref_logprobs.detach() - logprobs, 0.0)
        objective = objective - kl_coef * (x.exp() - x - 1)  # k3, eq. 4
    loss = -(weight * objective).sum()  # eq. 3

    stopped = clipped < unclipped  # the minimum is the clipped branch there, a constant
    metrics = {
        "clip_fraction": (weight * stopped).sum(),
        "clip_fraction_high": (weight * (stopped & (advantages > 0))).sum(),
        "ratio_mean": (weight * ratio.detach()).sum(),
        "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum(),
    }
    return loss, metrics


def dr_grpo_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    max_completion_length,
    clip_low=0.2,
    clip_high=0.2,
    denom=None,
):
    """Dr. GRPO: -min(r A, clip(r, 1-low, 1+high) A), arXiv 2503.20783, summed over tokens and
    divided by a constant, completions x max_completion_length; r = pi / pi_old per token.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first update
                  (where they are more than 88 apart the gradient may be NaN: skip such an update)
    advantages    (N,) or (N, T)
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    max_completion_length  the budget of the sampling, in tokens; never the padded width
    denom         number of completions in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: N. A wrapper that averages gradients over W
                  ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction of tokens whose
    gradient the clip stops, clip_fraction_high those with A > 0, ratio_mean and approx_kl of r;
    they are means over a completion's tokens, then over completions."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    if denom is None:
        denom = len(mask)
    weight = mask.to(logprobs.dtype) / (max_completion_length * denom)

    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.min(unclipped, clipped)
    loss = -(weight * objective).sum()

    length = mask.sum(1, keepdim=True).clamp(min=1)
    # not weight, which makes no mean: ratios of 1 would not have ratio_mean 1
    metric_weight = mask.to(logprobs.dtype) / length / denom
    stopped = clipped < unclipped  # the minimum is the clipped branch there, a constant
    metrics = {
        "clip_fraction": (metric_weight * stopped).sum(),
        "clip_fraction_high": (metric_weight * (stopped & (advantages > 0))).sum(),
        "ratio_mean": (metric_weight * ratio.detach()).sum(),
        "approx_kl": (metric_weight * (ratio - 1 - log_ratio).detach()).sum(),
    }
    return loss, metrics


def dapo_loss(
    logprobs, old_logprobs, advantages, mask, *, clip_low=0.2, clip_high=0.28, denom=None
):
    """DAPO: -min(r A, clip(r, 1-low, 1+high) A), arXiv 2503.14476 eq. 8, mean over all tokens;
    r = pi / pi_old per token.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first update
                  (where they are more than 88 apart the gradient may be NaN: skip such an update)
    advantages    (N,) or (N, T)
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    denom         number of tokens in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: those of mask. A wrapper that averages gradients
                  over W ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction of tokens whose
    gradient the clip stops, clip_fraction_high those with A > 0, ratio_mean and approx_kl of r."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    if denom is None:
        denom = mask.sum().clamp(min=1)
    weight = mask.to(logprobs.dtype) / denom

    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.min(unclipped, clipped)
    loss = -(weight * objective).sum()  # eq. 8

    stopped = clipped < unclipped  # the minimum is the clipped branch there, a constant
    metrics = {
        "clip_fraction": (weight * stopped).sum(),
        "clip_fraction_high": (weight * (stopped & (advantages > 0))).sum(),
        "ratio_mean": (weight * ratio.detach()).sum(),
        "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum(),
    }
    return loss, metrics


def cispo_loss(logprobs, old_logprobs, advantages, mask, *, ratio_max=5.0, denom=None):
    """CISPO: -sg[min(r, ratio_max)] A log pi, arXiv 2506.13585 eq. 4, mean over all tokens;
    r = pi / pi_old per token, sg: detached. A token's weight is bounded, its gradient not stopped.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first update
    advantages    (N,) or (N, T)
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    ratio_max     the bound itself; the paper does not say which it used
    denom         number of tokens in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: those of mask. A wrapper that averages gradients
                  over W ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction of tokens whose
    weight is bounded, clip_fraction_high those with A > 0, ratio_mean and approx_kl of r."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    if denom is None:
        denom = mask.sum().clamp(min=1)
    weight = mask.to(logprobs.dtype) / denom

    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).detach()
    ratio = log_ratio.exp()
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    objective = ratio.clamp(max=ratio_max) * advantages * torch.where(mask > 0, logprobs, 0.0)
    loss = -(weight * objective).sum()  # eq. 4

    bounded = ratio > ratio_max
    metrics = {
        "clip_fraction": (weight * bounded).sum(),
        "clip_fraction_high": (weight * (bounded & (advantages > 0))).sum(),
        "ratio_mean": (weight * ratio).sum(),
        "approx_kl": (weight * (ratio - 1 - log_ratio)).sum(),
    }
    return loss, metrics


def dppo_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    clip_low=0.2,
    clip_high=0.2,
    ratio_max=20.0,
    denom=None,
):
    """DPPO with the binary total variation, arXiv 2602.04879: -sg[min(r, ratio_max)] A log pi, mean
    over all tokens, without those whose probability has moved too far the way that A pushes:
    pi - pi_old > high where A > 0, < -low where A < 0; r = pi / pi_old per token, sg: detached.
    Checked against verl's dppo_tv (ratio_max) and prime-rl's default loss (the band); the paper
    measures from the policy that sampled, so the sampler's own log-probs may be old_logprobs.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first update
    advantages    (N,) or (N, T)
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    clip_low, clip_high  how far its probability may fall and rise: a band of pi - pi_old, not of r
    ratio_max     the bound of r
    denom         number of tokens in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: those of mask. A wrapper that averages gradients
                  over W ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction of tokens that are
    left out, clip_fraction_high those with A > 0, ratio_mean and approx_kl of r."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    if denom is None:
        denom = mask.sum().clamp(min=1)
    weight = mask.to(logprobs.dtype) / denom

    logprobs = torch.where(mask > 0, logprobs, 0.0)
    old_logprobs = torch.where(mask > 0, old_logprobs, 0.0)
    log_ratio = logprobs.detach() - old_logprobs
    ratio = log_ratio.exp()
    # total variation, of this token against the rest
    moved = logprobs.detach().exp() - old_logprobs.exp()
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    stopped_high = (advantages > 0) & (moved > clip_high)
    stopped_low = (advantages < 0) & (moved < -clip_low)
    stopped = stopped_high | stopped_low
    objective = ratio.clamp(max=ratio_max) * advantages * logprobs
    loss = -(weight * torch.where(stopped, 0.0, objective)).sum()

    metrics = {
        "clip_fraction": (weight * stopped).sum(),
        "clip_fraction_high": (weight * stopped_high).sum(),
        "ratio_mean": (weight * ratio).sum(),
        "approx_kl": (weight * (ratio - 1 - log_ratio)).sum(),
    }
    return loss, metrics


def sapo_loss(logprobs, old_logprobs, advantages, mask, *, tau_pos=1.0, tau_neg=1.05, denom=None):
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A, arXiv 2511.20347: a gate that closes, not a clip;
    mean over a completion's tokens, then over completions; r = pi / pi_old per token.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first update
                  (where they are more than 88 apart the gradient may be NaN: skip such an update)
    advantages    (N,) or (N, T)
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    tau_pos, tau_neg  tau where A > 0, and elsewhere: the larger, the sooner the gate closes
    denom         number of completions in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: N. A wrapper that averages gradients over W
                  ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction and
    clip_fraction_high, which are 0 here, ratio_mean and approx_kl of r."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    length = mask.sum(1, keepdim=True).clamp(min=1)
    if denom is None:
        denom = len(mask)
    weight = mask.to(logprobs.dtype) / length / denom

    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    loss = -(weight * (gate * advantages)).sum()

    metrics = {
        "clip_fraction": torch.zeros_like(loss),
        "clip_fraction_high": torch.zeros_like(loss),
        "ratio_mean": (weight * ratio.detach()).sum(),
        "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum(),
    }
    return loss, metrics


def gmpo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low=0.4, clip_high=0.4, denom=None):
    """GMPO: -s A, mean over completions, arXiv 2507.20673; s is the geometric mean of the token
    ratios, each held below e^high where A > 0, above e^-low where A < 0.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first update
    advantages    (N,) or (N, T), of which a completion gets the mean over its tokens
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    denom         number of completions in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: N. A wrapper that averages gradients over W
                  ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction of tokens whose
    gradient the clip stops, clip_fraction_high those with A > 0, ratio_mean and approx_kl of s as
    it would be without the clip."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    length = mask.sum(1).clamp(min=1)
    if denom is None:
        denom = len(mask)
    weight = mask.any(1).to(logprobs.dtype) / denom

    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    # the mean over a completion's tokens; (N,)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0).sum(1) / length
    better, worse = advantages[:, None] > 0, advantages[:, None] < 0
    bounded = torch.where(better, log_ratio.clamp(max=clip_high), log_ratio)
    bounded = torch.where(worse, log_ratio.clamp(min=-clip_low), bounded)
    ratio = (bounded.sum(1) / length).exp()  # s; (N,)
    loss = -(weight * ratio * advantages).sum()

    metric_weight = (weight / length)[:, None]  # of a token; weight is a completion's
    stopped = bounded != log_ratio
    log_s = log_ratio.detach().sum(1) / length  # as the policy is, without the clip
    metrics = {
        "clip_fraction": (metric_weight * stopped).sum(),
        "clip_fraction_high": (metric_weight * (stopped & better)).sum(),
        "ratio_mean": (weight * log_s.exp()).sum(),
        "approx_kl": (weight * (log_s.exp() - 1 - log_s)).sum(),
    }
    return loss, metrics


def ppo_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    denom=None,
):
    """PPO: -min(r A, clip(r, 1-low, 1+high) A), arXiv 1707.06347 eq. 7, mean over all tokens;
    r = pi / pi_old per token.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first update
                  (where they are more than 88 apart the gradient may be NaN: skip such an update)
    advantages    (N,) or (N, T)
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    dual_clip     c > 1: the objective stays above c A where A < 0 (arXiv 1912.09729); None: off
    denom         number of tokens in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: those of mask. A wrapper that averages gradients
                  over W ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction of tokens whose
    gradient the clip stops, clip_fraction_high those with A > 0, ratio_mean and approx_kl of r."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    if denom is None:
        denom = mask.sum().clamp(min=1)
    weight = mask.to(logprobs.dtype) / denom

    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.min(unclipped, clipped)  # eq. 7
    if dual_clip is not None:
        floor = objective.max(dual_clip * advantages)
        objective = torch.where(advantages < 0, floor, objective)
    loss = -(weight * objective).sum()

    stopped = objective != unclipped
    metrics = {
        "clip_fraction": (weight * stopped).sum(),
        "clip_fraction_high": (weight * (stopped & (advantages > 0))).sum(),
        "ratio_mean": (weight * ratio.detach()).sum(),
        "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum(),
    }
    return loss, metrics


def value_loss(values, old_values, returns, mask, *, clip=0.2, denom=None):
    """PPO's value loss: max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2) / 2, mean over all
    tokens: the pessimistic one of the squared errors with and without the clip.

    values        (N, T) the critic's, in units of reward, with gradient: of the text before token t
    old_values    (N, T) the same from one no-grad forward before the first update
    returns       (N, T) what they are to become: the second output of gae_advantages
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    clip          how far a value may move, in units of reward; inf: the squared error alone
    denom         number of tokens in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: those of mask. A wrapper that averages gradients
                  over W ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics: value_clip_fraction of tokens that the clip holds, value_loss."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_values, returns = old_values.detach(), returns.detach()

    if denom is None:
        denom = mask.sum().clamp(min=1)
    weight = mask.to(values.dtype) / denom

    unclipped = torch.where(mask > 0, values - returns, 0.0).square()
    near = values.clamp(old_values - clip, old_values + clip)
    clipped = torch.where(mask > 0, near - returns, 0.0).square()
    worst = torch.max(unclipped, clipped)
    loss = 0.5 * (weight * worst).sum()

    metrics = {
        "value_clip_fraction": (weight * (worst != unclipped)).sum(),
        "value_loss": loss.detach(),
    }
    return loss, metrics


def reinforce_loss(logprobs, old_logprobs, advantages, mask, *, per="token", denom=None):
    """REINFORCE: -A log pi (Williams 1992), without a ratio; mean over all tokens, or over a
    completion's tokens and then over completions.

    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient: log-softmax of the
                  logits one position earlier, divided by the temperature of the sampling
    old_logprobs  (N, T) the same from one no-grad forward of the same code before the first
                  update; for the metrics alone
    advantages    (N,) or (N, T)
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    per           "token" or "completion": the unit of the mean; else ValueError
    denom         number of such units in the whole optimiser step, all micro-batches and ranks:
                  gradients are then summed; None: those of this batch. A wrapper that averages
                  gradients over W ranks (DDP, FSDP) needs the loss times W: give denom / W
    Returns the loss and metrics, which add up as the loss does: clip_fraction and
    clip_fraction_high, which are 0 here, ratio_mean and approx_kl of r = pi / pi_old."""
    # constants: swapped arguments fail at backward(), and do not train backwards
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()

    if per == "token":
        length = 1  # all tokens weigh alike
        count = mask.sum().clamp(min=1)
    elif per == "completion":
        length = mask.sum(1, keepdim=True).clamp(min=1)
        count = len(mask)
    else:
        raise ValueError(f'per={per!r}: expected "token" or "completion"')
    if denom is None:
        denom = count
    weight = mask.to(logprobs.dtype) / length / denom

    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    objective = advantages * torch.where(mask > 0, logprobs, 0.0)
    loss = -(weight * objective).sum()

    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).detach()
    ratio = log_ratio.exp()
    metrics = {
        "clip_fraction": torch.zeros_like(loss),
        "clip_fraction_high": torch.zeros_like(loss),
        "ratio_mean": (weight * ratio).sum(),
        "approx_kl": (weight * (ratio - 1 - log_ratio)).sum(),
    }
    return loss, metrics


def kl_penalty(
    logprobs,
    ref_logprobs,
    mask,
    *,
    estimator="k3",
    per="completion",
    denom=None,
    old_logprobs=None,
):
    """KL(pi || pi_ref) from sampled tokens, with x = log pi_ref - log pi: k1 = -x, k2 = x^2 / 2,
    k3 = e^x - x - 1 (joschu.net/blog/kl-approx.html), "unbiased" = r k3 (arXiv 2512.02556).

    As losses k2 and r k3 have the gradient of this KL, k3 that of KL(pi_ref || pi), k1 none in
    expectation: where k1 would carry a gradient, ValueError.
    logprobs      (N, T) log pi of the sampled tokens, float32, with gradient
    ref_logprobs  (N, T) the same of the reference policy, by the same code, a constant
    mask          (N, T) bool, integers or float32: 1 on completion tokens, to the first end token;
                  where it is 0 the other tensors may hold anything
    per           unit of the mean: "token", or "completion": its tokens, then completions
    denom         such units of the whole optimiser step, all micro-batches and ranks; None: those
                  of this batch. Where gradients are averaged over W ranks (DDP, FSDP): denom / W
    old_logprobs  (N, T) of the policy that sampled, for r = pi / pi_old; None: r is pi / sg[pi]
    Returns the KL in nats, and it, detached, as a metric."""
    ref_logprobs = ref_logprobs.detach()
    if per == "token":
        length = 1  # all tokens weigh alike
        count = mask.sum().clamp(min=1)
    elif per == "completion":
        length = mask.sum(1, keepdim=True).clamp(min=1)
        count = len(mask)
    else:
        raise ValueError(f'per={per!r}: expected "token" or "completion"')
    if denom is None:
        denom = count
    weight = mask.to(logprobs.dtype) / length / denom

    x = torch.where(mask > 0, ref_logprobs - logprobs, 0.0)
    k3 = x.exp() - x - 1
    if estimator == "k1":
        if x.requires_grad:
            raise ValueError("k1 is a metric, not a loss: its gradient is zero in expectation")
        kl = -x
    elif estimator == "k2":
        kl = x.square() / 2
    elif estimator == "k3":
        kl = k3
    elif estimator == "unbiased":
        if old_logprobs is None:
            old_logprobs = logprobs
        ratio = torch.where(mask > 0, logprobs - old_logprobs.detach(), 0.0).exp()
        kl = ratio * k3
    else:
        raise ValueError(f'estimator={estimator!r}: expected "k1", "k2", "k3" or "unbiased"')
    loss = (weight * kl).sum()

    metrics = {"kl": loss.detach()}
    return loss, metrics


# ---- advantages ----------------------------------------------------------------------------------


def group_advantages(rewards, group_size, *, scale="group"):
    """GRPO's and GSPO's: (r - mean of its group) / (std + 1e-6), arXiv 2507.18071 eq. 6.

    rewards (N,), float -> advantages (N,). Equal rewards, and a group of one, have exactly 0.
    scale, the divisor: "group", std of the group (unbiased) + 1e-6; "batch", that of all rewards;
    "mean", that of the group (MaxRL, arXiv 2602.02710; SkyRL adds 1e-6), where it is not positive
    all have 0; "none", 1 (Dr. GRPO); else ValueError."""
    groups = rewards.reshape(-1, group_size)
    mean = groups.mean(1, keepdim=True)
    centred = groups - mean
    if scale == "group":
        # a group of one has no unbiased std, and its advantage is 0 anyway
        std = groups.std(1, correction=min(group_size - 1, 1), keepdim=True)
        advantages = centred / (std + 1e-6)
    elif scale == "batch":
        std = rewards.std(correction=min(max(len(rewards) - 1, 0), 1))
        advantages = centred / (std + 1e-6)
    elif scale == "mean":
        advantages = torch.where(mean > 0, centred / mean, 0.0)
    elif scale == "none":
        advantages = centred
    else:
        raise ValueError(f'scale={scale!r}: expected "group", "batch", "mean" or "none"')

    # the float32 mean of equal rewards is not always that reward, and its std is tiny
    dead = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return torch.where(dead, 0.0, advantages).reshape(-1)


def term_advantages(term_rewards, weights, group_size):
    """GDPO's, arXiv 2601.05242, for rewards that are sums: every term normalised in its group, the
    weighted sum of them whitened over the batch. Terms then count by their weights, not by how far
    they spread. Checked against TRL's normalize_then_sum and verl's gdpo (which whitens tokens).

    term_rewards (N, K), float; weights (K,) or K numbers, else ValueError -> advantages (N,); where
    all terms of a group are equal, exactly 0."""
    total = torch.zeros_like(term_rewards[:, 0])
    for rewards, weight in zip(term_rewards.unbind(1), weights, strict=True):
        total = total + weight * group_advantages(rewards, group_size)
    whitened = whiten(total, torch.ones_like(total))

    # whitening takes off the batch's mean, which is 0 but for rounding: a dead group would get that
    dead = (total.reshape(-1, group_size) == 0).all(1, keepdim=True)
    return torch.where(dead, 0.0, whitened.reshape(-1, group_size)).reshape(-1)


def leave_one_out_advantages(rewards, group_size):
    """RLOO's: r - mean of the other G - 1 rewards of its group, arXiv 2402.14740.

    rewards (N,), float -> advantages (N,). Equal rewards, and a group of one, have exactly 0."""
    centred = group_advantages(rewards, group_size, scale="none")
    # r - mean of the others = (r - mean of all) G / (G - 1)
    return centred * group_size / max(group_size - 1, 1)


def reinforce_advantages(rewards, group_size):
    """REINFORCE's with a baseline: r - mean of all rewards of the batch; (N,), float -> (N,).

    group_size is not read, as the baseline knows no groups: it is there because all advantages
    that read outcomes are called alike. Equal rewards have exactly 0."""
    equal = rewards.amax() == rewards.amin()
    return torch.where(equal, 0.0, rewards - rewards.mean())


def step_advantages(token_rewards, step_ends, group_size):
    """For GSPO-token, whose eq. 13 leaves them open: rewards to go, normalised per step index.

    token_rewards (N, T) count where step_ends (N, T) is 1, at the last token of a step. Q_{i,k} is
    their sum from step k of completion i on; A_{i,k} = (Q_{i,k} - mean) / (std + 1e-6), over those
    completions of the group that have a step k.
    Returns (N, T): A_{i,k} at all tokens of step k, 0 after the last step."""
    ends = step_ends.bool()
    rewards = torch.where(ends, token_rewards, 0.0)
    # summed in float64: rounding would tell equal sums apart; on the CPU: mps has no float64
    to_go = rewards.cpu().double().flip(1).cumsum(1).flip(1).to(rewards)
    index = ends.cumsum(1) - ends.long()  # of the step that a token is part of

    advantages = torch.zeros_like(to_go)
    for k in range(int(ends.sum(1).max())):
        end = ends & (index == k)  # at most one token of a row
        for group in torch.arange(len(ends), device=ends.device).split(group_size):
            rows = group[end[group].any(1)]  # those that have a step k
            if len(rows) > 0:
                scores = group_advantages(to_go[rows][end[rows]], len(rows))
                advantages[rows] += scores[:, None] * (index[rows] == k)
    return advantages


def gae_advantages(token_rewards, values, mask, *, gamma=1.0, lam=0.95, bootstrap=None):
    """GAE: A_t = d_t + gamma lam A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t, arXiv 1506.02438 eq. 16.

    token_rewards, values (N, T): V_t = values[:, t] is of the text before token t.
    mask (N, T): 1 on completion tokens; what is between them is skipped.
    bootstrap (N,): V after the last token: 0 if it is the end token; if the completion was cut off,
    the critic's value of the whole text (train.py approximates it by values at the last token);
    None: 0.
    Returns advantages and returns, A + V, (N, T) each, 0 on the padding."""
    mask = mask.bool()
    values = torch.where(mask, values, 0.0)
    rewards = torch.where(mask, token_rewards, 0.0)
    advantages = torch.zeros_like(rewards)
    ahead = torch.zeros_like(values[:, 0])  # gamma (V_{t+1} + lam A_{t+1})
    if bootstrap is not None:
        ahead = gamma * bootstrap

    for t in reversed(range(mask.shape[1])):
        advantage = rewards[:, t] + ahead - values[:, t]
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
        ahead = torch.where(mask[:, t], gamma * (values[:, t] + lam * advantage), ahead)
    return advantages, advantages + values


def rewards_to_go(token_rewards, mask, *, gamma=1.0):
    """R_t = r_t + gamma R_{t+1} over the tokens of the mask; (N, T) -> (N, T), 0 on the padding."""
    mask = mask.bool()
    rewards = torch.where(mask, token_rewards, 0.0)
    to_go = torch.zeros_like(rewards)
    ahead = torch.zeros_like(rewards[:, 0])  # gamma R_{t+1}
    for t in reversed(range(mask.shape[1])):
        to_go[:, t] = torch.where(mask[:, t], rewards[:, t] + ahead, 0.0)
        ahead = torch.where(mask[:, t], gamma * to_go[:, t], ahead)
    return to_go


def reinforce_plus_plus_advantages(token_rewards, mask, *, gamma=1.0):
    """REINFORCE++'s: reward to go, whitened over the batch, arXiv 2501.03262; (N, T) -> (N, T)."""
    return whiten(rewards_to_go(token_rewards, mask, gamma=gamma), mask)


def whiten(values, mask):
    """(x - mean) / (std + 1e-6) over all tokens of the mask, unbiased std; any one shape.

    0 on the padding, and exactly 0 everywhere where all x are equal."""
    tokens = values[mask > 0]
    whitened = torch.zeros_like(values)
    if len(tokens) > 0 and tokens.amax() != tokens.amin():
        whitened[mask > 0] = (tokens - tokens.mean()) / (tokens.std() + 1e-6)
    return whitened


# ---- sampler and trainer apart -------------------------------------------------------------------


def truncated_importance_weights(old_logprobs, sampler_logprobs, mask, *, cap=2.0, per="token"):
    """Truncated importance sampling from the sampler to pi_old: weights of the advantages.

    old_logprobs, sampler_logprobs, mask (N, T) -> (N, T), 0 on the padding, no gradient.
    per: "token", min(pi_old / pi_sampler, cap); "completion", min(exp(mean_t(log ..)), cap), by the
    length as GSPO's s: the product of the ratios would be unbiased, and spread as e^T does; else
    ValueError."""
    log_ratio = torch.where(mask > 0, old_logprobs - sampler_logprobs, 0.0).detach()
    if per == "completion":
        length = mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = log_ratio.sum(1, keepdim=True) / length
    elif per != "token":
        raise ValueError(f'per={per!r}: expected "token" or "completion"')
    return mask * log_ratio.exp().clamp(max=cap)


def mismatch_mask(old_logprobs, sampler_logprobs, mask, *, per="token", low=0.5, high=5.0):
    """Which tokens stay: low <= pi_old / pi_sampler <= high, a factor of the advantages.

    old_logprobs, sampler_logprobs, mask (N, T) -> (N, T) bool, False on the padding.
    per: "token", the ratio of each, with IcePop's 0.5 and 5 (arXiv 2510.18855, which also weighs by
    the ratio: times truncated_importance_weights with cap=high); "completion", exp(mean_t(log ..)),
    GSPO's s, which wants a far narrower band (SkyRL: 0.99 to 1.01); else ValueError."""
    log_ratio = torch.where(mask > 0, old_logprobs - sampler_logprobs, 0.0).detach()
    if per == "completion":
        length = mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = log_ratio.sum(1, keepdim=True) / length
    elif per != "token":
        raise ValueError(f'per={per!r}: expected "token" or "completion"')
    ratio = log_ratio.exp()
    return (mask > 0) & (ratio >= low) & (ratio <= high)


def off_policy_mask(logprobs, old_logprobs, advantages, mask, *, delta):
    """Which tokens stay, DeepSeek-V3.2's (arXiv 2512.02556 eq. 9): not those with A < 0 in a
    completion with mean_t(log pi_old - log pi) > delta. A factor of the advantages, at each update.

    logprobs, old_logprobs, mask (N, T), advantages (N,) or (N, T) -> (N, T) bool, False on the
    padding. The paper's old_logprobs are the sampler's own, so that its mismatch counts too.
    delta: in nats a token; the paper does not say which, TRL suggests 0.5."""
    length = mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio = torch.where(mask > 0, old_logprobs - logprobs, 0.0).detach()
    far = log_ratio.sum(1, keepdim=True) / length > delta
    worse = advantages.reshape(len(mask), -1) < 0
    return (mask > 0) & ~(far & worse)


# ---- algorithms ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """All that defines an algorithm. The numbers of its paper are the defaults of its functions.

    A row of ALGOS that contradicts itself, or whose flags and parameters do not match, raises
    ValueError."""

    loss: Callable
    advantages: Callable = group_advantages
    # what `advantages` takes, beside its settings:
    #   "outcomes"  rewards (N,), group_size -> (N,)
    #   "steps"     token_rewards (N, T), step_ends (N, T), group_size -> (N, T)
    #   "tokens"    token_rewards, mask -> (N, T)
    #   "values"    token_rewards, values, mask, bootstrap=(N,) -> advantages, returns, (N, T) each
    reads: str = "outcomes"
    unit: str = "completion"  # or "token": of the loss's mean, its denom, and a KL term's
    kl_in: str = "loss"  # or "reward": where a KL to the reference goes
    kl_estimator: str = "k3"  # of kl_penalty; in the reward "k1", per token
    kl_coef: float = 0.0  # weight of the KL, if no flag says another
    # parameter -> flag that sets it; a flag that was not given leaves the signature's default
    loss_flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    advantage_flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dynamic_sampling: bool = False  # groups all right or all wrong are dropped and refilled
    overlong_shaping: bool = False  # soft punishment of completions close to the token budget
    critic: bool = False  # trained by value_loss, whose clip is value_clip

    def __post_init__(self):
        check_word("reads", self.reads, ("outcomes", "steps", "tokens", "values"))
        check_word("unit", self.unit, ("token", "completion"))
        check_word("kl_in", self.kl_in, ("loss", "reward"))

        if self.kl_in == "reward":
            check_word("kl_estimator of a KL in the reward", self.kl_estimator, ("k1",))
            check_word("reads, with a KL in the reward,", self.reads, ("tokens", "values"))
        else:
            check_word(
                "kl_estimator of a KL in the loss", self.kl_estimator, ("k2", "k3", "unbiased")
            )
        if self.critic != (self.reads == "values"):
            raise ValueError('critic: expected one exactly where advantages read "values"')

        loss = keyword_parameters(self.loss)
        if loss.get("per", self.unit) != self.unit:
            raise ValueError(f"unit={self.unit!r}: the loss has per={loss['per']!r}")
        # what the trainer gives; the KL is kl_penalty's, under the same flag for all losses
        check_flags("loss", self.loss_flags, loss, ("per", "denom", "ref_logprobs", "kl_coef"))
        advantages = keyword_parameters(self.advantages)
        check_flags("advantages", self.advantage_flags, advantages, ("bootstrap",))


def keyword_parameters(function):
    """The parameters that can only be given by name, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind == each.KEYWORD_ONLY}


def check_word(field, word, words):
    if word not in words:
        raise ValueError(f"{field} {word!r}: expected one of {', '.join(words)}")


def check_flags(field, flags, parameters, given_by_the_trainer):
    """Raises ValueError unless each parameter has a flag, and each flag a parameter."""
    for parameter in parameters:
        if parameter not in flags and parameter not in given_by_the_trainer:
            raise ValueError(f"{field}: no flag sets its parameter {parameter}")
    for parameter, flag in flags.items():
        if parameter not in parameters or parameter in given_by_the_trainer:
            raise ValueError(f"{field}: flag {flag} sets {parameter}, which it does not take")


BAND = {"clip_low": "clip_low", "clip_high": "clip_high"}
SCALE = {"scale": "advantage_scale"}

ALGOS = {
    "gspo": Algorithm(gspo_loss, loss_flags=BAND, advantage_flags=SCALE),
    "gspo-token": Algorithm(gspo_token_loss, step_advantages, reads="steps", loss_flags=BAND),
    "luspo": Algorithm(luspo_loss, loss_flags=BAND, advantage_flags=SCALE),
    "grpo": Algorithm(
        grpo_loss,
        kl_coef=grpo_loss.__kwdefaults__["kl_coef"],
        loss_flags=BAND,
        advantage_flags=SCALE,
    ),
    "dr-grpo": Algorithm(
        dr_grpo_loss,
        functools.partial(group_advantages, scale="none"),
        loss_flags={**BAND, "max_completion_length": "max_new_tokens"},
        advantage_flags=SCALE,
    ),
    "dapo": Algorithm(
        dapo_loss,
        unit="token",
        loss_flags=BAND,
        advantage_flags=SCALE,
        dynamic_sampling=True,
        overlong_shaping=True,
    ),
    "cispo": Algorithm(
        cispo_loss, unit="token", loss_flags={"ratio_max": "ratio_max"}, advantage_flags=SCALE
    ),
    "dppo": Algorithm(  # its band is one of probabilities, not of ratios
        dppo_loss,
        unit="token",
        loss_flags={**BAND, "ratio_max": "ratio_max"},
        advantage_flags=SCALE,
    ),
    "sapo": Algorithm(
        sapo_loss, loss_flags={"tau_pos": "tau_pos", "tau_neg": "tau_neg"}, advantage_flags=SCALE
    ),
    "gmpo": Algorithm(gmpo_loss, loss_flags=BAND, advantage_flags=SCALE),
    "ppo": Algorithm(
        ppo_loss,
        gae_advantages,
        reads="values",
        unit="token",
        kl_in="reward",
        kl_estimator="k1",
        loss_flags={**BAND, "dual_clip": "dual_clip"},
        advantage_flags={"gamma": "gamma", "lam": "gae_lambda"},
        critic=True,
    ),
    "reinforce++": Algorithm(
        ppo_loss,
        reinforce_plus_plus_advantages,
        reads="tokens",
        unit="token",
        kl_in="reward",
        kl_estimator="k1",
        loss_flags={**BAND, "dual_clip": "dual_clip"},
        advantage_flags={"gamma": "gamma"},
    ),
    "reinforce": Algorithm(reinforce_loss, reinforce_advantages, unit="token"),
    "rloo": Algorithm(reinforce_loss, leave_one_out_advantages, unit="token"),
    "maxrl": Algorithm(
        reinforce_loss,
        functools.partial(group_advantages, scale="mean"),
        unit="token",
        advantage_flags=SCALE,
    ),
}
