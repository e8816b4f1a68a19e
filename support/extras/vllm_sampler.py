"""Sample with vLLM in the trainer's own process (--sampler vllm). See docs/vllm.md."""

import os
import tempfile

# must be set before importing vllm
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # lets the engine read the trainer's tensors
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # else it starts with 60 lines of warnings
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else it binds our threads, too

import torch
from transformers.core_model_loading import revert_weight_conversion
from vllm import LLM, SamplingParams

from support.errors import need
from support.extras.samplers import rollout_of
from support.models import body_of, context_of

ON_GPU = {"gpu_memory_utilization": 0.4, "enable_sleep_mode": True}  # of the whole card
# on a CPU, seeds make chunked prefill fail: "CPU Generator does not use offset"
ON_CPU = {"kv_cache_memory_bytes": 10**9, "enable_chunked_prefill": False, "enforce_eager": True}


class VllmSampler:
    """A sampler with the signature of rollout.generate."""

    engine = None  # started by the first call, which passes the model

    @torch.no_grad()
    def __call__(self, model, prompts, uniforms, *, eos_ids, pad_id, temperature, cache_gb, stops):
        _, group_size, max_new_tokens = uniforms.shape
        on_gpu = model.device.type == "cuda"
        if self.engine is None:
            self.engine = start_engine(model, on_gpu, cache_gb)
        elif on_gpu:
            self.engine.wake_up()
        load_weights(self.engine, model)
        width = max(map(len, prompts)) + max_new_tokens
        room = self.engine.model_config.max_model_len  # vLLM would shorten a completion silently
        need(width <= room, f"--cache-gb: it holds {room} of {width} tokens, prompt included")
        options = {"temperature": temperature, "max_tokens": max_new_tokens}
        options |= {"logprobs": 0, "flat_logprobs": True, "detokenize": False}
        # without ignore_eos, vLLM would also stop at the end token in the model's config
        options |= {"stop_token_ids": eos_ids, "ignore_eos": True}
        # one request per completion: a request with n=G would use the seeds s, s + 1, ..., which
        # others may have. The prefix cache still reads each prompt only once
        seeds = (uniforms[..., 0].flatten() * 2**24).long().tolist()  # every bit of a float32
        params = [SamplingParams(seed=seed, **options) for seed in seeds]
        prompt_of = [prompt for prompt in prompts for _ in range(group_size)]
        asked = [{"prompt_token_ids": prompt} for prompt in prompt_of]
        outputs = [one.outputs[0] for one in self.engine.generate(asked, params, use_tqdm=False)]
        if on_gpu:
            self.engine.sleep(level=2)  # weights and KV cache are freed until the next call
        ids = [output.token_ids for output in outputs]
        logprobs = [output.logprobs.logprobs for output in outputs]  # flat: one per token
        return rollout_of(prompt_of, ids, logprobs, eos_ids, pad_id, stops).to(model.device)


def start_engine(model, on_gpu: bool, cache_gb: float | None) -> LLM:
    """Start an engine for the model's architecture, without its weights."""
    context, options = context_of(model.config), dict(ON_GPU if on_gpu else ON_CPU)
    # -1 means as much as the KV cache holds. dtype "auto" would mean the one in config.json
    options |= {"max_model_len": context if context < 2**15 else -1, "dtype": model.dtype}
    options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    options |= {"logprobs_mode": "processed_logprobs"}  # at the temperature
    # on a CPU, vLLM packs weights, so a tied head would keep its first ones. The trainer's head is
    # in float32, too, but on a CPU that takes 18 times as long
    head = {"tie_word_embeddings": False, "head_dtype": "float32" if on_gpu else "model"}
    if cache_gb:
        options["kv_cache_memory_bytes"] = int(cache_gb * 1e9)
    if os.environ.get("WORLD_SIZE", "1") != "1":  # torchrun: an engine in each process
        options["distributed_executor_backend"] = "external_launcher"
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        engine = LLM(folder, hf_overrides=head, **options)
    type(body_of(model)).do_not_compile = True  # vLLM may have wrapped this transformers class
    return engine


def load_weights(engine: LLM, model) -> None:
    """Load the model's weights into the engine, under their checkpoint names, all in one call."""
    weights = revert_weight_conversion(model, model.state_dict())
    [engine_model] = engine.apply_model(lambda own: own)
    if not hasattr(engine_model, "lm_head"):  # Gemma-2
        weights.pop("lm_head.weight", None)
    for layer in engine_model.modules() if model.device.type == "cpu" else ():
        if hasattr(getattr(layer, "quant_method", None), "moe_kernel"):
            layer.quant_method.moe_kernel = None  # repack: new weights come unpacked
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
    engine.reset_prefix_cache()  # its keys and values come from the old weights
