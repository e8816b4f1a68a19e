"""The pictures are well-formed, have descriptions for screen readers, and show right numbers."""

import math
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import bench_pictures as pictures
import common
from bench_pictures import Completion, Plot
from support.report import Story
from tools import ROOT, command_line

SVG = "{http://www.w3.org/2000/svg}"


def drawn(text: str) -> ElementTree.Element:
    """Return the root of a picture. It has a title and a description, and no word is outside."""
    root = ElementTree.fromstring(text)
    _, _, width, height = map(float, root.get("viewBox").split())
    assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text.endswith(".")
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.get("x")) <= width and 0 < float(element.get("y")) < height
    return root


def lines(root, look: str) -> list[list[tuple[float, float]]]:
    """Return the points of the lines of a look."""
    paths = [each.get("d") for each in root.iter() if look in each.get("class", "").split()]
    return [
        [tuple(map(float, pair.split())) for pair in path.removeprefix("M").split("L")]
        for path in paths
    ]


def assert_near(found, expected):
    assert found == [pytest.approx(place, abs=0.06) for place in expected]


def test_pictures_of_the_pages_are_well_formed():
    for path in (ROOT / "docs/pictures").glob("*.svg"):
        drawn(path.read_text(encoding="utf-8"))


def story_of(*held_out: float):
    """A run that was evaluated before training and every five steps."""
    flags = {"algo": "gspo", "model": "tiny", "data": None, "task": "arithmetic"}
    rows = [{"step": 5 * i, "eval_solved": solved} for i, solved in enumerate(held_out)]
    return Story("gspo", flags, rows[:1], rows[1:], [])


def test_curve_begins_before_training_and_is_the_mean_of_seeds():
    root = drawn(pictures.curve_picture([story_of(0.2, 0.5, 1.0), story_of(0.4, 0.7, 0.8)]))
    plot = Plot((0, 10), (0, 1), left=58, right=368, top=62, bottom=262)
    means = [(0, 0.3), (5, 0.6), (10, 0.9)]
    assert_near(lines(root, "curve")[0], [(plot.x(x), plot.y(y)) for x, y in means])
    assert_near([y for _, y in lines(root, "thin")[0]], [plot.y(0.2), plot.y(0.4)])
    assert "mean of 2 seeds: gspo goes from 30.0% to 90.0%" in root.find(f"{SVG}desc").text


def test_rates_picture_has_the_mean_of_seeds_its_interval_and_the_start():
    """Two seeds end at 0.5 and 0.502: mean 0.501, standard error 0.001, and t is 12.7."""
    runs = [
        {"row": row, "lr": lr, "seed": seed, "more": ""}
        | {"solved": {"0": 0.4, "12": end - 0.1, "16": end + 0.1}}
        for row in pictures.RATES_ROWS
        for lr in (1e-4, 4e-4)
        for seed, end in enumerate((0.5, 0.502))
    ]
    others = [runs[0] | {"more": "--max-grad-norm 0.03"}, runs[0] | {"seed": 2}]
    root = drawn(pictures.rates_picture(runs + others))
    plot = Plot((0, 1), (0, 1), left=58, right=356, top=66, bottom=306)
    curves, bars = lines(root, "curve") + lines(root, "edge"), lines(root, "thin")
    assert len(curves) == 5 and len(bars) == 10
    for curve in curves:
        assert_near([y for _, y in curve], [plot.y(0.501)] * 2)
    for bar in bars:
        assert_near([y for _, y in bar], [plot.y(0.501 - 0.012706), plot.y(0.501 + 0.012706)])
    assert_near(lines(root, "null")[0], [(58, plot.y(0.4)), (356, plot.y(0.4))])


def test_pictures_of_outcomes_are_those_of_the_stored_runs():
    """Byte for byte. The captions of the lesson speak of them."""
    rows = common.read_rows(ROOT / "docs/runs/rates/rows.jsonl")
    drawings = {"rates": pictures.rates_picture(rows), "bands": pictures.bands_picture(rows)}
    for name, text in drawings.items():
        assert text == (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")


def test_a_token_beyond_the_axis_has_no_dot():
    shown = Completion(["1", "+", "2", "<eos>"], [0.0, 0.1, -0.5, 0.001])
    root = drawn(pictures.ratios_picture(shown))
    # wide: 1, e^0.1 and e^0.001. Close, 1.5 |s - 1| = 0.14 around 1: the same three
    assert sum("dot" in each.get("class", "").split() for each in root.iter()) == 6
    assert "0.607 to 1.105, 1 of them outside GRPO's band" in root.find(f"{SVG}desc").text


def test_length_picture_has_medians_of_each_length():
    """And what the furthest of as many random tokens would be: of two the quantile 0.5^(1/2)."""
    groups = {10: [Completion(["1"] * 10, [k / 10 for k in range(1, 11)])]}
    furthest = [pictures.furthest_of_random_tokens(groups, length) for length in (1, 2)]
    assert furthest == pytest.approx([0.55, 0.1 + 0.9 * 0.5**0.5])
    found = [Completion(["1"] * 6, [0.0] * 6)] * 10  # too few of this length
    for length in (8, 4):
        values = [k / 100 / length for k in range(11)]  # medians: 0.05 / length
        found += [Completion(["1"] * length, [value] * length) for value in values]
    root = drawn(pictures.length_picture(pictures.by_length(found, 11)))
    plot = Plot((0, 12), (-4, 0), left=70, right=462, top=62, bottom=262)
    for curve in lines(root, "curve"):  # all tokens alike: the furthest is s
        assert_near(curve, [(plot.x(x), plot.y(math.log10(0.05 / x))) for x in (4, 8)])


def test_log_ratios_are_those_of_the_updates(place, seen):
    """One step of a random policy: the ratios are relative to pi_old's log-probs."""
    flags = "--model models/tiny --reward pay.py:even --max-new-tokens 6 --steps 1"
    found = pictures.compare_steps(command_line("runs", flags))
    [step] = seen.steps
    gaps = pictures.score(seen.run, step.batch.rollout) - step.constants.old_logprobs
    for i in torch.cat([update.active_rows for update in step.updates]).tolist():
        expected = gaps[i, : len(found[i].tokens)].tolist()
        assert found[i].log_ratios == pytest.approx(expected, abs=1e-5)
    assert max(one.furthest for one in found) > 1e-3
