"""What trains: LightningModules, the networks they train, and the jobs `pretrain` and `generate`."""
