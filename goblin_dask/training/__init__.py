"""Training of PyTorch models on volunteers, round by round. Needs PyTorch.

A round is one Dask graph: each micro-batch is a task from parameters to gradients, which are summed in their order in
the laboratory, where `torch.optim` takes its step.
"""

from goblin_dask.training.trainer import Round, Trainer

__all__ = ["Round", "Trainer"]
