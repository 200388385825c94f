"""The pure parts of fetching and serving: which state, which pieces, and who may download."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from protocols.accumulation.state_download import (
    FILE_NAME,
    MOST_AHEAD,
    KeptPieces,
    PieceBoard,
    StateSource,
    choose,
)
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.state_pace import (
    KEPT_SECONDS,
    LAPSED_SECONDS,
    RESERVED_SECONDS,
    SENIOR_SECONDS,
    STUCK_SECONDS,
    UNUSED_SECONDS,
    USUAL_WAIT_SECONDS,
    DownloadDesk,
    UploadPace,
)
from protocols.accumulation.state_serving import naming_interval
from protocols.accumulation.training_state import TrainingState, capture, look
from protocols.errors import ProtocolMisuse
from protocols.identity import PeerId

ME = PeerId("me")
A, B = b"a" * 32, b"b" * 32


def source(name: str, epoch: int = 7, digest: bytes = A, history: bytes = b"h") -> StateSource:
    return StateSource(PeerId(name), epoch, history, digest)


# Whose state


def test_a_state_that_was_named_late_is_fetched_from_all_who_keep_it() -> None:
    """Its donors are further by now, and not all at the same epoch."""
    here = [replace(source(name, epoch=9), is_earlier=True) for name in ("1", "2")]
    further = replace(source("3", epoch=10), is_earlier=True)
    others = [
        source("4", epoch=9, digest=b""),
        source("5", epoch=8),
        source("6", epoch=9, digest=B),
    ]
    chosen = choose([*here, further, *others], ME)
    assert chosen is not None
    assert (chosen.epoch, chosen.digest, chosen.is_earlier) == (9, A, True)
    assert {one.peer for one in chosen.sources} == {"1", "2", "3", "4", "5"}
    assert chosen.sources[-1].peer == "4", "it names none"


@pytest.mark.parametrize(
    ("naming_seconds", "step_seconds", "kept_steps", "interval"),
    [
        (0.1, 0.0, 16, 1),  # not known yet
        (0.1, 1.3, 11, 1),
        (1.5, 1.3, 6, 2),
        (3.0, 1.3, 12, 4),
        (3.0, 1.3, 6, None),
        (0.1, 0.28, 5, None),
    ],
)
def test_a_state_is_named_in_epochs_that_leave_the_time_to_ask_for_it(
    naming_seconds: float, step_seconds: float, kept_steps: int, interval: int | None
) -> None:
    assert naming_interval(naming_seconds, step_seconds, kept_steps) == interval


def test_the_digest_that_most_up_to_date_peers_name_is_chosen() -> None:
    chosen = choose([source("1"), source("2", digest=B), source("3"), source("4", epoch=6)], ME)
    assert chosen is not None
    assert (chosen.epoch, chosen.digest) == (7, A)
    assert {one.peer for one in chosen.sources} == {"1", "3"}


def test_a_lone_peer_that_claims_a_later_epoch_does_not_outweigh_the_others() -> None:
    chosen = choose([source("1"), source("2"), source("liar", epoch=10**9)], ME)
    assert chosen is not None
    assert chosen.epoch == 7


def test_before_the_up_to_date_peers_name_a_state_only_an_earlier_one_will_do() -> None:
    run = [source("1", digest=b""), source("2", digest=b"")]
    assert choose([*run, source("liar", epoch=10**9)], ME) is None
    assert choose([*run, source("liar", history=b"invented")], ME) is None
    chosen = choose([*run, source("3", epoch=6)], ME)
    assert chosen is not None
    assert chosen.epoch == 6, "results have to lead from there to where the others are"


def test_of_equally_many_the_later_epoch_is_chosen() -> None:
    chosen = choose([source("1"), source("2", epoch=8)], ME)
    assert chosen is not None
    assert chosen.epoch == 8


def test_without_a_majority_one_digest_is_chosen_and_not_the_same_by_every_newcomer() -> None:
    unlike = [source(str(number), digest=bytes([number]) * 32) for number in range(4)]
    chosen = [choose(unlike, PeerId(f"newcomer {number}")) for number in range(40)]
    assert len({one.digest for one in chosen if one is not None}) == 4


def test_peers_that_have_not_named_a_digest_yet_are_asked_last() -> None:
    chosen = choose([source("quiet", digest=b""), source("1"), source("2")], ME)
    assert chosen is not None
    assert chosen.sources[-1].peer == "quiet"


def test_liars_other_histories_older_epochs_and_oneself_are_left_out() -> None:
    several = [source("1"), source("2"), source("me"), source("3", history=b"fork")]
    chosen = choose(several, ME, history=b"h", without={PeerId("1")})
    assert chosen is not None
    assert [one.peer for one in chosen.sources] == ["2"]
    assert choose(several, ME, at_least_epoch=8) is None
    assert choose([source("1", digest=b"")], ME) is None
    assert choose([], ME) is None


def test_newcomers_spread_evenly_over_donors() -> None:
    donors = [source(str(number)) for number in range(5)]
    first: Counter[str] = Counter()
    for number in range(500):
        chosen = choose(donors, PeerId(f"newcomer {number}"))
        assert chosen is not None
        first[chosen.sources[0].peer] += 1
    assert set(first) == {str(number) for number in range(5)}
    assert all(70 <= count <= 130 for count in first.values())


# Which piece from whom


@given(
    st.lists(st.floats(0.01, 5.0), min_size=1, max_size=4),
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 20)), max_size=3),
)
@example([2.0, 1.0, 2.0], 4, [(1, 0.0), (2, 3.0)])
def test_every_piece_comes_whatever_the_sources_do(
    paces: list[float], count: int, deaths: list[tuple[int, float]]
) -> None:
    """Each source delivers at its own pace until it dies; at least one stays alive."""
    board = PieceBoard(count)
    died = {peer: at for peer, at in deaths if 0 < peer < len(paces)}
    owed: dict[int, deque[int]] = defaultdict(deque)
    next_at = dict.fromkeys(range(len(paces)), 0.0)
    now, delivered = 0.0, 0
    while not board.is_complete:
        for peer in [one for one in next_at if died.get(one, 1e9) <= now]:
            board.lost(PeerId(str(peer)))
            del next_at[peer]
            owed.pop(peer, None)
        for peer in next_at:
            while (number := board.take(PeerId(str(peer)), now)) is not None:
                if not owed[peer]:
                    next_at[peer] = now + paces[peer]
                owed[peer].append(number)
            assert len(owed[peer]) <= MOST_AHEAD
        busy = [peer for peer in next_at if owed[peer]]
        assert busy, "pieces are missing and nobody is asked for one"
        peer = min(busy, key=lambda one: next_at[one])
        now = max(now, next_at[peer])
        number = owed[peer].popleft()
        delivered += 1
        next_at[peer] = now + paces[peer]
        if board.arrived(PeerId(str(peer)), now):
            board.keep(number)
    assert board.here == set(range(count))
    assert delivered <= count + MOST_AHEAD * len(paces) * (1 + len(died))


def test_a_faster_source_takes_over_what_would_come_last() -> None:
    board = PieceBoard(4)
    slow, fast = PeerId("slow"), PeerId("fast")
    assert [board.take(slow, 0.0), board.take(slow, 0.0)] == [0, 1]
    assert [board.take(fast, 0.0), board.take(fast, 0.0)] == [2, 3]
    for now in (0.1, 0.2):
        assert board.arrived(fast, now)
        board.keep(round(now * 10) + 1)
    assert board.take(fast, 0.2) == 1  # the second that the slow one owes
    assert board.arrived(fast, 0.3)
    board.keep(1)
    assert board.take(fast, 0.3) == 0
    assert board.arrived(slow, 0.35)  # it was first after all
    board.keep(0)
    assert board.is_complete
    assert not board.arrived(fast, 0.4)


def test_nobody_is_asked_twice_for_a_piece_and_a_slower_one_takes_over_nothing() -> None:
    board = PieceBoard(2)
    fast, slow = PeerId("fast"), PeerId("slow")
    assert [board.take(fast, 0.0), board.take(fast, 0.0), board.take(fast, 0.0)] == [0, 1, None]
    assert board.take(slow, 0.0) is None or board.take(slow, 0.0) is None


def test_pieces_that_a_lost_source_owed_are_asked_for_again() -> None:
    board = PieceBoard(2)
    first, second = PeerId("first"), PeerId("second")
    assert {board.take(first, 0.0), board.take(first, 0.0)} == {0, 1}
    board.lost(first)
    assert {board.take(second, 0.0), board.take(second, 0.0)} == {0, 1}


# The right to download


def test_the_number_of_downloads_is_limited_and_the_others_are_told_when_to_come() -> None:
    desk = DownloadDesk(2)
    assert desk.ask(PeerId("1"), 0.0) == 0.0
    assert desk.ask(PeerId("2"), 0.0) == 0.0
    assert desk.ask(PeerId("1"), 1.0) == 0.0  # it has its place
    assert desk.ask(PeerId("3"), 1.0) == USUAL_WAIT_SECONDS  # they have not begun
    for name in ("1", "2"):
        desk.begin(PeerId(name), 1.0, 1000)
        desk.sent(PeerId(name), 500, 1.0)
    assert desk.ask(PeerId("3"), 11.0) == pytest.approx(10.0)  # as long again for the other half
    desk.end(PeerId("1"))
    assert desk.ask(PeerId("3"), 11.0) == 0.0
    assert desk.downloading == 1


def test_a_download_that_has_just_begun_makes_nobody_wait_for_long() -> None:
    """Its first pieces suggest half a minute, but then it takes a second."""
    desk = DownloadDesk(1)
    assert desk.ask(PeerId("1"), 0.0) == 0.0
    desk.begin(PeerId("1"), 0.0, 130_000_000)
    desk.sent(PeerId("1"), 2_000_000, 0.4)
    assert desk.ask(PeerId("2"), 0.4) == USUAL_WAIT_SECONDS
    assert desk.ask(PeerId("2"), 4.0) == pytest.approx(4.0), "as long as it has lasted"


def test_beside_one_that_takes_all_there_is_no_other_newcomer_until_it_has_its_state() -> None:
    desk = DownloadDesk(8)
    first, second = PeerId("1"), PeerId("2")
    assert desk.ask(first, 0.0, take_all=()) == 0.0
    assert desk.ask(second, 0.0, take_all=()) > 0.0, "the first is about to begin"
    assert desk.ask(second, 0.0) == 0.0, "that is no newcomer: it asks for a result"
    desk = DownloadDesk(8)
    assert desk.ask(first, 0.0, take_all=()) == 0.0
    desk.begin(first, 0.1, 1000)
    assert desk.ask(PeerId("slow"), 0.2, take_all=()) == 0.0, "the first is slow"
    assert desk.ask(second, 3.0, take_all=(first,)) > 0.0
    desk.sent(first, 2001, 3.1)
    assert desk.ask(second, 3.2, take_all=(first,)) == 0.0, "nobody takes all for ever"
    desk = DownloadDesk(8)
    assert desk.ask(first, 0.0, take_all=()) == 0.0
    assert desk.ask(second, RESERVED_SECONDS, take_all=()) == 0.0, "nor only says that it comes"
    desk.begin(first, RESERVED_SECONDS, 1000)
    idle_until = RESERVED_SECONDS + SENIOR_SECONDS
    assert desk.ask(PeerId("third"), idle_until, take_all=(first,)) > 0.0
    assert desk.ask(PeerId("third"), idle_until + 0.1, take_all=(first,)) == 0.0, (
        "nor takes nothing"
    )


def test_a_place_that_is_not_taken_is_given_to_another() -> None:
    desk = DownloadDesk(1)
    assert desk.ask(PeerId("1"), 0.0) == 0.0
    assert desk.ask(PeerId("2"), 9.0) > 0.0
    assert desk.ask(PeerId("2"), 10.0) == 0.0
    assert len(desk) == 1


def test_a_place_that_is_asked_for_again_and_again_and_never_used_is_given_to_another() -> None:
    desk, second = DownloadDesk(1), 0
    while desk.ask(PeerId("1"), float(second)) == 0.0:
        assert second <= UNUSED_SECONDS + KEPT_SECONDS
        second += 9
    assert desk.ask(PeerId("2"), float(second)) == 0.0
    desk.begin(PeerId("2"), float(second), 1000)
    desk.end(PeerId("2"))
    assert desk.ask(PeerId("1"), second + 1.0) > 0.0, "it has had its chance"
    assert desk.ask(PeerId("1"), second + LAPSED_SECONDS) == 0.0


def test_a_peer_that_takes_nothing_leaves_room_for_another_one() -> None:
    desk, stuck = DownloadDesk(3), PeerId("stuck")
    assert desk.ask(stuck, 0.0, 1) == 0.0
    desk.begin(stuck, 0.0, 1000)
    desk.sends(stuck, 1.0)
    assert desk.ask(PeerId("2"), 2.0, 1) > 0.0
    assert desk.ask(PeerId("2"), 1.0 + STUCK_SECONDS, 1) == 0.0
    assert desk.ask(PeerId("3"), 1.0 + STUCK_SECONDS, 1) > 0.0
    desk.sent(stuck, 500, 40.0)
    desk.sends(stuck, 40.0)
    assert desk.ask(PeerId("4"), 41.0, 1) > 0.0, "it goes on"
    for name in ("2", "3"):
        assert desk.ask(PeerId(name), 41.0) == 0.0
        desk.begin(PeerId(name), 41.0, 1000)
    assert desk.ask(PeerId("4"), 100.0, 4) > 0.0, "there are no more places than there are"


@given(st.floats(100.0, 1e9))
def test_the_amount_of_one_turn_fits_the_rate(rate: float) -> None:
    turn = UploadPace(rate).turn_bytes
    assert turn <= max(rate / 20, 4096)
    assert turn <= 1 << 20


# Kept pieces


def pieces_of(seed: int) -> TrainingState:
    torch.manual_seed(seed)
    parameters = [("frozen", torch.ones(2048)), ("w", torch.randn(4096))]
    return look(parameters, run="r", epoch=seed, piece_bytes=4096).copy()


def spoil(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(b"rust")


async def test_pieces_survive_in_a_file_and_are_believed_only_by_their_digest(
    tmp_path: Path,
) -> None:
    state = pieces_of(1)
    kept = KeptPieces(tmp_path / "new")
    await kept.begin(state.manifest)
    for number in (0, 3, 5):
        kept.put(number, state.piece(number))
    await kept.write_down()
    spoil(tmp_path / "new" / FILE_NAME, 3 * 4096)
    again = KeptPieces(tmp_path / "new")
    await again.begin(state.manifest)
    assert again.here == {0, 5}
    for number in set(range(state.manifest.piece_count)) - again.here:
        again.put(number, state.piece(number))
    assert (await again.finish()).digest == state.digest
    assert not (tmp_path / "new").exists()
    with pytest.raises(ProtocolMisuse):
        await again.finish()


async def test_pieces_that_did_not_change_from_one_state_to_the_next_stay(tmp_path: Path) -> None:
    first, second = pieces_of(1), pieces_of(2)
    kept = KeptPieces(tmp_path / "new")
    await kept.begin(first.manifest)
    for number in range(first.manifest.piece_count):
        kept.put(number, first.piece(number))
    await kept.write_down()
    await kept.begin(second.manifest)
    assert kept.here == {0, 1}  # the parameter that is frozen
    await kept.begin(first.manifest)
    assert kept.here == {0, 1}, "the file is read only once"


async def test_a_disk_that_cannot_be_written_does_not_stop_the_download(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    state = pieces_of(1)
    kept = KeptPieces(tmp_path / "file")
    await kept.begin(state.manifest)
    for number in range(state.manifest.piece_count):
        kept.put(number, state.piece(number))
        await kept.write_down()
    assert (await kept.finish()).digest == state.digest
    assert sum("not kept on disk" in record.message for record in caplog.records) == 1


async def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    state, precious = pieces_of(1), tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / FILE_NAME).symlink_to(precious)
    kept = KeptPieces(tmp_path)
    await kept.begin(state.manifest)
    kept.put(0, state.piece(0))
    await kept.write_down()
    assert precious.read_text() == "mine"


# The lock on the parameters


def test_a_step_waits_for_readers_and_later_readers_for_the_step() -> None:
    lock, order = StateLock(), []
    changing, read = threading.Event(), threading.Event()

    def change() -> None:
        changing.set()
        with lock.changing():
            order.append("changed")

    def read_later() -> None:
        with lock.reading():
            order.append("read later")
            read.set()

    with lock.reading(), lock.reading():
        writer = threading.Thread(target=change)
        writer.start()
        assert changing.wait(5)
        while not lock._waiting_to_change:
            pass
        reader = threading.Thread(target=read_later)
        reader.start()
        assert not read.is_set()
        order.append("read")
    writer.join(5)
    reader.join(5)
    assert order == ["read", "changed", "read later"]


def test_no_reader_sees_a_half_written_state() -> None:
    lock, pair, torn = StateLock(), [0, 0], []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            with lock.reading():
                torn.append(pair[0] != pair[1])

    readers = [threading.Thread(target=read) for _ in range(3)]
    for one in readers:
        one.start()
    for number in range(200):
        with lock.changing():
            pair[0] = number
            pair[1] = number
    over.set()
    for one in readers:
        one.join(5)
    assert not any(torn)


def test_a_capture_of_the_same_values_is_the_same_state() -> None:
    one = capture([("w", torch.ones(3))], run="r", epoch=1)
    two = capture([("w", torch.ones(3))], run="r", epoch=1)
    assert one.digest == two.digest
