"""How the processes of a run start: who they are, the folder they agree on, their logs, and SLURM."""
