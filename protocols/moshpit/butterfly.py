"""The butterfly: each member reduces one part for all (002 §3.1; DeDLOC §2.2). One attempt's data.

    butterfly = Butterfly(rpc, network)                    # one per node
    report = await butterfly.exchange(plan, source, result)

Each member sends to each reducer its share of that reducer's part, and gets the average back on
the same stream.
"""

from __future__ import annotations

from torch import Tensor

from protocols.moshpit.exchange import ExchangePlan, ExchangeReport
from protocols.network import Network
from protocols.rpc import Rpc


class Butterfly:
    """The exchanges of one node."""

    def __init__(self, rpc: Rpc, network: Network) -> None:
        """Serves the bulk method `part` of `/potluck/allreduce/1.0.0` from now on."""

    async def exchange(self, plan: ExchangePlan, source: Tensor, result: Tensor) -> ExchangeReport:
        """Average `source` with the other participants' into `result`.

        ExchangeFailed names who was to blame. `source` is only read, `result` only written (what
        is in it after a failure means nothing). Cancelling leaves nothing behind.
        """
        raise NotImplementedError
