"""A mixture of experts that are spread over many computers (Learning@home, DMoE).

`grid` names the experts.
"""

from protocols.experts.grid import Grid, Uid, WrongUid, parse_uid

__all__ = ["Grid", "Uid", "WrongUid", "parse_uid"]
