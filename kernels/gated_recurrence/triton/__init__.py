"""The gated recurrence in Triton: gates per channel and per head, forward and backward."""
