"""What a moderator reads about codes, auth keys, the audit log and backups."""

from __future__ import annotations

from collections.abc import Sequence

from node.commands.auth_columns import Answer, Part, agreeing, counted, roles_of, what_is_left
from node.commands.auth_moments import ahead, now_ms, utc
from node.commands.auth_view_people import spread_lines
from node.commands.status_view import amount


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
