"""Forgetting attention in Triton: forward, backward, the gates' cumulative sums and the pruned ranges."""
