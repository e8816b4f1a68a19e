"""The built-in policies: tiny models, pretrained once on demonstrations of a task."""

import contextlib
import hashlib
import itertools
import os
import random
import re
import tempfile
import time
from pathlib import Path

import tokenizers
import torch
import transformers

from support.console import duration, say
from support.tasks import Task, problems

BUILT_IN = {
    "tiny": {"model_type": "qwen3", "num_hidden_layers": 2},
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
WARM_STEPS = 560  # of supervised learning
WARM_ROWS = 24  # demonstrations per step
WARM_LR = 3e-3
SECONDS_A_LINE = 10  # between two lines of progress


def built_in_policy(task: Task, name: str, seed: int = 0) -> Path:
    """Return the folder of a character-level policy, pretraining it if it isn't in the cache."""
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = {word: i for i, word in enumerate([*special.values(), *task.alphabet])}
    config = transformers.AutoConfig.for_model(
        **BUILT_IN[name],
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        head_dim=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.06,
        pad_token_id=words["<pad>"],
        eos_token_id=words["<eos>"],
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": task.rope_theta},
    )
    shown = demonstrations(task, words, seed)

    # everything that the weights depend on is part of the name
    recipe = repr((config.to_dict(), shown, WARM_LR, torch.__version__, transformers.__version__))
    cache = cache_folder()
    folder = cache / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if folder.exists():
        return folder

    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as made:
        say(f"pretraining the built-in policy {name} (only once) into {folder}")
        model = tokenizers.models.BPE(words, merges=[], unk_token="<unk>")
        characters = tokenizers.Tokenizer(model)
        characters.decoder = tokenizers.decoders.Fuse()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters, **special)
        warm_start(config, tokenizer, shown, seed).save_pretrained(made)
        tokenizer.save_pretrained(made)
        # tempfile and safetensors create private files, but users may share a cache
        os.chmod(made, 0o755)
        for path in Path(made).iterdir():
            path.chmod(0o644)
        with contextlib.suppress(OSError):  # another run was faster
            os.rename(made, folder)  # atomic: a killed run leaves no half-written policy
    return folder


def cache_folder() -> Path:
    """Return the folder of the built-in policies."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named, "gspo")
    try:
        folder = Path.home() / ".cache" / "gspo"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # many containers have no home
        folder = Path(tempfile.gettempdir(), f"gspo-{os.getuid()}")
        say(f"no writable home directory: using {folder} ($XDG_CACHE_HOME changes it)")
    return folder


def demonstrations(task: Task, words: dict[str, int], seed: int = 0) -> list[dict]:
    """Return the training rows in the order of the steps. Prompts carry no loss."""
    rng, rows = random.Random(seed), []
    count = (task.warm_steps or WARM_STEPS) * WARM_ROWS
    for problem in itertools.islice(problems(task, seed=-1 - seed), count):
        prompt = problem["prompt"]
        text = prompt + task.demonstration(problem, rng)
        ids = [words[word] for word in (*text, "<eos>")]
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        # no loss on the calculator's replies: a policy that predicts them stops calling it
        for reply in re.finditer("(?<=</calc>)=-?[0-9]+", text):
            labels[reply.start() : reply.end()] = [-100] * len(reply[0])
        rows.append({"input_ids": ids, "labels": labels})

    # sort by length within windows of four steps, to save padding
    window = 4 * WARM_ROWS
    order = sorted(range(len(rows)), key=lambda i: (i // window, len(rows[i]["labels"])))
    return [rows[i] for i in order]


def warm_start(config, tokenizer, shown: list[dict], seed: int):
    """Pretrain a policy on demonstrations, so that its answers are well-formed but often wrong."""
    torch.manual_seed(seed)
    policy = transformers.AutoModelForCausalLM.from_config(config)
    adam = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    pad = transformers.DataCollatorForSeq2Seq(tokenizer)
    steps = len(shown) // WARM_ROWS
    start = said = time.monotonic()
    for step in range(steps):
        now = time.monotonic()
        if step > 0 and now - said > SECONDS_A_LINE:
            said = now
            left = (now - start) / step * (steps - step)
            say(f"pretraining: step {step}/{steps}, {duration(left)} left")
        batch = pad(shown[step * WARM_ROWS : (step + 1) * WARM_ROWS])
        rising = (step + 1) / 20  # over 20 steps
        falling = 2 - 2 * step / steps  # to 0, over the second half
        adam.param_groups[0]["lr"] = WARM_LR * min(1, rising, falling)
        adam.zero_grad()
        policy(batch["input_ids"], labels=batch["labels"], use_cache=False).loss.backward()
        adam.step()
    return policy
