"""Which steps a state has had, as sixteen bytes: equal at two peers that made the same steps. Pure.

    history = first_history(run, signature, digest_of_the_initial_parameters)
    history = next_history(history, epoch, committed.digest)
    history = history_after_parameters(history, epoch, committed.digest)

A committed result has the same bits at all its members, whatever their hardware; so peers whose
own arithmetic differs in the last bit have the same history, and peers that took different rounds
as the end of one epoch do not: that is a fork, and they never average with one another.

Easy to get wrong: the epoch is not enough to tell states apart, and the digest of the parameters
is too much: on unlike machines it differs although nothing is wrong.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from protocols.messages import encode

HISTORY_BYTES: Final = 16  # nobody gains by finding two histories that collide

_FIRST = b"potluck history 1: first\0"
_STEP = b"potluck history 1: step\0"
_PARAMETERS = b"potluck history 1: parameters\0"


def first_history(run: str, signature: bytes, parameters_digest: bytes) -> bytes:
    """Of a run before its first step."""
    return _digest(_FIRST, run, signature, parameters_digest)


def next_history(history: bytes, epoch: int, result_digest: bytes) -> bytes:
    """After the step that ended this epoch. `result_digest` is empty for a peer that was alone
    (then nobody shares its history; chance makes it unique only through what came before)."""
    return _digest(_STEP, history, epoch, result_digest)


def history_after_parameters(history: bytes, epoch: int, result_digest: bytes) -> bytes:
    """After the parameters themselves were averaged, at the beginning of this epoch."""
    return _digest(_PARAMETERS, history, epoch, result_digest)


def _digest(domain: bytes, *content: object) -> bytes:
    return blake3(domain + encode(content)).digest(HISTORY_BYTES)
