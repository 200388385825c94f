"""The end of the demo: its claims as one object, and as a page for people. Pure.

Easy to get wrong: a claim is only worth what it is checked by. `failures` says of each bar whether
it was met, and the command's exit code is made of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.caps.units import in_words
from node.demo.story import Story, sparkline

if TYPE_CHECKING:
    from node.demo.judging import Judged

LARGEST_LOSS_RATIO = 0.6  # of the last loss to the first one


def summary_of(
    story: Story,
    judged: Judged,
    checkpoint: Path,
    health: dict[str, Any],
    board: dict[str, Any],
    *,
    late: str,
    seconds: float,
) -> dict[str, Any]:
    """All that the demo claims; `board` is what `potluck leaderboard` says at the backbone peer.
    `failures` names what was not met; empty is success."""
    digests = {one.name: one.parameters for one in story.survivors()}
    digests["checkpoint"] = judged.digest
    newcomer = story.person(late)
    found = newcomer.caught_up or {}
    killed = [one for one in story.people.values() if one.killed_at is not None]
    summary: dict[str, Any] = {
        "event": "summary",
        "seconds": round(seconds, 2),
        "steps": story.epoch,
        "parameters": judged.parameters,
        "loss_first": round(judged.loss_first, 4),
        "loss_last": round(judged.loss_last, 4),
        "loss_ratio": round(judged.loss_last / judged.loss_first, 4),
        "curve": [[epoch, round(loss, 4)] for epoch, loss in story.curve()],
        "contributions": story.contributions(),
        "credit": {kind: [_credited(one) for one in board[kind]] for kind in ("people", "helpers")},
        "killed": [{"name": one.name, "epoch": one.killed_at} for one in killed],
        "late": {
            "name": late,
            "entered_at": newcomer.entered_at,
            "caught_up_with": found.get("epoch"),
            "fetched_bytes": found.get("fetched_bytes", 0),
            "samples": newcomer.samples,
        },
        "digests": digests,
        "digests_equal": len(set(digests.values())) == 1 and all(digests.values()),
        "checkpoint": str(checkpoint),
        "checkpoint_epoch": judged.epoch,
        "health": health,
        "sample": judged.sample,
    }
    summary["failures"] = failures(summary)
    return summary


def failures(summary: dict[str, Any]) -> list[str]:
    """Which claims do not hold, in words."""
    wrong = []
    if not summary["loss_ratio"] < LARGEST_LOSS_RATIO:
        wrong.append(f"the loss fell to {summary['loss_ratio']:.0%} of the first one only")
    if not summary["digests_equal"]:
        wrong.append("the survivors do not hold the same parameters")
    wrong += _credit_failures(summary)
    if summary["checkpoint_epoch"] != summary["steps"]:
        wrong.append("the last checkpoint is not of the last step")
    if not summary["killed"]:
        wrong.append("nobody was killed")
    if not summary["late"]["samples"]:
        wrong.append("who came late brought nothing")
    if summary["health"].get("status") != 200:
        wrong.append(f"the backbone peer was not healthy: {summary['health'].get('troubles')}")
    return wrong


def _credited(rank: dict[str, Any]) -> dict[str, Any]:
    """What the records say of one person. Who logged in with a code is `code:NAME` to all."""
    kept = ("samples", "steps", "averaged_bytes", "service_seconds", "devices")
    return {"name": rank["person"].removeprefix("code:"), **{key: rank[key] for key in kept}}


def _credit_failures(summary: dict[str, Any]) -> list[str]:
    """Whether the records come to what the keeper's signed lists say, which is what each volunteer
    says of itself.

    Of every step that the keeper was in, each sample has to be credited: its own record is where
    the records are added up, and it alone is enough. Of a step without it (it was left out, or took
    the state of a later one) the members' records tell; whether one of these has reached the keeper
    is not certain, since a record is signed every few seconds, and who is killed, or has half a
    second left to leave in, may not hand it over. So those samples may be credited, and no others.
    """
    credited = {one["name"]: one["samples"] for one in summary["credit"]["people"]}
    wrong = []
    for one in summary["contributions"]:
        found, least = credited.get(one["name"], 0), one["witnessed"]
        if not least <= found <= least + one["unwitnessed"]:
            wrong.append(
                f"the records give {one['name']} {found:,} samples, and the rounds that the keeper "
                f"was in {least:,} (others: {one['unwitnessed']:,})"
            )
        if one["differing"]:
            wrong.append(f"{one['name']} and the keeper differ on the steps {one['differing']}")
    return wrong


def page_of(summary: dict[str, Any], *, keep: bool) -> str:
    """The summary for people."""
    losses = [loss for _, loss in summary["curve"]]
    survivors = [name for name in summary["digests"] if name != "checkpoint"]
    digest = summary["digests"]["checkpoint"]
    equal = (
        f"{', '.join(survivors)} and the checkpoint hold the same parameters: {digest}"
        if summary["digests_equal"]
        else f"NOT the same parameters: {summary['digests']}"
    )
    kept = summary["checkpoint"] if keep else "written, and removed with the rest (--keep keeps it)"
    sample = "\n".join(f"              {line}" for line in summary["sample"].splitlines())
    return "\n".join(
        [
            "",
            f"  loss        {sparkline(losses)}",
            f"              {summary['loss_first']:.2f} at first, {summary['loss_last']:.2f} after "
            f"{summary['steps']} steps (nats per byte, of text that nobody trained on)",
            f"  who         {_shares(summary)}",
            f"  equal       {equal}",
            f"  checkpoint  {kept}",
            "  it writes   (after half a minute of training: the shape of code, not the sense)",
            sample,
            "",
            f"That took {summary['seconds']:.0f} s. Now yours: `potluck run init DIR` defines a "
            "run, `potluck join INVITE` takes part in one.",
            *(f"FAILED: {one}" for one in summary["failures"]),
        ]
    )


def _shares(summary: dict[str, Any]) -> str:
    """By the records, and not by what anybody says of itself."""
    late, killed = summary["late"]["name"], {one["name"] for one in summary["killed"]}
    people, helpers = summary["credit"]["people"], summary["credit"]["helpers"]
    whole = sum(one["samples"] for one in people) or 1
    told = []
    for one in people:
        name, samples = one["name"], one["samples"]
        note = " (killed)" if name in killed else " (late)" if name == late else ""
        told.append(f"{name}{note} {samples:,} samples, {samples / whole:.0%}")
    told += [f"{one['name']} averaged {in_words(one['averaged_bytes'])}" for one in helpers]
    return f"\n{' ' * 14}".join(told)
