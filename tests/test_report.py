"""The page of runs is well formed, loads nothing and shows hostile text as text. Curves lie where
their values are, and a group shows its update."""

import json
import re
from xml.etree import ElementTree

import pytest

from support import report
from support.errors import UserError
from tools import write_rows

LOADS = {"script", "img", "iframe", "object", "embed", "link", "base", "form", "a"}
HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</pre></details></body></html><h1>out",
    "</style></title><svg onload=document.title='owned'>",
    "\" onmouseover='document.title=1' x=\"",
    "<!-- <![CDATA[ ]]> &amp;lt; &#60;b&#62; {} %s",
]
HIDDEN = "\x00\x07\x08\r\x1b\x7f\x85\xad\u061c\u200b\u200f\u2028\u202e\u2066\u2069\ufeff\U000e0041"
FLAGS = {"algo": "gspo", "model": "tiny", "data": None, "task": "arithmetic", "lr": 2e-4}
FLAGS |= {"prompts_per_step": 32, "group_size": 8, "completions_per_update": 64, "epochs": 1}
FLAGS |= {"clip_low": 3e-4, "eval_prompts": 256}
START = {"date": "2026-11-23", "command": "python train.py --algo gspo", "step": 0}


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
    row = {"step": step, "reward": 0.5, "solved": 0.5, "truncated": 0.0, "dead": 0.3}
    return row | {"dead_right": 0.2, "clip_fraction": 0.3, "entropy": 0.4} | more


def evaluation(step: int, prompt: str, completion: str, **more) -> dict:
    row = {"step": step, "prompt": prompt, "answer": "4", "completion": completion}
    return row | {"reward": 1.0, "correct": 1.0} | more


def write_run(folder, rows=(), evaluations=(), **flags):
    folder.mkdir(parents=True)
    write_rows(folder / "starts.jsonl", [START | {"eval_solved": 0.289}])
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
    rows = [step_row(step, eval_solved=0.2 * step, truncated=0.5) for step in range(1, 6)]
    answers = [evaluation(0, "2+2=", "5", correct=correct) for correct in (0, 1, None)]
    first = write_run(tmp_path / "first", rows, answers)
    healthy = [row | {"truncated": 0.0} for row in rows[:2]]
    second = write_run(tmp_path / "second", healthy, algo="grpo")
    report.main([str(first), str(second)])
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert_self_contained(text, page)
    assert [len(curve) for curve in page.curves("eval_solved")] == [6, 3]
    assert [len(curve) for curve in page.curves("reward")] == [5, 2]  # there is none at step 0
    for fact in ("28.9% (step 0) → 100.0% (step 5)", "2026-11-23: python train.py --algo gspo"):
        assert fact in text
    cards = [("card wrong", "wrong"), ("card right", "right"), ("card unjudged", "unjudged")]
    verdicts = [(look, f"step 0: reward 1, {verdict}5") for look, verdict in cards]
    assert page.of_class("card") == verdicts
    said = capsys.readouterr().out
    for name, sentence in (("first", "50% of completions are trunc"), ("second", "nothing unheal")):
        assert f"{name}: {sentence}" in said and sentence in "".join(page.root.itertext())


def test_hostile_text_changes_no_element_of_the_page(tmp_path):
    """The same run with harmless texts has the same elements and attributes, in the same order."""
    pages = []
    for name, words in (("hostile", HOSTILE), ("harmless", ["word"] * len(HOSTILE))):
        evaluations = [evaluation(words[0], "prompt", "from a file that somebody sent")]
        for i, word in enumerate(words):
            evaluations.append(evaluation(5, f"prompt {i} {word}", f"5 {word}", answer=word))
        flags = {"data": words[0], "model": words[3], words[0]: "a flag"}
        pages.append(page_of(write_run(tmp_path / name / "run", [], evaluations, **flags)))
    (text, hostile), (_, harmless) = pages
    assert hostile.elements == harmless.elements
    assert_self_contained(text, hostile)
    shown = [body for _, body in hostile.of_class("card")]
    for word in HOSTILE:  # to the letter
        assert any(body.endswith(f"5 {word}") for body in shown)


def test_characters_that_hide_or_reorder_text_are_shown_as_their_code(tmp_path):
    lone = "\ud800"  # half of a surrogate pair, which no encoding takes
    row = evaluation(0, HIDDEN, f"a{HIDDEN}b{lone}\tc\nשלום é 東")
    text, page = page_of(write_run(tmp_path / "run", [], [row], data=HIDDEN))
    for character in HIDDEN + lone:
        assert character not in text
    codes = "".join(ascii(character).strip("'") for character in HIDDEN)
    [(_, shown)] = page.of_class("card")
    assert shown.endswith(f"a{codes}b\\ud800\\tc\nשלום é 東")


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path):
    run = write_run(tmp_path / "run", [step_row(1)])
    (run / "evaluations.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="^--report .*: cannot make a page .*KeyError: 'prompt'"):
        report.main([str(run)])
    with pytest.raises(UserError, match="FileNotFoundError: .*none/config.json"):
        report.main([str(run / "none")])


def test_small_changes_look_small(tmp_path):
    """The axes of shares go from 0 to 1, those of amounts begin at 0, that of the ratio shows
    GSPO's band: a change of one part in a hundred thousand is flat, and so is rounding."""
    rows = [
        step_row(1, length_mean=6880.3, ratio_mean=1.00001, entropy=0.02371234, kl=1e-9),
        step_row(2, solved=0.51, length_mean=6891.0, ratio_mean=0.99999, entropy=0.0237, kl=-2e-9),
    ]
    text, page = page_of(write_run(tmp_path / "run", rows))
    for metric in ("solved", "length_mean", "ratio_mean", "entropy", "kl"):
        [[(_, first), (_, second)]] = page.curves(metric)
        assert abs(first - second) < 2  # of 124
    for number in ("0.0237", "51.0%", "6,880", "1.0000"):
        assert re.search(rf">step \d: {number}<", text)
    assert "0.0237123" not in text and ">1.0030</text>" in text  # the end of the ratio's axis


@pytest.mark.parametrize(
    "values", [(0, 0), (-3, -3), (1e299, -1e299), (1, 1 + 1e-15), (7, 123.4), (1e-5, 3e-5)]
)
def test_any_two_values_have_a_place(tmp_path, values):
    for metric in ("reward", "grad_norm"):
        rows = [step_row(1, **{metric: values[0]}), step_row(2, **{metric: values[1]})]
        text, page = page_of(write_run(tmp_path / metric, rows))
        [[(_, first), (_, second)]] = page.curves(metric)
        assert 6 <= min(first, second) <= max(first, second) <= 130
        assert (first >= second) == (values[1] >= values[0])


def test_a_long_run_stays_a_small_page(tmp_path):
    rows = [step_row(step, reward=step) for step in range(1, 2001)]
    evaluations = [evaluation(step, "prompt", "x") for step in range(0, 2001, 16)]
    text, page = page_of(write_run(tmp_path / "run", rows, evaluations))
    assert 150 < len(page.curves("reward")[0]) <= report.MOST_POINTS
    assert text.count("<circle") <= 7 * report.MOST_DOTS  # seven charts
    cards = page.of_class("card")
    assert len(cards) <= report.MOST_CARDS
    assert cards[0][1].startswith("step 0:") and cards[-1][1].startswith("step 2000:")


def test_a_group_shows_how_far_each_token_moved(tmp_path):
    """Of the last step that has them. Other rows of samples.jsonl have no tokens."""
    run = write_run(tmp_path / "run", [step_row(1)])
    row = {"step": 1, "prompt": "2+2=", "answer": "4", "completion": "<b>4!", "reward": 1.0}
    more = {"tokens": ["<b>", "4", "!"], "log_ratios": [0.2, -0.3, 0.0]}
    more["advantage"] = [1.0, 1.0, -0.5]  # with a critic each token has its own
    write_rows(run / "samples.jsonl", [row, row | more, row | more | {"step": 2}, row])
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"step": 3, "log_ratios": [')  # is being written
    text, page = page_of(run)
    assert_self_contained(text, page)
    assert page.of_class("card") == [("card ", "A +0.50, s 0.96722<b>4!")] and "step 2." in text
    for look, token, ratio in (("more by3", "<b>", "1.2214"), ("less by4", "4", "0.7408")):
        assert (look, token) in page.of_class(look.split()[0])
        assert ("span", {"class": look, "title": ratio}) in page.elements


def test_who_reads_a_page_while_it_is_written_reads_a_whole_one(tmp_path):
    """And a line of the metrics that is being written is left out."""
    run = write_run(tmp_path / "run", [step_row(1)])
    before, _ = page_of(run)
    with open(tmp_path / "report.html", encoding="utf-8") as reader:
        with open(run / "metrics.jsonl", "ab") as file:
            file.write(json.dumps(step_row(2)).encode() + b'\n{"step": 3, "rew\xc3')
        after, page = page_of(run)
        assert reader.read() == before != after
    assert len(page.curves("reward")[0]) == 2
