"""From documents to batches of tokens: the tokenizer, blocks at rest, and the data modules that read them."""
