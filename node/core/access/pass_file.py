"""The access pass on disk: the result of `potluck login`, and nothing else.

It is one small file beside the key that only its owner can read. It has the pass as the auth server
signed it, the means to recognise the server (the fingerprint and the certificate of the invite),
and the offset of this machine's clock. It has no password, no code, and nothing of the identity
provider.

A token is useless without the node's key, so the file is less secret than the key. It is written
whole or not at all, and a file that others could have written is not read.

One home is one node in one run. A pass is only for the key beside it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from node.core.private_file import UnusableFile, read_private_file, replace_private_file

# A pass with sixteen addresses and a full keyring has some 20 KiB, a certificate 4 KiB; in base64.
LARGEST_PASS_FILE_BYTES = 128 * 1024
KIND = "potluck access pass 1"


class KeptPass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    run: str
    access_pass: bytes
    fingerprint: str
    """The fingerprint of an auth key, from the invite: trust in all later keys depends on it."""
    auth_url: str
    pin: bytes = b""
    """SHA-256 of the server's one certificate; empty if the system's authorities decide."""
    clock_offset_ms: int = 0
    """Server time minus this machine's clock, as last measured."""
    refused: str = ""
    """Why the auth server refused to renew it, in words. The node asks before it uses it again."""
    kind: str = KIND


def load_pass(path: Path) -> KeptPass | None:
    """The pass in this file, unverified; None without a file."""
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
    """Put the pass in its place. May raise OSError."""
    replace_private_file(path, msgspec.json.encode(kept))


def _unusable(path: Path, why: str) -> UnusableFile:
    return UnusableFile(
        f"{path} is not an access pass.",
        why=why,
        advice="Remove it, and run `potluck login INVITE` again.",
    )
