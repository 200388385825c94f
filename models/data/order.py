"""The order in which a peer reads the shards: different for each peer and each pass.

In the paper every participant iterates over the shards in a random order of its own, so that peers
who begin together do not all train on the same shard (003, section 3.3). The order is a function of
the run's seed, the peer, the source and the pass, so it need not be stored.

It is made by sorting hashes, not by a library's random generator: a position that was saved with
one version of Python or numpy must mean the same with the next.
"""

from __future__ import annotations

import hashlib


def derived_seed(*parts: int | str) -> int:
    """A number of 64 bits that depends on all the parts, and on their order."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def shard_order(count: int, seed: int, passing: int) -> tuple[int, ...]:
    """The numbers below `count`, shuffled for this seed (of one peer and source) and pass."""
    key = derived_seed(seed, passing).to_bytes(8, "big")

    def rank(shard: int) -> bytes:
        return hashlib.blake2b(shard.to_bytes(8, "big"), digest_size=16, key=key).digest()

    return tuple(sorted(range(count), key=rank))
