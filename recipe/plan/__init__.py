"""Arithmetic about a run, without a GPU: what it computes and what the hardware can do."""
