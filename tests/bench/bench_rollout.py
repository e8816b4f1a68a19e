"""Speed of sampling and of log-probs: rollout.py with each layout, and transformers.

    python tests/bench/bench_rollout.py                           # 3 M parameters: minutes
    python tests/bench/bench_rollout.py --model qwen3-0.6b --rows 64 256 --longest 1024    # a GPU

The same model, prompts and long-tailed lengths for all. Contestants take turns, and the ratios are
medians over the turns. Completions of random tokens share their prompt alone. The last row is of
completions of the built-in policy, which share more."""

import statistics
import time

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM, StoppingCriteria

import bench_memory
import common
import rollout as R
from support import pretrain, tasks

GROUP, PROMPT, SCORED_PROMPT = 8, 24, 200
TURNS = 5
SHAPES = {"3m": dict(zip(bench_memory.NAMES, (192, 576, 6, 6, 2, 32, 1000, True)))}
SHAPES |= {f"qwen3-{name.lower()}": bench_memory.SHAPES[name] for name in bench_memory.PUBLISHED}


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def long_tailed(rows, longest):
    """Return the lengths of completions: most are short, some meet the limit."""
    lengths = torch.exp(torch.randn(rows, generator=generator(5)) + torch.tensor(longest / 7).log())
    return lengths.long().clamp(4, longest)


def in_turns(device, contestants):
    """Return {name: seconds of each turn}. The first turn warms up."""
    times = {name: [] for name in contestants}
    for turn in range(TURNS + 1):
        for name, work in contestants.items():
            begin = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return times


def ratio(times, name, base):
    """Return the median over the turns of how many times as fast as `base`."""
    return f"**{statistics.median(b / a for a, b in zip(times[name], times[base])):.2f}**"


class Lengths(StoppingCriteria):
    """Ends a completion at a length that its first token decides on, for all contestants."""

    def __init__(self, lengths, prompt=0):
        self.lengths, self.prompt = lengths, prompt

    def __call__(self, tokens, scores=None, **options):
        tokens = tokens[:, self.prompt :]
        return tokens.shape[1] >= self.lengths[tokens[:, 0] % len(self.lengths)]


def sampling(model, rows, longest):
    lengths, draw = long_tailed(rows, longest).to(model.device), generator()
    prompts = torch.randint(3, model.config.vocab_size, (rows // GROUP, PROMPT), generator=draw)
    uniforms = torch.rand(rows // GROUP, GROUP, longest, generator=draw)
    ids, sampled = prompts.to(model.device), {}

    def ours():
        stops = Lengths(lengths)
        out = R.generate(model, prompts.tolist(), uniforms, eos_ids=[], pad_id=0, stops=stops)
        sampled["ours"] = int(out.lengths.sum())

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
        sampled["generate"] = int(lengths[out[:, PROMPT] % len(lengths)].sum())

    times = in_turns(model.device, {"ours": ours, "generate": theirs})
    speeds = [f"{sampled[name] / statistics.median(times[name]):.0f}" for name in times]
    return [str(rows), *speeds, ratio(times, "ours", "generate")]


def padded(model, out):
    """Log-probs and entropies as they are often computed: left and right padding, full logits."""
    width, mask = out.prompt_width, torch.ones_like(out.tokens)
    mask[:, width:] = out.completion_mask
    logits = model(out.tokens, attention_mask=mask, use_cache=False).logits[:, width - 1 : -1]
    logp = logits.float().log_softmax(-1)
    logprobs = logp.gather(-1, out.completions[..., None])[..., 0]
    return logprobs * out.completion_mask, -(logp.exp() * logp).sum(-1) * out.completion_mask


def random_rollout(model, rows, longest):
    """Return groups of completions of random tokens, of long-tailed lengths."""
    lengths, size, draw = long_tailed(rows, longest), model.config.vocab_size, generator()
    tokens = torch.randint(0, size, (rows, longest), generator=draw)
    prompts = torch.randint(0, size, (rows, SCORED_PROMPT), generator=draw)
    prompts = prompts[::GROUP].repeat_interleave(GROUP, 0).tolist()
    return R.Rollout.of(prompts, tokens, torch.zeros(rows, longest), lengths, lengths > 0, 0)


def built_in():
    """Return the built-in policy and 256 of its completions, in groups of 8, which share more."""
    task = tasks.TASKS["arithmetic"]
    source = str(pretrain.built_in_policy(task, "tiny"))
    model, tokenizer = R.load_model(source, "cpu"), R.inspect_model(source)[0]
    problems = tasks.problems(task, seed=0)
    prompts = [tokenizer.encode(next(problems)["prompt"]) for _ in range(32)]
    uniforms = torch.rand(32, GROUP, 64, generator=generator(0))
    return model, R.generate(model, prompts, uniforms, **R.end_and_pad_ids(model, tokenizer))


def scoring(model, out, tokens):
    """Time forward and backward passes: micro-batches of so many tokens, or of 16 padded rows."""

    def ours(shares):
        for part in R.micro_batches(out, torch.arange(len(out.tokens)), tokens, shares):
            logprobs, entropy = R.completion_logprobs(model, part.rollout, 1.0, part.trees)
            (logprobs.sum() + entropy.sum()).backward()
        model.zero_grad()

    def theirs():
        for part in out.lengths.argsort(descending=True).split(16):
            logprobs, entropy = padded(model, out.select(part))
            (logprobs.sum() + entropy.sum()).backward()
        model.zero_grad()

    contestants = {"trees": lambda: ours(True), "rows": lambda: ours(False), "padded": theirs}
    times = in_turns(model.device, contestants)
    useful = [f"{1e6 * statistics.median(t) / out.lengths.sum():.0f}" for t in times.values()]
    texts = zip(out.sequences(), out.prompt_lengths.tolist())
    prefixes = {tuple(text[:n]) for text, size in texts for n in range(size, len(text))}
    counts = [str(int(out.lengths.sum())), str(len(prefixes))]
    return [*counts, *useful, ratio(times, "trees", "rows"), ratio(times, "rows", "padded")]


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="3m", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="completions")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest completion")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[given.model])).eval()
    if given.model != "3m":
        model.to("cuda", torch.bfloat16)
    head = ["sampled", "ours, tokens/s", "`generate`", "ours / `generate`"]
    sampled = [sampling(model, rows, given.longest) for rows in given.rows]
    print(common.markdown(head, *sampled), flush=True)
    head = ["scored", "distinct prefixes", "trees, µs a token", "rows", "padded"]
    longest = given.longest // 2
    out = random_rollout(model, 64, longest).to(model.device)
    scored = [scoring(model, out, 2 * (SCORED_PROMPT + longest) * GROUP)]
    if model.device.type == "cpu":
        scored.append(scoring(*built_in(), 2**14))
    print(f"\n{common.markdown([*head, 'trees / rows', 'rows / padded'], *scored)}")


if __name__ == "__main__":
    main()
