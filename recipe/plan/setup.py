"""What is planned: a model, on GPUs, spread in a way, trained in a way. All that memory and time follow from."""

from dataclasses import dataclass

from recipe.errors import UserError
from recipe.plan.adapters import Adapter
from recipe.plan.hardware import Gpu, Network
from recipe.plan.shape import Shape


@dataclass(frozen=True)
class Strategy:
    """Which parts of the model states a rank holds a share of, and whether whole weights stay from the forward to the
    backward pass.

    FSDP's names. NO_SHARD is data parallelism; DDP is torch's own, which copies gradients into buckets. SHARD_GRAD_OP
    is ZeRO-2, FULL_SHARD is ZeRO-3 (Rajbhandari et al., arXiv 1910.02054); HYBRID_SHARD is ZeRO-3 in a node and data
    parallelism between nodes. ZERO1 is for comparison: FSDP has none.
    """

    name: str
    parameters: bool
    gradients: bool
    moments: bool
    stays_whole: bool
    within_node: bool = False
    buckets: bool = False


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("DDP", False, False, False, stays_whole=True, buckets=True),
        Strategy("NO_SHARD", False, False, False, stays_whole=True),
        Strategy("ZERO1", False, False, True, stays_whole=True),
        Strategy("SHARD_GRAD_OP", True, True, True, stays_whole=True),
        Strategy("FULL_SHARD", True, True, True, stays_whole=False),
        Strategy("HYBRID_SHARD", True, True, True, stays_whole=False, within_node=True),
    )
}


@dataclass(frozen=True)
class Optimizer:
    """Bytes of the two moments of a parameter (None: as the master weight), of what a step holds beside them, and of
    the memory traffic of a step beyond reading and writing each of weight, gradient and moments once.

    `paged`: the moments give way to host memory when the GPU is full.
    """

    moments: float | None
    temporaries: float = 0.0
    passes: float = 1.0
    paged: bool = False


# Temporaries are multiples of the master weight: torch's foreach AdamW makes the square roots of all second moments at
# once (torch/optim/adamw.py, `_multi_tensor_adamw`); fused and bitsandbytes' kernels make nothing. Blockwise 8-bit
# moments carry an fp32 scale for 256 values each (arXiv 2110.02861).
OPTIMIZERS = {
    "adamw_torch_fused": Optimizer(None),
    "adamw_torch": Optimizer(None, temporaries=1.0, passes=3.0),
    "paged_adamw_32bit": Optimizer(8.0, paged=True),
    "adamw_8bit": Optimizer(2 * (1 + 4 / 256)),
}

# How the activations of a layer are kept: "full" keeps a layer's input and recomputes the rest, "none" keeps all,
# "attention" recomputes the attention core alone (Korthikanti's selective, arXiv 2205.05198), "op" keeps every other
# matrix product and the attention's output (torchtitan's selective), "alternate" checkpoints every other layer.
CHECKPOINTING = ("full", "none", "attention", "op", "alternate")

# Bytes of a logit that are alive at once in the loss, of which an fp32 loss makes several copies. Seen by counting live
# storages of a head and `cross_entropy` in bf16: "kept" is a caller that keeps fp32 logits (transformers' outputs),
# "freed" one that does not, "chunked" eight chunks of fp32. "fused" is `recipe.loss`, which has one chunk of tokens.
# "kernel" is flash-attn's cross-entropy, which turns 16-bit logits into their gradient in place.
LOSSES = {"kept": 16.0, "freed": 12.0, "chunked": 6.6, "kernel": 4.0}


@dataclass(frozen=True)
class Setup:
    """One plan's input.

    Args:
        fsdp: 1 or 2; of no effect without sharding.
        master_bytes: of a weight, its gradient at rest, and (torch's AdamW) each of its moments.
        compute_bytes: of weights and activations in forward and backward.
        reduce_bytes: of a gradient on the wire.
        seq_len: tokens of a sample, or of a packed block.
        micro_batch: samples of a rank in one forward pass.
        accumulation: micro-batches of an optimizer step.
        flash: attention that never makes the matrix of scores.
        loss: a key of LOSSES, or "fused".
        offload: parameters, gradients and moments rest in host memory, and the optimizer steps there.
        wrap_parameters: units of about so many parameters (FSDP1's size-based wrap); 0: a unit a layer.
        reduce_each_micro_batch: False keeps whole gradients until the last micro-batch, as `no_sync` does.
        adapter: what is trained where all else is frozen; None: all of the model.
        eval_batch: samples of a rank in one batch of an evaluation; 0: there is none.
        head_apart: FSDP2 gathers embedding and head apart (Accelerate); else in one unit (torchtitan).
        autocast: 16 bits by casting each weight as it is used; gathered weights and the residual stream are in fp32.
        keeps_gradients: they stay between steps, as zeros (PyTorch before 2.0).
        triton: the first Triton flash attention (2022, MPT's), which is slower than FlashAttention-2.
        expandable: PyTorch's allocator has expandable segments, as launch/ sets it.
    """

    shape: Shape
    gpu: Gpu
    network: Network
    num_nodes: int
    gpus_per_node: int
    strategy: Strategy = STRATEGIES["FULL_SHARD"]
    fsdp: int = 1
    master_bytes: int = 4
    compute_bytes: int = 2
    reduce_bytes: int = 4
    optimizer: Optimizer = OPTIMIZERS["adamw_torch_fused"]
    seq_len: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: str = "full"
    flash: bool = True
    loss: str = "fused"
    offload: bool = False
    wrap_parameters: int = 0
    reduce_each_micro_batch: bool = True
    adapter: Adapter | None = None
    eval_batch: int = 0
    head_apart: bool = True
    autocast: bool = False
    keeps_gradients: bool = False
    triton: bool = False
    expandable: bool = True

    def __post_init__(self) -> None:
        counts = ("num_nodes", "gpus_per_node", "seq_len", "micro_batch", "accumulation")
        problems = [f"{key} is {getattr(self, key)}; give 1 or more" for key in counts if getattr(self, key) < 1]
        if self.checkpointing not in CHECKPOINTING:
            problems.append(f"checkpointing is '{self.checkpointing}'; give one of {', '.join(CHECKPOINTING)}")
        if problems:
            raise UserError(*problems)

    @property
    def trains(self) -> bool:
        """Whether FSDP does what is asked for. Offloading needs shards; and FSDP1, whose gradients are reduced in every
        micro-batch, would put each in the place of those before it (its documentation, under `cpu_offload`)."""
        return not self.offload or (self.strategy.parameters and (self.fsdp == 2 or self.accumulation == 1))

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def shards(self) -> int:
        """Ranks among which a parameter is split."""
        if not self.strategy.parameters:
            return 1
        return self.gpus_per_node if self.strategy.within_node else self.world_size

    @property
    def moment_shares(self) -> int:
        """Ranks among which the optimizer's moments of a parameter are split."""
        return self.world_size if self.strategy.moments and not self.strategy.parameters else self.shards

    @property
    def moment_bytes(self) -> float:
        """Of the two moments of a parameter."""
        return 2.0 * self.trained_bytes if self.optimizer.moments is None else self.optimizer.moments

    @property
    def trained(self) -> int:
        """Parameters that have gradients and moments."""
        return self.shape.parameters if self.adapter is None else self.adapter.parameters(self.shape)

    @property
    def trained_bytes(self) -> int:
        """Of a trained weight, and of its gradient at rest."""
        return self.master_bytes if self.adapter is None else self.adapter.weight_bytes

    @property
    def layer_bytes(self) -> float:
        """Of a layer's weights as they are gathered."""
        if self.adapter is None:
            return float(self.shape.layer * self.compute_bytes)
        trained = self.adapter.layer(self.shape) * self.compute_bytes
        return self.adapter.frozen_layer(self.shape, self.compute_bytes) + trained

    @property
    def tokens(self) -> int:
        """Of a rank's micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.tokens * self.accumulation * self.world_size
