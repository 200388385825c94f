"""Login links of the page of a closed run: who gets in, how often, and for how long."""

from __future__ import annotations

import pytest

from node.app.page.login import LINK_SECONDS, MOST_KEYS, SESSION_SECONDS, PageLogins


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_good_once_and_its_cookie_for_hours() -> None:
    clock = Clock()
    logins = PageLogins(clock)
    key = logins.new_key()
    cookie = logins.exchange(key)
    assert cookie is not None
    assert logins.exchange(key) is None
    clock.now += SESSION_SECONDS - 1
    assert logins.knows(cookie)
    clock.now += 2
    assert not logins.knows(cookie)


def test_a_key_that_nobody_uses_is_soon_worth_nothing() -> None:
    clock = Clock()
    logins = PageLogins(clock)
    key = logins.new_key()
    clock.now += LINK_SECONDS
    assert logins.exchange(key) is None


def test_only_the_newest_keys_are_kept() -> None:
    logins = PageLogins(Clock())
    keys = [logins.new_key() for _ in range(MOST_KEYS + 1)]
    assert len(set(keys)) == len(keys)
    assert [logins.exchange(one) is not None for one in keys] == [False] + [True] * MOST_KEYS


@pytest.mark.parametrize("key", ["", "x", "é", "a" * 10_000])
def test_what_is_no_key_opens_nothing(key: str) -> None:
    logins = PageLogins(Clock())
    logins.new_key()
    assert logins.exchange(key) is None


def test_a_cookie_that_somebody_changed_or_another_process_gave_is_none() -> None:
    clock = Clock()
    logins, other = PageLogins(clock), PageLogins(clock)
    cookie = logins.exchange(logins.new_key())
    assert cookie is not None
    until, _, proof = cookie.partition(".")
    for made_up in ("", ".", "é", until, f"9{cookie}", f"{until}.{proof[::-1]}", f"inf.{proof}"):
        assert not logins.knows(made_up)
    assert not other.knows(cookie)
    assert logins.cookie_name != other.cookie_name
