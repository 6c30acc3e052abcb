"""Start the processes of a run: their identity, common folder, logs, supervision and SLURM submission."""
