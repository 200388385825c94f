"""The text that a moderator reads after an act: what it did, what it did not, and what comes next.

For a program the answer is printed as it is, as one object. For a person there is a function for
each act, first those about people, then those about codes, auth keys, the audit log and backups.
Lists have one aligned line for each entry, so that `grep` and `less` work.

Names, notes and reasons were chosen by others. They pass through `printable` and into `Text`, never
into rich's markup, and no cell is longer than LONGEST_CELL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from node.app.commands.auth_moments import ago, ahead, now_ms, utc
from node.app.commands.output import Output, agreeing, as_json, counted, one_line, printable
from node.app.commands.status_view import amount

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


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; on a terminal with the states coloured."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    cells = [[short(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for number, row in enumerate(cells):
        line = Text()
        for cell, width in zip(row, widths, strict=True):
            style = "bold" if number == 0 else _COLOURS.get(cell, "")
            line.append(f"{cell:<{width}}", style=style)
            line.append("  ")
        line.rstrip()
        console.print(line, soft_wrap=True)


def short(text: str) -> str:
    """Shortened for a list."""
    text = one_line(text)
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 1] + "…"


def what_is_left(shown: int, total: int, noun: str) -> str:
    """The line below a list: how many entries there are, or how many are not shown."""
    if total > shown:
        return f"{counted(total - shown, 'more ' + noun)}: --limit {total} shows all."
    return counted(total, noun) + "."


def roles_of(answer: Answer) -> str:
    return ", ".join(answer["roles"])


def allowed(answer: Answer) -> str:
    value, change, account = answer["value"], answer["change"], answer["account"]
    if account is None:
        thing = "The peer" if answer["kind"] == "peer" else "The token"
        return f"{thing} {value} is no longer revoked: number {answer['list_number']} of the list."
    roles = roles_of(account)
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
    said = text.get(change, f"{value}: {change}; as {roles}.")
    if account["name"].startswith("code:") and change in ("was denied", "was revoked"):
        said += (
            "\nThey log in with their code once more, on the same machine; where it is lost or "
            "was cancelled, with a new one (`potluck auth codes new`)."
        )
    if not answer.get("provider_is_known", True):  # a server that was not restarted says nothing
        said += (
            f"\nBut there is no provider {account['provider']} in auth.toml: until there is, "
            "nobody can log in under that name."
        )
    return said


def ended(answer: Answer) -> str:
    """The result of `deny` and `revoke`."""
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
            f"{counted(live, 'token')} that lived {agreeing(live, 'is', 'are')} refused from now "
            f"on: number {answer['list_number']} of the list of revocations."
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
    return "\n".join([*lines, *spread_lines(answer)])


def spread(answer: Answer) -> str:
    entries = counted(answer["entries"], "entry", "entries")
    heading = (
        f"The newest list of revocations has the number {answer['list_number']}, and {entries}."
    )
    return "\n".join([heading, *spread_lines(answer)])


def spread_lines(answer: Answer) -> list[str]:
    """Whether the nodes hear of it: shown after every act that changes whom they refuse."""
    spread = answer["spread"]
    match spread["way"]:
        case "none":
            return ["Nothing has to be spread: no token is out there that still counts."]
        case "server":
            return ["Spread: the running server gives the list to every node; each asks often."]
        case "directory":
            return [
                "Spread: the list is in the swarm's directory, at "
                f"{counted(spread['replicas'], 'node')}; the others find it there."
            ]
        case "node":
            return [
                "Spread: the list was given to the node that runs on this machine; it tells the "
                "others."
            ]
        case _:
            return [
                f"NOT SPREAD: no node knows of it yet. {one_line(spread['why'])}",
                "Start the server (`potluck auth serve`), or bring the list to any node of the "
                "run: `potluck auth spread --bootstrap ADDRESS`.",
            ]


def listed(answer: Answer) -> Sequence[Part]:
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
            roles_of(account),
            ago(account["last_seen_ms"], now),
            str(account["live_tokens"]),
        )
        for account in accounts
    ]
    header = ("name", "state", "roles", "last seen", "live tokens")
    return [(header, rows), what_is_left(len(rows), answer["total"], "account")]


def _one_account(answer: Answer) -> Sequence[Part]:
    now = now_ms()
    account, tokens = answer["account"], answer["tokens"]
    facts = [
        ("name", account["name"]),
        ("state", f"{account['state']} (by {account['changed_by']}, {utc(account['changed_ms'])})"),
        ("roles", roles_of(account)),
        ("added", f"{utc(account['added_ms'])}, by {account['added_by']}"),
        ("login", _login(account)),
        ("last seen", ago(account["last_seen_ms"], now)),
        ("nodes", str(account["keys"])),
        ("note", account["note"] or "-"),
    ]
    head = "\n".join(f"{name:<11}{short(value)}" for name, value in facts)
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
    return [(header, rows), what_is_left(len(rows), answer["total"], "token")]


def _revocations(answer: Answer) -> Sequence[Part]:
    if not answer["entries"]:
        return ["Nothing is revoked."]
    rows = [
        (
            entry["kind"],
            entry["value"],
            f"until {utc(entry['forget_ms'])}" if entry["on_list"] else "not any more",
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


def new_code(answer: Answer) -> str:
    view = answer["view"]
    uses = view["uses_allowed"]
    times = "without end" if uses is None else "once" if uses == 1 else f"{uses} times"
    who = f"for {view['name']}, " if view["name"] else ""
    return (
        f"{answer.get('file') or answer['code']}\n"
        f"Code {view['code_id']}, {who}as {roles_of(view)}: it works {times}, until "
        f"{utc(view['expires_ms'])}. It is not shown again.\n"
        "Whoever has it takes part: hand it over where nobody else reads. `potluck join INVITE "
        "--code-file FILE` takes it, and `potluck login INVITE` asks for it."
    )


def codes(answer: Answer) -> Sequence[Part]:
    if not answer["codes"]:
        return ["No code works now. `potluck auth codes new` makes one."]
    now = now_ms()
    rows = [
        (
            code["code_id"],
            code["state"],
            code["name"] or "anybody",
            roles_of(code),
            f"{code['uses']} of {code['uses_allowed'] or 'any number'}",
            "-" if code["expires_ms"] is None else ahead(code["expires_ms"], now),
            code["note"],
        )
        for code in answer["codes"]
    ]
    header = ("code", "state", "for", "roles", "used", "life", "note")
    return [(header, rows), what_is_left(len(rows), answer["total"], "code")]


def cancelled(answer: Answer) -> str:
    return (
        f"Code {answer['code_id']} works no more; it was used {counted(answer['uses'], 'time')}. "
        "Who came in with it stays in: `potluck auth audit --act joined` shows them."
    )


def keys(answer: Answer) -> Sequence[Part]:
    rows = [
        (
            key["key_id"],
            key["state"] if key["has_file"] or key["state"] == "withdrawn" else "NO FILE",
            utc(key["from_ms"]) if key["from_ms"] else "the beginning",
            utc(key["withdrawn_ms"]) if key["withdrawn_ms"] is not None else "",
            key["fingerprint"],
        )
        for key in answer["keys"]
    ]
    return [(("key", "state", "signs from", "withdrawn", "fingerprint"), rows)]


def rotated(answer: Answer) -> str:
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


def withdrawn(answer: Answer) -> str:
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
            "Send new invites (`potluck auth invite`): who has only one with the fingerprint "
            f"{gone['fingerprint']} cannot be protected from whoever else has that key.",
            *spread_lines(answer),
        ]
    )


def audit(answer: Answer) -> Sequence[Part]:
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


def verified(answer: Answer) -> str:
    if not answer["sound"]:
        return (
            f"THE AUDIT LOG IS NOT AS IT WAS WRITTEN. {answer['what']}\n"
            f"{counted(answer['rows'], 'row')} before that {agreeing(answer['rows'], 'is', 'are')} "
            "sound. Somebody has changed the database, or the disk has: keep a copy of the folder "
            "as it is, and compare with the last backup."
        )
    return (
        f"The audit log is whole: {counted(answer['rows'], 'row')}. {answer['what']}\n"
        f"{answer['head']}\n"
        "Keep that line elsewhere: `potluck auth audit --verify --head LINE` then shows also "
        "whether everything was written anew."
    )


def backed_up(answer: Answer) -> str:
    return (
        f"{answer['path']}\n"
        f"{counted(answer['files'], 'file')}, {amount(answer['bytes'])}: the database and the auth "
        "keys. Whoever has this folder can sign tokens: keep it where only you reach it.\n"
        f"audit log: {answer['audit_head']}"
    )


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
    "allow": allowed,
    "deny": ended,
    "revoke": ended,
    "spread": spread,
    "list": listed,
    "codes-new": new_code,
    "codes-list": codes,
    "codes-cancel": cancelled,
    "keys-list": keys,
    "keys-rotate": rotated,
    "keys-withdraw": withdrawn,
    "audit": audit,
    "audit-verify": verified,
    "backup": backed_up,
}
