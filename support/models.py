"""Models and tokenizers: load them, copy them, and find their parts."""

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.user import expecting, need

# ---- loading -------------------------------------------------------------------------------------


def load(kind: type, source: str, flag: str = "--model", **options):
    """Load a tokenizer, a config or a model by a class of transformers. Never from a pickle, and
    never with code from the model's folder."""
    is_run = Path(source, "checkpoints").is_dir()
    need(not is_run, f"{flag} {source}: it is a run's folder; expected one of its checkpoints/")
    is_path = source.count("/") > 1 or source.startswith((".", "/", "~"))
    need(Path(source).exists() or not is_path, f"{flag} {source}: there is no such folder")
    with expecting(f"{flag} {source}: expected a folder or hub name of a causal language model"):
        return kind.from_pretrained(source, trust_remote_code=False, **options)


def inspect_model(source: str, flag: str = "--model"):
    """Return its tokenizer and config before any weights load. UserError unless it is a causal
    language model."""
    config = load(AutoConfig, source, flag)
    tokenizer = load(AutoTokenizer, source, flag)
    found = config.architectures or [config.model_type]
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()).intersection(found)
    need(causal, f"{flag} {source}: expected a causal language model, found {', '.join(found)}")
    ends = tokenizer.eos_token and len(tokenizer) > 1
    need(ends, f"{flag} {source}: expected a tokenizer with an end token")
    return tokenizer, config


def context_of(config) -> int:
    """Return the number of tokens, prompt and completion, that the model reads; 2^20 at most.

    With rope_type longrope all frequencies change once a text is longer than the original context,
    so the context ends there. Doge's layers keep a fixed number of keys, padding included."""
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "keep_window_size")]
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # one, or one for each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limits.append(rope["original_max_position_embeddings"])
    return min(limit for limit in (*limits, 2**20) if limit and limit > 0)


def has_experts(config) -> bool:
    """Tell whether the config mentions experts. A dense model that shares its configuration class
    with a mixture does, too."""
    return "expert" in config.to_json_string()


def load_model(source: str, device: str):
    """Load a model in float32 and in evaluation mode: sampling, scoring and training all run
    without dropout. UserError where weights are missing or have other shapes: transformers would
    continue with random ones."""
    model, report = load(
        AutoModelForCausalLM,
        source,
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the report lists them
    )
    wrong = sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])])
    found = f"{len(wrong)} are missing or have other shapes, {', '.join(wrong[:3])} among them"
    need(not wrong, f"--model {source}: expected weights that fit its config.json; {found}")
    return model.to(device).eval()


def grouped_in_autocast(experts, hidden, chosen, weights):
    """Run transformers' grouped product of experts in autocast's dtype, like any other linear map.
    Autocast does not know it: it would run in float32, for which no GPU has a fast kernel."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        named = list(experts.named_parameters(recurse=False))
        experts = copy.copy(experts)  # the same module, with its weights in another dtype
        experts._parameters = {name: weight.to(dtype) for name, weight in named}
    return grouped_mm_experts_forward(experts, hidden, chosen, weights)


ALL_EXPERTS_FUNCTIONS.register("grouped_mm", grouped_in_autocast)


def end_and_pad_ids(model, tokenizer) -> dict:
    """Return eos_ids, those of the tokenizer and of the generation config, and pad_id."""
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    eos_ids = sorted({*ends, tokenizer.eos_token_id} - {None})
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = eos_ids[0]
    return {"eos_ids": eos_ids, "pad_id": pad_id}


# ---- copies --------------------------------------------------------------------------------------


def frozen_copy(model, dtype: torch.dtype):
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    for parameter in copied.parameters():  # not buffers: bf16 rotary frequencies blur positions
        parameter.data = parameter.data.to(dtype)
    return copied


def refresh(copied, model) -> None:
    """Write the model's weights into a frozen copy, in place: CUDA graphs stay valid."""
    copied.load_state_dict(model.state_dict())


def critic_of(policy) -> torch.nn.Module:
    """Return a copy of the policy with a value head (weights, then bias) that is 0 at first."""
    critic = copy.deepcopy(policy)
    width = policy.config.get_text_config().hidden_size
    critic.value = torch.nn.Parameter(torch.zeros(width + 1, device=policy.device))
    return critic


# ---- parts of a model ----------------------------------------------------------------------------


def has_plain_kv_cache(model) -> bool:
    """Tell whether the layers remember keys and values alone: no state space, no linear attention.

    A state reads padding as if it were text, keys and values can be masked."""
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    return layers <= {DynamicLayer, DynamicSlidingWindowLayer}


def body_of(model):
    """Return the part that turns ids into hidden states: the innermost with the embedding."""
    embedding = model.get_input_embeddings()
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in parts if embedding in part.modules()][-1]


class BodyOutput(tuple):
    """(hidden states,), the output of a model's body as its head reads it. All else is None."""

    def __getattr__(self, name):
        return self[0] if name == "last_hidden_state" else None


def logits_of(model, hidden: Tensor) -> Tensor:
    """Apply the model's head: (M, H) -> (M, V), in float32 under autocast, too. In bf16 rounding
    would be larger than GSPO's band.

    Some heads scale or cap the logits or have layers of their own. So the model's own forward pass
    runs, with a body that returns `hidden`."""
    body = body_of(model)
    inside = set(body.modules())
    weights = {
        f"{name}.{own}".lstrip("."): weight.float()
        for name, module in model.named_modules()
        if module not in inside  # a head that shares the embedding's weight is not
        for own, weight in module.named_parameters(recurse=False)
    }
    ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    output = BodyOutput([hidden.float()[None]])
    with (
        mock.patch.object(body, "forward", lambda *_, **options: output),
        torch.autocast(hidden.device.type, enabled=False),
    ):
        return functional_call(model, weights, kwargs={"input_ids": ids}).logits[0].float()


def checkpoint_layers(model, contexts: list[Callable]):
    """Let layers forget their activations and run again in the backward pass.

    transformers does so in training mode alone, which switches dropout on. contexts: functions of
    the model, each returns the context in which it runs now. The backward pass enters it again."""
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    need(layers, f"--gradient-checkpointing: a {model.config.model_type} has no layers for it")
    for layer in layers:
        layer.forward = functools.partial(run_twice, model, contexts, layer.forward)


def run_twice(model, contexts: list[Callable], forward: Callable, *arguments, **options):
    """Run a layer now, and again in the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    now = [context(model) for context in contexts]

    @contextlib.contextmanager
    def again():
        with contextlib.ExitStack() as stack:
            for context in now:
                stack.enter_context(context)
            yield

    options |= {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), again())}
    return checkpoint(forward, *arguments, **options)
