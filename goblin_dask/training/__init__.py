"""Training of PyTorch models on volunteers, round by round. Needs PyTorch.

A model is divided into stages that fit a volunteer. A round is one Dask graph: pieces of micro-batches are its tasks,
and their gradients are summed in their order by the stages' actors in the laboratory, where `torch.optim` takes its
step.
"""

from goblin_dask.training.history import EarlyStop, History
from goblin_dask.training.plan import Plan
from goblin_dask.training.trainer import Round, Trainer

__all__ = ["EarlyStop", "History", "Plan", "Round", "Trainer"]
