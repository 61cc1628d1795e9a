from collections import Counter
from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.data.mixture import WHY, apportion, choose, counts, interleave
from recipe.data.sources import Spec
from recipe.errors import UserError

WEIGHTS = st.integers(1, 1_000) | st.decimals("0.001", 1_000, places=3).map(float)
SOURCES = st.lists(st.tuples(WEIGHTS, st.integers(1, 10_000_000)), min_size=1, max_size=6)


def specs(key: str, values: list) -> list[Spec]:
    return [Spec(f"{at}.jsonl", key=f"datasets[{at}]", **{key: value}) for at, value in enumerate(values)]


@settings(deadline=None)  # a time limit would be the machine's
@given(st.integers(0, 1_000_000), st.lists(st.integers(1, 1_000), min_size=1, max_size=8))
def test_parts_are_whole_and_within_a_row_of_their_share(total, weights):
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    parts = apportion(total, shares)
    assert sum(parts) == total
    assert all(abs(part - total * share) < 1 for part, share in zip(parts, shares, strict=True))


def test_the_largest_remainders_get_the_rest():
    assert apportion(10, [Fraction(part, 100) for part in (45, 18, 37)]) == [4, 2, 4]
    assert apportion(2, [Fraction(1, 3)] * 3) == [1, 1, 0]


@settings(deadline=None)
@given(SOURCES)
def test_weights_make_the_largest_epoch_in_which_no_row_stands_twice(sources):
    weights, available = zip(*sources, strict=True)
    exact = [Fraction(str(weight)) for weight in weights]
    total = min(floor(rows * sum(exact) / weight) for weight, rows in zip(exact, available, strict=True))
    try:
        taken = counts(specs("weight", list(weights)), available)
    except UserError:
        assert 0 in apportion(total, [weight / sum(exact) for weight in exact])
        return
    assert sum(taken) == total
    for some, weight, rows in zip(taken, exact, available, strict=True):
        assert 1 <= some <= rows
        assert abs(some - total * weight / sum(exact)) < 1
    assert any((total + 1) * weight / sum(exact) > rows for weight, rows in zip(exact, available, strict=True)), (
        "with one row more, one of the shares is more than there is"
    )


@pytest.mark.parametrize(
    ("weights", "available", "taken"),
    [
        ([1, 1], [10, 90], [10, 10]),
        ([0.1, 0.9], [1, 9], [1, 9]),
        ([0.1, 0.2, 0.7], [10_000_000, 20_000_000, 70_000_000], [10_000_000, 20_000_000, 70_000_000]),
        ([3, 1], [100, 100], [100, 33]),
        ([5], [7], [7]),
    ],
)
def test_weights(weights, available, taken):
    assert counts(specs("weight", weights), available) == taken


def test_samples_and_neither():
    assert counts(specs("samples", [5, None, 25]), [10, 10, 10]) == [5, 10, 25]
    assert counts(specs("samples", [None, None]), [3, 4]) == [3, 4]


def test_a_weight_that_asks_for_no_row():
    with pytest.raises(
        UserError, match=r"^datasets\[0\].weight 0.001 asks for no row in an epoch of 10; .* set samples"
    ):
        counts(specs("weight", [0.001, 1]), [1_000, 10])


def test_sources_without_rows_are_all_named():
    with pytest.raises(UserError) as error:
        counts(specs("samples", [5, None, None]), [0, 3, 0])
    assert error.value.problems == [
        f"datasets[0] '0.jsonl': no row is left to train on; {WHY}",
        f"datasets[2] '2.jsonl': no row is left to train on; {WHY}",
    ]


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 200), st.integers(0, 3))
def test_rows_are_chosen_as_evenly_as_that_goes(num_rows, count, seed):
    available = np.arange(num_rows) * 3
    rows = choose(available, count, seed)
    whole, rest = divmod(count, num_rows)
    times = Counter(rows.tolist())
    assert len(rows) == count and times.keys() <= set(available.tolist())
    assert sorted(times.get(row, 0) for row in available.tolist()) == [whole] * (num_rows - rest) + [whole + 1] * rest
    np.testing.assert_array_equal(rows[: whole * num_rows], np.tile(available, whole))
    assert np.all(np.diff(rows[whole * num_rows :]) > 0), "in their order"
    np.testing.assert_array_equal(rows, choose(available, count, seed))


def test_the_seed_decides_which_rows_are_chosen():
    assert len({tuple(choose(np.arange(100), 50, seed)) for seed in range(5)}) == 5


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_every_stretch_has_the_shares(sizes):
    order = interleave(sizes)
    assert sorted(order) == list(range(sum(sizes)))
    source = np.repeat(np.arange(len(sizes)), sizes)[order]
    for at, size in enumerate(sizes):
        assert np.all(np.diff(order[source == at]) == 1), "in their order"
        taken = np.concatenate([[0], np.cumsum(source == at)])
        ahead = taken - np.arange(len(taken)) * size / max(1, sum(sizes))
        # Each prefix is within half a row of its time, and the prefix's length within half a row of each source.
        assert np.ptp(ahead) <= 2 * (0.5 + len(sizes) / 2)


def test_a_small_source_is_spread_over_the_whole():
    np.testing.assert_array_equal(np.flatnonzero(interleave([100, 4]) >= 100), [13, 39, 65, 91])
