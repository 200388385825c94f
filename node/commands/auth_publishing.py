"""Bringing the list of revocations into the swarm's directory, as a client of one moment.

The auth server is no node. When it is stopped and somebody is revoked, the command that did it
goes into the swarm itself: under a new key, with a token that the auth key has just signed for it
(a *courier*, good for minutes), through any of the run's endpoints. It stores the list under the
key that every node of the run watches (node/access/following.py), and leaves. The slot stays at
its replicas, and the nodes that read it bring copies of their own.

Easy to get wrong: the swarm may be one that has not met the newest auth key. The key records
travel with the list, so that whoever reads it can follow the endorsements.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import trio

from auth.keyring import KeyRecord, Keyring
from auth.keys import fingerprint
from auth.revocations import Revocations
from node.access.following import NOTICE_TTL_SECONDS, revocations_key
from node.access.notice import notice_of
from node.commands import exit_codes
from node.commands.dht_once import join_swarm
from node.commands.interruption import run_until_signal
from node.directory import FAMILIES
from node.libp2p_network import Libp2pSettings, open_libp2p_network
from protocols.access import Access
from protocols.dht.service import open_dht
from protocols.dht.settings import DhtSettings
from protocols.errors import DeadlineExceeded, Unreachable
from protocols.identity import Identity
from protocols.rpc import open_rpc
from protocols.token_guard import TokenGuard

# A person waits who wants somebody out: long enough for dead endpoints beside a living one.
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
    """Store the list; at how many nodes. Unreachable if at none."""
    replicas = 0
    # What peers do wrong meanwhile is no news here; the revoked one may be among them.
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
        raise DeadlineExceeded(f"The swarm took nothing within {SPREAD_SECONDS:g} seconds.")

    if run_until_signal(main) != exit_codes.DONE:
        raise Unreachable("It was interrupted before the swarm had taken the list.")
    return replicas


def _access(
    identity: Identity, token: bytes, run: str, signed_list: bytes, keys: Sequence[KeyRecord]
) -> Access:
    """What we judge the swarm by: the run's own keys, from the first on, and the list itself."""
    root = fingerprint(keys[0].public_key)
    revocations = Revocations(run)
    # Whoever was revoked just now must not be the one who tells us that all went well. But if a
    # key was withdrawn, all honest nodes still have tokens of it: it is not withdrawn from the
    # keyring that we judge them by.
    revocations.accept(signed_list, Keyring.from_pinned(run, root, keys))
    return Access(
        identity,
        run,
        Keyring.from_pinned(run, root, keys),
        revocations,
        lambda: time.time_ns() // 1_000_000,
        token=token,
    )
