"""The page of runs: well formed, loads nothing, shows hostile text as text; curves lie where their
values are; and the sentences about what is not healthy."""

import html.parser
import json
import re

import pytest

from support.data import UserError
from support.extras import report

VOID = {"meta"}  # elements without an end tag
ELEMENTS = VOID | {"html", "head", "title", "style", "body", "h1", "h2", "p", "div", "span", "b"}
ELEMENTS |= {"pre", "details", "summary", "figure", "figcaption", "table", "tr", "th", "td"}
ELEMENTS |= {"svg", "path", "rect", "circle", "text", "ul", "li"}
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
FLAGS |= {"clip_low": 3e-4, "warmup_steps": 0}
START = {"date": "2026-11-23", "command": "python train.py --algo gspo", "step": 0}


class Page(html.parser.HTMLParser):
    """Reads a page; an element that is not closed in its place is an error."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.texts.append("")
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag):
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data):
        for number in self.open:  # the text of an element is that of all elements in it
            self.texts[number] += data

    def of_class(self, name: str) -> list[tuple[set[str], str]]:
        """Classes and text of the elements of a class."""
        looks = [set(attributes.get("class", "").split()) for _, attributes in self.elements]
        return [(look, text) for look, text in zip(looks, self.texts) if name in look]

    def curves(self, title: str) -> list[list[tuple[float, float]]]:
        """Places of the points of each curve in the picture of this name."""
        names = [attributes.get("aria-label") for _, attributes in self.elements]
        found = []
        for name, attributes in self.elements[names.index(title) + 1 :]:
            if name == "figcaption":
                return found
            if "curve" in attributes.get("class", ""):
                places = re.findall(r"([\d.]+) ([\d.]+)", attributes["d"])
                found.append([(float(x), float(y)) for x, y in places])


def step_row(step: int, **more) -> dict:
    row = {"step": step, "reward": 0.5, "reward_std": 0.5, "solved": 0.5, "truncated": 0.0}
    row |= {"dead": 0.3, "dead_right": 0.2, "verifier_faults": 0, "bad_updates": 0}
    row |= {"lr": FLAGS["lr"], "clip_fraction": 0.3, "entropy": 0.4}
    return row | more


def evaluation(step: int, prompt: str, completion: str, **more) -> dict:
    row = {"step": step, "prompt": prompt, "answer": "4", "completion": completion}
    return row | {"reward": 1.0, "correct": 1.0} | more


def write_run(folder, rows=(), evaluations=(), flags=None):
    folder.mkdir(parents=True)
    files = {
        "starts": [START | {"eval_solved": 0.289}],
        "metrics": rows,
        "evaluations": evaluations,
    }
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "config.json").write_text(json.dumps(FLAGS | (flags or {})))
    return folder


def page_of(*folders) -> tuple[str, Page]:
    path = folders[0].parent / "report.html"
    report.write_report(list(folders), path)
    text = path.read_bytes().decode("utf-8")  # newlines as they are
    return text, Page(text)


def assert_self_contained(text: str, page: Page):
    assert {tag for tag, _ in page.elements} <= ELEMENTS
    for _, attributes in page.elements:
        assert not set(attributes) & {"src", "href", "srcset", "style", "action"}
        assert not [name for name in attributes if name.startswith("on")]
    style = page.texts[[tag for tag, _ in page.elements].index("style")]
    assert not re.search(r"url\(|@import|https?:|//", style)
    assert "default-src 'none'" in text


def test_report_of_two_runs_is_well_formed_and_loads_nothing(tmp_path):
    rows = [step_row(step, eval_solved=0.2 * step) for step in range(1, 6)]
    first = write_run(tmp_path / "first", rows, [evaluation(0, "2+2=", "5")])
    second = write_run(tmp_path / "second", rows[:2], [], {"algo": "grpo"})
    text, page = page_of(first, second)
    assert_self_contained(text, page)
    assert [len(curve) for curve in page.curves("eval_solved")] == [6, 3]
    assert [len(curve) for curve in page.curves("reward")] == [5, 2]  # there is none at step 0
    assert [body for _, body in page.of_class("differs")] == ["algogspogrpo"]
    for fact in ("28.9% (step 0) → 100.0% (step 5)", "2026-11-23: python train.py --algo gspo"):
        assert fact in text


def test_hostile_text_changes_no_element_of_the_page(tmp_path):
    """The same run with harmless texts has the same elements and attributes, in the same order."""
    pages = []
    for name, words in (("hostile", HOSTILE), ("harmless", ["word"] * len(HOSTILE))):
        evaluations = [
            evaluation(step, f"prompt {i} {word}", f"{step} {word}", answer=word)
            for step in (0, 5)
            for i, word in enumerate(words)
        ]
        evaluations.append(evaluation(words[0], "prompt", "from a file that somebody sent"))
        flags = {"data": words[0], "model": words[3], words[0]: "a flag"}
        run = write_run(tmp_path / name / "run", [step_row(1)], evaluations, flags)
        pages.append(page_of(run))
    (text, hostile), (_, harmless) = pages
    assert hostile.elements == harmless.elements
    assert_self_contained(text, hostile)
    shown = [body for _, body in hostile.of_class("card")]
    for step in (0, 5):
        for word in HOSTILE:  # to the letter
            assert any(body.endswith(f"{step} {word}") for body in shown)


def test_what_hides_or_reorders_text_is_shown_as_its_code(tmp_path):
    lone = "\ud800"  # half of a surrogate pair, which no encoding takes
    row = evaluation(0, HIDDEN, f"a{HIDDEN}b{lone}\tc\nשלום é 東")
    text, page = page_of(write_run(tmp_path / "run", [], [row], {"data": HIDDEN}))
    for character in HIDDEN + lone:
        assert character not in text
    codes = "".join(ascii(character).strip("'") for character in HIDDEN)
    [(_, shown)] = page.of_class("card")
    assert shown.endswith(f"a{codes}b\\ud800\\tc\nשלום é 東")


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", [step_row(1), step_row(2)])
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "rew\xc3')
    _, page = page_of(run)
    assert len(page.curves("reward")[0]) == 2


def test_a_curve_lies_where_its_values_are(tmp_path):
    """Rewards 0, 1, 3 at steps 1, 2, 5: x from 50 (step 0) to 300, y from 130 (0) to 6 (3.15)."""
    rows = [step_row(step, reward=reward) for step, reward in ((1, 0), (2, 1), (5, 3))]
    _, page = page_of(write_run(tmp_path / "run", rows))
    expected = [(50 + 250 * step / 5, 130 - 124 * y / 3.15) for step, y in ((1, 0), (2, 1), (5, 3))]
    for found, wanted in zip(page.curves("reward")[0], expected, strict=True):
        assert found == pytest.approx(wanted, abs=0.06)
    [dead] = page.curves("dead")  # flat: in the middle of 0.27 to 0.33
    assert {y for _, y in dead} == {68.0}


@pytest.mark.parametrize(
    "values", [(0, 0), (5, 5), (-3, -3), (1e299, -1e299), (1, 1 + 1e-15), (7, 123.4), (1e-5, 3e-5)]
)
def test_any_two_values_have_a_place_and_labels(tmp_path, values):
    rows = [step_row(1, reward=values[0]), step_row(2, reward=values[1])]
    _, page = page_of(write_run(tmp_path / "run", rows))
    [[(_, first), (_, second)]] = page.curves("reward")
    assert 6 <= min(first, second) <= max(first, second) <= 130
    rises = values[1] - values[0] > 1e-9 * max(map(abs, values))
    assert (first > second) == rises or values[0] > values[1]
    assert 2 <= len(report.round_ticks(*report.value_range(values))) <= 6


def test_rounding_is_no_curve(tmp_path):
    rows = [step_row(1, sampler_kl=1e-9, dead=0), step_row(2, sampler_kl=-2e-9, dead=0)]
    text, page = page_of(write_run(tmp_path / "run", rows))
    assert 'aria-label="sampler_kl"' not in text and page.curves("dead")


def test_a_long_run_stays_a_small_page(tmp_path):
    rows = [step_row(step, reward=step) for step in range(1, 10_001)]
    evaluations = [
        evaluation(step, f"prompt {i}", f"{step // 500} " + "x" * 10_000)
        for step in range(0, 10_001, 10)
        for i in range(4)
    ]
    text, page = page_of(write_run(tmp_path / "run", rows, evaluations))
    assert len(text) < 250_000
    assert 150 < len(page.curves("reward")[0]) <= report.MOST_POINTS
    cards = page.of_class("card")
    assert len(cards) <= 4 * report.MOST_EVALUATIONS
    assert cards[0][1].startswith("step 0:") and cards[-1][1].startswith("step 10000:")
    assert f"{10_002 - report.MOST_CHARACTERS} more characters" in cards[0][1]


def test_cards_tell_right_from_wrong(tmp_path):
    texts = ["5", "4", "4"]
    evaluations = [
        evaluation(step, "2+2=", text, correct=float(text == "4"))
        for step, text in enumerate(texts)
    ]
    _, page = page_of(write_run(tmp_path / "run", [], evaluations))
    looks = [look - {"card"} for look, _ in page.of_class("card")]
    assert looks == [{"wrong"}, {"right"}, {"right"}]
    unjudged = write_run(tmp_path / "other", [], [evaluation(0, "2+2=", "5", correct=None)])
    [(look, _)] = page_of(unjudged)[1].of_class("card")
    assert look == {"card"}


def test_who_reads_a_page_while_it_is_written_reads_a_whole_one(tmp_path):
    run = write_run(tmp_path / "run", [step_row(1)])
    before, _ = page_of(run)
    with open(tmp_path / "report.html", encoding="utf-8") as reader:
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps(step_row(2)) + "\n")
        after, _ = page_of(run)
        assert reader.read() == before != after
    assert not (tmp_path / "report.html.new").exists()


def test_main_draws_runs_together_and_says_what_is_wrong(tmp_path, capsys):
    first = write_run(tmp_path / "first", [step_row(1, truncated=0.5)])
    second = write_run(tmp_path / "second", [step_row(1)])
    report.main([str(first), str(second)])
    said = capsys.readouterr().out
    assert "first: 50% of completions are cut off" in said
    assert "second: nothing unhealthy" in said
    page = Page((tmp_path / "report.html").read_text())
    assert len(page.curves("truncated")) == 2
    report.main([str(first)])
    assert (first / "report.html").exists()
    with pytest.raises(UserError, match="nowhere: expected the folder of a run"):
        report.main([str(tmp_path / "nowhere")])


# a row that is not healthy, or flags; and a word of what is said of it
ILL = [
    ({"dead": 0.97, "dead_right": 0.95}, {}, "harder prompts"),
    ({"dead": 1.0, "dead_right": 0.0}, {}, "easier prompts"),
    ({"truncated": 0.4}, {}, "--max-new-tokens"),
    ({"verifier_faults": 3}, {}, "verifier fails"),
    ({}, {"completions_per_update": 256}, "one update a rollout"),
    ({"clip_fraction": 0.0}, {}, "nothing is clipped"),
    ({"clip_fraction": 0.74}, {}, "almost all is clipped"),
    ({"lr": 1e-5}, {}, "warms up"),
    ({"bad_updates": 1}, {}, "not finite"),
    ({"entropy": 0.001}, {}, "exploration is over"),
]


@pytest.mark.parametrize("row, flags, word", ILL)
def test_health_names_what_is_wrong_and_that_alone(row, flags, word):
    [sentence] = report.health([step_row(1, **row)], FLAGS | flags)
    assert word in sentence


def test_health_is_silent_where_nothing_is_wrong():
    assert report.health([step_row(1)], FLAGS) == []
    unjudged = step_row(1)  # no verifier says what is right
    del unjudged["solved"], unjudged["dead_right"]
    assert report.health([unjudged], FLAGS) == []
    solved = step_row(1, entropy=0.001, solved=0.97)  # all is solved: it may be sure
    assert report.health([solved], FLAGS) == []
    without_clip = FLAGS | {"clip_low": None}
    assert report.health([step_row(1, clip_fraction=0.0)], without_clip) == []
    epochs = FLAGS | {"completions_per_update": 256, "epochs": 2}
    assert report.health([step_row(1, clip_fraction=0.2)], epochs) == []


def test_health_sees_a_collapse_and_no_slow_beginning():
    levels = [0.1] * 10 + [0.8] * 20 + [0.3] * 10
    rows = [step_row(step, reward=level) for step, level in enumerate(levels, 1)]
    [sentence] = report.health(rows, FLAGS)
    assert "fell from 0.80 to 0.30" in sentence
    assert report.health(rows[:30], FLAGS) == []
