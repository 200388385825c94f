"""Computes how many peers should average together: DeDLOC's appendix C, from observed failures.

All n peers in one group need one round, and everybody's bad luck breaks it. Groups of m need
⌈log_m n⌉ rounds, and only the luck of m counts. With a share p of peers failing in a round, a round
of m succeeds with probability (1 - p)^m, so it takes (1 - p)^-m attempts in the mean, and a peer

    attempts(m) = ⌈log_m n⌉ · (1 - p)^-m

until it has the average of all. The m that makes this least is the group size. Reliable peers get
m = n (as in all experiments of the paper), very unreliable ones groups of two.

Easy to get wrong: of all m that need the same number of rounds the smallest is best, so only one m
for each number of rounds is looked at, and ⌈log_m n⌉ is counted in whole numbers (the logarithms
of 1000 to the base 10 divide to 2.9999999999999996).
"""

from __future__ import annotations

import math

from protocols.errors import ProtocolMisuse

# The prior, before anything was observed: one failure in 200, the rate of Moshpit's figures.
PRIOR_FAILURES = 1.0
PRIOR_ROUNDS = 200.0


def failure_rate(failures: int, took_part: int) -> float:
    """The share of peers that fail in a round, from this many failures in `took_part` cases.

    Counted per peer and round: a round of 16 in which one was lost is 1 of 16. The more was
    observed, the less the prior counts; it is never 0 and never 1.
    """
    if not 0 <= failures <= took_part:
        raise ProtocolMisuse(f"{failures} failures of {took_part} cannot have been observed.")
    return (failures + PRIOR_FAILURES) / (took_part + PRIOR_ROUNDS)


def rounds_needed(peers: int, group_size: int) -> int:
    """⌈log_m n⌉: after this many rounds in groups of m, all n peers have their average."""
    if peers < 1 or group_size < 2:
        raise ProtocolMisuse("Groups of at least two of at least one peer can average.")
    rounds, reached = 0, 1
    while reached < peers:
        rounds, reached = rounds + 1, reached * group_size
    return rounds


def best_group_size(peers: int, rate: float, most: int) -> int:
    """The group size with the fewest expected attempts, at least 2 and at most `most`.

    The smallest of several that are equally good; 1 for a peer that is alone.
    """
    if peers < 1 or most < 2:
        raise ProtocolMisuse("There is no group size for fewer than 1 peer or for groups below 2.")
    if peers == 1:
        return 1
    cost = -math.log1p(-_checked(rate))
    sizes = [size for size in _smallest_sizes(peers) if size <= most]
    # In logarithms, because (1 - p)^-m overflows floats for group sizes that are still reasonable.
    return min(sizes, key=lambda m: (math.log(rounds_needed(peers, m)) + m * cost, m))


def _smallest_sizes(peers: int) -> list[int]:
    """The smallest group sizes that need 1, 2, … rounds."""
    sizes: list[int] = []
    rounds = 1
    while not sizes or sizes[-1] > 2:
        size = max(2, math.ceil(peers ** (1.0 / rounds)) - 1)  # a float's root may be off by one
        while size**rounds < peers:
            size += 1
        sizes.append(size)
        rounds += 1
    return sizes


def _checked(rate: float) -> float:
    if not 0 <= rate < 1:
        raise ProtocolMisuse(f"{rate} is no failure rate: it is at least 0 and below 1.")
    return rate
