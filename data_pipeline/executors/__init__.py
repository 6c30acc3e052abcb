"""Where the phases of a job run: on this machine, on a SLURM cluster, on a Ray cluster.

Each executor has `run(phases, logs, place)`, which returns True when all phases have ended and False when they are
submitted. A phase's logs are in `logs/<number>-<name>/`, as datatrove keeps them; what a killed or failed run had
ended is not done again by the next one.
"""

from data_pipeline.executors.local import Local
from data_pipeline.executors.ray import Ray
from data_pipeline.executors.slurm import Slurm

__all__ = ["Local", "Ray", "Slurm"]
