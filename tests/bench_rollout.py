"""How fast rollout.py samples and scores, beside what transformers offers, in one table each.

    python tests/bench_rollout.py                     # the models of 3 M parameters: minutes
    python tests/bench_rollout.py --models 3m,80m,80m-151k --rows 64,256 --repeats 5

The same model, prompts and lengths for all: lengths are forced, from a seeded long-tailed draw.
Contestants take turns, and the ratios are medians over the turns. What models of random weights
sample has nothing in common; what it gains to compute common prefixes once is the last table, of
the built-in policy. On a GPU:

    python tests/bench_rollout.py --models qwen3-0.6b,qwen3-1.7b,qwen3-4b --rows 64,256,512 \
        --longest 1024 --only sampling,decoding,scoring
"""

import argparse
import contextlib
import statistics
import sys
import time
import types
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM, StoppingCriteria

sys.path.insert(0, str(Path(__file__).parent.parent))

import rewards  # noqa: E402
import rollout as R  # noqa: E402
import train  # noqa: E402

GROUP, PROMPT = 8, 24
COPIED = {"cuda": 2**28, "cpu": 2**26}  # numbers of a copy that tells the memory's speed


def shape(hidden, layers, heads, vocabulary, inner=3):
    return dict(
        hidden_size=hidden,
        intermediate_size=inner * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=hidden // heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def published(hidden, inner, layers, heads):
    return dict(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        head_dim=128,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=151_936,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


SHAPES = {
    "default": shape(128, 2, 8, 18, inner=2) | {"num_key_value_heads": 4},  # rollout.tiny's
    "3m": shape(192, 6, 6, 1000),
    "80m": shape(640, 12, 10, 32_000),
    "80m-151k": shape(384, 8, 6, 151_936),
    "qwen3-0.6b": published(1024, 3072, 28, 16),
    "qwen3-1.7b": published(2048, 6144, 28, 16),
    "qwen3-4b": published(2560, 9728, 36, 32),
}


def build(name):
    torch.manual_seed(0)
    device = "cuda" if name.startswith("qwen3") else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return Qwen3ForCausalLM(Qwen3Config(**SHAPES[name])).eval().to(device, dtype)


def long_tailed(rows, longest, kind):
    """Lengths in tokens of `rows` completions: most are short, some meet the limit."""
    draw = torch.Generator().manual_seed(5)
    if kind == "geometric":
        lengths = torch.empty(rows).exponential_(4 / longest, generator=draw)
    else:
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
    """Median over the turns of how many times as fast as `base`; — if it did not take part."""
    if name not in times or base not in times:
        return "—"
    return f"{statistics.median(b / a for a, b in zip(times[name], times[base])):.2f}"


class Forced(StoppingCriteria):
    """`generate` ends each completion at its given length."""

    def __init__(self, lengths, prompt):
        self.lengths, self.prompt = lengths, prompt

    def __call__(self, ids, scores, **kwargs):
        return ids.shape[1] - self.prompt >= self.lengths.to(ids.device)


class Counted:
    """A graph whose replays append its rows to steps."""

    def __init__(self, graph, rows, steps):
        self.graph, self.rows, self.steps = graph, rows, steps

    def replay(self):
        self.steps.append(self.rows)
        self.graph.replay()


@contextlib.contextmanager
def forced(lengths, steps):
    """So does ours; the rows of each of its steps, replayed or not, are appended to steps. Samples
    have slots of their own."""
    one, capture = R.Slots.decode_one_token, R.capture

    def step(slots, live, span):
        one(slots, live, span)
        slots.alive[:live] *= slots.step[:live] < lengths[slots.row[:live]]
        steps.append(live)

    def captured(step, shape):
        before = len(steps)
        graph = capture(step, shape)
        del steps[before:]  # a capture computes nothing
        return graph and Counted(graph, shape[0], steps)

    R.Slots.decode_one_token, R.capture = step, captured
    with slots_of_their_own():
        yield
    R.Slots.decode_one_token, R.capture = one, capture


@contextlib.contextmanager
def slots_of_their_own():
    pace = R.PACE["cpu"]
    R.PACE["cpu"] = pace._replace(shares=False)
    yield
    R.PACE["cpu"] = pace


def sampling(name, rows, kind, longest, repeats, batch):
    model = build(name)
    lengths = long_tailed(rows, longest, kind)
    ends = lengths.to(model.device)
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, model.config.vocab_size, (rows // GROUP, PROMPT), generator=draw)
    ids, steps = prompts.to(model.device), []

    def ours():
        steps.clear()
        with forced(ends, steps):
            R.generate(
                model,
                prompts.tolist(),
                group_size=GROUP,
                max_new_tokens=longest,
                eos_ids=[],
                pad_id=0,
                generator=torch.Generator().manual_seed(0),
            )

    def theirs(**options):
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            num_return_sequences=GROUP,
            max_new_tokens=longest,
            pad_token_id=0,
            stopping_criteria=[Forced(lengths, PROMPT)],
            **options,
        )

    def continuous():
        options = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=longest, eos_token_id=-1)
        with model.continuous_batching_context_manager(generation_config=options) as manager:
            for i, length in enumerate(lengths.tolist()):
                manager.add_request(prompts[i // GROUP].tolist(), max_new_tokens=length)
            for _ in range(rows):
                while manager.get_result(timeout=1) is None:
                    pass

    contestants = {
        "ours": ours,
        "generate": theirs,
        "static": lambda: theirs(
            cache_implementation="static", disable_compile=model.device.type == "cpu"
        ),
    }
    if batch:
        contestants["batch"] = continuous
    times = turns(model.device, contestants, repeats)
    speed = {name: lengths.sum().item() / statistics.median(t) for name, t in times.items()}
    print(
        f"| {name} | {rows} | {kind} | {lengths.float().mean():.0f} | {speed['ours']:.0f} "
        f"| {speed['generate']:.0f} | **{ratio(times, 'ours', 'generate')}** "
        f"| {ratio(times, 'static', 'generate')} | {ratio(times, 'batch', 'generate')} "
        f"| {sum(steps) / lengths.sum():.2f} | {rows * lengths.max() / lengths.sum():.2f} |",
        flush=True,
    )


def decoding(name, rows, context, repeats):
    """One step of rows that all have so much context, beside the time it takes to read the weights
    and the keys and values once, at the speed of a copy."""
    model = build(name)
    config, device = model.config, model.device
    spot, other = torch.zeros(2, COPIED[device.type], device=device)
    copy = statistics.median(turns(device, {"copy": lambda: other.copy_(spot)}, 5)["copy"])
    shape = (1, config.num_key_value_heads, 1, config.head_dim)
    memory = [torch.zeros(shape, dtype=model.dtype, device=device)] * config.num_hidden_layers
    prompts = types.SimpleNamespace(keys=memory, values=memory)
    page = R.Page([[0]], rows, 1, 0, torch.Generator().manual_seed(0), device, R.Share())
    slots = R.Slots(model, rows, context, prompts, page, [], 1.0)
    with (
        torch.no_grad(),
        R.dropout_off(model),
        R.transposed_weights(model),
        R.our_attention(R.configs_of(model), slots),
    ):
        start = torch.zeros_like(slots.state)
        start[:, 1], start[:, 3], start[:, 4] = context - 1, torch.arange(rows), 1
        slots.state.copy_(start)
        slots.decode_one_token(rows, context)
        steps, bytes_copied, graph = 2, 2 * spot.nbytes, None
        if device.type == "cuda":
            del spot, other
            torch.cuda.reset_peak_memory_stats()
            graph = R.capture(slots.decode_one_token, (rows, context))
            assert graph, "the step cannot be captured"
            steps = 20

        def work():
            for _ in range(steps):
                slots.state.copy_(start)
                if graph:
                    graph.replay()
                else:
                    slots.decode_one_token(rows, context)

        spent = statistics.median(turns(device, {"step": work}, repeats)["step"]) / steps
    read = sum(p.nbytes for p in model.parameters()) + sum(
        m.nbytes for m in slots.keys + slots.values
    )
    floor = read * copy / bytes_copied
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else float("nan")
    print(
        f"| {name} | {rows} | {context} | {1e3 * spent:.2f} | {1e3 * floor:.2f} "
        f"| **{floor / spent:.0%}** | {peak:.1f} |",
        flush=True,
    )


def drawing(rows, repeats):
    logits = torch.randn(rows, 151_936, generator=torch.Generator().manual_seed(0)) * 3
    uniform = torch.rand(rows, 2, generator=torch.Generator().manual_seed(0))
    times = turns(
        logits.device,
        {
            "ours": lambda: R.sample(logits, uniform),
            "multinomial": lambda: logits.softmax(-1).multinomial(1),
        },
        repeats,
    )
    print(
        f"| {rows} | {1e3 * statistics.median(times['ours']):.0f} "
        f"| {1e3 * statistics.median(times['multinomial']):.0f} "
        f"| **{ratio(times, 'ours', 'multinomial')}** |",
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


def scoring(name, rows, prompt, longest, repeats):
    """Forward and backward of all rows, in micro-batches of 16 rows or their tokens."""
    model = build(name)
    lengths = long_tailed(rows, longest, "log-normal")
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(
        0, model.config.vocab_size, (rows, prompt + lengths.max()), generator=draw
    )
    tokens[:, :prompt] = tokens[::GROUP, :prompt].repeat_interleave(GROUP, 0)
    columns = (
        tokens,
        torch.full((rows,), prompt),
        lengths,
        torch.zeros(rows, lengths.max()),
        torch.zeros(rows, dtype=torch.bool),
    )
    out = R.Rollout(*[column.to(model.device) for column in columns])

    def run(score, parts):
        for part in parts:
            logprobs, entropy = score(out[part])
            (logprobs.sum() + entropy.sum()).backward()
        model.zero_grad()

    by_length = lengths.argsort(descending=True).split(16)
    parts = R.micro_batches(out, 2 * (prompt + longest) * GROUP)
    times = turns(
        model.device,
        {
            "ours": lambda: run(
                lambda part: R.completion_logprobs(model, part, temperature=1.0), parts
            ),
            "padded": lambda: run(
                lambda part: padded(model, part[list(range(len(part.tokens)))]), by_length
            ),
        },
        repeats,
    )
    useful = lengths.sum().item()
    print(
        f"| {name} | {rows} | {prompt} | {lengths.float().mean():.0f} "
        f"| {1e6 * statistics.median(times['ours']) / useful:.0f} "
        f"| {1e6 * statistics.median(times['padded']) / useful:.0f} "
        f"| **{ratio(times, 'ours', 'padded')}** |",
        flush=True,
    )


def head_memory(tokens):
    """Most bytes alive at a time in a forward and backward of one small layer, V = 151,936."""
    config = SHAPES["80m-151k"] | dict(hidden_size=64, head_dim=8, num_hidden_layers=1)
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    ids = torch.randint(0, 151_936, (8, 1 + tokens // 8))
    out = R.Rollout(
        ids,
        torch.ones(8, dtype=torch.long),
        torch.full((8,), tokens // 8),
        torch.zeros(8, tokens // 8),
        torch.zeros(8, dtype=torch.bool),
    )
    with torch.profiler.profile(profile_memory=True) as profile:
        logprobs, entropy = R.completion_logprobs(model, out, temperature=1.0)
        (logprobs.sum() + entropy.sum()).backward()
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    print(f"| {tokens} | {peak / 1e9:.2f} | {tokens * 151_936 * 4 / 1e9:.2f} |", flush=True)


def rollout_step(repeats):
    """What a step of the default run costs: 256 completions, and four updates of 64 of them."""
    model = build("default")
    lengths = torch.randint(8, 28, (256,), generator=torch.Generator().manual_seed(0))
    prompts = torch.randint(3, 18, (32, 6), generator=torch.Generator().manual_seed(1))

    def ours():
        with forced(lengths, []):
            out = R.generate(
                model,
                prompts.tolist(),
                group_size=8,
                max_new_tokens=28,
                eos_ids=[],
                pad_id=0,
                generator=torch.Generator().manual_seed(0),
            )
        out.lengths[:] = lengths
        update(out, lambda part: R.completion_logprobs(model, part, temperature=1.0))

    def theirs():
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            num_return_sequences=8,
            max_new_tokens=28,
            pad_token_id=0,
            stopping_criteria=[Forced(lengths, 6)],
        )
        out = R.Rollout(
            ids,
            torch.full((256,), 6),
            lengths,
            torch.zeros(256, ids.shape[1] - 6),
            torch.zeros(256, dtype=torch.bool),
        )
        update(out, lambda part: padded(model, part))

    def update(out, score):
        for rows in torch.arange(256).split(64):
            with torch.no_grad():
                score(out[rows])
            logprobs, _ = score(out[rows])
            logprobs.sum().backward()
        model.zero_grad()

    times = turns(model.device, {"ours": ours, "theirs": theirs}, repeats)
    print(
        f"| {statistics.median(times['theirs']):.2f} | {statistics.median(times['ours']):.2f} "
        f"| **{ratio(times, 'ours', 'theirs')}** |",
        flush=True,
    )


class Apart(R.Prefixes):
    """Every row is a text of its own: nothing is shared but prompts."""

    def __init__(self, tokens, sizes):
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        super().__init__(torch.cat([rows, tokens], dim=1), sizes + 1)
        self.number = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)


def sharing(repeats):
    """32 groups of 8 completions of the built-in policy, and a pass with gradients over a quarter:
    what they begin with in common is computed once, or for each of them."""
    model = R.load_model(train.built_in_policy(rewards.TASKS["arithmetic"], "tiny"), device="cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.config.name_or_path)
    problems = rewards.problems(rewards.TASKS["arithmetic"], seed=0, held_out=False)
    prompts = [tokenizer(next(problems)["prompt"])["input_ids"] for _ in range(32)]

    def sampled():
        return R.generate(
            model,
            prompts,
            group_size=8,
            max_new_tokens=64,
            eos_ids=[model.config.eos_token_id],
            pad_id=model.config.pad_token_id,
            generator=torch.Generator().manual_seed(0),
        )

    def alone():
        with slots_of_their_own():
            return sampled()

    out = sampled()
    part = out[torch.arange(64)]

    def scored():
        logprobs, _ = R.completion_logprobs(model, part, temperature=1.0)
        logprobs.sum().backward()
        model.zero_grad()

    def apart():
        once, R.Prefixes = R.Prefixes, Apart
        scored()
        R.Prefixes = once

    samplings = turns(model.device, {"ours": sampled, "alone": alone}, repeats)
    scorings = turns(model.device, {"ours": scored, "alone": apart}, repeats)
    prefixes = len(R.PackedTexts(out).ids[0]) - sum(len(prompt) - 1 for prompt in prompts)
    print(
        f"| {int(out.lengths.sum())} | {prefixes} | **{ratio(samplings, 'ours', 'alone')}** "
        f"| **{ratio(scorings, 'ours', 'alone')}** |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="3m", help=", ".join(SHAPES))
    parser.add_argument("--rows", default="64,256", help="completions sampled at a time")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest completion")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", action="store_true", help="generate_batch takes part (slow)")
    parser.add_argument(
        "--only", default="sampling,draw,scoring,memory,step,sharing", help="and decoding"
    )
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    models, parts = args.models.split(","), args.only.split(",")
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.get_num_threads()} threads\n"
    )
    if "sampling" in parts:
        print(
            "| model | completions | lengths | mean | ours, useful tokens/s | `generate` "
            "| ours / `generate` | static cache / `generate` | `generate_batch` / `generate` "
            "| row-steps per useful token | `generate`'s |\n" + "|---" * 11 + "|"
        )
        for name in models:
            for rows in map(int, args.rows.split(",")):
                for kind in ("log-normal", "geometric"):
                    sampling(name, rows, kind, args.longest, args.repeats, args.batch)
    if "decoding" in parts:
        print(
            "\n| model | rows | context | a step, ms | weights, keys and values read once, ms "
            "| share | peak memory, GB |\n" + "|---" * 7 + "|"
        )
        for name in models:
            for rows in map(int, args.rows.split(",")):
                decoding(name, rows, 1024, args.repeats)
    if "draw" in parts:
        print(
            "\n| rows of 151,936 logits | ours, ms | softmax + multinomial, ms | times as fast |\n"
            + "|---" * 4
            + "|"
        )
        for rows in (16, 64):
            drawing(rows, args.repeats)
    if "scoring" in parts:
        print(
            "\n| model | completions | prompt | mean length | ours, µs per useful token "
            "| padded, full logits | times as fast |\n" + "|---" * 7 + "|"
        )
        for name in models:
            scoring(name, 64, 200, 128, args.repeats)
    if "memory" in parts:
        print(
            "\n| tokens scored, V = 151,936 | peak of the head, GB | their logits, GB |\n"
            + "|---" * 3
            + "|"
        )
        for tokens in (512, 2048):
            head_memory(tokens)
    if "step" in parts:
        print(
            "\n| default run's step with `generate` and padding, s | ours, s | times as fast |\n"
            + "|---" * 3
            + "|"
        )
        rollout_step(args.repeats)
    if "sharing" in parts:
        print(
            "\n| tokens sampled by the built-in policy | distinct prefixes | sampling, times as "
            "fast | forward and backward of 64 |\n" + "|---" * 4 + "|"
        )
        sharing(args.repeats)


if __name__ == "__main__":
    main()
