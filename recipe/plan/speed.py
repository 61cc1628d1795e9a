"""Time of a step by a roofline: matrix products at a share of the GPU's peak, the rest at a share of its memory
bandwidth, and collectives at a share of the slower of link and network, hidden behind compute where FSDP hides them.

Model floating point operations and MFU are PaLM's (arXiv 2204.02311, appendix B); that collectives cost (n - 1) / n of
their bytes on the slowest link is NCCL's ring (nccl-tests, doc/PERFORMANCE.md).
"""

from dataclasses import dataclass

from recipe.plan import activations, fitted, memory
from recipe.plan.adapters import linears
from recipe.plan.setup import Setup
from recipe.plan.sharded import units


@dataclass(frozen=True)
class Speed:
    """A step's time in seconds, and what it is made of.

    Args:
        compute, communication, optimizer: seconds of a step if each ran alone.
        waited: seconds in which compute waits for communication. Beside it, communication slows compute down.
        launch_bound: the host does not launch kernels fast enough.
        mfu: model FLOPs utilization, of the 16-bit peak. Frozen weights have no gradients: 4 N of their 6 N count.
        wire: bytes of a step that one GPU receives within its node, and that one node receives from others.
    """

    step: float
    compute: float
    communication: float
    waited: float
    optimizer: float
    launch_bound: bool
    tokens_per_second_per_gpu: float
    mfu: float
    model_tflops: float
    wire: dict[str, float]

    @property
    def hidden(self) -> float:
        """Share of communication that compute does not wait for."""
        return 1 - self.waited / self.communication if self.communication else 1.0


@dataclass(frozen=True)
class Pass:
    """Seconds of compute of one layer, and of what comes once (head and loss)."""

    layer: float
    head: float


@dataclass(frozen=True)
class Traffic:
    """Seconds of communication for one layer: in the forward pass, in the backward pass, where the weights are gathered
    again before and gradients reduced after; and for what lies outside of layers."""

    forward: float
    again: float
    reduced: float
    root: float


def estimate(setup: Setup) -> Speed:
    forward, backward, recomputed = _forward(setup), _backward(setup), _recomputed(setup)
    traffic, layers = _traffic(setup), setup.shape.layers
    layer, once = forward.layer + backward.layer + recomputed, forward.head + backward.head
    ahead = _beside(forward.layer, traffic.forward)
    back = _beside(backward.layer + recomputed, traffic.again + traffic.reduced)
    # Nothing runs beside the first gather and the last reduction.
    edges = traffic.root + traffic.forward + traffic.reduced
    computed = (layers - 1) * (ahead.computing + back.computing) + layer + once
    launched = layers * fitted.KERNELS * fitted.LAUNCH * (4 if recomputed else 3)
    waited = (layers - 1) * (ahead.waiting + back.waiting) + edges
    step = setup.accumulation * (max(computed, launched) + waited) + (optimizer := _optimizer(setup))
    rate = setup.tokens * setup.accumulation / step
    frozen = 0 if setup.adapter is None else 2 * setup.shape.multiplying
    flops = rate * (setup.shape.model_flops(setup.seq_len) - frozen)
    return Speed(
        step=step,
        compute=setup.accumulation * (layers * layer + once),
        communication=setup.accumulation
        * (layers * (traffic.forward + traffic.again + traffic.reduced) + traffic.root),
        waited=setup.accumulation * waited,
        optimizer=optimizer,
        launch_bound=launched > computed,
        tokens_per_second_per_gpu=rate,
        mfu=flops / (setup.gpu.tflops * 1e12),
        model_tflops=flops / 1e12,
        wire=wire(setup),
    )


def _traffic(setup: Setup) -> Traffic:
    shape, unit, strategy = setup.shape, units(setup), setup.strategy
    if setup.adapter is not None:
        return _traffic_of_adapters(setup)
    copies = _averaged(setup, shape.layer), _averaged(setup, shape.root)
    if not strategy.parameters:
        return Traffic(0.0, 0.0, *copies)
    units_a_layer = shape.layer / unit.layer
    gather, reduce = _gather(setup, unit.layer) * units_a_layer, _reduce(setup, unit.layer) * units_a_layer
    root = _gather(setup, shape.root) + _reduce(setup, shape.root)
    return Traffic(gather, 0.0 if strategy.stays_whole else gather, reduce + copies[0], root + copies[1])


def _traffic_of_adapters(setup: Setup) -> Traffic:
    """The frozen weights are gathered as they are stored. Gradients are small: each adapter, which PEFT's policy makes
    a unit of its own under FSDP1, costs the latency of a collective."""
    adapter, strategy = setup.adapter, setup.strategy
    assert adapter is not None
    reduced = _averaged(setup, adapter.layer(setup.shape))
    if not strategy.parameters:
        return Traffic(0.0, 0.0, reduced, 0.0)
    collectives = 0.0 if setup.shards == 1 else fitted.LATENCY * (2 * linears(setup.shape) if setup.fsdp == 1 else 1)
    frozen = adapter.frozen_layer(setup.shape, setup.compute_bytes)
    gather = collective(setup, frozen) + collectives + _carried(setup, frozen / setup.master_bytes)
    root = _gather(setup, setup.shape.root)
    return Traffic(gather, 0.0 if strategy.stays_whole else gather, reduced + collectives, root)


@dataclass(frozen=True)
class _Beside:
    """Seconds of compute with communication beside it, which slows it down; and of waiting for the rest of it."""

    computing: float
    waiting: float


def _beside(compute: float, communication: float) -> _Beside:
    slowed = compute + fitted.CONTENTION * min(compute, communication)
    return _Beside(slowed, max(0.0, communication - slowed))


def hardware_tflops(setup: Setup, speed: Speed) -> float:
    """TFLOP/s of a GPU with recomputation counted, as Megatron's papers count (arXiv 2104.04473, equation 3): a third
    more, or a half where frozen weights have no gradients."""
    again = {"full": 1.0, "alternate": 0.5}.get(setup.checkpointing, 0.0)
    passes = 3 if setup.adapter is None else 2
    return speed.model_tflops * (passes + again) / passes


def _peak(setup: Setup) -> float:
    gpu = setup.gpu
    return 1e12 * (gpu.fp32_tflops if setup.compute_bytes == 4 else gpu.tflops)


def _matmul(setup: Setup, flops: float) -> float:
    return flops / (_peak(setup) * fitted.MATMUL[setup.gpu.generation])


def _attention(setup: Setup) -> float:
    """Seconds of the forward attention core of one layer: two products of half the scores (the mask is causal)."""
    flops = setup.tokens * 4 * setup.shape.q_width * setup.seq_len / 2
    if not setup.flash:
        scores = setup.tokens * activations.scores(setup.shape, setup.compute_bytes, setup.seq_len)
        return _matmul(setup, 2 * flops) + _moved(setup, 4 * scores)
    share = fitted.ATTENTION[setup.gpu.generation] * (fitted.TRITON if setup.triton else 1.0)
    return flops / (_peak(setup) * share)


def _moved(setup: Setup, size: float) -> float:
    return size / (setup.gpu.memory_gbs * 1e9 * fitted.BANDWIDTH)


def _pointwise(setup: Setup) -> float:
    whole = activations.whole_layer(setup.shape, setup.compute_bytes, True, setup.seq_len)
    return _moved(setup, setup.tokens * fitted.TRAFFIC * whole)


def _forward(setup: Setup) -> Pass:
    shape, tokens = setup.shape, setup.tokens
    layer = _matmul(setup, 2 * tokens * shape.layer_matmul) + _attention(setup) + _pointwise(setup)
    layer += _of_adapters(setup)
    head = _matmul(setup, 2 * tokens * shape.embedding) + _moved(setup, fitted.LOSS_TRAFFIC / 2 * tokens * shape.vocab)
    return Pass(layer, head)


def _backward(setup: Setup) -> Pass:
    """Twice the products, or once where the weights are frozen; attention's backward has five products for the two of
    the forward pass (FlashAttention-2, arXiv 2307.08691, section 3)."""
    shape, tokens = setup.shape, setup.tokens
    times = 2 if setup.adapter is None else 1
    layer = times * _matmul(setup, 2 * tokens * shape.layer_matmul) + 2.5 * _attention(setup) + 2 * _pointwise(setup)
    layer += 2 * _of_adapters(setup)
    head = times * _matmul(setup, 2 * tokens * shape.embedding)
    return Pass(layer, head + _moved(setup, fitted.LOSS_TRAFFIC / 2 * tokens * shape.vocab))


def _of_adapters(setup: Setup) -> float:
    """Seconds of one layer's adapters in a forward pass, and of making its 4-bit weights whole."""
    adapter, shape = setup.adapter, setup.shape
    if adapter is None:
        return 0.0
    products = _matmul(setup, 2 * setup.tokens * adapter.layer(shape))
    copies = _moved(setup, 2 * setup.tokens * adapter.kept(shape, setup.compute_bytes))
    whole = _moved(setup, (0.5 + 2 * setup.compute_bytes) * shape.layer_matmul) if adapter.four_bit else 0.0
    return products + copies + whole


def _recomputed(setup: Setup) -> float:
    """Seconds of a layer's forward pass that the backward pass repeats."""
    shape, tokens = setup.shape, setup.tokens
    if setup.checkpointing == "none":
        return 0.0
    if setup.checkpointing == "attention":
        return 0.0 if setup.flash else _attention(setup)
    if setup.checkpointing == "op":
        products = shape.hidden * (shape.kv_width + shape.q_width + shape.intermediate)
        return _matmul(setup, 2 * tokens * products) + _pointwise(setup)
    return _forward(setup).layer * (0.5 if setup.checkpointing == "alternate" else 1.0)


def _gather(setup: Setup, parameters: float) -> float:
    """Seconds until a unit is whole; this rank's share comes from host memory where it is offloaded."""
    return collective(setup, parameters * setup.compute_bytes) + _carried(setup, parameters)


def _reduce(setup: Setup, parameters: float) -> float:
    return collective(setup, parameters * setup.reduce_bytes) + _carried(setup, parameters)


def _carried(setup: Setup, parameters: float) -> float:
    if not setup.offload:
        return 0.0
    return parameters * setup.master_bytes / setup.shards / fitted.PCIE_BANDWIDTH


def collective(setup: Setup, size: float) -> float:
    """Seconds to gather, or to reduce and scatter, `size` bytes over the ranks that share them, in rings: (n - 1) / n
    of the bytes go over every link, and through every node's network."""
    shards, moved = setup.shards, size * (setup.shards - 1) / setup.shards
    nodes = 1 if setup.strategy.within_node else setup.num_nodes
    if shards == 1:
        return 0.0
    if nodes == 1:
        return moved / _link(setup) + fitted.LATENCY
    slowest = min(_link(setup), setup.network.bytes_per_second * fitted.NETWORK)
    return moved / slowest + fitted.LATENCY + nodes * fitted.LATENCY_PER_NODE


def _link(setup: Setup) -> float:
    gpu = setup.gpu
    return gpu.link_gbs * 1e9 * (fitted.NVLINK if gpu.nvlink else fitted.PCIE)


def _averaged(setup: Setup, parameters: int) -> float:
    """Seconds in which gradients are averaged over the ranks that hold the same share of them: NCCL's trees move twice
    the bytes, and the ranks of a node share its network."""
    copies = setup.world_size // setup.shards
    if copies == 1:
        return 0.0
    size = 2 * parameters * setup.reduce_bytes / setup.shards * (copies - 1) / copies
    if setup.num_nodes == 1:
        return size / _link(setup) + fitted.LATENCY
    size *= setup.shards if setup.strategy.within_node else 1
    return size / (setup.network.bytes_per_second * fitted.NETWORK) + fitted.LATENCY


def wire(setup: Setup) -> dict[str, float]:
    """Bytes of a step that one node receives from other nodes, and that one GPU receives inside of its node."""
    shape, strategy, shards = setup.shape, setup.strategy, setup.shards
    nodes = 1 if strategy.within_node else setup.num_nodes
    moved = 0.0
    if strategy.parameters and shards > 1:
        whole = shape.layers * setup.layer_bytes + shape.root * setup.compute_bytes
        moved = whole * (1 if strategy.stays_whole else 2) + setup.trained * setup.reduce_bytes
    copies = setup.world_size // shards
    averaged = 2 * setup.trained * setup.reduce_bytes / shards * (copies - 1) / copies
    inside = moved * (shards - 1) / shards + (averaged if setup.num_nodes == 1 else 0)
    between = moved * (shards - 1) / shards if nodes > 1 else 0.0
    if setup.num_nodes > 1:
        between += averaged * (shards if strategy.within_node else 1)
    return {"within a node": setup.accumulation * inside, "between nodes": setup.accumulation * between}


def _optimizer(setup: Setup) -> float:
    """Clipping reads the gradients twice; the step reads weight, gradient and moments, and writes all but the
    gradient."""
    stepped = setup.trained / setup.moment_shares
    size = 2 * setup.trained_bytes + setup.optimizer.passes * (3 * setup.trained_bytes + 2 * setup.moment_bytes)
    if setup.offload:
        return stepped * size / fitted.HOST_BANDWIDTH
    paged = paged_out(setup) * 2 / fitted.PCIE_BANDWIDTH if setup.optimizer.paged else 0.0
    return _moved(setup, stepped * size) + paged


def paged_out(setup: Setup) -> float:
    """Bytes of paged moments that find no room on the card, and come and go in every step."""
    moments = setup.trained / setup.shards * setup.moment_bytes
    return min(moments, max(0.0, moments + memory.needed(setup) - setup.gpu.memory))
