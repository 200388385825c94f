"""Which blocks have room."""

from __future__ import annotations

from rich.text import Text

from node.app.screen.layout import ScreenBlock, arrange


def block(
    priority: int, *sizes: int, apart: bool = False, grows_first: bool = False
) -> ScreenBlock:
    variants = [[Text(f"{priority}") for _ in range(size)] for size in sizes]
    return ScreenBlock(priority, variants, apart=apart, grows_first=grows_first)


def shown(height: int, *blocks: ScreenBlock) -> str:
    return "".join(line.plain or "-" for line in arrange(blocks, height))


def test_the_most_important_blocks_stay_in_the_order_given() -> None:
    blocks = (block(2, 1), block(3, 1), block(1, 1))
    assert [shown(height, *blocks) for height in range(5)] == ["", "1", "21", "231", "231"]


def test_blocks_grow_in_turns() -> None:
    assert shown(6, block(1, 1, 2, 3, 4), block(2, 1, 2, 3, 4)) == "111222"
    assert shown(5, block(1, 1, 2, 3, 4), block(2, 1, 2, 3, 4)) == "11122"


def test_important_blocks_grow_before_the_rest() -> None:
    assert shown(6, block(1, 1, 2, 3, 4), block(2, 1, 2, 4, grows_first=True)) == "112222"


def test_a_block_too_large_is_left_out_and_the_next_one_is_not() -> None:
    assert shown(2, block(1, 1), block(2, 2), block(3, 1)) == "13"


def test_empty_lines_come_where_there_is_room_and_never_at_the_top() -> None:
    blocks = (block(1, 1, apart=True), block(2, 1, apart=True))
    assert shown(17, *blocks) == "12"
    assert shown(18, *blocks) == "1-2"
