"""Shared by all packages: atomic files, setting checks, SLURM commands, GPU data, the Hugging Face Hub."""
