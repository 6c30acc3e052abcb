"""`job=plan`: the memory and time of a run, estimated before it runs and without a GPU.

Each kind of block is traced once with fake tensors: the bytes kept for the backward pass, its products and its traffic
(network.py; eager.py, compiled.py). Memory follows from these and the strategy (memory.py), time from these and the
card (speed.py, common/gpus.py).
"""

from common.gpus import Gpu, find_gpu
from lit_modules.planning.estimating import Change, Estimate, Planner, RunPlan, estimate
from lit_modules.planning.setup import Setup

__all__ = ["Change", "Estimate", "Gpu", "Planner", "RunPlan", "Setup", "estimate", "find_gpu"]
