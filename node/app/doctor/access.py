"""Checks of the access to a closed run: the pass, the auth server, and this machine's clock.

The auth server is asked for its keys, its time and the revocation list. All of that is public, and
nothing on either side changes: the pass is not renewed. The time comes signed, so that the clock is
judged by the server that judges the tokens.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence

import trio

from auth.errors import AuthError
from auth.refusals import Reason
from node.app.doctor.finding import Finding, FindingLevel, finding_of
from node.app.doctor.surroundings import Surroundings
from node.app.views.status_view import token_words
from node.core.access.auth_client import AuthClient, open_auth_client
from node.core.access.membership import Membership, refused_by
from node.core.access.renewal import TokenStanding
from node.core.access.server_time import FAR_OFF_MS, ServerTime, distance
from node.core.duration import span
from node.core.status import NodeStatus
from node.net import machine_clocks
from protocols.errors import PotluckError
from protocols.identity import Identity

# For all questions to the auth server together. A healthy one answers each within a round trip.
AUTH_SECONDS = 5.0
# Certificates are valid for weeks: a clock that is days off makes them all look wrong.
HOPELESS_CLOCK_MS = 86_400_000
ASK_THE_MODERATORS = "Ask the moderators of the run to let you in."
LOG_IN = "Run `potluck login`, which renews it."

# -- the pass


async def check_pass(surroundings: Surroundings) -> Sequence[Finding]:
    """By what is on the disk. `check_auth_server` asks whether it was revoked."""
    if surroundings.membership_trouble is not None:
        return [finding_of("pass", surroundings.membership_trouble)]
    member = surroundings.membership
    if member is not None:
        return list(_findings_of(member, surroundings.node))
    if surroundings.configuration.places.pass_file.exists():
        says = "There is a pass, but not the key for which it was given."
        advice = "Run `potluck login INVITE`, which gets a pass for a new key."
        return [Finding("pass", FindingLevel.ERROR, says, advice)]
    server = surroundings.auth_server
    if server is not None:
        says = f"The run {server.run} is closed, and this node has no pass."
        return [Finding("pass", FindingLevel.ERROR, says, "Run `potluck join INVITE` to log in.")]
    return [Finding("pass", FindingLevel.NOTE, "There is no pass: this home is in no closed run.")]


def _findings_of(member: Membership, node: NodeStatus | None) -> Iterator[Finding]:
    if member.kept.refused:
        says = f"The auth server has refused to renew it: {member.kept.refused}"
        yield Finding("pass", FindingLevel.ERROR, says, ASK_THE_MODERATORS)
        return
    if member.is_revoked:
        yield _revoked(member)
        return
    # Only the running node knows when it will renew the token.
    is_same_run = node is not None and node.membership.run == member.run_name
    status = node.membership if node is not None and is_same_run else member.status()
    says = f"{status.username} in {status.run}: {token_words(status)}."
    if member.standing is TokenStanding.VALID:
        yield Finding("pass", FindingLevel.OK, says)
        return
    # A start renews it. A running node would have done so by now if it could.
    level = FindingLevel.WARNING if node is None else FindingLevel.ERROR
    advice = LOG_IN if node is None else "Correct what is said about the auth server."
    yield Finding("pass", level, says, advice)


def _revoked(member: Membership) -> Finding:
    says = f"The moderators of {member.run_name} have revoked the pass of {member.token.username}."
    return Finding("pass", FindingLevel.ERROR, says, ASK_THE_MODERATORS)


# -- the auth server


async def check_auth_server(surroundings: Surroundings) -> Sequence[Finding]:
    server = surroundings.auth_server
    if server is None:
        says = "No auth server is known: this home is in no closed run."
        return [Finding("auth server", FindingLevel.NOTE, says)]
    time = ServerTime(machine_clocks())
    began = trio.current_time()
    found: list[Finding] = []
    try:
        with trio.fail_after(AUTH_SECONDS):
            async with open_auth_client(
                surroundings.identity or Identity.generate(),
                url=server.url,
                run=server.run,
                fingerprint=server.fingerprint,
                pin=server.pin,
                time=time,
            ) as client:
                await client.meet()
                took = trio.current_time() - began
                if surroundings.membership is not None:
                    found += await _revocation(client, surroundings.membership)
    except trio.TooSlowError:
        says = f"The auth server at {server.url} did not answer within {AUTH_SECONDS:g} seconds."
        advice = "Check this machine's connection; if it works, tell the moderators of the run."
        return [Finding("auth server", FindingLevel.ERROR, says, advice), *found]
    except (PotluckError, AuthError) as error:
        return [finding_of("auth server", error), *found]
    says = f"The auth server of {server.run} at {server.url} has answered within {span(took)}."
    found.append(Finding("auth server", FindingLevel.OK, says))
    if time.is_measured:
        found.append(judge_offset(time.offset_ms, "the auth server's"))
    return found


async def _revocation(client: AuthClient, member: Membership) -> Sequence[Finding]:
    """The server's present word about this pass; nothing if it is good."""
    match await refused_by(client, member):
        case None:
            return []
        case Reason.UNKNOWN_AUTH_KEY:
            says = "The auth key behind the pass was withdrawn, so that nobody accepts it."
            return [Finding("pass", FindingLevel.WARNING, says, LOG_IN)]
        case _:
            return [_revoked(member)]


# -- the clock


async def check_clock(surroundings: Surroundings) -> Sequence[Finding]:
    """By the running node's measurements, and by the system. `check_auth_server` measures it."""
    found: list[Finding] = []
    node = surroundings.node
    if node is not None and node.directory.joined == "joined":
        found.append(judge_offset(node.directory.clock_offset_ms, "most peers'"))
    kept = _is_kept_by_the_network()
    if kept is False:
        says = "The system says that it does not set its clock by the network (NTP)."
        found.append(Finding("clock", FindingLevel.NOTE, says))
    if not found:
        says = "The system sets its clock by the network." if kept else "It was not measured."
        found.append(Finding("clock", FindingLevel.OK if kept else FindingLevel.NOTE, says))
    return found


def judge_offset(offset_ms: int, whose: str) -> Finding:
    """`offset_ms` is the other clock less this machine's."""
    if abs(offset_ms) <= FAR_OFF_MS:
        says = f"This machine's clock and {whose} are {abs(offset_ms) / 1000:.1f} s apart."
        return Finding("clock", FindingLevel.OK, says)
    side = "behind" if offset_ms > 0 else "ahead of"
    says = f"This machine's clock is {distance(offset_ms)} {side} {whose}."
    level = FindingLevel.ERROR if abs(offset_ms) >= HOPELESS_CLOCK_MS else FindingLevel.WARNING
    return Finding("clock", level, says, _SET_THE_CLOCK)


_SET_THE_CLOCK = (
    "Run `sudo timedatectl set-ntp true`."
    if sys.platform == "linux"
    else "Let the system set its clock by the network, in its settings."
)

_TIMEX_BYTES = 512  # struct timex of adjtimex(2) has 208; the first field asks for nothing
_TIME_ERROR = 5  # the clock is not synchronised


def _is_kept_by_the_network() -> bool | None:
    """Whether the kernel's clock is synchronised; None if the system does not say."""
    if sys.platform != "linux":
        return None
    try:
        state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR
