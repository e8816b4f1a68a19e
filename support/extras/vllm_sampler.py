"""Sample with vLLM in the trainer's own process: --sampler vllm. docs/vllm.md has the rest."""

import os
import tempfile

# vLLM reads these when it is imported
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine can read the trainer's tensors
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its start prints 60 lines of warnings
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # it would bind our threads, too

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.core_model_loading import revert_weight_conversion
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from rollout import Rollout
from support.extras.tools import first_stop
from support.models import body_of, context_of
from support.tasks import BUILT_IN
from support.user import need

# a share of the whole card. In sleep mode the updates have it between two calls
ON_GPU = {"gpu_memory_utilization": 0.4, "enable_sleep_mode": True}
# chunked prefill of requests with a seed fails there: CPU Generator does not use offset
ON_CPU = {"kv_cache_memory_bytes": 10**9, "enable_chunked_prefill": False, "enforce_eager": True}


class VllmSampler:
    """rollout.generate by vLLM. The first call starts the engine, because it brings the model."""

    def __init__(self, config):
        self.engine = None
        device, temperature = current_platform.device_type, config.temperature
        need(device == config.device, f"--sampler vllm: this vLLM is built for --device {device}")
        has_kernel = device != "cpu" or config.model not in BUILT_IN
        need(has_kernel, f"--sampler vllm: on a CPU it has no kernel for --model {config.model}")
        need(temperature >= 0.01, f"--temperature {temperature}: vLLM would sample at 0.01")

    @torch.no_grad()
    def __call__(
        self, model, prompts, uniforms, *, eos_ids, pad_id, temperature=1, cache_gb=None, stops=None
    ) -> Rollout:
        on_gpu = model.device.type == "cuda"
        if self.engine is None:
            self.engine = start_engine(model, on_gpu, cache_gb)
        elif on_gpu:
            self.engine.wake_up()
        load_weights(self.engine, model)
        _, group_size, max_new_tokens = uniforms.shape
        width = max(map(len, prompts)) + max_new_tokens
        room = self.engine.model_config.max_model_len
        # vLLM itself would shorten the completion and say nothing
        need(
            width <= room, f"{width} tokens, prompt and completion: --cache-gb has room for {room}"
        )
        # one request a completion. With n=G a request's children get the seeds s, s + 1, ..., which
        # may be another request's. The prompt is read once all the same: the prefix cache has it
        prompt_of = [prompt for prompt in prompts for _ in range(group_size)]
        requests = [{"prompt_token_ids": prompt} for prompt in prompt_of]
        options = {"temperature": temperature, "max_tokens": max_new_tokens, "logprobs": 0}
        # eos_ids alone: without ignore_eos the config's own end token would end completions, too
        options |= {"stop_token_ids": eos_ids, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(seed=seed, **options) for seed in seeds_of(uniforms)]
        outputs = self.engine.generate(requests, params, use_tqdm=False)
        if on_gpu:
            self.engine.sleep(level=2)  # frees weights, too: the next call loads new ones

        completions, logprobs, ended = [], [], []
        for output in (request.outputs[0] for request in outputs):
            stop = first_stop(stops, list(output.token_ids), 0)  # a length: the engine wrote on
            ids = output.token_ids[:stop]
            completions.append(torch.tensor(ids))
            chosen = zip(ids, output.logprobs)
            logprobs.append(torch.tensor([by_token[id].logprob for id, by_token in chosen]))
            ended.append(stop is not None or ids[-1] in eos_ids)
        rollout = Rollout.of(
            prompt_of,
            tokens=pad_sequence(completions, batch_first=True),
            logprobs=pad_sequence(logprobs, batch_first=True),
            lengths=torch.tensor([len(ids) for ids in completions]),
            ended=torch.tensor(ended),
            pad_id=pad_id,
        )
        return rollout.to(model.device)


def seeds_of(uniforms: Tensor) -> list[int]:
    """Return a seed for each completion: all 24 bits of its first two numbers, or of the only one."""
    numbers = (uniforms.flatten(0, 1) * 2**24).long()
    return (numbers[:, 0] * 2**24 + numbers[:, 1:2].sum(1)).tolist()


def start_engine(model, on_gpu: bool, cache_gb: float | None) -> LLM:
    """Start an engine for the model's architecture, without weights."""
    context = context_of(model.config)
    options = dict(ON_GPU if on_gpu else ON_CPU)
    if cache_gb:
        options["kv_cache_memory_bytes"] = int(cache_gb * 1e9)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        options["distributed_executor_backend"] = "external_launcher"  # torchrun: one a process
    # a CPU packs the head: tied to the embedding it would keep its first weights. The trainer's
    # head computes in float32. On a CPU that is slow, and changes nothing if the rest is float32
    head = {"tie_word_embeddings": False, "head_dtype": "float32" if on_gpu else "model"}
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        engine = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=model.dtype,  # "auto" is that of config.json
            hf_overrides=head,
            max_model_len=context if context < 2**15 else -1,  # -1: what the KV cache holds
            logprobs_mode="processed_logprobs",  # at the temperature
            **options,
        )
    # vLLM may have wrapped transformers' class of the model, whose next pass would then fail
    type(body_of(model)).do_not_compile = True
    return engine


def load_weights(engine: LLM, model) -> None:
    """Load the model's weights into the engine, all in one call, by the names of a checkpoint."""
    weights = revert_weight_conversion(model, model.state_dict())
    if not all(engine.apply_model(prepare)):
        weights.pop("lm_head.weight", None)  # Gemma-2's engine has none
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
    engine.reset_prefix_cache()  # keys and values of the old weights


def prepare(engine_model) -> bool:
    """Make a CPU pack new experts, which it would read as packed. Return whether a head is named."""
    for layer in engine_model.modules():
        method = getattr(layer, "quant_method", None)
        if next(engine_model.parameters()).is_cpu and hasattr(method, "moe_kernel"):
            method.moe_kernel = None
    return hasattr(engine_model, "lm_head")
