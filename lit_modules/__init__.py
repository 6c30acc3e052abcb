"""LightningModules, the networks they train, and the jobs that run them."""
