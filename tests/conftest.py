"""The same conditions for every test, however the tests are started.

A shell without job control starts its background commands with SIGINT ignored, and a process that
ignores a signal hands that on to all its children. The tests of Ctrl-C would then wait for
programs that rightly ignore it. The same goes for SIGHUP if nohup started the tests.

How hypothesis looks for examples is a profile, and scripts/test names it. `default` is the same
examples each time, so that nobody's change fails by what another's left undetected; `fast` is fewer
of them, where a test does not say how many; `soak` is other ones each time. How long an example
takes is the machine's affair: no profile has a limit for it.

scripts/test shares a whole run among workers (pytest-xdist). The tests of the demo have one mark,
`xdist_group`, so that one worker gets them, and plays it once. Programs of ours that the tests
start are forked from a process with the libraries (tests/forge.py), unless TESTS_FORGE is "no".

Modules that were imported before the tests begin are no garbage, so the collector skips them, and
does not run while they are imported. The peers of a simulated swarm are one process and check the
same signatures, which takes a tenth of their time, so a signature that was checked is known.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, settings

from auth.keys import SIGNATURE_BYTES, VerifyingKey
from tests import forge
from tests.demonstrated import Played, play

ROOT = Path(__file__).parent.parent
FAST_EXAMPLES = 25
TESTS_UNTIL_SET_ASIDE = 100
OBJECTS_UNTIL_COLLECTED = 10_000  # Python's 700 cost simulated swarms a twentieth of their time
SIGNATURES_KNOWN = 100_000

_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _PATIENT, derandomize=True)
settings.register_profile("fast", _PATIENT, derandomize=True, max_examples=FAST_EXAMPLES)
settings.register_profile("soak", _PATIENT, derandomize=False)


@pytest.fixture(scope="session")
def the_demo(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """`potluck demo`, played once by the worker that has its tests."""
    return play(tmp_path_factory.mktemp("demo"))


@pytest.fixture
def really_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of this test start as a user's do, because their start is the point."""
    monkeypatch.setattr(subprocess, "Popen", forge.really_started)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()  # it would take a second of each worker
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    _set_aside()


_ended = count(1)


def pytest_runtest_logfinish() -> None:
    if next(_ended) % TESTS_UNTIL_SET_ASIDE == 0:  # of their reports, and of what was imported
        _set_aside()


def _set_aside() -> None:
    """No later collection looks at the objects that there are. They are hundreds of thousands: it
    would take half a second."""
    gc.collect()
    gc.freeze()


gc.set_threshold(OBJECTS_UNTIL_COLLECTED, *gc.get_threshold()[1:])

_verify = VerifyingKey.verify


_known: dict[bytes, bool] = {}  # by digest: the collector looks at no such keys


def _verified_once(key: VerifyingKey, domain: bytes, signature: bytes, message: bytes) -> bool:
    if not type(signature) is type(message) is bytes or len(signature) != SIGNATURE_BYTES:
        return _verify(key, domain, signature, message)
    signed = key.public_key + signature + domain + b"\0" + message
    digest = blake3(signed).digest()
    known = _known.get(digest)
    if known is None:
        if len(_known) >= SIGNATURES_KNOWN:
            _known.clear()
        known = _known[digest] = _verify(key, domain, signature, message)
    return known


VerifyingKey.verify = _verified_once  # type: ignore[assignment, method-assign]


# For the children that are of the laboratory; pytest itself has the folder from pyproject.toml.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])

# Tests do not talk to the router of the machine that they run on.
os.environ["POTLUCK_NETWORK_MAP_PORT"] = "false"

# Nor to a hub. Its library reads this when it is imported, by whichever test comes first.
os.environ["HF_HUB_OFFLINE"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

forge.take_over()
