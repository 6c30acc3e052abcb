"""Questions and answers of Stack Exchange, from its dumps."""
