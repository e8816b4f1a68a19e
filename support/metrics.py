"""Numbers that are more than a mean: tensors in, metrics by name out. docs/metrics.md explains."""

import math

import torch
from torch import Tensor


def drift(prefix: str, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far two policies are apart, from (n, T) differences of log-probs: a KL in nats over the
    tokens (k3), the spread of tokens' log-ratios, and of their means over completions, log s."""
    tokens = log_ratio[mask]
    if len(tokens) == 0:
        return {}
    log_s = torch.where(mask, log_ratio, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    row = {f"{prefix}_kl": (tokens.expm1() - tokens).mean()}
    row[f"{prefix}_token_std"] = tokens.std(correction=0)
    row[f"{prefix}_sequence_std"] = log_s.std(correction=0)
    return row


def of_critic(values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """1 - var(return - value) / var(return), over (tokens,): 1 if perfect, 0 if constant."""
    if len(values) == 0:
        return {}
    left = (returns - values).var(correction=0)
    return {"explained_variance": 1 - left / (returns.var(correction=0) + 1e-8)}


def of_teacher(teacher_logprobs: Tensor, logprobs: Tensor) -> dict[str, Tensor]:
    """KL to the teacher in nats, of sampled tokens (tokens,), by k1; the share of them whose
    probability it puts below a thousandth."""
    return {
        "teacher_kl": (logprobs - teacher_logprobs).mean(),
        "teacher_unlikely": (teacher_logprobs < math.log(1e-3)).float().mean(),
    }
