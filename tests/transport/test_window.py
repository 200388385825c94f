"""Flow control: exact accounts, growth that follows the reader, and a far link that is filled."""

from __future__ import annotations

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.net.transport.settings import INITIAL_WINDOW_BYTES, MIB
from node.net.transport.window import (
    OWN_GROWTH_BYTES,
    NodeBudget,
    ReceiveWindow,
    SendWindow,
    WindowBudget,
)
from protocols.errors import LimitExceeded

LIMIT = 16 * MIB
ROUND_TRIP = 0.1


def budget_of(limit: int, of_node: NodeBudget | None = None) -> WindowBudget:
    return WindowBudget(limit, of_node or NodeBudget(1024 * MIB))


def window(limit: int = LIMIT, budget: WindowBudget | None = None) -> ReceiveWindow:
    return ReceiveWindow(limit, budget or budget_of(64 * MIB))


def drain(receiver: ReceiveWindow, now: float, round_trip: float | None) -> int:
    """The peer uses all its credit, the reader consumes it all at once; returns new credit."""
    size = receiver.credit_bytes
    receiver.received(size)
    return receiver.consumed(size, now, round_trip)


def test_a_window_starts_at_what_yamux_gives() -> None:
    assert window().credit_bytes == SendWindow().available_bytes == 256 * 1024


def test_a_peer_may_use_its_window_to_the_byte_and_no_further() -> None:
    receiver = window()
    receiver.received(INITIAL_WINDOW_BYTES)
    with pytest.raises(LimitExceeded):
        receiver.received(1)


def test_credit_returns_in_thirds() -> None:
    receiver = window()
    receiver.received(INITIAL_WINDOW_BYTES)
    assert receiver.consumed(INITIAL_WINDOW_BYTES // 3, 0, None) == 0
    assert receiver.consumed(1, 0, None) == INITIAL_WINDOW_BYTES // 3 + 1


def test_without_a_measured_round_trip_a_window_does_not_grow() -> None:
    receiver = window()
    for second in range(20):
        drain(receiver, second, None)
    assert receiver.size_bytes == INITIAL_WINDOW_BYTES


def test_a_window_that_is_the_brake_quadruples_every_round_trip() -> None:
    receiver = window()
    # The very first round trip counts two windows: the one that opens it and the one that ends it.
    for turn, expected in enumerate([0.25, 2, 8, 16]):
        drain(receiver, turn * ROUND_TRIP * 1.0001, ROUND_TRIP)
        assert receiver.size_bytes == pytest.approx(expected * MIB, rel=0.01)


def test_a_window_that_a_waiting_reader_sees_used_up_quadruples_whatever_the_times() -> None:
    receiver = ReceiveWindow(LIMIT, budget_of(LIMIT))
    receiver.received(INITIAL_WINDOW_BYTES)
    credit = receiver.consumed(INITIAL_WINDOW_BYTES, 100.0, None, starving=True)
    assert credit == 4 * INITIAL_WINDOW_BYTES
    assert receiver.size_bytes == 4 * INITIAL_WINDOW_BYTES


def test_a_reader_that_waits_for_a_sender_with_window_left_does_not_make_it_grow() -> None:
    receiver = ReceiveWindow(LIMIT, budget_of(LIMIT))
    for turn in range(10):
        receiver.received(INITIAL_WINDOW_BYTES - 1)
        receiver.consumed(INITIAL_WINDOW_BYTES - 1, turn * 1.0, None, starving=True)
    assert receiver.size_bytes == INITIAL_WINDOW_BYTES


def test_a_reader_that_stops_never_makes_a_window_grow() -> None:
    receiver = window()
    drain(receiver, 0.0, ROUND_TRIP)
    drain(receiver, 0.1, ROUND_TRIP)
    size = receiver.size_bytes
    receiver.received(receiver.credit_bytes)
    assert receiver.credit_bytes == 0
    assert receiver.size_bytes == size


def test_a_reader_that_drains_a_full_window_in_one_go_now_and_then_does_not_make_it_grow() -> None:
    receiver = window()
    for turn in range(100):
        for _ in range(receiver.credit_bytes // 1000):
            receiver.received(1000)
        receiver.consumed(100_000, turn * 10.0, ROUND_TRIP)
        receiver.consumed(100_000, turn * 10.0 + 0.09, ROUND_TRIP)
        receiver.consumed(62_000, turn * 10.0 + 0.11, ROUND_TRIP)
    assert receiver.size_bytes == INITIAL_WINDOW_BYTES


def test_a_slow_reader_keeps_a_small_window_however_long_it_reads() -> None:
    receiver = window()
    for tick in range(10_000):
        if receiver.credit_bytes >= 1000:
            receiver.received(1000)
            receiver.consumed(1000, tick * 0.01, ROUND_TRIP)
    assert receiver.size_bytes == INITIAL_WINDOW_BYTES


def test_a_window_settles_at_a_few_times_what_a_round_trip_carries() -> None:
    receiver = window()
    per_tick = 125_000  # 12.5 MB/s in ticks of 10 ms: 1.25 MB per round trip
    for tick in range(2000):
        size = min(per_tick, receiver.credit_bytes)
        receiver.received(size)
        receiver.consumed(size, tick * 0.01, ROUND_TRIP)
    assert 2 * 1_250_000 <= receiver.size_bytes <= 4.5 * 1_250_000


def test_a_window_never_exceeds_its_limit() -> None:
    receiver = window(limit=MIB)
    for turn in range(50):
        drain(receiver, turn * ROUND_TRIP, ROUND_TRIP)
    assert receiver.size_bytes == MIB


def test_windows_of_one_connection_share_a_budget() -> None:
    budget = budget_of(3 * MIB)
    receivers = [window(budget=budget) for _ in range(4)]
    for turn in range(50):
        for receiver in receivers:
            drain(receiver, turn * ROUND_TRIP, ROUND_TRIP)
    assert sum(receiver.size_bytes for receiver in receivers) == budget.promised_bytes == 3 * MIB
    receivers[0].close()
    receivers[0].close()
    for turn in range(50, 100):
        drain(receivers[1], turn * ROUND_TRIP, ROUND_TRIP)
    assert budget.promised_bytes == sum(receiver.size_bytes for receiver in receivers) == 3 * MIB


def test_windows_of_all_connections_share_half_of_the_nodes_limit() -> None:
    of_node = NodeBudget(64 * MIB)
    budgets = [budget_of(256 * MIB, of_node) for _ in range(40)]
    granted = [one.promise_growth(256 * MIB) for one in budgets]
    shared = [growth - OWN_GROWTH_BYTES for growth in granted]
    assert shared[:3] == [16 * MIB, 8 * MIB, 4 * MIB]
    assert min(shared) >= 0, "each has a little of its own"
    assert 31 * MIB < sum(shared) <= 32 * MIB
    assert budgets[0].promise_growth(MIB) == 0
    budgets[0].release(INITIAL_WINDOW_BYTES + granted[0])
    assert budgets[39].promise_growth(256 * MIB) == 8 * MIB
    assert budgets[0].promise_growth(256 * MIB) == OWN_GROWTH_BYTES + 4 * MIB


class Held:
    """A connection with one stream of this size, which has read so much before."""

    def __init__(self, of_node: NodeBudget, unread_bytes: int, read_bytes: int = 0) -> None:
        self.unread_bytes = unread_bytes
        self.read_bytes = read_bytes
        of_node.join(self)
        of_node.unread_bytes += unread_bytes
        self._of_node = of_node

    def drop_fullest_stream(self) -> bool:
        dropped, self.unread_bytes = self.unread_bytes, 0
        self._of_node.unread_bytes -= dropped
        return bool(dropped)


@pytest.mark.parametrize(
    ("drops", "keeps"),
    [
        ((60, 0), (50, 0)),
        ((50, 0), (60, 60)),  # of which half was read
        ((70, 70), (31, 0)),
        ((90, 10**9), (30, 0)),  # what was read long ago protects nobody for ever
    ],
    ids=["holds_more", "brought_it_unread", "holds_much_more", "has_read_much_before"],
)
def test_beyond_the_limit_that_is_dropped_which_weighs_most(
    drops: tuple[int, int], keeps: tuple[int, int]
) -> None:
    of_node = NodeBudget(100)
    light, heavy = Held(of_node, *keeps), Held(of_node, *drops)
    assert of_node.keep_limit()
    assert heavy.unread_bytes == 0
    assert of_node.unread_bytes == light.unread_bytes == keeps[0]


def test_a_limit_that_nothing_can_be_dropped_for_is_not_kept() -> None:
    of_node = NodeBudget(100)
    stuck = Held(of_node, 101)
    stuck.drop_fullest_stream = lambda: False  # type: ignore[method-assign]
    assert not of_node.keep_limit()


def test_large_read_buffers_get_smaller_the_more_there_are() -> None:
    of_node = NodeBudget(256 * MIB)
    large = [of_node.lend_buffer(MIB) for _ in range(100)]
    assert large == [True] * large.count(True) + [False] * large.count(False)
    assert 48 <= large.count(True) <= 49
    assert of_node.lend_buffer(MIB // 4), "there is something left for others"
    of_node.return_buffer(2 * MIB)
    assert of_node.lend_buffer(MIB)


def test_new_streams_get_their_first_window_even_beyond_the_budget() -> None:
    budget = budget_of(MIB)
    receivers = [window(budget=budget) for _ in range(8)]
    drain(receivers[0], 0.0, ROUND_TRIP)
    drain(receivers[0], 0.1, ROUND_TRIP)
    assert {receiver.size_bytes for receiver in receivers} == {INITIAL_WINDOW_BYTES}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400_000), st.floats(0, 1)), max_size=60))
def test_the_accounts_balance_whatever_happens(
    steps: list[tuple[bool, int, float]],
) -> None:
    receiver, now, unread, sent_credit = window(), 0.0, 0, INITIAL_WINDOW_BYTES
    for arrives, size, pause in steps:
        now += pause
        if arrives:
            size = min(size, sent_credit)
            receiver.received(size)
            sent_credit -= size
            unread += size
        else:
            size = min(size, unread)
            unread -= size
            sent_credit += receiver.consumed(size, now, 0.05)
        assert sent_credit == receiver.credit_bytes
        assert 0 <= sent_credit + unread <= receiver.size_bytes <= LIMIT
    sent_credit += receiver.return_all()
    assert sent_credit + unread == receiver.size_bytes


def test_a_sender_takes_no_more_than_it_was_granted() -> None:
    sender = SendWindow()
    sender.take(INITIAL_WINDOW_BYTES)
    with pytest.raises(ValueError, match="window"):
        sender.take(1)
    sender.grant(5)
    sender.take(5)


def test_a_window_of_more_than_32_bits_is_refused() -> None:
    sender = SendWindow()
    sender.grant(2**32 - 1 - INITIAL_WINDOW_BYTES)
    with pytest.raises(LimitExceeded):
        sender.grant(1)


def fill_of_a_link(round_trip: float, bytes_per_second: float, seconds: float) -> float:
    """Simulate one stream on a link, event by event; the part of the pipe that it used."""
    piece = 16 * 1024
    receiver, sender = window(), SendWindow()
    order = itertools.count()
    events: list[tuple[float, int, str, int]] = []
    link_free_at, consumed = 0.0, 0
    events.append((0.0, next(order), "credit", 0))
    while events:
        now, _, kind, size = heapq.heappop(events)
        if now > seconds:
            break
        if kind == "arrived":
            receiver.received(size)
            consumed += size
            if credit := receiver.consumed(size, now, round_trip):
                heapq.heappush(events, (now + round_trip / 2, next(order), "credit", credit))
            continue
        sender.grant(size)
        while sender.available_bytes:
            part = min(piece, sender.available_bytes)
            sender.take(part)
            link_free_at = max(link_free_at, now) + part / bytes_per_second
            arrival = link_free_at + round_trip / 2
            heapq.heappush(events, (arrival, next(order), "arrived", part))
    return consumed / (bytes_per_second * seconds)


@pytest.mark.parametrize(
    ("round_trip", "megabits", "least"),
    [(0.1, 100, 0.94), (0.05, 100, 0.97), (0.2, 100, 0.86), (0.03, 1000, 0.96), (0.3, 20, 0.89)],
)
def test_one_stream_fills_a_far_link(round_trip: float, megabits: int, least: float) -> None:
    assert fill_of_a_link(round_trip, megabits * 125_000, seconds=6.0) >= least
