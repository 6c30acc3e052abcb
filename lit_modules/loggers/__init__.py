"""Where a run's numbers and pictures go: wandb, metrics.csv and the run's folder."""
