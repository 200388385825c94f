"""Every command explains itself, with an example; and the page in docs/ says the same."""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import reference as laboratory
from node.app import commands
from node.app.cli.catalogue import COMMANDS, build_parser, flags_of_all
from node.app.cli.parser import CommandParser, add_flag, positive_count, positive_number
from node.app.cli.reference import PAGE, reference
from node.core.wrong_use import WrongUse
from tests.commands.console import CHECKOUT, potluck


def all_parsers(parser: CommandParser) -> Iterator[CommandParser]:
    yield parser
    for subparsers in parser.subcommands():
        for subparser in subparsers.values():
            yield from all_parsers(subparser)


PROGRAMS = [build_parser(), *(laboratory.parser_of(program) for program in laboratory.PROGRAMS)]
PARSERS = {parser.prog: parser for program in PROGRAMS for parser in all_parsers(program)}


def test_help_lists_every_command_and_goes_to_stdout(tmp_path: Path) -> None:
    result = potluck("--help", home=tmp_path)
    assert result.returncode == 0
    assert result.stderr == ""
    for command in PARSERS["potluck"].subcommands()[0]:
        assert f"\n    {command} " in result.stdout


@pytest.mark.slow
def test_help_is_also_a_command(tmp_path: Path) -> None:
    for words in ((), ("ping",), ("config", "show")):
        asked = potluck("help", *words, home=tmp_path)
        assert asked.returncode == 0
        assert asked.stdout == potluck(*words, "--help", home=tmp_path).stdout


def test_every_command_of_the_catalogue_that_exists_has_a_parser() -> None:
    assert {f"potluck {name}" for name in COMMANDS} <= set(PARSERS)


def test_every_module_among_the_commands_is_a_command_or_a_subcommand() -> None:
    modules = [module.name.replace("_", " ") for module in pkgutil.iter_modules(commands.__path__)]
    assert [name for name in modules if f"potluck {name}" not in PARSERS] == []


@pytest.mark.parametrize("name", PARSERS)
def test_every_command_has_a_description_and_an_example(name: str) -> None:
    parser = PARSERS[name]
    assert parser.description
    assert name.split()[0] in parser.example
    assert parser.example.splitlines()[0] in parser.format_help()


@pytest.mark.parametrize("name", PARSERS)
def test_every_flag_and_argument_is_explained(name: str) -> None:
    for action in PARSERS[name]._actions:
        if not isinstance(action, argparse._SubParsersAction):  # those explain themselves
            assert action.help, action.dest


@pytest.mark.parametrize("name", PARSERS)
def test_every_command_has_the_flags_of_all(name: str) -> None:
    assert set(flags_of_all()) <= set(PARSERS[name].flags())


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
def test_an_unknown_choice_is_answered_with_the_valid_ones(parser: CommandParser) -> None:
    for action in parser._actions:
        if action.choices is None or isinstance(action, argparse._SubParsersAction):
            continue
        with pytest.raises(argparse.ArgumentError) as found:
            parser._check_value(action, "no-such-thing")
        with pytest.raises(WrongUse) as told:
            parser.error(str(found.value))
        assert "cannot be 'no-such-thing'" in told.value.what
        assert all(str(one) in told.value.why for one in action.choices)


def test_the_page_is_made_from_the_parsers() -> None:
    page = (CHECKOUT / PAGE).read_text(encoding="utf-8")
    assert page == reference(), "write it anew: python -m node.app.cli.reference"


def test_the_laboratorys_page_is_made_from_its_parsers() -> None:
    page = (CHECKOUT / laboratory.PAGE).read_text(encoding="utf-8")
    assert page == laboratory.reference(), "write it anew: see scripts/lab/reference.py"


def test_a_default_is_in_the_help_and_said_once() -> None:
    parser = CommandParser(prog="potluck")
    add_flag(parser, "--steps", positive_count, 2048, "how many")
    add_flag(parser, "--minutes", positive_number, 20.0, "how long")
    add_flag(parser, "--codec", ("none", "float16"), "none", "how values travel")
    told = parser.format_help()
    assert all(words in told for words in ("how many (2048)", "how long (20)", "travel (none)"))
    assert vars(parser.parse_args([])) == {"steps": 2048, "minutes": 20.0, "codec": "none"}
