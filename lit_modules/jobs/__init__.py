"""The jobs `pretrain`, `linearize` and `plan`, and the code that they share."""
