"""What to change so that a plan fits."""

from dataclasses import replace

import pytest

from recipe.plan import advice, memory, speed
from recipe.plan.hardware import gpu, network
from recipe.plan.models import by_name
from recipe.plan.setup import STRATEGIES, Setup

LLAMA_70B = Setup(by_name("llama-2-70b"), gpu("a100-80gb"), network("efa-400"), 2, 8, accumulation=2)


def test_a_plan_that_fits_needs_no_change():
    setup = replace(LLAMA_70B, num_nodes=8)
    assert advice.verdict(setup) == advice.FITS
    assert advice.changes(setup) == []


def test_the_three_verdicts():
    """By what a plan needs: tight is up to 6 % below the card, or what waits for memory."""
    needed = memory.needed(LLAMA_70B)
    for share, said in ((0.99, advice.TOO_LARGE), (1.01, advice.TIGHT), (1.5, advice.FITS)):
        card = replace(LLAMA_70B.gpu, memory_gib=share * needed / 2**30)
        assert advice.verdict(replace(LLAMA_70B, gpu=card)) == said


def test_every_change_does_what_it_says():
    found = advice.changes(LLAMA_70B)
    assert found, "Llama-2-70B on 16 GPUs is tight"
    rate = speed.estimate(LLAMA_70B).tokens_per_second_per_gpu
    for change in found:
        assert change.verdict == advice.verdict(change.setup) == advice.FITS, "it was tight before"
        assert change.speed == pytest.approx(speed.estimate(change.setup).tokens_per_second_per_gpu / rate)
        assert change.setup.tokens_per_step == LLAMA_70B.tokens_per_step, "the run stays what it is"
    assert len(found[0].keys) == 1, "no two keys where one is as cheap"
    assert [change.worth for change in found] == sorted((change.worth for change in found), reverse=True)
    assert "param_dtype: bfloat16" in found[0].line()


def test_two_keys_where_they_are_cheaper_than_one():
    """8 GPUs: offloading is one key and slow; bf16 weights with moments in 8 bits or paged fit too."""
    setup = replace(LLAMA_70B, num_nodes=1, accumulation=1)
    assert advice.verdict(setup) == advice.TOO_LARGE
    found = advice.changes(setup)
    offloaded = [change for change in found if "fsdp_offload_params: true" in change.keys]
    both = [change for change in found if len(change.keys) == 2 and any("bfloat16" in key for key in change.keys)]
    assert both and all(both[0].speed > change.speed for change in offloaded)
    assert all("GB of host memory" in change.line() for change in offloaded)


def test_no_advice_that_the_recipe_refuses():
    """FSDP1 cannot offload and accumulate."""
    setup = replace(LLAMA_70B, num_nodes=1, accumulation=4)
    assert not any("offload" in key for change in advice.changes(setup) for key in change.keys)
    fsdp2 = replace(setup, fsdp=2, strategy=STRATEGIES["SHARD_GRAD_OP"], gpu=gpu("h200"))
    keys = {key for change in advice.changes(fsdp2) for key in change.keys}
    assert "fsdp_reshard_after_forward: true" in keys


def test_what_nothing_mends():
    setup = Setup(by_name("llama-3.1-405b"), gpu("v100-16gb"), network("100gbe"), 1, 1, seq_len=131072)
    assert advice.changes(setup) == []


def test_a_smaller_micro_batch_accumulates_more():
    setup = replace(LLAMA_70B, num_nodes=8, micro_batch=24, accumulation=1)
    assert advice.verdict(setup) == advice.TOO_LARGE
    (smaller,) = (c for c in advice.changes(setup) if c.keys == ("per_device_train_batch_size: 12",))
    assert (smaller.setup.micro_batch, smaller.setup.accumulation) == (12, 2)
