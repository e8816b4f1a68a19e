"""Models and tokenizers: what is known before weights load, loading, and copies."""

import copy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.data import expecting, need


def load(kind: type, source: str, flag: str = "--model", **options):
    """A tokenizer, a config or a model, by a class of transformers; never from a pickle, nor with
    code of its own."""
    is_run = Path(source, "checkpoints").is_dir()
    need(not is_run, f"{flag} {source}: it is a run's folder; expected one of its checkpoints/")
    is_path = source.count("/") > 1 or source.startswith((".", "/", "~"))
    need(Path(source).exists() or not is_path, f"{flag} {source}: there is no such folder")
    with expecting(f"{flag} {source}: expected a folder or hub name of a causal language model"):
        return kind.from_pretrained(source, trust_remote_code=False, **options)


def inspect_model(source: str, flag: str = "--model"):
    """Its tokenizer and config, before any weights; UserError for no causal language model."""
    config = load(AutoConfig, source, flag)
    tokenizer = load(AutoTokenizer, source, flag)
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    found = config.architectures or [config.model_type]
    causal = known.intersection(found)
    need(causal, f"{flag} {source}: expected a causal language model, found {', '.join(found)}")
    ends = tokenizer.eos_token and len(tokenizer) > 1
    need(ends, f"{flag} {source}: expected a tokenizer with an end token")
    return tokenizer, config


def context_of(config) -> int:
    """Tokens of a text, prompt and completion, up to which it means the same in every pass.

    With rope_type longrope all frequencies change when the longest text of a pass has more than
    the original context; Doge picks a number of keys, padding among them. 2^20 at most."""
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "keep_window_size")]
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # one, or one for each kind of layers
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limits.append(rope["original_max_position_embeddings"])
    return min(limit for limit in (*limits, 2**20) if limit and limit > 0)


def has_experts(config) -> bool:
    """Whether it speaks of any: a dense model that shares its configuration with a mixture does."""
    return "expert" in config.to_json_string()


def load_model(source: str, device: str):
    """In float32, and without dropout: in sampling, scoring and training. UserError where weights
    are missing or have other shapes: transformers would go on with random ones."""
    model, report = load(
        AutoModelForCausalLM,
        source,
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # it is the report that we judge by
    )
    wrong = sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])])
    found = f"{len(wrong)} are missing or have other shapes, {', '.join(wrong[:3])} among them"
    need(not wrong, f"--model {source}: expected weights that fit its config.json; {found}")
    for part in (each for each in model.modules() if isinstance(each, PreTrainedModel)):
        if part.config._experts_implementation == "grouped_mm":
            part.config._experts_implementation = "grouped_in_autocast"
    return model.to(device).eval()


def grouped_in_autocast(experts, hidden, chosen, weights):
    """transformers' product of experts, under autocast in its dtype as any other linear map: alone
    it would take float32 weights as they are, for which no GPU has a fast kernel."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        named = list(experts.named_parameters(recurse=False))
        experts = copy.copy(experts)  # the same module, which sees its weights in another dtype
        experts._parameters = {name: weight.to(dtype) for name, weight in named}
    return grouped_mm_experts_forward(experts, hidden, chosen, weights)


ALL_EXPERTS_FUNCTIONS.register("grouped_in_autocast", grouped_in_autocast)


def end_and_pad_ids(model, tokenizer) -> dict:
    """eos_ids, the tokenizer's and the generation config's; pad_id, the pad token or an end."""
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    eos_ids = sorted({*ends, tokenizer.eos_token_id} - {None})
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = eos_ids[0]
    return {"eos_ids": eos_ids, "pad_id": pad_id}


def frozen_copy(model, dtype: torch.dtype):
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    for parameter in copied.parameters():  # not buffers: bf16 rotary frequencies blur positions
        parameter.data = parameter.data.to(dtype)
    return copied


def refresh(copied, model) -> None:
    """A frozen copy takes the model's weights, in place: captured graphs stay valid."""
    copied.load_state_dict(model.state_dict())


def critic_of(policy) -> torch.nn.Module:
    """A copy of the policy with a value that is 0 everywhere: weights and bias."""
    critic = copy.deepcopy(policy)
    width = policy.config.get_text_config().hidden_size
    critic.value = torch.nn.Parameter(torch.zeros(width + 1, device=policy.device))
    return critic
