"""The gated recurrence in plain PyTorch, chunk by chunk, for CPUs and tests."""
