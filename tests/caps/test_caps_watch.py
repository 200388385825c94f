"""The training when a cap is reached, as its owner sees it."""

# ruff: noqa: ARG001 - asking for `autojump_clock` is how a test gets pytest-trio's virtual clock

from __future__ import annotations

import resource
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from node.core.caps.idleness import (
    FREE_SECONDS,
    INPUT_SECONDS,
    Idleness,
    OtherLoad,
    SignsOfUse,
    own_seconds,
)
from node.core.caps.ledger import LedgerFile
from node.core.caps.memory import (
    DEVICE,
    HOST,
    SHRINK_SECONDS,
    BackStop,
    MemoryWatch,
    TooLarge,
    refuse_above,
)
from node.core.caps.settings import Caps
from node.core.caps.used import CapsUsed, used_rows
from node.core.places import Places, find_places
from node.training.caps_watch import CapsClocks, WatchedCaps, open_caps
from node.training.gate import Gate
from node.training.happenings import Began
from protocols.blocking import do_at_once
from protocols.network import TrafficFacts

GB = 1_000_000_000
START = datetime(2026, 11, 22, 21, 59, 30, tzinfo=UTC).timestamp()


class Machine:
    """A machine whose clock runs with trio's, and on which a test sets what is carried and held."""

    def __init__(self, home: Path) -> None:
        self.places: Places = find_places({"POTLUCK_HOME": str(home)})
        self.gate = Gate()
        self.said: list[str] = []
        self.carried = TrafficFacts()
        self.held: int | None = 100_000_000
        self.held_on_gpu: int | None = None
        self.starts = START - trio.current_time()  # a test moves it to let days pass
        do_at_once()

    def traffic(self) -> TrafficFacts:
        return self.carried

    def clocks(self) -> CapsClocks:
        return CapsClocks(
            moment=lambda: self.starts + trio.current_time(),
            wall=lambda moment: datetime.fromtimestamp(moment, UTC).replace(tzinfo=None),
            memory=lambda: self.held,
            device_memory=lambda: self.held_on_gpu,
        )

    def caps(self, caps: Caps):  # type: ignore[no-untyped-def]  # a context manager
        return open_caps(
            caps,
            self.gate,
            self.places,
            traffic=self.traffic,
            told=self.said.append,
            clocks=self.clocks(),
        )

    def reasons(self) -> list[str]:
        return [reason.words for reason in self.gate.reasons()]


async def test_training_begins_and_ends_with_the_schedule(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps(schedule="22:00-07:00")) as watched:
        assert machine.reasons() == ["outside of the schedule (22:00-07:00): continues at 22:00"]
        assert watched.used().goes_on_at == START + 30
        await trio.sleep(31)
        assert machine.gate.is_open
        assert watched.used().pauses_at == START + 30 + 9 * 3600
        machine.starts += 9 * 3600
        await trio.sleep(1)
        (reason,) = machine.gate.reasons()
        assert (reason.name, reason.until) == ("schedule", START + 30 + 24 * 3600)
    assert machine.gate.is_open


async def test_a_quota_warns_pauses_and_begins_anew(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps(quota_bytes=100 * GB)) as watched:
        machine.carried = TrafficFacts(50 * GB, 30 * GB)
        await trio.sleep(1)
        assert machine.said == ["the quota for 2026-11 is nearly used up: 80 GB of 100 GB"]
        machine.carried = TrafficFacts(60 * GB, 39 * GB)
        await trio.sleep(1)
        assert machine.reasons() == ["the quota of 100 GB for 2026-11 is used up"]
        machine.starts += 9 * 24 * 3600
        await trio.sleep(1)
        assert machine.gate.is_open
        assert watched.used().month == "2026-12"


async def test_the_used_quota_is_known_after_a_restart(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps(quota_bytes=100 * GB)):
        machine.carried = TrafficFacts(99 * GB, 0)
    machine.carried = TrafficFacts()  # of another process
    async with machine.caps(Caps(quota_bytes=100 * GB)) as watched:
        assert not machine.gate.is_open  # before one batch was computed
        assert watched.used().month_bytes == 99 * GB


async def test_traffic_before_the_first_look_counts(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    machine.carried = TrafficFacts(1 * GB, 2 * GB)
    async with machine.caps(Caps(quota_bytes=100 * GB)) as watched:
        assert watched.used().month_bytes == 3 * GB


async def test_there_is_no_ledger_before_there_is_anything_to_count(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps(quota_bytes=100 * GB)):
        await trio.sleep(70)
    assert not machine.places.traffic_file.exists()


async def test_a_state_that_no_quota_has_room_for_is_refused(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps(quota_bytes=2 * GB)) as watched:
        with pytest.raises(TooLarge, match=r"poem begins with .* 3 GB; .* 2 GB a month.*--quota"):
            watched.expect(3 * GB, "poem")


async def test_a_state_that_only_this_month_has_no_room_for_is_waited_for(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps(quota_bytes=100 * GB)) as watched:
        machine.carried = TrafficFacts(60 * GB, 0)
        watched.expect(50 * GB, "poem")
        assert machine.reasons() == [
            "40 GB of the quota for 2026-11 are left, but the run's state has 50 GB"
        ]
        machine.starts += 10 * 24 * 3600
        await trio.sleep(1)
        assert machine.gate.is_open
        watched.hear(Began("poem", 3))
        machine.carried = TrafficFacts(120 * GB, 0)
        await trio.sleep(1)
        assert machine.gate.is_open


async def test_a_download_that_the_quota_has_room_for_is_not_cut_in_the_middle(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """It was once what was left had become less than the whole state; in each month anew."""
    machine = Machine(tmp_path)
    async with machine.caps(Caps(quota_bytes=100 * GB)) as watched:
        machine.carried = TrafficFacts(20 * GB, 20 * GB)
        watched.expect(50 * GB, "poem")
        for received in (40, 60, 69):
            machine.carried = TrafficFacts(20 * GB, received * GB)
            await trio.sleep(1)
            assert machine.gate.is_open
        machine.carried = TrafficFacts(32 * GB, 45 * GB)  # it has uploaded as well
        await trio.sleep(1)
        assert not machine.gate.is_open, "23 GB are left, and 25 GB are missing"


async def test_a_kill_loses_some_seconds_of_counting_and_no_more(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps()):
        for second in range(25):
            machine.carried = TrafficFacts(second * 2_000_000, 0)
            await trio.sleep(1)
        on_disk, _ = LedgerFile(machine.places.traffic_file).load()
        assert on_disk.now.sent_bytes >= machine.carried.sent_bytes - 7 * 2_000_000


async def test_a_node_that_leaves_at_once_has_counted_everything(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    with trio.CancelScope() as scope:
        async with machine.caps(Caps(quota_bytes=GB)):
            machine.carried = TrafficFacts(5_000_000, 6_000_000)
            scope.cancel()  # as a second Ctrl-C does, from outside
            await trio.sleep(1)
    on_disk, _ = LedgerFile(machine.places.traffic_file).load()
    assert on_disk.now.total_bytes == 11_000_000
    assert machine.gate.is_open


async def test_rates_are_of_the_last_ten_seconds(autojump_clock: MockClock, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps(upload_bytes_per_second=2e6)) as watched:
        for step in range(60):
            machine.carried = TrafficFacts(step * 500_000, step * 100_000)
            await trio.sleep(0.5)
        used = watched.used()
    assert used.upload_bytes_per_second == pytest.approx(1e6, rel=0.06)
    assert used.download_bytes_per_second == pytest.approx(2e5, rel=0.06)
    assert isinstance(used, CapsUsed)
    assert used.upload_limit == 2e6


async def test_memory_near_its_cap_shrinks_batches_and_then_leaves_in_words(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps(memory_bytes=10**12)) as watched:
        machine.held = 900 * GB
        await trio.sleep(1)
        assert watched.batch_share == 0.5
        assert watched.must_leave is None
        machine.held = 980 * GB
        await trio.sleep(1)
        assert "980 GB of memory, and may hold 1 TB" in str(watched.must_leave)
        assert str(watched.must_leave) in machine.said


async def test_nothing_more_is_kept_that_would_bring_the_memory_to_its_cap(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps(memory_bytes=4 * GB)) as watched:
        machine.held = 3 * GB
        assert watched.has_memory_for(GB // 2)
        assert not watched.has_memory_for(GB)
        assert watched.must_leave is None
    async with machine.caps(Caps()) as watched:
        assert watched.has_memory_for(100 * GB)


async def test_batches_in_a_gpus_memory_are_not_made_smaller_for_the_machines(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps(memory_bytes=10**12)) as watched:
        watched.leave_batches_alone()
        machine.held = 900 * GB
        await trio.sleep(60)
        assert watched.batch_share == 1.0
        machine.held = 980 * GB
        await trio.sleep(1)
        assert watched.must_leave is not None


async def test_the_owner_sees_how_much_of_the_gpus_cap_is_used(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps(device_memory_bytes=8 * GB)) as watched:
        assert not [name for name, _ in used_rows(watched.used()) if name == "GPU cap"]
        machine.held_on_gpu = 7 * GB
        assert ("GPU cap", "7 GB of 8 GB") in used_rows(watched.used())


async def test_others_who_need_the_machine_pause_it(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    async with machine.caps(Caps()) as watched:
        assert isinstance(watched, WatchedCaps)
        for _ in range(2):
            watched.look_at_others(SignsOfUse(others_share=0.6))
        assert machine.reasons() == ["paused while other programs use 60% of its processor"]
        watched.look_at_others(SignsOfUse(others_share=0.0))
        await trio.sleep(FREE_SECONDS + 1)
        watched.look_at_others(SignsOfUse(others_share=0.0))
        assert machine.gate.is_open
        assert machine.said[-1] == "nobody else needs this machine: training continues"


def test_one_busy_moment_pauses_nothing() -> None:
    idleness = Idleness()
    for now in range(100):
        idleness.look(now, SignsOfUse(others_share=0.9 if now % 3 == 0 else 0.0))
        assert not idleness.is_needed


def test_a_machine_that_is_used_a_little_keeps_doing_what_it_does() -> None:
    idleness = Idleness()
    for now in range(0, 600, 2):
        idleness.look(now, SignsOfUse(others_share=0.2))
        assert not idleness.is_needed
    for now in range(600, 610, 2):
        idleness.look(now, SignsOfUse(others_share=0.5))
    for now in range(610, 1200, 2):
        idleness.look(now, SignsOfUse(others_share=0.2))
        assert idleness.is_needed


def test_a_key_pauses_at_once_and_for_a_while() -> None:
    idleness = Idleness()
    idleness.look(0.0, SignsOfUse(0.0, input_age=1.0))
    assert idleness.why == "somebody uses its keyboard or mouse"
    idleness.look(INPUT_SECONDS, SignsOfUse(0.0, input_age=INPUT_SECONDS + 1))
    assert idleness.is_needed
    idleness.look(INPUT_SECONDS + FREE_SECONDS, SignsOfUse(0.0, input_age=INPUT_SECONDS + 61))
    assert not idleness.is_needed


def test_unknown_measurements_pause_nothing() -> None:
    idleness = Idleness()
    idleness.look(0.0, SignsOfUse())
    idleness.look(2.0, SignsOfUse())
    assert not idleness.is_needed


def test_the_nodes_own_work_is_not_counted_as_that_of_others() -> None:
    load = OtherLoad()
    load.see()
    began = own_seconds()
    while own_seconds() - began < 0.03:
        sum(range(10_000))
    seen = load.see()
    assert seen.others_share is None or 0.0 <= seen.others_share <= 1.0
    assert own_seconds() >= began + 0.03


def test_a_run_that_does_not_fit_is_refused_with_what_it_needs() -> None:
    refuse_above(HOST, None, None, 10**15, "poem")
    refuse_above(HOST, 8 * GB, 4 * GB, 8 * GB, "poem")
    with pytest.raises(TooLarge, match=r"poem needs about 9 GB of memory.*may hold 8 GB"):
        refuse_above(HOST, 8 * GB, None, 9 * GB, "poem")
    with pytest.raises(
        TooLarge, match=r"about 9 GB of a GPU's memory; the GPU here has 8 GB"
    ) as it:
        refuse_above(DEVICE, None, 8 * GB, 9 * GB, "poem")
    assert it.value.advice.startswith("Try --offload")


def test_batches_shrink_no_faster_than_it_can_show() -> None:
    watch = MemoryWatch(100)
    for now in range(40):
        watch.look(90, now)
    assert watch.batch_share == 1 / 8
    assert watch.look(90, 10 * SHRINK_SECONDS) == ""
    assert watch.must_leave is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells and limits it")
def test_the_kernel_stops_a_process_that_grows_beyond_the_cap() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    held = 100_000_000
    with BackStop(held) as back_stop:
        back_stop.look(held)
        with pytest.raises(MemoryError):
            bytearray(64_000_000)
        back_stop.look(held // 2)  # half of what is asked for was never touched
        bytearray(20_000_000)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_usage_is_shown_beside_the_limit() -> None:
    assert used_rows(CapsUsed(upload_bytes_per_second=1.5e6)) == [
        ("traffic", "sends 1.5 MB/s, receives 0 B/s")
    ]
    used = CapsUsed(1e6, 2e6, 3e6, 4e6, 5 * GB, 8 * GB, 0.5, "2026-11", 50 * GB, 200 * GB)
    assert used_rows(used) == [
        ("traffic", "sends 1 MB/s of 2 MB/s, receives 3 MB/s of 4 MB/s"),
        ("quota", "50 GB of 200 GB in 2026-11 (25%)"),
        ("cap", "5 GB of 8 GB; batches have 50% of their size"),
    ]
