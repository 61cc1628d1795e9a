"""LoRA (Hu et al., arXiv 2106.09685) and QLoRA (Dettmers et al., arXiv 2305.14314): what of a model is frozen, and how
large that is."""

from dataclasses import dataclass

from recipe.plan.shape import Shape


def linears(shape: Shape) -> int:
    """Linear layers of a block, each with an adapter of two matrices."""
    return 4 + shape.mlp_matrices


@dataclass(frozen=True)
class Adapter:
    """Adapters on every linear layer of the blocks; all else is frozen.

    Args:
        rank: r.
        four_bit: the frozen linear layers are in NF4, with a scale for 64 weights.
        nested: the scales are in 8 bits themselves (double quantisation); else in fp32.
        dropout: in front of each adapter, which keeps a copy of the layer's input.
        weight_bytes: of an adapter's weight.
    """

    rank: int
    four_bit: bool = False
    nested: bool = True
    dropout: bool = True
    weight_bytes: int = 4

    def layer(self, shape: Shape) -> int:
        """Trained parameters of one layer."""
        attention = 2 * (shape.hidden + shape.q_width) + 2 * (shape.hidden + shape.kv_width)
        return self.rank * (attention + shape.mlp_matrices * (shape.hidden + shape.intermediate))

    def parameters(self, shape: Shape) -> int:
        return shape.layers * self.layer(shape)

    def frozen_layer(self, shape: Shape, stored: int) -> float:
        """Bytes of a layer's frozen weights, where a weight that is not quantised takes `stored`; scales apart."""
        if not self.four_bit:
            return float(shape.layer * stored)
        return shape.layer_matmul / 2 + (shape.layer - shape.layer_matmul) * stored

    def scales(self, shape: Shape) -> float:
        """Bytes of all scales, which are not sharded: every rank has them."""
        if not self.four_bit:
            return 0.0
        of_a_block = 1 + 4 / 256 if self.nested else 4
        return shape.layers * shape.layer_matmul / 64 * of_a_block

    def kept(self, shape: Shape, compute: int) -> float:
        """Bytes a token that a layer keeps for its adapters: the narrow results, and copies of inputs with masks."""
        narrow = linears(shape) * self.rank * compute
        inputs = (3 + shape.mlp_matrices - 1) * shape.hidden + shape.q_width + shape.intermediate
        return narrow + (inputs * (compute + 1) if self.dropout else 0)
