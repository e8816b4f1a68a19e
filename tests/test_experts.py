"""Mixtures of experts: which experts changed their mind, and Routing Replay, by the experts of
pi_old or by those of the sampler."""

import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rollout
import train
from tools import EXPERTS, SHAPE, good, launch, metrics, newest, random_policy, refused, timeless

pytestmark = pytest.mark.usefixtures("place")

# ------------------------------------------------------------------------------ mixture of experts


@pytest.mark.parametrize("flags", ["", "--routing-replay", "--gradient-checkpointing"])
def test_expert_flips_are_a_share(flags, tmp_path):
    """Told with every evaluation, as it costs a pass over the batch."""
    result = good(
        tmp_path,
        "--model models/moe --reward pay.py:even --algo grpo --lr 3e-3 --steps 4 --eval-every 2 "
        f"{flags}",
    )
    rows = metrics(result.folder)
    assert ["expert_flips" in row for row in rows] == [False, True, False, True]
    flips = [row["expert_flips"] for row in rows if "expert_flips" in row]
    assert all(0 <= share <= 1 for share in flips)
    assert max(flips) > 0  # the policy did move


@pytest.mark.parametrize(
    "flags, shape",
    [
        ("--old-logprobs sampler", {}),
        ("", {"mlp_only_layers": [0, 1]}),  # a dense model with the config of a mixture
    ],
)
def test_no_flips_where_no_experts_are_recorded(flags, shape, tmp_path):
    config = transformers.Qwen3MoeConfig(**EXPERTS, **SHAPE, **shape)
    folder = random_policy(tmp_path / "moe", config)
    result = good(tmp_path, f"--model {folder} --reward pay.py:even --steps 1 {flags}")
    assert "expert_flips" not in metrics(result.folder)[0]


def test_a_replay_without_experts_ends(tmp_path):
    """Its config is that of a mixture, but no layer is one."""
    config = transformers.Qwen3MoeConfig(**EXPERTS, **SHAPE, mlp_only_layers=[0, 1])
    folder = random_policy(tmp_path / "moe", config)
    flags = f"--model {folder} --reward pay.py:even --routing-replay"
    assert "--routing-replay" in refused(tmp_path / "runs", flags)


def test_expert_flips_are_0_while_nothing_moves(tmp_path):
    """A learning rate that no weight can feel; all rows are compared."""
    flags = "--model models/moe --reward pay.py:even --algo grpo --lr 1e-30 --eval-every 1"
    result = good(tmp_path, flags)
    assert [row["expert_flips"] for row in metrics(result.folder)] == [0, 0]
    assert metrics(result.folder)[1]["grad_norm"] > 0


def test_routing_replay_uses_the_experts_of_pi_old(monkeypatch, tmp_path):
    """Every forward of an update runs the experts that were recorded for those rows; expert_flips
    is a count, in python, of the completion tokens whose sets differ afterwards."""
    used, batches, gate = {}, [], transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts
    forward, improve = gate.forward, train.improve

    def spy(self, hidden, experts, weights):
        used.setdefault(len(batches), []).append(experts)
        return forward(self, hidden, experts, weights)

    def watched(run, batch):
        batches.append(batch)
        updates = improve(run, batch)
        batches.append(batch)
        return updates

    monkeypatch.setattr(gate, "forward", spy)
    monkeypatch.setattr(train, "improve", watched)
    result = good(
        tmp_path,
        "--model models/moe --reward pay.py:even --algo grpo --kl-coef 0 --lr 1e-2 "
        "--routing-replay --steps 1",
    )
    batch = batches[0]
    parts = batch.own_micro_batches()
    assert [len(part.routing.experts) for part in parts] == [2] * 4  # layers
    old = [chosen for part in parts for chosen in part.routing.experts]
    assert len(used[1]) == 8 and all(a is b for a, b in zip(used[1], old))
    flips = []
    for i, part in enumerate(parts):
        reads = reading(batch.samples[part.rows])
        for layer in (0, 1):
            before, after = old[2 * i + layer][reads], used[2][2 * i + layer][reads]
            flips += [set(a) != set(b) for a, b in zip(before.tolist(), after.tolist())]
    assert len(flips) == 2 * int(batch.samples.lengths[batch.live].sum()) and any(flips)
    assert metrics(result.folder)[0]["expert_flips"] == pytest.approx(sum(flips) / len(flips))


def reading(samples):
    """(completion tokens,) the place, among all that a scoring pass reads, of the token before."""
    layout = rollout.PackedTexts(samples)
    return layout.predicting[layout.predicted]


def random_mixture(kind, **shape):
    """Of a few experts two are active, unless the shape says otherwise."""
    torch.manual_seed(0)
    shape = {"num_experts_per_tok": 2, **shape}
    return AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(
            kind,
            vocab_size=18,
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=2,
            eos_token_id=1,
            pad_token_id=0,
            moe_intermediate_size=16,
            **shape,
        )
    ).eval()


def mixture(kind, **shape):
    """A random mixture of experts, 2 of them active, and what scores completions that it sampled:
    score(recorded) -> (log-probs, the routing of now)."""
    model = random_mixture(kind, **shape)
    samples = rollout.generate(
        model,
        [[3, 4], [5, 6, 7]],
        group_size=2,
        max_new_tokens=6,
        pad_id=0,
        eos_ids=[1],
        generator=torch.Generator().manual_seed(0),
    )

    def score(recorded=None):
        with rollout.Routing(recorded) as routing:
            return rollout.completion_logprobs(model, samples, temperature=1.0)[0], routing

    plain = rollout.completion_logprobs(model, samples, temperature=1.0)[0]
    logprobs, before = score()
    assert before.experts and torch.equal(logprobs, plain)  # recording changes nothing
    assert torch.equal(score(before)[0], plain)  # replayed before any change: the same bits
    return model, score, before


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
def test_replayed_experts_are_weighed_by_the_router_of_today(kind):
    """Experts of the model before a change of its routers, against a scalar reading of what the
    block should do: softmax over all experts, those of before chosen, renormalised where the model
    does; and the router's gradient flows."""
    model, score, before = mixture(
        kind,
        num_hidden_layers=1,
        bos_token_id=None,
        **{"num_local_experts" if kind == "mixtral" else "num_experts": 6},
    )
    assert len(before.experts) == 1
    router = next(m for m in model.modules() if type(m).__name__.endswith("TopKRouter"))
    with torch.no_grad():
        router.weight += 0.3 * torch.randn_like(router.weight)
    outputs = []
    hook = router.register_forward_hook(
        lambda module, inputs, output: outputs.append((inputs, output))
    )
    changed, now = score()
    replayed, again = score(before)
    hook.remove()
    assert again.experts[0] is before.experts[0]
    assert not torch.equal(now.experts[0].sort(-1)[0], before.experts[0].sort(-1)[0])
    assert not torch.equal(changed, replayed)
    (hidden,), _ = outputs[1]
    weights = []
    for row, chosen in zip(
        (hidden.reshape(-1, 16) @ router.weight.T).tolist(), before.experts[0].tolist()
    ):
        exps = [math.exp(x - max(row)) for x in row]
        picked = [exps[e] / sum(exps) for e in chosen]
        total = sum(picked) if getattr(router, "norm_topk_prob", True) else 1.0
        weights.append([w / total for w in picked])
    seen = []
    experts = next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
    spy = experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    score(before)[0].sum().backward()
    spy.remove()
    assert torch.equal(seen[0][1], before.experts[0])
    torch.testing.assert_close(seen[0][2], torch.tensor(weights), atol=1e-5, rtol=1e-5)
    assert router.weight.grad is not None and bool(router.weight.grad.abs().sum() > 0)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    "kind, more",
    [
        ("gpt_oss", dict(num_local_experts=4)),
        ("granitemoe", dict(num_local_experts=4)),
        (
            "deepseek_v3",
            dict(
                n_routed_experts=8,
                n_group=2,
                topk_group=1,
                n_shared_experts=1,
                kv_lora_rank=8,
                q_lora_rank=8,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=8,
                first_k_dense_replace=1,
            ),
        ),
    ],
)
def test_other_routers_are_replayed_too(kind, more):
    """Two layers; after its weights moved, a model that is replayed takes the experts of before."""
    model, score, before = mixture(kind, num_hidden_layers=2, head_dim=8, **more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    changed, now = score()
    replayed, again = score(before)
    assert any(not torch.equal(a, b) for a, b in zip(before.experts, now.experts))
    assert all(a is b for a, b in zip(before.experts, again.experts, strict=True))
    assert not torch.equal(changed, replayed)


def test_routing_replay_leaves_the_model_untouched(seen, tmp_path):
    """After the run no hook is left: a forward is that of the saved model, loaded anew."""
    result = good(tmp_path, "--model models/moe --reward pay.py:even --algo grpo --routing-replay")
    policy = seen.run.policy
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in policy.modules()
    )
    loaded = AutoModelForCausalLM.from_pretrained(newest(result.folder), dtype=torch.float32)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(policy.eval()(ids).logits, loaded.eval()(ids).logits)


def test_replay_needs_recorded_experts(tmp_path):
    """Experts are recorded while the trainer scores pi_old."""
    flags = "--model models/moe --routing-replay --old-logprobs sampler"
    sentence = refused(tmp_path / "runs", flags)
    assert "--routing-replay" in sentence and "--old-logprobs trainer" in sentence
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------ of the sampler

TWO_LAYERS = dict(num_hidden_layers=2, head_dim=8)
MIXTURES = {
    "qwen3_moe": dict(num_experts=6),
    "qwen2_moe": dict(num_experts=6, shared_expert_intermediate_size=16),
    "mixtral": dict(num_local_experts=6, sliding_window=None),
    "olmoe": dict(num_experts=6, num_experts_per_tok=3),
    "gpt_oss": dict(num_local_experts=6),
    "granitemoe": dict(num_local_experts=6),
    "deepseek_v3": dict(  # groups of experts are chosen first; the first layer is dense
        num_hidden_layers=3,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
}
PROMPTS = [[3, 4], [5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]


def opinionated_mixture(kind, **shape):
    """Weights so large that texts differ in their experts, and no two experts are tied."""
    model = random_mixture(kind, **{**TWO_LAYERS, **MIXTURES[kind], **shape})
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def recorded(model, prompts=PROMPTS, **options):
    options = dict(group_size=3, max_new_tokens=12, eos_ids=[1], record_experts=True) | options
    generator = torch.Generator().manual_seed(0)
    return rollout.generate(model, prompts, generator=generator, pad_id=0, **options)


def text_of(samples, row) -> torch.Tensor:
    """(tokens,) of a prompt and its completion."""
    start = samples.prompt_width - samples.prompt_lengths[row]
    return samples.tokens[row, start : samples.prompt_width + samples.lengths[row]]


def read_alone(model, ids, again=None):
    """Log-probs (tokens - 1,) of a text alone, by the whole model, and its Routing; again: (tokens,
    C) choices that are made once more."""
    before = rollout.Routing()
    if again is not None:
        with rollout.Routing() as before:
            model(ids[None], use_cache=False)
        columns, column = again.long(), 0
        for i, choice in enumerate(before.choices):
            k = choice.experts.shape[1]
            before.choices[i] = choice._replace(experts=columns[:, column : column + k])
            column += k
        assert column == columns.shape[1]
    with rollout.Routing(before) as routing:
        logits = model(ids[None], use_cache=False).logits[0, :-1]
    logprobs = logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs, routing


def sets(experts, widths):
    """(tokens, C) -> nested lists: a set of experts for each token and call."""
    return [[set(part.tolist()) for part in row.split(widths)] for row in experts]


SAMPLINGS = {
    "all at once": {},
    "two slots, refilled": dict(max_slots=2),
    "five slots, compacted": dict(max_slots=5),
    "one": dict(max_slots=1, group_size=1),
    "the second half": dict(share=rollout.Share(1, 2), max_slots=4),
    "no end": dict(eos_ids=[]),
}


def check_recorded(model, samples):
    """Each row's choices are those of a forward pass of its text alone."""
    for row in range(len(samples.lengths)):
        ids = text_of(samples, row)
        _, alone = read_alone(model, ids)
        widths = [choice.experts.shape[1] for choice in alone.choices]
        expected = torch.cat([choice.experts for choice in alone.choices], dim=1)[:-1]
        found = samples.experts[row, : len(ids) - 1]
        assert found.shape[1] == sum(widths)
        assert sets(found, widths) == sets(expected, widths)
        assert not samples.experts[row, len(ids) - 1 :].any()  # the last token is never read


@pytest.mark.parametrize("case", SAMPLINGS)
@torch.no_grad()
def test_recorded_experts_lie_at_their_tokens(case):
    """Whatever the slots, against a forward pass of each completion alone, to the last choice."""
    model = opinionated_mixture("qwen3_moe")
    samples = recorded(model, **SAMPLINGS[case])
    assert samples.experts.dtype == torch.uint8
    assert samples.experts.shape == (*samples.tokens.shape, 4)  # two layers, two experts each
    assert len({int(length) for length in samples.lengths}) > 1 or case == "no end"
    assert len(samples.experts[0, : samples.prompt_lengths[0] + 1].unique()) > 1
    check_recorded(model, samples)


@pytest.mark.parametrize("kind", MIXTURES)
@torch.no_grad()
def test_experts_of_every_family_are_recorded(kind, monkeypatch):
    """Prompts in chunks, few slots; what is sampled is what is sampled without a record."""
    monkeypatch.setattr(rollout, "PROMPT_TOKENS", 8)
    model = opinionated_mixture(kind)
    samples = recorded(model, max_slots=4)
    check_recorded(model, samples)
    plain = recorded(model, max_slots=4, record_experts=False)
    assert plain.experts is None
    assert torch.equal(plain.tokens, samples.tokens)
    assert torch.equal(plain.sampler_logprobs, samples.sampler_logprobs)
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in model.modules()]
    assert not any(hooks)


@torch.no_grad()
def test_prompts_in_chunks_and_two_pages_keep_their_experts(monkeypatch):
    """Few prompts are read at a time; two rollouts of other widths in one, rows in disorder."""
    chunks, read = [], rollout.Prompts.read_chunk

    def watched(self):
        chunks.append(self.next)
        read(self)

    monkeypatch.setattr(rollout.Prompts, "read_chunk", watched)
    monkeypatch.setattr(rollout, "PROMPT_TOKENS", 8)
    model = opinionated_mixture("qwen3_moe")
    first = recorded(model, max_slots=4)
    assert len(chunks) > 2
    second = recorded(model, [[4, 5, 6], [7, 8]], max_new_tokens=20, eos_ids=[])
    together = rollout.Rollout.cat([first, second, first], pad_id=0)
    check_recorded(model, together[torch.randperm(len(together.lengths))])
    check_recorded(model, together.to("cpu")[3:9])


class Echo:
    """A tool that is asked after every 5 and 6, and writes three tokens."""

    vocabulary, asking_tokens = 18, [5, 6]

    def to(self, ids, room):
        return [7, ids[-1], 8][:room]


@torch.no_grad()
def test_tokens_that_a_tool_wrote_are_read_by_experts_too(monkeypatch):
    """The record has them, at their places; the replay takes them, in the text that is scored."""
    monkeypatch.setattr(rollout, "PROMPT_TOKENS", 8)
    model = opinionated_mixture("qwen3_moe")
    samples = recorded(model, max_slots=4, max_new_tokens=20, replies=Echo())
    assert samples.forced.any(1).sum() > 3
    check_recorded(model, samples)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    with rollout.SamplerRouting() as routing:
        replayed, _ = rollout.completion_logprobs(model, samples, temperature=1.0)
    for row, length in enumerate(samples.lengths.tolist()):
        ids = text_of(samples, row)
        experts = samples.experts[row, : len(ids)]
        experts[-1] = experts[-2]
        logprobs, _ = read_alone(model, ids, experts)
        own = samples.completion_mask[row, :length]
        torch.testing.assert_close(
            replayed[row, :length][own], logprobs[-length:][own], atol=1e-5, rtol=0
        )
    assert len(routing.sampler_flips()) == 2 * samples.completion_mask.sum()


@torch.no_grad()
def test_more_than_256_experts_take_two_bytes():
    model = opinionated_mixture("qwen3_moe", num_experts=300, num_experts_per_tok=4)
    samples = recorded(model)
    assert samples.experts.dtype == torch.int16 and samples.experts.max() > 255
    check_recorded(model, samples)


@torch.no_grad()
def test_a_loss_that_the_model_computes_for_its_router_is_no_router():
    """With output_router_logits the whole model calls torch.topk on all layers' scores again."""
    model = opinionated_mixture("mixtral")
    model.config.output_router_logits = True
    samples = recorded(model, max_slots=4)
    model.config.output_router_logits = False
    check_recorded(model, samples)


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_samplers_experts_are_taken_again_at_their_tokens(kind):
    """Completions of a sampler whose routers then move: scored in one packed pass of other rows,
    against the whole model over each text alone that takes the same experts; the routers' own
    choices are counted against the sampler's."""
    model = opinionated_mixture(kind)
    samples = recorded(model, max_slots=4)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    rows = torch.tensor([14, 2, 0, 7, 3, 4, 11])
    part = samples[rows]
    with rollout.SamplerRouting() as routing:
        replayed, _ = rollout.completion_logprobs(model, part, temperature=1.0)
    plain, _ = rollout.completion_logprobs(model, part, temperature=1.0)
    assert (replayed - plain).abs().max() > 1e-2  # the experts matter

    seen = 0
    for i, length in enumerate(part.lengths.tolist()):
        ids = text_of(part, i)
        experts = part.experts[i, : len(ids)]
        experts[-1] = experts[-2]  # it is never read: any choice will do
        logprobs, _ = read_alone(model, ids, experts)
        torch.testing.assert_close(replayed[i, :length], logprobs[-length:], atol=1e-5, rtol=0)
        seen += length
    assert len(routing.sampler_flips()) == len(routing.experts) * seen
    flips = routing.sampler_flips().float().mean()
    assert 0 < flips < 1


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_sampler_flips_are_the_routers_own_choices(kind):
    """By hand, in the first layer of a mixture, whose input no replay changes: the sets of experts
    that a free pass over the same completions chooses against those of the record."""
    model = opinionated_mixture(kind)
    samples = recorded(model)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    with torch.no_grad(), rollout.SamplerRouting() as routing:
        rollout.completion_logprobs(model, samples, temperature=1.0)
    differ = []
    for row, length in enumerate(samples.lengths.tolist()):
        ids = text_of(samples, row)
        _, free = read_alone(model, ids)
        own = free.experts[0][-length - 1 : -1].tolist()
        before = samples.experts[row, : len(ids) - 1, :2][-length:].tolist()
        differ += [set(a) != set(b) for a, b in zip(own, before, strict=True)]
    flips = routing.sampler_flips()
    assert flips[: len(differ)].tolist() == differ and 0 < sum(differ) < len(differ)


@pytest.mark.parametrize("replay", ["none", "policy", "sampler"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_recomputed_layers_take_the_same_experts(kind, replay):
    """With gradient checkpointing the backward pass chooses again: the same gradients."""
    model = opinionated_mixture(kind)
    samples = recorded(model)
    with rollout.Routing() as of_pi_old, torch.no_grad():
        rollout.completion_logprobs(model, samples, temperature=1.0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)

    def routing():
        if replay == "sampler":
            return rollout.SamplerRouting()
        return rollout.Routing(of_pi_old if replay == "policy" else None)

    gradients, kept = [], []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        with routing() as now:
            logprobs, _ = rollout.completion_logprobs(model, samples, temperature=1.0)
        if replay == "sampler":
            kept.append((logprobs.detach(), now.sampler_flips()))
            assert now.sampler_flips().any()
        else:
            kept.append((logprobs.detach(), of_pi_old.flips(now)))
            assert of_pi_old.flips(now).any() == (replay == "none")
        choices = len(now.choices)
        model.zero_grad()
        logprobs.sum().backward()
        assert len(now.choices) == choices  # what is chosen again is not recorded again
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])

    assert all(map(torch.equal, *kept))
    assert len(gradients[0]) == len(gradients[1])
    for plain, recomputed in zip(*gradients):
        torch.testing.assert_close(recomputed, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("replay", ["", "--routing-replay"])
def test_checkpointing_changes_neither_flips_nor_weights(replay, tmp_path):
    flags = f"{MOE} --steps 3 {replay}"
    rows, weights = [], []
    for name in ("", "--gradient-checkpointing"):
        result = good(tmp_path / f"run{name}", f"{flags} {name}")
        rows.append([row["expert_flips"] for row in metrics(result.folder)])
        weights.append(load_file(newest(result.folder) / "model.safetensors"))
    assert rows[0] == pytest.approx(rows[1]) and max(rows[0]) > 0
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-5)


def test_a_rollout_without_a_record_cannot_be_replayed():
    model = opinionated_mixture("qwen3_moe")
    samples = recorded(model)._replace(experts=None)
    sentence = pytest.raises(rollout.UserError, match="the experts that its sampler chose")
    with sentence, rollout.SamplerRouting():
        rollout.completion_logprobs(model, samples, temperature=1.0)


# ------------------------------------------------------------------------------ training with them

MOE = "--model models/moe --reward pay.py:even --algo grpo --kl-coef 0 --lr 1e-2 --eval-every 1"


def test_the_samplers_experts_are_those_of_pi_old_while_nothing_is_stale(tmp_path):
    """One policy in float32: both replays train the same, up to rounding."""
    runs = {}
    for mode in ("policy", "sampler"):
        runs[mode] = good(tmp_path / mode, f"{MOE} --steps 3 --routing-replay {mode}").folder
    rows = zip(metrics(runs["policy"]), metrics(runs["sampler"]), strict=True)
    for policy, sampler in rows:
        assert sampler["sampler_flips"] == 0
        assert "sampler_flips" not in policy
        for name in ("reward", "grad_norm", "policy_kl", "policy_token_std", "eval_solved"):
            assert sampler[name] == pytest.approx(policy[name], rel=1e-3, abs=1e-6), name
        assert policy["policy_token_std"] > 1e-3  # it moved
    tensors = load_file(newest(runs["policy"]) / "model.safetensors")
    found = load_file(newest(runs["sampler"]) / "model.safetensors")
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=0)


def watch_experts(monkeypatch):
    """Keeps what every experts module of qwen3_moe is given in the trainer's scoring passes: lists
    of (tokens, k), a pass each; and whether each call of generate recorded."""
    passes, records = [], []
    gate = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts
    forward, score, generate = gate.forward, rollout.completion_logprobs, rollout.generate
    scoring = []

    def experts(self, hidden, chosen, weights):
        if scoring:
            passes[-1][1].append(chosen)
        return forward(self, hidden, chosen, weights)

    def watched_score(model, samples, **options):
        passes.append((samples, []))
        scoring.append(True)
        try:
            return score(model, samples, **options)
        finally:
            scoring.pop()

    def watched_generate(*arguments, **options):
        records.append(options.get("record_experts"))  # None: tries the dtype alone
        return generate(*arguments, **options)

    monkeypatch.setattr(gate, "forward", experts)
    monkeypatch.setattr(rollout, "completion_logprobs", watched_score)
    monkeypatch.setattr(rollout, "generate", watched_generate)
    return passes, records


@pytest.mark.parametrize(
    "flags",
    [
        "--stale-steps 3 --dynamic-sampling --max-refills 1",
        "--dtype bfloat16",
        "--stale-steps 3 --gradient-checkpointing",
        "--stale-steps 3 --epochs 2 --entropy-coef 0.1 --lora-rank 2",
        "--stale-steps 3 --old-logprobs sampler",
    ],
)
def test_every_pass_of_the_policy_takes_the_samplers_experts(flags, monkeypatch, tmp_path):
    """Old log-probs and all updates of a stale or rounded sampler; its own choices are others. What
    evaluation samples is not recorded; expert_flips scores once more, under the same replay."""
    passes, records = watch_experts(monkeypatch)
    result = good(tmp_path, f"{MOE} --steps 3 --routing-replay sampler {flags}")
    passes = [one for one in passes if one[0].experts is not None]  # not of a check
    assert len(passes) >= 3 * 4
    for samples, layers in passes:
        calls = layers[:2]  # the layers' experts; checkpointing's second run comes afterwards
        for layer, chosen in enumerate(calls):
            expected = []
            for row, length in enumerate(samples.lengths.tolist()):
                start = int(samples.prompt_lengths[row]) - 1
                part = samples.experts[row, start : start + length, 2 * layer : 2 * layer + 2]
                expected += part.tolist()
            assert chosen[reading(samples)].tolist() == expected
    assert records.count(True) >= 3 and records.count(False) == 4  # before, and three evaluations
    rows = metrics(result.folder)
    if "--old-logprobs sampler" in flags:  # pi_old is not scored: its own choices are not known
        assert not any("sampler_flips" in row for row in rows)
        return
    assert all(0 <= row["sampler_flips"] < 1 for row in rows)
    assert rows[-1]["sampler_flips"] > 0
    assert all(0 < row["expert_flips"] < 1 for row in rows)
    first = [row["ratio_mean"] for row in rows]
    assert all(math.isfinite(ratio) for ratio in first)


def test_replayed_experts_bring_a_stale_sampler_and_the_trainer_closer(tmp_path):
    """Their log-probs differ by weights alone, then, no longer by experts."""
    spread = {}
    for mode in ("no", "sampler"):
        flag = "--no-routing-replay" if mode == "no" else "--routing-replay sampler"
        folder = good(tmp_path / mode, f"{MOE} --lr 3e-3 --steps 2 --stale-steps 9 {flag}").folder
        spread[mode] = metrics(folder)[1]["sampler_token_std"]
    assert 0 < spread["sampler"] < 0.9 * spread["no"]


def test_the_first_update_of_a_replay_has_the_ratio_1(tmp_path):
    flags = f"{MOE} --steps 3 --stale-steps 3 --completions-per-update 16 --routing-replay sampler"
    for row in metrics(good(tmp_path, flags).folder):
        assert row["ratio_mean"] == 1 and row["policy_token_std"] == 0


@pytest.mark.parametrize("was, mode", [(True, "policy"), (False, None)])
def test_a_run_of_the_time_when_it_was_a_switch_goes_on(was, mode, tmp_path):
    flags = f"{MOE} --steps 1 --routing-replay" if was else f"{MOE} --steps 1"
    folder = good(tmp_path, flags).folder
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert config["routing_replay"] == mode
    path.write_text(json.dumps({**config, "routing_replay": was}))
    result = good(tmp_path, "--resume --name run --steps 2", small=False)
    assert "routing_replay" not in result.out  # nothing has changed
    assert json.loads(path.read_text())["routing_replay"] == mode
    assert [row["step"] for row in metrics(folder)] == [1, 2]


def test_a_replay_of_the_samplers_experts_resumes_to_the_bit(tmp_path):
    flags = f"{MOE} --stale-steps 3 --save-every 1 --routing-replay sampler"
    whole = good(tmp_path / "whole", f"{flags} --steps 4").folder
    parts = good(tmp_path / "parts", f"{flags} --steps 2").folder
    good(tmp_path / "parts", "--resume --name run --steps 4", small=False)
    assert timeless(parts)[-2:] == timeless(whole)[-2:]
    tensors = [load_file(newest(folder) / "model.safetensors") for folder in (parts, whole)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[1])


@pytest.mark.parametrize("flags", ["", "--gradient-checkpointing", "--old-logprobs sampler"])
def test_what_the_sampler_cannot_tell_is_refused_before_a_model_loads(flags, monkeypatch, tmp_path):
    """A dense model, and one that transformers samples."""
    hybrid = transformers.Qwen3NextConfig(
        **{**EXPERTS, "num_experts": 4}, **SHAPE, layer_types=["linear_attention", "full_attention"]
    )
    random_policy(tmp_path / "hybrid", hybrid)

    def load(*arguments, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(rollout, "load_model", load)
    for model, word in (("models/tiny", "mixture"), (tmp_path / "hybrid", "generate")):
        line = f"--model {model} --reward pay.py:even --routing-replay sampler {flags}"
        sentence = refused(tmp_path / "runs", line)
        assert "--routing-replay" in sentence and word in sentence
        assert not (tmp_path / "runs").exists()


def test_a_config_of_a_mixture_without_routers_is_refused(tmp_path):
    config = transformers.Qwen3MoeConfig(**EXPERTS, **SHAPE, mlp_only_layers=[0, 1])
    folder = random_policy(tmp_path / "moe", config)
    flags = f"--model {folder} --reward pay.py:even --routing-replay sampler"
    assert "routers of this model cannot be watched" in refused(tmp_path / "runs", flags)


@pytest.mark.parametrize(
    "flags, mode",
    [
        ("", None),
        ("--routing-replay", "policy"),
        ("--routing-replay policy", "policy"),
        ("--routing-replay --steps 3", "policy"),
        ("--routing-replay sampler", "sampler"),
        ("--routing-replay sampler --no-routing-replay", None),
    ],
)
def test_the_flag_may_stand_alone(flags, mode):
    config = train.resolve(train.parse_flags(f"--model x --data y {flags}".split()))
    assert config.routing_replay == mode


def test_a_replay_that_does_not_exist_is_refused(tmp_path):
    sentence = refused(tmp_path / "runs", f"{MOE} --routing-replay smapler")
    assert "--routing-replay smapler: expected one of policy, sampler" in sentence
    assert launch(tmp_path / "runs", f"{MOE} --no-routing-replay 1").status == 2
