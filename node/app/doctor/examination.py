"""Runs checks side by side, each with a deadline of its own.

    findings = await examine(surroundings, CHECKS)

A check never ends the examination. If it fails, or does not end in time, that is a finding, too.
The traceback goes to the log.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from node.app.doctor.finding import NO_ADVICE, Finding, FindingLevel, finding_of
from node.app.doctor.surroundings import Surroundings
from protocols.errors import PotluckError

# All checks end within ten seconds on a dead network, with the start of the program.
CHECK_SECONDS = 8.0

log = logging.getLogger("potluck.doctor")

Look = Callable[[Surroundings], Awaitable[Sequence[Finding]]]


@dataclass(frozen=True)
class DoctorCheck:
    """`look` is cancelled after `seconds`. It may also return findings of other topics."""

    topic: str
    look: Look
    seconds: float = CHECK_SECONDS


async def examine(surroundings: Surroundings, checks: Sequence[DoctorCheck]) -> list[Finding]:
    """The findings of all checks, by topic, in the order of the checks."""
    found: list[Sequence[Finding]] = [()] * len(checks)

    async def look(place: int, check: DoctorCheck) -> None:
        found[place] = await _looked(surroundings, check)

    async with trio.open_nursery() as nursery:
        for place, check in enumerate(checks):
            nursery.start_soon(look, place, check)
    findings = [finding for several in found for finding in several]
    topics = dict.fromkeys(
        topic
        for check, several in zip(checks, found, strict=True)
        for topic in (check.topic, *(finding.topic for finding in several))
    )
    return [finding for topic in topics for finding in findings if finding.topic == topic]


async def _looked(surroundings: Surroundings, check: DoctorCheck) -> Sequence[Finding]:
    try:
        with trio.fail_after(check.seconds):
            return await check.look(surroundings)
    except trio.TooSlowError:
        says = f"This was not examined: it took more than {check.seconds:g} seconds."
    except (OSError, PotluckError) as error:
        log.debug("the check of %s failed", check.topic, exc_info=error)
        return [finding_of(check.topic, error)]
    except Exception as error:  # a bug in one check, in spite of which the others go on
        log.error("the check of %s failed", check.topic, exc_info=error)
        says = f"This was not examined: {type(error).__name__}: {error}."
    return [Finding(check.topic, FindingLevel.ERROR, says, NO_ADVICE)]
