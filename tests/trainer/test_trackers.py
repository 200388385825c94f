"""Trackers hold the numbers of `/metrics`, and never cost a step.

The libraries are the real ones; where one is not installed, its test is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from auth.keys import SigningKey, fingerprint
from models.extras import PACKAGES
from node.app.backbone import PREFIX, BackboneRecord, metrics_text
from node.app.cli.output import Output
from node.app.commands import run_start
from node.app.main import main
from node.app.page.feed import row
from node.core.tracker import JSONL, MLFLOW, TENSORBOARD, WANDB, NamedTracker, read_tracker
from node.core.training_view import TrainerView
from node.core.wrong_use import WrongUse
from node.run.definition import read_definition
from node.run.folder import RunFolder, organiser_key
from node.run.signed import SignedDefinition, read_signed, sign_definition
from node.training import trackers
from node.training.figures import RunFigures
from node.training.happenings import Began, Happening, Notice
from node.training.history import RunHistory
from node.training.join.participation import Participation, take_part
from node.training.session import TrainingSession
from node.training.trackers import TrackerMissing, check_trackers, track
from node.training.trainer import TrainerOptions
from protocols.accumulation.events import CaughtUp, RoundFailed, StepLoss, StepTaken
from protocols.testing.world import SimulatedWorld
from tests.access.members import running_node, write_key
from tests.demo.told import step_taken
from tests.homes import home_in
from tests.runs.definitions import FINGERPRINT, NAME, NOW_MS, ORGANISER, TEXT, with_line
from tests.trainer.recorded import Recorded
from tests.trainer.training_nodes import training_in
from tests.waiting import PATIENCE_SECONDS, until

PROJECT = Path(__file__).parents[2] / "pyproject.toml"

STEPS = 3
DEFINITION = read_definition(
    with_line(f"steps = {STEPS}\nmax_norm = 1.0") + b'[schedule]\nname = "constant"\nwarmup = 3\n'
)

Found = dict[int, dict[str, float]]
"""Figures by their names, by step."""

SHOWN_BY_BOTH = {
    "train/loss": "loss",
    "train/learning_rate": "learning_rate",
    "train/samples": "samples_total",
    "train/samples_per_second": "samples_per_second",
    "run/failed_rounds": "failed_rounds_total",
}
NAMES = {
    *SHOWN_BY_BOTH,
    "train/grad_norm",
    "train/step_samples",
    "run/peers",
    "run/step_peers",
    "own/samples",
    "time/accumulating_seconds",
    "time/averaging_seconds",
    "time/waiting_seconds",
    "time/stepping_seconds",
}


def in_jsonl(tracker: NamedTracker) -> Found:
    rows = [json.loads(line) for line in Path(tracker.where).read_text().splitlines()]
    assert {(row["run"], row["peer"]) for row in rows} == {(NAME, "ann")}
    return {
        row["step"]: {name: value for name, value in row.items() if "/" in name} for row in rows
    }


def in_tensorboard(tracker: NamedTracker) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(tracker.where)
    events.Reload()
    found: Found = {}
    for name in events.Tags()["tensors"]:
        for one in events.Tensors(name):
            found.setdefault(one.step, {})[name] = float(make_ndarray(one.tensor_proto))
    return found


def in_wandb(tracker: NamedTracker) -> Found:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = tracker.folder.glob("wandb/offline-run-*/*.wandb")
    found: Found = {}
    for data in records_of(file.read_bytes()):
        record = Record.FromString(data)
        items = {
            "/".join(one.nested_key) or one.key: json.loads(one.value_json)
            for one in record.history.item
        }
        if items:
            step = items.pop("train/global_step")
            found[step] = {name: value for name, value in items.items() if name[0] != "_"}
    return found


def records_of(data: bytes) -> Iterator[bytes]:
    """LevelDB's log, after a header of seven bytes: records in pieces, in blocks of 32 KiB."""
    block, place, whole = 32_768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
        _, size, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # it is whole, or this is its last piece
            yield whole
            whole = b""


def in_mlflow(tracker: NamedTracker) -> Found:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=Path(tracker.where).as_uri())
    experiment = client.get_experiment_by_name(NAME)
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("ann", "FINISHED")
    found: Found = {}
    for name in run.data.metrics:
        for one in client.get_metric_history(run.info.run_id, name):
            found.setdefault(one.step, {})[name] = one.value
    return found


READERS: dict[str, Callable[[NamedTracker], Found]] = {
    JSONL: in_jsonl,
    TENSORBOARD: in_tensorboard,
    WANDB: in_wandb,
    MLFLOW: in_mlflow,
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSING_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for reading it


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # raised inside the libraries
@pytest.mark.parametrize("kind", READERS)
async def test_a_tracker_holds_the_numbers_of_metrics_and_of_the_page(
    kind: str, tmp_path: Path
) -> None:
    library = trackers.LIBRARIES.get(kind)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: the extra `{kind}`")
    torch.set_num_threads(1)
    tracker = NamedTracker(kind, "there").below(tmp_path)
    record = BackboneRecord(checkpoint_seconds=300.0, clock=time.monotonic)
    pages: dict[int, bytes] = {}
    options = TrainerOptions(begins=True, micro_batch=4)
    async with (
        SimulatedWorld(seed=1) as world,
        training_in(world, DEFINITION, "ann", tmp_path / "ann", options) as ann,
    ):
        session, node = ann.session, ann.node
        session.run = NAME

        def scrape(happening: Happening) -> None:
            record.take(happening)
            if isinstance(happening, StepTaken):
                pages[record.epoch] = metrics_text(
                    node.status(), node.network.traffic(), session.view(), record
                )

        session.follow(scrape)
        history = RunHistory(
            target=lambda: DEFINITION.training.step_samples,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        session.follow(history.take)
        async with track([tracker], session, name="ann"):
            await until(lambda: "RunComplete" in ann.shown.kinds(), PATIENCE_SECONDS)
    notices = [one.words for one in ann.shown.happenings if isinstance(one, Notice)]
    assert not [one for one in notices if "tracker" in one]
    found = READERS[kind](tracker)
    assert set(found) == set(pages) == set(range(1, STEPS + 1))
    for step, page in pages.items():
        samples = [
            one
            for family in text_string_to_metric_families(page.decode())
            for one in family.samples
        ]
        scraped = {one.name.removeprefix(PREFIX): one.value for one in samples}
        others = sum(one.value for one in samples if one.name == f"{PREFIX}peers")
        assert {name: found[step][name] for name in SHOWN_BY_BOTH} == {
            name: scraped[figure] for name, figure in SHOWN_BY_BOTH.items()
        }
        assert found[step]["run/peers"] == others + 1
        assert scraped["epoch"] == step
        assert set(found[step]) - {"own/samples_per_second"} == NAMES
    on_the_page = {step: (loss, total) for step, loss, total, *_ in map(row, history.curve.points)}
    assert on_the_page == {
        step: (float(f"{one['train/loss']:.6g}"), one["train/samples"])
        for step, one in found.items()
    }
    rates = [found[step]["train/learning_rate"] for step in sorted(found)]
    full = DEFINITION.optimizer["lr"]
    assert rates == pytest.approx([full / 4, full / 2, full * 3 / 4])


def test_the_organisers_page_names_every_figure() -> None:
    page = Path(__file__).parents[2] / "docs" / "organisers.md"
    _, _, section = page.read_text(encoding="utf-8").partition("## Curves in W&B")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+/\w+)`", row.split("|")[1])}
    assert named == NAMES | {"own/samples_per_second"}


def test_a_row_has_what_is_known_and_finite() -> None:
    figures = RunFigures()
    for event in (RoundFailed(0, 4, "gone"), step_taken(0), step_taken(1)):
        figures.take(event)
    (row,) = figures.rows(step_taken(1), TrainerView())
    assert row.step == 2
    assert "train/loss" not in row.values
    assert (row.values["train/samples"], row.values["run/failed_rounds"]) == (192.0, 1.0)


def test_the_losses_of_steps_that_others_made_are_rows_too() -> None:
    figures = RunFigures()
    event = CaughtUp(
        7, bytes(16), 1.0, 0, (), {}, losses=(StepLoss(5, 2.5), StepLoss(6, float("nan")))
    )
    figures.take(event)
    rows = figures.rows(event, TrainerView())
    assert [(row.step, row.values) for row in rows] == [(6, {"train/loss": 2.5}), (7, {})]


@dataclass
class Library:
    """A tracker's library that does not return, or raises, at each row."""

    returns: threading.Event = field(default_factory=threading.Event)
    raises: str = ""
    rows: int = 0

    def __call__(self, *_: Any) -> Library:
        return self

    def write(self, _at: float, _row: Any) -> None:
        self.rows += 1
        if self.raises:
            raise OSError(self.raises)
        self.returns.wait()

    def close(self) -> None:
        """Nothing to close."""


async def told_of(library: Library, monkeypatch: pytest.MonkeyPatch, *, steps: int) -> list[str]:
    """The warnings of a session of so many steps that writes to it."""
    monkeypatch.setitem(trackers._OPEN, JSONL, library)
    shown = Recorded()
    session = TrainingSession(shown)
    session.entered()
    async with track([NamedTracker(JSONL, "there")], session, name="ann"):
        session.happened(Began(NAME, 0))
        for epoch in range(steps):
            session.happened(step_taken(epoch))
    await trio.testing.wait_all_tasks_blocked(0.01)
    return [one.words for one in shown.happenings if isinstance(one, Notice)]


async def test_a_tracker_that_hangs_costs_its_rows_and_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "CLOSING_SECONDS", 0.1)
    library = Library()
    try:
        told = await told_of(library, monkeypatch, steps=trackers.MOST_ROWS + 100)
    finally:
        library.returns.set()
    assert len(told) == 1
    assert "has not taken the last 1,000 rows" in told[0]
    assert "Training goes on" in told[0]
    assert library.rows == 1


async def test_a_tracker_that_fails_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(raises="No space left on device")
    told = await told_of(library, monkeypatch, steps=20)
    assert told == [
        "warning: the tracker jsonl:there fails: it could not write: No space left on device. "
        + trackers.LOST
    ]
    assert library.rows == 20, "it may work again"


async def test_a_tracker_that_cannot_be_opened_is_told_of_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = Recorded()
    session = TrainingSession(shown)
    session.entered()
    async with track([NamedTracker(JSONL, str(tmp_path / "file" / "x"))], session, name="ann"):
        session.happened(Began(NAME, 0))
        session.happened(step_taken(0))
    await trio.testing.wait_all_tasks_blocked(0.01)
    (told,) = [one.words for one in shown.happenings if isinstance(one, Notice)]
    assert "cannot be opened" in told
    assert trackers.GO_ON in told


async def test_nothing_is_opened_for_a_session_that_does_not_train(tmp_path: Path) -> None:
    session = TrainingSession(Recorded())
    session.entered()
    async with track([NamedTracker(JSONL, str(tmp_path / "steps.jsonl"))], session, name="ann"):
        session.happened(Notice("it is refused"))
    assert os.listdir(tmp_path) == []


async def test_a_line_that_a_kill_cut_off_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text('{"step": 1}\n{"st')
    session = TrainingSession(Recorded())
    session.entered()
    async with track([NamedTracker(JSONL, str(file))], session, name="ann"):
        session.happened(Began(NAME, 4))
        session.happened(step_taken(4))
    assert json.loads(file.read_text().splitlines()[-1])["step"] == 5


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    check_trackers([NamedTracker(JSONL, "steps.jsonl")])
    with pytest.raises(TrackerMissing) as missing:
        check_trackers([NamedTracker(WANDB, "poem")])
    assert "-m pip install 'wandb>=0.31'" in missing.value.advice


def test_the_advice_for_a_missing_library_names_what_its_extra_brings() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert {extra: [package] for extra, package in PACKAGES.items()} == {
        extra: extras[extra] for extra in extras.keys() - {"plot", "development", "libraries"}
    }


# -- whose word counts

TRACKED = TEXT + b'[tracking]\ntrack = ["jsonl:steps.jsonl"]\n'


def signed_with(text: bytes, key: SigningKey = ORGANISER) -> SignedDefinition:
    data = sign_definition(text, key, now_ms=NOW_MS)
    return read_signed(data, run=NAME, organiser=fingerprint(key.public_key))


async def one_step(home: Path, part: Participation) -> None:
    """Train with this part until the first step."""
    torch.set_num_threads(1)
    configuration, shown = home_in(home), Recorded()
    session = TrainingSession(shown)
    session.entered()
    async with SimulatedWorld(seed=1) as world:
        write_key(configuration.key_file, world.identity_of("ann"))
        async with running_node(world, "ann", configuration) as node, trio.open_nursery() as beside:

            async def leave_after_a_step() -> None:
                await until(lambda: "StepTaken" in shown.kinds(), PATIENCE_SECONDS)
                session.departure.leave()

            beside.start_soon(leave_after_a_step)
            await take_part(node, part, session)
            beside.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_peer_writes_to_its_owners_trackers_and_never_to_those_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = NamedTracker(JSONL, str(tmp_path / "own.jsonl"))
    text = TEXT + b'[tracking]\ntrack = ["jsonl:theirs.jsonl"]\n'
    part = Participation(NAME, FINGERPRINT, signed=signed_with(text), begins=True, trackers=(own,))
    await one_step(tmp_path / "home", part)
    assert sorted(os.listdir(tmp_path)) == ["home", "own.jsonl"]


def test_the_trackers_of_a_run_toml_count_where_its_organisers_key_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "poem")
    organiser, stranger = home_in(tmp_path / "organiser"), home_in(tmp_path / "stranger")
    signed = signed_with(TRACKED, organiser_key(organiser.places, make=True))
    found = run_start._trackers_of_run(folder, organiser, signed, Output())
    assert [str(one) for one in found] == [f"jsonl:{tmp_path}/poem/steps.jsonl"]
    assert f"go to jsonl:{tmp_path}/poem/steps.jsonl" in capsys.readouterr().err
    assert run_start._trackers_of_run(folder, stranger, signed, Output()) == ()
    assert "organiser's key is not here" in capsys.readouterr().err
    organiser_key(stranger.places, make=True)
    assert run_start._trackers_of_run(folder, stranger, signed, Output()) == ()
    assert "organiser's key is not here" in capsys.readouterr().err


def test_a_link_in_the_runs_folder_leads_no_tracker_out_of_it(tmp_path: Path) -> None:
    """The folder may come from the web, before it is signed here."""
    folder, organiser = RunFolder(tmp_path / "poem"), home_in(tmp_path / "organiser")
    folder.path.mkdir()
    (folder.path / "steps.jsonl").symlink_to(tmp_path / ".bashrc")
    signed = signed_with(TRACKED, organiser_key(organiser.places, make=True))
    with pytest.raises(WrongUse, match=r"over a link in it.*--track"):
        run_start._trackers_of_run(folder, organiser, signed, Output())


def test_an_unknown_home_is_a_mistake_of_the_owner_and_no_bug(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="is no tracker"):
        read_tracker("jsonl:~nobody-of-this-name/steps.jsonl").below(tmp_path)


def test_a_short_path_is_legal_however_deep_the_working_directory_is() -> None:
    deep = Path("/" + "a" * 200) / ("b" * 200) / ("c" * 200) / ("d" * 200) / ("e" * 250)
    assert len(str(deep)) > 1_000
    placed = read_tracker("jsonl:steps.jsonl").below(deep)
    assert read_tracker(str(placed)) == NamedTracker(JSONL, f"{deep}/steps.jsonl")


def test_a_server_of_experts_needs_no_library_of_a_tracker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes no steps of the run. An invite that is none is the next thing that is wrong."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setenv("POTLUCK_TRACKING_TRACK", "wandb:poem")
    for words, told in (("experts serve", "invite"), ("join", "wandb")):
        assert main([*words.split(), "no-invite", "--home", str(tmp_path)]) != 0
        assert told in capsys.readouterr().err
