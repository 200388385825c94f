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

from node.app.cli.output import Output, agreeing, as_json, counted, one_line, printable
from node.app.views.auth_moments import ago, ahead, now_ms, utc
from node.app.views.status_view import amount

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
        return f"{thing} {value} is no longer revoked (list number {answer['list_number']})."
    roles = roles_of(account)
    again = f"{value} may take part again, as {roles}, with a new login; earlier tokens "
    text = {
        "unchanged": f"{value} was allowed already, as {roles}: nothing changed.",
        "new": f"{value} may take part now, as {roles}.\n"
        "To log in: `potluck login INVITE`; `potluck auth invite` prints the invite.",
        "roles": f"{value} is {roles} from the next renewal on.",
        "rebound": f"{value} belongs to nobody now: the next person who logs in under it gets it. "
        f"The previous owner is revoked (list number {answer['list_number']}).",
        "was denied": again + "stay invalid.",
        "was revoked": again + "stay invalid.",
    }
    said = text.get(change, f"{value}: {change}; as {roles}.")
    if account["name"].startswith("code:") and change in ("was denied", "was revoked"):
        said += (
            "\n"
            "They log in with their code again, on the same machine; if it is lost or cancelled, "
            "with a new one (`potluck auth codes new`)."
        )
    if not answer.get("provider_is_known", True):  # a server that was not restarted says nothing
        said += (
            "\n"
            f"There is no provider {account['provider']} in auth.toml yet, so nobody can log in "
            "under that name."
        )
    if "spread" in answer:  # the previous owner is out
        said = "\n".join([said, *spread_lines(answer)])
    return said


def ended(answer: Answer) -> str:
    """The result of `deny` and `revoke`."""
    value, live = answer["value"], answer["live_tokens"]
    warning = []
    code = answer.get("open_code")  # a server that was not restarted says nothing
    if code:
        warning.append(
            f"CODE {code} STILL WORKS: if this is the code they used, they can come back under a "
            f"new name, and so can anyone else who has it. `potluck auth codes cancel {code}` ends "
            "that."
        )
    if answer["change"] == "unchanged":
        return "\n".join([f"{value} was denied already: nothing changed.", *warning])
    what = {"peer": "The peer ", "serial": "The token "}.get(answer["kind"], "") + value
    lines = [
        f"{what} is off the list of allowed names."
        if answer["change"] == "denied"
        else f"{what} is revoked."
    ]
    if live:
        lines.append(
            f"{counted(live, 'token')} {agreeing(live, 'is', 'are')} refused from now on (list "
            f"number {answer['list_number']})."
        )
    else:
        lines.append("No valid token is affected.")
    lines.append(
        {
            "peer": "That key gets no more tokens; its owner can log in with a new key, unless "
            "revoked by name.",
            "serial": "Only that token is refused: its node gets another one by renewing. To keep "
            "a person out, revoke the name or the peer.",
        }.get(answer["kind"], "Logins and renewals are refused.")
    )
    lines.append(f"`potluck auth allow {value}` takes it back.")
    return "\n".join([*lines, *warning, *spread_lines(answer)])


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
            return ["There is nothing to spread: it affects no valid token."]
        case "server":
            return ["Spread: the nodes get the list from the running server, which they ask often."]
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
                f"NOT SPREAD: no node knows the list yet. {one_line(spread['why'])}",
                "Start the server (`potluck auth serve`), or give the list to any node of the run: "
                "`potluck auth spread --bootstrap ADDRESS`.",
            ]


def listed(answer: Answer) -> Sequence[Part]:
    if "account" in answer:
        return _one_account(answer)
    if "entries" in answer:
        return _revocations(answer)
    if "tokens" in answer:
        return _tokens(answer, whose=True) if answer["tokens"] else ["There is no valid token."]
    now = now_ms()
    accounts = answer["accounts"]
    if not accounts:
        return ["Nobody on the list matches. `potluck auth allow NAME` lets a person in."]
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
        return [head, "They have no valid token."]
    return [head, *_tokens(answer, whose=False)]


def _login(account: Answer) -> str:
    if account["bound"]:
        return "bound to the first person who logs in with it"
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
        "Anyone who has it can take part: send it privately. `potluck join INVITE --code-file "
        "FILE` takes it, and `potluck login INVITE` asks for it."
    )


def codes(answer: Answer) -> Sequence[Part]:
    if not answer["codes"]:
        return ["There is no valid code. `potluck auth codes new` makes one."]
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
        f"Code {answer['code_id']} is invalid now; it was used {counted(answer['uses'], 'time')}. "
        "People who came in with it stay in: `potluck auth audit --act joined` shows them."
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
    if new["state"] == "signs now":
        return (
            f"Key {new['key_id']} is here again, and signs from now on: nodes that know it accept "
            "this server's revocations again.\n"
            "If another key came after it, give that one as well, or once more if it is here "
            "already: the newest has to be the last.\n"
            "If a key was withdrawn since the backup, it counts again: once the newest key is "
            "here, withdraw it again (`potluck auth keys withdraw KEY`).\n"
            "Whoever was revoked since the backup, and is not revoked here again, can come back. "
            "Then make a new backup (`potluck auth backup`)."
        )
    return (
        f"Key {new['key_id']} is made, endorsed by {new['endorsed_by']}. It signs from "
        f"{utc(answer['signs_from_ms'])} on; until then {old['key_id']} signs, while the nodes "
        "hear of the new one.\n"
        "Nobody has to do anything: the old key's signatures are valid until they expire, and "
        "earlier invites still work.\n"
        f"fingerprint: {new['fingerprint']}\n"
        "Make a backup now (`potluck auth backup`): the last one does not contain this key."
    )


def withdrawn(answer: Answer) -> str:
    gone, new = answer["withdrawn"], answer["new"]
    lines = [
        f"Key {gone['key_id']} is withdrawn (list number {answer['list_number']}). Everything that "
        "it has signed is invalid."
    ]
    if new is not None:
        lines.append(
            f"It was in use: {new['key_id']} is made, and signs from now on. Make a backup "
            "(`potluck auth backup`)."
        )
    if answer.get("may_lack_a_key"):  # an older server says nothing
        lines.append(
            "If this server was put back from a backup, and another key signed after that was "
            "made, nodes ignore this list until the server has that key again: `potluck auth keys "
            "rotate --key FILE`."
        )
    return "\n".join(
        [
            *lines,
            "Nodes that are still allowed get new tokens from the server by themselves."
            if answer["spread"]["way"] == "server"
            else "START THE SERVER NOW: until it issues new tokens, nodes that hear of this trust "
            "nobody.",
            "Send new invites (`potluck auth invite`): an invite with the fingerprint "
            f"{gone['fingerprint']} does not protect its reader from the other owner of that key.",
            *spread_lines(answer),
        ]
    )


def audit(answer: Answer) -> Sequence[Part]:
    if not answer["rows"]:
        return ["Nothing in the audit log matches."]
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
        shown.append("There are older records: choose with --limit, --since, --name and --act.")
    return shown


def verified(answer: Answer) -> str:
    if not answer["sound"]:
        return (
            f"THE AUDIT LOG WAS CHANGED. {answer['what']}\n"
            f"{counted(answer['rows'], 'row')} before that {agreeing(answer['rows'], 'is', 'are')} "
            "sound. Somebody or the disk has changed the database: keep a copy of the folder as it "
            "is, and compare it with the last backup."
        )
    return (
        f"The audit log is whole: {counted(answer['rows'], 'row')}. {answer['what']}\n"
        f"{answer['head']}\n"
        "Keep that line elsewhere: later, `potluck auth audit --verify --head LINE` also shows "
        "whether everything was written anew."
    )


def backed_up(answer: Answer) -> str:
    return (
        f"{answer['path']}\n"
        f"{counted(answer['files'], 'file')}, {amount(answer['bytes'])}: the database and the auth "
        "keys. Anyone who has this folder can sign tokens: keep it private.\n"
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
