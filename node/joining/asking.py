"""Ask the peers that are met what the run is, as long as it takes.

    ask = DefinitionAsker(network, rpc, bootstrap_addresses, tell)
    signed = await ask.until_known("poem", accept, known)

Promises: it ends with the newest definition that anybody has, or with what that says: that this
potluck is too old for it, or that it is not right. Where nobody has one it goes on asking, ever
more rarely, and says so once for each reason.

Easy to get wrong: whoever answers first may be the only one who lies, and the others have yet to be
met. So a forgery is an end only after FORGED_SECONDS of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import trio

from node.run.signed import SignedDefinition
from protocols.identity import PeerId
from protocols.network import Network
from protocols.rpc import Rpc
from protocols.runs.fetching import fetch_definition
from protocols.runs.messages import NoDefinition, NotTheDefinition

FIRST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 15.0  # between two questions for a definition that nobody had
FORGED_SECONDS: Final = 30.0

Accept = Callable[[bytes], SignedDefinition]


@dataclass(frozen=True)
class DefinitionAsker:
    """`named`: addresses of the invite, whose peers are asked first. `tell`: hears what fails."""

    network: Network
    rpc: Rpc
    named: Iterable[str]
    tell: Callable[[str], None]

    async def until_known(
        self, run: str, accept: Accept, known: SignedDefinition | None
    ) -> SignedDefinition:
        """UnusableDefinition; NotTheDefinition where for long nobody has had another one."""
        seconds, told = FIRST_RETRY_SECONDS, frozenset[str]()
        give_up = trio.current_time() + FORGED_SECONDS
        while True:
            try:
                return await fetch_definition(self.rpc, self._peers(), run, accept, known=known)
            except (NoDefinition, NotTheDefinition) as error:
                if isinstance(error, NotTheDefinition) and trio.current_time() >= give_up:
                    raise
                # by what is said and not by who says it: they are asked in another order each time
                reasons = error.reasons if isinstance(error, NoDefinition) else {str(error)}
                if not reasons <= told:
                    told |= reasons
                    self.tell(f"{error.what} {error.why} It is tried again.")
            await trio.sleep(seconds)
            seconds = min(2.0 * seconds, LONGEST_RETRY_SECONDS)

    def _peers(self) -> list[PeerId]:
        """Those of the invite, then the others in any order: only some are asked, and anybody may
        have come with many."""
        named = {at.rpartition("/p2p/")[2] for at in self.named}
        peers = [link.peer for link in self.network.links()]
        self.network.random.shuffle(peers)
        return sorted(peers, key=lambda peer: peer not in named)
