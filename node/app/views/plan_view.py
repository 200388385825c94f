"""A plan for a person: a table, a picture of the peers that compute and reduce, and the gain.

Peers that are alike and have the same part are one row, `w01 … w16 (16)`. The picture has a bar
for the share of the samples that a row computes, and one for the share of the vector it reduces.

A row's bar is for all its peers together, while the table shows the part of each. With 16 small
reducers beside a large one the two look very different.

A run by cohorts has a table of its cohorts in place of the picture, and its peers stand in the
order of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocols.moshpit.plan_strategy import PlannedPeer, PlannedPeers, Strategy

MOST_ROWS = 40  # a screen; a program gets them all
FEW_ROWS = 6  # up to here the eye can follow arrows
BAR_CELLS = 20
LONGEST_LABEL = 28
_SAME_SHARE = 1e-9
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MEGABIT = 125_000.0


@dataclass
class _Row:
    """Peers beside each other in the file (by cohorts: in their cohort) that are alike and do the
    same."""

    peers: list[int]
    peer: PlannedPeer
    computes: bool
    fraction: float
    cohort: int

    @property
    def count(self) -> int:
        return len(self.peers)


def plan_lines(collaboration: PlannedPeers, strategy: Strategy, solve_ms: float) -> str:
    """The output of `potluck plan`, with line ends."""
    rows = _rows(collaboration.peers, strategy)
    labels = {row.peers[0]: _label(collaboration.peers, row) for row in rows}
    table = _table(strategy, rows, labels)
    if strategy.cohorts:
        lines = [*_cohorts(collaboration.peers, strategy), "", *table]
    else:
        lines = [*table, "", *_picture(strategy, rows, labels)]
        lines += _limits(collaboration, strategy)
    lines += ["", *_summary(collaboration, strategy, solve_ms)]
    return "\n".join(line.rstrip() for line in lines)


def _rows(peers: Sequence[PlannedPeer], strategy: Strategy) -> list[_Row]:
    rows: list[_Row] = []
    numbers = {i: number for number, one in enumerate(strategy.cohorts) for i in one.members}
    for i in sorted(range(len(peers)), key=lambda i: numbers.get(i, 0)):  # a stable sort
        peer, cohort = peers[i], numbers.get(i, 0)
        computes, fraction = strategy.computes[i], strategy.fractions[i]
        last = rows[-1] if rows else None
        if (
            last is not None
            and last.cohort == cohort
            and _kind(last.peer) == _kind(peer)
            and last.computes == computes
            and abs(last.fraction - fraction) < _SAME_SHARE
        ):
            last.peers.append(i)
        else:
            rows.append(_Row([i], peer, computes, fraction, cohort))
    return rows


def _kind(peer: PlannedPeer) -> tuple[object, ...]:
    return (peer.samples_per_s, peer.up, peer.down, peer.computes, peer.dial_out_only)


def _label(peers: Sequence[PlannedPeer], row: _Row) -> str:
    names = [_cut(peers[i].name) for i in (row.peers[0], row.peers[-1])]
    if row.count == 1:
        return names[0]
    return f"{names[0]} … {names[1]} ({row.count})"


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_LABEL else name[: LONGEST_LABEL - 1] + "…"


def _cohorts(peers: Sequence[PlannedPeer], strategy: Strategy) -> Iterator[str]:
    sizes = [len(one.members) for one in strategy.cohorts]
    yield (
        f"By cohorts: {len(peers):,} peers in {len(sizes)} cohorts of {min(sizes)} to "
        f"{max(sizes)}. A hash of their names has dealt"
    )
    yield "them out; a run does so with their ids, so others are together there."
    yield ""
    cells = [("cohort", "peers", "samples/s", "averages in", "hands down in", "head", "up Mb/s")]
    for number, one in enumerate(strategy.cohorts, 1):
        head = peers[one.members[0]]
        rates = [peers[i].samples_per_s for i in one.members if strategy.computes[i]]
        cells.append(
            (
                str(number),
                str(len(one.members)),
                f"{sum(rates):,g}",
                _seconds(one.round_seconds),
                _seconds(one.handing_down_seconds),
                _cut(head.name),
                f"{head.up / _MEGABIT:,g}",
            )
        )
    yield from _aligned(cells)


def _table(strategy: Strategy, rows: list[_Row], labels: dict[int, str]) -> Iterator[str]:
    header = ("peer", "samples/s", "up Mb/s", "down Mb/s", "computes", "reduces", "up", "down")
    cells = [(*header, "cohort") if strategy.cohorts else header]
    for row in rows[:MOST_ROWS]:
        up, down = _in_use(strategy, row)
        shown = (
            labels[row.peers[0]],
            f"{row.peer.samples_per_s:,g}",
            f"{row.peer.up / _MEGABIT:,g}",
            f"{row.peer.down / _MEGABIT:,g}",
            "yes" if row.computes else "no",
            "cannot" if row.peer.dial_out_only else _percent(row.fraction),
            _busy(up),
            _busy(down),
        )
        cells.append((*shown, str(row.cohort + 1)) if strategy.cohorts else shown)
    yield from _aligned(cells)
    if len(rows) > MOST_ROWS:
        yield f"and {len(rows) - MOST_ROWS:,} more rows: --json has all peers."


def _aligned(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for first, *others in cells:
        yield "  ".join(
            [f"{first:{widths[0]}}"]
            + [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        )


def _in_use(strategy: Strategy, row: _Row) -> tuple[float, float]:
    """The shares of the averaging in which the upload and download of the busiest of these peers
    are busy."""
    if strategy.round_seconds == 0:
        return 0.0, 0.0
    up, down = zip(*(strategy.link_seconds[i] for i in row.peers), strict=True)
    return max(up) / strategy.round_seconds, max(down) / strategy.round_seconds


def _picture(strategy: Strategy, rows: list[_Row], labels: dict[int, str]) -> Iterator[str]:
    shown = rows[:MOST_ROWS]
    label_width = max(len(labels[row.peers[0]]) for row in shown)
    rates = [row.count * row.peer.samples_per_s if row.computes else 0.0 for row in shown]
    most_samples = max(rates)
    most_reduced = max(row.count * row.fraction for row in shown)
    yield f"{'':{label_width}}  {'computes':{BAR_CELLS + 7}}      reduces"
    for row, rate in zip(shown, rates, strict=True):
        reduced = row.count * row.fraction
        computing = _percent(rate / strategy.samples_per_second) if row.computes else ""
        yield (
            f"{labels[row.peers[0]]:{label_width}}  "
            f"{_bar(rate / most_samples if most_samples else 0.0):{BAR_CELLS}}{computing:>7}"
            f"  ╶→  "
            f"{_bar(reduced / most_reduced if most_reduced else 0.0):{BAR_CELLS}}"
            f"{_percent(reduced) if reduced else '':>7}"
        )
    if len(rows) <= FEW_ROWS:
        yield ""
        yield from _arrows(rows, labels)


def _arrows(rows: list[_Row], labels: dict[int, str]) -> Iterator[str]:
    """The transfers: gradients to each reducer, and its average to everybody."""
    senders = [labels[row.peers[0]] for row in rows if row.computes]
    reducers = [row for row in rows if row.fraction > 0]
    left = max(len(label) for label in senders)
    right = max(len(labels[row.peers[0]]) for row in reducers)
    for row in reducers:
        each = " each" if row.count > 1 else ""
        for number, sender in enumerate(senders):
            to = f"{labels[row.peers[0]]:{right}} ──▶ everybody  {_percent(row.fraction)}{each}"
            last = number == len(senders) - 1
            arrow = (
                "──▶" if len(senders) == 1 else "──┬──▶" if not number else "──┘" if last else "──┤"
            )
            yield f"{sender:{left}} {arrow} {to if number == 0 else ''}"


def _limits(collaboration: PlannedPeers, strategy: Strategy) -> Iterator[str]:
    """The pairwise limits, the ones that hold up the round first."""
    if not collaboration.limits:
        return
    used = []
    for (i, j), limit in collaboration.limits.items():
        carried = strategy.fractions[i] + strategy.computes[i] * strategy.fractions[j]
        seconds = carried * collaboration.vector_bytes / limit
        share = seconds / strategy.round_seconds if strategy.round_seconds else 0.0
        used.append((share, i, j, limit))
    used.sort(key=lambda one: -one[0])
    names = [_cut(peer.name) for peer in collaboration.peers]
    yield ""
    for share, i, j, limit in used[:FEW_ROWS]:
        yield f"link {names[i]} ──▶ {names[j]}  {limit / _MEGABIT:,g} Mb/s, {_busy(share)} in use"
    if len(used) > FEW_ROWS:
        yield f"and {len(used) - FEW_ROWS:,} links with less in use."


def _summary(collaboration: PlannedPeers, strategy: Strategy, solve_ms: float) -> Iterator[str]:
    ours = strategy.round_seconds
    megabytes = f"{collaboration.vector_bytes / 1e6:,.1f} MB"
    if strategy.cohorts:
        slowest = max(one.round_seconds for one in strategy.cohorts)
        handing_down = max(one.handing_down_seconds for one in strategy.cohorts)
        yield (
            f"A step averages {megabytes} in {_seconds(ours)}: {_seconds(slowest)} in the slowest "
            f"cohort,"
        )
        yield (
            f"{_seconds(strategy.heads_seconds)} among the {len(strategy.cohorts)} heads, and "
            f"{_seconds(handing_down)} until all have what the slowest hands down."
        )
        yield "If all were one group:"
    else:
        yield f"A round averages {megabytes} in {_seconds(ours)}."
    for name, seconds in (
        ("All-reduce with equal parts", strategy.allreduce_seconds),
        ("The best single parameter server", strategy.parameter_server_seconds),
    ):
        times = f", {seconds / ours:.2f} times as long" if ours else ""
        yield f"{name}: {_seconds(seconds)}{times}."
    computing = strategy.samples_per_second / collaboration.batch
    limit = "computing" if computing <= strategy.steps_per_second * (1 + 1e-9) else "the network"
    yield (
        f"{strategy.steps_per_second:.4g} steps per second, held up by {limit}: computing alone "
        f"would allow {computing:.4g}."
    )
    yield f"Planned in {solve_ms:.1f} ms."


def _bar(share: float) -> str:
    """A bar of up to BAR_CELLS, in eighths; a share above zero is always visible."""
    eighths = round(share * BAR_CELLS * 8)
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _percent(share: float) -> str:
    return f"{share * 100:.2f} %" if 0 < share < 0.0995 else f"{share * 100:.1f} %"


def _busy(share: float) -> str:
    return f"{share * 100:.0f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
