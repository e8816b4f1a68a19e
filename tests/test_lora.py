"""The specification of LoRA in train.py: the adapter, what is merged, checkpoints, flags."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import bench_architectures
import rollout
import train
from tools import BASE, digests, good, metrics, newest, random_policy, refused, timeless

LORA = f"{BASE} --lora-rank 4"


@pytest.fixture(autouse=True)
def stand_there(place):
    """Every run here stands in a folder of its own."""


def wrapped(models, rank=4, alpha=8.0, dtype=torch.float32, targets=None):
    """A tiny policy with adapters that already do something."""
    policy = rollout.load_model(models / "tiny")
    config = train.Config(lora_rank=rank, lora_alpha=alpha, lora_targets=targets)
    train.add_adapters(config, policy, dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 17)[None]).logits


# ------------------------------------------------------------------------------ the adapter


def test_training_begins_at_the_model_itself(models):
    """B is 0: the adapter changes no log-prob, to the bit."""
    policy = rollout.load_model(models / "tiny")
    before = logits(policy)
    train.add_adapters(train.Config(lora_rank=4, lora_alpha=8.0), policy, torch.float32)
    assert torch.equal(logits(policy), before)


def test_at_full_rank_the_first_step_is_that_of_all_weights():
    """With A the identity and alpha = R the adapter is B, a matrix added to W: its gradient is W's,
    and AdamW's first step the same."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(32, 6), torch.randn(32, 5)
    full = torch.nn.Linear(6, 5, bias=False)
    frozen = torch.nn.Linear(6, 5, bias=False)
    frozen.load_state_dict(full.state_dict())
    adapter = train.LoraLinear(frozen, rank=6, alpha=6.0, dtype=torch.float32)
    adapter.lora_A.data.copy_(torch.eye(6))

    for layer, parameters in ((full, [full.weight]), (adapter, [adapter.lora_A, adapter.lora_B])):
        adam = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
        (layer(inputs) - targets).square().mean().backward()
        adam.step()
    torch.testing.assert_close(adapter.lora_B.grad, full.weight.grad)
    torch.testing.assert_close(adapter.merged(), full.weight)


def test_merged_weights_have_the_log_probs_of_the_adapter(models):
    policy = wrapped(models)
    plain = rollout.load_model(models / "tiny")
    start = logits(plain)
    train.refresh(plain, policy)
    torch.testing.assert_close(logits(plain), logits(policy), atol=1e-4, rtol=1e-4)
    assert (logits(plain) - start).abs().max() > 0.05  # it does something


@pytest.mark.parametrize(
    "kind",
    [
        "mamba",  # multiplies by a weight itself
        "deepseek_v32",  # and so does latent attention
        "llama4_text",  # a router that is derived of a linear layer, and returns more
        "zamba",  # two layers share their weights
        "falcon",  # its linear layers are a class of its own
    ],
)
def test_layers_that_are_more_than_linear(kind):
    """They score with their adapters what the merged model scores; without them, as before."""
    policy = bench_architectures.build(kind)
    merged = rollout.sampler_copy(policy, torch.float32)
    samples = rollout.generate(
        merged, [[5, 6, 7], [8]], group_size=2, max_new_tokens=6, eos_ids=[2], pad_id=0
    )
    start, _ = rollout.completion_logprobs(merged, samples, temperature=1.0)

    train.add_adapters(train.Config(lora_rank=2, lora_alpha=4.0), policy, torch.float32)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if name.endswith("lora_B"):
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    train.refresh(merged, policy)
    scored, _ = rollout.completion_logprobs(policy, samples, temperature=1.0)
    expected, _ = rollout.completion_logprobs(merged, samples, temperature=1.0)
    torch.testing.assert_close(scored, expected, atol=1e-4, rtol=1e-4)
    assert (scored - start).abs().max() > 0.05  # they do something
    with train.adapters_off(policy):
        off, _ = rollout.completion_logprobs(policy, samples, temperature=1.0)
    torch.testing.assert_close(off, start, atol=0, rtol=0)

    scored.sum().backward()
    trained = [parameter for parameter in policy.parameters() if parameter.grad is not None]
    assert trained and all(parameter.requires_grad for parameter in trained)


def test_adapters_that_layers_share_are_saved_and_resumed(models, tmp_path):
    config = bench_architectures.build("zamba").config
    config.update({"vocab_size": 18, "eos_token_id": 1, "bos_token_id": 1})
    folder = random_policy(tmp_path / "zamba", config)
    flags = f"--model {folder} --reward pay.py:even --lora-rank 2 --lr 1e-2 --algo ppo"
    whole = good(tmp_path / "whole", f"{flags} --steps 3").folder
    good(tmp_path / "parts", f"{flags} --steps 1")
    parts = good(tmp_path / "parts", "--resume --name run --steps 3", small=False).folder
    assert digests(whole) == digests(parts)
    adapter = load_file(newest(whole) / "adapter/adapter_model.safetensors")
    assert len({tensor.sum().item() for tensor in adapter.values()}) < len(adapter)


def test_the_reference_is_the_model_without_its_adapter(models):
    policy = wrapped(models)
    with train.adapters_off(policy):
        torch.testing.assert_close(
            logits(policy), logits(rollout.load_model(models / "tiny")), atol=0, rtol=0
        )
    assert not torch.equal(logits(policy), logits(rollout.load_model(models / "tiny")))


def test_only_adapters_are_trained_and_frozen_weights_are_small(models):
    policy = wrapped(models, dtype=torch.bfloat16)
    for name, parameter in policy.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        linear = "_proj" in name and "lora_" not in name
        assert parameter.dtype == (torch.bfloat16 if linear else torch.float32), name


def test_targets_choose_the_layers(models):
    policy = wrapped(models, targets="q_proj, v_proj")
    names = {name.split(".")[-2] for name, _ in policy.named_parameters() if "lora_A" in name}
    assert names == {"q_proj", "v_proj"}


# ------------------------------------------------------------------------------ runs


def test_a_checkpoint_holds_the_merged_model_and_the_adapter(tmp_path, seen):
    """The model loads anywhere; base + adapter from the files is the same model."""
    folder = newest(good(tmp_path, f"{LORA} --lora-alpha 8 --lr 1e-2 --steps 3").folder)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(merged), logits(seen.run.policy), atol=1e-4, rtol=1e-4)

    settings = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8.0, "LORA")
    adapter = load_file(folder / "adapter/adapter_model.safetensors")
    base = load_file("models/tiny/model.safetensors")
    ours = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    down, up = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    expected = base[f"{name}.weight"] + 8.0 / 4 * up @ down
    torch.testing.assert_close(ours[f"{name}.weight"], expected)
    assert not torch.equal(ours[f"{name}.weight"], base[f"{name}.weight"])


@pytest.mark.parametrize("flags", ["", "--algo grpo --kl-coef 0.1", "--algo ppo"])
def test_resuming_changes_nothing(flags, tmp_path):
    """To the bit: the frozen weights are the start model's, not the merged ones."""
    good(tmp_path / "whole", f"{LORA} {flags} --steps 3 --save-every 1")
    good(tmp_path / "parts", f"{LORA} {flags} --steps 2 --save-every 1")
    good(tmp_path / "parts", "--resume --name run --steps 3", small=False)
    whole, parts = tmp_path / "whole/run", tmp_path / "parts/run"
    assert digests(whole) == digests(parts)
    assert timeless(whole)[-1] == timeless(parts)[-1]  # the last of the parts was evaluated, too


def test_the_sampler_is_merged_and_follows(tmp_path, seen):
    good(tmp_path, f"{LORA} --lr 1e-2 --steps 2")
    names = [name for name, _ in seen.run.old_policy.named_parameters()]
    assert not any("lora" in name for name in names)
    assert torch.equal(seen.run.old_policy.lm_head.weight, seen.run.policy.lm_head.weight)


def test_the_default_learning_rate_is_ten_times_the_full_one(tmp_path):
    full = train.resolve({"model": "models/tiny"})
    lora = train.resolve({"model": "models/tiny", "lora_rank": 4})
    assert lora.lr == 10 * full.lr and lora.lora_alpha == 8.0


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--lora-alpha 8", ["--lora-alpha", "--lora-rank"]),
        ("--lora-targets q_proj", ["--lora-targets", "--lora-rank"]),
        ("--lora-rank 4 --kl-coef 0.1 --ref-every 2", ["--ref-every", "--lora-rank"]),
    ],
)
def test_flags_that_do_nothing_are_refused(flags, words, tmp_path):
    sentence = refused(tmp_path / "runs", f"{BASE} {flags}")
    assert all(word in sentence for word in words)


def test_a_target_that_is_not_there_is_one_sentence(tmp_path):
    sentence = refused(tmp_path / "runs", f"{BASE} --lora-rank 4 --lora-targets query")
    assert "--lora-targets query" in sentence and "q_proj" in sentence
    assert not (tmp_path / "runs").exists()


def test_buffers_and_layers_named_linear_are_in_the_merged_model():
    """What a router's correction is in real models, and a module that is called as ours inside."""

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.register_buffer("correction", torch.ones(3))

    model = Odd()
    assert dict(train.merged_weights(model)).keys() == model.state_dict().keys()


@pytest.mark.parametrize("flag", ["--lora-rank 8", "--lora-alpha 3", "--lora-targets q_proj"])
def test_a_resumed_run_keeps_its_adapter(flag, tmp_path):
    """Another rank, scale or layers would be another model than the one that was trained."""
    good(tmp_path, f"{LORA} --steps 1")
    sentence = refused(tmp_path, f"--resume --name run --steps 2 {flag}", small=False)
    assert flag.split()[0] in sentence


def test_a_fully_trained_run_is_not_resumed_with_an_adapter(tmp_path):
    good(tmp_path, f"{BASE} --steps 1")
    sentence = refused(tmp_path, "--resume --name run --steps 2 --lora-rank 4", small=False)
    assert "--lora-rank 4" in sentence


def test_targets_train_in_bfloat16(tmp_path):
    good(tmp_path, f"{LORA} --lora-targets q_proj --dtype bfloat16 --steps 1")


def test_a_sampler_that_becomes_stale_begins_with_the_trained_weights(tmp_path, seen):
    """The copy is made before the adapter is loaded: it must not stay the start model."""
    good(tmp_path, f"{LORA} --lr 1e-2 --steps 3")
    good(tmp_path, "--resume --name run --steps 4 --stale-steps 4", small=False)
    [rows] = [metrics(tmp_path / "run")]
    assert abs(rows[-1]["sampler_kl"]) < 1e-6


def test_a_model_without_linear_layers_is_refused(models, tmp_path):
    config = transformers.GPT2Config(
        vocab_size=18,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=512,
        eos_token_id=1,
        pad_token_id=0,
    )
    random_policy(models / "conv1d", config)
    flags = "--model models/conv1d --reward pay.py:even --lora-rank 4"
    sentence = refused(tmp_path / "runs", flags)
    assert "--lora-rank" in sentence and "gpt2" in sentence
