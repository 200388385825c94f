"""Shards come in another order for each peer and pass; the order never changes by itself."""

from __future__ import annotations

from collections import Counter

from models.data.order import derived_seed, shard_order


def test_an_order_has_every_shard_once() -> None:
    assert sorted(shard_order(100, 7, 0)) == list(range(100))
    assert shard_order(0, 7, 0) == ()


def test_peers_and_passes_have_different_orders() -> None:
    orders = {
        shard_order(20, derived_seed(1, peer), passing)
        for peer in ("alice", "bob", "carol")
        for passing in range(3)
    }
    assert len(orders) == 9


def test_the_order_is_the_same_on_every_machine_for_ever() -> None:
    assert derived_seed(1, "alice") == 4914232371697092411
    assert shard_order(8, 7, 0) == (6, 0, 4, 2, 1, 3, 5, 7)


def test_similar_seeds_give_different_orders() -> None:
    assert len({derived_seed(1, "2"), derived_seed("1", 2), derived_seed(1, 2)}) == 3
    assert derived_seed("a", "bc") != derived_seed("ab", "c")


def test_every_shard_is_equally_often_the_first() -> None:
    firsts = Counter(shard_order(8, derived_seed(1, peer), 0)[0] for peer in range(4_000))
    assert all(abs(count - 500) < 100 for count in firsts.values()), firsts  # 4.8 deviations
