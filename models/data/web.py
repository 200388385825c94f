"""Requests bytes from web servers from a given position on, within limits.

Promises: a server that sends no byte for `patience_seconds`, or not the whole head of an answer in
that time, is interrupted. A few redirects are followed, never from https to http, and never from
the internet into this machine or its local network. Private addresses are recognized after the name
is resolved, before anything is sent there. Nothing is unpacked that we did not ask for. Connections
are kept for the next request, and closed with the Web. (Behind a proxy, the proxy resolves names,
and only the name itself can be checked.)

The library's timeout begins anew with each byte, so a server that sends the head of its answer byte
by byte could hold us for days. `_patiently` bounds the whole of it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx2

from models.data.clock import Clock
from models.data.errors import Interrupted, ShardBroken
from models.data.settings import is_private_host

MOST_REDIRECTS = 5
CONNECT_SECONDS = 10.0
CONNECTIONS = 16  # shards that are open at once: one of each source, and ranges of Parquet
IDLE_SECONDS = 5.0  # shorter than any server's patience, so that no request meets a closing one
LONGEST_RETRY_SECONDS = 60.0  # of the wait that a server asks for
REDIRECTS = frozenset({301, 302, 303, 307, 308})
BUSY = frozenset({408, 425, 429})


class Web:
    """A client for all the shards of one data. Used by one thread at a time."""

    def __init__(
        self, clock: Clock, patience_seconds: float, *, only_internet: bool = False
    ) -> None:
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._only_internet = only_internet
        self._host = self._connecting_to = ""
        self._public_only = False  # whether the request under way may not go to a private address
        self._private_hosts: set[str] = set()  # names that resolved to one
        self._head_due: float | None = None  # the deadline for a complete head, while one is read
        self._in_head = False
        self._clients: dict[tuple[str, bool], httpx2.Client] = {}

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def patience_seconds(self) -> float:
        return self._patience_seconds

    @contextlib.contextmanager
    def opened(self, address: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
        """The answer to a GET, after redirects, whatever its status; its body still unread.

        Errors of the library, also while the body is read in the block, become Interrupted.
        """
        with contextlib.ExitStack() as stack:
            with _explained():
                response = self._follow(address, headers, stack)
            try:
                yield response
            finally:
                with _explained():
                    stack.close()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _follow(
        self, address: str, headers: Mapping[str, str], stack: contextlib.ExitStack
    ) -> httpx2.Response:
        self._public_only = self._only_internet
        for _ in range(MOST_REDIRECTS + 1):
            response = self._ask(address, headers, stack)
            if response.status_code not in REDIRECTS:
                return response
            target = response.headers.get("location", "")
            stack.close()
            self._public_only = self._only_internet or not self._is_private(self._host)
            address = _redirected(address, target)
        raise ShardBroken(f"its server redirects more than {MOST_REDIRECTS} times.")

    def _ask(
        self, address: str, headers: Mapping[str, str], stack: contextlib.ExitStack
    ) -> httpx2.Response:
        self._host = httpx2.URL(address).raw_host.decode("ascii")
        if self._public_only and is_private_host(self._host.strip("[]")):
            raise ShardBroken(_into_own_network(self._host))
        client = self._client_for(address.partition(":")[0].lower())
        self._in_head, self._head_due = True, None
        try:
            return stack.enter_context(
                client.stream("GET", address, headers=headers, extensions={"trace": self._trace})
            )
        finally:
            self._in_head = False

    def _client_for(self, scheme: str) -> httpx2.Client:
        # Made at the first request, because for https it reads a hundred certificate authorities.
        # There are two: a kept connection to a private address must not serve a public-only
        # request.
        key = scheme, self._public_only
        if key not in self._clients:
            trusting_nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._clients[key] = httpx2.Client(
                verify=trusting_nobody if scheme == "http" else True,
                timeout=httpx2.Timeout(self._patience_seconds, connect=CONNECT_SECONDS),
                limits=httpx2.Limits(max_connections=CONNECTIONS, keepalive_expiry=IDLE_SECONDS),
                follow_redirects=False,
                headers={"user-agent": "potluck", "accept-encoding": "identity", "accept": "*/*"},
            )
        return self._clients[key]

    def _is_private(self, host: str) -> bool:
        return host in self._private_hosts or is_private_host(host.strip("[]"))

    def _check_where_it_led(self, stream: Any) -> None:
        """ShardBroken, and the connection closed, if it is one to a place that it may not reach."""
        if self._connecting_to != self._host.strip("[]"):
            return  # a proxy, which this machine's owner has chosen
        address = str(stream.get_extra_info("server_addr")[0])
        if not is_private_host(address):
            return
        self._private_hosts.add(self._host)
        if self._public_only:
            stream.close()
            raise ShardBroken(_into_own_network(f"{self._host}, which is {address}"))

    def _trace(self, event: str, facts: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.started":
            self._connecting_to = str(facts["host"]).strip("[]")
        if event == "connection.connect_tcp.complete":
            self._check_where_it_led(facts["return_value"])
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            stream = facts["return_value"]
            stream.read = self._patiently(stream.read, stream.get_extra_info("socket"))

    def _patiently(
        self, read: Callable[..., bytes], wire: socket.socket
    ) -> Callable[[int, float | None], bytes]:
        def patient(most: int, timeout: float | None = None) -> bytes:
            now = self._clock.now()
            if self._in_head:
                # from the first byte that is waited for: connecting has had its own time
                self._head_due = self._head_due or now + self._patience_seconds
                left = self._head_due - now
                if left <= 0:
                    raise httpx2.ReadTimeout("")
                timeout = left if timeout is None else min(timeout, left)
            with self._clock.watching(wire):
                return read(most, timeout)

        return patient


def check_status(response: httpx2.Response, expected: frozenset[int]) -> None:
    """Interrupted or ShardBroken, unless the status is an expected one."""
    status = response.status_code
    if status in expected:
        return
    reason = f"its server answers {status} {response.reason_phrase[:60]}".rstrip()
    if status in BUSY or status >= 500:
        raise Interrupted(reason, retry_seconds=_retry_after(response))
    raise ShardBroken(f"{reason}.")


class Version:
    """Identifies the file of a server's answers: by ETag or date, and its length."""

    def __init__(self) -> None:
        self.total: int | None = None
        self._tag = ""

    def check(self, response: httpx2.Response, total: int | None, byte: int) -> None:
        """ShardBroken unless this answer is of the same file as those before."""
        headers = response.headers
        tag = str(headers.get("etag") or headers.get("last-modified") or "")
        if (self._tag and tag and tag != self._tag) or (
            self.total is not None and total is not None and total != self.total
        ):
            raise ShardBroken(f"it has changed on its server since byte {byte:,} was read.")
        self._tag = self._tag or tag
        self.total = total if total is not None else self.total


def body_of(response: httpx2.Response) -> Iterator[bytes]:
    """The bytes of an answer as they arrive; Interrupted if they stop."""
    chunks = response.iter_raw()
    while True:
        with _explained():
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield chunk


def _retry_after(response: httpx2.Response) -> float:
    asked = response.headers.get("retry-after", "")
    if not (asked.isascii() and asked.isdigit() and len(asked) < 10):
        return 0.0
    return min(float(asked), LONGEST_RETRY_SECONDS)


def _redirected(address: str, target: str) -> str:
    try:
        new = urljoin(address, target)
        before, after = urlsplit(address), urlsplit(new)
        host = after.hostname or ""
    except ValueError:
        raise ShardBroken("its server redirects to what is no address.") from None
    if not target or after.scheme not in ("http", "https") or not host:
        raise ShardBroken("its server redirects to what is no address.")
    if before.scheme == "https" and after.scheme == "http":
        raise ShardBroken("its server redirects from https to http, where anybody can change it.")
    return new


def _into_own_network(where: str) -> str:
    return f"it leads into this machine's own network, to {where}."


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except httpx2.TimeoutException as error:
        connecting = isinstance(error, httpx2.ConnectTimeout)
        raise Interrupted(
            "no connection in time" if connecting else "its server sends nothing"
        ) from error
    except httpx2.UnsupportedProtocol:
        raise ShardBroken("that is no http(s) address.") from None
    except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
        raise Interrupted(f"the connection failed: {_words_of(error)}") from error
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise ShardBroken(f"that is no address ({error}).") from None


def _words_of(error: BaseException) -> str:
    found: BaseException | None = error
    while found is not None:
        if text := str(found).strip().rstrip("."):
            return text[:200]
        found = found.__cause__ or found.__context__
    return type(error).__name__
