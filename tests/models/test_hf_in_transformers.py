"""transformers itself loads the output of `hf_export`.

tests/models/test_hf_export.py checks names, shapes and numbers without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.hf_export import hf_export
from models.initial import seeded
from models.registry import build_model

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

CLOSE = 1e-5  # of logits around 1: two libraries sum in different orders


def written(folder: Path, settings: dict[str, Any]) -> Any:
    """The exported model in a folder, as `potluck export --format hf` leaves it; and ours."""
    from safetensors.torch import save_file

    model = build_model(settings, seed=3)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):  # biases and norms, too, differ
            parameter += 0.05 * torch.randn(parameter.shape, generator=seeded(number))
    files = hf_export(model.plain_settings(), model.state_dict())
    save_file(files.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(files.config))
    return model


def loaded(kind: Any, folder: Path) -> Any:
    theirs, report = kind.from_pretrained(folder, output_loading_info=True)
    for what, names in report.items():
        assert not names, f"{what}: {names}"
    return theirs.eval()


@pytest.mark.slow
@torch.no_grad()
def test_transformers_loads_our_gpt_and_computes_the_same(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    ours = written(tmp_path, {"name": "gpt", "size": "tiny"})
    theirs = loaded(GPT2LMHeadModel, tmp_path)
    ids = torch.randint(256, (3, 64), generator=seeded(0))
    assert torch.allclose(theirs(ids).logits, ours(ids), atol=CLOSE)


@pytest.mark.slow
@torch.no_grad()
def test_transformers_generates_the_bytes_that_we_do(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    ours = written(tmp_path, {"name": "gpt", "size": "tiny"})
    theirs = loaded(GPT2LMHeadModel, tmp_path)
    made = theirs.generate(torch.tensor([list(b"def ")]), max_new_tokens=20, do_sample=False)
    expected = list(ours.generate(b"def ", 20, generator=seeded(0), temperature=0.0))
    assert made[0, 4:].tolist() == expected


@pytest.mark.slow
@torch.no_grad()
def test_transformers_loads_our_albert_and_computes_the_same(tmp_path: Path) -> None:
    from transformers import AlbertForPreTraining

    ours = written(tmp_path, {"name": "albert", "size": "tiny"})
    theirs = loaded(AlbertForPreTraining, tmp_path)
    batch = ours.batch_of(torch.randint(256, (3, 125), generator=seeded(0)), seeded(1))
    answer = theirs(batch.ids, token_type_ids=batch.segments)
    hidden = ours(batch.ids, batch.segments)
    assert torch.allclose(answer.prediction_logits, ours.guesses(hidden), atol=CLOSE)
    assert torch.allclose(answer.sop_logits, ours.orders(hidden), atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "whole", "alone"),
    [("base", 11_813_810, 11_683_584), ("large", 17_847_474, 17_683_968)],
)
def test_transformers_counts_the_same_parameters(size: str, whole: int, alone: int) -> None:
    from transformers import AlbertConfig, AlbertForPreTraining, AlbertModel

    settings = {"name": "albert", "size": size}
    ours = build_model(settings, seed=None)
    config = AlbertConfig(**hf_export(ours.plain_settings(), ours.state_dict()).config)
    with torch.device("meta"):
        assert sum(p.numel() for p in AlbertForPreTraining(config).parameters()) == whole
        assert sum(p.numel() for p in AlbertModel(config).parameters()) == alone
    assert sum(p.numel() for p in ours.parameters()) == whole


@pytest.mark.soak
def test_a_runs_tokenizer_beside_the_model_is_read_with_it(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {one: number for number, one in enumerate([*letters, "li", "ne"])}
    of_the_run = Tokenizer(models.BPE(numbers, [("l", "i"), ("n", "e")]))
    of_the_run.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_the_run.decoder = decoders.ByteLevel()
    written(tmp_path, {"name": "gpt", "size": "tiny", "vocabulary": len(numbers)})
    of_the_run.save(str(tmp_path / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "a line, and another line"
    assert theirs(text)["input_ids"] == of_the_run.encode(text).ids
    assert theirs.decode(of_the_run.encode(text).ids) == text
