"""Policy optimisation for language models: every objective, advantage and KL estimator. Torch only.

Shapes: N completions in groups of G (rows of one group are contiguous), T tokens, right-padded.
Losses: xxx_loss(logprobs, old_logprobs, advantages, mask, *, ..., denom=None) -> (loss, metrics)
    logprobs      (N, T)  log pi_theta of the sampled tokens, in nats; carries the gradient
    old_logprobs  (N, T)  log pi_old of the same tokens; a constant
    advantages    (N,) or (N, T)
    mask          (N, T)  True or 1 (no 16-bit floats) on completion tokens, to the first end token
    denom         completions or tokens (see ALGOS) of the whole optimiser step, so that
                  micro-batches add up to one batch; None: those of this batch
    metrics       0-d, add up over micro-batches; clip_fraction: where the clipped branch is active
`weight` is each unit's share of the mean. A loss can be copied alone; padding may hold anything."""
import functools, typing

import torch

def ppo_loss(logprobs, old_logprobs, advantages, mask, *,
             clip_low=0.2, clip_high=0.2, dual_clip=None, denom=None):
    """PPO-clip, arXiv 1707.06347 eq. 7: -min(r A, clip(r, 1-low, 1+high) A), mean over tokens.
    dual_clip c > 1 keeps the objective above c A where A < 0 (arXiv 1912.09729)."""
    weight = mask.to(logprobs.dtype) / (mask.sum().clamp(min=1) if denom is None else denom)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, objective.max(dual_clip * advantages), objective)
    metrics = {"clip_fraction": (weight * (objective != ratio * advantages)).sum(),
               "ratio_mean": (weight * ratio.detach()).sum(),
               "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum()}
    return -(weight * objective).sum(), metrics

def value_loss(values, old_values, returns, mask, *, clip=0.2, denom=None):
    """PPO's value loss, mean over tokens: max((v-R)^2, (v_old + clip(v-v_old, -c, c) - R)^2) / 2.
    values, old_values, returns (N, T), in units of reward. clip=inf: the squared error alone."""
    weight = mask.to(values.dtype) / (mask.sum().clamp(min=1) if denom is None else denom)
    error = torch.where(mask > 0, values - returns, 0.0).square()
    near = values.clamp(old_values - clip, old_values + clip)
    worst = torch.max(error, torch.where(mask > 0, near - returns, 0.0).square())
    loss = 0.5 * (weight * worst).sum()
    metrics = {"value_clip_fraction": (weight * (worst != error)).sum()}
    return loss, metrics | {"value_loss": loss.detach()}

def grpo_loss(logprobs, old_logprobs, advantages, mask, *,
              clip_low=0.2, clip_high=0.2, ref_logprobs=None, kl_coef=0.04, denom=None):
    """GRPO, arXiv 2402.03300 eq. 3: -(min(r A, clip(r) A) - beta k3), mean over the tokens of a
    completion, then over completions. ref_logprobs (N, T): a constant; None: no KL term."""
    length = mask.sum(1, keepdim=True).clamp(min=1)
    weight = mask.to(logprobs.dtype) / length / (len(mask) if denom is None else denom)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = weight * (objective != ratio * advantages)
    if ref_logprobs is not None:
        log_ref_ratio = torch.where(mask > 0, ref_logprobs - logprobs, 0.0)
        objective = objective - kl_coef * (log_ref_ratio.exp() - log_ref_ratio - 1)  # k3, eq. 4
    metrics = {"clip_fraction": clipped.sum(), "ratio_mean": (weight * ratio.detach()).sum(),
               "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum()}
    return -(weight * objective).sum(), metrics

def dr_grpo_loss(logprobs, old_logprobs, advantages, mask, *,
                 max_completion_length, clip_low=0.2, clip_high=0.2, denom=None):
    """Dr. GRPO, arXiv 2503.20783: PPO's objective, summed, / (completions x max_completion_length).
    max_completion_length: a constant, in tokens: the budget, never the padded width."""
    denom = len(mask) if denom is None else denom
    weight = mask.to(logprobs.dtype) / (max_completion_length * denom)
    share = mask.to(logprobs.dtype) / mask.sum(1, keepdim=True).clamp(min=1) / denom  # GRPO's
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    metrics = {"clip_fraction": (share * (objective != ratio * advantages)).sum(),
               "ratio_mean": (share * ratio.detach()).sum(),
               "approx_kl": (share * (ratio - 1 - log_ratio).detach()).sum()}
    return -(weight * objective).sum(), metrics

def dapo_loss(logprobs, old_logprobs, advantages, mask, *,
              clip_low=0.2, clip_high=0.28, denom=None):
    """DAPO, arXiv 2503.14476 eq. 8: -min(r A, clip(r, 1-low, 1+high) A), mean over all tokens."""
    weight = mask.to(logprobs.dtype) / (mask.sum().clamp(min=1) if denom is None else denom)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    metrics = {"clip_fraction": (weight * (objective != ratio * advantages)).sum(),
               "ratio_mean": (weight * ratio.detach()).sum(),
               "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum()}
    return -(weight * objective).sum(), metrics

def gspo_loss(logprobs, old_logprobs, advantages, mask, *,
              clip_low=3e-4, clip_high=4e-4, denom=None):
    """GSPO, arXiv 2507.18071 eq. 5: -min(s A, clip(s, 1-low, 1+high) A), mean over completions;
    s = exp(mean_t(log pi - log pi_old)), the length-normalised likelihood ratio of the sequence."""
    length = mask.sum(1).clamp(min=1)
    weight = mask.any(1).to(logprobs.dtype) / (len(mask) if denom is None else denom)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0).sum(1) / length
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).sum(1) / length
    ratio = log_ratio.exp()  # s_i, eq. 7; (N,)
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    metrics = {"clip_fraction": (weight * (objective != ratio * advantages)).sum(),
               "ratio_mean": (weight * ratio.detach()).sum(),
               "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum()}
    return -(weight * objective).sum(), metrics

def gspo_token_loss(logprobs, old_logprobs, advantages, mask, *,
                    clip_low=3e-4, clip_high=4e-4, denom=None):
    """GSPO-token, arXiv 2507.18071 eq. 13: GSPO whose tokens may have advantages of their own.
    s_{i,t} = sg[s_i] pi / sg[pi] (eq. 14) has the sequence's value and the token's gradient."""
    length = mask.sum(1, keepdim=True).clamp(min=1)
    weight = mask.to(logprobs.dtype) / length / (len(mask) if denom is None else denom)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).sum(1, keepdim=True) / length
    token = torch.where(mask > 0, logprobs, 0.0)
    ratio = log_ratio.detach().exp() * (token - token.detach()).exp()  # s_{i,t}, eq. 14; (N, T)
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    metrics = {"clip_fraction": (weight * (objective != ratio * advantages)).sum(),
               "ratio_mean": (weight * ratio.detach()).sum(),
               "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum()}
    return -(weight * objective).sum(), metrics

def cispo_loss(logprobs, old_logprobs, advantages, mask, *, ratio_max=5.0, denom=None):
    """CISPO, arXiv 2506.13585 eq. 4: -sg[min(r, ratio_max)] A log pi, mean over all tokens.
    The weight of a token is clipped, not its update: no token loses its gradient."""
    weight = mask.to(logprobs.dtype) / (mask.sum().clamp(min=1) if denom is None else denom)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.detach().exp()
    objective = ratio.clamp(max=ratio_max) * advantages * torch.where(mask > 0, logprobs, 0.0)
    metrics = {"clip_fraction": (weight * (ratio > ratio_max)).sum(),
               "ratio_mean": (weight * ratio).sum(),
               "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum()}
    return -(weight * objective).sum(), metrics

def sapo_loss(logprobs, old_logprobs, advantages, mask, *, tau_pos=1.0, tau_neg=1.05, denom=None):
    """SAPO, arXiv 2511.20347: -(4 / tau) sigmoid(tau (r - 1)) A, a gate, not a clip; mean over
    the tokens of a completion, then over completions; tau is tau_pos where A > 0, else tau_neg."""
    length = mask.sum(1, keepdim=True).clamp(min=1)
    weight = mask.to(logprobs.dtype) / length / (len(mask) if denom is None else denom)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    objective = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    metrics = {"clip_fraction": 0 * weight.sum(), "ratio_mean": (weight * ratio.detach()).sum(),
               "approx_kl": (weight * (ratio - 1 - log_ratio).detach()).sum()}
    return -(weight * objective).sum(), metrics

def gmpo_loss(logprobs, old_logprobs, advantages, mask, *, clip_low=0.4, clip_high=0.4, denom=None):
    """GMPO, arXiv 2507.20673: -s A, mean over completions; s is the geometric mean of the token
    ratios, each clipped to [e^-low, e^high] on the side A gains from. clip_fraction: tokens."""
    length = mask.sum(1).clamp(min=1)
    weight = mask.any(1).to(logprobs.dtype) / (len(mask) if denom is None else denom)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0).sum(1) / length
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    bounded = torch.where(advantages[:, None] > 0, log_ratio.clamp(max=clip_high), log_ratio)
    bounded = torch.where(advantages[:, None] < 0, log_ratio.clamp(min=-clip_low), bounded)
    ratio = (bounded.sum(1) / length).exp()  # s_i; (N,)
    clipped = (weight / length)[:, None] * (bounded != log_ratio)
    metrics = {"clip_fraction": clipped.sum(), "ratio_mean": (weight * ratio.detach()).sum(),
               "approx_kl": (weight * (ratio - 1 - ratio.log()).detach()).sum()}
    return -(weight * ratio * advantages).sum(), metrics

def reinforce_loss(logprobs, old_logprobs, advantages, mask, *, per="token", denom=None):
    """REINFORCE (Williams 1992): -A log pi, without a ratio. per="token": mean over all tokens;
    per="completion": over the tokens of a completion, then over completions."""
    length = mask.sum(1, keepdim=True).clamp(min=1) if per == "completion" else 1
    units = {"completion": len(mask), "token": mask.sum().clamp(min=1)}[per]
    weight = mask.to(logprobs.dtype) / length / (units if denom is None else denom)
    advantages = torch.where(mask > 0, advantages.reshape(len(mask), -1), 0.0)
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).detach()
    objective = advantages * torch.where(mask > 0, logprobs, 0.0)
    metrics = {"clip_fraction": 0 * weight.sum(), "ratio_mean": (weight * log_ratio.exp()).sum(),
               "approx_kl": (weight * (log_ratio.exp() - 1 - log_ratio)).sum()}
    return -(weight * objective).sum(), metrics

def kl_penalty(logprobs, ref_logprobs, mask, *,
               estimator="k3", per="completion", denom=None, old_logprobs=None):
    """KL(pi_theta || pi_ref) from sampled tokens, with x = log pi_ref - log pi_theta.
    k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1 (joschu.net/blog/kl-approx.html), "unbiased" = r k3
    (DeepSeek-V3.2; r = pi_theta / pi_old). As losses k2 and r k3 have this KL's gradient, k3 that
    of the forward KL, k1 none in expectation: k1 with a gradient raises ValueError.
    per: "token" or "completion", the unit of the mean. old_logprobs (N, T); None: pi_theta's."""
    length = mask.sum(1, keepdim=True).clamp(min=1) if per == "completion" else 1
    units = {"completion": len(mask), "token": mask.sum().clamp(min=1)}[per]
    weight = mask.to(logprobs.dtype) / length / (units if denom is None else denom)
    x = torch.where(mask > 0, ref_logprobs - logprobs, 0.0)
    if estimator == "k1" and x.requires_grad:
        raise ValueError("k1 is a metric, not a loss: its gradient is zero in expectation")
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).exp()
    k3 = x.exp() - x - 1
    kl = {"k1": -x, "k2": x.square() / 2, "k3": k3, "unbiased": ratio * k3}[estimator]
    return (weight * kl).sum(), {"kl": (weight * kl.detach()).sum()}

def group_advantages(rewards, group_size, *, scale="group"):
    """GRPO's and GSPO's advantages, arXiv 2507.18071 eq. 6: (r - mean of its group) / (std + 1e-6).
    rewards (N,) -> (N,). scale: "group", the group's std (ddof 1); "batch", that of all rewards;
    "none", no division (Dr. GRPO). Equal rewards, and a group of one, have advantage exactly 0."""
    groups = rewards.reshape(-1, group_size)
    dead = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    advantages = groups - groups.mean(1, keepdim=True)
    if scale != "none":  # one reward alone has no unbiased std, and is dead anyway
        std = {"group": groups.std(1, correction=int(group_size > 1), keepdim=True),
               "batch": rewards.std(correction=min(1, max(len(rewards) - 1, 0)))}[scale]
        advantages = advantages / (std + 1e-6)
    return torch.where(dead, 0.0, advantages).reshape(-1)

def leave_one_out_advantages(rewards, group_size):
    """RLOO, arXiv 2402.14740: r_i - mean of the other G - 1 rewards of the group. (N,) -> (N,)."""
    return group_advantages(rewards, group_size, scale="none") * group_size / max(group_size - 1, 1)

def step_advantages(step_rewards, steps, group_size):
    """Advantages (N, T) for GSPO-token, whose eq. 13 leaves them open: normalised per step index.
    step_rewards (N, T) are at steps' last tokens, where steps (N, T) is 1; Q_{i,k} sums them from
    step k of completion i on. A_{i,k} = (Q_{i,k} - mean) / (std + 1e-6), over the completions of
    the group with a step k, is that of all its tokens; 0 after the last step."""
    steps = steps.bool()  # summed in float64: rounding would tell equal rewards apart on a GPU
    to_go = step_rewards.where(steps, 0.0).double().flip(1).cumsum(1).flip(1).to(step_rewards)
    index = steps.cumsum(1) - steps.long()  # of the step that a token is part of
    advantages = torch.zeros_like(to_go)
    for k in range(int(steps.sum(1).max())):
        ends = steps & (index == k)
        for rows in torch.arange(len(steps), device=steps.device).split(group_size):
            rows = rows[ends[rows].any(1)]
            if len(rows):
                scores = group_advantages(to_go[rows][ends[rows]], len(rows))
                advantages[rows] += scores[:, None] * (index[rows] == k)
    return advantages

def whiten(values, mask):
    """(x - mean) / (std + 1e-6) over all tokens of the mask, both (N, T); all equal: exactly 0."""
    tokens = group_advantages(values[mask > 0], max(int(mask.sum()), 1))  # one group of all tokens
    return torch.zeros_like(values).masked_scatter(mask > 0, tokens)

def reinforce_plus_plus_advantages(rewards, mask, *, gamma=1.0):
    """REINFORCE++, arXiv 2501.03262: reward to go (GAE, lam 1, V 0), whitened. (N, T) -> (N, T)."""
    return whiten(gae_advantages(rewards, 0 * rewards, mask, gamma=gamma, lam=1.0)[1], mask)

def gae_advantages(rewards, values, mask, *, gamma=1.0, lam=0.95, bootstrap=None):
    """GAE, arXiv 1506.02438 eq. 16: A_t = d_t + gamma lam A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t.
    rewards, values (N, T), values[:, t] before token t; V is 0 after the end token. bootstrap (N,):
    V after the last token where that is no end, else 0. Returns (advantages, advantages + V)."""
    mask = mask.bool()
    values = torch.where(mask, values, 0.0)
    advantages = torch.where(mask, rewards, 0.0)
    ahead = torch.zeros_like(values[:, 0]) if bootstrap is None else gamma * bootstrap
    for t in reversed(range(mask.shape[1])):
        advantage = advantages[:, t] + ahead - values[:, t]
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
        ahead = torch.where(mask[:, t], gamma * (values[:, t] + lam * advantage), ahead)
    return advantages, advantages + values

def truncated_importance_weights(old_logprobs, sampler_logprobs, mask, *, cap=2.0, per="token"):
    """Truncated importance sampling from the sampler to pi_old: weights (N, T) of the advantages.
    per="token": min(pi_old / pi_sampler, cap); "completion": min(exp(mean_t log(..)), cap), length-
    normalised as GSPO's. The product of the ratios would be unbiased, and spread as e^T does."""
    log_ratio = torch.where(mask > 0, old_logprobs - sampler_logprobs, 0.0).detach()
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return mask * {"token": log_ratio, "completion": mean}[per].exp().clamp(max=cap)

def drift(logprobs, old_logprobs, mask):
    """How far two scorings (N, T) of completions are apart, 0-d each: k3 over tokens, std of token
    and of sequence log-ratios, mean, min and max of s_i, share of s_i outside GSPO's clip."""
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    tokens, sequences = log_ratio[mask], log_ratio.sum(1) / mask.sum(1).clamp(min=1)
    ratio = sequences.exp()
    return {"kl": (tokens.exp() - 1 - tokens).mean(), "token_std": tokens.std(correction=0),
            "sequence_std": sequences.std(correction=0), "ratio_mean": ratio.mean(),
            "ratio_min": ratio.min(), "ratio_max": ratio.max(),
            "outside_clip": ((ratio < 1 - 3e-4) | (ratio > 1 + 4e-4)).float().mean()}

class Routing(torch.overrides.TorchFunctionMode):
    """Routing Replay (arXiv 2507.18071), a context: `experts` gets the indices (tokens, k) of every
    torch.topk, which are routers' choices. With `recorded`, another such context, its indices are
    chosen again, and weighed by the router of now, whose gradient flows."""
    def __init__(self, recorded: "Routing | None" = None):
        super().__init__()
        self.experts, self.recorded = [], iter(recorded.experts if recorded else ())

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function in (torch.topk, torch.Tensor.topk) and result[1].dim() == 2:
            if (chosen := next(self.recorded, None)) is not None:
                result = torch.return_types.topk((args[0].gather(-1, chosen), chosen))
            self.experts.append(result[1])
        return result

class Algorithm(typing.NamedTuple):
    """All that defines an algorithm. The numbers of its paper are its loss's defaults."""
    loss: typing.Callable
    advantages: typing.Callable = group_advantages  # of rewards (N,), or (N, T) with a mask
    denom: str = "completion"  # unit of the loss's mean, and of the KL term's
    kl: str = "k3"  # estimator of kl_penalty, for --kl-coef: in the loss, k1 in the token rewards
    dynamic_sampling: bool = False  # groups all right or all wrong are dropped and refilled
    overlong_shaping: bool = False  # soft punishment of completions close to the token budget
    critic: bool = False

ALGOS = {
    "gspo": Algorithm(gspo_loss),
    "gspo-token": Algorithm(gspo_token_loss, step_advantages),
    "grpo": Algorithm(grpo_loss),
    "dr-grpo": Algorithm(dr_grpo_loss, functools.partial(group_advantages, scale="none")),
    "dapo": Algorithm(dapo_loss, denom="token", dynamic_sampling=True, overlong_shaping=True),
    "ppo": Algorithm(ppo_loss, gae_advantages, denom="token", kl="k1", critic=True),
    "cispo": Algorithm(cispo_loss, denom="token"),
    "sapo": Algorithm(sapo_loss),
    "gmpo": Algorithm(gmpo_loss),
    "rloo": Algorithm(reinforce_loss, leave_one_out_advantages, denom="token"),
    "reinforce++": Algorithm(ppo_loss, reinforce_plus_plus_advantages, denom="token", kl="k1"),
    "reinforce": Algorithm(reinforce_loss, lambda rewards: group_advantages(
        rewards, len(rewards), scale="none"), denom="token"),  # the batch's mean is the baseline
}
