"""The pictures of the documents: each that is linked is there, each that is there is linked, and
none is large."""

from __future__ import annotations

import re
from pathlib import Path

from tests.frame.documented import ROOT

PICTURES = ROOT / "docs" / "pictures"
KINDS = (".svg", ".png", ".webp", ".jpg", ".gif")
MOST_BYTES = 150_000  # a page of documents loads several, perhaps over a phone
LINK = re.compile(r"""(?:\]\(|(?:src|href|srcset)=["'])([^)"'#\s]+)""")


def linked_from(document: Path) -> set[Path]:
    links = LINK.findall(document.read_text(encoding="utf-8"))
    return {
        (document.parent / link).resolve()
        for link in links
        if "://" not in link and link.endswith(KINDS)
    }


def test_pictures_and_links_to_them_belong_together() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    linked = {picture for document in documents for picture in linked_from(document)}
    there = {one.resolve() for one in PICTURES.rglob("*") if one.is_file()}
    assert {one for one in linked if not one.is_file()} == set(), "they are linked, and not there"
    assert there - linked == set(), "nobody finds them"
    assert {one.suffix for one in there} <= set(KINDS)


def test_no_picture_is_large() -> None:
    sizes = {one.name: one.stat().st_size for one in PICTURES.rglob("*") if one.is_file()}
    assert {name: size for name, size in sizes.items() if size >= MOST_BYTES} == {}


def test_links_to_pictures_are_found_in_markdown_and_html(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        '![a](pictures/a.svg) [b](../b.webp "b") <img src="c.png"> [d](d.md) '
        "![e](https://example.org/e.png)"
    )
    found = {tmp_path / "pictures" / "a.svg", tmp_path.parent / "b.webp", tmp_path / "c.png"}
    assert linked_from(document) == {one.resolve() for one in found}
