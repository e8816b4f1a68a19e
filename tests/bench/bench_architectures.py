"""Which transformers architectures are sampled and scored correctly, on tiny random models.

    python tests/bench/bench_architectures.py                 # all of them, minutes
    python tests/bench/bench_architectures.py opt falcon_h1   # some
    python tests/bench/bench_architectures.py --markdown docs/architectures.md

Each row compares, in float32, the log-probs of sampled completions: those of the sampler, of each
layout of the scorer, and of the whole model's forward pass over each sequence alone. "right" means
that they agree to 1e-3, that gradient checkpointing changes no bit, and that trees and rows have
the same gradients; "refused" means a one-sentence error. Sequences have up to 21 tokens, more than
every window, chunk and original context of the tiny configurations. Encoders with a causal head are
built as decoders. The attention is transformers' default: sdpa, where a model has it."""

import contextlib
import warnings
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import common
import rollout as R
from support.errors import UserError, reason

# a small value: the fields of a configuration that get it, if they exist
SIZES = {
    0: "pad_token_id",
    1: "bos_token_id n_group topk_group first_k_dense_replace",
    2: """eos_token_id num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_blocks num_encoder_layers num_decoder_layers num_key_value_heads num_kv_heads
        num_experts_per_tok moe_topk num_experts_per_token moe_k top_k_experts""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads num_experts
        num_local_experts n_routed_experts moe_num_experts mamba_d_state
        mamba_d_conv state_size ssm_state_size mamba_dt_rank time_step_rank linear_num_key_heads
        linear_num_value_heads rotary_dim""",
    8: """head_dim global_head_dim d_kv dim_head kv_channels qk_rope_head_dim qk_nope_head_dim
        v_head_dim mamba_n_heads mamba_num_heads n_mamba_heads mamba_d_head mamba_headdim
        mamba_head_dim mamba_chunk_size chunk_size linear_key_head_dim linear_value_head_dim""",
    16: "kv_lora_rank q_lora_rank",
    32: """hidden_size n_embd d_model embedding_size embedding_dim word_embed_proj_dim lru_width
        input_embedding_size attention_hidden_size moe_intermediate_size
        shared_expert_intermediate_size""",
    40: "vocab_size",
    64: """intermediate_size ffn_dim n_inner decoder_ffn_dim intermediate_size_mlp ffn_hidden_size
        dim_ff dff expert_ffn_hidden_size encoder_ffn_dim d_inner mamba_d_ssm""",
    128: "max_position_embeddings n_positions max_seq_len n_ctx",
}
EFFECTIVE_FROM = {  # a length, in tokens or blocks
    1: "index_topk_blocks index_local_blocks",
    4: "floor_scale log_scaling_n_floor index_topk index_block_size",
    6: """sliding_window sliding_window_size attention_window_size window_size local_attention
        attention_chunk_size""",
    18: "keep_window_size",
}
SMALL = {
    name: value
    for sizes in (SIZES, EFFECTIVE_FROM)
    for value, names in sizes.items()
    for name in names.split()
}
EVEN_IF_NONE = {"head_dim", "num_key_value_heads", "num_experts_per_tok", "n_group", "topk_group"}
KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")
NAMES_OF_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MIXED = ["linear_attention", "hybrid"] * 2
ZAMBA = dict(num_hidden_layers=4, layers_block_type=MIXED, attention_hidden_size=64)
EXTRA = {
    "bailing_hybrid": dict(num_expert_group=1),
    "bamba": dict(attn_layer_indices=[1]),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(hidden_size=32, ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2),
    ),
    "dots1": dict(n_shared_experts=1, n_routed_experts=4),
    "gemma3n_text": dict(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=40,
        hidden_size_per_layer_input=8,
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "mamba2": dict(num_heads=8, n_groups=1),
    "reformer": dict(axial_pos_embds_dim=(16, 16), axial_pos_shape=(8, 16)),
    "xlstm": dict(hidden_size=64, embedding_dim=64, num_heads=1),
    "zamba": ZAMBA,
    "zamba2": ZAMBA,
    "zaya": dict(num_experts_per_tok=1),
}
# other rotary embeddings
ORIGINAL = 18  # tokens
SCALED = dict(rope_theta=1e4, factor=8.0, original_max_position_embeddings=ORIGINAL)
YARN = dict(rope_type="yarn", **SCALED)
LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, **SCALED)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=8.0)
LONG = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=ORIGINAL)
LONG |= dict(short_factor=[1.0] * 4, long_factor=[8.0] * 4)
VARIANTS = {
    "llama + yarn": dict(rope_parameters=YARN),
    "llama + llama3": dict(rope_parameters=LLAMA3),
    "llama + dynamic": dict(rope_parameters=DYNAMIC, max_position_embeddings=ORIGINAL),
    "phi3 + longrope": dict(rope_parameters=LONG, original_max_position_embeddings=ORIGINAL),
    "minicpm3 + longrope": dict(rope_parameters=LONG),
    "phimoe + longrope": dict(rope_parameters=dict(short_mscale=1.2, long_mscale=1.4, **LONG)),
}
NEW_TOKENS = 12
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [17]]


def small_fields(config) -> dict:
    given = config.to_dict()
    there = {name for name in given if given[name] is not None or name in EVEN_IF_NONE}
    fields = {name: value for name, value in SMALL.items() if name in there}
    if "kv_lora_rank" in given:  # latent attention: as many keys as queries
        fields["num_key_value_heads"] = 4
    lists = {name: given[name] for name in KINDS_OF_LAYERS if given.get(name)}
    if lists:  # a layer of each kind
        kinds = list(dict.fromkeys(zip(*lists.values())))
        if len(kinds) == 1:
            kinds = kinds * 2
        for name, column in zip(lists, zip(*kinds)):
            fields[name] = list(column)
        fields |= {name: len(kinds) for name in NAMES_OF_DEPTH if name in fields}
    ropes = given.get("rope_parameters") or {}
    if "original_max_position_embeddings" in ropes:
        fields["rope_parameters"] = ropes | {"original_max_position_embeddings": ORIGINAL}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            fields[name] = small_fields(part)
    return fields


def build(kind: str, seed: int = 0, attention: str | None = None, **options):
    """A tiny random model of a type or of one of VARIANTS. options go into its config."""
    kind, fields = kind.split(" + ")[0], VARIANTS.get(kind, {})
    fields = small_fields(AutoConfig.for_model(kind)) | EXTRA.get(kind, {}) | fields | options
    config = AutoConfig.for_model(kind, **fields)
    if "Decoder" not in kind and hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():  # initialised, the logits are nearly flat
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def examine(kind: str) -> tuple[str, str]:
    """Return (verdict, detail): right, WRONG, refused with a sentence, not built, or an error."""
    try:
        model = build(kind)
    except Exception as error:
        return "not built", reason(error)
    try:
        shares = R.check_scorer(model, PROMPTS[:2], 0)
        room = R.context_of(model.config) - max(map(len, PROMPTS))
        wrong, how = compare(model, min(room, NEW_TOKENS), shares)
        if wrong:
            return "WRONG", wrong
    except UserError as error:
        return "refused", str(error)
    except Exception as error:
        return "error", reason(error)
    if room < NEW_TOKENS:
        how += ", up to the original context"
        with contextlib.suppress(UserError):
            sampled(model, NEW_TOKENS)
            return "WRONG", "samples texts that are longer than its context"
    return "right", f"{how}; {with_checkpointing(model, shares)}"


def compare(model, new_tokens: int, shares: bool) -> tuple[str, str]:
    """Return the differences from the model's own forward pass, and the layouts."""
    out = sampled(model, new_tokens)
    own = torch.zeros_like(out.sampler_logprobs)
    for row, length, ids in zip(own, out.lengths, out.sequences()):
        row[:length] = R.sequence_logprobs(model, ids)[-length:].detach()
    rows, by_rows = scored(model, out)
    gaps = {"sampler": out.sampler_logprobs - own, "rows": rows - own}
    how = "rows, and trees differ" if R.shares_prefixes(model) else "rows"
    if shares:
        how = "rows and trees"
        trees, by_trees = scored(model, out, trees_of(out, 24))
        scale = max(float(gradient.abs().max()) for gradient in by_rows)
        far = max(float((a - b).abs().max()) for a, b in zip(by_rows, by_trees, strict=True))
        gaps |= {"trees": trees - own, "gradients of trees": torch.tensor(far / scale)}
    gaps = {name: float(gap.detach().abs().max()) for name, gap in gaps.items()}
    wrong = [f"{name} {gap:.1e}" for name, gap in gaps.items() if not gap < 1e-3]
    return ", ".join(wrong), how


def sampled(model, new_tokens: int):
    """Three groups of three, in which two completions share a prefix."""
    uniforms = torch.rand(len(PROMPTS), 3, new_tokens, generator=torch.Generator().manual_seed(0))
    uniforms[:, 1, : new_tokens // 2] = uniforms[:, 0, : new_tokens // 2]
    return R.generate(model, PROMPTS, uniforms, eos_ids=[2], pad_id=0)


def trees_of(out, width: int):
    """All completions as trees of at most `width` nodes."""
    return R.join(R.grow(R.in_order(out.sequences()), width), out.tokens.device)


def scored(model, out, trees=None):
    """Log-probs, and the gradients of a sum."""
    logprobs, entropy = R.completion_logprobs(model, out, 1.0, trees)
    (logprobs.sum() + entropy.sum()).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return logprobs, gradients


def with_checkpointing(model, shares: bool) -> str:
    from support.extras.gradient_checkpointing import checkpoint_layers

    out = sampled(model, 8)
    trees = trees_of(out, 24) if shares else None
    before, _ = R.completion_logprobs(model, out, 1.0, trees)
    try:
        checkpoint_layers(model)
    except UserError:
        return "no gradient checkpointing"
    after, _ = scored(model, out, trees)
    if not torch.equal(before, after):
        return f"FIRST RATIO {(after - before).abs().max():.1e}"
    return "checkpointed"


def tables(found: dict[str, tuple[str, str]]) -> str:
    """The architectures by verdict, and why some were refused or not built."""
    rows, reasons = {}, []
    for kind, (verdict, how) in found.items():
        if verdict != "right":
            reasons.append(f"- {kind}, {verdict}: {how}")
            how = "see below"
        rows.setdefault((verdict, how), []).append(kind)
    order = ["right", "refused", "not built", "WRONG", "error"]
    version = f"architectures of transformers {transformers.__version__}"
    lines = [["verdict", "how", "number", version]]
    for verdict, how in sorted(rows, key=lambda row: (order.index(row[0]), row[1])):
        kinds = rows[verdict, how]
        lines.append([verdict, how, str(len(kinds)), ", ".join(kinds)])
    return "\n".join([common.markdown(*lines), "", *reasons])


def main():
    parser = common.parser(__doc__)
    parser.add_argument("kinds", nargs="*", help="model types, default: all")
    parser.add_argument("--markdown", type=Path, help="page whose table to replace")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found = {}
    for kind in given.kinds or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]:
        found[kind] = verdict, why = examine(kind)
        print(f"{kind:28} {verdict:10} {why}", flush=True)
    if given.markdown:
        text, _, _ = given.markdown.read_text().partition("| verdict |")
        given.markdown.write_text(f"{text}{tables(found)}\n")


if __name__ == "__main__":
    main()
