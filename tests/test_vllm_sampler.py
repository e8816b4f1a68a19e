"""vLLM's engine beside our sampler and scorer, and in runs (docs/contributing.md says how to)."""

import re
import subprocess
import sys
import types

import pytest

pytest.importorskip("vllm")

import torch
import transformers
from vllm.distributed import cleanup_dist_env_and_memory

from rollout import completion_logprobs, generate
from support.errors import UserError
from tools import ROOT, SHAPE, command_line, good, metrics, random_policy, refused, timeless

SIZES = {"vocab_size": 123, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES |= {"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = {"sliding_window": 32, "query_pre_attn_scalar": 32}
CONFIGS = {
    "tied head": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "experts": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "no name for the head": transformers.Gemma2Config(**SIZES, **GEMMA),
    "class of transformers": transformers.Olmo2Config(**SIZES | {"hidden_size": 128}),
}
LONG = transformers.LlamaConfig(**SIZES | {"max_position_embeddings": 2**15})
PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14, 15, 16], [7, 8, 9, 20] * 12]
OPTIONS = {"eos_ids": [2, 5], "pad_id": 0, "temperature": 1.0, "cache_gb": None, "stops": None}


@pytest.fixture
def sampler():
    """A sampler without an engine, which the test's first call starts."""
    from support.extras.samplers import load_sampler

    flags = {"sampler": "vllm", "device": "cpu", "model": "random", "temperature": 1.0}
    yield load_sampler(types.SimpleNamespace(**flags))
    cleanup_dist_env_and_memory()  # process groups of this engine do not fit the next one


def model_of(config):
    """A random model whose distributions are far from uniform."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.config.architectures = [type(model).__name__]
    return shake(model, seed=1)


def shake(model, seed):
    """Change all weights as an update does."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return model


def uniforms(size=3, limit=24):
    return torch.rand(3, size, limit, generator=torch.Generator().manual_seed(3))


def largest_gap(model, samples, temperature=1.0):
    own, _ = completion_logprobs(model, samples, temperature, entropy="none")
    return float((own - samples.sampler_logprobs)[samples.completion_mask].abs().max())


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_engine_follows_the_weights(kind, sampler):
    """After every change of them. Its greedy completions are those of the plain sampler."""
    model = model_of(CONFIGS[kind])
    for seed, temperature in ((2, 1.0), (3, 0.7), (4, 1.0)):
        options = {**OPTIONS, "temperature": temperature}
        samples = sampler(model, PROMPTS, uniforms(), **options)
        assert largest_gap(model, samples, temperature) < 1e-3
        shake(model, seed)
    options = {**OPTIONS, "temperature": 0.0}
    greedy, plain = (
        each(model, PROMPTS, uniforms(size=1), **options) for each in (sampler, generate)
    )
    assert torch.equal(greedy.tokens, plain.tokens) and largest_gap(model, greedy) < 1e-3
    assert torch.equal(greedy.truncated, plain.truncated)


@torch.no_grad()
def test_seeds_ends_and_stops(sampler):
    """Any end token ends a completion, and so does a stop: here an even token after two others."""
    model, numbers = model_of(CONFIGS["tied head"]), uniforms()
    numbers[:, 2] = numbers[:, 0]
    samples, again = (sampler(model, PROMPTS, numbers, **OPTIONS) for _ in range(2))
    assert torch.equal(samples.tokens, again.tokens)
    first, second, third = samples.tokens.view(3, 3, -1).unbind(1)
    assert torch.equal(first, third) and not torch.equal(first, second)
    for row, length in enumerate(samples.lengths):
        *before, last = samples.completions[row, :length].tolist()
        assert {2, 5}.isdisjoint(before) and samples.truncated[row] == (last not in {2, 5})

    def third_is_even(tokens):
        return (tokens.shape[1] >= 3) & (tokens[:, -1] % 2 == 0)

    options = {**OPTIONS, "eos_ids": []}
    free = sampler(model, PROMPTS, numbers, **options)
    cut = sampler(model, PROMPTS, numbers, **options | {"stops": third_is_even})
    assert (free.lengths == 24).all() and largest_gap(model, cut) < 1e-3
    for row, length in enumerate(cut.lengths):
        *before, last = cut.completions[row, :length].tolist()
        assert [*before, last] == free.completions[row, :length].tolist()
        assert all(token % 2 for token in before[2:]) and cut.truncated[row] == (last % 2 == 1)


@torch.no_grad()
def test_a_completion_that_the_kv_cache_has_no_room_for_is_refused(sampler):
    """A token takes 1 kB, a block 128 kB. The engine starts with a part of so long a context."""
    model = model_of(LONG)
    with pytest.raises(UserError, match="--cache-gb: it holds 768 of 2048 tokens"):
        sampler(model, PROMPTS, uniforms(limit=2000), **OPTIONS | {"cache_gb": 1e-3})


# ---- runs of train.py

FLAGS = "--reward pay.py:even --sampler vllm"


@pytest.fixture
def run(place, tmp_path):
    """Starts a small run of a policy whose heads are large enough for vLLM on a CPU."""
    random_policy(place / "policy", transformers.Qwen3Config(**SHAPE | {"head_dim": 32}))

    def start(flags="", model="policy", ends=good):
        result = ends(tmp_path, f"--model {model} {FLAGS} {flags}")
        cleanup_dist_env_and_memory()
        return result

    return start


@pytest.mark.parametrize(
    "flags, most",
    [
        ("--tool pay.py:reply@= --lora-rank 2 --max-new-tokens 4", 1e-9),
        ("--dtype bfloat16 --old-logprobs sampler --cache-gb 0.1", 1e-3),
    ],
)
def test_vllm_samples_from_the_policy(flags, most, run, place):
    """In every step, also after updates, sampler_kl is rounding."""
    with place.joinpath("pay.py").open("a") as file:
        file.write("\ndef reply(text):\n    return '5'\n")
    assert all(row["sampler_kl"] < most for row in metrics(run(flags).folder))


def test_a_resumed_run_has_the_samples_of_an_unbroken_one(run):
    flags = "--temperature 0.7 --stop 12 --stop 7"
    whole = timeless(run(f"{flags} --steps 3").folder)
    run(f"{flags} --steps 2 --name parts")
    parts = timeless(run("--steps 3 --name parts --resume").folder.with_name("parts"))
    assert parts[2] == whole[2] and all(row["sampler_kl"] < 1e-9 for row in whole)


@pytest.mark.slow
def test_torchrun_starts_an_engine_in_each_process(run, tmp_path):
    """The samples are those of one process."""
    alone = metrics(run("--lr 1e-4").folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "train.py")]
    command += command_line(tmp_path / "two", f"--model policy {FLAGS} --lr 1e-4")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for row, own in zip(metrics(tmp_path / "two/run"), alone, strict=True):
        assert row["reward"] == own["reward"] and row["length_mean"] == own["length_mean"]
        assert row["sampler_kl"] < 1e-9


@pytest.mark.parametrize(
    "flags, model, sentence",
    [
        ("--temperature 0.001", "policy", "--temperature 0.001: vLLM would sample at 0.01"),
        ("", "tiny", "--sampler vllm: on a CPU it has no kernel for the built-in models"),
        ("", "models/tiny", "--sampler vllm: it cannot sample from this model: .*head_dim"),
        ("--cache-gb 1e-5", "policy", "--sampler vllm: it cannot .*: ValueError: No available mem"),
    ],
)
def test_what_vllm_cannot_do_is_one_sentence(flags, model, sentence, run):
    assert re.search(sentence, run(flags, model, ends=refused))
