"""A reward model: the text that it reads, the use of its score, the folders that are refused."""

import json
import math
import re
import shutil

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rewards import parse_reward
from support.extras.judge import Judge
from support.user import UserError
from tools import SHAPE, character_tokenizer, good, metrics, refused

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture(scope="module")
def model(models):
    """A reward model of the policy's vocabulary, with random weights: models/judge."""
    torch.manual_seed(1)
    shape = transformers.Qwen3Config(**SHAPE, num_labels=1)
    classifier = AutoModelForSequenceClassification.from_config(shape)
    with torch.no_grad():
        classifier.score.weight.normal_(std=0.5)
    classifier.save_pretrained(models / "judge")
    character_tokenizer().save_pretrained(models / "judge")
    return classifier.eval()


@pytest.fixture
def folder(model, models, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(models / "judge", tmp_path / "judge")


def score_of(model, text) -> float:
    """By transformers' own forward pass over the text alone."""
    ids = torch.tensor([character_tokenizer().encode(text)])
    with torch.no_grad():
        return float(model(ids, use_cache=False).logits[0, 0])


@pytest.mark.parametrize(
    "reward, weight",
    [("2*judge:models/judge", 2), ("pay.py:even + -0.25*judge:models/judge", -0.25)],
)
def test_its_score_is_part_of_the_reward_and_not_of_solved(reward, weight, model, seen, tmp_path):
    """reward = verifier + w score, row by row. Only the verifier says which answers are right."""
    flags = ["--model", "models/tiny", "--steps", "1", "--reward", reward]
    row = metrics(good(tmp_path, "", *flags).folder)[0]
    judged = seen.batches[0].samples
    verdicts = [each.score.terms.get("even", 0.0) for each in judged]
    for each, even in zip(judged, verdicts):
        expected = even + weight * score_of(model, each.row["prompt"] + each.text)
        assert each.score.reward == pytest.approx(expected, abs=1e-4)
    assert row["advantage_abs"] > 0 and row["dead"] < 1
    if "even" in reward:
        assert row["solved"] == pytest.approx(sum(verdicts) / len(verdicts), abs=1e-6)
    else:
        assert "solved" not in row
    assert "judge" in parse_reward(reward).shaping  # even if its scores are between 0 and 1


@pytest.mark.parametrize("pad", [2, None])
def test_it_does_not_read_padding(pad, model, folder):
    """Its scores in a batch are those of one row at a time, whatever pad token its config names. A
    text that is too long loses its beginning. Equal texts get equal scores."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"pad_token_id": pad, "max_position_embeddings": 24}
    (folder / "config.json").write_text(json.dumps(config))
    judge = Judge(str(folder), "cpu")
    prompts, completions = ["3+4=", "5*", "1+" * 20], ["7", "11111111", "5#5"]
    rows = [{"prompt": prompt} for prompt in prompts]
    judge.read([*completions, "5#6"], [*rows, rows[2]])
    for prompt, completion in zip(prompts, completions):
        expected = score_of(model, (prompt + completion)[-24:])
        assert judge(completion, "", prompt) == pytest.approx(expected, abs=1e-5)
    assert judge("5#5", "", prompts[2]) != judge("5#6", "", prompts[2])
    judge.read(["7"] * 40 + completions, [rows[0]] * 40 + rows)
    assert len(judge.scores) == 3


def test_it_reads_its_own_chat_template(model, folder):
    """Prompt and completion are turns of a chat where its tokenizer has a template. The first token
    of the template's text is not doubled. Without a template messages are texts."""
    messages = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
    prompts = ["3+4=", [*messages, {"role": "user", "content": "5"}]]
    plain = Judge(str(folder), "cpu")
    assert plain.text(prompts[0], "7") == "3+4=7"
    expected = "user: 3\n\nassistant: 4\n\nuser: 5\n\nassistant: 6"
    assert plain.text(prompts[1], "6") == expected

    tokenizer = AutoTokenizer.from_pretrained(folder)
    begins = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    tokenizer.backend_tokenizer.post_processor = begins  # not before a template's text
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}1{% else %}2{% endif %}{{ m.content }}#"
        "{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    chatty = Judge(str(folder), "cpu")
    chatty.read(["7", "6"], [{"prompt": prompt} for prompt in prompts])
    expected = [score_of(model, text) for text in ("13+4=#27#", "13#24#15#26#")]
    assert list(chatty.scores.values()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "source, words",
    [("models/tiny", "Qwen3ForCausalLM"), ("./none", "none"), ("models/two", "2")],
)
def test_what_is_no_reward_model_is_refused(source, words, model, models):
    """A policy, whose head would be random, no folder at all, a classifier of two classes."""
    two = transformers.Qwen3Config(**SHAPE, num_labels=2)
    AutoModelForSequenceClassification.from_config(two).save_pretrained(models / "two")
    with pytest.raises(UserError, match=f"--reward judge:{re.escape(source)}: .*{words}"):
        parse_reward(f"judge:{source}")


def test_one_that_cannot_score_is_refused_before_training(folder, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    torch.nn.init.constant_(model.score.weight, math.nan)
    model.save_pretrained(folder)
    assert "--reward judge" in refused(tmp_path, f"--model models/tiny --reward judge:{folder}")


def test_it_stands_once_in_a_reward(model, tmp_path):
    flags = ["--model", "models/tiny", "--reward", "judge:models/judge + judge:models/judge"]
    assert "twice" in refused(tmp_path, "", *flags)
