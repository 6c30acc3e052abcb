"""Text in, batches out: sources, tokenizers, packed blocks and the Lightning data modules that read them."""
