"""The control socket: for its owner alone, bounded, and gone when the node is."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from auth.errors import AuthError
from node.core.control import MOST_CLIENTS, Answering, ControlServer, remove_socket
from node.core.control_client import (
    ControlFailure,
    NodeWentAway,
    NoRunningNode,
    a_node_answers,
    ask,
    ask_once,
)
from node.core.control_frames import (
    LARGEST_ANSWER_BYTES,
    LARGEST_ASK_BYTES,
    LENGTH,
    Ask,
    ControlAnswer,
    ControlFailed,
    Done,
    ask_in,
    bindable,
    frame,
    length_of,
    reply_in,
)
from protocols.errors import (
    DeadlineExceeded,
    LimitExceeded,
    MalformedMessage,
    PotluckError,
    ProtocolMisuse,
    Refused,
)
from tests.waiting import PATIENCE_SECONDS


async def echo(arguments: Mapping[str, Any], answer: Answering) -> None:
    await answer(dict(arguments))


async def count(arguments: Mapping[str, Any], answer: Answering) -> None:
    for number in range(arguments["to"]):
        await answer(number)


async def refuse(_arguments: Mapping[str, Any], _answer: Answering) -> None:
    raise Refused("No.", why="Because.", advice="Ask nicely.")


async def refuse_an_act(_arguments: Mapping[str, Any], _answer: Answering) -> None:
    raise AuthError("Not so.", why="It was done already.", advice="Look at the list.")


async def break_down(_arguments: Mapping[str, Any], _answer: Answering) -> None:
    raise ZeroDivisionError("a bug")


@pytest.fixture
async def server(tmp_path: Path, nursery: trio.Nursery) -> ControlServer:
    server = ControlServer(tmp_path / "run" / "control.sock")
    for handler in (echo, count, refuse, refuse_an_act, break_down):
        server.add(handler.__name__, handler)
    await nursery.start(server.serve)
    return server


async def asked(path: Path, command: str, arguments: Mapping[str, Any] | None = None) -> list[Any]:
    def in_a_thread() -> list[Any]:
        with ask(path, command, arguments) as answers:
            return list(answers)

    with trio.fail_after(PATIENCE_SECONDS):
        return await trio.to_thread.run_sync(in_a_thread)


async def test_a_command_is_answered(server: ControlServer) -> None:
    assert await asked(server.path, "echo", {"a": [1, "ü"]}) == [{"a": [1, "ü"]}]


async def test_a_command_may_answer_many_times(server: ControlServer) -> None:
    assert await asked(server.path, "count", {"to": 1000}) == list(range(1000))


async def test_the_only_answer_of_a_command_is_returned(server: ControlServer) -> None:
    assert await trio.to_thread.run_sync(ask_once, server.path, "echo", {"x": 1}) == {"x": 1}


async def test_a_failure_arrives_with_its_reason_and_exit_code(server: ControlServer) -> None:
    with pytest.raises(ControlFailure) as caught:
        await asked(server.path, "refuse")
    failure = caught.value
    assert (failure.what, failure.why, failure.advice) == ("No.", "Because.", "Ask nicely.")
    assert failure.exit_code == 3


async def test_a_refusal_is_not_logged_as_a_failure_of_the_server(
    server: ControlServer, caplog: pytest.LogCaptureFixture
) -> None:
    for command in ("refuse", "refuse_an_act"):
        with pytest.raises(ControlFailure):
            await asked(server.path, command)
    assert caplog.text == ""


async def test_a_bug_in_a_handler_ends_the_command_and_not_the_node(
    server: ControlServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ControlFailure, match="a bug"):
        await asked(server.path, "break_down")
    assert "break_down failed" in caplog.text
    assert await asked(server.path, "count", {"to": 1}) == [0]


async def test_a_failure_that_names_a_path_without_utf_8_is_told(server: ControlServer) -> None:
    async def look(_arguments: Mapping[str, Any], _answer: Answering) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", os.fsdecode(b"/potluck/\xff"))

    server.add("look", look)
    with pytest.raises(ControlFailure, match=r"Permission denied: /potluck/\?"):
        await asked(server.path, "look")
    assert await asked(server.path, "count", {"to": 1}) == [0]


async def test_a_failure_that_cannot_be_sent_ends_its_client_and_not_the_node(
    server: ControlServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def tell_too_much(_arguments: Mapping[str, Any], _answer: Answering) -> None:
        raise Refused("x" * (LARGEST_ANSWER_BYTES + 1))

    server.add("tell_too_much", tell_too_much)
    with pytest.raises(NodeWentAway):
        await asked(server.path, "tell_too_much")
    assert "was not served to the end" in caplog.text
    assert await asked(server.path, "count", {"to": 1}) == [0]


async def test_an_unknown_command_is_told_the_nearest(server: ControlServer) -> None:
    with pytest.raises(ControlFailure, match="Did you mean count"):
        await asked(server.path, "cuont")


async def test_a_command_is_added_once(server: ControlServer) -> None:
    with pytest.raises(ProtocolMisuse):
        server.add("echo", echo)


async def test_only_its_owner_can_open_it(server: ControlServer) -> None:
    assert mode_of(server.path) == 0o600
    assert mode_of(server.path.parent) == 0o700


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def loosen(path: Path) -> None:
    """Let everybody come as far as the socket, so that only the check of the user is left."""
    for folder in path.parents[:5]:
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & 0o055 != 0o055:  # not /tmp, which may be among them
            folder.chmod(mode | 0o055)
    path.chmod(0o666)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
async def test_another_user_is_refused_even_with_the_socket_open(server: ControlServer) -> None:
    loosen(server.path)
    with trio.fail_after(PATIENCE_SECONDS):
        process = await trio.run_process(
            [
                "python3",
                "-c",
                f"""
import os, socket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.connect({str(server.path)!r})
print(connection.recv(1))
""",
            ],
            capture_stdout=True,
        )
    assert process.stdout == b"b''\n"


async def test_when_it_has_ended_the_socket_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "control.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(ControlServer(path).serve)
        assert path.exists()
        assert await trio.to_thread.run_sync(a_node_answers, path)
        nursery.cancel_scope.cancel()
    assert os.listdir(path.parent) == []
    assert not a_node_answers(path)


async def test_a_socket_that_a_killed_node_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert not a_node_answers(path)
    async with trio.open_nursery() as nursery:
        await nursery.start(ControlServer(path).serve)
        assert await trio.to_thread.run_sync(a_node_answers, path)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("length", [90, 103, 104, 200])
async def test_a_path_of_any_length_works_and_leaves_nothing(length: int, tmp_path: Path) -> None:
    path = tmp_path / ("d" * max(1, length - len(str(tmp_path)) - 3)) / "s"
    server = ControlServer(path)
    server.add("echo", echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        assert await asked(path, "echo") == [{}]
        assert mode_of(bindable(path).parent) == 0o700
        nursery.cancel_scope.cancel()
    nothing_stands_at(path)


def nothing_stands_at(path: Path) -> None:
    assert not bindable(path).exists()
    assert bindable(path) == path or not bindable(path).parent.exists()


@pytest.mark.parametrize("length", [90, 200])
async def test_a_node_that_is_cancelled_at_once_removes_its_socket_all_the_same(
    length: int, tmp_path: Path
) -> None:
    path = tmp_path / ("d" * max(1, length - len(str(tmp_path)) - 3)) / "s"
    async with trio.open_nursery() as nursery:
        await nursery.start(ControlServer(path).serve)
        remove_socket(path)
        nothing_stands_at(path)
        nursery.cancel_scope.cancel()


async def test_the_socket_that_a_killed_server_with_a_long_path_left_is_removed_by_the_next_one(
    tmp_path: Path,
) -> None:
    """Also by one of another home: 31 of them had gathered in a morning of tests."""
    killed, beginning, living, new = (
        tmp_path / ("d" * 120) / name for name in ("killed", "beginning", "living", "new")
    )
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(ControlServer(living).serve)
            for path in (killed, beginning):
                bindable(path).parent.mkdir(mode=0o700)
                with socket.socket(socket.AF_UNIX) as left:
                    left.bind(str(bindable(path)))
            two_minutes_ago = time.time() - 120.0
            for path in (killed, living):
                os.utime(bindable(path).parent, (two_minutes_ago, two_minutes_ago))
            await nursery.start(ControlServer(new).serve)
            nothing_stands_at(killed)
            assert bindable(beginning).exists(), "it may be about to listen"
            assert await trio.to_thread.run_sync(a_node_answers, living)
            nursery.cancel_scope.cancel()
    finally:
        remove_socket(beginning)


def test_a_home_without_a_running_node_is_unreachable(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "control.sock", tmp_path / "control.sock"):
        with pytest.raises(NoRunningNode) as caught, ask(path, "echo"):
            pass
        assert caught.value.exit_code == 4


async def test_a_handler_is_cancelled_when_its_client_leaves(server: ControlServer) -> None:
    cancelled = trio.Event()
    begun = trio.Event()

    async def wait(_arguments: Mapping[str, Any], _answer: Answering) -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    server.add("wait", wait)
    with trio.fail_after(PATIENCE_SECONDS):
        async with await trio.open_unix_socket(str(server.path)) as client:
            await client.send_all(framed(b'{"type":"ask","command":"wait"}'))
            await begun.wait()
        await cancelled.wait()


async def test_a_client_learns_that_the_node_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "run" / "control.sock"
    server = ControlServer(path)
    async with trio.open_nursery() as serving:

        async def end_everything(_arguments: Mapping[str, Any], answer: Answering) -> None:
            await answer("one")
            serving.cancel_scope.cancel()
            await trio.sleep_forever()

        server.add("end", end_everything)
        await serving.start(server.serve)
        with trio.CancelScope(shield=True), pytest.raises(NodeWentAway):
            await asked(path, "end")


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTH.pack(LARGEST_ASK_BYTES + 1),
        framed(b""),
        framed(b"\xff\xff"),
        framed(b"[]"),
        framed(b'{"type":"ask"}'),
        framed(b'{"type":"ask","command":7}'),
        framed(b'{"type":"answer","value":7}'),
        framed(b"[" * 50_000),
    ],
)
async def test_nonsense_is_answered_with_a_failure(sent: bytes, server: ControlServer) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with await trio.open_unix_socket(str(server.path)) as client:
            await client.send_all(sent)
            answer = await client.receive_some(65_536)
    assert b'"type":"failed"' in answer


async def test_a_request_cut_short_ends_in_silence(server: ControlServer) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with await trio.open_unix_socket(str(server.path)) as client:
            await client.send_all(LENGTH.pack(100) + b"{")
        assert await asked(server.path, "count", {"to": 1}) == [0]


async def test_a_client_that_leaves_before_its_answer_harms_nobody(server: ControlServer) -> None:
    request = b'{"type":"ask","command":"count","arguments":{"to":1}}'
    with trio.fail_after(PATIENCE_SECONDS):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(server.path))
                client.sendall(framed(request))
        assert await asked(server.path, "count", {"to": 1}) == [0]


async def test_more_clients_than_it_serves_are_turned_away(server: ControlServer) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        clients = [await trio.open_unix_socket(str(server.path)) for _ in range(MOST_CLIENTS + 1)]
        assert await clients[-1].receive_some(1) == b""
        for client in clients:
            await client.aclose()
        assert await asked(server.path, "count", {"to": 1}) == [0]


def test_the_client_refuses_to_send_more_than_the_node_takes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        with pytest.raises(LimitExceeded), ask(path, "x", {"y": "z" * LARGEST_ASK_BYTES}):
            pass


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
)
_messages = (
    st.builds(Ask, st.text(), st.dictionaries(st.text(), _json, max_size=3))
    | st.builds(ControlAnswer, _json)
    | st.builds(Done)
    | st.builds(ControlFailed, st.text(), st.text(), st.text(), st.integers(0, 255))
)


@settings(deadline=None)
@given(message=_messages, data=st.data())
def test_parsers_raise_nothing_but_our_errors(message: Any, data: st.DataObject) -> None:
    payload = bytearray(msgspec.json.encode(message))
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    for parse in (ask_in, reply_in):
        with contextlib.suppress(MalformedMessage):
            parse(bytes(payload[: data.draw(st.integers(0, len(payload)))]))


@given(st.binary(min_size=4, max_size=4))
def test_a_length_is_checked_before_it_is_believed(header: bytes) -> None:
    with contextlib.suppress(LimitExceeded):
        assert length_of(header, LARGEST_ASK_BYTES) <= LARGEST_ASK_BYTES


@pytest.mark.slow
@given(message=_messages)
def test_a_message_survives_its_frame(message: Any) -> None:
    limit = LARGEST_ANSWER_BYTES
    framed_message = frame(message, limit)
    length = length_of(framed_message[:4], limit)
    assert length == len(framed_message) - 4
    parse = ask_in if isinstance(message, Ask) else reply_in
    assert parse(framed_message[4:]) == message


@pytest.mark.parametrize(
    "sent", [LENGTH.pack(LARGEST_ANSWER_BYTES + 1), framed(b"{}"), framed(b"\0"), b"\0\0\0", b""]
)
def test_the_client_survives_whatever_answers(sent: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        with ask(path, "x") as answers:
            connection, _ = listening.accept()
            connection.recv(1000)
            connection.sendall(sent)
            connection.close()
            with pytest.raises(PotluckError):
                next(answers)


def test_a_node_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        with (
            ask(path, "x", silence_seconds=0.05) as answers,
            pytest.raises(DeadlineExceeded, match="SIGSTOP"),
        ):
            next(answers)


@pytest.mark.parametrize("seconds", [3_000_000.0, 1e300])
def test_a_client_may_wait_longer_than_the_system_can_count(seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with pytest.raises(NoRunningNode):
        ask_once(path, "x", silence_seconds=seconds)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        with ask(path, "x", silence_seconds=seconds) as answers:
            connection, _ = listening.accept()
            connection.close()
            with pytest.raises(NodeWentAway):
                next(answers)


async def test_the_node_itself_gets_the_answer_that_a_client_would_get(tmp_path: Path) -> None:
    server = ControlServer(tmp_path / "control.sock")

    async def pause(arguments: Mapping[str, Any], answer: Answering) -> None:
        await answer({"paused": True, "arguments": dict(arguments)})

    server.add("pause", pause)
    assert await server.ask("pause") == {"paused": True, "arguments": {}}
    with pytest.raises(PotluckError, match="still gets ready"):
        await server.ask("resume")


async def test_a_bug_of_a_command_does_not_end_the_node_that_asks_itself(tmp_path: Path) -> None:
    """A key on the screen ended the training, where the command only failed."""
    server = ControlServer(tmp_path / "control.sock")

    async def pause(_arguments: Mapping[str, Any], _answer: Answering) -> None:
        raise OSError("no space left")

    server.add("pause", pause)
    with pytest.raises(PotluckError, match="no space left"):
        await server.ask("pause")
