"""Drives the policy gradient code of the RLHF book for bench_peers.py, in its own environment.

Its train.main runs as it is: its rollout engine, buffer, loss and optimiser loop. What it reads
from outside is supplied in its place, by assigning to names of its modules:

1. the dataset: our prompts, with the interface that it expects, scored by our reward;
2. the answer is the whole completion (it would look for <answer> tags), and the weight of its
   reward for tags is 0, a setting of its own;
3. the tokenizer's chat template yields our prompt without its system prompt;
4. wandb notes what a step reports, and its console prints to nowhere;
5. of `book`, not of `book-bf16`: the model is loaded in float32 (its loader says bf16) and without
   gradient checkpointing (a parameter of its loader).

What stays its own: a group is sampled at a time, by transformers' generate, and scored alone, so
old log-probs come in batches of other shapes than new ones; dead groups are trained on; Adam is
not fused; updates draw single completions, in any order, and pad on the left; min_p is always on.
It must be a version with `RolloutEngine` in rollout.py (2026).
"""

import functools
import importlib
import itertools
import json
import os
import sys
from pathlib import Path

from bench_peers import BEGINS, import_module_of, nothing_yet, print_step, read_rows, timed

ONLY_THE_PROMPT = "{{ messages[-1]['content'] }}"  # for a tokenizer without a chat template
NO_SYSTEM_PROMPT = "{%- set messages = messages[1:] -%}"  # before a template that has one


class Problems:
    """Our prompts as a dataset of reasoning_gym: entries by number, and a score of an answer."""

    def __init__(self, settings: dict, step: dict):
        rewards = import_module_of(settings["ours"], "rewards")
        self.reward = rewards.parse_reward(settings["reward"])
        number = settings["steps"] * settings["prompts_per_step"]
        rows = itertools.cycle(read_rows(settings["data"]))
        self.rows = list(itertools.islice(rows, number))
        self.step = step

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict:
        row = self.rows[number]
        return {"question": row["prompt"], "answer": row.get("answer", ""), "row": row}

    def score_answer(self, answer: str, entry: dict) -> float:
        [score] = self.reward.score([answer], [entry["row"]])
        self.step["rewards"].append(score.reward)
        return score.reward


class Reports:
    """Stands in for the module wandb: counts the updates of a step and prints it at the last."""

    def __init__(self, settings: dict, step: dict):
        self.settings, self.step = settings, step
        self.updates, self.steps = 0, 0

    def init(self, **_) -> None:
        print(BEGINS, flush=True)

    def log(self, values: dict) -> None:
        if "loss" not in values:  # it reports a rollout
            return
        self.updates += 1
        if self.updates == self.settings["updates"]:
            self.steps += 1
            print_step(self.steps, self.step, self.settings["group_size"])
            self.step.update(nothing_yet())
            self.updates = 0


def main(path: str) -> None:
    settings = json.loads(Path(path).read_text())
    sys.path.insert(0, settings["book"])
    torch = importlib.import_module("torch")
    torch.set_num_threads(settings["threads"])
    train = importlib.import_module("policy_gradients.train")
    rollout = importlib.import_module("policy_gradients.rollout")
    utils = importlib.import_module("policy_gradients.utils")
    step, loaded = nothing_yet(), []

    train.create_dataset = functools.partial(create_dataset, settings, step)
    train.load_model = functools.partial(load_model, utils, settings, step, loaded)
    train.get_loss_objective = functools.partial(counted_loss, torch, utils, settings, step)
    train.wandb = Reports(settings, step)
    rollout.compute_rewards = functools.partial(scored, utils.compute_rewards, step)
    rollout.compute_log_probs = functools.partial(timed, step, "freeze", utils.compute_log_probs)
    utils.extract_answer = whole_completion
    with open(os.devnull, "w") as nowhere:
        utils.console.file = nowhere
        train.main(config_of(settings))
    loaded[0].save_pretrained(Path(path).parent / "trained")


def config_of(settings: dict):
    """Its configuration with our settings: one batch an update, plain sampling, no KL."""
    module = importlib.import_module("policy_gradients.config")
    completions = settings["prompts_per_step"] * settings["group_size"]
    return module.Config(
        data={"specs": []},
        loss="gspo",
        model_name=settings["model"],
        clip_eps_lo=settings["clip_low"],
        clip_eps_hi=settings["clip_high"],
        beta=0.0,
        format_weight=0.0,
        temperature=settings["temperature"],
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_new_tokens=settings["max_new_tokens"],
        lr=settings["lr"],
        prompts_per_step=settings["prompts_per_step"],
        num_rollouts=settings["group_size"],
        train_batch_size=completions // settings["updates"],
        batch_acc=1,
        max_norm=1.0,
        seed=settings["seed"],
    )


def create_dataset(settings: dict, step: dict, config) -> Problems:
    return Problems(settings, step)


def whole_completion(completion: str) -> str:
    return completion


def load_model(utils, settings: dict, step: dict, loaded: list, name: str, device):
    """Its loader's model and tokenizer, the latter with a template that yields our prompt."""
    if settings["peer"] == "book":
        utils.AutoModelForCausalLM = InFloat32(utils.AutoModelForCausalLM)
        model, tokenizer = utils.load_model(name, device, gradient_checkpointing=False)
    else:
        model, tokenizer = utils.load_model(name, device)
    if tokenizer.chat_template:
        tokenizer.chat_template = NO_SYSTEM_PROMPT + tokenizer.chat_template
    else:
        tokenizer.chat_template = ONLY_THE_PROMPT
    model.generate = functools.partial(timed, step, "sample", model.generate)
    loaded.append(model)
    return model, tokenizer


class InFloat32:
    """A class of transformers whose from_pretrained loads float32, whatever it is asked for."""

    def __init__(self, auto_class):
        self.auto_class = auto_class

    def from_pretrained(self, name: str, *, torch_dtype, **options):
        return self.auto_class.from_pretrained(name, dtype="float32", **options)


def scored(compute_rewards, step: dict, entries, completions, lengths, dataset, config):
    step["lengths"] += lengths
    return timed(step, "score", compute_rewards, entries, completions, lengths, dataset, config)


def counted_loss(torch, utils, settings: dict, step: dict, **options):
    """Its loss, which also notes the share of completions whose gradient the clip stops."""
    objective = utils.get_loss_objective(**options)

    def note_clips(module, arguments, named, loss) -> None:
        experience = named["experience"]
        mask, advantages = experience.action_mask, experience.advantages.squeeze(-1)
        log_ratio = (named["log_probs"].detach() - experience.log_probs_old) * mask
        ratio = (log_ratio.sum(-1) / mask.sum(-1).clamp_min(1)).exp()
        above = (ratio > 1 + settings["clip_high"]) & (advantages > 0)
        below = (ratio < 1 - settings["clip_low"]) & (advantages < 0)
        step["clips"].append((above | below).float().mean().item())

    objective.register_forward_hook(note_clips, with_kwargs=True)
    return objective


if __name__ == "__main__":
    main(sys.argv[1])
