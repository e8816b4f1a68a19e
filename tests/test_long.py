"""The statistics of the experiment on learning rates, on numbers that a hand can check."""

import sys

import pytest

import common
import long

CASES = [
    # of the 8 signs of 1, 2, 3 the sums are ±6, ±4, ±2 and 0 twice
    (long.permutation_p, [1, 2, 3], 2 / 8),
    (long.permutation_p, [-1, 2, 3], 4 / 8),
    (long.permutation_p, [0.1] * 10, 2 / 1024),
    # Holm's correction multiplies the smallest most, and never falls
    (long.holm, [0.02, 0.01, 0.04], [0.04, 0.03, 0.04]),
    (long.holm, [0.03, 0.01, 0.02], [0.04, 0.03, 0.04]),
    (long.holm, [0.5, 0.9, 0.6], [1, 1, 1]),
    # standard error 1 / sqrt 3, and Student's t of two degrees of freedom is 4.303
    (long.interval, [1, 2, 3], (2, 4.303 / 3**0.5)),
    # from 2 to 4 the gain goes from 10 to -30: a quarter of the way, in the logarithm
    (long.largest_rate, {1: 40, 2: 10, 4: -30, 8: -40}, 2 * 2**0.25),
    (long.largest_rate, {1: 40, 2: -5, 4: 10, 8: -10}, 4 * 2**0.5),
    (long.largest_rate, {1: -1, 2: 10, 4: 5}, 4),
    (long.largest_rate, {1: -1, 2: -2}, 1),
    # chosen on the other seeds: of 1 and 2 rate 2 is best, of 0 and 2 as well, of 0 and 1 rate 1
    (long.at_own_best, {0: {1: 9, 2: 5}, 1: {1: 4, 2: 6}, 2: {1: 1, 2: 7}}, {0: 5, 1: 6, 2: 1}),
]


def test_statistics_of_numbers_that_a_hand_can_check():
    for statistic, given, expected in CASES:
        assert statistic(given) == pytest.approx(expected), given


def test_tables_of_the_page_are_those_of_the_runs():
    """Without the header and the first cell of a comparison, which the page words otherwise."""
    page = (common.ROOT / "docs/runs/rates/README.md").read_text()
    rows = common.read_rows(long.ROWS_FILE)
    runs = [row for row in rows if row["more"] == ""]
    outcomes = long.cells(runs, long.spread).splitlines()[2:]
    compared = [line.split(" | ", 1)[1] for line in long.comparisons(runs).splitlines()[2:]]
    assert len(outcomes) == 5 and len(compared) == 3 * 3 + 3
    assert all(line in page for line in outcomes + compared)


def test_tables_need_every_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["long.py", "--table"])
    monkeypatch.setattr(long, "ROWS_FILE", tmp_path / "none.jsonl")
    with pytest.raises(SystemExit, match="720 runs are missing"):
        long.main()
