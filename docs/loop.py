"""GSPO on one page (arXiv 2507.18071): snapshot, sample, advantages, four updates.

    python docs/loop.py           # a built-in policy on a CPU: the reward rises within minutes
    python docs/loop.py MODEL     # a chat model, for instance Qwen/Qwen3-0.6B

`problem` is your data, `reward` your verifier. If an update does not fit into memory, split its
rows and pass denom=len(rows): the gradients add up. Phases are numbered as in train.py.
"""

import copy
import random
import re
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, sys.path[0] + "/..")
from gspo import group_advantages, gspo_loss  # noqa: E402

STEPS, PROMPTS, GROUP_SIZE, UPDATES, TEMPERATURE = 40, 16, 8, 4, 1.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(rng):
    """Return a prompt and its answer."""
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return {"prompt": f"What is {a} * {b}? Answer with just the number.", "answer": str(a * b)}


def reward(completion, row):
    """Return 1 if the last number in the completion is the answer, else 0."""
    return float(re.findall(r"-?\d+", completion)[-1:] == [row["answer"]])


if len(sys.argv) > 1:
    MODEL, LR = sys.argv[1], 1e-5
else:
    from support.pretrain import built_in_policy
    from support.tasks import TASKS

    MODEL, LR = built_in_policy(TASKS["arithmetic"], "tiny"), 2e-4
    problem = TASKS["arithmetic"].problem  # the completion of 7+5*3= is 7+5=2;2*3=6#6

rng = random.Random(0)
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # the masks tell them apart
policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(DEVICE)  # no dropout
old_policy = copy.deepcopy(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
end_ids = torch.tensor(policy.generation_config.eos_token_id or tokenizer.eos_token_id).to(DEVICE)
sampling = {"do_sample": True, "temperature": TEMPERATURE, "max_new_tokens": 48}
sampling |= {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}  # a filtered sampler is not pi


def completion_logprobs(model, tokens, seen, width):
    """Return log pi of the last `width` tokens, (N, width). seen: 0 where tokens are padding."""
    where = {"attention_mask": seen, "position_ids": (seen.cumsum(1) - 1).clamp(min=0)}
    logits = model(tokens, **where, logits_to_keep=width + 1).logits[:, :-1]  # one position earlier
    logprobs = (logits.float() / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(2, tokens[:, -width:, None])[:, :, 0]


for step in range(1, STEPS + 1):
    old_policy.load_state_dict(policy.state_dict())  # 1. snapshot
    problems = [row for row in [problem(rng) for _ in range(PROMPTS)] for _ in range(GROUP_SIZE)]
    prompts = [row["prompt"] for row in problems]
    chat = bool(tokenizer.chat_template)  # it writes the special tokens itself
    if chat:
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        prompts = tokenizer.apply_chat_template(turns, **options)
    read = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=not chat)
    tokens = old_policy.generate(**read.to(DEVICE), **sampling)  # 2. sample, and rewards
    width = tokens.shape[1] - read.input_ids.shape[1]
    ended = torch.isin(tokens[:, -width:], end_ids).long()
    mask = ended.cumsum(1) - ended == 0  # up to and including the first end token
    seen = torch.cat([read.attention_mask, mask], dim=1)
    written = zip(tokens[:, -width:], ended.cumsum(1) == 0)  # without end tokens and padding
    texts = [tokenizer.decode(ids[own]) for ids, own in written]  # <think> may be a special token
    rewards = torch.tensor([*map(reward, texts, problems)], device=DEVICE)
    with torch.no_grad():  # 3. score
        old_logprobs = completion_logprobs(old_policy, tokens, seen, width)
    advantages = group_advantages(rewards, GROUP_SIZE)  # 4. advantages, eq. 6
    for rows in torch.randperm(len(tokens)).chunk(UPDATES):  # 5. updates, eq. 5
        logprobs = completion_logprobs(policy, tokens[rows], seen[rows], width)
        loss, metrics = gspo_loss(logprobs, old_logprobs[rows], advantages[rows], mask[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    measured = f"reward {rewards.mean():.2f} | clipped {metrics['clip_fraction']:.0%}"  # 6. report
    print(f"step {step} | {measured} | {prompts[0]!r} {texts[0]!r}", flush=True)
