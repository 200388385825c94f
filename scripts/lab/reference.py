"""Write docs/laboratory.md from the parsers, from the top of a checkout:

    PYTHONPATH=scripts .venv/bin/python -m lab.reference

A test fails when the page is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lab.__main__ import PROGRAMS, parser_of
from node.app.commands.reference import sections

PAGE = Path("docs/laboratory.md")

_INTRODUCTION = """\
# The laboratory

This page is written by `PYTHONPATH=scripts .venv/bin/python -m lab.reference`; change the
commands, not the page.

`scripts/bench` measures potluck on this machine, with real processes. `scripts/simulate` shows
what many nodes would do, in virtual time and with the protocols of real nodes. Both run from a
checkout; an installed potluck does not have them. Like `potluck`, they print results to stdout and
everything else to stderr, one JSON object with `--json`, and end with the exit codes of
[cli.md](cli.md).

How fast the transport is:

```sh
./scripts/bench transport --quick --only unary_ms_p50
```

How fast a thousand peers come to agree on an average when some of them fail, in groups and in
other ways:

```sh
./scripts/simulate moshpit --method all --failure-rate 0.005
```

How a training run fares whose peers die and come: whether all hold the same bits after every step,
how many steps a minute they make, how soon a newcomer is in one, and what it costs each peer in
traffic and processor time:

```sh
./scripts/simulate run --peers 4 --steps 3 --mean-life 120
```

To compare the transport, the directory, the averaging and the training with hivemind's, on the
same machine in the same minutes, see `scripts/bench-against-hivemind --help`.

To compare two versions of potluck, make a checkout of each and run the same bench in both, in turn,
at least five times. The processes share the machine with all other programs, so compare medians of
figures from the same minutes, and look at the spread.
"""


def reference() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for program in PROGRAMS:
        lines += sections(parser_of(program))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
