"""Models: their heads, their copies, and the memory that copies take while they are made."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
import transformers

import train
from bench_architectures import build
from bench_memory import SHAPES
from counting import Counting
from rollout import check_scorer
from support.models import (
    body_of,
    context_of,
    end_and_pad_ids,
    frozen_copy,
    load_model,
    logits_of,
    refresh,
)
from tools import character_tokenizer

SCALES = {
    "cohere": dict(logit_scale=0.25),
    "falcon_h1": dict(lm_head_multiplier=0.25),
    "granite": dict(logits_scaling=8.0),
    "gemma2": dict(final_logit_softcapping=2.0),
    "phi": {},  # its head has a bias
}


@pytest.mark.parametrize("kind", SCALES)
def test_the_head_scales_and_caps_as_the_model_does(kind):
    """In float32, of a copy in bf16 under autocast, too."""
    model = build(kind, **SCALES[kind])
    ids, seen = torch.arange(5, 12)[None], []
    hook = body_of(model).register_forward_hook(lambda *given: seen.append(given[2][0][0]))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[0]
        hook.remove()
        torch.testing.assert_close(logits_of(model, seen[0]), expected)
        rounded = frozen_copy(frozen_copy(model, torch.bfloat16), torch.float32)
        hidden = seen[0].to(torch.bfloat16)
        expected = logits_of(rounded, hidden.float())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(logits_of(frozen_copy(model, torch.bfloat16), hidden), expected)


@pytest.mark.parametrize("kind", ["qwen3", "zamba", "glm4_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_has_the_bits_and_ties_of_a_cast_model(kind, dtype):
    """And stays in its place when it is refreshed."""
    model = build(kind, tie_word_embeddings=True)
    expected = copy.deepcopy(model)
    for parameter in expected.parameters():
        parameter.data = parameter.data.to(dtype)
    made = frozen_copy(model, dtype)
    assert made.get_output_embeddings().weight is made.get_input_embeddings().weight
    assert not any(parameter.requires_grad for parameter in made.parameters())
    places = {parameter.data_ptr() for parameter in model.parameters()}
    assert not places & {parameter.data_ptr() for parameter in made.parameters()}
    for own in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(made, own)(), getattr(expected, own)(), strict=True)
        for (name, value), (its_name, its_value) in pairs:
            assert name == its_name and torch.equal(value, its_value), name
            assert value.dtype == its_value.dtype, name
    places = [parameter.data_ptr() for parameter in made.parameters()]
    for parameter in model.parameters():
        parameter.data += 1
    refresh(made, model)
    assert places == [parameter.data_ptr() for parameter in made.parameters()]
    for cast, parameter in zip(made.parameters(), model.parameters(), strict=True):
        assert torch.equal(cast, parameter.to(dtype))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_no_float32_copy_is_ever_made():
    """In bytes a parameter: 4 for the policy, 2 for a copy in bf16, adapters layer by layer."""
    from support.extras.lora import add_adapters

    config = transformers.Qwen3Config(**SHAPES["tiny"] | {"num_hidden_layers": 8})
    lora = SimpleNamespace(seed=0, lora_rank=1, lora_alpha=2.0)
    with Counting() as counting:
        policy = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        count, copies = policy.num_parameters(), []
        peak = counting.peak_of(lambda: copies.append(frozen_copy(policy, torch.bfloat16)))
        assert peak == pytest.approx(6 * count, rel=0.01)
        assert counting.peak_of(lambda: refresh(copies[0], policy)) == pytest.approx(peak, rel=0.01)
        peak = counting.peak_of(lambda: add_adapters(policy, lora, torch.bfloat16))
        assert peak < 6.3 * count and counting.bytes_now < 4.6 * count
        before = counting.bytes_now
        assert counting.peak_of(lambda: refresh(copies[0], policy)) - before < 0.5 * count


def test_a_teacher_is_loaded_in_its_final_dtype(models):
    """But for buffers: in bf16 rotary frequencies would blur positions."""
    teacher = load_model(str(models / "tiny"), "cpu", torch.bfloat16)
    exact = load_model(str(models / "tiny"), "cpu")
    assert {parameter.dtype for parameter in teacher.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in exact.parameters()} == {torch.float32}
    assert torch.equal(teacher.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)
    assert not teacher.training


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_mixtures_saved_with_output_router_logits_can_be_sampled_and_scored(kind, tmp_path):
    """TRL's SFT writes it into every mixture. forward() would then fail on a mask of a cache."""
    build(kind, output_router_logits=True).save_pretrained(tmp_path)
    check_scorer(load_model(str(tmp_path), "cpu"), [[5, 6, 7], [5, 6, 7, 8]], 0)


@pytest.mark.parametrize(
    "template, ends, expected",
    [
        (None, [1], [1]),
        ("{{ messages[1].content }};#", [1], [1]),  # no special token
        ("{{ messages[1].content }};<eos>", None, [1]),
        ("{{ messages[1].content }};<unk>\n<eos>", [1, 5], [1, 5]),
        ("<pad>{{ messages[1].content }};<unk>\n<pad>", [1], [1, 2]),
    ],
)
def test_completions_end_where_the_template_closes_a_turn(template, ends, expected, models, capsys):
    """Also for a base model, whose own end token is another one."""
    model, tokenizer = load_model(str(models / "tiny"), "cpu"), character_tokenizer()
    tokenizer.chat_template, model.generation_config.eos_token_id = template, ends
    assert end_and_pad_ids(model, tokenizer)["eos_ids"] == expected
    warned = "warning: --model: <unk> closes a turn" in capsys.readouterr().out
    assert warned == (expected == [1, 2])


def test_padding_beyond_the_embedding_is_an_end_token(models):
    """A [PAD] may have been added without resizing the model. Masks tell padding from ends."""
    model, tokenizer = load_model(str(models / "tiny"), "cpu"), character_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 18 == model.config.vocab_size
    assert end_and_pad_ids(model, tokenizer) == {"eos_ids": [1], "pad_id": 1}


def test_a_context_is_that_in_which_a_text_means_the_same():
    """With longrope frequencies change beyond the original context, in whichever kind of layer."""
    long = dict(rope_type="longrope", original_max_position_embeddings=64)
    yarn = long | dict(rope_type="yarn")
    for size, ropes, expected in (
        (None, {}, 2**20),
        (-1, {}, 2**20),
        (128, {}, 128),
        (128, long, 64),
        (128, yarn, 128),
        (128, dict(full=long, local=yarn), 64),
    ):
        text = SimpleNamespace(max_position_embeddings=size, rope_parameters=ropes)
        assert context_of(SimpleNamespace(get_text_config=lambda text=text: text)) == expected


def test_a_gpu_is_hidden_and_attention_is_never_that_of_cudnn(models):
    """So that tests pass on any machine. cuDNN's has given NaN gradients and wrong results."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_model(str(models / "tiny"), "cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("native, expected", [(True, "bfloat16"), (False, "float32")])
def test_bfloat16_is_the_default_where_a_gpu_computes_in_it(native, expected, monkeypatch):
    """A T4 only emulates it, and the built-in policy would save nothing."""

    def supported(including_emulation=True):
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    of_anything = ["--device", "cuda", "--model", "elsewhere", "--task", "sums"]
    one_update = ["--completions-per-update", "256"]
    for flags in (["--algo", "grpo"], one_update, ["--clip-low", "0.2"]):
        assert train.parse_flags(of_anything + flags).dtype == expected
    for flags in ([], ["--algo", "luspo"], [*one_update, "--epochs", "2"]):  # docs/rounding.md
        assert train.parse_flags(of_anything + flags).dtype == "float32"
    assert train.parse_flags(["--device", "cuda", "--algo", "grpo"]).dtype == "float32"
