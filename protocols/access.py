"""What a node has in hand to prove that it may take part, and to judge whether others may.

    access = Access(identity, run, keyring, revocations, clock_ms, token=token)
    async with open_rpc(network, TokenGuard(access, network.random)) as rpc: ...
    access.token = renewed                      # while calls run: the next message carries it
    access.revocations.accept(list, access.keyring); await end_refused(rpc, access)

The guard takes everything from here at each use, so whoever keeps the token fresh and follows the
revocations only has to put the new thing in place. Times come from `clock_ms`: the auth server's
time as well as this node knows it, in milliseconds since 1970.

Easy to get wrong: this node's own token may be missing, run out or be revoked as well. Then it
asks nobody (`own_token` says why not), and answers nothing but errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from auth.keyring import Keyring
from auth.keys import SigningKey
from auth.refusals import AccessRefused, Reason
from auth.revocations import Revocations
from auth.tokens import Token, check_times, read_token
from auth.verified_tokens import VerifiedTokens
from protocols.identity import Identity, PeerId
from protocols.not_allowed import NotAllowed

MOST_SHOWN = 4096  # peers whose last token is kept, to end what is open with them when it falls

MEMBER_FOR_MS = 3_600_000
"""How long after its token ran out a peer is still no stranger: an outage of the auth server must
not make all hang up on all."""


class Access:
    """One node's token, and what it judges the tokens of others by."""

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
        """Requests and openings of others that were refused here."""
        self.refused_answers: Counter[Reason] = Counter()
        """Answers to ours that were not accepted."""
        self._shown: dict[PeerId, Token] = {}
        self._token: bytes | None = None
        self._own: Token | None = None
        self.token = token

    @property
    def run(self) -> str:
        return self.tokens.run

    @property
    def token(self) -> bytes | None:
        """This node's own token. Setting one that is not a token of this key's is refused."""
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
        """How much longer than its own life this run lets a token count."""
        return self.tokens.grace_ms

    @grace_ms.setter
    def grace_ms(self, grace_ms: int) -> None:
        self.tokens.grace_ms = grace_ms

    def own_token(self, now_ms: int) -> bytes:
        """This node's token; AccessRefused if it has none that counts now.

        That it seems to be from the future is no reason: then this node's clock is behind, and
        others say so better, and say by how much.
        """
        if self._token is None or self._own is None:
            raise AccessRefused(Reason.TOKEN_MISSING, "This node has no access token.")
        check_times(self._own, max(now_ms, self._own.issued_ms), grace_ms=self.grace_ms)
        if self.revocations.refuses(self._own):
            raise AccessRefused(Reason.REVOKED)
        return self._token

    def note_shown(self, peer: PeerId, token: Token) -> None:
        """Keep in mind with which token a peer takes part."""
        if self._shown.get(peer) is not token:
            self._shown.pop(peer, None)
            self._shown[peer] = token
            if len(self._shown) > MOST_SHOWN:
                del self._shown[next(iter(self._shown))]

    def shown_by(self, peer: PeerId) -> Token | None:
        """The last token that this peer showed and that counted then."""
        return self._shown.get(peer)

    def is_member(self, peer: PeerId) -> bool:
        """Whether a peer has shown a token that counts, or did not long ago. For what is open with
        it, not for anything that it says: that is judged by itself."""
        token = self._shown.get(peer)
        if token is None or self._refused_now(token) is not None:
            return False
        return self.clock_ms() < token.expires_ms + self.grace_ms + MEMBER_FOR_MS

    def refused_parties(self) -> dict[PeerId, NotAllowed]:
        """Those whose token counted when they showed it, and was revoked since; with the reason.

        A token that ran out is not among them: what was begun with it may end (see token_guard).
        """
        return dict(self._refused_parties())

    def _refused_parties(self) -> Iterator[tuple[PeerId, NotAllowed]]:
        for peer, token in self._shown.items():
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
        """Why a token that counted once has been taken back; None if it has not."""
        if self.revocations.refuses(token):
            return Reason.REVOKED
        if self.keyring.allows(token) is None:
            return Reason.UNKNOWN_AUTH_KEY
        return None
