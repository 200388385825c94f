"""The open logins, bounded in all and per address, each found by ids that nobody guesses.

A session is begun by a peer that has proven its key, and its result is for that key: the peer is in
the session and in no later request. It ends in one of three ways: an identity that is handed out
once, a refusal that is repeated to later callers, or its time being over.

A place is taken before the provider is asked, and freed if that fails. Counting afterwards would
let a thousand requests through at once.
"""

from __future__ import annotations

import base64
import heapq
import hmac
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from auth.bounded_map import BoundedMap
from auth.server.providers.errors import LoginExpired, LoginRefused, TooManyLogins
from auth.server.providers.flows import DeviceGrant, LoginAttempt, Provider
from auth.server.providers.identity import ProviderIdentity

# A session is a kilobyte and the provider's codes: 10,000 are ten to fifty megabytes. A run that
# a whole lecture joins in one minute has hundreds open.
MOST_SESSIONS: Final = 10_000

# A laboratory behind one address may log in all its machines at once.
MOST_PER_ADDRESS: Final = 50

# The time to find the browser and remember a password; a page that lies open longer is no use.
BROWSER_SECONDS: Final = 600

# While a provider is asked for a device code: longer than its deadlines together.
STARTING_SECONDS: Final = 60

# A refusal is told again for as long: the volunteer's side may have missed the first answer.
REFUSAL_KEPT_SECONDS: Final = 120

# With fewer entries than this, the heap is not worth tidying.
FEW_ENDS: Final = 1000

# Identities handed out, which may have to be taken back because no pass could be written.
MOST_HANDED_OUT: Final = 1000


# Ids that nobody guesses, and the confirmation word that a person compares.
#
# The word is shown in the terminal that began a login and on the page that the browser shows: a
# person who was sent somebody else's page sees a word that is in no terminal of theirs. It is a
# proquint (five letters for sixteen bits, consonants and vowels in turn), so it can be read aloud.
#
# The word is no secret and proves nothing by itself. A cookie ties a browser to a login; the word
# is for the person's eyes.


ID_BYTES: Final = 32  # 256 bits: as unguessable as a key
ID_CHARACTERS: Final = 43  # the same in base64url without padding

_CONSONANTS: Final = "bdfghjklmnprstvz"
_VOWELS: Final = "aiou"


def new_id() -> str:
    return secrets.token_urlsafe(ID_BYTES)


def new_word() -> str:
    """Two proquints, such as lusab-babad: 32 bits, so two open logins do not share one."""
    return "-".join(proquint(secrets.randbits(16)) for _ in range(2))


def proquint(number: int) -> str:
    return (
        _CONSONANTS[number >> 12 & 15]
        + _VOWELS[number >> 10 & 3]
        + _CONSONANTS[number >> 6 & 15]
        + _VOWELS[number >> 4 & 3]
        + _CONSONANTS[number & 15]
    )


def form_token(secret: bytes, cookie: str, page_id: str) -> str:
    """The value that a form must return: only a browser with the cookie was given it."""
    mark = hmac.digest(secret, f"{len(cookie)}:{cookie}{page_id}".encode(), "sha256")
    return base64.urlsafe_b64encode(mark).rstrip(b"=").decode()


def is_same(given: str | None, expected: str) -> bool:
    """Whether two secrets are equal, in a time that does not say where they differ."""
    return given is not None and hmac.compare_digest(
        given.encode(errors="replace"), expected.encode()
    )


def looks_like_an_id(text: str | None) -> bool:
    """Whether this could be one of our ids; a browser's cookie may be anything."""
    return (
        text is not None
        and len(text) == ID_CHARACTERS
        and text.isascii()
        and all(c.isalnum() or c in "-_" for c in text)
    )


# The sessions.


@dataclass(slots=True, eq=False)
class Session:
    """One login. Times are trio's clock."""

    peer: bytes
    provider: Provider
    flow: str
    address: str
    expires: float
    id: str = field(default_factory=new_id)
    grant: DeviceGrant | None = None  # device flow, once the provider gave one
    interval: int = 0
    next_question: float = 0.0
    asking: bool = False  # somebody's poll is at the provider now
    page_id: str = field(default_factory=new_id)
    confirmation: str = field(default_factory=new_word)
    attempt: LoginAttempt | None = None  # a browser's trip under way
    cookie: str = ""  # of the browser that is on that trip
    identity: ProviderIdentity | None = None
    refusal: LoginRefused | None = None
    over: bool = False  # no longer in the table: a caller that still holds it must not use it

    @property
    def is_answered(self) -> bool:
        """Whether the provider has said yes or no."""
        return self.identity is not None or self.refusal is not None


class Sessions:
    """The table of sessions. Every look-up first drops those whose time is over."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_page: dict[str, Session] = {}
        self._by_state: dict[str, Session] = {}
        self._by_peer: dict[bytes, Session] = {}
        self._per_address: Counter[str] = Counter()
        self._ends: list[tuple[float, str]] = []  # a heap; a session may stand in it several times
        self._handed_out = BoundedMap[str, Session](MOST_HANDED_OUT)

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> tuple[Session, ...]:
        return tuple(self._by_id.values())

    def begin(
        self, peer: bytes, provider: Provider, flow: str, address: str, now: float
    ) -> Session:
        """A place for a login of this peer, whose older login ends; TooManyLogins when full."""
        self.forget_old(now)
        older = self._by_peer.get(peer)
        if older is not None:
            self.end(older)
        if self._per_address[address] >= MOST_PER_ADDRESS:
            raise TooManyLogins(
                f"{MOST_PER_ADDRESS} logins from your network address are open already.",
                why="They wait for people to confirm them, and end by themselves.",
                advice="Finish those first, or wait some minutes.",
                retry_after=60,
            )
        if len(self._by_id) >= MOST_SESSIONS:
            raise TooManyLogins(
                "This server has as many open logins as it keeps.",
                why="Very many people are logging in, or somebody floods the server.",
                advice="Try again in some minutes.",
                retry_after=60,
            )
        lasts = STARTING_SECONDS if flow == "device" else BROWSER_SECONDS
        session = Session(peer, provider, flow, address, now + lasts)
        self._by_id[session.id] = session
        self._by_page[session.page_id] = session
        self._by_peer[peer] = session
        self._per_address[address] += 1
        self._will_end(session)
        return session

    def found(self, session_id: str, now: float) -> Session:
        """The session with this id; LoginExpired when there is none."""
        self.forget_old(now)
        session = self._by_id.get(session_id)
        if session is None:
            raise expired()
        return session

    def at_page(self, page_id: str, now: float) -> Session:
        """The session of this page; LoginExpired if there is none."""
        self.forget_old(now)
        session = self._by_page.get(page_id)
        if session is None or session.flow != "browser":
            raise expired()
        return session

    def on_the_way(self, state: str, now: float) -> Session:
        """The session one of whose browsers was sent out with this state; LoginExpired if none."""
        self.forget_old(now)
        session = self._by_state.get(state)
        if session is None:
            raise expired()
        return session

    def send_out(self, session: Session, attempt: LoginAttempt, cookie: str) -> None:
        """A browser goes to the provider; an earlier trip for this login is no longer valid."""
        self.take_attempt(session)
        session.attempt, session.cookie = attempt, cookie
        self._by_state[attempt.state] = session

    def take_attempt(self, session: Session) -> LoginAttempt | None:
        """End the trip: its state is used up, whatever the result."""
        attempt, session.attempt, session.cookie = session.attempt, None, ""
        if attempt is not None:
            self._by_state.pop(attempt.state, None)
        return attempt

    def lasts_until(self, session: Session, expires: float) -> None:
        session.expires = expires
        self._will_end(session)

    def refuse(self, session: Session, refusal: LoginRefused, now: float) -> None:
        """The login was refused; the refusal is kept for a while."""
        refusal.provider, refusal.peer = session.provider.id, session.peer
        self.take_attempt(session)
        # a copy: the raised exception keeps its frames, and so the connection of its request
        session.refusal, session.identity, session.grant = refusal.again(), None, None
        self.lasts_until(session, min(session.expires, now + REFUSAL_KEPT_SECONDS))

    def hand_out(self, session: Session) -> ProviderIdentity:
        """The identity, once; the session leaves the table and its place is free."""
        assert session.identity is not None
        self.end(session)
        self._handed_out[session.id] = session
        return session.identity

    def give_back(self, session_id: str, now: float) -> bool:
        """Undo `hand_out`, unless the session's time is over or its peer has begun another."""
        session = self._handed_out.pop(session_id, None)
        if session is None or session.expires <= now or session.peer in self._by_peer:
            return False
        session.over = False
        self._by_id[session.id] = session
        self._by_peer[session.peer] = session
        self._per_address[session.address] += 1
        self._will_end(session)
        return True

    def end(self, session: Session) -> None:
        """Remove it from the table, whatever state it is in."""
        if session.over:
            return
        session.over = True
        self.take_attempt(session)
        del self._by_id[session.id]
        self._by_page.pop(session.page_id, None)
        if self._by_peer.get(session.peer) is session:
            del self._by_peer[session.peer]
        self._per_address[session.address] -= 1
        if not self._per_address[session.address]:
            del self._per_address[session.address]

    def _will_end(self, session: Session) -> None:
        heapq.heappush(self._ends, (session.expires, session.id))
        # Sessions that ended early leave their moments behind. Peers that begin again and again
        # must not fill the heap with them.
        if len(self._ends) > 2 * len(self._by_id) + FEW_ENDS:
            self._ends = [(each.expires, each.id) for each in self._by_id.values()]
            heapq.heapify(self._ends)

    def forget_old(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, session_id = heapq.heappop(self._ends)
            session = self._by_id.get(session_id)
            if session is not None and session.expires <= now:
                self.end(session)


def expired() -> LoginExpired:
    return LoginExpired(
        "This login is over, or this server does not know it.",
        why="It took too long, was answered already, was begun again elsewhere, or the server was"
        " restarted.",
        advice="Begin the login again.",
    )
