"""What `job=plan` says: what a run will need, before it runs and without a GPU.

The network is traced without contents, a kind of block at a time: what its backward pass keeps, what it multiplies and
moves (network.py; eager.py, compiled.py). Memory follows from that and the strategy (memory.py), time from that and the
card (speed.py, gpus.py).
"""

from common.gpus import Gpu, find_gpu
from lit_modules.planning.estimating import Change, Estimate, Plan, Planner, estimate
from lit_modules.planning.setup import Setup

__all__ = ["Change", "Estimate", "Gpu", "Plan", "Planner", "Setup", "estimate", "find_gpu"]
