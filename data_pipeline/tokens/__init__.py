"""From documents to batches of tokens: tokenizer, stored blocks, and the data modules that read them."""
