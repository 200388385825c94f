"""How the training of a node is, in a few rows for a person: the part of `potluck status` that is
about the run."""

from __future__ import annotations

import time
from collections.abc import Iterator

from node.caps.units import in_words
from node.trainer.view import BatchView, ContributionView, TrafficView, TrainerView
from node.trainer.words import since_words, span


def training_rows(view: TrainerView) -> Iterator[tuple[str, str]]:
    """Names and values, in the order in which they matter."""
    yield "training", f"{view.run}, {view.phase.value} {since_words(view)}"
    if view.doing:
        yield "", view.doing
    if view.advice:
        yield "next", view.advice
    of_all = f" of {view.steps:,}" if view.steps else ""
    over = "" if view.seconds_left is None else f", over in {span(view.seconds_left)}"
    yield "step", f"{view.epoch:,}{of_all}{over}"
    if view.loss is not None:
        yield "loss", f"{view.loss:.4f}, the run's, of all samples in step {view.loss_step:,}"
    if view.batch.target:
        yield "batch", _batch(view.batch, computes=not view.keeps_only)
    if not view.keeps_only:
        yield "given", _given(view.contribution)
    if view.troubles is not None:
        yield "health", "; ".join(view.troubles) or "well: it serves volunteers who come now"
    if view.device:
        threads = "1 thread" if view.threads == 1 else f"{view.threads} threads"
        yield "device", f"{view.device}, {threads}, {view.micro_batch:,} samples at once"
    yield "traffic", _traffic(view.traffic)
    others = "1 other" if len(view.peers) == 1 else f"{len(view.peers)} others"
    yield "peers", f"{others} in the run (`potluck peers`)"
    if view.checkpoint:
        age = view.checkpoint_age_seconds
        ago = "" if age is None else f", {span(age)} ago"
        yield "saved", f"{view.checkpoint}{ago}"
    if view.last_event:
        clock = time.strftime("%H:%M:%S", time.localtime(view.last_event_at))
        yield "last", f"{clock} {view.last_event}"


def _batch(batch: BatchView, *, computes: bool) -> str:
    share = 100.0 * batch.samples / batch.target
    due = ""
    if batch.seconds_to_step is not None:
        due = f", full in {span(batch.seconds_to_step)}" if batch.seconds_to_step else ", full"
    mine = f"{batch.mine:,} of them from here, " if computes else ""
    return (
        f"{batch.samples:,.0f} of {batch.target:,} samples ({min(share, 100.0):.0f} %), "
        f"{mine}{batch.samples_per_second:,.1f} samples/s{due}"
    )


def _given(given: ContributionView) -> str:
    share = "" if given.share is None else f" ({100.0 * given.share:.0f} % of those steps)"
    rate = ""
    if given.samples_per_second is not None:
        rate = f", {given.samples_per_second:,.1f} samples/s"
    alone = ""
    if given.alone_steps:
        alone = f", {given.alone_samples:,} in {given.alone_steps:,} steps made alone"
    lost = f", {given.lost_samples:,} in none" if given.lost_samples else ""
    together = f"{given.samples:,} samples in {given.steps:,} steps with others{share}"
    return f"{together}{alone}{lost}{rate}"


def _traffic(traffic: TrafficView) -> str:
    return (
        f"{in_words(traffic.sent_bytes)} sent ({in_words(traffic.sent_bytes_per_second)}/s"
        f"{_limit(traffic.upload_limit)}), {in_words(traffic.received_bytes)} received "
        f"({in_words(traffic.received_bytes_per_second)}/s{_limit(traffic.download_limit)})"
    )


def _limit(limit: float | None) -> str:
    return "" if limit is None else f" of at most {in_words(limit)}/s"
