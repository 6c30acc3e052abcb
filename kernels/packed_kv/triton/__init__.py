"""Attention over packed and 16-bit tokens in Triton: one launch over the tokens' splits, and one that joins them."""
