"""Every plan of a kind that fits."""

from dataclasses import replace

import pytest

from recipe.plan import memory
from recipe.plan.hardware import gpu, network
from recipe.plan.models import by_name
from recipe.plan.search import best_by_size, lines, search
from recipe.plan.setup import Setup

START = Setup(by_name("llama-2-7b"), gpu("a100-40gb"), network("efa-400"), 1, 8, seq_len=2048)


@pytest.fixture(scope="module")
def found():
    return search(START, global_batch=64, most_nodes=4)


def test_all_fit_and_make_the_same_steps(found):
    assert len(found) > 100
    for one in found:
        assert memory.needed(one.setup) == one.needed <= START.gpu.memory
        assert one.setup.tokens_per_step == 64 * 2048
    rates = [one.tokens_per_second for one in found]
    assert rates == sorted(rates, reverse=True)
    assert len({tuple(one.keys().values()) for one in found}) == len(found), "no plan twice"


def test_what_fsdp_does_not_have_is_not_searched(found):
    for one in found:
        hybrid = one.setup.strategy.name == "HYBRID_SHARD"
        assert not hybrid or (one.setup.num_nodes > 1 and one.setup.fsdp == 1)
    fsdp2 = search(replace(START, fsdp=2), 64, most_nodes=2)
    assert {one.setup.strategy.name for one in fsdp2} == {"FULL_SHARD", "SHARD_GRAD_OP"}


def test_the_best_of_each_size(found):
    best = best_by_size(found)
    sizes = [(one.setup.master_bytes, one.setup.world_size) for one in best]
    assert sizes == sorted(sizes, key=lambda size: (-size[0], size[1]))
    assert {gpus for _, gpus in sizes} >= {4, 8, 16, 32}
    for one in best:
        same = [
            o
            for o in found
            if (o.setup.master_bytes, o.setup.world_size) == (one.setup.master_bytes, one.setup.world_size)
        ]
        assert one.tokens_per_second >= 0.92 * same[0].tokens_per_second, "a safer plan may be that much slower"


def test_lengths_keep_the_tokens_of_a_step():
    found = search(START, 64, most_nodes=1, lengths=(1024, 2048, 4096))
    assert {one.setup.seq_len for one in found} == {1024, 2048, 4096}
    assert {one.setup.tokens_per_step for one in found} == {64 * 2048}


def test_the_table(found):
    table = list(lines(best_by_size(found), tokens=1e9))
    assert len(table) == len(best_by_size(found)) + 3
    assert len({len(line.removesuffix("  tight")) for line in table[2:]}) == 1, "columns are aligned"
    none = search(replace(START, shape=by_name("llama-3.1-405b"), gpu=gpu("v100-16gb")), 64, most_nodes=1)
    small = [one for one in none if not one.setup.offload]
    assert "no plan fits" in "\n".join(lines(small, None))
