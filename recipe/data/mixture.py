"""Which rows of which source an epoch has, and in which order they stand before they are packed."""

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import numpy as np

from recipe.data.sources import Spec
from recipe.errors import UserError

WHY = "its rows are bad, held out (eval_samples), or left out by a policy (truncation, tool_turns, ...)"


def counts(specs: Sequence[Spec], available: Sequence[int]) -> list[int]:
    """Rows of each source in an epoch.

    With weights, the largest epoch in which no source's share is more rows than it has, so that none stands twice; with
    `samples`, that many (rows stand more than once where there are fewer); with neither, all.

    Raises:
        UserError: there is nothing to take from, or a weight is so small that it asks for no row.
    """
    empty = [spec for spec, rows in zip(specs, available, strict=True) if not rows]
    if empty:
        raise UserError(*(f"{spec.key} '{spec.path}': no row is left to train on; {WHY}" for spec in empty))
    # As they are written: 0.1 is a tenth.
    weights = [Fraction(str(spec.weight)) for spec in specs if spec.weight is not None]
    if not weights:
        return [spec.samples or rows for spec, rows in zip(specs, available, strict=True)]
    shares = [weight / sum(weights) for weight in weights]
    total = min(rows // share for rows, share in zip(available, shares, strict=True))
    taken = apportion(total, shares)
    for spec, some in zip(specs, taken, strict=True):
        if not some:
            raise UserError(
                f"{spec.key}.weight {spec.weight:g} asks for no row in an epoch of {total:,}; the smallest source for "
                "its weight decides how long an epoch is: lower that one's weight, or set samples in place of weights"
            )
    return taken


def apportion(total: int, shares: Sequence[Fraction]) -> list[int]:
    """`total` divided by `shares` (that sum to 1), by largest remainder, [sources]."""
    exact = [total * share for share in shares]
    parts = [floor(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda at: parts[at] - exact[at])
    for at in by_remainder[: total - sum(parts)]:
        parts[at] += 1
    return parts


def choose(available: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` of the rows `available`, in their order: all as often as that goes, and the rest drawn by `seed`."""
    whole, rest = divmod(count, len(available))
    drawn = np.sort(np.random.default_rng(seed).permutation(len(available))[:rest])
    return np.concatenate([np.tile(available, whole), available[drawn]])


def interleave(sizes: Sequence[int]) -> np.ndarray:
    """An order in which every stretch has the sources' shares: positions in the concatenation of sources of `sizes`."""
    places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    return np.argsort(places, kind="stable")
