"""The README's pictures: the files in .github/, and the code that draws them."""

import json
import math
import random
import re
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch
import transformers

import bench_pictures as pictures
import rewards
import rollout

FOLDER = pictures.ROOT / ".github"
NAMES = sorted(pictures.PICTURES)
SVG = "{http://www.w3.org/2000/svg}"
# nothing that runs, loads, links or embeds
ELEMENTS = {"svg", "title", "desc", "style", "rect", "path", "circle", "text"}
ATTRIBUTES = {"aria-labelledby", "class", "cx", "cy", "d", "height", "id", "r", "role", "rx"}
ATTRIBUTES |= {"text-anchor", "viewBox", "width", "x", "y"}


def elements(text: str, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(text).iter(SVG + name))


def looks(text: str, name: str) -> list[set[str]]:
    """The classes of every element of that name."""
    return [set(element.get("class", "").split()) for element in elements(text, name)]


def all_text(text: str) -> list[str]:
    return [element.text for element in elements(text, "text")]


def check(text: str) -> None:
    """A small file of its own that GitHub shows as an image, on a light and on a dark page."""
    assert len(text.encode()) < 40_000
    root = ElementTree.fromstring(text)
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in ELEMENTS
        assert set(element.attrib) <= ATTRIBUTES
    assert "<!" not in text and "<?" not in text  # no entities, no stylesheets from elsewhere
    assert text.count("http") == 1  # the name space
    check_style(root)
    check_words(root)


def check_style(root: ElementTree.Element) -> None:
    [style] = root.iter(SVG + "style")
    assert not re.search(r"url\(|@import|expression", style.text)
    light, dark = style.text.split("@media (prefers-color-scheme: dark) {")
    dark = dark[: dark.index("} }")]
    colors = r"--(\w+): (#[0-9a-f]{6})"
    light, dark = dict(re.findall(colors, light)), dict(re.findall(colors, dark))
    assert light.keys() == dark.keys()
    assert set(re.findall(r"var\(--(\w+)\)", style.text)) - {"c"} == light.keys()
    for scheme in (light, dark):
        for name in ("text", "dim", "c0", "c1", "c2", "c3"):
            assert contrast(scheme[name], scheme["page"]) >= 4.5, name  # WCAG AA, of text

    # the page is the first thing drawn, and every class that is used has a rule
    [page] = [element for element in root if element.get("class") == "page"]
    size = [float(page.get(side)) for side in ("width", "height")]
    assert size == [float(side) for side in root.get("viewBox").split()[2:]]
    used = {name for element in root.iter() for name in element.get("class", "").split()}
    assert used - {"word", "policy"} <= set(re.findall(r"\.([a-z]\w*)", style.text))


def contrast(one: str, other: str) -> float:
    """Of two colours, 1 to 21, as WCAG 2 defines it."""
    light = sorted(luminance(color) for color in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def check_words(root: ElementTree.Element) -> None:
    """A title and a description; no text leaves the page, even in a wide font."""
    identifiers = [element.get("id") for element in root.iter() if element.get("id")]
    assert identifiers == root.get("aria-labelledby").split()
    assert root.find(SVG + "title").text and root.find(SVG + "desc").text
    assert root.find(SVG + "desc").text.endswith(".")
    width, height = map(float, root.get("viewBox").split()[2:])
    for element in root.iter(SVG + "text"):
        reach = 0.52 * 13 * len(element.text)
        x = float(element.get("x"))
        before = {"start": 0, "middle": reach / 2, "end": reach}[element.get("text-anchor")]
        assert x - before >= 0 and x - before + reach <= width, element.text
        assert 0 < float(element.get("y")) < height


# ------------------------------------------------------------------------------ the files


@pytest.mark.parametrize("name", NAMES)
def test_committed_picture_is_safe_small_and_has_two_looks(name):
    check((FOLDER / f"{name}.svg").read_text(encoding="utf-8"))


def test_no_other_pictures_are_committed():
    assert sorted(path.stem for path in FOLDER.glob("*.svg")) == NAMES


def test_committed_loop_is_what_the_code_draws():
    assert (FOLDER / "loop.svg").read_text(encoding="utf-8") == pictures.loop_picture()


@pytest.mark.parametrize("name", NAMES)
def test_committed_picture_has_the_style_of_the_code(name):
    [style] = elements((FOLDER / f"{name}.svg").read_text(encoding="utf-8"), "style")
    assert style.text == pictures.STYLE


# ------------------------------------------------------------------------------ axes


def test_axes_place_values_linearly_or_by_their_logarithm():
    axes = pictures.Axes((0, 10), (0, 4), 100, 200, 50, 90)
    assert axes.place(2.5, 1) == (125, 80)
    assert axes.y(-3) == 90 and axes.y(7) == 50  # beyond the axis
    axes = pictures.Axes((0, 1), (1e-4, 1), 0, 1, 50, 90, log_y=True)
    assert axes.y(1e-3) == pytest.approx(80)
    assert axes.y(0) == 90


def test_words_are_escaped():
    [text] = elements(pictures.svg("<b>", "&.", 99, [pictures.words(9, 60, "<script>")]), "text")[
        1:
    ]
    assert text.text == "<script>"


# ------------------------------------------------------------------------------ ratios


def test_ratios_picture_marks_each_token_and_says_s():
    """Ratios 1, 1.5, 1 and 0.85: two are too far off for the close view, one for GRPO's band."""
    log_ratios = [0.0, math.log(1.5), 0.0, math.log(0.85)]
    shown = pictures.Completion(["1", "<", "=", "<eos>"], log_ratios)
    assert shown.log_ratio == pytest.approx(math.log(1.5 * 0.85) / 4)
    assert shown.furthest == math.log(1.5)

    text = pictures.ratios_picture(shown)
    check(text)
    dots = [look for look in looks(text, "circle") if "color0" in look]
    triangles = [look for look in looks(text, "path") if {"mark", "color0"} <= look]
    assert len(dots) == 4 + 2 and len(triangles) == 2
    assert any(f"s = {1.275**0.25:.4f}" in said for said in all_text(text))
    assert [said for said in all_text(text) if said in ("<", "end")] == ["<", "end"]
    described = ElementTree.fromstring(text).find(SVG + "desc").text
    assert "1 of them outside" in described and "outside GSPO's band" in described


def test_typical_completion_fits_and_is_in_the_middle():
    by_size = [pictures.Completion(["1"] * 32, [0.01 * size] * 32) for size in range(5)]
    long = pictures.Completion(["1"] * 90, [0.02] * 90)
    mixed = [by_size[i] for i in (3, 0, 4, 2, 1)]
    assert pictures.typical([long, *mixed, long]) is by_size[2]
    assert pictures.typical([long]) is long


# ------------------------------------------------------------------------------ length


def made_up(length: int, number: int) -> list[pictures.Completion]:
    rng = random.Random(length)
    rows = [[rng.gauss(0, 0.1) for _ in range(length)] for _ in range(number)]
    return [pictures.Completion(["1"] * length, row) for row in rows]


def test_spreads_are_percentiles_of_the_completions_of_a_length():
    """Log-ratios +a and -a/2 for a = 0, 1, ..., 10: |log s| is a/4, the furthest a."""
    found = [pictures.Completion(["1", "2"], [a, -a / 2]) for a in range(11)]
    random.Random(0).shuffle(found)
    [spread] = pictures.spreads([*found, *made_up(7, 10)], least=11)
    assert (spread.length, spread.count) == (2, 11)
    assert spread.furthest == (1, 5, 9)
    assert spread.sequence == (0.25, 1.25, 2.25)
    squares = sum(a**2 + a**2 / 4 for a in range(11))
    assert spread.tokens == pytest.approx(math.sqrt(squares / 22))


def test_length_picture_has_two_curves_with_a_mark_at_each_length():
    found = [one for length in (8, 14, 20) for one in made_up(length, 60)]
    text = pictures.length_picture(pictures.spreads(found))
    check(text)
    assert sum("mark" in look for look in looks(text, "circle")) == 3
    assert sum("mark" in look for look in looks(text, "rect")) == 3
    assert sum("area" in look for look in looks(text, "path")) == 2


# ------------------------------------------------------------------------------ curve


def chronicle(folder, name, solved, held_out, algo=None):
    """A run's folder with these shares by step."""
    rows = [{"step": step + 1, "solved": share} for step, share in enumerate(solved)]
    for step, share in held_out.items():
        rows[step - 1]["eval_solved"] = share
    (folder / name).mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name / "metrics.jsonl").write_text(lines)
    if algo:
        (folder / name / "config.json").write_text(json.dumps({"algo": algo}))
    return pictures.chronicle(folder / name)


def test_curve_picture_shows_every_run_and_its_last_accuracy(tmp_path):
    one = chronicle(tmp_path, "gspo & co", [0.2, 0.4, 0.6, 0.8], {2: 0.5, 4: 0.875})
    other = chronicle(tmp_path, "grpo", [0.1, 0.3, 0.5], {3: 0.25})
    text = pictures.curve_picture([one, other])
    check(text)
    assert "● gspo & co: 87.5% at step 4" in all_text(text)
    assert "■ grpo: 25.0% at step 3" in all_text(text)
    # 50% at step 2 of 4 is the middle of both axes
    marks = [(float(mark.get("cx")), float(mark.get("cy"))) for mark in elements(text, "circle")]
    assert marks[0] == (335, 165)
    assert marks[1] == pytest.approx((610, 270 - 0.875 * 210), abs=0.06)


def test_seeds_of_an_algorithm_are_one_curve_with_their_range(tmp_path):
    """gspo ends at 50, 60 and 85%: a mean of 65%; grpo is one run, without a bar."""
    runs = [
        chronicle(tmp_path, f"seed-{end}", [0.2, 0.4], {1: 0.25, 2: end / 100}, "gspo")
        for end in (50, 60, 85)
    ]
    runs.append(chronicle(tmp_path, "another", [0.1, 0.3], {2: 0.5}, "grpo"))
    text = pictures.curve_picture(runs)
    check(text)
    assert "● gspo, 3 seeds: 65.0% at step 2" in all_text(text)
    assert "■ grpo: 50.0% at step 2" in all_text(text)
    assert "gspo, 3 seeds: sampled 20% at step 1, held out 65.0% (50.0% to 85.0%)" in text
    lines = [line.get("d") for line in elements(text, "path") if "thin" in line.get("class")]
    upright = [line for line in lines if len(set(re.findall(r"[ML]([\d.]+) ", line))) == 1]
    [(low, high)] = [re.findall(r" ([\d.]+)", line) for line in upright]
    assert (float(low), float(high)) == pytest.approx((270 - 0.5 * 210, 270 - 0.85 * 210), abs=0.06)


def test_runs_of_one_algorithm_alone_stay_apart(tmp_path):
    one = chronicle(tmp_path, "low rate", [0.2], {1: 0.25}, "gspo")
    other = chronicle(tmp_path, "high rate", [0.2], {1: 0.5}, "gspo")
    text = all_text(pictures.curve_picture([one, other]))
    assert {"● low rate: 25.0% at step 1", "■ high rate: 50.0% at step 1"} <= set(text)


def test_curve_needs_an_evaluation(tmp_path):
    with pytest.raises(rewards.UserError, match="never: expected a run's folder"):
        chronicle(tmp_path, "never", [0.2, 0.4], {})
    with pytest.raises(rewards.UserError, match="nowhere"):
        pictures.chronicle(tmp_path / "nowhere")


# ------------------------------------------------------------------------------ slots


def test_stays_follow_samples_from_slot_to_slot():
    """Two slots: sample 0 for 3 steps; 1 ends after one, then 2, which moves when 0 has ended."""
    steps = [{0: 0, 1: 1}, {0: 0, 1: 2}, {0: 0, 1: 2}, {0: 2}]
    assert pictures.stays(steps) == [
        pictures.Stay(0, 0, 0, 3),
        pictures.Stay(1, 1, 0, 1),
        pictures.Stay(1, 2, 1, 3),
        pictures.Stay(0, 2, 3, 4, moved=True),
    ]
    text = pictures.slots_picture(pictures.stays(steps), [3, 1, 3])
    check(text)
    bars = [look for look in looks(text, "rect") if "bar" in look]
    assert [next(iter(look - {"bar"})) for look in bars] == ["color0", "color0", "color1", "color2"]
    assert any(
        "take 4 decode steps; in batches of 2 they would take 6" in said for said in all_text(text)
    )


def test_fixed_batches_wait_for_their_longest():
    assert pictures.fixed_batches([3, 1, 4, 1, 5], 2) == 3 + 4 + 5


def test_watched_slots_see_every_token_that_is_sampled(models):
    """Decode steps in which a completion is alive are its tokens; no slot waits while one could."""
    policy = transformers.AutoModelForCausalLM.from_pretrained(models / "tiny")
    decode = rollout.Slots.decode_one_token
    with pictures.watched_slots() as steps:
        samples = rollout.generate(
            policy,
            [[3, 4, 5], [6, 7]],
            group_size=8,
            max_new_tokens=20,
            max_slots=4,
            eos_ids=[1],
            pad_id=0,
            generator=torch.Generator().manual_seed(1),
        )
    assert rollout.Slots.decode_one_token is decode

    alive = [0] * len(samples.lengths)
    for holders in steps:
        for sample in holders.values():
            alive[sample] += 1
    assert alive == samples.lengths.tolist()
    assert len(set(alive)) > 2  # else this shows little

    started = [max(holders.values(), default=0) for holders in steps]
    last_start = started.index(len(alive) - 1)
    assert all(len(holders) == 4 for holders in steps[: last_start + 1])
    found = pictures.stays(steps)
    assert sum(stay.end - stay.begin for stay in found) == sum(alive)
    assert sum(not stay.moved for stay in found) == len(alive)


# ------------------------------------------------------------------------------ measured


def test_completions_are_rows_without_their_padding(models):
    samples = rollout.Rollout(
        tokens=torch.tensor([[3, 4, 5, 1, 0], [3, 6, 1, 0, 0]]),
        prompt_lengths=torch.tensor([1, 1]),
        lengths=torch.tensor([3, 2]),
        sampler_logprobs=torch.zeros(2, 4),
        truncated=torch.tensor([False, False]),
    )
    log_ratios = torch.tensor([[0.5, -0.25, 0.0, torch.nan], [1.0, 2.0, torch.nan, torch.nan]])
    tokenizer = SimpleNamespace(decode=lambda ids: "?+-/012"[ids[0]])
    one, other = pictures.completions(samples, log_ratios, tokenizer)
    assert one == pictures.Completion(["0", "1", "+"], [0.5, -0.25, 0.0])
    assert other == pictures.Completion(["2", "+"], [1.0, 2.0])


def test_short_run_scores_before_and_after_its_updates(place, monkeypatch, seen):
    """One step of a policy that hardly had a warm start, paid for even digits: it moves.

    What training itself froze as pi_old is what the log-ratios must start from."""
    monkeypatch.setattr(pictures, "MOST_TOKENS", 6)
    usual = rewards.ARITHMETIC_OPERATIONS
    with pictures.short_run(steps=1) as run:
        assert rewards.ARITHMETIC_OPERATIONS == pictures.OPERATIONS
        run.reward = rewards.parse_reward("pay.py:even")
        [found] = pictures.train_and_compare(run)
        [batch] = seen.batches
        after = pictures.score(run, batch.samples)
    assert usual == rewards.ARITHMETIC_OPERATIONS

    assert len(found) == run.config.prompts_per_step * run.config.group_size
    live = batch.live.nonzero()[:, 0].tolist()
    assert len(live) > 50
    for i in live:
        length = len(found[i].tokens)
        assert length == batch.samples.lengths[i] <= 6
        expected = after[i, :length] - batch.old_logprobs[i, :length]
        assert found[i].log_ratios == pytest.approx(expected.tolist(), abs=1e-5)
    assert max(found[i].furthest for i in live) > 1e-3


def test_command_writes_what_it_is_asked_for(tmp_path, monkeypatch, capsys):
    chronicle(tmp_path, "gspo", [0.2, 0.4], {2: 0.5})
    words = ["bench", "--only", "loop", "curve", "--out", tmp_path / "out", "--run"]
    monkeypatch.setattr("sys.argv", [*map(str, words), str(tmp_path / "gspo")])
    assert pictures.main() == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["curve.svg", "loop.svg"]

    monkeypatch.setattr("sys.argv", [*map(str, words), str(tmp_path / "nowhere")])
    assert pictures.main() == 2
    assert capsys.readouterr().err.startswith("error: --run ")
