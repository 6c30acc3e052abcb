"""`job=generate`, and decoding by CUDA graph replay."""
