"""A model's dimensions, and what follows from them alone: its parameters by unit, and its multiplications."""

from dataclasses import dataclass

from recipe.errors import UserError
from recipe.plan import flops

DIMENSIONS = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab")


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer.

    Args:
        intermediate: width of the MLP.
        gated: three MLP matrices (SwiGLU) instead of two.
        rms_norm: norms with a weight alone, computed in fp32 as Llama's are; else LayerNorm.
        tied: the head is the embedding.
        positions: learned positions; 0 for rotary ones.
        biases: on every linear layer of a block, and on LayerNorms.
        qkv_biases: on queries, keys and values alone (Qwen2).
        qk_norms: norms of queries and keys by head (Qwen3).
        dropout: masks are kept (GPT-2).
        fused_norms: RMSNorm in one kernel, which keeps its input as it is.
        max_positions: that it was trained on; None where not known.
        stepwise_gelu: GELU by tanh, written in single operations that each keep their input (GPT-2 in transformers).
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True
    rms_norm: bool = True
    tied: bool = False
    positions: int = 0
    biases: bool = False
    qkv_biases: bool = False
    qk_norms: bool = False
    dropout: bool = False
    fused_norms: bool = False
    stepwise_gelu: bool = False
    max_positions: int | None = None

    def __post_init__(self) -> None:
        sizes = {key: getattr(self, key) for key in DIMENSIONS}
        problems = [
            f"{self.name}: {key} is {value!r}; give a whole number from 1 to a billion"
            for key, value in sizes.items()
            if not isinstance(value, int) or not 1 <= value <= 10**9
        ]
        if not problems and self.heads % self.kv_heads:
            problems.append(f"{self.name}: heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if problems:
            raise UserError(*problems)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def layer_matmul(self) -> int:
        """Parameters of a layer that multiply."""
        attention = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        return attention + self.mlp_matrices * self.hidden * self.intermediate

    @property
    def layer(self) -> int:
        """Parameters of a layer, which is an FSDP unit."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norms else 0)
        biases = 0
        if self.biases:
            biases = 2 * self.hidden  # LayerNorms'
            biases += self.q_width + 2 * self.kv_width + self.hidden
            biases += (self.mlp_matrices - 1) * self.intermediate + self.hidden
        elif self.qkv_biases:
            biases = self.q_width + 2 * self.kv_width
        return self.layer_matmul + norms + biases

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def head(self) -> int:
        """Parameters of an untied head; 0 where the embedding is it."""
        return 0 if self.tied else self.embedding

    @property
    def root(self) -> int:
        """Parameters outside of layers: embedding, positions, final norm, head."""
        norm = self.hidden * (2 if self.biases else 1)
        return self.embedding + self.positions * self.hidden + norm + self.head

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.root

    @property
    def multiplying(self) -> int:
        """N of 6 N; learned positions are looked up too."""
        return flops.matmul_parameters(self.parameters, self.embedding, self.tied) - self.positions * self.hidden

    def model_flops(self, seq_len: int) -> float:
        """Floating point operations of one token, forward and backward, as MFU counts them."""
        return flops.flops_per_token(self.multiplying, self.layers, self.q_width, seq_len)
