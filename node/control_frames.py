"""What is said on the control socket, and how it is framed. Shared by both of its ends.

A frame is a length (u32, big-endian) and that many bytes of JSON. The client sends one `Ask`;
the node answers with any number of `Answer`s and then `Done`, or with `Failed`. JSON, because
both ends are on one machine and a person with `socat` may want to read along.

Easy to get wrong: the two ends may be of different versions (the node has been running since
before the upgrade). Unknown fields are therefore ignored and missing ones have defaults.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import msgspec

from protocols.errors import LimitExceeded, MalformedMessage

LARGEST_ASK_BYTES = 65_536  # a command and its arguments
LARGEST_ANSWER_BYTES = 4_194_304  # a status with 10,000 links has about 3 MB
LENGTH = struct.Struct(">I")

# sockaddr_un has 108 bytes on Linux and 104 on macOS and BSD, the closing zero included.
LONGEST_SOCKET_PATH = 103


class Ask(msgspec.Struct, tag="ask"):
    """What the client wants."""

    command: str
    arguments: dict[str, Any] = {}


class Answer(msgspec.Struct, tag="answer"):
    """One result; a streaming command sends many."""

    value: Any


class Done(msgspec.Struct, tag="done"):
    """The command is over."""


class Failed(msgspec.Struct, tag="failed"):
    """The command failed, as a PotluckError says it."""

    what: str
    why: str = ""
    advice: str = ""
    exit_code: int = 1


Reply = Answer | Done | Failed

_reply_decoder = msgspec.json.Decoder(Reply)
_ask_decoder = msgspec.json.Decoder(Ask)


def frame(message: Ask | Reply, limit_bytes: int) -> bytes:
    """The bytes of one message; LimitExceeded if it is larger than the other end would take."""
    payload = msgspec.json.encode(message)
    if len(payload) > limit_bytes:
        raise LimitExceeded(
            f"A message of {len(payload):,} bytes does not fit through the control socket.",
            why=f"The limit is {limit_bytes:,} bytes.",
        )
    return LENGTH.pack(len(payload)) + payload


def length_of(header: bytes, limit_bytes: int) -> int:
    """The length that a header declares, checked before any memory is taken for it."""
    (length,) = LENGTH.unpack(header)
    if length > limit_bytes:
        raise LimitExceeded(
            f"The control socket was sent a message of {length:,} bytes.",
            why=f"The limit is {limit_bytes:,} bytes; this is not potluck talking.",
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
    """`path`, or where its socket is instead when the system takes no path that long.

    The stand-in is a folder in /tmp named by user and path, so both ends find the same one; not
    TMPDIR, which differs between sessions. Whoever uses it checks that the folder is private.
    """
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return Path("/tmp") / f"potluck-{os.geteuid()}-{digest}" / "control.sock"
