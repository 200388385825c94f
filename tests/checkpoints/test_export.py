"""`potluck export`: the model of a checkpoint for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.registry import build_model
from node.app.main import main
from node.run.checkpoints import Checkpoints
from protocols.accumulation.training_state import capture
from tests.checkpoints.states import state_of

GPT = {"name": "gpt", "size": "tiny", "context": 32, "width": 32, "layers": 1, "heads": 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Checkpoints(tmp_path / "kept").save(state_of(7))
    return tmp_path / "kept"


def names_of_model() -> set[str]:
    return set(state_of(7).model_tensors())


def test_safetensors_hold_the_model_under_its_own_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["output"] == "test-epoch-7.safetensors"
    assert (said["epoch"], said["run"], said["tensors"]) == (7, "test", 7)
    loaded = load_file(said["output"])
    assert set(loaded) == names_of_model()
    for name, tensor in state_of(7).model_tensors().items():
        assert torch.equal(loaded[name], tensor)


def test_torch_loads_its_own_format_without_executing_anything(folder: Path) -> None:
    assert main(["export", str(folder), "--format", "torch", "--output", "model.pt"]) == 0
    loaded = torch.load("model.pt", weights_only=True)
    assert set(loaded) == names_of_model()


def test_an_existing_file_is_not_overwritten_unless_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine").write_text("precious")
    assert main(["export", str(folder), "--output", "mine"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert Path("mine").read_text() == "precious"
    assert main(["export", str(folder), "--output", "mine", "--force"]) == 0
    assert load_file("mine")


@pytest.mark.parametrize("format", ["safetensors", "torch", "hf"])
@pytest.mark.parametrize("output", ["mine", ".", "..", "kept"])
def test_no_folder_is_ever_removed_for_an_export(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    format: str,
    output: str,
) -> None:
    here = folder.parent / "here"
    for precious in (here / "mine", here, folder.parent):
        precious.mkdir(parents=True, exist_ok=True)
        (precious / "precious").write_text("years of work")
    monkeypatch.chdir(here)
    before = sorted(folder.parent.rglob("*"))
    named = folder if output == "kept" else Path(output)
    asked = ["export", str(folder), "--format", format, "--output", str(named), "--force"]
    assert main(asked) == 2
    assert f"{named} is a folder" in capsys.readouterr().err
    assert sorted(folder.parent.rglob("*")) == before


def test_an_unknown_model_is_not_exported_for_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder), "--format", "hf"]) == 2
    assert "does not contain the settings of its model" in capsys.readouterr().err


def test_a_folder_without_checkpoints_is_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path)]) == 2
    assert "no whole checkpoint" in capsys.readouterr().err


def test_a_broken_checkpoint_is_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = folder.iterdir()
    (path / "state.safetensors").write_bytes(b"nothing")
    assert main(["export", str(path)]) == 1
    assert f"{path} is not a whole checkpoint" in capsys.readouterr().err


def test_a_gpt_becomes_a_folder_for_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = build_model(GPT, seed=0)
    state = capture(model.named_parameters(), model.named_buffers(), run="g", epoch=3)
    Checkpoints(tmp_path / "kept").save(state, model=model.plain_settings())
    assert main(["export", "kept", "--format", "hf", "--output", "gpt"]) == 0
    config = json.loads((tmp_path / "gpt" / "config.json").read_text())
    assert config["model_type"] == "gpt2"
    loaded = load_file(tmp_path / "gpt" / "model.safetensors")
    assert any("wte" in name for name in loaded)
    monkeypatch.chdir(tmp_path / "gpt")
    here = ["export", "../kept", "--format", "hf", "--force", "--output", "."]
    assert main(here) == 2, "it would remove the folder that one is in"
    monkeypatch.chdir(tmp_path)
    again = ["export", "kept", "--format", "hf", "--output", "gpt"]
    assert main(again) == 2
    (tmp_path / "gpt" / "config.json").write_text("of an older export")
    assert main([*again, "--force"]) == 0
    assert json.loads((tmp_path / "gpt" / "config.json").read_text()) == config
    assert sorted(one.name for one in (tmp_path / "gpt").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
