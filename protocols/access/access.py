"""This node's token, and the data to judge the tokens of others.

    access = Access(identity, run, keyring, revocations, clock_ms, token=token)
    async with open_rpc(network, TokenGuard(access, network.random)) as rpc: ...
    access.token = renewed                      # while calls run: the next message carries it
    access.revocations.accept(list, access.keyring); await end_refused(rpc, access)

The guard reads everything here at each use. So the code that renews the token or follows the
revocations only has to replace the value. Times come from `clock_ms`: the auth server's time as
well as this node knows it, in milliseconds since 1970.

This node's own token may also be missing, expired or revoked. Then it asks nobody (`own_token` says
why), and answers only with errors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import trio

from auth.keyring import Keyring
from auth.keys import SigningKey
from auth.refusals import AccessRefused, Reason
from auth.revocations import Revocations
from auth.tokens import Token, check_times, read_token
from auth.verified_tokens import VerifiedToken, VerifiedTokens
from protocols.identity import Identity, PeerId
from protocols.network import Network
from protocols.not_allowed import NotAllowed
from protocols.rpc import Rpc

MOST_SHOWN = 4096  # peers whose last token is kept, to end what is open when it is revoked

MEMBER_FOR_MS = 3_600_000
"""For how long after its token expired a peer is not yet a stranger.

In an outage of the auth server, peers must not all disconnect each other.
"""


class Access:
    """One node's token, and the data to judge the tokens of others."""

    def __init__(
        self,
        identity: Identity,
        run: str,
        keyring: Keyring,
        revocations: Revocations,
        clock_ms: Callable[[], int],
        *,
        token: bytes | None = None,
        grace_ms: int = 0,
    ) -> None:
        self.key = SigningKey(identity.seed)
        self.tokens = VerifiedTokens(run, keyring, revocations, grace_ms=grace_ms)
        self.clock_ms = clock_ms
        self.refused_requests: Counter[Reason] = Counter()
        """Requests and openings of others that this node refused."""
        self.refused_answers: Counter[Reason] = Counter()
        """Answers to this node's requests that it did not accept."""
        self._shown: dict[PeerId, VerifiedToken] = {}
        self._token: bytes | None = None
        self._own: Token | None = None
        self.token = token

    @property
    def run(self) -> str:
        return self.tokens.run

    @property
    def token(self) -> bytes | None:
        """This node's own token. Setting it to anything but a token for this key is refused."""
        return self._token

    @token.setter
    def token(self, data: bytes | None) -> None:
        own = None if data is None else read_token(data)
        if own is not None and own.peer != self.key.public_key:
            raise AccessRefused(Reason.NOT_THE_PEER)
        self._token, self._own = data, own

    @property
    def keyring(self) -> Keyring:
        return self.tokens.keyring

    @keyring.setter
    def keyring(self, keyring: Keyring) -> None:
        self.tokens.keyring = keyring

    @property
    def revocations(self) -> Revocations:
        return self.tokens.revocations

    @revocations.setter
    def revocations(self, revocations: Revocations) -> None:
        self.tokens.revocations = revocations

    @property
    def grace_ms(self) -> int:
        """For how long after its expiry this run accepts a token."""
        return self.tokens.grace_ms

    @grace_ms.setter
    def grace_ms(self, grace_ms: int) -> None:
        self.tokens.grace_ms = grace_ms

    def own_token(self, now_ms: int) -> bytes:
        """This node's token; AccessRefused if it has none that is valid now.

        A token that seems to be from the future is returned: then this node's clock is behind, and
        the error of another peer says so, and by how much.
        """
        if self._token is None or self._own is None:
            raise AccessRefused(Reason.TOKEN_MISSING, "This node has no access token.")
        check_times(self._own, max(now_ms, self._own.issued_ms), grace_ms=self.grace_ms)
        if self.revocations.refuses(self._own):
            raise AccessRefused(Reason.REVOKED)
        return self._token

    def note_shown(self, peer: PeerId, verified: VerifiedToken) -> None:
        """Remember the token that a peer showed."""
        if self._shown.get(peer) is not verified:
            self._shown.pop(peer, None)
            self._shown[peer] = verified
            if len(self._shown) > MOST_SHOWN:
                del self._shown[next(iter(self._shown))]

    def note_vouched(self, token: bytes) -> None:
        """Remember a peer's token that another one has shown, if it is valid now. It names its
        peer's key, so nobody else can do anything with it."""
        try:
            verified = self.tokens.verify(token, self.clock_ms())
        except AccessRefused as refusal:
            log.debug("somebody vouched with a token that does not count: %s", refusal.what)
            return
        peer = PeerId(verified.peer_id)
        known = self.shown_by(peer)
        if known is None or known.expires_ms < verified.token.expires_ms:
            self.note_shown(peer, verified)

    def shown_by(self, peer: PeerId) -> Token | None:
        """The last token that this peer showed and that was valid then."""
        shown = self._shown.get(peer)
        return None if shown is None else shown.token

    def tokens_of(self, peers: Iterable[PeerId]) -> tuple[bytes, ...]:
        """The bytes of the tokens that these peers have shown."""
        return tuple(self._shown[peer].data for peer in peers if peer in self._shown)

    def is_member(self, peer: PeerId) -> bool:
        """Whether a peer has shown a token that is valid, or was until recently.

        Use this for what is open with a peer. Each message is judged by itself.
        """
        token = self.shown_by(peer)
        if token is None or self._refused_now(token) is not None:
            return False
        return self.clock_ms() < token.expires_ms + self.grace_ms + MEMBER_FOR_MS

    def refused_parties(self) -> dict[PeerId, NotAllowed]:
        """Peers whose token was valid when they showed it and was revoked since, with the reason.

        A peer with an expired token is not among them: its open calls and transfers may finish (see
        token_guard).
        """
        return dict(self._refused_parties())

    def _refused_parties(self) -> Iterator[tuple[PeerId, NotAllowed]]:
        for peer, shown in self._shown.items():
            token = shown.token
            reason = self._refused_now(token)
            if reason is not None:
                usual = AccessRefused(reason)
                yield (
                    peer,
                    NotAllowed(
                        f"{peer} ({token.username}) may no longer take part. {usual.what}",
                        why=usual.why,
                        advice=usual.advice,
                        reason=reason,
                    ),
                )

    def _refused_now(self, token: Token) -> Reason | None:
        """Why an accepted token was revoked; None if it was not."""
        if self.revocations.refuses(token):
            return Reason.REVOKED
        if self.keyring.allows(token) is None:
            return Reason.UNKNOWN_AUTH_KEY
        return None


# Closing the links of strangers: peers that do not show that they may take part.
#
# The network accepts everybody, and has room for some hundreds of links. The guard refuses a
# stranger's requests. But strangers that ask nothing could hold links for ever and take the places
# of members. So in a run with tokens, the link to a peer that has shown no valid token within
# STRANGER_SECONDS is closed. If there are more than MOST_STRANGERS, the oldest are closed at once.
#
# A peer that we called shows its token with its *answer*, which may take long: its link stays open
# while our call is in flight. A member whose token has just expired because the auth server is down
# is not yet a stranger (`Access.is_member`). Otherwise in an outage all peers would disconnect each
# other, and could not find each other after it.


log = logging.getLogger("potluck.access")

STRANGER_SECONDS = 60.0  # a newcomer's first call takes some round trips
MOST_STRANGERS = 128  # a quarter of the links that others may have to a node
LOOK_SECONDS = 5.0


async def hang_up_on_strangers(network: Network, rpc: Rpc, access: Access) -> None:
    """Check the links every few seconds, for ever."""
    met: dict[PeerId, float] = {}
    while True:
        await trio.sleep(LOOK_SECONDS)
        now = trio.current_time()
        unknown = [one.peer for one in network.links() if not access.is_member(one.peer)]
        met = {peer: met.get(peer, now) for peer in unknown}
        strangers = [peer for peer in unknown if not rpc.waits_for(peer)]
        strangers.sort(key=met.__getitem__)  # oldest first
        surplus = max(0, len(strangers) - MOST_STRANGERS)
        async with trio.open_nursery() as nursery:
            for place, peer in enumerate(strangers):
                if place < surplus or now - met[peer] >= STRANGER_SECONDS:
                    log.debug("hanging up on %s, which shows no token that counts", peer)
                    nursery.start_soon(network.disconnect, peer)


# Ending everything with peers that may no longer take part, after a change of a revocation list or
# the keyring. The caller then closes the links, which belong to the network:
#
#     for peer in await end_refused(rpc, access):
#         await network.disconnect(peer)
#
# Do not refuse new links of such a peer for good. The person may be allowed again and come with a
# new token, which can only be shown over a link.


async def end_refused(rpc: Rpc, access: Access) -> tuple[PeerId, ...]:
    """End all calls and transfers with refused peers at once; return those peers."""
    refused = {
        peer: error
        for peer, error in access.refused_parties().items()
        if rpc.shut_out(peer) is None
    }
    async with trio.open_nursery() as nursery:
        for peer, error in refused.items():
            log.warning("ending everything with %s", error.what)
            nursery.start_soon(rpc.end_all_with, peer, error)
    return tuple(refused)
