"""A run.toml is read whole, or every mistake in it is told by its place; none takes long."""

from __future__ import annotations

import contextlib
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from node.run.checking import check
from node.run.definition import (
    NewerPotluckNeeded,
    RunDefinition,
    WrongDefinition,
    read_definition,
)
from node.run.mistakes import LARGEST_TEXT_BYTES, MOST_DOTS_IN_A_LINE
from node.run.template import new_definition
from protocols.errors import PotluckError
from tests.runs.definitions import NAME, TEXT, changed, with_line

TRACKED = TEXT + b'[tracking]\ntrack = ["%s"]\n'


def mistakes(text: bytes) -> tuple[str, ...]:
    with pytest.raises(WrongDefinition) as caught:
        read_definition(text)
    assert caught.value.exit_code == 2
    return caught.value.mistakes


@pytest.mark.parametrize("word", ["mlflow:https://me:secret@host/", "jsonl:/etc/steps.jsonl"])
def test_run_check_finds_the_mistakes_in_trackers_that_signing_refuses(word: str) -> None:
    """It said that there was none."""
    definition, found = check(TRACKED % word.encode())
    assert definition is None
    assert set(mistakes(TRACKED % word.encode())) <= set(found)


def test_missing_settings_have_their_defaults() -> None:
    definition = read_definition(TEXT)
    assert (definition.name, definition.training.batch) == (NAME, 64)
    assert definition.averaging.codec == "float16"
    assert definition.schedule is None
    assert definition.limits.least_version == "0.1.0"


def test_the_runs_settings_are_those_of_the_definition() -> None:
    definition = read_definition(with_line("max_norm = 1.5\ndelayed = true"))
    settings = definition.collaboration_settings(begins=True)
    assert (settings.run, settings.target_batch, settings.codec) == (NAME, 64, "float16")
    assert settings.begins
    options = definition.optimizer_options()
    assert (options["max_norm"], options["delayed"], options["local_steps"]) == (1.5, True, 1)


ONE_MISTAKE = {
    "an unknown key": (with_line("bacth = 3"), "no key 'bacth' below [training]. Did you mean ba"),
    "an unknown table": (changed("[optimizer]", "[optimiser]"), "[optimizer] is missing"),
    "a negative number": (changed("batch = 64", "batch = -1"), "batch below [training] cannot be"),
    "a fraction": (with_line("steps = 1.5"), "steps below [training] cannot be 1.5: it must be a"),
    "not a number": (with_line("max_norm = nan"), "max_norm below [training] cannot be nan"),
    "too large": (with_line("seed = 99999999999999999999"), "seed below [training] cannot be"),
    "a word": (with_line('precision = "fp8"'), "it is one of float32, bf16, fp16"),
    "a blank in the name": (changed('"poem"', '"po em"'), "letters, digits, dots"),
    "a path as name": (changed('"poem"', '"../poem"'), "letters, digits, dots"),
    "two lines of words": (with_line('description = "a\\nb"', "run"), "text of one line"),
    "an escape code": (with_line('description = "\\u001b[2J"', "run"), "text of one line"),
    "a list for a table": (TEXT.replace(b"[training]\n", b"[[training]]\n"), "must be a table"),
    "nothing": (b"", "[run] is missing"),
    "no TOML": (b"run = [", "It is not TOML"),
    "no text": (b"a\xff\xfe", "It is not TOML: byte 2 is no text in UTF-8."),
    "a version that is none": (TEXT + b'[limits]\nleast_version = "one"', "of numbers and dots"),
    "letters that turn the order around": (
        with_line('description = "a\\u202eb"', "run"),
        "text of one line",
    ),
    "digits of another script": (TEXT + '[limits]\nleast_version = "9.٣"'.encode(), "of numbers"),
    "many digits": (b"x = " + b"9" * 60_000, "more than 77 digits"),
    "many digits that Python reads": (changed("= 64", "= 0x" + "f" * 50_000), "than 77 digits"),
    "many digits in a table": (changed('"tiny"', "0x" + "f" * 50_000), "more than 77 digits"),
    "no number": (changed("batch = 64", "batch = nan"), "batch below [training] cannot be nan"),
    "beyond all numbers": (changed("batch = 64", "batch = 1e400"), "must be a whole number"),
    "a tracker that is none": (TRACKED % b"wandbb", "Did you mean wandb?"),
    "a tracker without a place": (TRACKED % b"jsonl", "It needs a file after a colon"),
    "an address for files": (TRACKED % b"tensorboard:http://a.example", "Only MLflow takes a URL"),
    "an odd project": (TRACKED % b"wandb:../x", "A project has up to 128 letters"),
    "a tracker with a password": (
        TRACKED % b"mlflow:https://ada:secret@mlflow.example/x",
        "MLFLOW_TRACKING_PASSWORD",
    ),
    "a tracker outside": (TRACKED % b"jsonl:/etc/cron.d/steps", "leads out of the run's folder"),
    "a tracker at home": (TRACKED % b"mlflow:~/runs", "leads out of the run's folder"),
    "a tracker at somebody's home": (TRACKED % b"mlflow:~ada/x", "leads out of the run's folder"),
    "a tracker above": (TRACKED % b"tensorboard:a/../../b", "leads out of the run's folder"),
    "many trackers": (TRACKED % b'jsonl:a", "'.__mul__(9), "track below [tracking] cannot be"),
    "a norm that is none": (with_line("max_norm = nan"), "max_norm below [training] cannot be nan"),
}


@pytest.mark.parametrize(("text", "told"), ONE_MISTAKE.values(), ids=ONE_MISTAKE.keys())
def test_a_mistake_is_told_by_its_place(text: bytes, told: str) -> None:
    assert any(told in one for one in mistakes(text)), mistakes(text)


def test_a_password_of_a_tracker_is_not_repeated() -> None:
    text = TRACKED % b"mlflow:https://ada:secret@mlflow.example/x"
    assert not any("secret" in one for one in mistakes(text))


@pytest.mark.parametrize(
    "word",
    ["mlflow:https://mlflow.example/a@b/..", "mlflow:a/b", "jsonl:a..b/~c", "wandb:poem"],
)
def test_a_tracker_in_the_folder_or_at_a_server_is_no_mistake(word: str) -> None:
    assert read_definition(TRACKED % word.encode()).tracking.track == (word,)


def test_all_mistakes_are_told_at_once() -> None:
    text = changed("batch = 64", "batch = 0\nsteps = -1\nlocal_stps = 2").replace(b'"poem"', b"1")
    assert len(mistakes(text)) == 4


def test_of_thousands_of_mistakes_only_some_are_reported() -> None:
    with pytest.raises(WrongDefinition) as caught:
        read_definition(b"".join(b"batch%d = 1\n" % number for number in range(4_000)) + TEXT)
    assert len(caught.value.mistakes) == 4_000
    assert "and 3,980 more" in caught.value.why
    assert len(str(caught.value)) < 10_000


BOMBS = {
    "too large": b"#" * (LARGEST_TEXT_BYTES + 1),
    "nested lists": b"a = " + b"[" * 30_000 + b"]" * 30_000,
    "nested tables": b"a = " + b"{a = " * 10_000,
    "a key of thirty thousand parts": b".".join([b"a"] * 30_000) + b" = 1",
    "keys as deep as a line may be": b"\n".join(
        b"b%d.%s = 1" % (number, b".".join([b"a"] * (MOST_DOTS_IN_A_LINE - 1)))
        for number in range(300)
    ),
    "deep in a table that anything may be in": TEXT + b"[data]\nx = [[[[[[[[[[1]]]]]]]]]]",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
def test_no_text_keeps_the_reader_busy(text: bytes) -> None:
    began = time.process_time()
    assert mistakes(text)
    assert time.process_time() - began < 5.0, "the worst takes half a second, on an idle machine"


@given(some.binary(max_size=200))
def test_whatever_the_bytes_only_our_own_errors_come_out(text: bytes) -> None:
    for candidate in (text, TEXT + text):
        with contextlib.suppress(PotluckError):
            read_definition(candidate)


def test_a_newer_run_says_which_version_it_needs_and_nothing_else() -> None:
    text = TEXT + b'[limits]\nleast_version = "0.10"\n[something_new]\nx = 1'
    with pytest.raises(NewerPotluckNeeded, match=r"potluck 0\.10 or later") as caught:
        read_definition(text)
    assert "Update potluck" in caught.value.advice


def test_a_newer_format_is_told_before_its_unknown_keys() -> None:
    with pytest.raises(NewerPotluckNeeded, match="format 2"):
        read_definition(b"format = 2\n" + with_line("brand_new = true"))


def test_the_version_that_is_here_will_do() -> None:
    read_definition(TEXT + b'[limits]\nleast_version = "0.1"')


def test_every_key_is_explained_in_a_new_file_with_its_default() -> None:
    text = new_definition("poem").decode()
    definition = read_definition(text.encode())
    for section in msgspec.structs.fields(RunDefinition):
        value = getattr(definition, section.name)
        if not isinstance(value, msgspec.Struct):
            assert f"[{section.name}]" in text or section.name == "format"
            continue
        assert f"[{section.name}]\n" in text
        part = text.partition(f"[{section.name}]\n")[2].partition("\n[")[0]
        for field in msgspec.structs.fields(type(value)):
            line = next(
                line for line in part.splitlines() if line.lstrip("#").startswith(f"{field.name} =")
            )
            if line.startswith("#"):
                said = msgspec.toml.decode(line.lstrip("#"))[field.name]
                assert msgspec.convert(said, field.type) == field.default, line
            else:
                assert getattr(value, field.name) is not None


def test_a_new_file_is_for_the_run_that_was_named() -> None:
    assert read_definition(new_definition("bengali-poems")).name == "bengali-poems"
