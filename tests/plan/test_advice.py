"""What to change so that a plan fits."""

from dataclasses import replace

from recipe.plan import advice, memory, speed
from recipe.plan.hardware import gpu, network
from recipe.plan.setup import OPTIMIZERS, STRATEGIES, Setup
from recipe.plan.shape import by_name

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
        assert change.verdict == advice.verdict(change.setup) == advice.FITS
        assert change.speed * rate == speed.estimate(change.setup).tokens_per_second_per_gpu
        assert change.setup.tokens_per_step == LLAMA_70B.tokens_per_step, "the run stays what it is"
        assert len(change.keys) == 1
    assert [change.speed for change in found] == sorted((change.speed for change in found), reverse=True)
    assert "param_dtype: bfloat16" in found[0].line()


def test_no_more_keys_than_it_takes():
    """8 GPUs: neither bf16 weights alone nor 8-bit moments alone are enough, both together are."""
    setup = replace(LLAMA_70B, num_nodes=1, accumulation=3)
    assert advice.verdict(setup) == advice.TOO_LARGE
    found = advice.changes(setup)
    assert {len(change.keys) for change in found} == {1}, "offloading or paging is one key"
    paged = replace(setup, optimizer=OPTIMIZERS["paged_adamw_32bit"], strategy=STRATEGIES["SHARD_GRAD_OP"])
    both = advice.changes(replace(paged, gpu=replace(setup.gpu, memory_gib=39.4)))
    assert {len(change.keys) for change in both} == {2}
    assert all("FULL_SHARD" in " ".join(change.keys) or "offload" in " ".join(change.keys) for change in both)


def test_what_nothing_mends():
    setup = Setup(by_name("llama-3.1-405b"), gpu("v100-16gb"), network("100gbe"), 1, 1, seq_len=131072)
    assert advice.changes(setup) == []


def test_a_smaller_micro_batch_accumulates_more():
    setup = replace(LLAMA_70B, num_nodes=8, micro_batch=24, accumulation=1)
    assert advice.verdict(setup) == advice.TOO_LARGE
    (smaller,) = (c for c in advice.changes(setup) if "per_device_train_batch_size" in c.keys[0])
    assert (smaller.setup.micro_batch, smaller.setup.accumulation) == (12, 2)
