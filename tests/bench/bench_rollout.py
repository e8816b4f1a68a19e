"""Speed of sampling and of log-probs: plain (rollout.py), fast (support/extras), transformers.

    python tests/bench/bench_rollout.py                     # the model of 3 M parameters: minutes
    python tests/bench/bench_rollout.py --models 80m,135m --rows 64 --repeats 3

The same model, prompts and long-tailed lengths for all. Contestants take turns, and the ratios are
medians over the turns. Samples of random weights share no prefix, those of the built-in policy, in
the last table, do. On a GPU:

    python tests/bench/bench_rollout.py --models qwen3-0.6b,qwen3-1.7b,qwen3-4b --rows 64,256,512 \
        --longest 1024 --only sampling,decoding,scoring
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM, StoppingCriteria

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rollout as R  # noqa: E402
from support import tasks  # noqa: E402
from support.extras import fast_sampling, fast_scoring  # noqa: E402

GROUP, PROMPT = 8, 24
COPIED = {"cuda": 2**28, "cpu": 2**26}  # numbers of a copy that tells the memory's speed


def shape(hidden, layers, heads, vocabulary, inner, kv_heads=2, head_dim=None):
    return dict(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


SHAPES = {
    "3m": shape(192, 6, 6, 1000, inner=576),
    "80m": shape(640, 12, 10, 32_000, inner=1920),
    "80m-151k": shape(384, 8, 6, 151_936, inner=1152),
    "135m": shape(576, 30, 9, 49_152, inner=1536, kv_heads=3),  # SmolLM2's
    "qwen3-0.6b": shape(1024, 28, 16, 151_936, inner=3072, kv_heads=8, head_dim=128),
    "qwen3-1.7b": shape(2048, 28, 16, 151_936, inner=6144, kv_heads=8, head_dim=128),
    "qwen3-4b": shape(2560, 36, 32, 151_936, inner=9728, kv_heads=8, head_dim=128),
}


def build(name):
    torch.manual_seed(0)
    device = "cuda" if name.startswith("qwen3") else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return Qwen3ForCausalLM(Qwen3Config(**SHAPES[name])).eval().to(device, dtype)


def long_tailed(rows, longest):
    """Lengths in tokens of `rows` completions: most are short, some meet the limit."""
    draw = torch.Generator().manual_seed(5)
    lengths = torch.exp(torch.randn(rows, generator=draw) + torch.tensor(longest / 7.0).log())
    return lengths.long().clamp(4, longest)


def seconds(device, work):
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def turns(device, contestants, repeats):
    """{name: seconds of each turn}; the first turn of all is for warming up."""
    times = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, work in contestants.items():
            spent = seconds(device, work)
            if turn:
                times[name].append(spent)
    return times


def ratio(times, name, base):
    """Median over the turns of how many times as fast as `base`."""
    return f"{statistics.median(b / a for a, b in zip(times[name], times[base])):.2f}"


class Lengths(StoppingCriteria):
    """Ends a completion at a length that its first token decides on, for all contestants."""

    def __init__(self, lengths, prompt=0):
        self.lengths, self.prompt = lengths, prompt
        self.width = int(lengths.max())

    def __call__(self, tokens, scores=None, **options):
        tokens = tokens[:, self.prompt :]
        count = (tokens < 2**31 - 1).sum(1)  # of fast sampling's: larger numbers are no tokens
        first = tokens.gather(1, (tokens.shape[1] - count)[:, None])[:, 0]
        return count >= self.lengths[first % len(self.lengths)]


def sampling(name, rows, longest, repeats):
    model = build(name)
    lengths = long_tailed(rows, longest).to(model.device)
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, model.config.vocab_size, (rows // GROUP, PROMPT), generator=draw)
    uniforms = torch.rand(rows // GROUP, GROUP, longest, generator=draw)
    ids, sampled = prompts.to(model.device), {}

    def ours(name, generate):
        stops = Lengths(lengths)
        out = generate(model, prompts.tolist(), uniforms, eos_ids=[], pad_id=0, stops=stops)
        sampled[name] = int(out.lengths.sum())

    def theirs():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            num_return_sequences=GROUP,
            max_new_tokens=longest,
            pad_token_id=0,
            stopping_criteria=[Lengths(lengths, PROMPT)],
        )
        first = out[:, PROMPT]
        sampled["generate"] = int(lengths[first % len(lengths)].sum())

    contestants = {
        "plain": lambda: ours("plain", R.generate),
        "fast": lambda: ours("fast", fast_sampling.generate),
        "generate": theirs,
    }
    times = turns(model.device, contestants, repeats)
    speed = {name: sampled[name] / statistics.median(t) for name, t in times.items()}
    print(
        f"| {name} | {rows} | {speed['plain']:.0f} | {speed['fast']:.0f} "
        f"| {speed['generate']:.0f} | **{ratio(times, 'plain', 'generate')}** "
        f"| **{ratio(times, 'fast', 'plain')}** |",
        flush=True,
    )


def memory_speed(device):
    """Bytes a second that a copy reads and writes."""
    spot, other = torch.zeros(2, COPIED[device.type], device=device)
    copy = turns(device, {"copy": lambda: other.copy_(spot)}, 5)["copy"]
    return 2 * spot.nbytes / statistics.median(copy)


def decoding(name, rows, context, repeats):
    """One step of rows that all have so much context, beside the time it takes to read the weights
    and the KV cache once, at the speed of a copy."""
    model = build(name)
    device = model.device
    bytes_per_second = memory_speed(device)
    output = fast_sampling.Output.empty(torch.zeros(rows, context - 1), 0, device)
    with torch.no_grad():
        slots = fast_sampling.Slots(model, [[0]] * rows, output, R.free_gb(device))
    slots.temperature, slots.stops = 1.0, None
    slots.eos_ids = output.tokens.new_tensor([])
    start = torch.zeros_like(slots.state)
    start[:, 1], start[:, 3], start[:, 4] = context - 1, torch.arange(rows), 1
    start[:, 2] = context - 2  # tokens sampled so far
    step = fast_sampling.DecodeStep(slots)

    def work():
        for _ in range(4):
            slots.state.copy_(start)
            step((rows, context))

    with torch.no_grad(), fast_scoring.our_attention(model, slots):
        spent = statistics.median(turns(device, {"step": work}, repeats)["step"]) / 4
    weights = sum(parameter.nbytes for parameter in model.parameters())
    read = weights + sum(memory.nbytes for memory in slots.keys + slots.values)
    floor = read / bytes_per_second
    print(
        f"| {name} | {rows} | {context} | {1e3 * spent:.2f} | {1e3 * floor:.2f} "
        f"| **{floor / spent:.0%}** |",
        flush=True,
    )


def padded(model, out):
    """Log-probs and entropies as they are often computed: left and right padding, full logits."""
    width, mask = out.prompt_width, torch.ones_like(out.tokens)
    mask[:, width:] = out.completion_mask
    logits = model(out.tokens, attention_mask=mask, use_cache=False).logits[:, width - 1 : -1]
    logp = logits.float().log_softmax(-1)
    logprobs = logp.gather(-1, out.completions[..., None])[..., 0]
    return logprobs * out.completion_mask, -(logp.exp() * logp).sum(-1) * out.completion_mask


def random_rollout(model, rows, prompt, longest):
    """Groups of completions of random tokens, of long-tailed lengths."""
    lengths = long_tailed(rows, longest)
    draw = torch.Generator().manual_seed(1)
    size = (rows, prompt + int(lengths.max()))
    tokens = torch.randint(0, model.config.vocab_size, size, generator=draw)
    tokens[:, :prompt] = tokens[::GROUP, :prompt].repeat_interleave(GROUP, 0)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return R.Rollout(
        tokens=tokens,
        prompt_lengths=torch.full((rows,), prompt),
        lengths=lengths,
        completion_mask=mask,
        sampler_logprobs=torch.zeros(mask.shape),
        truncated=torch.zeros(rows, dtype=torch.bool),
    ).to(model.device)


def run(model, score, out, parts):
    """Forward and backward of some parts of a rollout."""
    for part in parts:
        logprobs, entropy = score(out[part])
        (logprobs.sum() + entropy.sum()).backward()
    model.zero_grad()


def scoring(name, rows, prompt, longest, repeats):
    """Micro-batches of 16 rows, or of as many tokens."""
    model = build(name)
    out = random_rollout(model, rows, prompt, longest)
    tokens = 2 * (prompt + longest) * GROUP

    def ours(way):
        parts = way.micro_batches(out, tokens)
        run(model, lambda part: way.completion_logprobs(model, part, 1.0), out, parts)

    def theirs():
        by_length = out.lengths.argsort(descending=True).split(16)
        run(model, lambda part: padded(model, part), out, by_length)

    contestants = {
        "ours": lambda: ours(fast_scoring),
        "plain": lambda: ours(R),
        "padded": theirs,
    }
    times = turns(model.device, contestants, repeats)
    useful = {name: 1e6 * statistics.median(t) / out.lengths.sum() for name, t in times.items()}
    print(
        f"| {name} | {rows} | {prompt} | {out.lengths.float().mean():.0f} | {useful['ours']:.0f} "
        f"| {useful['plain']:.0f} | {useful['padded']:.0f} | **{ratio(times, 'ours', 'plain')}** "
        f"| **{ratio(times, 'ours', 'padded')}** |",
        flush=True,
    )


def sharing(repeats):
    """32 groups of 8 completions of the built-in policy, and a pass with gradients over a quarter:
    shared prefixes go through the model once, or once per completion."""
    task = tasks.TASKS["arithmetic"]
    source = str(tasks.built_in_policy(task, "tiny"))
    model, tokenizer = R.load_model(source, "cpu"), R.inspect_model(source)[0]
    problems = tasks.problems(task, seed=0)
    prompts = [tokenizer.encode(next(problems)["prompt"]) for _ in range(32)]
    uniforms = torch.rand(32, GROUP, 64, generator=torch.Generator().manual_seed(0))
    ends = R.end_and_pad_ids(model, tokenizer)
    out = R.generate(model, prompts, uniforms, **ends)
    quarter = [torch.arange(64)]

    def scored(way):
        run(model, lambda part: way.completion_logprobs(model, part, 1.0), out, quarter)

    sampled = {
        "plain": lambda: R.generate(model, prompts, uniforms, **ends),
        "fast": lambda: fast_sampling.generate(model, prompts, uniforms, **ends),
    }
    passes = {"plain": lambda: scored(R), "fast": lambda: scored(fast_scoring)}
    found = [
        ratio(turns(model.device, works, repeats), "fast", "plain") for works in (sampled, passes)
    ]
    texts = zip(out.sequences(), out.prompt_lengths.tolist())
    prefixes = {tuple(text[:n]) for text, size in texts for n in range(size, len(text))}
    print(
        f"| {int(out.lengths.sum())} | {len(prefixes)} | **{found[0]}** | **{found[1]}** |",
        flush=True,
    )


TABLES = {
    "sampling": "model | completions | plain, tokens/s | fast | `generate` | plain / `generate` "
    "| fast / plain",
    "decoding": "model | rows | context | a step, ms | weights and KV cache once | share",
    "scoring": "model | completions | prompt | mean length | fast, µs per useful token "
    "| plain | padded, full logits | fast / plain | fast / padded",
    "sharing": "tokens sampled by the built-in policy | distinct prefixes | fast sampling / plain "
    "| fast log-probs / plain, forward and backward of 64",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="3m", help=", ".join(SHAPES))
    parser.add_argument("--rows", default="64,256", help="completions sampled at a time")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest completion")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="sampling,scoring,sharing", help=", ".join(TABLES))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {threads} threads")
    for table in args.only.split(","):
        columns = TABLES[table].count("|") + 1
        print(f"\n| {TABLES[table]} |\n" + "|---" * columns + "|", flush=True)
        if table == "sharing":
            sharing(args.repeats)
            continue
        for name in args.models.split(","):
            if table == "scoring":
                scoring(name, 64, 200, args.longest // 2, args.repeats)
                continue
            for rows in map(int, args.rows.split(",")):
                if table == "sampling":
                    sampling(name, rows, args.longest, args.repeats)
                else:
                    decoding(name, rows, 4 * args.longest, args.repeats)


if __name__ == "__main__":
    main()
