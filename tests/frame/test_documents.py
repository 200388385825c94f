"""The commands in the documents work, and the links lead to existing pages."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from lab.__main__ import PROGRAMS, parser_of
from node.app.cli.catalogue import build_parser
from node.app.cli.parser import CommandParser
from node.core.wrong_use import WrongUse
from tests.demonstrated import Played
from tests.frame.documented import (
    ROOT,
    DocumentedCommandFailed,
    Sitting,
    commands_in,
    commands_named_in,
    runs_until_stopped,
)

MOST_COMMANDS = 10  # from a checkout to the accepted samples of a second volunteer

# docs/protocols.md is left out: some domains of signed documents in it look like commands.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "protocols.md"),
]
NAMED = re.compile(r"`potluck ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?")
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README_PLAYS_THE_DEMO = pytest.param(
    ROOT / "README.md", id="README.md", marks=pytest.mark.xdist_group("demo")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "document", [README_PLAYS_THE_DEMO, *DOCUMENTS[1:]], ids=lambda path: path.name
)
def test_every_command_in_a_document_works(
    document: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def demonstration() -> int:
        played: Played = request.getfixturevalue("the_demo")
        return played.exit_code

    with Sitting(tmp_path / "home", demonstration) as sitting:
        for line in commands_in(document.read_text(encoding="utf-8")):
            sitting.type(line)


def test_no_word_stands_twice_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r"^\| (\*\*[^|]+?) *\|", glossary, re.MULTILINE)
    words = [word for entry in entries for word in entry.replace("*", "").split(", ")]
    assert len(words) > 100
    assert sorted(words) == sorted(set(words))


def test_each_change_is_told_once() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first_sentences = re.findall(r"^- (.+?[.:])(?: |$)", changelog, re.MULTILINE)
    assert len(first_sentences) > 50
    assert sorted(first_sentences) == sorted(set(first_sentences))


def test_the_readme_begins_with_the_two_commands() -> None:
    commands = commands_in((ROOT / "README.md").read_text(encoding="utf-8"))
    assert commands[0].startswith("./scripts/potluck ")
    assert commands[1].startswith("./scripts/test")


def test_the_readme_brings_a_second_volunteers_samples_in_with_ten_commands() -> None:
    """Each in a home of its own. That they are accepted is seen when the commands are run."""
    lines = commands_in((ROOT / "README.md").read_text(encoding="utf-8"))
    typed = [shlex.split(line) for line in lines if "--home" in line]
    homes = [words[words.index("--home") + 1] for words in typed]
    assert [words[1] for words in typed].count("join") == 2
    assert set(homes) == {"~/moderator", "~/organiser", "~/alice", "~/bob"}
    assert len(typed) <= MOST_COMMANDS


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_a_command_that_a_page_only_names_can_be_typed(document: Path) -> None:
    """Its flags and words are there. Its arguments may be left out: `potluck plan`."""
    parsers = {"potluck": build_parser(), **{name: parser_of(name) for name in PROGRAMS}}
    named = commands_named_in(document.read_text(encoding="utf-8"))
    wrong = {command: wrong_use(parsers[command.split()[0]], command) for command in named}
    wrong = {command: words for command, words in wrong.items() if words}
    assert all("arguments are required" in words for words in wrong.values()), wrong


def test_a_command_that_the_program_itself_names_is_there() -> None:
    """In a message or a comment: what it begins with, and its action if it has some."""
    folders = [ROOT / one for one in ("auth", "models", "nat", "node", "protocols")]
    texts = [file.read_text() for folder in folders for file in sorted(folder.rglob("*.py"))]
    named = {words for text in texts for words in NAMED.findall(text)}
    (commands,) = build_parser().subcommands()
    assert len({command for command, _ in named}) > 15
    for command, action in named:
        assert command in commands, command
        actions = [one for there in commands[command].subcommands() for one in there]
        assert not actions or not action or action in actions, (command, action)


def wrong_use(parser: CommandParser, command: str) -> str:
    """The problem with it, or nothing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        try:
            parser.parse_args(shlex.split(command, comments=True)[1:])
        except WrongUse as error:
            return error.what
    return ""


def test_commands_are_found_in_blocks_and_between_words() -> None:
    text = "Type `potluck id --json`, or\n```\n$ POTLUCK_HOME=~/x ./scripts/potluck listen\n```\n"
    assert commands_named_in(text) == ["potluck listen", "potluck id --json"]
    assert commands_named_in("As root: `sudo scripts/bench caps`.") == ["bench caps"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    missing = [
        link
        for link in links
        if "://" not in link and not (document.parent / link).resolve().exists()
    ]
    assert not missing


def test_only_blocks_marked_sh_are_commands() -> None:
    text = (
        "```sh\n./scripts/potluck id   # who\n\n# a remark\n```\n"
        "```text\nnot this\n```\n```\nnor this\n```\n```sh\npotluck listen\n```\n"
    )
    assert commands_in(text) == ["./scripts/potluck id   # who", "potluck listen"]


def test_a_listening_node_and_a_watch_run_until_they_are_stopped() -> None:
    assert runs_until_stopped(["potluck", "listen"])
    assert runs_until_stopped(["potluck", "auth", "serve"])
    assert runs_until_stopped(["potluck", "status", "--watch"])
    assert runs_until_stopped(["potluck", "join", "INVITE"])
    assert runs_until_stopped(["potluck", "run", "start", "~/poem"])
    assert runs_until_stopped(["potluck", "backbone", "~/poem"])
    assert runs_until_stopped(["potluck", "backbone", "--relay-only"])
    assert not runs_until_stopped(["potluck", "run", "invite", "~/poem"])
    assert not runs_until_stopped(["potluck", "ping", "ADDRESS"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "potluck pong",
        "potluck ping ADDRESS",
        "potluck login INVITE",
        "openssl req -nonsense",
        "rm -r everything",
        "potluck listen --listen nonsense",
    ],
)
def test_a_command_that_does_not_work_is_found(line: str, tmp_path: Path) -> None:
    with pytest.raises(DocumentedCommandFailed), Sitting(tmp_path / "home") as sitting:
        sitting.type(line)
