"""Floating point operations of training."""


def flops_per_token(num_parameters: float, layers: int, width: int, seq_len: int) -> float:
    """Forward and backward of one token: 6 N + 12 L h s (PaLM, arXiv 2204.02311, appendix B; causal masking not taken
    off).

    Args:
        num_parameters: N, without the input embedding, which is a look-up and no multiplication (a tied one is the
            head's and counts).
        width: h, of all attention heads together.
        seq_len: s, tokens that attend to each other: max_length for packed blocks.
    """
    return 6 * num_parameters + 12 * layers * width * seq_len


def matmul_parameters(num_parameters: int, embedding: int, tied: bool) -> int:
    """Parameters that multiply: all but an untied input embedding."""
    return num_parameters - (0 if tied else embedding)
