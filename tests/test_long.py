"""The statistics of the experiment on learning rates, on numbers that a hand can check."""

import pytest

import long


def test_permutation_p_counts_signs():
    """Of the 8 signs of 1, 2, 3 the sums are ±6, ±4, ±2 and 0 twice."""
    assert long.permutation_p([1, 2, 3]) == 2 / 8
    assert long.permutation_p([-1, 2, 3]) == 4 / 8
    assert long.permutation_p([0.1] * 10) == 2 / 1024


def test_holm_multiplies_the_smallest_most_and_never_falls():
    assert long.holm([0.02, 0.01, 0.04]) == pytest.approx([0.04, 0.03, 0.04])
    assert long.holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert long.holm([0.5, 0.9, 0.6]) == [1, 1, 1]


def test_interval_is_students():
    """1, 2, 3: standard error 1 / sqrt 3, and t of two degrees of freedom is 4.303."""
    assert long.interval([1, 2, 3]) == pytest.approx((2, 4.303 / 3**0.5))


def test_largest_rate_is_interpolated_in_the_logarithm():
    """From 2 to 4 the gain goes from 10 to -30: a quarter of the way is 2 * 2^(1/4)."""
    assert long.largest_rate({1: 40, 2: 10, 4: -30, 8: -40}) == pytest.approx(2 * 2**0.25)
    assert long.largest_rate({1: 40, 2: -5, 4: 10, 8: -10}) == pytest.approx(4 * 2**0.5)
    assert long.largest_rate({1: -1, 2: 10, 4: 5}) == 4
    assert long.largest_rate({1: -1, 2: -2}) == 1


def test_best_rate_is_chosen_on_the_other_seeds():
    """Of seeds 1 and 2 rate 2 is best, of 0 and 2 as well (12 to 10), of 0 and 1 rate 1."""
    ends = {0: {1: 9, 2: 5}, 1: {1: 4, 2: 6}, 2: {1: 1, 2: 7}}
    assert long.at_own_best(ends) == {0: 5, 1: 6, 2: 1}


def test_only_whole_blocks_are_compared():
    """Seed 1 has no run of grpo at rate 2."""
    runs = {"gspo": {0: {1: {}, 2: {}}, 1: {1: {}, 2: {}}}, "grpo": {0: {1: {}, 2: {}}, 1: {1: {}}}}
    assert long.whole_blocks(runs) == {row: {0: {1: {}, 2: {}}} for row in runs}
