"""What the checks are given: the settings, the running node, the key, the pass and the last invite.

It is read once, from this machine alone, and nothing is changed. A part that cannot be read is
None, and the reason is beside it: it is the check of that part that reports it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple, Unpack

import msgspec
import trio

from node.core.access.membership import Membership, open_membership
from node.core.configuration import Configuration
from node.core.control_client import NoRunningNode, ask_once
from node.core.key_file import load_identity
from node.core.peer_address import PeerAddress, parse_peer_address
from node.core.status import NodeStatus
from node.core.wrong_use import WrongUse
from node.run.invite import RunInvite
from node.training.join import last_invite
from protocols.errors import PotluckError
from protocols.identity import Identity

# A node answers within a millisecond. One that is stopped must not use up the time of the checks.
NODE_SECONDS = 2.0

Part = TypeVar("Part")


@dataclass(frozen=True)
class KnownAuthServer:
    """How to ask a run's auth server, and to recognise it."""

    run: str
    url: str
    fingerprint: str
    pin: bytes


@dataclass(frozen=True)
class Surroundings:
    configuration: Configuration
    node: NodeStatus | None = None
    """The state of the node that runs in this home."""
    node_trouble: PotluckError | None = None
    """Why a node that seems to run does not answer."""
    identity: Identity | None = None
    identity_trouble: PotluckError | None = None
    membership: Membership | None = None
    """The membership by the pass on disk. It is not running: it renews nothing."""
    membership_trouble: PotluckError | None = None
    invite: RunInvite | None = None
    """The invite of the last `potluck join`."""
    loading_torch: subprocess.Popen[bytes] | None = None
    """The process that loads torch, if it has begun."""

    @property
    def peers(self) -> tuple[PeerAddress, ...]:
        """The addresses that a node of this home would join at: the settings', the pass's and the
        invite's. (Those that it only remembers may be gone, which is no fault.)"""
        texts = [*self.configuration.bootstrap_addresses]
        texts += self.membership.endpoints if self.membership is not None else ()
        texts += self.invite.bootstrap if self.invite is not None else ()
        found: dict[str, PeerAddress] = {}
        for text in texts:
            try:
                address = parse_peer_address(text)
            except WrongUse:
                continue  # of a newer version, which knows more kinds of addresses
            found[address.text] = address
        return tuple(found.values())

    @property
    def auth_server(self) -> KnownAuthServer | None:
        """By the pass or the invite; None in an open run."""
        if self.membership is not None:
            kept = self.membership.kept
            return KnownAuthServer(kept.run, kept.auth_url, kept.fingerprint, kept.pin)
        if self.invite is not None and self.invite.access is not None:
            access = self.invite.access
            return KnownAuthServer(self.invite.run, access.auth_url, access.fingerprint, access.pin)
        return None


Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


async def measured(
    function: Callable[[Unpack[Arguments]], Result], *arguments: *Arguments
) -> Result:
    """Call a function that may block for long, as on a dead network disk. A deadline leaves its
    thread behind, which ends with the process."""
    return await trio.to_thread.run_sync(
        function,
        *arguments,
        abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
    )


def look_around(
    configuration: Configuration, loading_torch: subprocess.Popen[bytes] | None = None
) -> Surroundings:
    """The surroundings now. Blocks, for NODE_SECONDS if a node does not answer."""
    places = configuration.places
    node, node_trouble = _read(lambda: _status(configuration))
    identity, identity_trouble = _read(lambda: load_identity(configuration.key_file))
    membership, membership_trouble = None, None
    if identity is not None:
        own = identity
        membership, membership_trouble = _read(lambda: open_membership(configuration, own))
    return Surroundings(
        configuration,
        node,
        node_trouble,
        identity,
        identity_trouble,
        membership,
        membership_trouble,
        last_invite(places),
        loading_torch,
    )


def _status(configuration: Configuration) -> NodeStatus | None:
    try:
        socket = configuration.places.control_socket
        status: Any = ask_once(socket, "status", silence_seconds=NODE_SECONDS)
    except NoRunningNode:
        return None
    try:
        return msgspec.convert(status, NodeStatus)
    except msgspec.ValidationError as error:
        raise PotluckError(
            "The running node's status cannot be read.",
            why=f"It may be of another version: {error}.",
            advice="Start the node again, so that it has the version of this command.",
        ) from None


def _read(part: Callable[[], Part | None]) -> tuple[Part | None, PotluckError | None]:
    try:
        return part(), None
    except PotluckError as error:
        return None, error
