"""The processes of a run: identity, common folder, logs, supervision and SLURM submission."""
