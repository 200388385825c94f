"""A mixture of experts that are spread over many computers (Learning@home, DMoE).

Finding: `grid` names the experts, `directory` announces and finds them, `beam` chooses the best for
each example, `allocation` gives a newcomer its cells. Serving: `messages` has the protocol,
`runtime` computes, `server` answers for it, `client` asks. Hosting: `copies` has what is saved of
an expert, `keepers` passes it on to other servers, `hosting` is the life of a server. Training:
`gating` scores the experts, `layer` is the mixture as a layer of a model, `swarm` gives it the
experts that were found, and `async_trainer` trains such a model with many batches in flight.
"""

from protocols.experts.allocation import free_cells
from protocols.experts.directory import (
    ANNOUNCE_SECONDS,
    EXPERTS,
    RECORD_SECONDS,
    Below,
    ExpertDirectory,
    Host,
)
from protocols.experts.grid import (
    LARGEST_DIMENSION,
    MOST_DIMENSIONS,
    CellBlock,
    ExpertGrid,
    Uid,
    WrongUid,
    parse_block,
    parse_uid,
)
from protocols.faces import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from protocols.experts.async_trainer import AsyncTrainer, DoneBatch
    from protocols.experts.beam import BeamSearch, select_experts
    from protocols.experts.client import ExpertClient
    from protocols.experts.gating import ExpertChoice, GridGate, balance_loss
    from protocols.experts.hosting import (
        CHECKPOINT_SECONDS,
        ExpertHost,
        ExpertLost,
        ExpertSaved,
        ExpertTaken,
        HostedExpert,
        HostEvent,
        HostSettings,
        Maker,
        SavingFailed,
        open_expert_host,
    )
    from protocols.experts.layer import DMoE, Experts, TooFewExperts
    from protocols.experts.messages import (
        EXPERTS_PROTOCOL,
        LARGEST_TENSOR_BYTES,
        ExpertInfo,
        Rows,
        UnknownExpert,
        WrongTensor,
    )
    from protocols.experts.runtime import (
        MOST_BYTES,
        ExpertBackend,
        ExpertStatistics,
        Runtime,
        Work,
        open_runtime,
    )
    from protocols.experts.server import serve_experts
    from protocols.experts.swarm import HostRecords, ImplausibleAnswer, SwarmExperts

__all__ = [
    "ANNOUNCE_SECONDS",
    "CHECKPOINT_SECONDS",
    "EXPERTS",
    "EXPERTS_PROTOCOL",
    "LARGEST_DIMENSION",
    "LARGEST_TENSOR_BYTES",
    "MOST_BYTES",
    "MOST_DIMENSIONS",
    "RECORD_SECONDS",
    "AsyncTrainer",
    "BeamSearch",
    "Below",
    "CellBlock",
    "DMoE",
    "DoneBatch",
    "ExpertBackend",
    "ExpertChoice",
    "ExpertClient",
    "ExpertDirectory",
    "ExpertGrid",
    "ExpertHost",
    "ExpertInfo",
    "ExpertLost",
    "ExpertSaved",
    "ExpertStatistics",
    "ExpertTaken",
    "Experts",
    "GridGate",
    "Host",
    "HostEvent",
    "HostRecords",
    "HostSettings",
    "HostedExpert",
    "ImplausibleAnswer",
    "Maker",
    "Rows",
    "Runtime",
    "SavingFailed",
    "SwarmExperts",
    "TooFewExperts",
    "Uid",
    "UnknownExpert",
    "Work",
    "WrongTensor",
    "WrongUid",
    "balance_loss",
    "free_cells",
    "open_expert_host",
    "open_runtime",
    "parse_block",
    "parse_uid",
    "select_experts",
    "serve_experts",
]

# Every node declares the family of the directory, and a node without experts loads no torch.
__getattr__ = lazily(
    __name__,
    {
        "async_trainer": ("AsyncTrainer", "DoneBatch"),
        "beam": ("BeamSearch", "select_experts"),
        "client": ("ExpertClient",),
        "gating": ("ExpertChoice", "GridGate", "balance_loss"),
        "hosting": (
            "CHECKPOINT_SECONDS",
            "ExpertHost",
            "ExpertLost",
            "ExpertSaved",
            "ExpertTaken",
            "HostEvent",
            "HostSettings",
            "HostedExpert",
            "Maker",
            "SavingFailed",
            "open_expert_host",
        ),
        "layer": ("DMoE", "Experts", "TooFewExperts"),
        "messages": (
            "EXPERTS_PROTOCOL",
            "LARGEST_TENSOR_BYTES",
            "ExpertInfo",
            "Rows",
            "UnknownExpert",
            "WrongTensor",
        ),
        "runtime": (
            "MOST_BYTES",
            "ExpertBackend",
            "ExpertStatistics",
            "Runtime",
            "Work",
            "open_runtime",
        ),
        "server": ("serve_experts",),
        "swarm": ("HostRecords", "ImplausibleAnswer", "SwarmExperts"),
    },
)
