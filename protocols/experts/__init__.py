"""A mixture of experts that are spread over many computers (Learning@home, DMoE).

`grid` names the experts. `gating` scores them for each example, `layer` is the mixture as a layer
of a model, and `async_trainer` trains such a model with many batches in flight.
"""

from protocols.experts.async_trainer import AsyncTrainer, Done
from protocols.experts.gating import Choice, GridGate, balance_loss
from protocols.experts.grid import Grid, Uid, WrongUid, parse_uid
from protocols.experts.layer import DMoE, Experts, TooFewExperts

__all__ = [
    "AsyncTrainer",
    "Choice",
    "DMoE",
    "Done",
    "Experts",
    "Grid",
    "GridGate",
    "TooFewExperts",
    "Uid",
    "WrongUid",
    "balance_loss",
    "parse_uid",
]
