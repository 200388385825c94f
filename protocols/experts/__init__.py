"""A mixture of experts that are spread over many computers (Learning@home, DMoE).

`grid` names the experts. `directory` announces and finds them, `beam` chooses the best for each
example, `allocation` gives a newcomer its cells.
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
from protocols.experts.grid import Grid, Uid, WrongUid, parse_uid
from protocols.faces import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from protocols.experts.beam import BeamSearch, select_experts

__all__ = [
    "ANNOUNCE_SECONDS",
    "EXPERTS",
    "RECORD_SECONDS",
    "BeamSearch",
    "Below",
    "ExpertDirectory",
    "Grid",
    "Host",
    "Uid",
    "WrongUid",
    "free_cells",
    "parse_uid",
    "select_experts",
]

# Every node declares the family of the directory, and a node without experts loads no torch.
__getattr__ = lazily(__name__, {"beam": ("BeamSearch", "select_experts")})
