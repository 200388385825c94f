"""Credit: each peer keeps records of its rounds, and the records are added up.

`service` runs it at a node that trains. The rest, in the order of use: `book` (this peer's own
pages), `shelf` (pages on disk, and fetching others'), `tally` (adding up records, some of which may
lie), `sums` (a keeper's sums, and checking them).
"""

from node.training.credit.service import Board, CreditTerms, Rank, open_credit

__all__ = [
    "Board",
    "CreditTerms",
    "Rank",
    "open_credit",
]
