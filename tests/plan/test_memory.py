"""Model states against the ZeRO paper, the loss against what the recipe's own takes, and what must hold of any plan."""

from dataclasses import replace
from math import floor
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recipe import loss
from recipe.plan import fitted, memory, sharded
from recipe.plan.models import by_name
from recipe.plan.setup import OPTIMIZERS, STRATEGIES, Optimizer, Setup
from recipe.plan.shape import Shape
from tests.plan.cases import a_setup, adapters, setups
from tests.plan.measured import peak_bytes

# GB (1e9 bytes) of a rank's model states, as arXiv 1910.02054 prints them for mixed-precision Adam (K = 12): billions
# of parameters, ranks, and stages 1, 2, 3. Figure 1's are stage 0 and the row of 64 ranks.
FIGURE_1 = [(7.5, 64, 0, "120"), (7.5, 64, 1, "31.4"), (7.5, 64, 2, "16.6"), (7.5, 64, 3, "1.9")]
TABLE_1 = [
    (7.5, 1, "120", "120", "120"),
    (7.5, 4, "52.5", "41.3", "30"),
    (7.5, 16, "35.6", "21.6", "7.5"),
    (7.5, 64, "31.4", "16.6", "1.88"),
    (7.5, 256, "30.4", "15.4", "0.47"),
    (7.5, 1024, "30.1", "15.1", "0.12"),
    (128, 1, "2048", "2048", "2048"),
    (128, 4, "896", "704", "512"),
    (128, 16, "608", "368", "128"),
    (128, 64, "536", "284", "32"),
    (128, 256, "518", "263", "8"),
    (128, 1024, "513", "257", "2"),
    (1000, 1, "16000", "16000", "16000"),
    (1000, 4, "7000", "5500", "4000"),
    (1000, 16, "4750", "2875", "1000"),
    (1000, 64, "4187", "2218", "250"),
    (1000, 256, "4046", "2054", "62.5"),
    (1000, 1024, "4011", "2013", "15.6"),
]
ZERO = FIGURE_1 + [(size, ranks, stage, row[stage - 1]) for size, ranks, *row in TABLE_1 for stage in (1, 2, 3)]


@pytest.mark.parametrize(("billions", "ranks", "stage", "printed"), ZERO)
def test_model_states_are_those_of_the_zero_paper(billions, ranks, stage, printed):
    """To the last printed digit, which the paper rounds in most places and cuts off in six."""
    scale = 10 ** len(printed.partition(".")[2])
    states = sharded.model_states(billions, ranks, stage) * scale
    assert round(float(printed) * scale) in (floor(states), floor(states + 0.5))


# The stage whose model states a strategy has at rest: FSDP's SHARD_GRAD_OP holds shares of weights too, and makes them
# whole from the forward to the backward pass.
STAGES = [("NO_SHARD", 0), ("DDP", 0), ("ZERO1", 1), ("SHARD_GRAD_OP", 3), ("FULL_SHARD", 3)]


@pytest.mark.parametrize(("strategy", "stage"), STAGES)
@pytest.mark.parametrize("nodes", [1, 4])
def test_what_rests_on_a_gpu_is_zeros_model_states(strategy, stage, nodes):
    fp32 = a_setup(strategy=STRATEGIES[strategy], num_nodes=nodes)
    parameters, ranks = fp32.shape.parameters, 8 * nodes
    states = sharded.model_states(parameters, ranks, stage, weight_bytes=4, gradient_bytes=4, optimizer_bytes=8)
    assert sum(sharded.resting(fp32).values()) == pytest.approx(states)
    paper = replace(fp32, master_bytes=2, optimizer=Optimizer(12.0))  # the fp32 weights are the optimizer's there
    assert sum(sharded.resting(paper).values()) == pytest.approx(sharded.model_states(parameters, ranks, stage))


def test_hybrid_sharding_rests_as_full_sharding_on_one_node():
    hybrid = sharded.resting(a_setup(strategy=STRATEGIES["HYBRID_SHARD"], num_nodes=16))
    assert hybrid == sharded.resting(a_setup(num_nodes=1))


def test_what_is_offloaded_or_paged_does_not_rest_on_the_gpu():
    assert sum(sharded.resting(a_setup(offload=True)).values()) == 0
    paged = sharded.resting(a_setup(optimizer=OPTIMIZERS["paged_adamw_32bit"]))
    assert paged == sharded.resting(a_setup()) | {"moments": 0.0}


def test_gradients_that_wait_for_the_last_micro_batch_are_whole():
    waits = sharded.resting(a_setup(accumulation=4, reduce_each_micro_batch=False))
    assert waits["gradients"] == 2 * a_setup().shape.parameters
    assert sharded.resting(a_setup(reduce_each_micro_batch=False)) == sharded.resting(a_setup())


def test_the_loss_is_planned_in_the_recipes_chunks():
    assert memory.LOSS_CHUNK_TOKENS == loss.CHUNK_TOKENS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [1000, 2048, 3072, 4096, 7000])
def test_the_loss_takes_what_is_planned(tokens, dtype):
    """Of a model so narrow that the logits are nearly all."""
    hidden, vocab = 16, 2000
    weight = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))

    def forward() -> torch.Tensor:
        states = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
        return loss._LinearCrossEntropy.apply(states, weight, labels)

    forward()
    shape = Shape("narrow", hidden, layers=1, heads=1, kv_heads=1, head_dim=16, intermediate=16, vocab=vocab)
    setup = a_setup(shape=shape, compute_bytes=dtype.itemsize, seq_len=tokens)
    planned = peak_bytes(forward) / memory._loss(setup)
    # In fp32 the end of the last chunk, where it is a short one, is a little less.
    assert planned == pytest.approx(1, rel=0.01) or (dtype == torch.float32 and tokens == 3072 and 0.85 < planned < 1)


def test_llama2_70b_on_two_nodes():
    """By hand: of its 68,976,648,192 parameters, 855,654,400 are in a layer and 524,296,192 outside of layers."""
    assert sharded.resting(a_setup()) == {
        "weights": 68_976_648_192 / 4,
        "gradients": 68_976_648_192 / 4,
        "moments": 68_976_648_192 / 2,
    }
    found = memory.estimate(a_setup())
    # In 16 bits: embedding and head, which stay, the layer at work and the one fetched ahead.
    assert found.pools["gathering"] == 2 * (524_296_192 + 2 * 855_654_400)
    assert max(moment.pieces.get("activations", 0) for moment in found.moments) == pytest.approx(
        2048 * (80 * 2 * 8192 + (4 + 2 + 2) * 8192), rel=1e-4
    )


def figures(setup: Setup) -> dict[str, float]:
    found = memory.estimate(setup)
    return {"needed": memory.needed(setup), "allocated": found.allocated, "reserved": found.reserved}


def assert_no_more(less: Setup, more: Setup) -> None:
    ours, theirs = figures(less), figures(more)
    for name in ours:
        assert ours[name] <= theirs[name] * SLACK, (name, ours, theirs)


# fp32 master weights, computed in bf16.
AUTOCAST: dict[str, Any] = {
    "mostly_layers": True,
    "master_bytes": 4,
    "compute_bytes": 2,
    "reduce_bytes": 4,
    "offload": False,
    "reduce_each_micro_batch": True,
}
SLACK = 1 + 1e-9  # of sums in another order
properties = settings(max_examples=100, deadline=None)  # a time limit would be the machine's
FULL_SHARD = STRATEGIES["FULL_SHARD"]


@properties
@given(setups(mostly_layers=True, strategy=FULL_SHARD, offload=False), st.integers(1, 16))
def test_more_nodes_never_need_more(setup, more):
    """But for NCCL's buffers, which come with the third GPU."""
    assume(setup.world_size > 2)
    assert_no_more(replace(setup, num_nodes=setup.num_nodes + more), setup)


@properties
@given(setups(), st.integers(1, 4096))
def test_longer_sequences_never_need_less(setup, more):
    assert_no_more(setup, replace(setup, seq_len=setup.seq_len + more))


@properties
@given(setups(), st.integers(1, 8))
def test_larger_micro_batches_never_need_less(setup, more):
    assert_no_more(setup, replace(setup, micro_batch=setup.micro_batch + more))


@properties
@given(setups(), st.integers(1, 8))
def test_more_layers_never_need_less(setup, more):
    deeper = replace(setup.shape, layers=setup.shape.layers + more)
    assert_no_more(setup, replace(setup, shape=deeper))


@properties
@given(setups(**AUTOCAST))
def test_more_sharding_never_needs_more(setup):
    """From 2 ranks on. Of a model that is mostly embedding, a unit's weights, gradients and buffers can be more than
    what sharding saves."""
    assume(setup.world_size >= 2)
    needs = {name: memory.needed(replace(setup, strategy=STRATEGIES[name])) for name in STRATEGIES}
    ladder = [needs[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO1", "DDP")]
    assert ladder == sorted(ladder)
    assert needs["FULL_SHARD"] <= needs["NO_SHARD"] <= needs["DDP"], "FSDP1 casts a unit at a time, autocast all"


@properties
@given(setups(mostly_layers=True, expandable=True))
def test_less_recomputation_never_needs_less(setup):
    """With expandable segments; without, recomputing leaves holes in reserved memory, which can be more than it saves
    where little is kept."""
    by_kind = {kind: replace(setup, checkpointing=kind) for kind in ("full", "attention", "op", "none")}
    for kind in ("attention", "op"):
        assert_no_more(by_kind["full"], by_kind[kind])
        assert_no_more(by_kind[kind], by_kind["none"])


@properties
@given(setups(compute_bytes=2))
def test_a_bf16_master_never_needs_more_than_an_fp32_one(setup):
    assert_no_more(replace(setup, master_bytes=2), replace(setup, master_bytes=4))


@properties
@given(setups())
def test_offload_never_needs_more(setup):
    assert_no_more(replace(setup, offload=True), replace(setup, offload=False))


@properties
@given(setups())
def test_the_first_step_never_needs_more_than_the_second(setup):
    first, second = memory.estimate(setup, step=1), memory.estimate(setup, step=2)
    assert first.allocated <= second.allocated * SLACK and first.reserved <= second.reserved * SLACK


@properties
@given(setups(), adapters, st.integers(1, 64))
def test_wider_adapters_never_need_less(setup, adapter, more):
    wider = replace(adapter, rank=adapter.rank + more)
    assert_no_more(replace(setup, adapter=adapter), replace(setup, adapter=wider))


@properties
@given(setups(), st.sampled_from([1, 2]))
def test_every_moment_is_the_sum_of_its_pieces(setup, step):
    found = memory.estimate(setup, step)
    for moment in found.moments:
        assert min(moment.pieces.values()) >= 0 and moment.waiting >= 0
        assert moment.allocated == sum(moment.pieces.values())
        pools = sum(moment.in_pool(pool) for pool in memory.POOLS)
        assert pools == pytest.approx(moment.allocated + moment.waiting)
    assert found.allocated == max(moment.allocated for moment in found.moments)
    assert found.allocated <= found.active <= sum(found.pools.values()) * SLACK
    assert sum(found.pools.values()) <= found.reserved * SLACK and found.required <= found.reserved * SLACK


def test_outside_of_the_allocator():
    assert memory.outside(a_setup(num_nodes=1, gpus_per_node=1)) == fitted.CONTEXT_BYTES
    assert memory.needed(a_setup()) > memory.estimate(a_setup()).allocated + fitted.CONTEXT_BYTES


def test_a_tied_head_is_gathered_with_the_embedding():
    """FSDP2 has a unit of the head alone only where it is a parameter of its own."""
    tied, untied = by_name("llama-3.2-1b"), by_name("llama-3-8b")
    assert sharded.units(a_setup(shape=tied, fsdp=2)).root == tied.root
    assert sharded.units(a_setup(shape=untied, fsdp=2)).root == untied.head + untied.hidden
    assert sharded.units(a_setup(shape=untied, fsdp=1)).root == untied.root
