"""Speed of sampling and scoring: rollout.py, with each layout, and transformers.

    python tests/bench/bench_rollout.py                           # 3 M parameters: minutes
    python tests/bench/bench_rollout.py --model qwen3-0.6b --rows 64    # on a GPU

All contestants get the same model, prompts and long-tailed lengths, and take turns. Ratios are
medians over the turns. Completions are random tokens and share only their prompt."""

import time

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM, StoppingCriteria

import bench_memory
import common
import rollout as R

GROUP, PROMPT, SCORED_PROMPT = 8, 24, 200
TURNS = 5
LONGEST = 256  # tokens of a completion
SHAPES = {"3m": dict(zip(bench_memory.NAMES, (192, 576, 6, 6, 2, 32, 1000, True)))}
SHAPES |= {f"qwen3-{name.lower()}": bench_memory.SHAPES[name] for name in bench_memory.PUBLISHED}


def long_tailed(rows, longest):
    """Lengths of completions: most are short, some reach the limit."""
    noise = torch.randn(rows, generator=torch.Generator().manual_seed(5))
    return (noise.exp() * longest / 7).long().clamp(4, longest)


def in_turns(contestants):
    """Return the seconds of each turn, {name: (TURNS,)}, after a warm-up turn."""
    times = {name: [] for name in contestants}
    for _ in range(1 + TURNS):
        for name, work in contestants.items():
            begin = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - begin)
    return {name: torch.tensor(seconds[1:]) for name, seconds in times.items()}


def speedup(times, name, base):
    return f"**{(times[base] / times[name]).median():.2f}**"


class Lengths(StoppingCriteria):
    """Ends a completion at a length that its first token determines, for all contestants."""

    def __init__(self, lengths, prompt=0):
        self.lengths, self.prompt = lengths, prompt

    def __call__(self, tokens, scores=None, **options):
        tokens = tokens[:, self.prompt :]
        return tokens.shape[1] >= self.lengths[tokens[:, 0] % len(self.lengths)]


def sampling(model, rows, longest):
    lengths = long_tailed(rows, longest).to(model.device)
    ids = torch.randint(3, model.config.vocab_size, (rows // GROUP, PROMPT)).to(model.device)
    uniforms = torch.rand(rows // GROUP, GROUP, longest)
    mask, sampled = torch.ones_like(ids), {}
    options = dict(do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)
    options |= dict(num_return_sequences=GROUP, max_new_tokens=longest)

    def ours():
        stops = Lengths(lengths)
        out = R.generate(model, ids.tolist(), uniforms, eos_ids=[], pad_id=0, stops=stops)
        sampled["ours"] = int(out.lengths.sum())

    def theirs():
        stops = [Lengths(lengths, PROMPT)]
        out = model.generate(ids, attention_mask=mask, stopping_criteria=stops, **options)
        sampled["theirs"] = int(lengths[out[:, PROMPT] % len(lengths)].sum())

    times = in_turns({"ours": ours, "theirs": theirs})
    speeds = [f"{sampled[name] / times[name].median():.0f}" for name in times]
    return [str(rows), *speeds, speedup(times, "ours", "theirs")]


def padded(model, out):
    """Log-probs and entropies as they are often computed: left and right padding, full logits."""
    width, mask = out.prompt_width, torch.ones_like(out.tokens)
    mask[:, width:] = out.completion_mask
    logits = model(out.tokens, attention_mask=mask, use_cache=False).logits[:, width - 1 : -1]
    logp = logits.float().log_softmax(-1)
    logprobs = logp.gather(-1, out.completions[..., None])[..., 0]
    return logprobs * out.completion_mask, -(logp.exp() * logp).sum(-1) * out.completion_mask


def scoring(model, rows, longest):
    """Forward and backward passes of micro-batches of 8 full rows, or of 16 padded ones."""
    lengths, size = long_tailed(rows, longest), model.config.vocab_size
    prompts = torch.randint(size, (rows // GROUP, SCORED_PROMPT)).repeat_interleave(GROUP, 0)
    tokens, zeros = torch.randint(size, (rows, longest)), torch.zeros(rows, longest)
    out = R.Rollout.of(prompts.tolist(), tokens, zeros, lengths, lengths > 0, 0).to(model.device)

    def backward(logprobs, entropy):
        (logprobs.sum() + entropy.sum()).backward()
        model.zero_grad()

    def ours(shares):
        budget = GROUP * (SCORED_PROMPT + longest)
        for part in R.micro_batches(out, torch.arange(rows), budget, shares):
            backward(*R.completion_logprobs(model, part.rollout, 1.0, part.trees))

    def theirs():
        for part in out.lengths.argsort(descending=True).split(2 * GROUP):
            backward(*padded(model, out.select(part)))

    times = in_turns({"trees": lambda: ours(True), "rows": lambda: ours(False), "padded": theirs})
    useful = [f"{1e6 * seconds.median() / lengths.sum():.0f}" for seconds in times.values()]
    ratios = [speedup(times, "trees", "rows"), speedup(times, "rows", "padded")]
    return [str(int(lengths.sum())), *useful, *ratios]


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="3m", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="completions")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[given.model])).eval()
    if given.model != "3m":
        model.to("cuda", torch.bfloat16)
    head = ["sampled", "ours, tokens/s", "`generate`", "ours / `generate`"]
    sampled = [sampling(model, rows, LONGEST) for rows in given.rows]
    print(common.markdown(head, *sampled), flush=True)
    head = ["scored", "trees, µs a token", "rows", "padded", "trees / rows", "rows / padded"]
    print(f"\n{common.markdown(head, scoring(model, 64, LONGEST // 2))}")


if __name__ == "__main__":
    main()
