"""Memory of training, counted for models of any size.

    python tests/bench/bench_memory.py                  # the table of docs/memory.md: minutes
    python tests/bench/bench_memory.py --write          # the same, written into the page

The count is the bytes of all floating-point tensors alive at a time (counting.py) while our own
functions load, sample, score and train with fused attention, as on a GPU. CUDA itself and its
allocator's fragmentation are not counted; ROOM allows for them."""

from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import common
import gspo
import rollout
import train
from counting import Counting
from support.models import Models, make_optimizer, refresh

GB = 1e9
CARDS = (24, 40, 80)  # GB
ROOM = 1.5  # GB of a card: 1 for CUDA and its libraries, 0.5 that the allocator cannot use
CACHE_GB = 2  # KV caches, in the table. With less, few completions are sampled at a time
LORA_RANK = 16
TOKENS = 4096  # of a micro-batch, padding included
PROMPT, LONGEST = 200, 1024  # tokens

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NAMES += ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
SIZES = {  # of Qwen3, in the order of NAMES
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "4B": (2560, 9728, 36, 32, 8, 128, 151936, True),
    "8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
    "tiny": (64, 128, 2, 4, 2, 16, 18, True),
}
SHAPES = {name: dict(zip(NAMES, sizes)) for name, sizes in SIZES.items()}
PUBLISHED = [name for name in SHAPES if name.endswith("B")]


class Memory(NamedTuple):
    """Bytes on the device. The last four are peaks, which include everything alive."""

    parameters: int  # their number
    weights: int  # policy and sampler
    moments: int  # AdamW's
    gradients: int
    loading: int  # a float32 policy, its sampler's copy, then adapters
    refreshing: int
    sampling: int
    updating: int  # a later micro-batch: gradients and moments exist

    @property
    def peak(self) -> int:
        return max(self.loading, self.refreshing, self.sampling, self.updating)


def count_memory(
    shape: dict, rank: int = 0, checkpointing: bool = False, dtype: str = "bfloat16"
) -> Memory:
    """Peak memory of each phase of a run. rank: of adapters, 0 to train all weights."""
    flags = f"--device cpu --dtype {dtype} --lora-rank {rank} --lr 1e-4"  # below it, bfloat16 warns
    flags += " --gradient-checkpointing" if checkpointing else ""
    config = train.parse_flags(flags.split())
    with Counting() as counting:
        policy = AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.float32).eval()
        counting.bytes_peak = counting.bytes_now  # without the head that is then tied
        models = Models(config, gspo.ALGOS["gspo"], policy)
        sampler, loading = models.sampling_model, counting.bytes_peak
        optimizer, weights = make_optimizer(config, models), counting.bytes_now
        refreshing = counting.peak_of(lambda: refresh(sampler, policy))
        completions = full_micro_batch()
        accumulate(policy, completions, dtype)
        updating = counting.peak_of(lambda: accumulate(policy, completions, dtype))

        before = counting.bytes_now
        optimizer.step()
        moments = counting.bytes_now - before
        optimizer.zero_grad()
        return Memory(
            parameters=sampler.num_parameters(),
            weights=weights,
            moments=moments,
            gradients=before + moments - counting.bytes_now,
            loading=loading,
            refreshing=refreshing + moments,
            sampling=counting.peak_of(lambda: sample(sampler)),
            updating=updating + moments,
        )


def count_deep(shape: dict, rank: int, dtype: str = "bfloat16") -> Memory:
    """count_memory, extrapolated from two shallow models in seconds: all layers are alike. Within
    0.1 GB of the full count for the 0.6B model. Not valid with gradient checkpointing, where a deep
    model peaks at another moment."""
    shallow = [shape | {"num_hidden_layers": layers} for layers in (4, 6)]
    few, many = (count_memory(each, rank, dtype=dtype) for each in shallow)
    more = (shape["num_hidden_layers"] - 4) / 2
    return Memory(*(four + more * (six - four) for four, six in zip(few, many)))


def full_micro_batch() -> rollout.Rollout:
    """As many full rows as fit. Ragged rows, padding included, take no more."""
    rows = torch.arange(TOKENS // LONGEST)
    lengths = torch.full_like(rows, LONGEST - PROMPT)
    tokens = (2 + rows)[:, None].repeat(1, LONGEST - PROMPT)
    prompts, zeros = [[5] * PROMPT for _ in rows], torch.zeros(tokens.shape)
    return rollout.Rollout.of(prompts, tokens, zeros, lengths, lengths > 0, pad_id=0)


def accumulate(policy, completions: rollout.Rollout, dtype: str) -> None:
    """Accumulate the gradient of GSPO's loss."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        logprobs, _ = rollout.completion_logprobs(policy, completions, 1.0, entropy="value")
    mask, advantages = completions.completion_mask, torch.zeros(len(logprobs))
    loss, _ = gspo.gspo_loss(logprobs, completions.sampler_logprobs, advantages, mask)
    loss.backward()


def sample(sampler) -> None:
    """Fill the KV caches at once: all but the last few tokens are read as prompts. Sampled tokens
    are all 0, which is no end token."""
    config, new = sampler.config, 4
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    size = sampler.dtype.itemsize * numbers * (PROMPT + LONGEST)
    many = max(1, int(CACHE_GB * GB / size))
    rest = [2] * (PROMPT + LONGEST - new - 2)
    prompts = [[2 + i % 8, 2 + i // 8, *rest] for i in range(many)]
    uniforms = torch.zeros(many, 1, new)
    rollout.generate(sampler, prompts, uniforms, cache_gb=CACHE_GB, eos_ids=[1], pad_id=1)


LESS = "--gradient-checkpointing"  # saves memory
HEAD = ["", "trained", "weights", "AdamW", "gradients", "loading", "refreshing"]
HEAD += [f"sampling, {CACHE_GB} GB of KV cache", "updating", f"updating, `{LESS}`"]
HEAD += ["a reference (KL) adds", "a critic (PPO) adds", *[f"{card} GB" for card in CARDS]]


def memory_table(names: list[str]) -> str:
    """A Markdown table in GB, and on which cards a run fits, with which flag."""
    lines = [HEAD]
    for name, dtype in [("0.6B", "float32"), *((name, "bfloat16") for name in names)]:
        for trained, rank in (("all", 0), ("LoRA", LORA_RANK)):
            memory = count_deep(SHAPES[name], rank, dtype)
            less = count_memory(SHAPES[name], rank, checkpointing=True, dtype=dtype)
            numbers = [*memory[1:], less.updating]
            # a frozen copy, and float32 weights, gradients and AdamW's moments
            size = getattr(torch, dtype).itemsize
            numbers += [size * memory.parameters, 16 * memory.parameters]
            cells = [f"{number / GB:.1f}" for number in numbers]
            for card in CARDS:
                ways = ((memory, "yes"), (less, f"with `{LESS}`"))
                room = (card - ROOM) * GB
                cells.append(next((way for each, way in ways if each.peak <= room), "no"))
            lines.append([f"Qwen3-{name}, {dtype}", trained, *cells])
    return common.markdown(*lines)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/memory.md")
    given = parser.parse_args()
    table = memory_table(PUBLISHED)
    print(table)
    if given.write:
        common.put("docs/memory.md", "memory", table)


if __name__ == "__main__":
    main()
