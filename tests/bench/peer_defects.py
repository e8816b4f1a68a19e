"""Show surprises in the code of other projects by running that code, each in its own environment.

    TRL/bin/python tests/bench/peer_defects.py trl POLICY               # 1.16
    VERL/bin/python tests/bench/peer_defects.py verl                    # 0.9
    BOOK/bin/python tests/bench/peer_defects.py book rlhf-book/code POLICY
    MLX/bin/python tests/bench/peer_defects.py mlx                      # 5.10.2, mlx[cpu], torch
    ANY/bin/python tests/bench/peer_defects.py areal                    # 1.0.4, --no-deps, torch
    ANY/bin/python tests/bench/peer_defects.py skyrl                    # 0.3.0, --no-deps, torch

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


def trl_trainer(policy: str, folder: str, model=None, **settings):
    """Return a GRPOTrainer of the policy, or of a model with the policy's tokenizer."""
    trl, datasets = import_module("trl"), import_module("datasets")
    off = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no"}
    off |= {"report_to": "none", "disable_tqdm": True, "output_dir": folder}
    return trl.GRPOTrainer(
        model=model or transformers.AutoModelForCausalLM.from_pretrained(policy, dtype="float32"),
        processing_class=transformers.AutoTokenizer.from_pretrained(policy),
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1+1="] * 40}),
        args=trl.GRPOConfig(**off, **settings),
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


def trl_positions(policy: str) -> None:
    """Log-probs are scored without position_ids beside left padding: models with absolute positions
    see another text."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy)
    ids = torch.tensor([tokenizer.encode("1+1=222222")])
    padding = torch.full((1, 4), tokenizer.pad_token_id)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(ids)], 1)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    size = {"vocab_size": len(tokenizer), "n_embd": 128, "n_layer": 2, "n_head": 4}
    # weights so large that positions matter
    config = transformers.GPT2Config(**size, **ends, bos_token_id=None, initializer_range=0.2)
    model = transformers.GPT2LMHeadModel(config).eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        score = trl_trainer(policy, folder, model)._get_per_token_logps_and_entropies
        plain = score(model, ids, torch.ones_like(ids), 6)[0].mean()
        beside = score(model, torch.cat([padding, ids], 1), mask, 6)[0].mean()
    print(f"TRL, a GPT-2: mean log-prob of a text {plain:.2f}, behind four pads {beside:.2f}")


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


# ---- AReaL and SkyRL -----------------------------------------------------------------------------


def functions_of(package: str, file: str, *names: str) -> dict:
    """Return functions of an installed package, without its imports, which need a cluster."""
    path = Path(importlib.util.find_spec(package).origin).parent / file
    tree, scope = ast.parse(path.read_text()), {"torch": torch}
    tree.body = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    for node in tree.body:
        node.decorator_list = []
    exec("from __future__ import annotations\n" + ast.unparse(tree), scope)
    return scope


def areal_mean() -> None:
    """GSPO's ratio with a mean over tokens: the longer completion counts by its length."""
    needed = ("_compute_sequence_level_ratio_and_advantages", "ppo_actor_loss_fn")
    loss = functions_of("areal", "utils/functional/functional.py", *needed)["ppo_actor_loss_fn"]
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


def skyrl_returns() -> None:
    """REINFORCE++: the return begins anew at tokens of a tool. A reward at the end does not reach
    the tokens before the tool's answer."""
    name = "compute_reinforce_plus_plus_outcome_advantage"
    scope = functions_of("skyrl", "backends/skyrl_train/utils/ppo_utils.py", name)
    scope["masked_whiten"] = lambda values, mask: values
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
    _, returns = scope[name](rewards, mask, gamma=1.0)
    print(f"SkyRL, two tokens, a tool's answer, one token, reward 1: returns {returns[0].tolist()}")


# ---- the RLHF book's code ------------------------------------------------------------------------


def book_kl(book: str) -> None:
    """loss.py: approx_kl1 and approx_kl3 take log pi - log pi_ref where the formulas have it the
    other way round."""
    loss = import_module("policy_gradients.loss")
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.7])
    kl = (policy * (policy / reference).log()).sum()
    torch.manual_seed(0)
    drawn = torch.multinomial(policy, 400_000, replacement=True)
    for name in ("kl1", "kl3"):
        found = loss.get_approx_kl(name, policy.log()[drawn], reference.log()[drawn], None).mean()
        print(f"book, a KL of {kl:.3f}: {name} says {found:.3f}")


def book_dead_groups(policy: str) -> None:
    """utils.py: compute_standardized_advantages divides the rounding of a mean by std + 1e-8."""
    utils = import_module("policy_gradients.utils")
    for reward in (0.1, 0.7):
        advantage = utils.compute_standardized_advantages(torch.full((8, 1), reward))[0].item()
        print(f"book, 8 rewards of {reward}: advantage {advantage:.2f}, expected 0")


def book_temperature(policy: str) -> None:
    """rollout.py samples at config.py's temperature, 0.6. compute_log_probs of utils.py scores at
    1, old and new alike: the ratio is consistent, and not that of the policy that samples."""
    utils = import_module("policy_gradients.utils")
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy)
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    prompt = torch.tensor([tokenizer.encode("7+5*3=")]).expand(64, -1)
    options = {"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 1.0, "max_new_tokens": 8}
    out = model.generate(prompt, output_scores=True, return_dict_in_generate=True, **options)
    sampled = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    with torch.no_grad():
        scored = utils.compute_log_probs(model, out.sequences, torch.ones_like(out.sequences))
    log_s = (scored[:, prompt.shape[1] - 1 :] - sampled).mean(1)
    outside = ((log_s < -3e-4) | (log_s > 4e-4)).float().mean()
    print(f"book, sampled at 0.6, scored at 1: {outside:.0%} outside GSPO's band of the sampler")


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    peer, *folders = sys.argv[1:]
    if peer == "book":
        sys.path.insert(0, folders.pop(0))
    shown = {
        "trl": (trl_level, trl_positions, trl_sequence_weight),
        "verl": (verl_dual_clip, verl_geo_mean),
        "mlx": (mlx_ratio,),
        "areal": (areal_mean,),
        "skyrl": (skyrl_returns,),
        "book": (book_kl, book_dead_groups, book_temperature),
    }
    for show in shown[peer]:
        show(*folders)


if __name__ == "__main__":
    main()
