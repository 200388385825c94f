"""The files of runs in a home are listed; only a state that others have anyway is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.app.commands.leave import kept_in_home, words_of
from node.core.places import Places, find_places
from node.run.kept import STATE_FILE, fetching_folder, remove_fetched_in_part
from protocols.accumulation.state_download import FILE_NAME

ORGANISER = "imr33rjsn4agqkoesdkkljzaxq"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places({}, home=str(tmp_path))


def written(file: Path, length: int) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(length))
    return file


def test_the_state_of_another_run_is_removed_and_nothing_else(places: Places) -> None:
    own = fetching_folder(places, "poem", ORGANISER)
    others = fetching_folder(places, "prose", ORGANISER)
    stay = {
        written(own / STATE_FILE, 10),
        written(places.runs_folder / f"prose-{ORGANISER}.position", 20),
        written(places.runs_folder / f"prose-{ORGANISER}.signed", 30),
        written(places.credit_folder / "prose" / "me-0.page", 40),
        written(places.data_folder / "identity.key", 50),
    }
    written(others / STATE_FILE, 5_000_000)
    assert kept_in_home(places)["fetched_in_part_bytes"] == 5_000_010

    assert remove_fetched_in_part(places, but=own) == 5_000_000
    assert {one for one in places.data_folder.rglob("*") if one.is_file()} == stay
    assert not others.exists()
    assert remove_fetched_in_part(places, but=own) == 0


def test_nothing_is_removed_through_a_link_or_with_another_name(
    places: Places, tmp_path: Path
) -> None:
    precious = written(tmp_path / "precious" / STATE_FILE, 9)
    places.runs_folder.mkdir()
    fetching_folder(places, "prose", ORGANISER).symlink_to(precious.parent)
    notes = written(fetching_folder(places, "verse", ORGANISER) / "notes.txt", 9)
    assert remove_fetched_in_part(places, but=tmp_path) == 0
    assert precious.exists()
    assert notes.exists()


def test_a_volunteer_that_leaves_is_told_how_much_is_kept(places: Places) -> None:
    assert kept_in_home(places)["kept_bytes"] == 0
    written(places.pass_file, 1_000)
    written(
        places.data_folder / "thesis.tex", 70_000
    )  # a file of the volunteer, in the same folder
    home = places.data_folder
    assert words_of(kept_in_home(places)) == f" 1 kB stay in {home} for the next time."
    written(fetching_folder(places, "poem", ORGANISER) / STATE_FILE, 4_000_000)
    assert words_of(kept_in_home(places)) == (
        f" 4 MB stay in {home} for the next time, 4 MB of them of a state that was being fetched."
    )


def test_the_state_being_fetched_has_the_name_that_the_fetcher_gives_it() -> None:
    assert STATE_FILE == FILE_NAME
