"""Before anybody is invited: data is opened, a batch read, a pass made, and the disk seen."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.data import retrying
from models.data.clock import ReadingStopped
from node.app.main import main
from node.run import dry_run
from node.run.building import RunTask, build_task
from node.run.definition import read_definition
from node.run.dry_run import DataTrial, DataUnreadable, NoRoom, check_room, pass_over
from node.run.trusted import BrokenModule
from node.training.batch_size import measure
from tests.runs.definitions import TEXT, with_line
from tests.waiting import PATIENCE_SECONDS

NOWHERE = '[[data.source]]\nkind = "text"\npaths = ["https://data.nowhere.invalid/poems.txt"]\n'
LIBRARY = '[[data.source]]\nkind = "standard-library"\nprobability = 1000\n'
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")
GB = 10**9


@pytest.fixture
def no_such_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name leads anywhere, which is known at once; and nobody waits for the next attempt."""

    def look_up(*_: object, **__: object) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(retrying, "WAITS_SECONDS", (0.0,) * 5)


def trial_of(data: str, told: list[str]) -> DataTrial:
    return DataTrial(read_definition(TEXT + data.encode()), {}, told.append)


@pytest.mark.usefixtures("no_such_host")
def test_a_host_that_does_not_resolve_is_told_after_two_attempts() -> None:
    told: list[str] = []
    with pytest.raises(DataUnreadable) as caught:
        trial_of(NOWHERE, told).read()
    assert "Name or service not known, after 2 attempts" in caught.value.why
    assert "https://data.nowhere.invalid/poems.txt" in caught.value.why
    assert caught.value.exit_code == 4
    assert len(told) == 1


@pytest.mark.usefixtures("no_such_host")
def test_a_broken_source_is_found_however_rarely_it_is_drawn() -> None:
    with pytest.raises(DataUnreadable, match="'text'"):
        trial_of(LIBRARY + NOWHERE, []).read()


def test_data_that_can_be_read_gives_a_batch_to_make_a_pass_over() -> None:
    told: list[str] = []
    batch = trial_of("", told).read()
    task = build_task(read_definition(TEXT))
    assert task.samples_in(batch) == dry_run.SAMPLES
    assert pass_over(task, batch) == pytest.approx(task.loss(batch).item())
    assert all(one.grad is None for _, one in task.named_parameters)
    assert told == []


@pytest.mark.usefixtures("no_such_host")
def test_reading_that_waits_for_a_server_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "WAITS_SECONDS", (600.0,) * 5)
    waits = threading.Event()
    trial = DataTrial(read_definition(TEXT + NOWHERE.encode()), {}, lambda _: waits.set())
    ended: list[type] = []

    def read() -> None:
        with pytest.raises(ReadingStopped) as caught:
            trial.read()
        ended.append(caught.type)

    reader = threading.Thread(target=read)
    reader.start()
    assert waits.wait(PATIENCE_SECONDS)
    trial.stop()
    reader.join(PATIENCE_SECONDS)
    assert ended == [ReadingStopped]


class Watched(RunTask):
    """Notes autocast's settings when the loss is computed, and can make a loss that is NaN."""

    seen: tuple[bool, torch.dtype] = (False, torch.float32)
    factor = 1.0

    def loss(self, batch: Any) -> Tensor:
        Watched.seen = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return super().loss(batch) * self.factor


@pytest.fixture
def watched() -> Iterator[type[Watched]]:
    yield Watched
    Watched.factor = 1.0


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_pass_is_made_in_the_precision_of_the_run(
    watched: type[Watched], precision: str
) -> None:
    definition = read_definition(with_line(f'precision = "{precision}"'))
    task = watched(**vars(build_task(definition)))
    pass_over(task, task.made_up_batch(2))
    assert watched.seen[0] == (precision == "bf16")
    assert watched.seen[1] == torch.bfloat16 or precision == "float32"


def test_a_loss_that_is_not_finite_is_told_before_anybody_computes_it(
    watched: type[Watched],
) -> None:
    task = watched(**vars(build_task(read_definition(TEXT))))
    watched.factor = float("nan")
    with pytest.raises(BrokenModule, match="loss of the first batch is nan"):
        pass_over(task, task.made_up_batch(2))


def test_a_disk_without_room_for_one_checkpoint_is_refused_and_a_small_one_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition, told = read_definition(TEXT), list[str]()
    room = SimpleNamespace(free=100 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    check_room(definition, {}, tmp_path / "checkpoints", told.append)
    assert told == []
    room.free = 150_000  # one of 63 kB fits, and not all four
    check_room(definition, {}, tmp_path / "checkpoints", told.append)
    assert "checkpoints take" in told.pop()
    room.free = 10_000
    with pytest.raises(NoRoom, match="no room for a checkpoint of poem"):
        check_room(definition, {}, tmp_path / "checkpoints", told.append)
    (tmp_path / "checkpoints" / "epoch-0000000001-00").mkdir()
    (tmp_path / "checkpoints" / "epoch-0000000001-00" / "state").write_bytes(bytes(1000))
    check_room(definition, {}, tmp_path / "checkpoints", told.append)
    assert "10 kB are free" in told.pop(), "what is there already can still be served"


def test_a_folder_that_cannot_be_written_to_is_told_before_the_run_is_begun(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(NoRoom, match="cannot be written to"):
        check_room(read_definition(TEXT), {}, tmp_path / "checkpoints", pytest.fail)


@pytest.fixture
def run_of_nowhere(tmp_path: Path) -> Path:
    (tmp_path / "poem").mkdir()
    (tmp_path / "poem" / "run.toml").write_bytes(TEXT + NOWHERE.encode())
    return tmp_path / "poem"


def typed(folder: Path, *words: str) -> int:
    return main(["run", words[0], str(folder), "--home", str(folder.parent / "home"), *words[1:]])


@pytest.mark.usefixtures("no_such_host")
def test_run_check_opens_the_data_unless_it_is_told_not_to(
    run_of_nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(run_of_nowhere, "check", "--samples-per-s", "9") == 4
    said = capsys.readouterr()
    assert "The data 'text' cannot be read" in said.err
    assert "No mistake" not in said.out
    assert typed(run_of_nowhere, "check", "--samples-per-s", "9", "--offline") == 0
    told = capsys.readouterr().out
    assert "not checked (--offline): whether the data can be read" in told
    assert "No mistake was found, as far as was checked" in told
    assert typed(run_of_nowhere, "check", "--samples-per-s", "9", "--offline", "--json") == 0
    assert json.loads(capsys.readouterr().out)["left_out"]


@pytest.mark.parametrize(
    ("batch", "at_once", "volunteers", "expected"),
    [
        (64, 4, 8, (62, 66)),
        (64, 64, 8, (60, 68)),  # nobody takes more than an eighth of the batch at once
        (4, 4, 8, (4, 4)),
        (3, 3, 8, (3, 10)),
    ],
)
def test_run_check_says_how_many_samples_a_step_may_have(
    batch: int,
    at_once: int,
    volunteers: int,
    expected: tuple[int, int],
    run_of_nowhere: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = TEXT.replace(b"batch = 64", b"batch = %d" % batch)
    text = text.replace(b"samples_at_once = 4", b"samples_at_once = %d" % at_once)
    (run_of_nowhere / "run.toml").write_bytes(text)
    words = ("check", "--samples-per-s", "9", "--offline", "--volunteers", str(volunteers))
    assert typed(run_of_nowhere, *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step_samples_least"], told["step_samples_most"]) == expected
    assert typed(run_of_nowhere, *words) == 0
    is_far = "3 to 10 samples of all" in capsys.readouterr().out
    assert is_far == (batch == 3)


def test_run_check_tells_the_loss_of_the_first_batch(
    run_of_nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_of_nowhere / "run.toml").write_bytes(TEXT)
    assert typed(run_of_nowhere, "check", "--samples-per-s", "9", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["first_loss"] > 0
    assert told["left_out"] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_run_check_warns_of_a_machine_that_cannot_compile(
    run_of_nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch._inductor import config

    torch._dynamo.reset()
    (run_of_nowhere / "run.toml").write_bytes(with_line("compile = true"))
    with config.patch("cpp.cxx", ("no-such-compiler",)):
        assert typed(run_of_nowhere, "check", "--samples-per-s", "9", "--json") == 0
    said = capsys.readouterr()
    assert "warning: This machine trains without compiling the model" in said.err
    assert json.loads(said.out)["first_loss"] > 0


@pytest.mark.usefixtures("no_such_host")
def test_run_start_invites_nobody_to_data_that_cannot_be_read(
    run_of_nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(run_of_nowhere, "start", "--plain", *LOOPBACK) == 4
    said = capsys.readouterr()
    assert "potluck-run:" not in said.out
    assert "The data 'text' cannot be read" in said.err
    assert not (run_of_nowhere / "ports").exists(), "it has listened nowhere"


def test_run_start_invites_nobody_where_the_checkpoints_have_no_room(
    run_of_nowhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    assert typed(run_of_nowhere, "start", "--plain", *LOOPBACK) == 1
    said = capsys.readouterr()
    assert "potluck-run:" not in said.out
    assert "no room for a checkpoint" in said.err


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_the_benchmark_computes_in_the_precision_of_the_run(
    watched: type[Watched], precision: str
) -> None:
    definition = read_definition(with_line(f'precision = "{precision}"'))
    measure(watched(**vars(build_task(definition))), most=1, target=64)
    dtypes = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    is_mixed, dtype = watched.seen
    assert (dtype if is_mixed else None) == dtypes[precision]


def test_a_tokenizer_that_is_not_there_is_not_blamed_on_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "poem").mkdir()
    table = b'[data.tokenizer]\npath = "owner/model"\n'
    (tmp_path / "poem" / "run.toml").write_bytes(TEXT + table)
    assert typed(tmp_path / "poem", "check", "--samples-per-s", "9") == 2
    said = capsys.readouterr().err
    assert "The tokenizer.json of owner/model is not in this machine's cache" in said
    assert "hf download owner/model tokenizer.json" in said
    assert "[[data.source]]" not in said
