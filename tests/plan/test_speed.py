"""What must hold of any step's time, and bytes on the wire by hand."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recipe.plan import speed
from recipe.plan.hardware import GPUS, Network
from recipe.plan.models import by_name
from recipe.plan.setup import STRATEGIES
from tests.plan.cases import a_setup, setups

SLACK = 1 + 1e-9  # of sums in another order
properties = settings(max_examples=100, deadline=None)  # a time limit would be the machine's
PARAMETERS = by_name("llama-2-70b").parameters


@properties
@given(setups(), st.floats(1, 100))
def test_more_bandwidth_between_nodes_never_slows(setup, times):
    faster = replace(setup, network=Network("faster", setup.network.gigabits * times))
    assert speed.estimate(faster).step <= speed.estimate(setup).step * SLACK


@properties
@given(setups(), st.integers(1, 8))
def test_more_accumulation_never_lowers_throughput(setup, more):
    """It spreads the optimizer's time over more tokens. But paged moments give way to the gradients that wait."""
    assume(not setup.optimizer.paged)
    rate = speed.estimate(setup).tokens_per_second_per_gpu
    longer = speed.estimate(replace(setup, accumulation=setup.accumulation + more))
    assert longer.tokens_per_second_per_gpu * SLACK >= rate


@properties
@given(setups(), st.integers(1, 8))
def test_larger_micro_batches_never_lower_throughput(setup, more):
    assume(not setup.optimizer.paged)
    rate = speed.estimate(setup).tokens_per_second_per_gpu
    larger = replace(setup, micro_batch=setup.micro_batch + more)
    assert speed.estimate(larger).tokens_per_second_per_gpu * SLACK >= rate


@properties
@given(setups(), st.sampled_from([128, 4096, 131072]))
def test_mfu_is_a_share(setup, seq_len):
    """Also of lengths at which attention is nearly all, of which MFU counts the masked half too."""
    found = speed.estimate(replace(setup, seq_len=seq_len))
    assert 0 < found.mfu < 1
    assert found.mfu == pytest.approx(found.model_tflops / setup.gpu.tflops)


@properties
@given(setups())
def test_recomputation_costs_at_most_the_forward_pass_again(setup):
    """Which is a third of what a step has without it, and a little where attention's backward is longer; a half where
    frozen weights have no gradients."""
    compute = {
        kind: speed.estimate(replace(setup, checkpointing=kind)).compute
        for kind in ("none", "attention", "op", "alternate", "full")
    }
    most = 1.34 if setup.adapter is None else 1.5
    assert compute["none"] <= compute["full"] <= most * compute["none"]
    for kind in ("attention", "op", "alternate"):
        assert compute["none"] <= compute[kind] * SLACK and compute[kind] <= compute["full"] * SLACK


@properties
@given(setups())
def test_a_step_is_its_compute_and_what_that_does_not_hide(setup):
    found = speed.estimate(setup)
    assert 0 <= found.waited <= found.communication * (1 + 1e-6)  # a difference of sums
    assert -1e-6 <= found.hidden <= 1
    assert found.step * SLACK >= found.compute + found.waited + found.optimizer
    if not found.launch_bound:
        assert found.step <= (found.compute + found.communication + found.optimizer) * SLACK


@properties
@given(setups(num_nodes=1, gpus_per_node=1, offload=False))
def test_one_gpu_has_nobody_to_talk_to(setup):
    found = speed.estimate(setup)
    assert found.communication == found.waited == 0 and found.hidden == 1
    assert set(found.wire.values()) == {0}


@properties
@given(setups(offload=False))
def test_a_node_alone_sends_nothing_between_nodes(setup):
    alone = replace(setup, num_nodes=1)
    assert speed.wire(alone)["between nodes"] == 0
    slow = replace(alone, network=Network("slow", 1))
    assert speed.estimate(slow).step == speed.estimate(alone).step


@properties
@given(setups(strategy=STRATEGIES["FULL_SHARD"], adapter=None))
def test_full_sharding_sends_weights_twice_and_gradients_once(setup):
    """ZeRO's 3 Psi (arXiv 1910.02054, section 7.2.2), which NCCL's ring leads through every node."""
    ranks, parameters = setup.world_size, setup.shape.parameters
    sent = (2 * setup.compute_bytes + setup.reduce_bytes) * parameters * (ranks - 1) / ranks
    assert setup.num_nodes == 1 or speed.wire(setup)["between nodes"] == pytest.approx(setup.accumulation * sent)


@pytest.mark.parametrize(
    ("strategy", "between", "within"),
    [
        ("FULL_SHARD", (2 + 2 + 4) * 15 / 16, (2 + 2 + 4) * 15 / 16),
        ("SHARD_GRAD_OP", (2 + 4) * 15 / 16, (2 + 4) * 15 / 16),
        ("HYBRID_SHARD", 2 * 4 * 1 / 2, (2 + 2 + 4) * 7 / 8),  # a node's 8 ranks average 1 / 8 each
        ("NO_SHARD", 2 * 4 * 15 / 16, 0),
        ("ZERO1", 2 * 4 * 15 / 16, 0),
    ],
)
def test_bytes_on_the_wire_of_two_nodes(strategy, between, within):
    found = speed.wire(a_setup(strategy=STRATEGIES[strategy], accumulation=3))
    assert found["between nodes"] == pytest.approx(3 * between * PARAMETERS)
    assert found["within a node"] == pytest.approx(3 * within * PARAMETERS)


def test_tokens_per_second_are_a_steps():
    setup = a_setup(accumulation=2, micro_batch=3)
    found = speed.estimate(setup)
    assert found.tokens_per_second_per_gpu * found.step == pytest.approx(2 * 3 * 2048)


@pytest.mark.parametrize(("checkpointing", "times"), [("full", 4 / 3), ("alternate", 3.5 / 3), ("none", 1), ("op", 1)])
def test_hardware_tflops_count_the_forward_pass_that_is_repeated(checkpointing, times):
    setup = a_setup(checkpointing=checkpointing)
    found = speed.estimate(setup)
    assert speed.hardware_tflops(setup, found) == pytest.approx(times * found.model_tflops)


@properties
@given(setups(gpus_per_node=8))
def test_offloaded_shares_come_and_go_over_pcie(setup):
    assume(setup.strategy.parameters)
    there, back = (speed.estimate(replace(setup, offload=offload)) for offload in (True, False))
    assert there.communication > back.communication


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100-80gb"])
def test_a_faster_gpu_is_faster(gpu):
    slow, fast = (speed.estimate(a_setup(gpu=GPUS[name])) for name in ("v100-32gb", gpu))
    assert fast.step < slow.step


def test_tiny_models_wait_for_the_host():
    small = replace(by_name("smollm2-135m"), hidden=64, intermediate=64)
    assert speed.estimate(a_setup(shape=small, seq_len=16)).launch_bound
    assert not speed.estimate(a_setup()).launch_bound
