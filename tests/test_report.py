"""The report of runs is well formed, loads nothing, and shows hostile text as text."""

import re
from xml.etree import ElementTree

import pytest
import torch

import train
from support import report
from support.errors import UserError
from support.loss_flags import bind
from tools import write_rows

LOADS = {"script", "img", "iframe", "object", "embed", "link", "base", "form", "a"}
HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</pre></details></style></title></body></html><h1>out<svg onload=document.title='owned'>",
    "\" onmouseover='document.title=1' x=\"",
    "<!-- <![CDATA[ ]]> &amp;lt; &#60;b&#62; {} %s",
    "שלום é\n東",  # to be shown as it is
]
# characters that hide or reorder text, and half of a surrogate pair, which no encoding takes
HIDDEN = "\x00\x07\t\r\x1b\x7f\x85\xad\u061c\u200b\u2028\u202e\u2066\u2069\ufeff\U000e0041\ud800"
FLAGS = vars(train.parse_flags(["--seed", "3"]))
START = {"date": "2026-11-23", "command": "train.py", "eval_solved": 0.289, "eval_pass@8": 0.832}


class Page:
    """Reads a page as XML, where an element that is not closed in its place is an error."""

    def __init__(self, text: str):
        closed = re.sub("(<meta[^>]*)>", r"\1/>", text.removeprefix("<!doctype html>"))
        self.root = ElementTree.fromstring(closed)
        self.elements = [(each.tag, each.attrib) for each in self.root.iter()]

    def of_class(self, name: str) -> list[tuple[str, str]]:
        """All classes and the text of the elements of a class."""
        looks = [(each.get("class", ""), "".join(each.itertext())) for each in self.root.iter()]
        return [(look, text) for look, text in looks if name in look.split()]

    def curves(self, title: str) -> list[list[tuple[float, float]]]:
        """Places of the points of each curve in the picture of this name."""
        found = []
        for path in self.root.findall(f".//svg[@aria-label='{title}']/path"):
            if "curve" in path.get("class").split():
                places = re.findall(r"([\d.]+) ([\d.]+)", path.get("d"))
                found.append([(float(x), float(y)) for x, y in places])
        return found


def step_row(step: int, **more) -> dict:
    row = {"step": step, "reward": 0.5, "truncated": 0.0, "dead": 0.3, "seconds_step": 12.0}
    return row | more


def evaluation(step: int, prompt: str, completion: str, **more) -> dict:
    row = {"step": step, "prompt": prompt, "answer": "4", "completion": completion}
    return row | {"reward": 1.0, "correct": 1.0} | more


def write_run(folder, rows=(), evaluations=(), **flags):
    folder.mkdir(parents=True)
    write_rows(folder / "starts.jsonl", [{"step": 0} | START])
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "evaluations.jsonl", evaluations)
    write_rows(folder / "config.json", [FLAGS | flags])
    return folder


def page_of(folder) -> tuple[str, Page]:
    path = folder.parent / "report.html"
    report.write_report([folder], path)
    text = path.read_bytes().decode("utf-8")  # newlines as they are
    return text, Page(text)


def assert_self_contained(text: str, page: Page):
    assert not {tag for tag, _ in page.elements} & LOADS
    for _, attributes in page.elements:
        assert not set(attributes) & {"src", "href", "srcset", "style", "action"}
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?:|//", page.root.findtext("style"))
    assert "default-src 'none'" in text


def test_report_of_two_runs_is_well_formed_and_loads_nothing(tmp_path, capsys):
    """It replaces an older page as a whole. A line that is still being written is left out."""
    rows = [step_row(step, eval_solved=0.2 * step, truncated=0.5) for step in range(1, 6)]
    del rows[3]["reward"]  # no completion had a verdict
    answers = [evaluation(0, "right", "x", reward=None, correct=None)]
    for prompt, correct in (("none", None), ("right", 1.0), ("wrong", 0.0)):
        answers.append(evaluation(9, prompt, "x", reward=0.25, correct=correct))
    first = write_run(tmp_path / "first", rows, answers)
    healthy = [row | {"truncated": 0.0} for row in rows[:2]]
    second = write_run(tmp_path / "second", healthy, algo="grpo")
    with open(first / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 6, "rew\xc3')
    path = tmp_path / "report.html"
    path.write_text("before")
    with open(path) as reader:
        report.main([str(first), str(second)])
        assert reader.read() == "before"
    text = path.read_text()
    page = Page(text)
    assert_self_contained(text, page)
    assert [len(curve) for curve in page.curves("eval_solved")] == [6, 3]
    assert [len(curve) for curve in page.curves("reward")] == [4, 2]  # there is none at step 0
    assert "gspo, tiny on arithmetic, lr 0.0002, seed 3: training took 60 s<" in text
    assert "solved: 28.9% (step 0) → 100.0% (step 5)<" in text and "pass@8: 83.2% (st" in text
    assert "2026-11-23: train.py<" in text
    cards = [("card wrong", "step 9: reward 0.25, wrongx")]  # first what is still wrong
    cards += [("card ", "step 0: no verdictx"), ("card right", "step 9: reward 0.25, rightx")]
    assert page.of_class("card") == [*cards, ("card ", "step 9: reward 0.25x")]
    said = capsys.readouterr().out
    for name, sentence in (("first", "50% of completions are trunc"), ("second", "no problems")):
        assert f"{name}: {sentence}" in said and sentence in "".join(page.root.itertext())


def test_hostile_text_changes_no_element_of_the_page(tmp_path):
    """Beside a run with harmless texts. All is shown to the letter, hidden characters as codes."""
    pages, words = [], [*HOSTILE, HIDDEN]
    for name, texts in (("hostile", words), ("harmless", ["word"] * len(words))):
        evaluations = [evaluation(texts[0], "prompt", "from a file that somebody sent")]
        for i, text in enumerate(texts):
            evaluations.append(evaluation(5, f"prompt {i} {text}", f"5 {text}", answer=text))
        flags = {"data": HIDDEN, "model": texts[3], texts[0]: "a flag"}
        pages.append(page_of(write_run(tmp_path / name / "run", [], evaluations, **flags)))
    (text, hostile), (_, harmless) = pages
    assert hostile.elements == harmless.elements
    assert_self_contained(text, hostile)
    shown = [body for _, body in hostile.of_class("card")]
    for word in [*HOSTILE, ascii(HIDDEN)[1:-1]]:
        assert any(body.endswith(f"5 {word}") for body in shown)
    assert not {*HIDDEN} & {*text}


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path):
    run = write_run(tmp_path / "run", [step_row(1)])
    (run / "evaluations.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="^--report .*: cannot make a page .*KeyError: 'prompt'"):
        report.main([str(run)])
    with pytest.raises(UserError, match="FileNotFoundError: .*none/config.json"):
        report.main([str(run / "none")])


def test_small_changes_look_small(tmp_path):
    """Axes of shares span 0 to 1, those of amounts start at 0, the ratio's is around 1."""
    values = {"solved": (0.5, 0.51), "length_mean": (6880.3, 6891.0), "kl": (1e-9, -2e-9)}
    values |= {"ratio_mean": (1.00001, 0.99999), "entropy": (0.02371234, 0.0237)}
    rows = [step_row(i, **{name: pair[i] for name, pair in values.items()}) for i in (0, 1)]
    text, page = page_of(write_run(tmp_path / "run", rows))
    for metric in values:
        [[(_, first), (_, second)]] = page.curves(metric)
        assert abs(first - second) < 2  # of 124
    for number in ("0.0237", "51.0%", "6,880", "1.0000"):
        assert re.search(rf">step \d: {number}<", text)
    assert "0.0237123" not in text and ">1.0030</text>" in text  # the end of the ratio's axis


@pytest.mark.parametrize(
    "values", [(0, 0), (-3, -3), (1e299, -1e299), (1, 1 + 1e-15), (1.89e-5, 3.79e-5)]
)
def test_any_two_values_have_a_place(tmp_path, values):
    rows = [step_row(i, reward=value, grad_norm=value) for i, value in enumerate(values, 1)]
    _, page = page_of(write_run(tmp_path / "run", rows))
    for metric in ("reward", "grad_norm"):
        [[(_, first), (_, second)]] = page.curves(metric)
        assert 6 <= min(first, second) <= max(first, second) <= 130
        assert (first >= second) == (values[1] >= values[0])
    for label in page.root.iter("text"):  # ends at x; a character is about 6.2 units wide
        assert 6.2 * len(label.text) <= float(label.get("x"))


def test_a_long_run_stays_a_small_page(tmp_path):
    rows = [step_row(step, reward=step) for step in range(1, 2001)]
    evaluations = [evaluation(step, "prompt", "x") for step in range(0, 2001, 16)]
    text, page = page_of(write_run(tmp_path / "run", rows, evaluations))
    assert 150 < len(page.curves("reward")[0]) <= report.MOST_POINTS
    assert text.count("<circle") <= 4 * report.MOST_DOTS  # four charts
    cards = page.of_class("card")
    assert len(cards) <= report.MOST_CARDS
    assert cards[0][1].startswith("step 0:") and cards[-1][1].startswith("step 2000:")


@pytest.mark.parametrize("algo", ["sapo", *report.CLIPS])
def test_a_group_shows_how_far_tokens_moved_and_which_are_clipped(tmp_path, algo):
    """Underlined are those whose gradient is 0, by the loss itself: inside the band, and beyond
    both of its sides. Rows without tokens, and one that is still being written, are skipped."""
    config = train.parse_flags(["--algo", algo])
    high = 2 * (config.clip_high or 0.2)
    moves = torch.tensor([[-high, 0, high], [high] * 3, [-high] * 3]).repeat(2, 1).requires_grad_()
    advantages = torch.tensor([[1.0] * 3] * 3 + [[-1.0] * 3] * 3)
    bind(config).loss(moves, torch.zeros(6, 3), advantages, torch.ones(6, 3))[0].backward()
    run = write_run(tmp_path / "run", [step_row(1)], **vars(config))
    row = {"step": 2, "prompt": "2+2=", "reward": 1.0, "tokens": ["<b>", "4", "!"]}
    pairs = zip(moves.tolist(), advantages.tolist())
    rows = [row | {"log_ratios": own, "advantage": a} for own, a in pairs]
    write_rows(run / "samples.jsonl", [*rows, {"step": 3}])
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"step": 4, "log_ratios": [')
    text, page = page_of(run)
    assert_self_contained(text, page)
    assert page.of_class("card")[0][1] == "reward 1, A +1.00, s\xa01.00000<b>4!"
    tokens = [attributes for _, attributes in page.elements if "title" in attributes]
    assert [token["title"] for token in tokens] == [f"{x:.4f}" for x in moves.exp().flatten()]
    looks = [token["class"].split() for token in tokens]
    assert ["clipped" in look for look in looks] == (moves.grad == 0).flatten().tolist()
    assert [look[:2] for look in looks[:3:2]] == [["less", "by4"], ["more", "by4"]]
    assert (f"below {1 - (config.clip_low or 0):g}." in text) == (algo != "sapo")
