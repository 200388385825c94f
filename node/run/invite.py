"""An invite to a run: the short text that `potluck join` takes.

    text = write_invite(RunInvite(run="poem", bootstrap=(…,), organiser=fingerprint))
    invite = read_invite(text)          # NotAnInvite says what is wrong with it
    check_expiry(invite, now_ms)        # InviteExpired

    potluck-run:<base64url of MessagePack and the first four bytes of its SHA-256>

The MessagePack is an array: [run, peers, organiser's fingerprint, expiry in seconds since 1970 (0:
never), access]. A peer is [public key, addresses]; an address is [kind of host, host, port, the
relay's public key or nil], where the host is the 4 or 16 bytes of a number, or a name. So each key
travels once, and a usual invite has 150 characters. `access` is nil in an open run, else [auth url,
fingerprint of its key, code, certificate's hash], as in auth/invites.py.

An invite may come as a file: lines that begin with # are comments, white space is ignored.

The checksum finds typing mistakes, not forgeries. A code is a secret: put an invite with a code in
a file or POTLUCK_INVITE, never into a command's arguments.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from auth.documents import Canonical
from auth.errors import MalformedDocument
from auth.fields import MOST_ADDRESSES, PinnedKey, PublicKey, RunName, Url
from auth.invites import SCHEME as LOGIN_SCHEME
from auth.invites import Code, Invite, Pin
from auth.keys import fingerprint_bytes, fingerprint_text, peer_id_of, public_key_of
from auth.pasting import COPY_AGAIN, from_text, holds, to_text
from node.core.peer_address import parse_peer_address
from node.core.wrong_use import WrongUse
from protocols.errors import PotluckError

SCHEME = "potluck-run:"
LIMIT_BYTES = 6 << 10  # 16 of the longest addresses, an url, and some room
LATEST_EXPIRY_SECONDS = 1 << 40

Port = Annotated[int, Meta(ge=1, le=65_535)]
LONGEST_HOST_BYTES = 253  # of a name in the DNS
KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")  # their positions are the numbers in an invite


class NotAnInvite(PotluckError):
    """A text that is no invite to a run: cut short, mistyped, or something else."""

    exit_code = 2


class InviteExpired(PotluckError):
    """The invite has expired."""

    exit_code = 3


class RunInvite(msgspec.Struct, frozen=True):
    run: str
    bootstrap: tuple[str, ...]
    """Addresses with peer ids: any peers of the run; they serve the definition."""
    organiser: str
    """The fingerprint of the organiser's key (auth.keys.fingerprint)."""
    expires_ms: int = 0
    """Unix milliseconds, of whole seconds; 0: never."""
    access: Invite | None = None
    """The access that `potluck login` needs in a closed run; None: anybody may take part."""

    def __repr__(self) -> str:  # a code is a secret
        return f"RunInvite(run={self.run!r}, organiser={self.organiser!r})"


class _Address(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    kind: Annotated[int, Meta(ge=0, lt=len(KINDS))]
    host: Annotated[bytes, Meta(min_length=1, max_length=LONGEST_HOST_BYTES)]
    port: Port
    relay: PublicKey | None


class _Peer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    key: PublicKey
    addresses: Annotated[tuple[_Address, ...], Meta(max_length=MOST_ADDRESSES)]


class _Access(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    auth_url: Url
    pinned: PinnedKey
    code: Code
    pin: Pin | None


class _Invite(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The array that is encoded."""

    run: RunName
    peers: Annotated[tuple[_Peer, ...], Meta(max_length=MOST_ADDRESSES)]
    organiser: PinnedKey
    expires: Annotated[int, Meta(ge=0, le=LATEST_EXPIRY_SECONDS)]
    access: _Access | None


_INVITES = Canonical(_Invite, "invite", LIMIT_BYTES)


def write_invite(invite: RunInvite) -> str:
    """The invite's text; ValueError for an invite that could not be read back."""
    peers: dict[bytes, list[_Address]] = {}
    for address in invite.bootstrap:
        key, packed = _packed(address)
        peers.setdefault(key, []).append(packed)
    access = invite.access
    written = _Invite(
        invite.run,
        tuple(_Peer(key, tuple(addresses)) for key, addresses in peers.items()),
        fingerprint_bytes(invite.organiser),
        invite.expires_ms // 1000,
        None
        if access is None
        else _Access(
            access.auth_url, fingerprint_bytes(access.fingerprint), access.code, access.pin or None
        ),
    )
    return to_text(SCHEME, _INVITES.write(written))


def read_invite(text: str) -> RunInvite:
    """The invite in a text or a file's contents; NotAnInvite. Does not check the expiry."""
    if holds(LOGIN_SCHEME, text) and not holds(SCHEME, text):
        raise NotAnInvite(
            "This invite is for logging in, and names no run to join.",
            why="It was made with `potluck auth invite`.",
            advice="Ask for an invite to the run (`potluck run invite`); this one is for `potluck "
            "login`.",
        )
    try:
        read = _INVITES.read(from_text(SCHEME, text))
        bootstrap = tuple(_text_of(peer, address) for peer, address in _addresses(read))
    except (MalformedDocument, WrongUse, ValueError) as error:
        why = error.why if isinstance(error, MalformedDocument) and error.why else _NEWER
        raise NotAnInvite(
            "This is not an invite to a run.",
            why=why,
            advice=COPY_AGAIN,
        ) from None
    access = None
    if read.access is not None:
        access = Invite(
            read.run,
            (),
            read.access.auth_url,
            fingerprint_text(read.access.pinned),
            read.access.code,
            read.access.pin or b"",
        )
    return RunInvite(
        read.run, bootstrap, fingerprint_text(read.organiser), 1000 * read.expires, access
    )


def check_expiry(invite: RunInvite, now_ms: int) -> None:
    """InviteExpired, which says when, and whom to ask for a new one."""
    if not invite.expires_ms or now_ms < invite.expires_ms:
        return
    until = datetime.fromtimestamp(invite.expires_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    now = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    raise InviteExpired(
        f"This invite to {invite.run} has expired.",
        why=f"It was valid until {until}, and this machine's clock says {now}.",
        advice="Ask the organiser for a new one; if the clock is wrong, correct it.",
    )


_NEWER = "This version of potluck does not know its kind."


def _addresses(read: _Invite) -> Iterator[tuple[bytes, _Address]]:
    for peer in read.peers:
        for address in peer.addresses:
            yield peer.key, address


def _packed(address: str) -> tuple[bytes, _Address]:
    """The key of the peer, and the rest of its address."""
    parts = parse_peer_address(address).text.split("/")[1:]
    kind, host, _, port = parts[:4]
    ids = [part for before, part in pairwise(parts[3:]) if before == "p2p"]
    packed = ipaddress.ip_address(host).packed if kind in ("ip4", "ip6") else host.encode("ascii")
    relay = public_key_of(ids[0]) if len(ids) == 2 else None
    return public_key_of(ids[-1]), _Address(KINDS.index(kind), packed, int(port), relay)


def _text_of(key: bytes, address: _Address) -> str:
    """The address in the usual text form; WrongUse or ValueError for an impossible one."""
    kind = KINDS[address.kind]
    if kind in ("ip4", "ip6"):
        number = ipaddress.ip_address(address.host)
        kind, host = f"ip{number.version}", str(number)
    else:
        host = address.host.decode("ascii")
    through = "" if address.relay is None else f"/p2p/{peer_id_of(address.relay)}/p2p-circuit"
    text = f"/{kind}/{host}/tcp/{address.port}{through}/p2p/{peer_id_of(key)}"
    return parse_peer_address(text).text
