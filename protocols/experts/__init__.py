"""A mixture of experts that are spread over many computers (Learning@home, DMoE).

`grid` names the experts. `messages` has the protocol, `runtime` computes, `server` answers for it,
`client` asks.
"""

from protocols.experts.client import ExpertClient
from protocols.experts.grid import Grid, Uid, WrongUid, parse_uid
from protocols.experts.messages import (
    EXPERTS_PROTOCOL,
    ExpertInfo,
    Rows,
    UnknownExpert,
    WrongTensor,
)
from protocols.experts.runtime import (
    ExpertBackend,
    ExpertStatistics,
    Runtime,
    Work,
    open_runtime,
)
from protocols.experts.server import serve_experts

__all__ = [
    "EXPERTS_PROTOCOL",
    "ExpertBackend",
    "ExpertClient",
    "ExpertInfo",
    "ExpertStatistics",
    "Grid",
    "Rows",
    "Runtime",
    "Uid",
    "UnknownExpert",
    "Work",
    "WrongTensor",
    "WrongUid",
    "open_runtime",
    "parse_uid",
    "serve_experts",
]
