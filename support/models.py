"""Load models and tokenizers, copy them, and find their parts."""

import contextlib
import copy
import math
import re

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from support.console import say
from support.data import special_tokens
from support.errors import UserError, expecting, need
from support.pretrain import BUILT_IN, built_in_policy
from support.tasks import TASKS

# ---- loading -------------------------------------------------------------------------------------


def find_model(config, ranks) -> tuple:
    """Return the policy's folder or hub name, its tokenizer and its config. The first process
    pretrains a built-in policy if necessary."""
    source = config.model
    flag = "--model"
    if source in BUILT_IN:
        if ranks.first:
            source = str(built_in_policy(TASKS[config.task], source))
        source = ranks.from_first(source)
        flag = "the built-in policy is broken; delete its folder"
        load_model(source, "cpu", flag=flag)
    tokenizer, model_config = inspect_model(source, flag)
    if config.routing_replay and not has_experts(model_config):
        raise UserError("--routing-replay: needs a mixture of experts")
    if config.teacher:
        its_tokenizer, _ = inspect_model(config.teacher, "--teacher")
        same = its_tokenizer.get_vocab() == tokenizer.get_vocab()
        need(same, f"--teacher {config.teacher}: expected the vocabulary of --model {config.model}")
    return source, tokenizer, model_config


def load(kind: type, source: str, flag: str = "--model", **options):
    """Load a transformers tokenizer, config or model, without pickle or remote code."""
    expected = "expected a causal language model's folder (for a run: a checkpoint) or hub name"
    with expecting(f"{flag} {source}: {expected}"):
        return kind.from_pretrained(source, trust_remote_code=False, **options)


def inspect_model(source: str, flag: str = "--model"):
    """Return a model's tokenizer and config without loading its weights."""
    config = load(AutoConfig, source, flag)
    tokenizer = load(AutoTokenizer, source, flag)
    quantized = getattr(config, "quantization_config", None)
    need(not quantized, f"{flag} {source}: its weights are quantized and can't be trained here")
    ends = tokenizer.eos_token and len(tokenizer) > 1  # an empty folder yields one token
    need(ends, f"{flag} {source}: expected a tokenizer with an end token")
    return tokenizer, config


def context_of(config) -> int:
    """Return the context length in tokens (prompt and completion together), capped at 2^20. With
    longrope, all frequencies change beyond the original context, so we stop there. Doge's layers
    keep a fixed number of keys, padding included."""
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "keep_window_size")]
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # a single one, or one per kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limits.append(rope["original_max_position_embeddings"])
    return min(limit for limit in (*limits, 2**20) if limit and limit > 0)


def has_experts(config) -> bool:
    """Whether the config has a field for experts. Some dense models have one too."""
    return re.search('expert[^"]*":', config.to_json_string()) is not None


def load_model(source, device: str, dtype: torch.dtype = torch.float32, flag: str = "--model"):
    """Load a model in eval mode, so that dropout is always off. Raises UserError if weights are
    missing or have the wrong shape, where transformers would initialize them at random."""
    configure_torch()
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # the report lists them
    model, report = load(AutoModelForCausalLM, source, flag, **options)
    if getattr(model.config, "output_router_logits", False):  # SFT frameworks leave it on
        # forward() would compute the routers' auxiliary loss, which fails on a KV cache's mask
        model.config.output_router_logits = False
    wrong = sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])])
    bad = f"{len(wrong)} are missing or have wrong shapes, such as {', '.join(wrong[:3])}"
    need(not wrong, f"{flag} {source}: expected weights that fit its config.json; {bad}")
    for parameter in model.parameters():  # not buffers: bf16 rotary frequencies blur positions
        parameter.data = parameter.data.to(dtype)
    return model.to(device).eval()


def clip_is_narrow(config) -> bool:
    """Whether bfloat16's rounding can decide what is clipped (docs/rounding.md). It can't in a step
    with a single update, where every ratio is exactly 1."""
    completions = config.prompts_per_step * config.group_size * config.epochs
    several_updates = completions > config.completions_per_update
    return several_updates and config.clip_low is not None and config.clip_low < 5e-3


def default_dtype(config) -> str:
    """Return the default of --dtype. Older GPUs only emulate bfloat16, without fused attention."""
    on_gpu = config.device == "cuda" and torch.cuda.is_available()  # else --device is refused later
    native = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if native and not clip_is_narrow(config) else "float32"


def configure_torch() -> None:
    """Disable cuDNN attention and make experts respect autocast, for every model in this process.

    torch prefers cuDNN attention on recent GPUs, but it has produced NaN gradients with a mask
    (pytorch issue 196678) and wrong results (193893), and takes tens of ms to plan each shape."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm", grouped_in_autocast)


def grouped_in_autocast(experts, hidden, chosen, weights):
    """Run the grouped matmul of transformers' experts in autocast's dtype, like any linear layer.
    Autocast itself doesn't cover it, and no GPU has a fast float32 kernel for it."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        named = list(experts.named_parameters(recurse=False))
        experts = copy.copy(experts)  # the same module, with its weights in another dtype
        experts._parameters = {name: weight.to(dtype) for name, weight in named}
    return grouped_mm_experts_forward(experts, hidden, chosen, weights)


def end_and_pad_ids(model, tokenizer) -> dict:
    """Return the pad token's id as pad_id, and as eos_ids the ids of all end tokens that the
    tokenizer, the generation config or the chat template uses."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    eos_ids = {*ends, tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template:
        said = "the answer"
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
        after = ""
        with contextlib.suppress(Exception):  # a template may refuse to end with an answer
            after = tokenizer.apply_chat_template(chat, tokenize=False).partition(said)[2]
        closing = [token for token in special_tokens(tokenizer) if token in after]
        closing.sort(key=after.index)
        closing_ids = tokenizer.convert_tokens_to_ids(closing)
        if closing and eos_ids.isdisjoint(closing_ids):  # as in many base models
            eos_ids.add(closing_ids[0])
            what = f"{closing[0]} closes a turn in the chat template but is not an end token"
            say(f"warning: --model: {what} of the model; completions will end there, too")
    pad_id, embedded = tokenizer.pad_token_id, model.get_input_embeddings().weight.shape[0]
    if pad_id is None or pad_id >= embedded:  # a [PAD] added without resizing
        pad_id = min(eos_ids)
    return {"eos_ids": sorted(eos_ids), "pad_id": pad_id}


# ---- copies --------------------------------------------------------------------------------------


def frozen_copy(model, dtype: torch.dtype):
    """Copy a model, casting its weights but not its buffers to dtype. deepcopy finds the cast
    weights in its memo, so it never makes a float32 copy."""
    memo = {}
    for weight in model.parameters():
        copied = weight.detach().to(dtype, copy=True)
        memo[id(weight)] = nn.Parameter(copied, requires_grad=False)
    return copy.deepcopy(model, memo).eval()


def refresh(copied, model) -> None:
    """Write the model's weights into a frozen copy, one at a time, because an adapter computes its
    merged `weight`, W + scale B A, every time it is read."""
    for place, layer in copied.named_modules():
        source = model.get_submodule(place)
        for name, weight in layer.named_parameters(recurse=False):
            weight.data.copy_(getattr(source, name).data)


def free_memory(device: str) -> None:
    """Return torch's cached memory to the GPU. Its fragments are too small for a KV cache."""
    if device != "cpu":
        torch.get_device_module(device).empty_cache()


def critic_of(policy) -> nn.Module:
    """Copy the policy and add a value head (weights, then bias) that is initialized to 0."""
    critic = copy.deepcopy(policy)
    width = policy.config.get_text_config().hidden_size
    critic.value = nn.Parameter(torch.zeros(width + 1, device=policy.device))
    return critic


class Models:
    """The policy and the models around it. Those that the run doesn't need are None."""

    def __init__(self, config, algorithm, policy):
        self.policy = self.sampling_model = policy  # may become a copy below
        self.ref_policy = self.teacher = self.critic = None
        self.routing = None  # for a mixture of experts: extras.experts.Experts
        dtype = getattr(torch, config.dtype)
        if config.dtype == "bfloat16" and clip_is_narrow(config):
            found = f"bfloat16's rounding can exceed --clip-low {config.clip_low:g}"
            say(f"warning: {found}; below --lr 1e-4, use --dtype float32 (see docs/rounding.md)")
        # 1. copies, before any adapters are added
        if dtype != torch.float32 or config.stale_steps > 1 or config.lora_rank:
            self.sampling_model = frozen_copy(policy, dtype)
        if config.kl_coef:
            self.ref_policy = frozen_copy(policy, dtype)
        if config.teacher:
            self.teacher = load_model(config.teacher, config.device, dtype, "--teacher")
        rerun_context = contextlib.nullcontext  # for layers recomputed in the backward pass
        if has_experts(policy.config) and config.old_logprobs == "trainer":
            from support.extras.experts import Experts, routing_now

            self.routing = Experts(config.routing_replay)
            rerun_context = routing_now
        # 2. adapters
        if config.lora_rank:
            from support.extras.lora import add_adapters

            add_adapters(policy, config, dtype)
        # 3. gradient checkpointing, which covers the adapters
        if config.gradient_checkpointing:
            from support.extras.gradient_checkpointing import checkpoint_layers

            checkpoint_layers(policy, rerun_context)
        # 4. the critic, which copies both along with the policy
        if algorithm.value_loss:
            self.critic = critic_of(policy)


def make_optimizer(config, models: Models) -> torch.optim.Optimizer:
    """Return AdamW with a parameter group for the policy and another for the critic, if any."""
    trained = [(models.policy, config.lr, "grad_norm")]
    if models.critic:
        trained.append((models.critic, config.critic_lr, "critic_grad_norm"))
    groups = []
    for model, lr, norm_metric in trained:
        parameters = [each for each in model.parameters() if each.requires_grad]
        group = {"params": parameters, "lr": lr, "initial_lr": lr, "norm_metric": norm_metric}
        groups.append(group)
    return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)


def lr_factor(config, step: int) -> float:
    """Return the learning rate's multiplier, the product of linear warmup and --lr-schedule."""
    warm_up = min(1.0, step / max(config.warmup_steps, 1))
    left = 1 - (step - 1) / config.steps
    cosine = (1 - math.cos(math.pi * left)) / 2
    return warm_up * {"constant": 1.0, "linear": left, "cosine": cosine}[config.lr_schedule]


# ---- parts of a model ----------------------------------------------------------------------------


def has_plain_kv_cache(model) -> bool:
    """Whether the layers cache only keys and values, which can be masked. State-space and linear
    attention layers would read padding as if it were text."""
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    return layers <= {DynamicLayer, DynamicSlidingWindowLayer}


def body_of(model):
    """Return the submodule that turns ids into hidden states, the innermost with the embedding."""
    embedding = model.get_input_embeddings()
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in parts if embedding in part.modules()][-1]


def logits_of(model, hidden: Tensor) -> Tensor:
    """Apply the model's head, (M, H) -> (M, V), in float32 even under autocast, because bf16's
    rounding exceeds GSPO's band. `check_scorer` refuses models whose head does more than this."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    hidden = hidden.float()
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon H1
        hidden = hidden * (getattr(config, name, None) or 1)
    for name in ("logits_scaling", "logits_mup_width_multiplier"):  # Granite, Inkling
        hidden = hidden / (getattr(config, name, None) or 1)
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        logits = nn.functional.linear(hidden, head.weight.float(), bias)
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return cap * torch.tanh(logits / cap) if cap else logits
