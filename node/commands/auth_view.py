"""What a moderator reads after an act: what was done, what was not, and what comes next.

For a program the answer is printed as it is. Lists are one line for each entry, aligned, so that
`grep` and `less` work; on a terminal the states have colours.

Easy to get wrong: names, notes and reasons were chosen by others. They pass through `printable`
and into `Text`, never into rich's markup, and no line of a list can be longer than one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from node.commands.auth_moments import ago, ahead, now_ms, utc
from node.commands.output import Output, printable
from node.commands.status_view import amount

Answer = Mapping[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # the header, and a row for each entry
Part = str | Table

# A cell of a list: a name, a peer id (52), a fingerprint; reasons may have hundreds.
LONGEST_CELL = 80
_COLOURS = {
    "allowed": "green",
    "denied": "yellow",
    "revoked": "red",
    "withdrawn": "red",
    "NO FILE": "red",
    "signs now": "green",
    "refused": "yellow",
}


def show(act: str, answer: Answer, output: Output) -> None:
    """Print the answer to `potluck auth ACT`."""
    if output.json:
        print(json.dumps(answer), flush=True)
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
            _print_table(*part)


def _allowed(answer: Answer) -> str:
    value, change, account = answer["value"], answer["change"], answer["account"]
    if account is None:
        thing = "The peer" if answer["kind"] == "peer" else "The token"
        return f"{thing} {value} is no longer revoked: number {answer['list_number']} of the list."
    roles = _roles(account)
    again = f"{value} may take part again, as {roles}: with a new login; the tokens from before "
    text = {
        "unchanged": f"{value} was allowed already, as {roles}: nothing is changed.",
        "new": f"{value} may take part now, as {roles}.\n"
        "To get in: `potluck login INVITE`; `potluck auth invite` prints the invite.",
        "roles": f"{value} is {roles} from the next renewal on.",
        "rebound": f"{value} belongs to nobody now: the next one who logs in under it has it. Who "
        f"had it is out: number {answer['list_number']} of the list.",
        "was denied": again + "stay dead.",
        "was revoked": again + "stay dead.",
    }
    return text.get(change, f"{value}: {change}; as {roles}.")


def _ended(answer: Answer) -> str:
    """Of `deny` and `revoke`."""
    value, live = answer["value"], answer["live_tokens"]
    if answer["change"] == "unchanged":
        return f"{value} was denied already: nothing is changed."
    what = {"peer": "The peer ", "serial": "The token "}.get(answer["kind"], "") + value
    lines = [
        f"{what} is off the list of those who may take part."
        if answer["change"] == "denied"
        else f"{what} is revoked."
    ]
    if live:
        lines.append(
            f"{_count(live, 'token')} that lived {_verb(live, 'is', 'are')} refused from now on: "
            f"number {answer['list_number']} of the list of revocations."
        )
    else:
        lines.append("No token that lives is concerned.")
    lines.append(
        {
            "peer": "Nothing is issued to that key any more; its owner can log in with a new one, "
            "unless revoked by name.",
            "serial": "Only that token is out: its node gets another one by renewing. To keep "
            "somebody out, revoke the name or the peer.",
        }.get(answer["kind"], "No login and no renewal any more.")
    )
    lines.append(f"`potluck auth allow {value}` takes it back.")
    return "\n".join([*lines, *_spread_lines(answer)])


def _spread(answer: Answer) -> str:
    entries = _count(answer["entries"], "entry", "entries")
    heading = (
        f"The newest list of revocations has the number {answer['list_number']}, and {entries}."
    )
    return "\n".join([heading, *_spread_lines(answer)])


def _spread_lines(answer: Answer) -> list[str]:
    """Whether the nodes hear of it: said after every act that changes whom they refuse."""
    spread = answer["spread"]
    match spread["way"]:
        case "none":
            return ["Nothing has to be spread: no token is out there that still counts."]
        case "server":
            return ["Spread: the running server gives the list to every node; each asks often."]
        case "directory":
            return [
                "Spread: no server runs, so the list was stored in the swarm's directory, at "
                f"{_count(spread['replicas'], 'node')}; the others find it there."
            ]
        case "node":
            return [
                "Spread: no server runs, so the list was given to the node that runs on this "
                "machine; it tells the others."
            ]
        case _:
            return [
                f"NOT SPREAD: no node knows of it yet. {_one_line(spread['why'])}",
                "Start the server (`potluck auth serve`), or bring the list to any node of the "
                "run: `potluck auth spread --bootstrap ADDRESS`.",
            ]


def _listed(answer: Answer) -> Sequence[Part]:
    if "account" in answer:
        return _one_account(answer)
    if "entries" in answer:
        return _revocations(answer)
    if "tokens" in answer:
        return _tokens(answer, whose=True) if answer["tokens"] else ["No token lives."]
    now = now_ms()
    accounts = answer["accounts"]
    if not accounts:
        return ["Nobody like that is on the list. `potluck auth allow NAME` lets somebody in."]
    rows = [
        (
            account["name"],
            account["state"],
            _roles(account),
            ago(account["last_seen_ms"], now),
            str(account["live_tokens"]),
        )
        for account in accounts
    ]
    header = ("name", "state", "roles", "last seen", "live tokens")
    return [(header, rows), _rest(len(rows), answer["total"], "account")]


def _one_account(answer: Answer) -> Sequence[Part]:
    now = now_ms()
    account, tokens = answer["account"], answer["tokens"]
    facts = [
        ("name", account["name"]),
        ("state", f"{account['state']} (by {account['changed_by']}, {utc(account['changed_ms'])})"),
        ("roles", _roles(account)),
        ("added", f"{utc(account['added_ms'])}, by {account['added_by']}"),
        ("login", _login(account)),
        ("last seen", ago(account["last_seen_ms"], now)),
        ("nodes", str(account["keys"])),
        ("note", account["note"] or "-"),
    ]
    head = "\n".join(f"{name:<11}{_cell(value)}" for name, value in facts)
    if not tokens:
        return [head, "No token of theirs lives."]
    return [head, *_tokens(answer, whose=False)]


def _login(account: Answer) -> str:
    if account["bound"]:
        return "bound to whoever logged in with it first"
    return "not yet" if account["last_seen_ms"] is None else "by enrolment code"


def _tokens(answer: Answer, *, whose: bool) -> Sequence[Part]:
    now = now_ms()
    rows = []
    for one in answer["tokens"]:
        life = "revoked" if one["revoked"] else ahead(one["expires_ms"], now)
        name = (one["name"],) if whose else ()
        rows.append((str(one["serial"]), *name, life, utc(one["issued_ms"]), one["peer"]))
    header = ("token", *(("name",) if whose else ()), "life", "issued", "peer")
    return [(header, rows), _rest(len(rows), answer["total"], "token")]


def _revocations(answer: Answer) -> Sequence[Part]:
    if not answer["entries"]:
        return ["Nothing is revoked."]
    rows = [
        (
            entry["kind"],
            entry["value"],
            f"until {utc(entry['forget_ms'])}" if entry["on_list"] else "no longer needed",
            f"by {entry['revoked_by']}",
            utc(entry["revoked_ms"]),
            entry["reason"],
        )
        for entry in answer["entries"]
    ]
    return [
        (("what", "", "nodes are told", "", "since", "reason"), rows),
        f"Number {answer['list_number']} of the list.",
    ]


def _new_code(answer: Answer) -> str:
    view = answer["view"]
    uses = view["uses_allowed"]
    times = "without end" if uses is None else "once" if uses == 1 else f"{uses} times"
    who = f"for {view['name']}, " if view["name"] else ""
    return (
        f"{answer['code']}\n"
        f"Code {view['code_id']}, {who}as {_roles(view)}: it works {times}, until "
        f"{utc(view['expires_ms'])}. It is not shown again.\n"
        "Whoever has it takes part: hand it over where nobody else reads. `potluck login INVITE` "
        "asks for it."
    )


def _codes(answer: Answer) -> Sequence[Part]:
    if not answer["codes"]:
        return ["No code works now. `potluck auth codes new` makes one."]
    now = now_ms()
    rows = [
        (
            code["code_id"],
            code["state"],
            code["name"] or "anybody",
            _roles(code),
            f"{code['uses']} of {code['uses_allowed'] or 'any number'}",
            "-" if code["expires_ms"] is None else ahead(code["expires_ms"], now),
            code["note"],
        )
        for code in answer["codes"]
    ]
    header = ("code", "state", "for", "roles", "used", "life", "note")
    return [(header, rows), _rest(len(rows), answer["total"], "code")]


def _cancelled(answer: Answer) -> str:
    return (
        f"Code {answer['code_id']} works no more; it was used {_count(answer['uses'], 'time')}. "
        "Who came in with it stays in: `potluck auth audit --act joined` shows them."
    )


def _keys(answer: Answer) -> Sequence[Part]:
    rows = [
        (
            key["key_id"],
            key["state"] if key["has_file"] or key["state"] == "withdrawn" else "NO FILE",
            utc(key["from_ms"]),
            utc(key["withdrawn_ms"]) if key["withdrawn_ms"] is not None else "",
            key["fingerprint"],
        )
        for key in answer["keys"]
    ]
    return [(("key", "state", "signs from", "withdrawn", "fingerprint"), rows)]


def _rotated(answer: Answer) -> str:
    new, old = answer["new"], answer["old"]
    return (
        f"Key {new['key_id']} is made, endorsed by {new['endorsed_by']}. It signs from "
        f"{utc(answer['signs_from_ms'])} on; until then {old['key_id']} does, while the nodes hear "
        "of the new one.\n"
        "Nobody has to do anything: what the old key signed counts until it expires, and invites "
        "that are out go on working.\n"
        f"fingerprint: {new['fingerprint']}\n"
        "Make a backup now (`potluck auth backup`): the last one does not have this key."
    )


def _withdrawn(answer: Answer) -> str:
    gone, new = answer["withdrawn"], answer["new"]
    lines = [
        f"Key {gone['key_id']} is withdrawn: number {answer['list_number']} of the list of "
        "revocations. Nothing that it signed counts any more."
    ]
    if new is not None:
        lines.append(
            f"It was the one in use: {new['key_id']} is made, and signs from now on. Make a backup "
            "(`potluck auth backup`)."
        )
    return "\n".join(
        [
            *lines,
            "Nodes that are still allowed get new tokens from the server by themselves."
            if answer["spread"]["way"] == "server"
            else "START THE SERVER NOW: until it hands out new tokens, the nodes that have heard "
            "of this trust nobody.",
            f"Invites that carry the fingerprint {gone['fingerprint']} no longer work: send new "
            "ones (`potluck auth invite`).",
            *_spread_lines(answer),
        ]
    )


def _audit(answer: Answer) -> Sequence[Part]:
    if not answer["rows"]:
        return ["Nothing like that is in the audit log."]
    rows = [
        (
            utc(row["at_ms"]),
            row["act"],
            row["name"] or row["peer"] or "-",
            f"by {row['actor']}",
            "; ".join(part for part in (row["reason"], row["detail"]) if part),
        )
        for row in answer["rows"]
    ]
    shown: list[Part] = [(("when", "what", "who", "", "why"), rows)]
    if answer["more"]:
        shown.append("There are older ones: --limit, --since, --name and --act choose.")
    return shown


def _verified(answer: Answer) -> str:
    if not answer["sound"]:
        return (
            f"THE AUDIT LOG IS NOT AS IT WAS WRITTEN. {answer['what']}\n"
            f"{_count(answer['rows'], 'row')} before that {_verb(answer['rows'], 'is', 'are')} "
            "sound. Somebody has changed the database, or the disk has: keep a copy of the folder "
            "as it is, and compare with the last backup."
        )
    return (
        f"The audit log is whole: {_count(answer['rows'], 'row')}. {answer['what']}\n"
        f"{answer['head']}\n"
        "Keep that line elsewhere: `potluck auth audit --verify --head LINE` then shows also "
        "whether everything was written anew."
    )


def _backed_up(answer: Answer) -> str:
    return (
        f"{answer['path']}\n"
        f"{_count(answer['files'], 'file')}, {amount(answer['bytes'])}: the database and the auth "
        "keys. Whoever has this folder can sign tokens: keep it where only you reach it.\n"
        f"audit log: {answer['audit_head']}"
    )


_VIEWS: dict[str, Callable[[Answer], str | Sequence[Part]]] = {
    "allow": _allowed,
    "deny": _ended,
    "revoke": _ended,
    "spread": _spread,
    "list": _listed,
    "codes-new": _new_code,
    "codes-list": _codes,
    "codes-cancel": _cancelled,
    "keys-list": _keys,
    "keys-rotate": _rotated,
    "keys-withdraw": _withdrawn,
    "audit": _audit,
    "audit-verify": _verified,
    "backup": _backed_up,
}


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; on a terminal with the states coloured."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    cells = [[_cell(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for number, row in enumerate(cells):
        line = Text()
        for cell, width in zip(row, widths, strict=True):
            style = "bold" if number == 0 else _COLOURS.get(cell, "")
            line.append(f"{cell:<{width}}", style=style)
            line.append("  ")
        line.rstrip()
        console.print(line, soft_wrap=True)


def _cell(text: str) -> str:
    text = _one_line(text)
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 1] + "…"


def _one_line(text: str) -> str:
    return printable(text.replace("\n", " "))


def _rest(shown: int, total: int, noun: str) -> str:
    if total > shown:
        return f"{_count(total - shown, 'more ' + noun)}: --limit {total} shows all."
    return _count(total, noun) + "."


def _roles(answer: Answer) -> str:
    return ", ".join(answer["roles"])


def _count(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _verb(count: int, one: str, many: str) -> str:
    return one if count == 1 else many
