"""What the page tells everybody, and what it does not."""

from __future__ import annotations

import dataclasses
import json
import math

import msgspec
import pytest

from lab.page.scenes import NAMES, PageScene, peer_id
from node.app.page.public import sections_of
from node.app.views.qr import lines_that_fit, qr_rows
from node.core.display_name import short
from node.core.training_view import BatchView, TrainerView
from node.training.happenings import Notice, PeerCame

PSEUDONYMS = '[page]\nnames = "pseudonyms"\n'


def told(scene: PageScene) -> str:
    return json.dumps(sections_of(scene.source()), ensure_ascii=False)


def test_an_invite_that_is_too_long_for_a_qr_code_is_shown_without_one() -> None:
    source = dataclasses.replace(
        PageScene(steps=3).source(), invite=lambda: "potluck-run:" + 4000 * "a"
    )
    join = sections_of(source)["join"]
    assert (len(join["invite"]), join["qr"]) == (4012, [])
    assert lines_that_fit(join["invite"], wanted=True, colour=True) == [
        "(It has 4,012 characters, which is too long for a QR code.)"
    ]


def test_a_qr_code_is_made_once() -> None:
    assert qr_rows("potluck-run:abc") is qr_rows("potluck-run:abc")


def test_an_open_run_names_its_peers_with_the_ends_of_their_keys() -> None:
    scene = PageScene(peers=4, steps=30)
    rows = sections_of(scene.source())["people"]["rows"]
    assert rows[0]["who"] == f"“backbone” {short(peer_id(0))}"
    assert {one["who"].split("”")[0] for one in rows[1:]} == {f"“{name}" for name in NAMES[1:4]}


@pytest.mark.parametrize(
    "scene",
    [
        PageScene(peers=6, steps=400, page_table=PSEUDONYMS),
        PageScene(peers=6, steps=400, closed=True),
    ],
    ids=["the organiser wants it", "the run is closed"],
)
def test_with_pseudonyms_no_name_and_no_key_is_anywhere_on_the_page(scene: PageScene) -> None:
    scene.history.take(PeerCame(peer_id(2), "direct"))
    text = told(scene)
    for number in range(6):
        assert peer_id(number) not in text
        assert peer_id(number)[-8:] not in text
    assert not [name for name in NAMES if name in text]
    assert peer_id(999)[-8:] not in text  # one that has left


def test_a_pseudonym_is_the_same_everywhere_on_the_page() -> None:
    scene = PageScene(peers=3, steps=30, page_table=PSEUDONYMS)
    scene.history.take(PeerCame(peer_id(1), "direct"))
    found = sections_of(scene.source())
    names = {one["who"] for one in found["people"]["rows"]}
    assert {one[0] for one in found["round"]["members"]} == names
    assert {one[1] for one in found["board"]["people"]} < names
    assert found["events"][0][1].removesuffix(" came (direct)") in names


def test_a_closed_run_shows_names_if_its_organiser_wants_that() -> None:
    scene = PageScene(peers=3, steps=30, closed=True, page_table='[page]\nnames = "names"\n')
    assert "Grace" in told(scene)


def test_events_are_left_out_if_the_organiser_wants_that() -> None:
    assert sections_of(PageScene(steps=30).source())["events"]
    hidden = PageScene(steps=30, page_table="[page]\nevents = false\n")
    assert sections_of(hidden.source())["events"] is None


def test_no_folder_and_no_notice_for_the_owner_is_on_the_page() -> None:
    scene = PageScene(peers=4, steps=200)
    scene.history.take(Notice("the folder of the owner is full"))
    assert "/secret" not in told(scene)
    assert "owner" not in told(scene)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_unknown(value: float) -> None:
    scene = PageScene(peers=3, steps=10)
    scene.step(10, value)
    scene.view = msgspec.structs.replace(
        scene.view,
        loss=value,
        seconds_left=value,
        batch=BatchView(samples=value, samples_per_second=value, seconds_to_step=value),
    )
    run = sections_of(scene.source())["run"]
    unknown = ("loss", "seconds_left", "rate", "seconds_to_step")
    assert [run[name] for name in unknown] == [None] * 4
    assert run["batch"] == 0
    json.loads(msgspec.json.encode(sections_of(scene.source())), parse_constant=pytest.fail)


def test_a_page_of_many_peers_is_bounded() -> None:
    found = sections_of(PageScene(peers=700, steps=3).source())
    assert len(found["people"]["rows"]) == 500
    assert found["people"]["more"] == 200
    assert len(found["board"]["people"]) == 100


def test_before_the_definition_is_known_nobody_is_named() -> None:
    """What its organiser has decided about names is not known either."""
    scene = PageScene(peers=4, steps=200)
    source = dataclasses.replace(scene.source(), definition=lambda: None)
    found = sections_of(source)
    assert found["events"] is None
    assert not [name for name in NAMES if name in json.dumps(found["people"], ensure_ascii=False)]


def test_right_after_a_restart_the_page_has_the_last_step_and_its_loss() -> None:
    scene = PageScene(peers=4, steps=50)
    loss = scene.view.loss
    scene.view = TrainerView(run="poem", peer=peer_id(0))
    run = sections_of(scene.source())["run"]
    assert (run["step"], run["steps"], run["loss"]) == (50, 4000, round(loss or 0.0, 3))
