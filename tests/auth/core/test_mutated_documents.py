"""A signed document with any change is not believed, and never causes another error."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from auth.errors import MalformedDocument, UntrustedDocument
from auth.revocations import Revocations
from auth.statements import open_refusal, open_time, sign_refusal, sign_time
from tests.auth.core import test_passes, test_revocations, test_statements
from tests.auth.core.mutations import bit_flips, mutated
from tests.auth.core.people import (
    ALICE,
    ALICES_TOKEN,
    AUTH,
    BOBS_TOKEN,
    HOUR,
    NOW,
    RUN,
    keyring_of,
)

PASS = test_passes.signed()
LIST = test_revocations.listed(
    test_revocations.NameEntry("github:alice", NOW, NOW + HOUR),
    test_revocations.PeerEntry(ALICE.public_key, NOW, NOW + HOUR),
    test_revocations.SerialEntry(7, NOW, NOW + HOUR),
    withdrawn=(bytes(8),),
)
TIME = sign_time(test_statements.TIME, AUTH)
REFUSAL = sign_refusal(test_statements.NO, AUTH)

DOCUMENTS = [
    pytest.param(PASS, test_passes.opened, id="pass"),
    pytest.param(LIST, lambda data: Revocations(RUN).accept(data, keyring_of()), id="list"),
    pytest.param(
        TIME, lambda data: open_time(data, keyring_of(), test_statements.NONCE), id="time"
    ),
    pytest.param(
        REFUSAL, lambda data: open_refusal(data, keyring_of(), test_statements.NONCE), id="refusal"
    ),
]

MUTATIONS = [
    pytest.param(1_000, id="short"),
    pytest.param(50_000, id="long", marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize("count", MUTATIONS)
@pytest.mark.parametrize(("original", "open_it"), DOCUMENTS)
def test_every_mutation_is_refused(
    original: bytes, open_it: Callable[[bytes], object], count: int
) -> None:
    chance = random.Random(22)
    others = [PASS, LIST, TIME, REFUSAL, ALICES_TOKEN, BOBS_TOKEN]
    open_it(original)
    for flipped in bit_flips(original):
        with pytest.raises((MalformedDocument, UntrustedDocument)):
            open_it(flipped)
    for _ in range(count):
        with pytest.raises((MalformedDocument, UntrustedDocument)):
            open_it(mutated(original, others, chance))
