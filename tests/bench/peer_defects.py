"""Show surprises in the code of other projects by running that code, each in its own environment.

    TRL/bin/python tests/bench/peer_defects.py trl POLICY               # 1.16
    VERL/bin/python tests/bench/peer_defects.py verl                    # 0.9
    MLX/bin/python tests/bench/peer_defects.py mlx                      # 5.10.2, mlx[cpu], torch
    ANY/bin/python tests/bench/peer_defects.py areal                    # 1.0.4, --no-deps, torch

POLICY is a folder of the built-in policy, a checkpoint of `python train.py --algo gspo`. Nothing is
asserted: versions change, and a line that no longer shows a defect is good news. Seeds are fixed.
Each takes less than a minute on a CPU. If a project intends it, the docstring quotes it."""

import ast
import contextlib
import importlib.util
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch
import transformers

# ---- TRL -----------------------------------------------------------------------------------------


def trl_trainer(policy: str, folder: str, **settings):
    trl, datasets = import_module("trl"), import_module("datasets")
    off = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no"}
    off |= {"report_to": "none", "disable_tqdm": True, "output_dir": folder}
    return trl.GRPOTrainer(
        model=policy,
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1+1="] * 40}),
        args=trl.GRPOConfig(model_init_kwargs={"dtype": "float32"}, **off, **settings),
    )


def trl_level(policy: str) -> None:
    """With one update a rollout, its default, the ratio is 1, and DAPO's sum over tokens of a
    sequence's ratio has the gradient of the token ratios. Its documentation says so: "this method
    only has an effect when training goes slightly off-policy"."""
    settings = {"per_device_train_batch_size": 64, "num_generations": 8, "max_steps": 5}
    settings |= {"learning_rate": 2e-4, "lr_scheduler_type": "constant"}
    trained = {}
    for level in ("token", "sequence"):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
            trainer = trl_trainer(policy, folder, importance_sampling_level=level, **settings)
            trained["before"] = [each.detach().clone() for each in trainer.model.parameters()]
            trainer.train()
        trained[level] = [each.detach() for each in trainer.model.parameters()]
    differ, moved = (
        max((a - b).abs().max().item() for a, b in zip(trained["token"], trained[other]))
        for other in ("sequence", "before")
    )
    print(
        "TRL, five steps at the defaults, importance_sampling_level token and sequence: trained "
        f"weights differ by up to {differ:.0e}, from those before by {moved:.0e}"
    )


def trl_sequence_weight(policy: str) -> None:
    """With vLLM each completion is weighed by exp of the *sum* of log pi_old - log pi_vllm, and by
    0 above 3 ("sequence_mask", the default). Meant so: a request for the mean, its pull request
    5815, was closed. vllm_importance_sampling_mode="token_truncate" has no such product."""
    settings = {"num_generations": 2, "per_device_train_batch_size": 2}
    for mode in ("sequence_mask", "token_truncate"):
        with tempfile.TemporaryDirectory() as folder:
            trainer = trl_trainer(policy, folder, vllm_importance_sampling_mode=mode, **settings)
        trainer.use_vllm = True  # there is none: vllm_weight replaces its samples
        for tokens in (1000, 4000):
            low, high = vllm_weight(trainer, tokens, -1e-3), vllm_weight(trainer, tokens, 1e-3)
            print(f"TRL, {mode}, {tokens} tokens: a mean log-ratio of -0.001 and 0.001 ", end="")
            print(f"weighs {low:.3g} and {high:.3g}")


def vllm_weight(trainer, tokens: int, gap: float) -> float:
    """Of completions of so many tokens whose log-probs in vLLM differ by a gap, all by the same."""
    completions, sampled = [[3] * tokens] * 2, [[-1.0 - gap] * tokens] * 2
    generated = ([[3], [3]], completions, None, ["3", "3"], sampled, {}, None, None)
    scored = torch.full((2, tokens), -1.0)
    trainer._generate = lambda prompts: generated
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (scored, None, None)
    found = trainer._generate_and_score_completions([{"prompt": "1"}] * 2)
    return found["importance_sampling_ratio"].mean().item()


# ---- verl ----------------------------------------------------------------------------------------


def verl_loss(name: str, rows: slice, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Its loss of some of 8 completions of 4 tokens, and the gradient."""
    algorithms = import_module("verl.trainer.ppo.core_algos")
    config = import_module("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings
    )
    config.global_batch_info.update(dp_size=1, global_batch_size=8, batch_num_tokens=32)
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(8, 4, generator=generator)
    logprobs = (old + torch.randn(8, 4, generator=generator)).requires_grad_()
    advantages = torch.randn(8, 1, generator=generator).expand(8, 4)
    mask = torch.ones(8, 4)
    loss, _ = algorithms.get_policy_loss_fn(name)(
        old[rows], logprobs[rows], advantages[rows], mask[rows], "seq-mean-token-mean", config, None
    )
    loss.backward()
    return loss.detach(), logprobs.grad


def verl_dual_clip() -> None:
    """gspo never reads clip_ratio_c, the bound on the objective where A < 0 that vanilla has (a
    default of 3). GSPO's paper has none either."""
    for name in ("vanilla", "gspo"):
        losses = [verl_loss(name, slice(8), clip_ratio_c=c)[0] for c in (1.01, 3.0)]
        print(
            f"verl, {name}: the loss at clip_ratio_c 1.01 and 3 is {losses[0]:.4f}, {losses[1]:.4f}"
        )


def verl_geo_mean() -> None:
    """geo_mean divides by the rows of its micro-batch, whatever the whole batch has, where the
    other losses read global_batch_info: micro-batches change the gradient's size."""
    for name in ("gspo", "geo_mean"):
        _, whole = verl_loss(name, slice(8))
        parts = sum(verl_loss(name, slice(i, i + 1))[1] for i in range(8))
        ratio = parts.norm() / whole.norm()
        print(f"verl, {name}: the gradient of 8 micro-batches is {ratio:.2f} times that of one")


# ---- mlx-lm-lora ---------------------------------------------------------------------------------


def mlx_ratio() -> None:
    """trainer/grpo_trainer.py: log_ratio = logps - stop_gradient(logps). The ratio is always 1, so
    epsilon (DAPO) and importance_sampling_level (GSPO) change nothing. Intended, a comment says:
    "each rollout is used once". The settings are accepted all the same."""
    mx = import_module("mlx.core")
    objective = import_module("mlx_lm_lora.trainer.grpo_trainer")._grpo_objective
    mx.random.seed(0)
    logps, advantages = -mx.random.uniform(shape=(8, 6)), mx.random.normal(shape=(8,))
    mask = mx.arange(6)[None] < mx.array([6, 5, 4, 3, 2, 6, 1, 4])[:, None]

    def loss(logps, epsilon, level):
        found, _, metrics = objective(
            logps, logps, mask, advantages, 0.0, epsilon, epsilon, 6, level, "grpo"
        )
        return found, metrics["clip_ratio_total"]

    gradients = {}
    for level in ("token", "sequence"):
        for epsilon in (1e-4, 0.2):
            (_, clipped), gradients[level, epsilon] = mx.value_and_grad(loss)(logps, epsilon, level)
            print(f"mlx-lm-lora, {level}, epsilon {epsilon:g}: clipped {clipped.item():.0%}")
    first, *others = gradients.values()
    gap = max(mx.abs(first - other).max().item() for other in others)
    print(
        f"mlx-lm-lora: these four gradients differ by up to {gap:.0e}, their largest is "
        f"{mx.abs(first).max().item():.2f}"
    )


# ---- AReaL ---------------------------------------------------------------------------------------


def areal_mean() -> None:
    """GSPO's ratio with a mean over tokens: the longer completion counts by its length."""
    # two functions of the package, without its imports, which need a cluster
    folder = Path(importlib.util.find_spec("areal").origin).parent
    source, scope = (folder / "utils/functional/functional.py").read_text(), {"torch": torch}
    for node in ast.parse(source).body:
        name = getattr(node, "name", "")
        if name in ("_compute_sequence_level_ratio_and_advantages", "ppo_actor_loss_fn"):
            node.decorator_list = []
            exec("from __future__ import annotations\n" + ast.unparse(node), scope)
    loss = scope["ppo_actor_loss_fn"]
    logprobs = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    old = torch.zeros(2, 3)
    value, _ = loss(
        logprobs, old, old, torch.ones(2, 3), 3e-4, mask, importance_sampling_level="sequence"
    )
    value.backward()
    shares = (logprobs.grad / logprobs.grad.sum()).sum(1)
    print(
        "AReaL, sequence ratio, completions of 1 and 3 tokens with A = 1: "
        f"{shares[0]:.0%} and {shares[1]:.0%} of the gradient, GSPO's are 50% each"
    )


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    peer, *policy = sys.argv[1:]
    shown = {
        "trl": (trl_level, trl_sequence_weight),
        "verl": (verl_dual_clip, verl_geo_mean),
        "mlx": (mlx_ratio,),
        "areal": (areal_mean,),
    }
    for show in shown[peer]:
        show(*policy)


if __name__ == "__main__":
    main()
