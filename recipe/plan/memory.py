"""Memory of one GPU, piece by piece, at every moment that can be the peak.

Model states are ZeRO's (Rajbhandari et al., arXiv 1910.02054, section 3). What is whole, and when, follows FSDP's own
code (torch/distributed/fsdp), as `recipe plan --dry-run` shows it. Three things are told apart: what is allocated; what
is active (FSDP1's buffers wait for other streams); and what is reserved, which is what has to fit. PyTorch's allocator
keeps a pool of its own for every stream, and FSDP gathers on one stream and reduces on another, so reserved memory is
the sum of three peaks that need not come at the same time.
"""

from dataclasses import dataclass, replace

from recipe.plan import activations, fitted
from recipe.plan.setup import LOSSES, OPTIMIZERS, Setup

LASTING = ("weights", "moments", "gradients", "buckets")
OF_TOKENS = ("activations", "layer at work")
POOLS = ("computing", "gathering", "reducing")
LOSS_CHUNK_TOKENS = 2048  # recipe.loss.CHUNK_TOKENS, without importing torch


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
class Moment:
    """What is alive on a GPU at one moment, in bytes, by piece.

    Args:
        waiting: freed by Python and not yet by the GPU (FSDP1): active, not allocated.
        pools: pieces that lie in the pools of other streams than the computing one.
    """

    name: str
    pieces: dict[str, float]
    waiting: float
    pools: dict[str, str]

    @property
    def allocated(self) -> float:
        return sum(self.pieces.values())

    def in_pool(self, pool: str) -> float:
        inside = sum(size for piece, size in self.pieces.items() if self.pools.get(piece, "computing") == pool)
        return inside + (self.waiting if pool == "reducing" else 0)


@dataclass(frozen=True)
class Memory:
    """All moments, and what they come to.

    Args:
        fragmentation: reserved in vain, as a share of what comes and goes.
        rounding: the same, of what the tokens take: it is many tensors, each of which is rounded up.
    """

    moments: list[Moment]
    fragmentation: float
    rounding: float

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.allocated)

    @property
    def allocated(self) -> float:
        return self.peak.allocated

    @property
    def until_saved(self) -> float:
        """Most that is allocated in the first steps of a run, before anything is evaluated, saved or exported."""
        later = ("evaluation", "save", "export")
        return max(moment.allocated for moment in self.moments if moment.name not in later)

    @property
    def active(self) -> float:
        return max(moment.allocated + moment.waiting for moment in self.moments)

    @property
    def pools(self) -> dict[str, float]:
        """Peaks of the three pools of PyTorch's allocator."""
        return {pool: max(moment.in_pool(pool) for moment in self.moments) for pool in POOLS}

    @property
    def fragments(self) -> float:
        """Reserved and not usable: what comes and goes leaves holes, what stays does not."""
        passing = max(sum(m.pieces.values()) - sum(m.pieces.get(piece, 0.0) for piece in LASTING) for m in self.moments)
        of_tokens = max(sum(m.pieces.get(piece, 0.0) for piece in OF_TOKENS) for m in self.moments)
        return self.fragmentation * passing + self.rounding * of_tokens

    @property
    def reserved(self) -> float:
        return sum(self.pools.values()) + self.fragments

    @property
    def required(self) -> float:
        """Less than is reserved: where a card is full, the allocator waits for the GPU and gives back what its pools
        hold in vain, which takes time (`CUDA malloc retries`)."""
        return self.allocated + self.fragments


def outside(setup: Setup) -> float:
    """Bytes that PyTorch's allocator does not see: the CUDA context and NCCL's buffers."""
    return fitted.CONTEXT_BYTES + (fitted.NCCL_BYTES if setup.world_size > 1 else 0)


def needed(setup: Setup) -> float:
    """Bytes of the card without which a run ends."""
    return estimate(setup).required + outside(setup)


def wanted(setup: Setup) -> float:
    """Bytes of the card with which a run never waits for memory."""
    return estimate(setup).reserved + outside(setup)


@dataclass(frozen=True)
class Units:
    """Parameters that FSDP makes whole and reduces at a time."""

    layer: int
    root: int


def units(setup: Setup) -> Units:
    shape = setup.shape
    if setup.wrap_parameters:  # a linear layer each, and the embedding
        return Units(layer=min(shape.hidden * shape.intermediate, shape.layer), root=shape.embedding)
    if not _root_stays(setup):
        return Units(layer=shape.layer, root=shape.head + shape.hidden)
    return Units(layer=shape.layer, root=shape.root)


def estimate(setup: Setup, step: int = 2) -> Memory:
    """Memory at every moment of a run.

    Args:
        step: 1: the optimizer has no moments before its step; 2: any later one.
    """
    rest = resting(setup)
    weights = {"weights": rest["weights"]} | ({"buckets": rest["gradients"]} if setup.strategy.buckets else {})
    states = weights | ({"moments": rest["moments"]} if step > 1 else {})
    gradients = {"gradients": rest["gradients"]}
    # A later micro-batch finds the gradients of those before it.
    between = states | (gradients if setup.accumulation > 1 or (setup.keeps_gradients and step > 1) else {})
    unit, loss = units(setup), {"loss": _loss(setup)}
    nearly = {"gradients": _gradients_of_all_but_the_first(setup, unit, rest["gradients"])}
    kept = {"activations": activations.kept(setup)}
    with_norm = {"activations": activations.kept(setup) + activations.final_norm(setup)}
    one_layer = {"activations": setup.tokens * activations.kept_layer(setup)}
    working, again = ({"layer at work": size(setup)} for size in (activations.working, activations.recomputed))
    whole, ahead = _gathered(setup, unit, layers=1), _gathered(setup, unit, layers=2)
    # FSDP1 gives a layer up before it reduces its gradients; FSDP2 has the one before still on its way.
    fsdp1 = setup.fsdp == 1
    reduced_beside = whole if fsdp1 else ahead | {"layer at work": activations.norm_backward(setup)}
    unreduced, reducing = _unreduced(setup, unit), _reducing(setup, unit)
    stepped = 0.0 if setup.offload else setup.shape.parameters / setup.shards * setup.master_bytes
    temporaries = {"optimizer's temporaries": setup.optimizer.temporaries * stepped}
    gather, reduce = _waiting(setup, unit)
    moments = [
        ("load", weights | _loading(setup, unit), 0.0),
        ("forward", between | whole | kept | working, gather),
        ("loss", between | _gathered(setup, unit, layers=0) | with_norm | loss, 0.0),
        ("backward, last layer", between | ahead | unreduced | kept | again, gather),
        ("last layer's reduced", between | reduced_beside | unreduced | reducing | kept, 0.0),
        ("backward, second layer", states | nearly | ahead | unreduced | one_layer | again, reduce),
        ("second layer's reduced", states | nearly | reduced_beside | unreduced | reducing | one_layer, reduce),
        ("root's reduced", states | gradients | _root_reduced(setup), reduce),
        ("optimizer step", weights | {"moments": rest["moments"]} | gradients | temporaries, reduce),
        *([("evaluation", states | whole | _evaluating(setup), 0.0)] if setup.eval_batch else []),
        ("save", states | (gradients if fsdp1 else {}), 0.0),  # FSDP1 frees them at the next forward pass
        ("export", states | _exported(setup, unit), 0.0),
    ]
    pools: dict[str, str] = {}
    if setup.strategy.parameters:
        pools = {"gradients": "reducing", "reduced unit": "reducing" if fsdp1 else "computing"}
        pools |= {"gathered weights": "gathering" if fsdp1 else "computing", "gathering": "gathering"}
    return Memory(
        [Moment(name, pieces, waits, pools) for name, pieces, waits in moments], _fragmentation(setup), _rounding(setup)
    )


def _fragmentation(setup: Setup) -> float:
    kept = setup.checkpointing == "none" or setup.expandable
    return fitted.FRAGMENTATION if kept else fitted.FRAGMENTATION_RECOMPUTED


def _rounding(setup: Setup) -> float:
    tensor = setup.tokens * setup.shape.hidden * setup.compute_bytes
    return fitted.ROUNDING_BYTES / max(tensor, fitted.ROUNDING_BYTES * 10)


def resting(setup: Setup) -> dict[str, float]:
    """Bytes of a GPU's weights, gradients and moments between passes. What is offloaded or paged is not there."""
    parameters, strategy, shards = setup.shape.parameters, setup.strategy, setup.shards
    gradients = parameters * setup.master_bytes / (shards if strategy.gradients else 1)
    if strategy.gradients and setup.accumulation > 1 and not setup.reduce_each_micro_batch:
        gradients = float(parameters * setup.compute_bytes)
    moments = parameters * setup.moment_bytes / setup.moment_shares
    if setup.optimizer == OPTIMIZERS["adamw_8bit"]:  # bitsandbytes keeps those of embeddings in fp32
        embedding = setup.shape.embedding / setup.moment_shares
        if setup.fsdp == 1 and strategy.parameters:  # rank 0's share of the root begins with it
            embedding = min(setup.shape.embedding, units(setup).root / shards)
        moments += (8 - setup.moment_bytes) * embedding
    return {
        "weights": 0.0 if setup.offload else parameters * setup.master_bytes / shards,
        "gradients": 0.0 if setup.offload else gradients,
        "moments": 0.0 if setup.offload or setup.optimizer.paged else moments,
    }


def _gathered(setup: Setup, unit: Units, layers: int) -> dict[str, float]:
    """Weights in the compute dtype, beside the resting ones: the root's, which stay, and `layers` units: the one at
    work, and in the backward pass the one that is fetched ahead."""
    compute, parameters = setup.compute_bytes, setup.shape.parameters
    if not setup.strategy.parameters:
        # Autocast keeps what it has cast; FSDP1 casts a unit at a time.
        cast = parameters if setup.strategy.name != "NO_SHARD" else unit.root + layers * unit.layer
        return {"cast weights": float(cast * compute)} if compute != setup.master_bytes else {}
    if setup.strategy.stays_whole:
        gathered = parameters
    else:
        gathered = (unit.root if layers == 0 or _root_stays(setup) else 0) + layers * unit.layer
    if setup.fsdp == 1 and setup.autocast:  # which keeps what it has cast of weights that are gathered in fp32
        return {"gathered weights": float(4 * gathered), "cast weights": float(compute * parameters)}
    if setup.fsdp == 1:
        return {"gathered weights": float(compute * gathered)}
    # Parameters are copied out of flat buffers: one fetched ahead is still in its own, and the last one's stays until
    # the next is copied.
    if layers == 2 and not setup.strategy.stays_whole:
        gathered -= unit.layer
    buffers = {0: unit.root, 1: 2 * unit.layer, 2: unit.layer}[layers]
    return {"gathered weights": float(compute * gathered), "gathering": float(compute * buffers)}


def _root_stays(setup: Setup) -> bool:
    """Whether embedding and head are whole from the forward pass to the end of the backward pass: as FSDP's root."""
    return setup.fsdp == 1 or not setup.head_apart or setup.shape.tied


def _unreduced(setup: Setup, unit: Units) -> dict[str, float]:
    """Whole gradients: a layer's, and the head's, which waits for the rest of its unit."""
    if not setup.strategy.parameters:
        return {}
    head = setup.shape.embedding if _root_stays(setup) else 0
    return {"whole gradients": float(setup.compute_bytes * (head + unit.layer))}


def _reducing(setup: Setup, unit: Units) -> dict[str, float]:
    """A unit's gradients in the reduce dtype, and this rank's share of the sum."""
    if not setup.strategy.parameters:
        return {}
    # In the first micro-batch the share is the gradient itself.
    share = 1 / setup.shards if setup.accumulation > 1 else 0
    return {"reduced unit": unit.layer * setup.reduce_bytes * (1 + share)}


def _gradients_of_all_but_the_first(setup: Setup, unit: Units, gradients: float) -> float:
    """Near the end of the backward pass: those of the first layer and of the root come last."""
    if setup.accumulation > 1 or not setup.strategy.parameters or setup.offload:
        return gradients
    missing = unit.layer + (setup.shape.root if _root_stays(setup) else setup.shape.embedding)
    return max(0.0, gradients * (1 - missing / setup.shape.parameters))


def _root_reduced(setup: Setup) -> dict[str, float]:
    """When the gradients of FSDP's root are reduced, the last of all: FSDP1 has its weights, and its gradients twice,
    as autograd made them and laid out flat. Of models with a large vocabulary and small layers it can be the peak."""
    shape, compute = setup.shape, setup.compute_bytes
    if not setup.strategy.parameters:
        return {}
    if not _root_stays(setup):
        return {
            "whole gradients": float(shape.embedding * compute),
            "reduced unit": shape.embedding * setup.reduce_bytes,
        }
    copies = 2 if setup.fsdp == 1 else 1
    cast = setup.reduce_bytes if setup.reduce_bytes != compute else 0
    pieces = {"gathered weights": float(shape.root * compute), "whole gradients": float(copies * shape.root * compute)}
    return pieces | {"reduced unit": float(shape.root * cast)}


def _waiting(setup: Setup, unit: Units) -> tuple[float, float]:
    """Bytes that FSDP1 has given up and other streams still use: a gathered unit, and gradients on their way."""
    if not setup.strategy.parameters or setup.fsdp == 2:
        return 0.0, 0.0
    a_unit = float(unit.layer * setup.compute_bytes)
    return a_unit, fitted.FSDP1_WAITING_UNITS * (a_unit + unit.layer * setup.reduce_bytes)


def _loading(setup: Setup, unit: Units) -> dict[str, float]:
    """FSDP1 flattens a unit that is whole; FSDP2 receives a tensor at a time."""
    if setup.strategy.name in ("DDP", "ZERO1"):
        return {}
    largest = max(unit.layer, unit.root)
    if setup.fsdp == 1:
        return {"loading": 2.0 * largest * setup.master_bytes}
    tensor = max(setup.shape.embedding, setup.shape.hidden * setup.shape.intermediate)
    return {"loading": (1 + 1 / setup.shards) * tensor * setup.master_bytes}


def _evaluating(setup: Setup) -> dict[str, float]:
    """A forward pass without a backward pass keeps nothing but the layer at work, and then a chunk of logits."""
    batch = replace(setup, micro_batch=setup.eval_batch)
    working, chunk = activations.working(batch), 8.0 * min(batch.tokens, LOSS_CHUNK_TOKENS) * setup.shape.vocab
    return {"layer at work": working} if working > chunk else {"loss": chunk}


def _exported(setup: Setup, unit: Units) -> dict[str, float]:
    if not setup.strategy.parameters:
        return {}
    return {"whole unit": float(max(unit.layer, unit.root) * setup.master_bytes)}


def _loss(setup: Setup) -> float:
    """Logits and their gradients, and where `recipe.loss` makes it with the loss, that of the head."""
    shape, compute = setup.shape, setup.compute_bytes
    if setup.loss != "fused":
        return LOSSES[setup.loss] * setup.tokens * shape.vocab
    chunk = min(setup.tokens, LOSS_CHUNK_TOKENS)
    # Logits in fp32 and the temporary of their logsumexp; the head's gradient; hidden states and theirs.
    return 8.0 * chunk * shape.vocab + compute * (shape.embedding + 2 * setup.tokens * shape.hidden)
