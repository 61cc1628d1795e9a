"""Which sample comes when: one stream of global sample indices, the same for every number of ranks.

Sample number k of the run is the (k mod N)-th of a permutation of the N rows keyed by (seed, k div N), so an epoch
never ends inside a step: a global batch may hold the last rows of one epoch and the first of the next. No row is lost
or padded at an epoch's tail, which is where frameworks that cut epochs into batches differ between world sizes.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler


def num_steps(num_rows: int, global_batch_size: int, num_epochs: float, max_steps: int) -> int:
    """Optimizer steps of a run: `max_steps` where it is positive, else enough to see `num_epochs` x `num_rows`
    samples."""
    if max_steps > 0:
        return max_steps
    return max(1, math.ceil(num_epochs * num_rows / global_batch_size))


class SampleStream(Sampler[int]):
    """Yields `num_samples` row indices of a data set of `num_rows`, reshuffled every `num_rows`."""

    def __init__(self, num_rows: int, num_samples: int, seed: int):
        self.num_rows, self.num_samples, self.seed = num_rows, num_samples, seed

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        for epoch in range(math.ceil(self.num_samples / self.num_rows)):
            order = permutation(self.num_rows, self.seed, epoch)
            yield from order[: self.num_samples - epoch * self.num_rows].tolist()


def permutation(num_rows: int, seed: int, epoch: int) -> torch.Tensor:
    """The order of the rows in `epoch`, [num_rows]; it depends on nothing but its arguments."""
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    return torch.randperm(num_rows, generator=generator)


class _Padded(torch.utils.data.Dataset):
    def __init__(self, rows: Any, length: int):
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict:
        if index >= self.length:
            raise IndexError(index)
        if index < len(self.rows):
            return self.rows[index]
        filler = self.rows[0]
        return {**filler, "labels": [-100] * len(filler["labels"])}


def padded_with_unlabelled(rows: Any, multiple: int) -> torch.utils.data.Dataset:
    """`rows`, filled up to a multiple of `multiple` with rows whose labels are all masked, so that every rank takes
    part in as many forward passes (each is collective) and no row counts twice."""
    return _Padded(rows, math.ceil(len(rows) / multiple) * multiple)
