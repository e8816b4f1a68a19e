"""docs/copying.md: its code runs, and our losses have the gradients of the peers' at the settings
that it names.

Those of TRL and verl run where they are installed (an environment of their own will do, with
transformers and pytest):

    ENV/bin/python -m pytest tests/test_copy.py
"""

import importlib.util
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

import gspo
from tools import ROOT, by_group, gradients, random_policy, z_scores

COPYING = (ROOT / "docs/copying.md").read_text()
QUESTIONS = (ROOT / "docs/questions.md").read_text()
# by the name of the file, in the first line of a block
BLOCKS = dict(re.findall(r"```python\n# ([\w.]+).*?\n(.*?)```", COPYING + QUESTIONS, re.DOTALL))


def replaced(source: str, changes: dict[str, str]) -> str:
    """A program with other numbers, so that it runs here, in seconds."""
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def needs(peer: str):
    missing = importlib.util.find_spec(peer) is None
    return pytest.mark.skipif(missing, reason=f"{peer} is not installed")


# ---- docs/loop.py --------------------------------------------------------------------------------

LOOP = (ROOT / "docs/loop.py").read_text()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A GPT-2: positions are absolute, training has dropout, and its folder sets filters."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "vocab_size": 18}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    folder = tmp_path_factory.mktemp("copied") / "gpt2"
    random_policy(folder, transformers.GPT2Config(**shape, **ids))
    filters = {"do_sample": True, "top_k": 2, "top_p": 0.9, "eos_token_id": 1, "pad_token_id": 0}
    transformers.GenerationConfig(**filters).save_pretrained(folder)
    return folder


def run_loop(model, steps=2, lr="1e-3", chat=None) -> SimpleNamespace:
    """Run the loop, rewarded for even digits: its names, and the gradients of its updates."""
    changes = {
        "STEPS, PROMPTS, GROUP_SIZE, UPDATES, TEMPERATURE = 40, 16, 8, 4, 1.0": (
            f"STEPS, PROMPTS, GROUP_SIZE, UPDATES, TEMPERATURE = {steps}, 2, 8, 4, 0.7"
        ),
        "sys.argv[1], 1e-5": f"{str(model)!r}, {lr}",
        "len(sys.argv) > 1": "True",
        "What is {a} * {b}? Answer with just the number.": "{a}*{b}=",
        'float(re.findall(r"-?\\d+", completion)[-1:] == [row["answer"]])': (
            'sum(c in "02468" for c in completion) / (len(completion) or 1)'
        ),
        "tokenizer.pad_token = ": f"tokenizer.chat_template = {chat!r}; tokenizer.pad_token = ",
    }
    scope = {}
    with gradients() as noted:
        exec(replaced(LOOP, changes), scope)
    return SimpleNamespace(**scope, gradients=noted)


@torch.no_grad()
def logprobs_of(loop):
    return loop.completion_logprobs(loop.policy, loop.tokens, loop.seen, loop.width)


def test_loop_masks_to_the_first_end_token_and_scores_each_row_as_if_alone(policy):
    """Against loops over tokens: every completion without padding, by one softmax a token. A step
    has four updates, of which the clip may stop all completions but those of the first."""
    loop = run_loop(policy)
    found, lengths = logprobs_of(loop), []
    for tokens, seen, mask, logprobs in zip(loop.tokens, loop.seen, loop.mask, found):
        completion = tokens[-loop.width :].tolist()
        length = completion.index(1) + 1 if 1 in completion else loop.width
        assert mask.tolist() == [place < length for place in range(loop.width)]
        row = tokens[seen.bool()]
        with torch.no_grad():
            expected = (loop.policy(row[None]).logits[0] / 0.7).log_softmax(-1)
        for t in range(length):
            place = len(row) - length + t
            token = expected[place - 1, row[place]]
            torch.testing.assert_close(logprobs[t], token, atol=1e-5, rtol=1e-5)
        lengths.append(length)
    assert min(lengths) < max(lengths) and not loop.seen[:, 0].all()  # padded on both sides

    assert len(loop.gradients) == 4 * loop.STEPS
    first = loop.gradients[::4]
    assert all(any(gradient.any() for gradient in update) for update in first)
    assert (found - loop.old_logprobs)[loop.mask].abs().max() > 1e-3  # those before the updates


def test_loop_uses_the_chat_template_and_rewards_the_last_number(policy):
    """And its old log-probs are the policy's, which a learning rate of 0 does not move."""
    template = "{% for message in messages %}#{{ message['content'] }}{% endfor %}=="
    loop = run_loop(policy, steps=1, lr="0.0", chat=template)
    assert all(text.startswith("#") and text.endswith("===") for text in loop.prompts)
    assert (logprobs_of(loop) - loop.old_logprobs)[loop.mask].abs().max() < 1e-3
    scope = {"re": re}
    exec(re.search(r"def reward.*?\n\n", LOOP, re.DOTALL)[0], scope)
    texts = {"7 * 8 = 56.": 1, "-56": 0, "56 or 57": 0, "I do not know": 0, "56 and no other": 1}
    found = {text: scope["reward"](text, {"answer": "56"}) for text in texts}
    assert found == texts


@pytest.mark.slow
def test_loop_without_arguments_raises_its_reward():
    """The built-in policy: the mean reward of the last 5 of 40 steps is 0.2 above the first 5."""
    command = [sys.executable, str(ROOT / "docs/loop.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    rewards = [float(each) for each in re.findall(r"reward ([\d.]+)", result.stdout)]
    assert len(rewards) == 40 and sum(rewards[-5:]) > sum(rewards[:5]) + 1


# ---- corrections.py ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corrections():
    scope = {}
    exec(BLOCKS["corrections.py"], scope)
    return SimpleNamespace(**scope)


def test_term_advantages_match_scalar_loop(corrections):
    """Each term z-scored in its group, the weighted sums z-scored over the batch."""
    weights, generator = [1.0, 0.1, -0.5], torch.Generator().manual_seed(0)
    for size in (2, 4, 8):
        rewards = (torch.rand(24, 3, generator=generator) * 3).round().double()
        rewards[:size] = torch.tensor([0.1, 1 / 3, 0.7])
        terms = [by_group(column, size, z_scores) for column in rewards.T.tolist()]
        sums = [math.fsum(w * a for w, a in zip(weights, row)) for row in zip(*terms)]
        actual = corrections.term_advantages(rewards, weights, size)
        assert actual[:size].tolist() == [0] * size
        assert actual[size:].tolist() == pytest.approx(z_scores(sums)[size:], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["mismatch_mask", "off_policy_mask"])
def test_masks_match_scalar_loop(name, corrections):
    """Also with NaN on the padding. Both kinds of tokens occur."""
    old, new = -torch.rand(2, 8, 6, generator=torch.Generator().manual_seed(0))
    new[0:4] -= 0.6
    advantages = torch.tensor([1.0, -1, -1, 0, 1, -1, -1, -1])
    lengths = [6, 0, 1, 4, 3, 6, 2, 5]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    dirty = torch.where(mask, new, torch.nan)
    actual, found = corrections.off_policy_mask(dirty, old, advantages, mask, delta=0.1), set()
    if name == "mismatch_mask":
        actual = corrections.mismatch_mask(old, dirty, mask, low=0.8, high=1.5)
    for i, length in enumerate(lengths):
        drops = [(old[i, t] - new[i, t]).item() for t in range(6)]
        far = advantages[i] < 0 and sum(drops[:length]) / max(length, 1) > 0.1
        for t in range(6):
            near = 0.8 <= math.exp(drops[t]) <= 1.5
            kept = near if name == "mismatch_mask" else not far
            assert bool(actual[i, t]) == (kept and t < length)
            found.add(kept)
    assert found == {True, False}


def test_icepop_multiplies_the_kept_tokens_by_the_ratio(corrections):
    """pi_old / pi_sampler 0.4, 0.51, 2, 4.9 and 6: the first and the last are dropped."""
    ratios = torch.tensor([[0.4, 0.51, 2.0, 4.9, 6.0]])
    given = {"old_logprobs": ratios.log(), "sampler_logprobs": torch.zeros(1, 5)}
    given |= {"advantages": torch.full((1, 1), -2.0), "mask": torch.ones(1, 5)}
    [line] = re.findall(r"`(advantages \* mismatch_mask.*)`", COPYING)
    weighted = eval(line, vars(gspo) | vars(corrections) | given)
    assert weighted[0].tolist() == pytest.approx([0, -1.02, -4, -9.8, 0])


def test_baseline_advantages_match_scalar_loop():
    """Rewards minus the mean of their group, on every token, whitened over all tokens."""
    rewards, lengths = [1.0, 0.0, 0.0, 0.5], [3, 1, 2, 3]
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    scope = {"rewards": torch.tensor(rewards), "group_size": 2, "mask": mask}
    exec(BLOCKS["baseline.py"], scope)
    tokens = [a for a, length in zip([0.5, -0.5, -0.25, 0.25], lengths) for _ in range(length)]
    assert scope["advantages"][mask].tolist() == pytest.approx(z_scores(tokens), rel=1e-5)


# ---- peers.md ------------------------------------------------------------------------------------


def test_losses_have_the_values_of_trinitys_tests():
    """PPO, GSPO-token and k1 in tests/algorithm/policy_loss_test.py of Trinity-RFT."""
    torch.manual_seed(42)
    new, old, _ = 2 * torch.rand(3, 5, 20) - 1
    mask = torch.rand(5, 20) > 0.5
    given = new, old, 2 * torch.rand(5, 20) - 1, mask
    found = [gspo.ppo_loss(*given)[0], gspo.gspo_token_loss(*given)[0], (old - new)[mask].mean()]
    assert [float(value) for value in found] == pytest.approx([0.2856047, 0.2723511, -0.2166345])


# ---- TRL -----------------------------------------------------------------------------------------

ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, 2.0])  # of four completions
OF_SEQUENCES = {"importance_sampling_level": "sequence"}
IN_TRL = {  # the table of copying.md: our loss -> TRL's settings
    "gspo_loss": {"loss_type": "grpo", **OF_SEQUENCES, "epsilon": 3e-4, "epsilon_high": 4e-4},
    "luspo_loss": {"loss_type": "luspo", **OF_SEQUENCES, "epsilon": 2e-3, "epsilon_high": 2.5e-3},
    "grpo_loss": {"loss_type": "grpo", "epsilon": 0.2},
    "dr_grpo_loss": {"loss_type": "dr_grpo", "epsilon": 0.2},
    "dapo_loss": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "cispo_loss": {"loss_type": "cispo", "epsilon_high": 5},
    "sapo_loss": {"loss_type": "sapo"},
}


def trl_trainer(kind, model, folder, **settings):
    """A trainer of TRL's for micro-batches of 4 completions, two of them an update."""
    import datasets
    import trl

    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    settings |= {"num_generations": 4, "max_completion_length": 12, "beta": 0.0}
    settings |= {"use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"}}
    return kind(
        model=str(model),
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],  # nothing is sampled
        train_dataset=datasets.Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(8)]),
        args=trl.GRPOConfig(output_dir=str(folder), report_to="none", **settings),
    )


def weight_gradients(model, losses) -> list[torch.Tensor]:
    """The gradient of each loss, all weights in one tensor. That of the first is not 0."""
    found = []
    for loss in losses:
        model.zero_grad()
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert found[0].norm() > 1e-3
    return found


@needs("trl")
@pytest.mark.parametrize("extra", ["nothing", "tools and token weights", "weights"])
def test_trl_subclass_has_the_gradient_of_one_batch(extra, models, tmp_path):
    """In the last of three micro-batches, with the optional inputs of TRL."""
    import trl

    scope = {}
    exec(BLOCKS["our_trainer.py"], scope)
    trainer = trl_trainer(scope["OurGSPO"], models / "tiny", tmp_path, **IN_TRL["gspo_loss"])
    trainer.current_gradient_accumulation_steps = 3
    model = trainer.model.train()
    generator = torch.Generator().manual_seed(0)
    inputs = one_batch(generator)
    if extra != "nothing":
        # the first completion, which has A > 0, is clipped, and no other is
        change = torch.tensor([-1e-2, -1e-2, 1e-2, 0.0])[:, None]
        change = change + 1e-4 * torch.randn(4, 6, generator=generator)
        inputs["old_per_token_logps"] = logprobs_now(trainer, inputs).detach() + change
        trainer.use_vllm = True  # whose weights are in the inputs
        width = 1 if extra == "weights" else 6
        inputs["importance_sampling_ratio"] = torch.rand(4, width, generator=generator)
    if "tools" in extra:
        inputs["tool_mask"] = torch.tensor([1, 1, 0, 0, 1, 1]).expand(4, 6)

    losses = [
        kind._compute_loss(trainer, model, inputs) for kind in (trl.GRPOTrainer, type(trainer))
    ]
    theirs, ours = weight_gradients(model, losses)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3)
    clipped = trainer._metrics["train"]["clip_ratio/region_mean"][-1]
    assert clipped == pytest.approx(0.0 if extra == "nothing" else 1 / 4)


@needs("trl")
def test_trl_script_takes_four_updates_a_rollout_and_clips(models, tmp_path, monkeypatch):
    """The page's script, two rollouts: GSPO's settings reach TRL's trainer."""
    source = replaced(
        BLOCKS["trl_gspo.py"],
        {
            '"Qwen/Qwen3-0.6B"': repr(str(models / "tiny")),
            "learning_rate=1e-6, max_steps=400, logging_steps=4,": "learning_rate=1e-3, "
            "max_steps=8, logging_steps=1, use_cpu=True, bf16=False, report_to='none', "
            "save_strategy='no', model_init_kwargs={'dtype': 'float32'},",
            "float(text.strip() == gold)": "len(text) % 3 / 2",
            "GRPOTrainer(": "trainer = GRPOTrainer(",
            ".train()": "; trainer.train()",
        },
    )
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(source, scope)
    trainer = scope["trainer"]
    history = [row for row in trainer.state.log_history if "clip_ratio/region_mean" in row]
    clipped = [row["clip_ratio/region_mean"] for row in history]
    assert len(clipped) == 8
    assert [share > 0 for share in clipped] == [False, True, True, True] * 2
    wanted = IN_TRL["gspo_loss"]
    assert {name: getattr(trainer.args, name) for name in wanted} == wanted


def one_batch(generator) -> dict:
    """The inputs of the loss of TRL's trainer: four completions of up to 6 tokens."""
    completion_mask = (torch.arange(6) < torch.tensor([6, 4, 1, 3])[:, None]).long()
    return {
        "prompt_ids": torch.randint(3, 18, (4, 3), generator=generator),
        "prompt_mask": torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.randint(3, 18, (4, 6), generator=generator),
        "completion_mask": completion_mask,
        "advantages": ADVANTAGES,
        "num_items_in_batch": completion_mask.sum(),
    }


def logprobs_now(trainer, inputs) -> torch.Tensor:
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return trainer._get_per_token_logps_and_entropies(trainer.model, tokens, seen, 6)[0]


@needs("trl")
@pytest.mark.parametrize("name", IN_TRL)
def test_our_losses_have_the_gradients_of_trls(name, models, tmp_path):
    """Of the model's weights, for ratios within the band and far outside."""
    import trl

    of_trl = {"importance_sampling_level": "token", "epsilon_high": None, **IN_TRL[name]}
    trainer = trl_trainer(trl.GRPOTrainer, models / "tiny", tmp_path, **of_trl)
    model = trainer.model.eval()  # one batch, without accumulation
    generator = torch.Generator().manual_seed(0)
    inputs = one_batch(generator)
    new = logprobs_now(trainer, inputs)
    old = new.detach() + 0.3 * torch.randn(new.shape, generator=generator)
    inputs["old_per_token_logps"] = old

    budget = {"max_new_tokens": 12} if name == "dr_grpo_loss" else {}  # that of trl_trainer
    compute = getattr(gspo, name)
    loss, _ = compute(new, old, inputs["advantages"], inputs["completion_mask"], **budget)
    theirs, ours = weight_gradients(model, (trainer._compute_loss(model, inputs), loss))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3)


def test_page_names_the_settings_that_are_tested():
    rows = re.findall(r"(?m)^\| `(\w+_loss)` \| (.*?) \| (.*?) \|$", COPYING)
    assert {name for name, in_trl, _ in rows if in_trl != "–"} == IN_TRL.keys()
    assert {name for name, _, in_verl in rows if in_verl != "–"} == IN_VERL.keys()
    for name, in_trl, in_verl in rows:
        if name in IN_TRL:
            assert f"`{IN_TRL[name]['loss_type']}`" in in_trl
        if name in IN_VERL:
            assert f"`{IN_VERL[name][0]}`" in in_verl


# ---- verl ----------------------------------------------------------------------------------------


def verl_config(low, high, **settings):
    from verl.workers.config import ActorConfig

    settings |= {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 4}
    settings |= {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high}
    return ActorConfig(**settings)


RAGGED = torch.arange(7) < torch.tensor([7, 3, 1, 5])[:, None]


def verl_loss(mode, logprobs, old, mean, config, weights=None):
    """The loss of four completions as verl calls it, its gradient, and the share clipped."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    logprobs = logprobs.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(mode)(
        old_log_prob=old,
        log_prob=logprobs,
        advantages=ADVANTAGES[:, None] * RAGGED,
        response_mask=RAGGED,
        loss_agg_mode=mean,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    return loss.detach(), logprobs.grad, metrics.get("actor/pg_clipfrac")


@needs("verl")
@pytest.mark.parametrize("weighted", [False, True])
def test_verl_loss_has_the_gradients_of_verls_own_gspo(weighted):
    """Called as verl's ppo_loss calls it, on one of two ranks: 4 of a step's 16 completions."""
    exec(BLOCKS["our_gspo.py"], {})
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(4, 7, generator=generator)
    drift = torch.tensor([1.0, -1.0, 0.0, -1.0])[:, None]  # clipped above, below, and not
    new = old + (torch.randn(4, 7, generator=generator) + drift) * 1e-3
    weights = (torch.rand(4, 1, generator=generator) + 0.5).expand(4, 7) if weighted else None
    config = verl_config(3e-4, 4e-4)
    info = {"dp_size": 2, "batch_num_tokens": 64, "global_batch_size": 16}
    config.global_batch_info.update(info, loss_scale_factor=None)
    given = new, old, "seq-mean-token-mean", config, weights
    *theirs, of_tokens = verl_loss("gspo", *given)
    *ours, of_completions = verl_loss("our_gspo", *given)
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-4)
    assert (theirs[1] == 0).all(1).tolist() == [True, True, False, False]
    assert (of_tokens, of_completions) == pytest.approx((10 / 16, 2 / 4))


IN_VERL = {  # the table of copying.md: our loss -> loss_mode, loss_agg_mode, lower and upper clip
    "gspo_loss": ("gspo", "seq-mean-token-mean", 3e-4, 4e-4),
    "grpo_loss": ("vanilla", "seq-mean-token-mean", 0.2, 0.2),
    "dapo_loss": ("vanilla", "token-mean", 0.2, 0.28),
    "cispo_loss": ("cispo", "token-mean", 1.0, 4.0),
    "dppo_loss": ("dppo_tv", "token-mean", 0.2, 0.2),
    "sapo_loss": ("sapo", "seq-mean-token-mean", 0.2, 0.2),
    "gmpo_loss": ("geo_mean", "token-mean", 0.4, 0.4),
}


@needs("verl")
@pytest.mark.parametrize("name", IN_VERL)
def test_our_losses_have_the_values_and_gradients_of_verls(name):
    """Of the log-probs, for ratios within the band and far outside."""
    mode, mean, low, high = IN_VERL[name]
    dual_clip = 20.0 if name == "dppo_loss" else 1e9  # else none
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(4, 7, generator=generator)
    new = old + 0.3 * torch.randn(4, 7, generator=generator)
    config = verl_config(low, high, clip_ratio_c=dual_clip)
    expected, gradient, _ = verl_loss(mode, new, old, mean, config)
    ours = new.clone().requires_grad_()
    loss, _ = getattr(gspo, name)(ours, old, ADVANTAGES, RAGGED)
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(ours.grad, gradient, atol=1e-6, rtol=1e-4)
    assert expected.abs() > 1e-2 and gradient.any()
