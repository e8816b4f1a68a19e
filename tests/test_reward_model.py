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
from support.errors import UserError
from tools import SHAPE, character_tokenizer, good, metrics, refused

Judge = pytest.importorskip("support.extras.reward_model").Judge

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
    [row] = metrics(good(tmp_path, "--model models/tiny --steps 1", "--reward", reward).folder)
    judged = seen.steps[0].batch.verdicts
    verdicts = [each.terms.get("even", 0.0) for each in judged]
    for each, even in zip(judged, verdicts):
        expected = even + weight * score_of(model, each.row["prompt"] + each.completion)
        assert each.reward == pytest.approx(expected, abs=1e-4)
    assert row["advantage_abs"] > 0 and row["dead"] < 1
    assert ("solved" in row) == ("even" in reward)
    assert row.get("solved", 0.0) == pytest.approx(sum(verdicts) / len(verdicts), abs=1e-6)
    assert "judge" in parse_reward(reward).shaping  # even if its scores are between 0 and 1


def test_it_does_not_read_padding(model, folder):
    """Though its config names another token. A text that is too long loses its beginning."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"pad_token_id": 2, "max_position_embeddings": 24}
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
    """The first token of the template's text is not doubled. Without one messages are texts."""
    messages = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
    prompts = ["3+4=", [*messages, {"role": "user", "content": "5"}]]
    plain = Judge(str(folder), "cpu")
    assert plain.text(prompts[0], "7") == "3+4=7"
    expected = "user: 3\n\nassistant: 4\n\nuser: 5\n\nassistant: 6"
    assert plain.text(prompts[1], "6") == expected

    tokenizer = AutoTokenizer.from_pretrained(folder)
    begins = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    tokenizer.backend_tokenizer.post_processor = begins  # not before a template's text
    turn = "{{ 1 + (m.role != 'user') }}{{ m.content }}#"
    tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    tokenizer.save_pretrained(folder)
    chatty = Judge(str(folder), "cpu")
    chatty.read(["7", "6"], [{"prompt": prompt} for prompt in prompts])
    expected = [score_of(model, text) for text in ("13+4=#27#", "13#24#15#26#")]
    assert list(chatty.scores.values()) == pytest.approx(expected, abs=1e-5)


def test_what_is_no_reward_model_is_refused(model, models, folder, tmp_path):
    """A policy, no folder, two classes, scores that are no numbers, and two reward models."""
    two = transformers.Qwen3Config(**SHAPE, num_labels=2)
    AutoModelForSequenceClassification.from_config(two).save_pretrained(models / "two")
    for source, word in (("models/tiny", "Qwen3"), ("./none", "none"), ("models/two", "2")):
        with pytest.raises(UserError, match=f"--reward judge:{re.escape(source)}: .*{word}"):
            parse_reward(f"judge:{source}")

    broken = AutoModelForSequenceClassification.from_pretrained(folder)
    torch.nn.init.constant_(broken.score.weight, math.nan)
    broken.save_pretrained(folder)
    assert "--reward judge" in refused(tmp_path, f"--model models/tiny --reward judge:{folder}")
    both = ["--reward", "judge:models/judge + judge:models/judge"]
    assert "twice" in refused(tmp_path, "--model models/tiny", *both)
