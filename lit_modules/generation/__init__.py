"""`job=generate`, and decoding that is replayed as a CUDA graph."""
