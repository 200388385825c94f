"""What a moderator reads after an act: what was done, what was not, and what comes next.

For a program the answer is printed as it is, one object. For a person there is a function for each
act, in auth_view_people.py and auth_view_records.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from node.commands import auth_view_people, auth_view_records
from node.commands.auth_columns import Answer, Part, print_table
from node.commands.output import Output, as_json, printable


def show(act: str, answer: Answer, output: Output) -> None:
    """Print the answer to `potluck auth ACT`."""
    if output.json:
        print(as_json(answer), flush=True)
        return
    view = _VIEWS[act]
    shown = view(answer)
    if isinstance(shown, str):
        print(printable(shown), flush=True)
        return
    for part in shown:
        if isinstance(part, str):
            print(printable(part), flush=True)
        else:
            print_table(*part)


_VIEWS: dict[str, Callable[[Answer], str | Sequence[Part]]] = {
    "allow": auth_view_people.allowed,
    "deny": auth_view_people.ended,
    "revoke": auth_view_people.ended,
    "spread": auth_view_people.spread,
    "list": auth_view_people.listed,
    "codes-new": auth_view_records.new_code,
    "codes-list": auth_view_records.codes,
    "codes-cancel": auth_view_records.cancelled,
    "keys-list": auth_view_records.keys,
    "keys-rotate": auth_view_records.rotated,
    "keys-withdraw": auth_view_records.withdrawn,
    "audit": auth_view_records.audit,
    "audit-verify": auth_view_records.verified,
    "backup": auth_view_records.backed_up,
}
