"""Models and tokenizers: load them, copy them, and find their parts."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.console import say
from support.tasks import BUILT_IN, TASKS, built_in_policy
from support.user import expecting, need

# torch prefers cuDNN's attention on recent GPUs. It has given NaN gradients with a mask (pytorch
# issue 196678) and wrong results (193893), and it plans each new shape, for tens of milliseconds
torch.backends.cuda.enable_cudnn_sdp(False)

# ---- loading -------------------------------------------------------------------------------------


def find_model(config, ranks) -> tuple:
    """Return the policy's folder or hub name, its tokenizer and its config, before any weights
    load. The first process makes a built-in policy."""
    source = config.model
    if source in BUILT_IN and ranks.first:
        source = str(built_in_policy(TASKS[config.task], source))
    source = ranks.from_first(source)
    tokenizer, model_config = inspect_model(source)
    fits = has_experts(model_config) or not config.routing_replay
    need(fits, "--routing-replay: needs a mixture of experts")
    if config.teacher:
        its_tokenizer, _ = inspect_model(config.teacher, "--teacher")
        same = its_tokenizer.get_vocab() == tokenizer.get_vocab()
        need(same, f"--teacher {config.teacher}: expected the tokens of --model {config.model}")
    return source, tokenizer, model_config


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
    """Return its tokenizer and its config. UserError unless it is a causal language model."""
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


def load_model(source: str, device: str, dtype: torch.dtype = torch.float32):
    """Load a model in evaluation mode: sampling, scoring and training all run without dropout.
    UserError where weights are missing or have other shapes: transformers would continue with
    random ones."""
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
    for parameter in model.parameters():  # not buffers: bf16 rotary frequencies blur positions
        parameter.data = parameter.data.to(dtype)
    return model.to(device).eval()


def default_dtype(device: str) -> str:
    """Return the default of --dtype. Older GPUs emulate bfloat16, without fused attention."""
    if device != "cuda" or not torch.cuda.is_available():  # then --device is refused
        return "float32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16"
    say(f"--dtype float32: a {torch.cuda.get_device_name()} has no bfloat16 of its own")
    return "float32"


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
    """Copy a model with its weights in dtype. A copy in float32 is never made: deepcopy finds each
    weight's copy in its memo. Buffers keep their dtype."""
    memo = {
        id(weight): nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, memo).eval()


def paired_weights(copied, model) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each weight of a copy, the weight, and the model's. An adapter's `weight`
    is its merged one, made when it is read: so there is one at a time."""
    for place, layer in copied.named_modules():
        for name, weight in layer.named_parameters(recurse=False):
            yield f"{place}.{name}", weight.data, getattr(model.get_submodule(place), name).data


def refresh(copied, model) -> None:
    """Write the model's weights into a frozen copy, in place: CUDA graphs stay valid."""
    for _, weight, new in paired_weights(copied, model):
        weight.copy_(new)


def free_memory(device: str) -> None:
    """Give unused memory back to a GPU. Its allocator keeps blocks of every size that it has seen,
    and the optimiser's between those of KV caches leave too little in one piece."""
    if device != "cpu":
        torch.get_device_module(device).empty_cache()


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


# fields of configurations: by what logits are multiplied, and by what they are divided
FACTORS = ("logit_scale", "lm_head_multiplier")  # Cohere, Falcon H1
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")  # Granite, Inkling


def logits_of(model, hidden: Tensor) -> Tensor:
    """Apply the model's head: (M, H) -> (M, V), in float32 under autocast, too. In bf16 rounding
    would be larger than GSPO's band. `check_scorer` refuses a head that does more than this."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    hidden = hidden.float()
    for name in FACTORS:  # of the hidden states, which are smaller than the logits
        hidden = hidden * (getattr(config, name, None) or 1)
    for name in DIVISORS:
        hidden = hidden / (getattr(config, name, None) or 1)
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        logits = F.linear(hidden, head.weight.float(), bias)
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return logits


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
