"""Which sample comes when: one stream of global sample indices, the same for every number of ranks.

Sample number k of the run is the (k mod N)-th of a permutation of the N rows keyed by (seed, k div N), so an epoch
never ends inside a step: a global batch may hold the last rows of one epoch and the first of the next. No row is lost
or padded at an epoch's tail, which is where frameworks that cut epochs into batches differ between world sizes.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Sampler


def num_steps(num_rows: int, global_batch_size: int, num_epochs: float, max_steps: int) -> int:
    """Optimizer steps of a run: `max_steps` where it is positive, else enough to see `num_epochs` x `num_rows`
    samples."""
    if max_steps > 0:
        return max_steps
    return max(1, math.ceil(num_epochs * num_rows / global_batch_size))


class SampleStream(Sampler[int]):
    """Yields the row indices of the samples that are still to come, reshuffled every `num_rows`.

    Args:
        num_rows: of the data set.
        seed: of the order.
        global_batch_size: samples of a step.
        max_steps: steps of the whole run.
        step: steps done when it begins.
        samples_seen: samples that those took; step x global_batch_size unless the batch was changed on the way.
    """

    def __init__(
        self, num_rows: int, seed: int, global_batch_size: int, max_steps: int, step: int = 0, samples_seen: int = 0
    ):
        self.num_rows, self.seed, self.global_batch_size = num_rows, seed, global_batch_size
        self.max_steps, self.step, self.samples_seen = max_steps, step, samples_seen

    def samples_at(self, step: int) -> int:
        """Samples that the run has taken by the end of `step`."""
        return self.samples_seen + (step - self.step) * self.global_batch_size

    def __len__(self) -> int:
        """As if it began with the run, which is how the trainer counts the steps of an epoch."""
        return self.max_steps * self.global_batch_size

    def __iter__(self) -> Iterator[int]:
        at, end = self.samples_seen, self.samples_at(self.max_steps)
        while at < end:
            epoch, done = divmod(at, self.num_rows)
            rows = permutation(self.num_rows, self.seed, epoch)[done : done + end - at]
            yield from map(int, rows.numpy())  # one by one: a list takes 40 bytes a row, a tensor's parts 600
            at += len(rows)


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


def seed_of(seed: int, sample: int) -> int:
    """Of the random numbers (dropout, noise) of the micro-batch whose first sample is number `sample` of the run."""
    return xxhash.xxh3_64_intdigest(f"{seed} {sample}".encode()) >> 1


FINGERPRINT = "fingerprint"


class FingerprintedBatches:
    """A collator that adds what its rows are, as one int64: the sum, modulo 2^64, of a hash of each row.

    Summed over a global batch it says which samples a step saw, whatever ranks and micro-batches they came in.
    """

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]]):
        self.collate = collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        total = torch.zeros((), dtype=torch.int64)
        for row in rows:
            total += fingerprint(row)
        return {**self.collate(rows), FINGERPRINT: total}


def fingerprint(row: dict[str, Any]) -> int:
    """A signed 64-bit hash of a row's columns and their values."""
    digest = xxhash.xxh3_64()
    for key in sorted(row):
        digest.update(key.encode())
        digest.update(np.asarray(row[key], dtype=np.int64).tobytes())
    value = digest.intdigest()
    return value - (1 << 64) if value >> 63 else value
