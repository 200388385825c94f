"""The laboratory: it measures potluck, and simulates many nodes of it.

`scripts/bench KIND`, `scripts/simulate KIND` and `scripts/reproduce` run it from a checkout. An
installed potluck does not have it, and the product does not import it.
"""

from collections.abc import Callable

NOTHING_MEASURED = "Stopped before the end: nothing is measured."  # by a signal

Talk = Callable[[str], None]
"""Says a line to the person at the terminal."""
