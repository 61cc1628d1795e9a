"""Floating point operations of training, and what GPUs can do of them."""

import re

from transformers import PretrainedConfig

# Dense bf16 peak in FLOP/s, by a part of `torch.cuda.get_device_name()`. From NVIDIA's data sheets, without sparsity.
PEAK_BF16 = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def flops_per_token(config: PretrainedConfig, num_parameters: int, seq_len: int) -> float:
    """Forward and backward of one token: 6 N + 12 L h s (PaLM, arXiv 2204.02311, appendix B; causal masking not taken
    off).

    Args:
        num_parameters: N, without the input embedding, which is a look-up and no multiplication (a tied one is the
            head's and counts).
        seq_len: s, tokens that attend to each other: max_length for packed blocks.
    """
    return 6 * num_parameters + 12 * config.num_hidden_layers * config.hidden_size * seq_len


def matmul_parameters(config: PretrainedConfig, num_parameters: int) -> int:
    """Parameters that multiply: all but an untied input embedding."""
    return num_parameters - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by its name, or None where it is not known (a CPU)."""
    for name, peak in PEAK_BF16.items():
        if re.search(rf"\b{name}\b", device_name):
            return peak
    return None
