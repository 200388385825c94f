"""One result of a check: the topic, how bad it is, what was seen, and the one thing to do."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass

from node.core.failure import failure_of

NO_ADVICE = "Report it, with the file that `potluck doctor --bundle` writes."


class FindingLevel(enum.StrEnum):
    """`potluck doctor` fails if there is an ERROR. A NOTE is worth knowing, and is no fault."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """A warning or an error always has advice: exactly one thing to do, as a sentence."""

    topic: str
    level: FindingLevel
    says: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.level in (FindingLevel.WARNING, FindingLevel.ERROR) and not self.advice:
            raise ValueError(f"a {self.level} without advice: {self.says}")

    def as_mapping(self) -> dict[str, str]:
        return {**asdict(self), "level": self.level.value}


def finding_of(
    topic: str, error: BaseException, level: FindingLevel = FindingLevel.ERROR
) -> Finding:
    """The finding for an error that has its own words for a person."""
    failure = failure_of(error)
    says = " ".join(words for words in (failure.what, failure.why) if words)
    return Finding(topic, level, says, failure.advice or NO_ADVICE)
