"""The access pass on disk: what `potluck login` leaves behind, and nothing else.

One small file beside the key, readable by its owner only: the pass as the auth server signed it,
how the server is recognised (the fingerprint and the certificate of the invite), and how far off
this machine's clock was. No password, no code, nothing of the identity provider.

A token is of no use without the node's key, so the file is no secret of the first order. It is
written whole or not at all, and what others could have written is not read.

Easy to get wrong: one home is one node in one run. A pass is for the key beside it and no other.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from node.private_file import UnusableFile, read_private_file, replace_private_file

# A pass with sixteen addresses and a full keyring has some 20 KiB, a certificate 4 KiB; base64.
LARGEST_PASS_FILE_BYTES = 128 * 1024
KIND = "potluck access pass 1"


class KeptPass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    run: str
    access_pass: bytes
    fingerprint: str
    """Of an auth key, as the invite had it: what the trust in all later keys stands on."""
    auth_url: str
    pin: bytes = b""
    """SHA-256 of the server's one certificate; empty where the system's authorities judge it."""
    clock_offset_ms: int = 0
    """Server time less this machine's clock, when it was last measured."""
    refused: str = ""
    """Why the auth server refused to renew it, in words. The node asks before it uses it again."""
    kind: str = KIND


def load_pass(path: Path) -> KeptPass | None:
    """The pass that is kept here, unverified; None if there is none."""
    content = read_private_file(path, LARGEST_PASS_FILE_BYTES)
    if content is None:
        return None
    try:
        kept = msgspec.json.decode(content, type=KeptPass)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unusable(path, str(error)) from None
    if kept.kind != KIND:
        raise _unusable(path, f"It is a {kept.kind[:40]!r}.")
    return kept


def keep_pass(path: Path, kept: KeptPass) -> None:
    """Put the pass in its place; OSError as the system says it."""
    replace_private_file(path, msgspec.json.encode(kept))


def forget_pass(path: Path) -> None:
    """Remove it, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _unusable(path: Path, why: str) -> UnusableFile:
    return UnusableFile(
        f"{path} is not an access pass.",
        why=why,
        advice="Remove it, and run `potluck login INVITE` again.",
    )
