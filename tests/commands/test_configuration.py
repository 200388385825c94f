"""Settings: flags before environment before file before defaults, each remembering its origin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.app.cli.configured import add_setting_flag, configuration_for, typed_settings
from node.app.cli.parser import CommandParser
from node.core.caps.settings import caps_of
from node.core.configuration import Configuration, Origin, line_of, read_configuration
from node.core.settings import SETTINGS, SettingKind, Value, plain, value_from_text, value_from_toml
from node.core.wrong_use import WrongUse
from tests.commands.console import objects, potluck

KEY = "network.dial_seconds"
VARIABLE = "POTLUCK_NETWORK_DIAL_SECONDS"
PEER = "12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"


def configured(
    home: Path,
    *,
    flags: Mapping[str, Value] | None = None,
    environment: Mapping[str, str] | None = None,
    file: str | None = None,
) -> Configuration:
    if file is not None:
        (home / "potluck.toml").write_text(file)
    variables = {"POTLUCK_HOME": str(home), **(environment or {})}
    return read_configuration(flags, environment=variables)


def test_without_anything_every_setting_has_its_default(tmp_path: Path) -> None:
    configuration = configured(tmp_path)
    assert configuration.listen_addresses == ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    assert configuration.key_file == tmp_path / "identity.key"
    assert set(configuration.origins.values()) == {Origin("default")}
    assert configuration.config_file is None


def test_the_source_with_the_highest_precedence_wins_and_is_remembered(tmp_path: Path) -> None:
    file = "[network]\ndial_seconds = 1"
    from_file = configured(tmp_path, file=file)
    from_variable = configured(tmp_path, environment={VARIABLE: "2"}, file=file)
    from_flag = configured(tmp_path, flags={KEY: 3.0}, environment={VARIABLE: "2"}, file=file)
    assert from_file.dial_seconds == 1.0
    assert from_variable.dial_seconds == 2.0
    assert from_flag.dial_seconds == 3.0
    assert from_file.origins[KEY] == Origin("file", str(tmp_path / "potluck.toml"), 2)
    assert from_variable.origins[KEY] == Origin("environment", VARIABLE)
    assert from_flag.origins[KEY] == Origin("flag")


def test_an_empty_variable_says_nothing(tmp_path: Path) -> None:
    assert configured(tmp_path, environment={VARIABLE: ""}).origins[KEY] == Origin("default")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("[network]\nlisten_on = []", "network.listen"),
        ("[network]\ndial_secnds = 3", "network.dial_seconds"),
        ("[netwrok]\nlisten = []", "network.listen"),
        ("dial_seconds = 3", "network.dial_seconds"),
        ("[something]\nelse = 1", "potluck config show"),
        ("[network.listen]\nx = 1", "network.listen"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_right_one(
    line: str, meant: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongUse) as caught:
        configured(tmp_path, file=line)
    assert meant in str(caught.value)
    assert str(tmp_path / "potluck.toml") in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "[network]\ndial_seconds = 0",
        "[network]\ndial_seconds = true",
        "[network]\ndial_seconds = nan",
        "[network]\ndial_seconds = 'ten'",
        "[network]\ninbound_connections = 1.5",
        "[network]\ninbound_connections = true",
        "[network]\ninbound_connections = -1",
        "[network]\nlisten = 4001",
        "[network]\nlisten = [4001]",
        "[network]\nlisten = ['4001']",
        "[network]\nannounce = ['/ip4/1.2.3.4/tcp/0']",
        "[identity]\nkey_file = ''",
        "[identity]\nkey_file = 3",
        "[dht]\nclient = 1",
        "[dht]\nclient = 'perhaps'",
        "[dht]\nbootstrap = ['/ip4/1.2.3.4/tcp/4001']",
        "[dht]\nbootstrap = true",
    ],
)
def test_a_value_that_cannot_be_right_is_an_error_that_names_the_file(
    line: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongUse, match=r"potluck\.toml sets it"):
        configured(tmp_path, file=line)


def test_a_wrong_value_is_named_with_its_line(tmp_path: Path) -> None:
    file = "[dht]\nclient = true\n\n[limits]\n# mine\nupload_limit = '2mb/s'"
    with pytest.raises(WrongUse, match="line 6") as caught:
        configured(tmp_path, file=file)
    assert "limits.upload_limit cannot be '2mb/s'" in str(caught.value)
    assert "Did you mean 2MB/s (bytes) or 2Mbit/s (bits)?" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("max_memory = 8", "8GB"),
        ("upload_limit = 2", "2MB/s (bytes)"),
        ("quota = 200", "200GB/month"),
    ],
)
def test_an_amount_without_its_unit_is_told_what_it_may_mean(
    line: str, meant: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongUse, match=r"line 2") as caught:
        configured(tmp_path, file=f"[limits]\n{line}")
    assert f"Did you mean {meant}" in str(caught.value)


def test_an_error_in_a_flag_names_the_flag() -> None:
    parser = CommandParser(prog="potluck")
    add_setting_flag(parser, "limits.max_memory")
    with pytest.raises(WrongUse) as caught:
        configuration_for(parser.parse_args(["--max-memory", "10"]))
    assert caught.value.what == "--max-memory cannot be '10'. '10' is not an amount."
    assert caught.value.advice == "Did you mean 10GB?"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\n[limits]\n'quota' = 'none'", 3),
        ("\nlimits = { quota = 'none' }\n", 2),
        ("[other]\nquota = 1\n[ limits ] # here\n  quota=2", 4),
        ("# limits.quota = 1\nlimits . quota = 2", 2),
        ("[limits]\nthreads = 2", 0),
    ],
)
def test_the_line_of_a_setting_is_found_however_it_is_written(text: str, line: int) -> None:
    assert line_of("limits.quota", text) == line


def test_a_wrong_variable_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=VARIABLE):
        configured(tmp_path, environment={VARIABLE: "soon"})


def test_a_misspelt_variable_is_a_warning(tmp_path: Path) -> None:
    configuration = configured(tmp_path, environment={"POTLUCK_NETWROK_LISTEN": "x"})
    (warning,) = configuration.warnings
    assert "did you mean POTLUCK_NETWORK_LISTEN?" in warning


@pytest.mark.parametrize("content", [b"[network", b"\xff\xfe", b"a = 1\na = 2", b"[" * 5000])
def test_a_file_that_is_not_toml_is_an_error_that_says_so(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "potluck.toml").write_bytes(content)
    with pytest.raises(WrongUse, match="not valid TOML"):
        configured(tmp_path)


def test_an_endless_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="larger than a megabyte"):
        read_configuration(
            environment={"POTLUCK_HOME": str(tmp_path), "POTLUCK_CONFIG": "/dev/zero"}
        )


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="POTLUCK_CONFIG names it"):
        configured(tmp_path, environment={"POTLUCK_CONFIG": str(tmp_path / "none.toml")})


def test_the_end_of_an_announced_address_is_ours_to_add(tmp_path: Path) -> None:
    address = f"/dns4/node.example/tcp/4001/p2p/{PEER}"
    configuration = configured(tmp_path, file=f"[network]\nannounce = '{address}'")
    assert configuration.announce_addresses == ("/dns4/node.example/tcp/4001",)


@pytest.mark.parametrize(
    ("word", "meant"), [("true", True), ("Yes", True), ("1", True), ("off", False), ("0", False)]
)
def test_a_switch_understands_the_usual_words(word: str, meant: bool, tmp_path: Path) -> None:
    configuration = configured(tmp_path, environment={"POTLUCK_DHT_CLIENT": word})
    assert configuration.is_client is meant


def test_a_switch_understands_no_other_word(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="true or false"):
        configured(tmp_path, environment={"POTLUCK_DHT_KEEP_SLOTS": "maybe"})


@pytest.mark.parametrize(
    ("file", "words", "meant"),
    [
        ("", (), None),
        ("compile = true", (), True),
        ("compile = 'off'", (), False),
        ("compile = true", ("--no-compile",), False),
        ("compile = false", ("--no-compile", "--compile"), True),
    ],
)
def test_a_peer_compiles_as_the_run_says_or_as_its_owner_does(
    file: str, words: tuple[str, ...], meant: bool | None, tmp_path: Path
) -> None:
    (tmp_path / "potluck.toml").write_text(f"[limits]\n{file}\n")
    parser = CommandParser()
    add_setting_flag(parser, "limits.compile")
    arguments = parser.parse_args([*words])
    arguments.home = str(tmp_path)
    configuration = configuration_for(arguments)
    assert caps_of(configuration).compile is meant
    assert typed_settings(arguments, configuration) == [*words[-1:]]


def test_a_switch_of_ones_own_understands_no_other_word(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="true, false or auto"):
        configured(tmp_path, environment={"POTLUCK_LIMITS_COMPILE": "maybe"})


def test_a_trackers_path_is_where_its_owner_typed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "jsonl:steps.jsonl, tensorboard:/curves, wandb, mlflow:http://127.0.0.1:5000"
    found = configured(tmp_path, environment={"POTLUCK_TRACKING_TRACK": words}).trackers
    assert [str(one) for one in found] == [
        f"jsonl:{tmp_path}/steps.jsonl",
        "tensorboard:/curves",
        "wandb:potluck",
        "mlflow:http://127.0.0.1:5000",
    ]
    assert {one.folder for one in found} == {tmp_path}


_values: dict[SettingKind, st.SearchStrategy[Value]] = {
    SettingKind.LISTEN_ADDRESSES: st.lists(
        st.integers(0, 65_535).map("/ip4/127.0.0.1/tcp/{}".format), unique=True
    ).map(tuple),
    SettingKind.ANNOUNCE_ADDRESSES: st.lists(
        st.integers(1, 65_535).map("/dns4/node.example/tcp/{}".format), unique=True
    ).map(tuple),
    SettingKind.NAME: st.sampled_from(("", "Ada", "Jean-Luc P.", "李小龙")),
    SettingKind.FILE: st.sampled_from([Path("/a/key"), Path("/b b/ключ")]),
    SettingKind.SECONDS: st.floats(0.001, 1e6),
    SettingKind.COUNT: st.integers(1, 10**9),
    SettingKind.SWITCH: st.booleans(),
    SettingKind.OWN_SWITCH: st.sampled_from(["true", "false", "auto"]),
    SettingKind.PEER_ADDRESSES: st.lists(
        st.sampled_from(
            [f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}", f"/dns4/a.example/tcp/1/p2p/{PEER}"]
        ),
        unique=True,
    ).map(tuple),
    SettingKind.TRACKERS: st.lists(
        st.sampled_from(["jsonl:/a/steps.jsonl", "wandb:poem", "mlflow:https://a.example:5000/x"]),
        unique=True,
    ).map(tuple),
    SettingKind.DEVICE: st.sampled_from(["auto", "cpu", "cuda", "cuda:1", "mps"]),
    SettingKind.THREADS: st.one_of(st.just("auto"), st.integers(1, 1024).map(str)),
    SettingKind.RATE: st.sampled_from(["none", "2MB/s", "1.5Mbit/s", "64KiB/s"]),
    SettingKind.SIZE: st.sampled_from(["none", "8GB", "1.5GiB"]),
    SettingKind.QUOTA: st.sampled_from(["none", "200GB/month", "0.25TB/month"]),
    SettingKind.RELAY_FOR: st.sampled_from(["members", "everybody"]),
    SettingKind.RELAY_LIMITS: st.sampled_from(
        ["", "circuits=64", "rate=20MB/s, month=500GB/month, circuit-seconds=none"]
    ),
    SettingKind.SCHEDULE: st.sampled_from(
        ["always", "22:00-07:00", "Mon-Fri 22:00-07:00, weekends 00:00-24:00"]
    ),
}


@given(data=st.data())
def test_every_value_survives_being_written_and_read(data: st.DataObject) -> None:
    setting = data.draw(st.sampled_from(SETTINGS))
    value = data.draw(_values[setting.kind])
    written = plain(value)
    text = ",".join(written) if isinstance(written, list) else str(written)
    assert value_from_toml(setting, written) == value
    assert value_from_text(setting, text) == value


def test_config_show_prints_a_file_that_says_the_same(tmp_path: Path) -> None:
    file = '[network]\nlisten = ["/ip4/127.0.0.1/tcp/4001"]\ndial_seconds = 3.5\n'
    (tmp_path / "potluck.toml").write_text(file)
    shown = potluck("config", "show", home=tmp_path)
    assert shown.returncode == 0
    (tmp_path / "potluck.toml").write_text(shown.stdout)
    again = potluck("config", "show", home=tmp_path)
    assert again.stdout == shown.stdout


def test_config_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    (tmp_path / "potluck.toml").write_text("[network]\ninbound_connections = 7")
    words = ("config", "show", "--origin")
    shown = potluck(*words, home=tmp_path, POTLUCK_NETWORK_DIAL_SECONDS="3").stdout
    assert "dial_seconds = 3.0  # environment POTLUCK_NETWORK_DIAL_SECONDS" in shown
    assert f"inbound_connections = 7  # file {tmp_path}/potluck.toml, line 2" in shown
    assert "announce = []  # default" in shown


def test_config_show_has_it_all_as_json(tmp_path: Path) -> None:
    (value,) = objects(potluck("config", "show", "--json", home=tmp_path).stdout)
    assert set(value["settings"]) == {setting.key for setting in SETTINGS}
    assert value["settings"]["network.announce"]["value"] == []
    assert value["settings"]["network.announce"]["origin"] == "default"


def test_a_warning_goes_to_stderr_and_the_command_goes_on(tmp_path: Path) -> None:
    result = potluck("id", home=tmp_path, POTLUCK_NETWORK_LISTNE="x")
    assert result.returncode == 0
    assert "did you mean POTLUCK_NETWORK_LISTEN?" in result.stderr
    assert result.stdout.count("\n") == 1
