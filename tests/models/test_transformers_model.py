"""Models of Hugging Face's library: built from data alone, trained, and given back to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.errors import WrongSettings
from models.initial import seeded
from models.registry import build_model
from models.transformers_model import ARCHITECTURES
from node.app.main import main
from node.run.checkpoints import Checkpoints
from node.run.costs import costs_of
from node.run.definition import read_definition
from node.training.trainer import TrainerOptions
from protocols.accumulation.training_state import capture
from protocols.testing.world import SimulatedWorld
from tests.commands.console import potluck
from tests.trainer.training_nodes import training_in
from tests.waiting import PATIENCE_SECONDS, until

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs, not ours

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    **{one: {"model_type": one, **LLAMA} for one in ARCHITECTURES if one != "gpt2"},
}
CLOSE = 1e-5  # of logits around 1


def settings_of(config: dict[str, Any] | str, context: int = 16) -> dict[str, Any]:
    return {"name": "transformers", "context": context, "config": config}


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_begins_with_the_same_bits_and_learns(kind: str) -> None:
    before = torch.get_rng_state()
    one, other = (build_model(settings_of(CONFIGS[kind]), seed=3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before), "torch's own generator is not drawn from"
    for (name, ours), (_, theirs) in zip(
        one.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert not dict(one.named_buffers()), "what machines compute differently is no state"
    shapes = {name: tensor.shape for name, tensor in one.named_parameters()}
    looked_at = build_model(settings_of(CONFIGS[kind]), seed=None)
    assert {name: tensor.shape for name, tensor in looked_at.named_parameters()} == shapes
    assert {tensor.device.type for tensor in looked_at.parameters()} == {"meta"}

    batch = torch.randint(97, 105, (8, one.window), generator=seeded(0)).to(torch.uint8)
    optimizer = torch.optim.AdamW(one.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = one.loss(batch)
        loss.backward()
        assert all(parameter.grad is not None for parameter in one.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(5.545, abs=0.2), "ln 256: it knows nothing yet"
    assert losses[-1] < 3.0


@torch.no_grad()
@pytest.mark.parametrize("kind", CONFIGS)
def test_export_gives_a_folder_that_the_library_loads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    ours = build_model(settings_of(CONFIGS[kind]), seed=3)
    for number, parameter in enumerate(ours.parameters()):  # biases and norms, too, differ
        parameter += 0.05 * torch.randn(parameter.shape, generator=seeded(number))
    state = capture(ours.named_parameters(), ours.named_buffers(), run="poem", epoch=7)
    Checkpoints(tmp_path / "kept").save(state, model=ours.plain_settings())
    assert main(["export", "kept", "--format", "hf", "--output", "theirs"]) == 0
    theirs, report = AutoModelForCausalLM.from_pretrained("theirs", output_loading_info=True)
    assert not any(report.values()), report
    ids = torch.randint(256, (3, 16), generator=seeded(0))
    assert torch.allclose(theirs.eval()(ids).logits, ours(ids), atol=CLOSE)
    assert AutoModel.from_pretrained("theirs").config.model_type == kind
    assert sorted(one.name for one in Path("theirs").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "code of the hub": ({"auto_map": {"AutoModel": "evil--repo.Model"}}, "'auto_map' cannot be"),
    "a kernel of the hub": ({"attn_implementation": "evil/kernel"}, "cannot be used"),
    "the same, inside": ({"_attn_implementation": "evil/kernel"}, "cannot be used"),
    "a quantizer": ({"quantization_config": {"quant_method": "x"}}, "cannot be used"),
    "trust": ({"trust_remote_code": True}, "cannot be used"),
    "a billion layers": ({"n_layer": 10**9}, "must be from 1 to 256"),
    "layers that are no number": ({"n_layer": True}, "must be from 1 to 256"),
    "a negative width": ({"n_embd": -1}, "must be from 1 to 16,384"),
    "no number": ({"initializer_range": float("nan")}, "must be from 0.0"),
    "another activation": ({"activation_function": "evil"}, "must be one of gelu"),
    "too small for bytes": ({"vocab_size": 99}, "must be from 256"),
    "an unknown architecture": ({"model_type": "evil"}, "no model_type 'evil'"),
    "no architecture": ({"model_type": None}, "There are: gpt2"),
    "a width that heads cannot share": ({"n_head": 3}, "There is no gpt2 with this config"),
    "heads that cannot be shared": (
        {"model_type": "qwen2", **LLAMA, "num_key_value_heads": 3},
        "2 attention heads cannot share 3 heads",
    ),
    "heads that do not divide the width of llama": (
        {"model_type": "llama", **LLAMA, "num_attention_heads": 10, "num_key_value_heads": 10},
        "There is no llama with this config. transformers says: The hidden size (32) is not",
    ),
    "heads of mistral that are odd": (
        {"model_type": "mistral", **LLAMA, "num_attention_heads": 10},
        "A head of 3 values cannot be rotated",
    ),
    "more heads than the width of qwen2": (
        {"model_type": "qwen2", **LLAMA, "num_attention_heads": 64},
        "There is no qwen2 with this config",
    ),
    "heads that do not divide the width of gpt_neox": (
        {"model_type": "gpt_neox", **LLAMA, "num_attention_heads": 10},
        "There is no gpt_neox with this config. transformers says: The hidden size",
    ),
    "an odd head": (
        {"model_type": "llama", **LLAMA, "head_dim": 7},
        "There is no llama with this config",
    ),
    "an odd head of gpt_neox": (
        {"model_type": "gpt_neox", **LLAMA, "hidden_size": 14},
        "A head of 7 values cannot be rotated",
    ),
    "a head of its own where there is none": (
        {"model_type": "gpt_neox", **LLAMA, "head_dim": 64},
        "'head_dim' cannot be used",
    ),
    "a rotation without a base": ({"rope_theta": 0.0}, "must be from 1.0"),
    "another rotation without a base": ({"rotary_emb_base": 0}, "must be from 1.0"),
    "more than all is rotated": ({"rotary_pct": 9.0}, "must be from 0.0 to 1.0"),
    "values that nobody begins with": ({"initializer_range": 1e6}, "must be from 0.0 to 1.0"),
    "fewer positions than the context": ({"n_positions": 8}, "longer than the gpt2's 8 positions"),
}


@pytest.mark.parametrize(("changed", "told"), HOSTILE.values(), ids=HOSTILE)
def test_a_config_that_is_not_known_to_be_harmless_is_refused(
    changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(WrongSettings) as refused:
        build_model(settings_of({**GPT2, **changed}), seed=None)
    assert told in str(refused.value)


@pytest.mark.parametrize("name", ["../model", "/etc/passwd", "a/b/c", "~/model", "", "./model"])
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(WrongSettings):
        build_model(settings_of(name), seed=None)


def test_a_name_is_looked_up_in_the_cache_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)  # a folder of that name is not it
    (tmp_path / "owner" / "name" / "config.json").write_text(json.dumps(GPT2))
    with pytest.raises(WrongSettings, match="not in this machine's cache"):
        build_model(settings_of("owner/name"), seed=None)
    kept = tmp_path / "models--owner--name"
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots" / "abc" / "config.json").write_text(
        json.dumps({**GPT2, "architectures": ["GPT2LMHeadModel"], "resid_pdrop": 0.1})
    )
    model = build_model(settings_of("owner/name"), seed=None)
    assert model.plain_settings()["config"] == {**GPT2, "vocab_size": 256}


@pytest.mark.parametrize("kind", [*CONFIGS, "the widest heads", "the most positions"])
def test_a_pass_keeps_no_more_than_volunteers_are_told(kind: str) -> None:
    config, context = {
        "the widest heads": (
            {
                "model_type": "qwen2",
                **LLAMA,
                "num_hidden_layers": 1,
                "num_attention_heads": 256,
                "head_dim": 1_024,
            },
            32,
        ),
        "the most positions": ({"model_type": "mistral", **LLAMA, "num_hidden_layers": 1}, 5_000),
    }.get(kind) or (CONFIGS[kind], 64)
    model = build_model(settings_of(config, context), seed=0)
    of_the_model = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_the_model:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.loss(torch.zeros(1, context + 1, dtype=torch.uint8))
    told = model.activation_bytes(1)
    assert told / 4 < sum(one.nbytes() for one in kept.values()) <= told


def test_a_config_without_a_number_for_keys_and_values_has_as_many_heads_for_them() -> None:
    """As in the config.json of early models; the library's mistral has 8 of them by default."""
    config = {"model_type": "mistral", **LLAMA, "num_key_value_heads": None}
    model = build_model(settings_of(config), seed=None)
    assert model.plain_settings()["config"]["num_key_value_heads"] == 2


DEFINITION = b"""
[run]
name = "poem"
[model]
name = "transformers"
context = 16
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
[optimizer]
name = "adamw"
lr = 0.003
[training]
batch = 16
samples_at_once = 4
steps = 2
"""
HEADLESS = b"[model.config.auto_map]\n"


@pytest.mark.parametrize(("text", "code"), [(DEFINITION, 0), (DEFINITION + HEADLESS, 2)])
def test_checking_its_definition_ends_as_it_should(text: bytes, code: int, tmp_path: Path) -> None:
    """In a process of its own: with another type for the config, msgspec spoiled its memory."""
    (tmp_path / "run.toml").write_bytes(text)
    done = potluck("run", "check", str(tmp_path), "--offline", home=tmp_path / "home")
    assert done.returncode == code, done.stderr


async def test_a_run_trains_it(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    definition = read_definition(DEFINITION)
    assert costs_of(definition).sample_bytes > 0
    options = TrainerOptions(begins=True, micro_batch=4)
    async with (
        SimulatedWorld(seed=1) as world,
        training_in(world, definition, "ann", tmp_path / "ann", options) as ann,
    ):
        await until(lambda: "RunComplete" in ann.shown.kinds(), PATIENCE_SECONDS)
    assert ann.session.account.loss == pytest.approx(5.5, abs=0.3)
