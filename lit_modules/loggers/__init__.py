"""Loggers and figures of a run: wandb, metrics.csv and PNG files."""
