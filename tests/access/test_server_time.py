"""Server time goes on through wrong clocks, set clocks and sleep."""

from __future__ import annotations

from node.core.access.server_time import ServerTime, distance
from node.net.clocks import Clocks

SERVER_START = 1_700_000_000.0


class Machine:
    """A machine whose clocks are told what to do; the server's goes on by itself."""

    def __init__(self, wall_off: float = 0.0, counts_sleep: bool = True) -> None:
        self.true = 0.0
        self.wall_off = wall_off
        self.slept = 0.0
        self.clocks = Clocks(self._wall, self._elapsed, counts_sleep)

    def _wall(self) -> float:
        return SERVER_START + self.true + self.wall_off

    def _elapsed(self) -> float:
        return 50.0 + self.true - (0.0 if self.clocks.counts_sleep else self.slept)

    def passes(self, seconds: float) -> None:
        self.true += seconds

    def sleeps(self, seconds: float) -> None:
        self.true += seconds
        self.slept += seconds

    @property
    def server_ms(self) -> int:
        return int((SERVER_START + self.true) * 1000)

    def measure(self, time: ServerTime, there: float = 0.05, back: float = 0.05) -> bool:
        asked = time.moment()
        self.passes(there)
        said = self.server_ms
        self.passes(back)
        return time.measured(said, asked, time.moment())


def error_ms(machine: Machine, time: ServerTime) -> int:
    return time.now_ms() - machine.server_ms


def test_a_clock_ten_minutes_off_does_not_matter_once_measured() -> None:
    for off in (-600.0, 600.0):
        machine = Machine(wall_off=off)
        time = ServerTime(machine.clocks)
        assert error_ms(machine, time) == off * 1000
        machine.measure(time)
        assert abs(error_ms(machine, time)) <= 50
        assert abs(time.offset_ms + off * 1000) <= 50


def test_setting_the_clock_changes_nothing_but_the_offset() -> None:
    machine = Machine(wall_off=-600.0)
    time = ServerTime(machine.clocks)
    machine.measure(time)
    machine.wall_off = 0.0
    machine.passes(10.0)
    assert abs(error_ms(machine, time)) <= 50
    assert abs(time.offset_ms) <= 50
    machine.wall_off = 3_600.0
    assert abs(error_ms(machine, time)) <= 50


def test_sleep_passes() -> None:
    for counts_sleep in (True, False):
        machine = Machine(wall_off=600.0, counts_sleep=counts_sleep)
        time = ServerTime(machine.clocks)
        machine.measure(time)
        machine.sleeps(7_200.0)
        assert abs(error_ms(machine, time)) <= 50
        assert time.wants_measuring is not counts_sleep


def test_where_sleep_is_guessed_a_clock_that_is_set_back_is_not_followed() -> None:
    machine = Machine(counts_sleep=False)
    time = ServerTime(machine.clocks)
    machine.measure(time)
    machine.wall_off = -3_600.0
    machine.passes(5.0)
    assert abs(error_ms(machine, time)) <= 50
    assert time.wants_measuring


def test_an_offset_of_an_earlier_life_holds_until_the_first_measurement() -> None:
    machine = Machine(wall_off=600.0)
    time = ServerTime(machine.clocks, known_offset_ms=-600_000)
    assert error_ms(machine, time) == 0
    assert time.wants_measuring


def test_server_time_is_never_before_a_document_that_is_here() -> None:
    machine = Machine(wall_off=-86_400.0)
    time = ServerTime(machine.clocks)
    time.is_at_least(machine.server_ms - 1_000)
    assert error_ms(machine, time) == -1_000
    time.is_at_least(machine.server_ms - 5_000)
    assert error_ms(machine, time) == -1_000


def test_an_answer_that_took_too_long_says_nothing() -> None:
    machine = Machine(wall_off=600.0)
    time = ServerTime(machine.clocks)
    assert not machine.measure(time, there=0.0, back=25.0)
    assert not time.is_measured


def test_a_slow_measurement_does_not_replace_a_better_one() -> None:
    machine = Machine()
    time = ServerTime(machine.clocks)
    machine.measure(time)
    machine.passes(60.0)
    machine.measure(time, there=0.0, back=8.0)
    assert abs(error_ms(machine, time)) <= 50


def test_a_measurement_that_contradicts_the_last_one_replaces_it() -> None:
    machine = Machine()
    time = ServerTime(machine.clocks)
    time.measured(machine.server_ms - 500_000, time.moment(), time.moment())
    machine.measure(time)
    assert abs(error_ms(machine, time)) <= 50


def test_how_far_off_is_said_once_and_again_when_it_changes() -> None:
    machine = Machine(wall_off=-600.0)
    time = ServerTime(machine.clocks)
    assert time.news() is None, "nothing is known yet"
    machine.measure(time)
    said = str(time.news())
    assert said.startswith("The clock of this machine is 10.0 minutes behind the auth server's.")
    assert time.news() is None
    machine.wall_off = 0.0
    assert time.news() is None
    machine.wall_off = 600.0
    assert "10.0 minutes ahead of" in str(time.news())


def test_distances_are_in_words() -> None:
    assert distance(90_000) == "90.0 seconds"
    assert distance(-7_200_000) == "2.0 hours"
