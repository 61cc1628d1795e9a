"""What a rank holds of weights, gradients and moments: its shares at rest, and what FSDP makes whole and reduces.

Model states are ZeRO's (Rajbhandari et al., arXiv 1910.02054, section 3). What is whole, and when, follows FSDP's own
code (torch/distributed/fsdp), as `recipe plan --dry-run` shows it. All in bytes, by the names of `recipe.plan.memory`'s
pieces.
"""

from dataclasses import dataclass

from recipe.plan import fitted
from recipe.plan.setup import OPTIMIZERS, Setup


def model_states(
    parameters: float,
    ranks: int,
    stage: int,
    weight_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """ZeRO's model states on one rank (arXiv 1910.02054, figure 1): 2 + 2 + K bytes a parameter, of which stage 1
    splits the optimizer's K, stage 2 the gradients too, stage 3 the weights too; stage 0 is data parallelism.

    Args:
        optimizer_bytes: K; 12 for mixed-precision Adam (fp32 weight, momentum, variance).
    """
    split = [stage >= 3, stage >= 2, stage >= 1]
    pieces = zip((weight_bytes, gradient_bytes, optimizer_bytes), split, strict=True)
    return parameters * sum(size / ranks if share else size for size, share in pieces)


@dataclass(frozen=True)
class Units:
    """Parameters that FSDP makes whole and reduces at a time."""

    layer: int
    root: int


def units(setup: Setup) -> Units:
    shape = setup.shape
    if setup.wrap_parameters:  # a linear layer each, and the embedding
        return Units(layer=min(shape.hidden * shape.intermediate, shape.layer), root=shape.embedding)
    if not root_stays(setup):
        return Units(layer=shape.layer, root=shape.head + shape.hidden)
    return Units(layer=shape.layer, root=shape.root)


def resting(setup: Setup) -> dict[str, float]:
    """Bytes of a GPU's weights, gradients and moments between passes. What is offloaded or paged is not there."""
    strategy, shards, trained = setup.strategy, setup.shards, setup.trained
    gradients = trained * setup.trained_bytes / (shards if strategy.gradients else 1)
    if strategy.gradients and setup.accumulation > 1 and not setup.reduce_each_micro_batch:
        gradients = float(trained * setup.compute_bytes)
    moments = trained * setup.moment_bytes / setup.moment_shares
    if setup.optimizer == OPTIMIZERS["adamw_8bit"] and setup.adapter is None:  # those of embeddings stay in fp32
        embedding = setup.shape.embedding / setup.moment_shares
        if setup.fsdp == 1 and strategy.parameters:  # rank 0's share of the root begins with it
            embedding = min(setup.shape.embedding, units(setup).root / shards)
        moments += (8 - setup.moment_bytes) * embedding
    return {
        "weights": _resting_weights(setup),
        "gradients": 0.0 if setup.offload else gradients,
        "moments": 0.0 if setup.offload or setup.optimizer.paged else moments,
    }


def _resting_weights(setup: Setup) -> float:
    shape, adapter = setup.shape, setup.adapter
    if adapter is None:
        return 0.0 if setup.offload else shape.parameters * setup.master_bytes / setup.shards
    frozen = shape.layers * adapter.frozen_layer(shape, setup.master_bytes) + shape.root * setup.master_bytes
    sharded = (frozen + setup.trained * adapter.weight_bytes) / setup.shards
    return (0.0 if setup.offload else sharded) + adapter.scales(shape)


def gathered(setup: Setup, unit: Units, layers: int) -> dict[str, float]:
    """Weights in the compute dtype, beside the resting ones: the root's, which stay, and `layers` units: the one at
    work, and in the backward pass the one that is fetched ahead."""
    compute, shape = setup.compute_bytes, setup.shape
    layer, root = setup.layer_bytes * unit.layer / shape.layer, float(unit.root * compute)
    everything = shape.layers * setup.layer_bytes + shape.root * compute
    if not setup.strategy.parameters:
        # Autocast keeps what it has cast; FSDP1 casts a unit at a time.
        cast = everything if setup.strategy.name != "NO_SHARD" else root + layers * layer
        return {"cast weights": cast} if compute != setup.master_bytes else {}
    whole = everything
    if not setup.strategy.stays_whole:
        whole = (root if layers == 0 or root_stays(setup) else 0) + layers * layer
    if setup.fsdp == 1 and setup.autocast:  # which keeps what it has cast of weights that are gathered in fp32
        return {"gathered weights": whole * 4 / compute, "cast weights": everything}
    if setup.fsdp == 1:
        return {"gathered weights": whole}
    # Parameters are copied out of flat buffers: one fetched ahead is still in its own, and the last one's stays until
    # the next is copied.
    if layers == 2 and not setup.strategy.stays_whole:
        whole -= layer
    return {"gathered weights": whole, "gathering": {0: root, 1: 2 * layer, 2: layer}[layers]}


def root_stays(setup: Setup) -> bool:
    """Whether embedding and head are whole from the forward pass to the end of the backward pass: as FSDP's root."""
    return setup.fsdp == 1 or not setup.head_apart or setup.shape.tied


def unreduced(setup: Setup, unit: Units) -> dict[str, float]:
    """Whole gradients: a layer's, and the head's, which waits for the rest of its unit. Those of adapters are small."""
    if not setup.strategy.parameters or setup.adapter is not None:
        return {}
    head = setup.shape.embedding if root_stays(setup) else 0
    return {"whole gradients": float(setup.compute_bytes * (head + unit.layer))}


def reducing(setup: Setup, unit: Units) -> dict[str, float]:
    """A unit's gradients in the reduce dtype, and this rank's share of the sum."""
    if not setup.strategy.parameters or setup.adapter is not None:
        return {}
    # In the first micro-batch the share is the gradient itself.
    share = 1 / setup.shards if setup.accumulation > 1 else 0
    return {"reduced unit": unit.layer * setup.reduce_bytes * (1 + share)}


def gradients_of_all_but_the_first(setup: Setup, unit: Units, gradients: float) -> float:
    """Near the end of the backward pass: those of the first layer and of the root come last."""
    if setup.accumulation > 1 or not setup.strategy.parameters or setup.offload or setup.adapter is not None:
        return gradients
    missing = unit.layer + (setup.shape.root if root_stays(setup) else setup.shape.embedding)
    return max(0.0, gradients * (1 - missing / setup.shape.parameters))


def root_reduced(setup: Setup) -> dict[str, float]:
    """When the gradients of FSDP's root are reduced, the last of all: FSDP1 has its weights, and its gradients twice,
    as autograd made them and laid out flat. Of models with a large vocabulary and small layers it can be the peak."""
    shape, compute = setup.shape, setup.compute_bytes
    if not setup.strategy.parameters or setup.adapter is not None:
        return {}
    if not root_stays(setup):
        return {
            "whole gradients": float(shape.embedding * compute),
            "reduced unit": shape.embedding * setup.reduce_bytes,
        }
    copies = 2 if setup.fsdp == 1 else 1
    cast = setup.reduce_bytes if setup.reduce_bytes != compute else 0
    pieces = {"gathered weights": float(shape.root * compute), "whole gradients": float(copies * shape.root * compute)}
    return pieces | {"reduced unit": float(shape.root * cast)}


def waiting(setup: Setup, unit: Units) -> tuple[float, float]:
    """Bytes that FSDP1 has given up and other streams still use: a gathered unit, and gradients on their way."""
    if not setup.strategy.parameters or setup.fsdp == 2:
        return 0.0, 0.0
    a_unit = float(unit.layer * setup.compute_bytes)
    if setup.adapter is not None:
        return setup.layer_bytes, 0.0
    return a_unit, fitted.FSDP1_WAITING_UNITS * (a_unit + unit.layer * setup.reduce_bytes)


def loading(setup: Setup, unit: Units) -> dict[str, float]:
    """FSDP1 flattens a unit that is whole; FSDP2 receives a tensor at a time."""
    if setup.strategy.name in ("DDP", "ZERO1"):
        return {}
    largest = max(unit.layer, unit.root)
    if setup.fsdp == 1:
        return {"loading": 2.0 * largest * setup.master_bytes}
    tensor = max(setup.shape.embedding, setup.shape.hidden * setup.shape.intermediate)
    return {"loading": (1 + 1 / setup.shards) * tensor * setup.master_bytes}


def exported(setup: Setup, unit: Units) -> dict[str, float]:
    if not setup.strategy.parameters or setup.adapter is not None:
        return {}
    return {"whole unit": float(max(unit.layer, unit.root) * setup.master_bytes)}
