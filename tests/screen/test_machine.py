"""The screen shows what the drivers of this machine tell, and nothing in place of the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from lab.scenes import STATES
from node.app.screen import Look, Scene, drawn
from node.app.screen.live import Screen
from node.app.screen.terminal import Terminal
from node.core.sensors import GpuReading, Reading, Sensors
from tests.screen.pseudo import Pseudo
from tests.waiting import PATIENCE_SECONDS, until

GPU = GpuReading(0.97, 64.0, 281.5, 9_440_000_000, 25_800_000_000)
MACHINE = replace(STATES["training"], processor=1.6, processors=4)


def panel(scene: Scene, look: Look | None = None) -> list[str]:
    """The lines of the panel, on a wide terminal."""
    lines = [(look or Look()).shown(one.plain) for one in drawn(scene, 120, 60)]
    first = next(number for number, one in enumerate(lines) if " this machine " in one)
    inner = [one[66:].strip("│| ") for one in lines[first + 1 :]]
    return inner[: next(number for number, one in enumerate(inner) if one[0] in "╰+")]


def test_temperature_and_power_stand_behind_the_bars() -> None:
    shown = panel(replace(MACHINE, sensors=Reading(53.5, 28.4, (GPU,))))
    processor, gpu, memory = shown[1:4]
    assert processor.startswith("processor ")
    assert processor.endswith(" 1.6 of 4 busy · 54°C · 28 W")
    assert gpu.startswith("GPU ")
    assert gpu.endswith(" 97 % · 64°C · 282 W")
    assert memory.endswith(" 9.44 GB of 25.8 GB")


def test_several_gpus_are_numbered() -> None:
    shown = panel(replace(MACHINE, sensors=Reading(gpus=(GPU, replace(GPU, busy=0.03)))))
    named = [one for one in shown if one.startswith("GPU ")]
    assert [one.split()[1] for one in named] == ["0", "1"]
    assert named[1].endswith(" 3 % · 64°C · 282 W")


def test_what_a_driver_does_not_tell_is_left_out() -> None:
    assert panel(replace(MACHINE, sensors=Reading(gpus=(GpuReading(),)))) == panel(MACHINE)
    shown = panel(replace(MACHINE, sensors=Reading(gpus=(GpuReading(watts=35.0),))))
    assert [one.split() for one in shown if one.startswith("GPU")] == [["GPU", "35", "W"]]


def test_a_terminal_without_the_sign_of_degrees_has_none() -> None:
    ascii_only = Look(encoding="ascii")
    shown = panel(replace(MACHINE, sensors=Reading(degrees=53.5)), ascii_only)
    assert shown[1].endswith(" 1.6 of 4 busy - 54 C")


@pytest.mark.slow
async def test_the_sensors_are_read_while_the_screen_is_there(
    pseudo: Pseudo, tmp_path: Path
) -> None:
    zone = tmp_path / "thermal" / "thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "type").write_text("x86_pkg_temp\n")
    (zone / "temp").write_text("61000\n")
    sensors = Sensors(tmp_path)
    screen = Screen(Terminal(pseudo.descriptor, Look()), lambda _text: None, sensors=sensors)

    def is_shown() -> bool:
        screen.show(STATES["training"].view)
        return "61°C" in "\n".join(pseudo.read())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(screen.run)
        await until(is_shown, PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()
