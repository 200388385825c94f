"""`potluck experts`: what can be typed, and the picture of who serves what."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.app.cli.catalogue import parse
from node.app.commands.experts import serving_wish
from node.app.commands.experts_list import census_lines, picture_of
from node.app.views.status_view import experts_words
from node.core.caps.memory import PROCESS_BYTES, TooLarge
from node.core.training_view import ExpertsView, GridView
from node.core.wrong_use import WrongUse
from node.training.census import CensusServer, CountedGrid, ExpertCensus, OwnExpert
from node.training.join import ServingWish
from node.training.join.fit import REQUESTS_BYTES, experts_to_serve, memory_for_experts
from protocols.experts import ExpertGrid, Uid, WrongUid
from tests.commands.console import objects, potluck_here

GRIDS = (ExpertGrid("ffn0", (2, 3)), ExpertGrid("ffn1", (2, 3)))
NOW = 1_700_000_000.0
EACH_BYTES = 1_000_000


def wish_of(words: str) -> ServingWish:
    _, arguments = parse(["experts", "serve", *words.split()])
    return serving_wish(arguments)


def test_cells_can_be_named_as_blocks_or_one_by_one() -> None:
    blocks = wish_of("--grid ffn0:1.* --grid ffn1:0-1.2")
    assert list(map(str, blocks.cells_of(GRIDS))) == [
        "ffn0.1.0",
        "ffn0.1.1",
        "ffn0.1.2",
        "ffn1.0.2",
        "ffn1.1.2",
    ]
    single = wish_of("--uids ffn1.0.2,ffn0.1.1 --uids ffn0.1.1")
    assert single.cells_of(GRIDS) == (Uid("ffn1", (0, 2)), Uid("ffn0", (1, 1)))


@pytest.mark.parametrize("words", ["--grid ffn0", "--grid ffn0:2-1.0", "--uids ffn0.x", "--uids ,"])
def test_words_that_name_no_cell_are_wrong_use(words: str) -> None:
    with pytest.raises(WrongUse):
        wish_of(words)


@pytest.mark.parametrize("words", ["--grid ffn2:0.0", "--grid ffn0:0-2.0", "--uids ffn0.1"])
def test_cells_that_the_run_does_not_have_are_refused_with_those_that_it_has(words: str) -> None:
    with pytest.raises(WrongUid, match="ffn"):
        wish_of(words).cells_of(GRIDS)


def test_a_number_and_cells_exclude_each_other(tmp_path: Path) -> None:
    done = potluck_here(
        "experts", "serve", "--experts", "3", "--uids", "ffn0.1.1", "--json", home=tmp_path
    )
    assert done.returncode == 2
    assert "not allowed with" in objects(done.stdout)[0]["error"]["what"]


def test_a_server_without_experts_is_told_how_to_train_without_serving(tmp_path: Path) -> None:
    done = potluck_here("experts", "serve", "--experts", "0", "--json", home=tmp_path)
    assert done.returncode == 2
    assert "join --experts 0" in objects(done.stdout)[0]["error"]["advice"]


@pytest.mark.parametrize("action", ["serve", "list"])
def test_a_home_that_was_in_no_run_needs_an_invite(tmp_path: Path, action: str) -> None:
    done = potluck_here("experts", action, "--json", home=tmp_path)
    assert done.returncode == 2
    assert "no invite" in objects(done.stdout)[0]["error"]["what"]


# ---- how many


def test_a_peer_serves_a_quarter_of_the_cells_where_they_fit() -> None:
    def most(wish: ServingWish, room: int | None, named: int = 0) -> int:
        return experts_to_serve("poem", wish, named, 10, EACH_BYTES, room)

    assert most(ServingWish(), None) == 3
    assert most(ServingWish(), 2 * EACH_BYTES) == 2
    assert most(ServingWish(), 0) == 0
    assert most(ServingWish(0), 0) == 0
    assert most(ServingWish(20), None) == 10
    assert most(ServingWish(uids=(Uid("ffn0", (1, 1)),)), EACH_BYTES, 1) == 1
    with pytest.raises(TooLarge, match="2 fit"):
        most(ServingWish(3), 2 * EACH_BYTES)


def test_experts_get_half_of_what_their_owner_did_not_give_to_them_alone() -> None:
    base = PROCESS_BYTES + REQUESTS_BYTES
    cap = base + 1000
    assert memory_for_experts(cap, None, 0) == 1000
    assert memory_for_experts(cap, None, PROCESS_BYTES + 200) == 400
    assert memory_for_experts(None, cap, 0) == 500
    assert memory_for_experts(None, None, 0) is None
    assert memory_for_experts(1, None, 0) == 0


def test_a_gpus_memory_holds_no_process() -> None:
    cap = REQUESTS_BYTES + 1000
    assert memory_for_experts(cap, None, 0, on_gpu=True) == 1000
    assert memory_for_experts(cap, None, 200, on_gpu=True) == 400


# ---- the picture

ALICE = CensusServer(
    peer="12D3alice", experts=("ffn0.0.0", "ffn0.0.1"), load_seconds=0.25, since=NOW - 90
)
BEN = CensusServer(peer="12D3ben", experts=("ffn0.1.2",))
COUNTED = CountedGrid(name="ffn0", sizes=(2, 3), cells=6, live=3)
CENSUS = ExpertCensus(run="poem", grids=(COUNTED,), servers=(ALICE, BEN))


def test_the_list_shows_each_grid_and_each_server() -> None:
    assert list(census_lines(CENSUS, 80, NOW)) == [
        "poem: 3 of 6 cells have a live expert, at 2 servers",
        "",
        "ffn0, 2 x 3: 3 of 6",
        "  aa·",
        "  ··b",
        "",
        "a  12D3alice: 2 experts, 0.2 s of work waiting, the same for 1 min 30 s",
        "b  12D3ben: 1 expert, 0.0 s of work waiting",
    ]


def test_the_list_shows_what_only_the_asked_node_knows() -> None:
    own = (OwnExpert(uid="ffn0.0.0", came="taken over", steps=7, rows=64, saved_seconds_ago=3.0),)
    census = ExpertCensus(run="poem", grids=(COUNTED,), servers=(ALICE,), own=own)
    assert list(census_lines(census, 80, NOW))[-1] == (
        "  ffn0.0.0  taken over, 7 steps, 64 rows, saved 3.0 s ago"
    )


def test_a_run_without_servers_says_how_to_serve() -> None:
    grid = CountedGrid(name="ffn0", sizes=(2, 3), cells=6)
    lines = list(census_lines(ExpertCensus(run="poem", grids=(grid,)), 80, NOW))
    assert lines[0] == "poem: nobody serves any of its 6 cells now."
    assert "potluck experts serve" in lines[1]


def test_a_large_grid_is_drawn_in_shades() -> None:
    grid = CountedGrid(name="g", sizes=(64, 64), cells=4096, live=0)
    marks = {f"g.{row}.{column}": "a" for row in range(2) for column in range(4)}
    marks["g.2.0"] = "a"
    picture = picture_of(grid, marks, 16)
    assert (len(picture), {len(row) for row in picture}) == (32, {16})
    assert picture[0] == "█" + 15 * "·"
    assert picture[1] == "░" + 15 * "·"


def test_a_grid_of_one_dimension_is_folded() -> None:
    grid = CountedGrid(name="g", sizes=(5,), cells=5, live=1)
    assert picture_of(grid, {"g.4": "a"}, 2) == ["··", "··", "a"]


def test_status_says_what_is_served_here_and_by_all() -> None:
    view = ExpertsView(
        grids=(GridView(name="ffn0", cells=6, live=3),), servers=2, most=4, hosted=2, rows=1234
    )
    assert experts_words(view) == (
        "2 of at most 4 here, 0.0 s of work waiting, 1,234 rows computed, not all saved yet; "
        "3 of 6 cells live at 2 servers (`potluck experts list`)"
    )
    assert experts_words(ExpertsView()).startswith("0 of 0 cells live")
