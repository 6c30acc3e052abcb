"""Executors that run a job's phases: on this machine, on a SLURM cluster, on a Ray cluster.

Each has `run(phases, logs, place)`, which returns True if all phases have finished and False if they were submitted.
datatrove's logs of a phase are in `logs/<number>-<name>/`. A later run does not repeat tasks that finished in a killed
or failed run.
"""

from data_pipeline.executors.local import Local
from data_pipeline.executors.ray import Ray
from data_pipeline.executors.slurm import Slurm

__all__ = ["Local", "Ray", "Slurm"]
