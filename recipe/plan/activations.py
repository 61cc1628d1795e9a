"""Bytes that a forward pass keeps for the backward pass.

The terms are those of Korthikanti et al. (arXiv 2205.05198, section 4.1), tensor by tensor as the operations of
transformers' own layers keep them in eager mode, so that a layer's sum is exact (tests/plan/test_activations.py counts
what autograd keeps). Grouped queries shrink keys and values, SwiGLU has three MLP matrices, and flash attention keeps
its output and one fp32 number a head and token instead of the matrices of scores.
"""

from recipe.plan.setup import Setup
from recipe.plan.shape import Shape


def whole_layer(shape: Shape, compute: int, flash: bool, seq_len: int, autocast: bool = False) -> float:
    """Bytes a token that one layer keeps when nothing is recomputed.

    Args:
        compute: bytes of an activation.
        autocast: LayerNorms' inputs, and all of a stepwise GELU but its first factor and its result, are in fp32 (by
            CUDA's list of operations, torch.amp's documentation; not counted, as CPUs have another list).
    """
    hidden, queries, keys = compute * shape.hidden, compute * shape.q_width, compute * shape.kv_width
    residual = 4 if autocast and not shape.rms_norm else compute
    norms = 2 * (_norm(shape, residual, shape.hidden) + hidden)  # and their results, which the linear layers keep
    if shape.qk_norms:
        norms += _norm(shape, compute, shape.q_width + shape.kv_width, shape.heads + shape.kv_heads)
    attention = queries + 2 * (keys if flash else queries) + queries  # and its output
    attention += 4 * shape.heads if flash else scores(shape, compute, seq_len)
    if shape.gated:  # gate, up, activated gate, their product
        mlp = 4 * compute * shape.intermediate
    elif shape.stepwise_gelu and autocast:
        mlp = (3 * 4 + 2 * compute) * shape.intermediate
    elif shape.stepwise_gelu:  # four factors of the tanh formula, and the product
        mlp = 5 * compute * shape.intermediate
    else:
        mlp = 2 * compute * shape.intermediate
    masks = 2 * shape.hidden if shape.dropout else 0
    return norms + attention + mlp + masks


def _norm(shape: Shape, compute: int, width: int, rows: int = 1) -> int:
    """Bytes a token that a norm keeps beside its result, with its fp32 statistics of each row."""
    if not shape.rms_norm:  # the input, mean and deviation
        return compute * width + 8 * rows
    if shape.fused_norms:
        return compute * width + 4 * rows
    return (4 + compute) * width + 4 * rows  # in fp32: the input, upcast; the normalized value, before the weight


def scores(shape: Shape, compute: int, seq_len: int) -> int:
    """Bytes a token of attention without flash: softmax in fp32, what the product with the values keeps, and dropout's
    mask."""
    return (4 + _probabilities(shape, compute) + shape.dropout) * shape.heads * seq_len


def _probabilities(shape: Shape, compute: int) -> int:
    """Bytes of a probability that the product with the values keeps; 0 where it is softmax's own fp32 result."""
    return compute if shape.dropout or compute != 4 else 0


def _whole(setup: Setup) -> float:
    """`whole_layer` of the setup, its adapters included."""
    adapters = 0.0 if setup.adapter is None else setup.adapter.kept(setup.shape, setup.compute_bytes)
    layer = whole_layer(setup.shape, setup.compute_bytes, setup.flash, setup.seq_len, setup.autocast)
    return layer + adapters


def kept_layer(setup: Setup) -> float:
    """Bytes a token that one layer keeps on the average, under the checkpointing that was asked for."""
    shape, compute = setup.shape, setup.compute_bytes
    whole = _whole(setup)
    inputs = float(compute * shape.hidden)
    if setup.checkpointing == "full":
        return inputs
    if setup.checkpointing == "alternate":
        return (inputs + whole) / 2
    if setup.checkpointing == "attention":
        return whole - (0 if setup.flash else scores(shape, compute, setup.seq_len))
    if setup.checkpointing == "op":
        # The layer's input; the 1st, 3rd, 5th, 7th matrix product (queries, values, gate, down; of two MLP matrices,
        # the first); the attention's output and its normalizers.
        products = shape.q_width + shape.kv_width + shape.intermediate + (shape.hidden if shape.gated else 0)
        return inputs + compute * (products + shape.q_width) + 4 * shape.heads
    return whole


def kept(setup: Setup) -> float:
    """Bytes of all layers, for one micro-batch."""
    return setup.tokens * setup.shape.layers * kept_layer(setup)


def final_norm(setup: Setup) -> float:
    """Bytes of the norm before the head, with its result, until the loss's backward pass is through it."""
    shape, compute = setup.shape, setup.compute_bytes
    return float(setup.tokens * (_norm(shape, compute, shape.hidden) + compute * shape.hidden))


def working(setup: Setup, backward: bool = False) -> float:
    """Bytes that one layer's pass needs beside what it keeps, at its widest: factors of the MLP (backward: gradients of
    two of them, when the gradient of their product is free), or scores."""
    shape, compute = setup.shape, setup.compute_bytes
    factors = (3 if shape.gated else 2) - backward
    mlp = compute * (factors * shape.intermediate + 2 * shape.hidden)
    # Without flash: the scores' gradient before and after softmax, in fp32, when the probabilities are free.
    a_score = 0 if setup.flash else 2 * 4 - _probabilities(shape, compute)
    # A 4-bit matrix is made whole for its product.
    matrix = compute * shape.hidden * shape.intermediate if setup.adapter and setup.adapter.four_bit else 0
    return setup.tokens * max(mlp, a_score * shape.heads * setup.seq_len) + matrix


def norm_backward(setup: Setup) -> float:
    """Bytes of the backward pass of an RMSNorm that is written in single operations: six and a half fp32 tensors of the
    hidden width, counted (`recipe plan --dry-run`)."""
    shape = setup.shape
    return 6.5 * 4 * shape.hidden * setup.tokens if shape.rms_norm and not shape.fused_norms else 0.0


def recomputed(setup: Setup) -> float:
    """Bytes that come up anew while one layer's backward pass runs: what was not kept, and the gradients."""
    shape, compute = setup.shape, setup.compute_bytes
    whole = _whole(setup)
    inputs = compute * shape.hidden
    kept_here = {"none": whole, "alternate": inputs}.get(setup.checkpointing, kept_layer(setup))
    return setup.tokens * max(0.0, whole - kept_here) + working(setup, backward=True)
