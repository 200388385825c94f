"""Lines that no signal cuts in two."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from node.core.stopping_signals import undisturbed

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that were delivered, in this test alone."""
    heard: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(number)

    before = {number: signal.signal(number, hear) for number in SIGNALS}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_comes_after_the_block(number: signal.Signals, received: list[int]) -> None:
    with undisturbed():
        signal.raise_signal(number)
        assert received == []
    assert received == [number]


def test_a_signal_comes_after_the_outermost_block(received: list[int]) -> None:
    with undisturbed():
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
        assert received == []
    assert received == [signal.SIGINT]


def test_an_error_gives_signals_back(received: list[int]) -> None:
    with pytest.raises(KeyError), undisturbed():
        raise KeyError
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]
