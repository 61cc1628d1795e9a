"""Setups to plan: one by hand, and hypothesis's."""

from typing import Any

from hypothesis import strategies as st

from recipe.plan.adapters import Adapter
from recipe.plan.hardware import GPUS, NETWORKS, Network
from recipe.plan.models import by_name
from recipe.plan.setup import CHECKPOINTING, LOSSES, OPTIMIZERS, STRATEGIES, Setup
from recipe.plan.shape import Shape


def a_setup(**changes: Any) -> Setup:
    """Llama-2-70B on 2 nodes of 8 A100, as the recipe trains it; `changes` to that."""
    values: dict[str, Any] = {
        "shape": by_name("llama-2-70b"),
        "gpu": GPUS["a100-80gb"],
        "network": NETWORKS["ib-200"],
        "num_nodes": 2,
        "gpus_per_node": 8,
    }
    return Setup(**{**values, **changes})


@st.composite
def shapes(draw: st.DrawFn, mostly_layers: bool = False) -> Shape:
    """`mostly_layers`: 8 or more, which have more parameters than embedding and head, as in models that are sharded."""
    head_dim = draw(st.sampled_from([64, 128]))
    kv_heads, group = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 4, 8]))
    hidden = head_dim * kv_heads * group
    layers = draw(st.integers(8 if mostly_layers else 1, 100))
    vocab = draw(st.sampled_from([1000, 32000, 128256]))
    return Shape(
        name="drawn",
        hidden=hidden,
        layers=layers,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=hidden * draw(st.integers(1, 5)),
        vocab=min(vocab, layers * hidden) if mostly_layers else vocab,
        **{trait: draw(st.booleans()) for trait in ("gated", "rms_norm", "tied", "dropout", "qk_norms", "fused_norms")},
    )


adapters = st.builds(Adapter, st.integers(1, 256), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([2, 4]))


@st.composite
def setups(draw: st.DrawFn, mostly_layers: bool = False, **fixed: Any) -> Setup:
    """`fixed`: fields of the setup that are not drawn."""
    master_bytes = draw(st.sampled_from([2, 4]))
    values: dict[str, Any] = {
        "shape": draw(shapes(mostly_layers)),
        "gpu": GPUS[draw(st.sampled_from(sorted(GPUS)))],
        "network": Network("drawn", draw(st.sampled_from([100, 400, 3200]))),
        "num_nodes": draw(st.integers(1, 16)),
        "gpus_per_node": draw(st.sampled_from([1, 4, 8])),
        "strategy": STRATEGIES[draw(st.sampled_from(sorted(STRATEGIES)))],
        "fsdp": draw(st.sampled_from([1, 2])),
        "master_bytes": master_bytes,
        "compute_bytes": draw(st.sampled_from(sorted({2, master_bytes}))),
        "reduce_bytes": draw(st.sampled_from([2, 4])),
        "optimizer": OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))],
        "seq_len": draw(st.sampled_from([128, 2048, 8192])),
        "micro_batch": draw(st.integers(1, 8)),
        "accumulation": draw(st.integers(1, 8)),
        "checkpointing": draw(st.sampled_from(CHECKPOINTING)),
        "loss": draw(st.sampled_from([*LOSSES, "fused"])),
        "adapter": draw(st.none() | adapters),
    }
    for flag in ("flash", "offload", "expandable", "head_apart", "reduce_each_micro_batch", "keeps_gradients"):
        values[flag] = draw(st.booleans())
    return Setup(**{**values, **fixed})
