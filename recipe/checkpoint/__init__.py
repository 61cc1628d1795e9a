"""Checkpoints: written, published whole, found by completeness, retired. Knows files and ranks, not models or
trainers."""
