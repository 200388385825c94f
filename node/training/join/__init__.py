"""`potluck join`, from an invite to training.

In order: `admission` (the invite, and the pass of a closed run), `participation` (all later steps,
in order), `bootstrap` (reaching other peers, and getting the run's definition from them), `fit`
(does the run fit this machine, and how much will it use). `newer` watches for a later definition
while the peer trains.
"""

from __future__ import annotations

from protocols.faces import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from node.training.join.admission import (
        ANOTHER_HOME,
        Need,
        access_of,
        check_home,
        check_still_good,
        enrol_with_code,
        keep_invite,
        last_invite,
        other_run_before,
        own_identity,
        pass_needed,
        read_invited,
        shows_a_code,
    )
    from node.training.join.bootstrap import find_definition
    from node.training.join.fit import check_any_fits
    from node.training.join.participation import Participation, take_part
    from node.training.join.wish import ServingWish

__all__ = [
    "ANOTHER_HOME",
    "Need",
    "Participation",
    "ServingWish",
    "access_of",
    "check_any_fits",
    "check_home",
    "check_still_good",
    "enrol_with_code",
    "find_definition",
    "keep_invite",
    "last_invite",
    "other_run_before",
    "own_identity",
    "pass_needed",
    "read_invited",
    "shows_a_code",
    "take_part",
]

__getattr__ = lazily(
    __name__,
    {
        "admission": (
            "ANOTHER_HOME",
            "Need",
            "access_of",
            "check_home",
            "check_still_good",
            "enrol_with_code",
            "keep_invite",
            "last_invite",
            "other_run_before",
            "own_identity",
            "pass_needed",
            "read_invited",
            "shows_a_code",
        ),
        "bootstrap": ("find_definition",),
        "fit": ("check_any_fits",),
        "participation": ("Participation", "take_part"),
        "wish": ("ServingWish",),
    },
)
