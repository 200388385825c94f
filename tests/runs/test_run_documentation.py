"""docs/protocols.md says of a run's definition and of invites what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from node.run.definition import FORMAT
from node.run.invite import KINDS, SCHEME
from node.run.mistakes import LARGEST_TEXT_BYTES
from node.run.signed import DOMAIN
from node.training.join.newer import ASK_SECONDS, MOST_ASKED
from protocols.runs.fetching import OTHERS_SECONDS
from protocols.runs.messages import LARGEST_DEFINITION_BYTES, LONGEST_RUN, PROTOCOL

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocols.md").read_text(encoding="utf-8")


def test_the_numbers_are_those_of_the_code() -> None:
    section = re.sub(r"\s+", " ", DOCUMENT.partition(f"## {PROTOCOL}\n")[2].partition("\n## ")[0])
    for statement in (
        f"run is 1 to {LONGEST_RUN} characters",
        f"at most {LARGEST_DEFINITION_BYTES:,} bytes",
        f"up to {LARGEST_TEXT_BYTES:,}",
        f"in the domain `{DOMAIN.decode()}`",
        f"gives the others {OTHERS_SECONDS:g} seconds",
        f"Every {ASK_SECONDS:g} seconds it asks up to {MOST_ASKED} of the peers",
        f"whose `format` is above {FORMAT}",
        f"**The invite** is `{SCHEME}`",
        "2, 3 and 4 for a name in " + ", ".join(f"`/{kind}`" for kind in KINDS[2:4]),
    ):
        assert statement in section, statement
