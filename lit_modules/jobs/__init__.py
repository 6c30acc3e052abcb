"""What `job=pretrain` and `job=linearize` run, and what the two share."""
