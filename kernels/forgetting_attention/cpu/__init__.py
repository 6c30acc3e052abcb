"""Forgetting attention in plain PyTorch operations, chunk by chunk: for CPUs and for tests."""
