"""The gated recurrence in plain PyTorch operations, chunk by chunk: for CPUs and for tests."""
