from collections import Counter

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from recipe.sampling import (
    FINGERPRINT,
    FingerprintedBatches,
    SampleStream,
    fingerprint,
    num_steps,
    padded_with_unlabelled,
    permutation,
    seed_of,
)


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


def stream_of(batch: int, steps: int, **begin: int) -> list[int]:
    return list(SampleStream(39, 42, batch, steps, **begin))


def test_the_stream_has_every_row_once_an_epoch():
    stream = stream_of(10, 12)
    assert len(stream) == len(SampleStream(39, 42, 10, 12)) == 120
    epochs = [stream[i * 39 : (i + 1) * 39] for i in range(4)]
    assert all(sorted(epoch) == list(range(39)) for epoch in epochs[:3])
    assert len(set(epochs[3])) == 3
    assert epochs[0] != epochs[1] != epochs[2], "each epoch is shuffled anew"


def test_the_stream_may_be_shorter_than_an_epoch():
    assert stream_of(8, 1) == permutation(39, 42, 0)[:8].tolist()


def test_a_longer_run_begins_with_the_same_samples():
    """A resume with more steps, or another seed for nothing but the order."""
    assert stream_of(8, 25)[:80] == stream_of(8, 10)
    assert list(SampleStream(39, 43, 8, 10)) != stream_of(8, 10)


@pytest.mark.parametrize("batch", [8, 13, 39, 50])
def test_a_stream_that_begins_at_any_step_yields_the_rest(batch):
    """R1: across the ends of epochs, and where one ends with a step; it is as long as the whole one, by which the
    trainer counts."""
    whole = stream_of(batch, 12)
    for step in range(13):
        rest = SampleStream(39, 42, batch, 12, step, step * batch)
        assert list(rest) == list(rest) == whole[step * batch :]
        assert len(rest) == 12 * batch and rest.samples_at(12) == 12 * batch


@pytest.mark.parametrize(("old", "new"), [(8, 16), (16, 8), (12, 5)])
def test_no_sample_is_left_out_or_repeated_when_the_batch_changes_on_the_way(old, new):
    at = SampleStream(39, 42, old, 20).samples_at(6)
    assert at == 6 * old
    changed = SampleStream(39, 42, new, 20, step=6, samples_seen=at)
    assert list(changed) == stream_of(1, 1000)[at : at + 14 * new]
    assert changed.samples_at(6) == at and changed.samples_at(9) == at + 3 * new
    once_more = SampleStream(39, 42, old, 20, step=9, samples_seen=changed.samples_at(9))
    assert list(once_more)[:5] == list(changed)[3 * new : 3 * new + 5]


def test_micro_batches_have_seeds_of_their_own():
    seeds = {seed_of(seed, sample) for seed in (0, 1, 42) for sample in range(2000)}
    assert len(seeds) == 6000
    assert all(0 <= seed < 1 << 63 for seed in seeds), "as torch takes them"
    assert seed_of(42, 7) == 8861854105027947007, "in every process"


def samples_of_step(world_size: int, micro: int, accumulation: int, steps: int) -> list[list[int]]:
    """What all ranks together see in each step, as Accelerate splits the stream."""
    global_batch_size = world_size * micro * accumulation
    seen: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(world_size):
        batches = BatchSampler(SampleStream(39, 42, global_batch_size, steps), micro, drop_last=False)
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
    stream = stream_of(12, 10)
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


# -- what a batch was --------------------------------------------------------------------------------------------------


def row(number: int) -> dict[str, list[int]]:
    ids = [number, 2, 3 + number % 2]
    return {"input_ids": ids, "labels": [-100, *ids[1:]], "attention_mask": [1] * len(ids)}


def summed(batches: list[list[int]]) -> int:
    """The sum over micro-batches of rows by number, as the trainer makes it."""
    collate = FingerprintedBatches(lambda rows: {"size": len(rows)})
    total = torch.zeros((), dtype=torch.int64)
    for batch in batches:
        collated = collate([row(number) for number in batch])
        assert collated["size"] == len(batch)
        total += collated[FINGERPRINT]
    return int(total)


@pytest.mark.parametrize("split", [[[5, 4, 3, 2, 1, 0]], [[0, 1], [2, 3], [4, 5]], [[3], [5, 0, 4, 1], [2]]], ids=str)
def test_a_batchs_fingerprint_does_not_depend_on_its_order_or_split(split):
    assert summed(split) == summed([[0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize("other", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 5, 5], [0, 1, 2, 3, 5, 5]])
def test_another_batch_has_another_fingerprint(other):
    assert summed([other]) != summed([[0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize("key", ["input_ids", "labels", "attention_mask"])
def test_a_row_with_any_other_value_has_another_fingerprint(key):
    own = fingerprint(row(1))
    assert -(1 << 63) <= own < 1 << 63
    others = [fingerprint(row(1) | {key: value}) for value in changed_at_any_place(row(1)[key])]
    assert len({own, *others}) == len(others) + 1
    assert fingerprint({name: torch.tensor(value) for name, value in row(1).items()}) == own, "whatever holds it"


def changed_at_any_place(values: list[int]) -> list[list[int]]:
    return [[*values[:i], values[i] + 1, *values[i + 1 :]] for i in range(len(values))] + [values[:-1], [*values, 0]]


def test_tokens_and_labels_may_not_be_exchanged():
    swapped = {"input_ids": row(1)["labels"], "labels": row(1)["input_ids"], "attention_mask": [1, 1, 1]}
    assert fingerprint(swapped) != fingerprint(row(1))
