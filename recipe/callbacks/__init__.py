"""What happens beside the training loop, one concern a file."""
