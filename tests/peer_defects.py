r"""What we found wrong in the peers' code, each shown by running that code, in its environment.

    BOOK/bin/python tests/peer_defects.py book rlhf-book/code POLICY
    TRL/bin/python tests/peer_defects.py trl POLICY

POLICY is a folder of the built-in policy (a checkpoint of `python train.py --task arithmetic`).
Nothing is asserted: versions change, and a line that no longer shows a defect is good news. Where
chance is involved the seed is fixed. Both parts take less than a minute each on a CPU.
"""

import contextlib
import importlib
import io
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import bench_peers
import peer_book

ROOT = Path(__file__).resolve().parent.parent
BAND = (1 - 3e-4, 1 + 4e-4)  # GSPO's, of the sequence ratio
TASK = "arithmetic"


def share_outside(ratios: torch.Tensor) -> str:
    return f"{((ratios < BAND[0]) | (ratios > BAND[1])).float().mean().item():.0%}"


def random_gpt2(tokenizer) -> transformers.PreTrainedModel:
    """A model with absolute positions: what it computes changes with the padding before a text."""
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=512,
        n_embd=128,
        n_layer=2,
        n_head=4,
        initializer_range=0.2,  # so that its positions matter as those of a trained model do
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.GPT2LMHeadModel(config).eval()


# ---------------------------------------------------------------- the RLHF book's code


class Book:
    """Its modules, with our problems and reward in the place of its dataset."""

    def __init__(self, folder: str, policy: str):
        sys.path.insert(0, folder)
        for name in ("buffer", "config", "loss", "rollout", "utils"):
            setattr(self, name, importlib.import_module(f"policy_gradients.{name}"))
        self.policy = policy
        self.utils.console.file = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        self.utils.extract_answer = peer_book.whole_completion

    def tokenizer(self):
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.policy)
        tokenizer.chat_template = peer_book.ONLY_THE_PROMPT
        return tokenizer

    def model(self, dtype: torch.dtype):
        return transformers.AutoModelForCausalLM.from_pretrained(self.policy, dtype=dtype)

    def sampled(self, model, tokenizer):
        """The completions of its rollout engine, 8 of each of 16 prompts, with old log-probs."""
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            settings = task_settings(Path(folder), prompts=16) | {"model": self.policy}
            problems = peer_book.Problems(settings, bench_peers.nothing_yet())
        config = peer_book.config_of(settings)
        engine = self.rollout.RolloutEngine(config, problems, model, tokenizer, None, None)
        return next(iter(engine))

    def ratios_before_any_update(self, model) -> torch.Tensor:
        """s of its completions in batches of 32, as its loop makes them: 1 if all were right."""
        completions = self.sampled(model, self.tokenizer())
        order = torch.randperm(len(completions)).tolist()
        found = []
        for i in range(0, len(order), 32):
            batch = self.buffer.join_experiences_batch([completions[j] for j in order[i : i + 32]])
            with torch.no_grad():
                new = self.utils.compute_log_probs(model, batch.sequence_ids, batch.attention_mask)
            difference = new - batch.log_probs_old
            found.append(self.loss.masked_mean(difference, batch.action_mask, dim=-1).exp())
        return torch.cat(found)


def task_settings(folder: Path, prompts: int, steps: int = 1) -> dict:
    """What bench_peers.py gives a worker, with the problems of the built-in task."""
    rewards = bench_peers.import_module_of(ROOT, "rewards")
    task = rewards.TASKS[TASK]
    rows = list(itertools.islice(rewards.problems(task, seed=0), prompts * steps))
    bench_peers.write_rows(folder / "train.jsonl", rows)
    settings = {"ours": str(ROOT), "data": str(folder / "train.jsonl"), "reward": task.verifier}
    settings |= {"prompts_per_step": prompts, "group_size": 8, "updates": 1, "steps": steps}
    settings |= {"max_new_tokens": task.max_new_tokens, "temperature": 1.0, "lr": 2e-4}
    return settings | {"clip_low": 3e-4, "clip_high": 4e-4, "seed": 0, "threads": 1}


def book_kl(book: Book) -> None:
    """loss.py: approx_kl1 and approx_kl3 take log pi - log pi_ref where the formulas have it
    the other way round."""
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.7])
    kl = (policy * (policy / reference).log()).sum().item()
    drawn = torch.multinomial(policy, 400_000, replacement=True)
    logprobs, ref_logprobs = policy.log()[drawn], reference.log()[drawn]
    for name in ("kl1", "kl3"):
        estimates = book.loss.get_approx_kl(name, logprobs, ref_logprobs, None)
        print(f"KL of {kl:.3f}: {name} says {estimates.mean().item():.3f}")


def book_dead_groups(book: Book) -> None:
    """utils.py: compute_standardized_advantages divides the rounding of a mean by std + 1e-8."""
    for reward in (0.1, 0.7):
        advantages = book.utils.compute_standardized_advantages(torch.full((8, 1), reward))
        print(f"8 rewards of {reward}: advantage {advantages[0].item():.2f}, expected 0")


def book_end_token(book: Book) -> None:
    """rollout.py: action_mask leaves out every pad token, which is the end token if the
    tokenizer has no other (load_model's line)."""
    tokenizer = book.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    completions = book.sampled(book.model(torch.float32), tokenizer)
    ended = trained = 0
    for completion in completions.buffer:
        ends = completion.sequence_ids[1:] == tokenizer.eos_token_id
        ended += bool(ends.any())
        trained += bool((ends & completion.action_mask).any())
    print(f"pad token = end token: {ended} completions end, the loss sees {trained} of the ends")


def book_rounding(book: Book) -> None:
    """utils.py: load_model's bf16; batches of other shapes round otherwise than old log-probs."""
    for dtype in (torch.float32, torch.bfloat16):
        ratios = book.ratios_before_any_update(book.model(dtype))
        outside = share_outside(ratios)
        print(f"{dtype}: before any update {outside} of the ratios are outside GSPO's band")


def book_positions(book: Book) -> None:
    """utils.py: compute_log_probs passes no position_ids, and batches are padded on the left."""
    torch.manual_seed(0)
    ratios = book.ratios_before_any_update(random_gpt2(book.tokenizer()))
    low, high = ratios.min().item(), ratios.max().item()
    print(f"a GPT-2, float32, before any update: ratios from {low:.2f} to {high:.2f}")


def book_small_steps(book: Book) -> None:
    """train.py: Adam on bf16 weights; a step below half of a weight's spacing is lost."""
    for lr in (5e-6, 2e-4):
        model = book.model(torch.bfloat16)
        before = [weights.detach().clone() for weights in model.parameters()]
        for weights in model.parameters():
            weights.grad = torch.randn(weights.shape).to(weights.dtype)
        torch.optim.Adam(model.parameters(), lr=lr).step()
        pairs = list(zip(before, model.parameters()))
        moved = sum((old != new).sum().item() for old, new in pairs)
        share = moved / sum(old.numel() for old in before)
        print(f"bf16 weights, learning rate {lr:g}: an update changes {share:.0%} of them")


def book_two_starts(book: Book) -> None:
    """rollout.py: a rendered chat template is tokenized with special tokens added once more."""
    tokenizer = book.tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    start = importlib.import_module("tokenizers.processors").TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.backend_tokenizer.post_processor = start  # as Llama's
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    completions = book.sampled(random_gpt2(tokenizer), tokenizer)
    ids = completions[0].sequence_ids
    starts = (ids == tokenizer.bos_token_id).sum().item()
    print(f"a template and a tokenizer that both begin with <s>: the prompt has {starts} of them")


# ---------------------------------------------------------------- TRL


def trl_level(policy: str) -> None:
    """grpo_trainer.py: with one update a rollout the ratio is 1, and DAPO's sum over tokens of
    a sequence's ratio has the gradient of the token ratios: the setting changes nothing."""
    safetensors = importlib.import_module("safetensors.torch")
    trained = {}
    for level in ("token", "sequence"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            settings = task_settings(folder, prompts=8, steps=5)
            settings |= {"model": policy, "peer": "trl-defaults", "ratios": level}
            (folder / "settings.json").write_text(json.dumps(settings))
            with contextlib.redirect_stdout(io.StringIO()):
                bench_peers.trl_worker(str(folder / "settings.json"))
            trained[level] = safetensors.load_file(folder / "trained" / "model.safetensors")
    begun = safetensors.load_file(Path(policy, "model.safetensors"))
    print(
        "five steps at the defaults with importance_sampling_level token and sequence: the trained "
        f"weights differ by up to {furthest(*trained.values()):.0e}, "
        f"and from those before by {furthest(begun, trained['token']):.0e}"
    )


def furthest(some: dict, others: dict) -> float:
    return max((some[name] - others[name]).abs().max().item() for name in some if name in others)


def trl_positions(policy: str) -> None:
    """grpo_trainer.py: log-probs are scored without position_ids, prompts padded on the left."""
    trl = importlib.import_module("trl")
    datasets = importlib.import_module("datasets")
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy)
    model = random_gpt2(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=no_reward,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["1+1="]}),
            args=trl.GRPOConfig(use_cpu=True, bf16=False, output_dir=folder, report_to="none"),
        )
        ids = torch.tensor([tokenizer.encode("1+1=222222")])
        padding = torch.full((1, 4), tokenizer.pad_token_id)
        means = []
        for before in (padding[:, :0], padding):
            given = torch.cat([before, ids], dim=1)
            mask = torch.cat([torch.zeros_like(before), torch.ones_like(ids)], dim=1)
            with torch.no_grad():
                scored = trainer._get_per_token_logps_and_entropies(model, given, mask, 6)
            means.append(scored[0].mean().item())
    print(
        "a GPT-2: the mean log-prob of a completion is "
        f"{means[0]:.2f}, and {means[1]:.2f} beside a prompt that is four tokens longer"
    )


def no_reward(completions, **_) -> list[float]:
    return [0.0] * len(completions)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    peer, *folders = sys.argv[1:]
    if peer == "trl":
        trl_level(*folders)
        trl_positions(*folders)
        return
    book = Book(*folders)
    for show in (
        book_kl,
        book_dead_groups,
        book_end_token,
        book_rounding,
        book_positions,
        book_small_steps,
        book_two_starts,
    ):
        show(book)


if __name__ == "__main__":
    main()
