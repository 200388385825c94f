"""When a pass is needed and used: a home is in one run, of one organiser."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec
import pytest

from auth.invites import Invite
from node.core.access.pass_file import KeptPass, keep_pass
from node.core.configuration import Configuration, read_configuration
from node.core.disk_trouble import HomeUnusable
from node.core.wrong_use import WrongUse
from node.run.invite import RunInvite
from node.training.join.admission import Need, access_of, check_home, keep_invite, pass_needed
from tests.runs.definitions import FINGERPRINT
from tests.runs.test_invites import BOOTSTRAP

ACCESS = Invite("poem", (), "https://auth.example", FINGERPRINT)
OPEN = RunInvite("poem", BOOTSTRAP[:1], FINGERPRINT)
CLOSED = msgspec.structs.replace(OPEN, access=ACCESS)
WITH_CODE = msgspec.structs.replace(OPEN, access=msgspec.structs.replace(ACCESS, code="orange"))


def home(folder: Path, *, pass_for: str = "") -> Configuration:
    configuration = read_configuration({}, home=str(folder))
    if pass_for:
        kept = KeptPass(pass_for, b"not looked at", FINGERPRINT, ACCESS.auth_url)
        keep_pass(configuration.places.pass_file, kept)
    return configuration


def test_a_code_asks_nobody_and_an_open_run_asks_for_nothing(tmp_path: Path) -> None:
    fresh = home(tmp_path)
    assert pass_needed(fresh, OPEN, "") is Need.NOTHING
    assert pass_needed(fresh, CLOSED, "") is Need.PERSON
    assert pass_needed(fresh, CLOSED, "orange") is Need.CODE
    assert pass_needed(fresh, WITH_CODE, "") is Need.CODE
    assert access_of(WITH_CODE, "apple").code == "apple", "who names one means it"
    with pytest.raises(WrongUse, match="open run"):
        access_of(OPEN, "")


def test_a_home_with_a_pass_for_another_run_refuses_the_invite(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="in the run prose; the invite is for poem") as caught:
        pass_needed(home(tmp_path, pass_for="prose"), CLOSED, "")
    assert "POTLUCK_HOME" in caught.value.advice


@pytest.mark.parametrize("invite", [OPEN, CLOSED], ids=["open", "closed"])
def test_a_run_of_the_same_name_is_not_the_same_run(invite: RunInvite, tmp_path: Path) -> None:
    configuration = home(tmp_path, pass_for="poem")
    keep_invite(configuration.places, CLOSED)
    pass_needed(configuration, invite, "")
    another = msgspec.structs.replace(invite, organiser="a" * len(FINGERPRINT))
    with pytest.raises(WrongUse, match="the invite is another organiser's"):
        pass_needed(configuration, another, "")


def test_looking_whether_a_home_can_be_one_leaves_nothing_in_it(tmp_path: Path) -> None:
    check_home(home(tmp_path / "new"))
    assert [one for one in (tmp_path / "new").rglob("*") if not one.is_dir()] == []


def test_on_a_full_disk_no_code_is_spent(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(HomeUnusable, match="There is no room"):
            check_home(home(tmp_path / "new"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [one for one in (tmp_path / "new").rglob("*") if not one.is_dir()] == []
