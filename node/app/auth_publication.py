"""Publishes the list of revocations in the swarm's directory, as a short-lived client.

The auth server is no node. If it is stopped and somebody is revoked, the command that did it joins
the swarm itself: under a new key, with a token that the auth key has just signed for it (a
*courier*, good for minutes), through any of the run's endpoints. It stores the list under the key
that every node of the run watches (node/core/access/revocation_follower.py), and leaves. The slot
stays at its replicas, and the nodes that read it publish copies of their own.

The swarm may not know the newest auth key yet. So the key records travel with the list, and its
readers can follow the endorsements.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import trio

from auth.keyring import KeyRecord, Keyring
from auth.keys import fingerprint
from auth.revocations import Revocations
from node.app.cli import exit_codes
from node.app.cli.interruption import run_until_signal
from node.app.swarm_client import join_swarm
from node.core.access.notice import notice_of
from node.core.access.revocation_follower import NOTICE_TTL_SECONDS, revocations_key
from node.core.directory import FAMILIES
from node.net import Libp2pSettings, open_libp2p_network
from protocols.access import Access, TokenGuard
from protocols.dht import DhtSettings, open_dht
from protocols.errors import DeadlineExceeded, Unreachable
from protocols.identity import Identity
from protocols.rpc import open_rpc

# A person waits for the exclusion: long enough for dead endpoints beside a living one.
SPREAD_SECONDS = 20.0
DIAL_SECONDS = 5.0


def publish(
    identity: Identity,
    token: bytes,
    run: str,
    signed_list: bytes,
    keys: Sequence[KeyRecord],
    endpoints: tuple[str, ...],
) -> int:
    """Store the list; returns at how many nodes. Unreachable if at none."""
    replicas = 0
    # Peers' mistakes are not reported meanwhile; the revoked one may be among them.
    logging.getLogger("potluck").setLevel(logging.CRITICAL)

    async def main() -> int:
        nonlocal replicas
        access = _access(identity, token, run, signed_list, keys)
        settings = DhtSettings(bootstrap=endpoints, client=True)
        network_settings = Libp2pSettings(listen_addresses=(), dial_seconds=DIAL_SECONDS)
        deadline = trio.current_time() + SPREAD_SECONDS
        with trio.move_on_at(deadline):
            async with (
                open_libp2p_network(identity, network_settings) as network,
                open_rpc(network, TokenGuard(access, network.random)) as rpc,
                open_dht(network, rpc, families=FAMILIES, settings=settings) as dht,
            ):
                await join_swarm(network, dht, endpoints, deadline)
                written = await dht.put(
                    revocations_key(run),
                    notice_of(signed_list, tuple(keys)),
                    NOTICE_TTL_SECONDS,
                    keep_up=False,
                )
                replicas = written.replicas
                return 0
        raise DeadlineExceeded(
            f"No node of the swarm has taken the list within {SPREAD_SECONDS:g} seconds."
        )

    if run_until_signal(main) != exit_codes.DONE:
        raise Unreachable("It was interrupted before a node of the swarm had taken the list.")
    return replicas


def _access(
    identity: Identity, token: bytes, run: str, signed_list: bytes, keys: Sequence[KeyRecord]
) -> Access:
    """The access rules for this swarm: the run's own keys, from the first on, and the list."""
    root = fingerprint(keys[0].public_key)
    revocations = Revocations(run)
    # The peer that was just revoked must not be the one that confirms the publication. But if a key
    # was withdrawn, all honest nodes still have tokens of it, so it stays in the keyring that we
    # judge them by.
    revocations.accept(signed_list, Keyring.from_pinned(run, root, keys))
    return Access(
        identity,
        run,
        Keyring.from_pinned(run, root, keys),
        revocations,
        lambda: time.time_ns() // 1_000_000,
        token=token,
    )
