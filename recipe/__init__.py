"""Fine-tune Llama-2-70B, and any causal language model of its kind, under FSDP on one to many nodes."""

__version__ = "0.1.0"
