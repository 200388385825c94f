"""What a moderator reads about people: who may take part, who no longer, who has heard of it."""

from __future__ import annotations

from collections.abc import Sequence

from node.commands.auth_columns import (
    Answer,
    Part,
    agreeing,
    counted,
    one_line,
    roles_of,
    short,
    what_is_left,
)
from node.commands.auth_moments import ago, ahead, now_ms, utc


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
    """Whether the nodes hear of it: said after every act that changes whom they refuse."""
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
