from collections import Counter

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from recipe.sampling import SampleStream, num_steps, padded_with_unlabelled, permutation


@pytest.mark.parametrize("num_rows", [1, 2, 39, 1000])
def test_a_permutation_has_every_row_once(num_rows):
    assert sorted(permutation(num_rows, 42, 3).tolist()) == list(range(num_rows))


def test_a_permutation_depends_on_its_arguments_alone():
    first = permutation(100, 42, 0)
    torch.manual_seed(1)
    torch.rand(10)
    assert torch.equal(first, permutation(100, 42, 0))
    others = [permutation(100, 42, 1), permutation(100, 43, 0), permutation(100, 0, 42)]
    assert not any(torch.equal(first, other) for other in others)
    assert not torch.equal(first, torch.arange(100)), "it is shuffled"


def test_the_stream_has_every_row_once_an_epoch():
    stream = list(SampleStream(39, 39 * 3 + 5, seed=42))
    assert len(stream) == len(SampleStream(39, 39 * 3 + 5, seed=42)) == 122
    epochs = [stream[i * 39 : (i + 1) * 39] for i in range(4)]
    assert all(sorted(epoch) == list(range(39)) for epoch in epochs[:3])
    assert len(set(epochs[3])) == 5
    assert epochs[0] != epochs[1] != epochs[2], "each epoch is shuffled anew"


def test_the_stream_may_be_shorter_than_an_epoch():
    stream = list(SampleStream(39, 8, seed=42))
    assert stream == permutation(39, 42, 0)[:8].tolist()


def test_a_longer_run_begins_with_the_same_samples():
    """A resume with more steps, or another seed for nothing but the order."""
    assert list(SampleStream(39, 200, 42))[:80] == list(SampleStream(39, 80, 42))
    assert list(SampleStream(39, 80, 43)) != list(SampleStream(39, 80, 42))


def samples_of_step(world_size: int, micro: int, accumulation: int, steps: int) -> list[list[int]]:
    """What all ranks together see in each step, as Accelerate splits the stream."""
    global_batch_size = world_size * micro * accumulation
    seen: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(world_size):
        batches = BatchSampler(SampleStream(39, steps * global_batch_size, seed=42), micro, drop_last=False)
        shard = list(BatchSamplerShard(batches, world_size, rank, split_batches=False, even_batches=True))
        assert len(shard) == steps * accumulation, "every rank has as many batches (T12)"
        for i, batch in enumerate(shard):
            seen[i // accumulation] += batch
    return seen


@pytest.mark.parametrize(
    ("world_size", "micro", "accumulation"), [(1, 12, 1), (1, 1, 12), (2, 2, 3), (3, 2, 2), (3, 4, 1), (12, 1, 1)]
)
def test_a_step_has_the_same_samples_for_every_split_into_ranks(world_size, micro, accumulation):
    """39 rows and 12 samples a step: epochs end inside steps."""
    stream = list(SampleStream(39, 12 * 10, seed=42))
    seen = samples_of_step(world_size, micro, accumulation, steps=10)
    for step, samples in enumerate(seen):
        assert Counter(samples) == Counter(stream[step * 12 : (step + 1) * 12])


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "max_steps", "steps"),
    [
        (39, 8, 1, -1, 5),
        (40, 8, 1, -1, 5),
        (41, 8, 1, -1, 6),
        (39, 8, 2, -1, 10),
        (39, 8, 0.5, -1, 3),
        (3, 8, 1, -1, 1),
        (39, 8, 3, 7, 7),
        (39, 8, 1, 1, 1),
        (39, 8, 1, 0, 5),
    ],
)
def test_num_steps(rows, batch, epochs, max_steps, steps):
    assert num_steps(rows, batch, epochs, max_steps) == steps


ROWS = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]


@pytest.mark.parametrize(("multiple", "length"), [(1, 2), (2, 2), (3, 3), (8, 8)])
def test_evaluation_rows_are_filled_up_with_rows_that_count_nothing(multiple, length):
    padded = padded_with_unlabelled(ROWS, multiple)
    assert len(padded) == length
    assert [padded[0], padded[1]] == ROWS
    for i in range(2, length):
        assert padded[i] == {"input_ids": [1, 2, 3], "labels": [-100] * 3}
    assert ROWS[0]["labels"] == [-100, 2, 3], "the rows themselves stay as they are"
