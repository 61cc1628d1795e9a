"""Memory of one GPU, piece by piece, at every moment that can be the peak.

Model states are ZeRO's (Rajbhandari et al., arXiv 1910.02054, section 3). What is whole, and when, follows FSDP's own
code (torch/distributed/fsdp), as `recipe plan --dry-run` shows it. Three things are told apart: what is allocated; what
is active (FSDP1's buffers wait for other streams); and what is reserved, which is what has to fit. PyTorch's allocator
keeps a pool of its own for every stream, and FSDP gathers on one stream and reduces on another, so reserved memory is
the sum of three peaks that need not come at the same time.
"""

from dataclasses import dataclass, replace

from recipe.plan import activations, fitted, sharded
from recipe.plan.setup import LOSSES, Setup

LASTING = ("weights", "moments", "gradients", "buckets")
OF_TOKENS = ("activations", "layer at work")
POOLS = ("computing", "gathering", "reducing")
LOSS_CHUNK_TOKENS = 2048  # recipe.loss.CHUNK_TOKENS, without importing torch


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


def estimate(setup: Setup, step: int = 2) -> Memory:
    """Memory at every moment of a run.

    Args:
        step: 1: the optimizer has no moments before its step; 2: any later one.
    """
    rest = sharded.resting(setup)
    weights = {"weights": rest["weights"]} | ({"buckets": rest["gradients"]} if setup.strategy.buckets else {})
    states = weights | ({"moments": rest["moments"]} if step > 1 else {})
    gradients = {"gradients": rest["gradients"]}
    # A later micro-batch finds the gradients of those before it.
    between = states | (gradients if setup.accumulation > 1 or (setup.keeps_gradients and step > 1) else {})
    unit, loss = sharded.units(setup), {"loss": _loss(setup)}
    nearly = {"gradients": sharded.gradients_of_all_but_the_first(setup, unit, rest["gradients"])}
    kept = {"activations": activations.kept(setup)}
    with_norm = {"activations": activations.kept(setup) + activations.final_norm(setup)}
    one_layer = {"activations": setup.tokens * activations.kept_layer(setup)}
    working, again = ({"layer at work": size(setup)} for size in (activations.working, activations.recomputed))
    whole, ahead = sharded.gathered(setup, unit, layers=1), sharded.gathered(setup, unit, layers=2)
    # FSDP1 gives a layer up before it reduces its gradients; FSDP2 has the one before still on its way.
    fsdp1 = setup.fsdp == 1
    reduced_beside = whole if fsdp1 else ahead | {"layer at work": activations.norm_backward(setup)}
    unreduced, reducing = sharded.unreduced(setup, unit), sharded.reducing(setup, unit)
    stepped = 0.0 if setup.offload else setup.trained / setup.shards * setup.trained_bytes
    temporaries = {"optimizer's temporaries": setup.optimizer.temporaries * stepped}
    gather, reduce = sharded.waiting(setup, unit)
    moments = [
        ("load", weights | sharded.loading(setup, unit), 0.0),
        ("forward", between | whole | kept | working, gather),
        ("loss", between | sharded.gathered(setup, unit, layers=0) | with_norm | loss, 0.0),
        ("backward, last layer", between | ahead | unreduced | kept | again, gather),
        ("last layer's reduced", between | reduced_beside | unreduced | reducing | kept, 0.0),
        ("backward, second layer", states | nearly | ahead | unreduced | one_layer | again, reduce),
        ("second layer's reduced", states | nearly | reduced_beside | unreduced | reducing | one_layer, reduce),
        ("root's reduced", states | gradients | sharded.root_reduced(setup), reduce),
        ("optimizer step", weights | {"moments": rest["moments"]} | gradients | temporaries, reduce),
        *([("evaluation", states | whole | _evaluating(setup), 0.0)] if setup.eval_batch else []),
        ("save", states | (gradients if fsdp1 else {}), 0.0),  # FSDP1 frees them at the next forward pass
        ("export", states | sharded.exported(setup, unit), 0.0),
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


def _evaluating(setup: Setup) -> dict[str, float]:
    """A forward pass without a backward pass keeps nothing but the layer at work, and then a chunk of logits."""
    batch = replace(setup, micro_batch=setup.eval_batch)
    working, chunk = activations.working(batch), 8.0 * min(batch.tokens, LOSS_CHUNK_TOKENS) * setup.shape.vocab
    return {"layer at work": working} if working > chunk else {"loss": chunk}


def _loss(setup: Setup) -> float:
    """Logits and their gradients, and where `recipe.loss` makes it with the loss, that of the head."""
    shape, compute = setup.shape, setup.compute_bytes
    if setup.loss != "fused":
        return LOSSES[setup.loss] * setup.tokens * shape.vocab
    chunk = min(setup.tokens, LOSS_CHUNK_TOKENS)
    # Logits in fp32 and the temporary of their logsumexp; the head's gradient; hidden states and theirs.
    head = shape.embedding if setup.adapter is None else 0
    return 8.0 * chunk * shape.vocab + compute * (head + 2 * setup.tokens * shape.hidden)
