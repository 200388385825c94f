"""The messages of the control socket and their framing, for both ends.

A frame is a length (u32, big-endian) and that many bytes of JSON. The client sends one `Ask`. The
node answers with any number of `ControlAnswer`s and then `Done`, or with `ControlFailed`. It is
JSON because both ends are on one machine, and a person with `socat` may want to read it.

The two ends may be of different versions, if the node has run since before an upgrade. So unknown
fields are ignored, and missing ones have defaults.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import msgspec

from protocols.errors import LimitExceeded, MalformedMessage

LARGEST_ASK_BYTES = 131_072  # the longest revocation list and its keys have 90,000, in base64
LARGEST_ANSWER_BYTES = 4_194_304  # a status with 10,000 links has about 3 MB
LENGTH = struct.Struct(">I")

# sockaddr_un has 108 bytes on Linux and 104 on macOS and BSD, with the final zero.
LONGEST_SOCKET_PATH = 103
STAND_INS = Path("/tmp")  # the place of a socket with a longer path


class Ask(msgspec.Struct, tag="ask"):
    """The client's request."""

    command: str
    arguments: dict[str, Any] = {}


class ControlAnswer(msgspec.Struct, tag="answer"):
    """One result; a streaming command sends many."""

    value: Any


class Done(msgspec.Struct, tag="done"):
    """The command has ended."""


class ControlFailed(msgspec.Struct, tag="failed"):
    """The command failed, with the fields of a PotluckError."""

    what: str
    why: str = ""
    advice: str = ""
    exit_code: int = 1


Reply = ControlAnswer | Done | ControlFailed

_reply_decoder = msgspec.json.Decoder(Reply)
_ask_decoder = msgspec.json.Decoder(Ask)


def frame(message: Ask | Reply, limit_bytes: int) -> bytes:
    """Encode one message; LimitExceeded if the other end would not accept its size."""
    payload = msgspec.json.encode(message)
    if len(payload) > limit_bytes:
        raise LimitExceeded(
            f"A message of {len(payload):,} bytes does not fit through the control socket.",
            why=f"The limit is {limit_bytes:,} bytes.",
        )
    return LENGTH.pack(len(payload)) + payload


def length_of(header: bytes, limit_bytes: int) -> int:
    """The length in a header, checked before memory is allocated for it."""
    (length,) = LENGTH.unpack(header)
    if length > limit_bytes:
        raise LimitExceeded(
            f"The control socket was sent a message of {length:,} bytes.",
            why=f"The limit is {limit_bytes:,} bytes; the sender cannot be potluck.",
        )
    return int(length)


def ask_in(payload: bytes) -> Ask:
    try:
        return _ask_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage("That is not a control request.", why=str(error)) from None


def reply_in(payload: bytes) -> Reply:
    try:
        reply: Reply = _reply_decoder.decode(payload)
        return reply
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage("That is not a control reply.", why=str(error)) from None


def bindable(path: Path) -> Path:
    """`path`, or the stand-in for its socket if it is too long for the system.

    The stand-in is a folder in /tmp named by user and path, so both ends find the same one. (TMPDIR
    differs between sessions.) Both ends check that it belongs to this user.
    """
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return STAND_INS / f"{stand_in_prefix()}{digest}" / "control.sock"


def stand_in_prefix() -> str:
    """The beginning of the names of this user's stand-ins."""
    return f"potluck-{os.geteuid()}-"
