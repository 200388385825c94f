"""`with refused(Reason.REPLAY):` as the tests say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from auth.refusals import AccessRefused, Reason


@contextmanager
def refused(reason: Reason) -> Iterator[None]:
    with pytest.raises(AccessRefused) as caught:
        yield
    assert caught.value.reason is reason
    assert caught.value.exit_code == 3
    assert caught.value.what
    assert caught.value.why
    assert caught.value.advice
