"""Login links for the page of a closed run: strangers see what is public, members also names. Pure.

    logins = PageLogins(trio.current_time)
    key = logins.new_key()            # `potluck page` puts it into a link, behind the #
    cookie = logins.exchange(key)     # once, within LINK_SECONDS; None if there is no such key
    logins.knows(cookie)              # for SESSION_SECONDS

The threat is a stranger who can open the page and wants to know who is in the run. Only the node
itself makes keys, when somebody asks over its control socket, which is the owner's. What stands
behind the # of a link is sent to no server, so no proxy's log has it; a key that was used is worth
nothing. The cookie is signed with a key of this process, so it ends with the process at the latest.

Promises: nothing grows. There are at most `MOST_KEYS` keys that nobody has used, the newest.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import Callable
from typing import Final

LINK_SECONDS: Final = 600.0  # to open the link, also on another machine
SESSION_SECONDS: Final = 12 * 3600.0
MOST_KEYS: Final = 16
KEY_BYTES: Final = 32


class PageLogins:
    """`clock`: seconds, which never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._signing_key = secrets.token_bytes(KEY_BYTES)
        self._keys: deque[tuple[str, float]] = deque(maxlen=MOST_KEYS)
        """With the time until which each is good."""
        self.cookie_name = f"potluck_{secrets.token_hex(4)}"
        """Of its own: browsers send a cookie to all ports of a machine, and there may be others."""

    def new_key(self) -> str:
        key = secrets.token_urlsafe(KEY_BYTES)
        self._keys.append((key, self._clock() + LINK_SECONDS))
        return key

    def exchange(self, key: str) -> str | None:
        """The cookie for this key, which is then used up."""
        now = self._clock()
        for entry in self._keys:
            known, good_until = entry
            if hmac.compare_digest(known.encode(), key.encode()) and now < good_until:
                self._keys.remove(entry)
                return self._signed(f"{now + SESSION_SECONDS:.0f}")
        return None

    def knows(self, cookie: str) -> bool:
        """Whether this process has given the cookie, and not too long ago."""
        until = cookie.partition(".")[0]
        is_ours = hmac.compare_digest(self._signed(until).encode(), cookie.encode())
        return is_ours and self._clock() < float(until)

    def _signed(self, until: str) -> str:
        return f"{until}.{hmac.new(self._signing_key, until.encode(), 'sha256').hexdigest()}"
