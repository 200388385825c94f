"""The export has transformers' names and shapes, and computes what our model does.

A plain forward pass is written here from the exported tensors alone, by the published architecture:
it stands in for transformers, which is not among our packages.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.errors import NotThisModel, WrongSettings
from models.hf_export import HuggingFaceFiles, hf_export
from models.initial import seeded
from models.registry import build_model
from models.trainable import Trainable

GPT = {"name": "gpt", "context": 16, "width": 24, "layers": 2, "heads": 3}
ALBERT = {
    "name": "albert", "context": 16, "width": 24, "wide": 40, "embedding": 12, "layers": 3,
    "heads": 3,
}  # fmt: skip


def model_of(settings: dict[str, Any]) -> Trainable:
    """With biases and norms that are not 0 and 1, so that none can be forgotten unnoticed."""
    model = build_model(settings, seed=1)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=seeded(number))
    return model


def exported(model: Trainable) -> HuggingFaceFiles:
    return hf_export(model.plain_settings(), model.state_dict())


def norm(x: Tensor, tensors: dict[str, Tensor], name: str, epsilon: float) -> Tensor:
    weight = tensors[f"{name}.weight"]
    return F.layer_norm(x, weight.shape, weight, tensors[f"{name}.bias"], epsilon)


def heads(x: Tensor, count: int) -> Tensor:  # (samples, length, width) to (samples, heads, …)
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def gpt2(files: HuggingFaceFiles, ids: Tensor) -> Tensor:
    t, config = files.tensors, files.config
    length, eps = ids.shape[1], config["layer_norm_epsilon"]
    hidden = torch.ones(length, length).triu(1).bool()

    def conv(x: Tensor, name: str) -> Tensor:  # their Conv1D
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    x = t["transformer.wte.weight"][ids] + t["transformer.wpe.weight"][:length]
    for block in range(config["n_layer"]):
        name = f"transformer.h.{block}"
        qkv = conv(norm(x, t, f"{name}.ln_1", eps), f"{name}.attn.c_attn").chunk(3, -1)
        q, k, v = (heads(part, config["n_head"]) for part in qkv)
        x = x + conv(attention(q, k, v, hidden), f"{name}.attn.c_proj")
        wide = conv(norm(x, t, f"{name}.ln_2", eps), f"{name}.mlp.c_fc")
        x = x + conv(F.gelu(wide, approximate="tanh"), f"{name}.mlp.c_proj")
    return norm(x, t, "transformer.ln_f", eps) @ t["transformer.wte.weight"].T


def albert(files: HuggingFaceFiles, ids: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    t, config = files.tensors, files.config
    eps = config["layer_norm_eps"]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, t[f"{name}.weight"], t[f"{name}.bias"])

    embeddings = "albert.embeddings"
    x = t[f"{embeddings}.word_embeddings.weight"][ids]
    x = x + t[f"{embeddings}.position_embeddings.weight"][: ids.shape[1]]
    x = x + t[f"{embeddings}.token_type_embeddings.weight"][segments]
    x = linear(
        norm(x, t, f"{embeddings}.LayerNorm", eps), "albert.encoder.embedding_hidden_mapping_in"
    )
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    for _ in range(config["num_hidden_layers"]):
        q, k, v = (
            heads(linear(x, f"{layer}.attention.{part}"), config["num_attention_heads"])
            for part in ("query", "key", "value")
        )
        mixed = linear(attention(q, k, v, None), f"{layer}.attention.dense")
        x = norm(x + mixed, t, f"{layer}.attention.LayerNorm", eps)
        wide = F.gelu(linear(x, f"{layer}.ffn"), approximate="tanh")
        x = norm(x + linear(wide, f"{layer}.ffn_output"), t, f"{layer}.full_layer_layer_norm", eps)
    guess = F.gelu(linear(x, "predictions.dense"), approximate="tanh")
    guess = norm(guess, t, "predictions.LayerNorm", eps)
    logits = guess @ t[f"{embeddings}.word_embeddings.weight"].T + t["predictions.bias"]
    pooled = torch.tanh(linear(x[:, 0], "albert.pooler"))
    return logits, linear(pooled, "sop_classifier.classifier")


@torch.no_grad()
def test_the_exported_gpt_computes_what_ours_does() -> None:
    model = model_of(GPT).double()
    ids = torch.randint(256, (2, 16), generator=seeded(0))
    assert torch.allclose(gpt2(exported(model), ids), model(ids), rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_the_exported_albert_computes_what_ours_does() -> None:
    model: Any = model_of(ALBERT).double()
    batch = model.batch_of(torch.randint(256, (2, 13), generator=seeded(0)), seeded(1))
    guesses, orders = albert(exported(model), batch.ids, batch.segments)
    hidden = model(batch.ids, batch.segments)
    assert torch.allclose(guesses, model.guesses(hidden), rtol=1e-9, atol=1e-10)
    assert torch.allclose(orders, model.orders(hidden), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("settings", [GPT, ALBERT], ids=["gpt", "albert"])
def test_every_parameter_is_exported_once_and_can_be_written(settings: dict[str, Any]) -> None:
    model = model_of(settings)
    files = exported(model)
    sizes = [tensor.numel() for tensor in files.tensors.values()]
    assert sum(sizes) == sum(parameter.numel() for parameter in model.parameters())
    assert all(tensor.is_contiguous() for tensor in files.tensors.values())
    places = {tensor.data_ptr() for tensor in files.tensors.values()}
    assert len(places) == len(files.tensors)  # safetensors refuses shared memory


def test_the_gpts_names_and_shapes_are_gpt2s() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in exported(model_of(GPT)).tensors.items()}
    block = {
        "ln_1.weight": (24,), "ln_1.bias": (24,),
        "attn.c_attn.weight": (24, 72), "attn.c_attn.bias": (72,),
        "attn.c_proj.weight": (24, 24), "attn.c_proj.bias": (24,),
        "ln_2.weight": (24,), "ln_2.bias": (24,),
        "mlp.c_fc.weight": (24, 96), "mlp.c_fc.bias": (96,),
        "mlp.c_proj.weight": (96, 24), "mlp.c_proj.bias": (24,),
    }  # fmt: skip
    assert shapes == {
        "transformer.wte.weight": (256, 24),
        "transformer.wpe.weight": (16, 24),
        "transformer.ln_f.weight": (24,),
        "transformer.ln_f.bias": (24,),
        **{f"transformer.h.{n}.{name}": shape for n in (0, 1) for name, shape in block.items()},
    }


@pytest.mark.parametrize("settings", [GPT, ALBERT], ids=["gpt", "albert"])
def test_the_config_is_json_and_has_no_id_that_the_vocabulary_lacks(
    settings: dict[str, Any],
) -> None:
    config = json.loads(json.dumps(exported(model_of(settings)).config))
    assert config["model_type"] in ("gpt2", "albert")
    for key in ("bos_token_id", "eos_token_id"):
        assert config[key] is None or config[key] < config["vocab_size"]


def test_parameters_of_another_model_are_refused_by_name() -> None:
    state = model_of(GPT).state_dict()
    with pytest.raises(NotThisModel, match=r"12 are missing, the first is 'blocks\.2\.attention"):
        hf_export({**GPT, "layers": 3}, state)
    with pytest.raises(NotThisModel, match=r"are too many, the first is 'blocks\.1\.attention"):
        hf_export({**GPT, "layers": 1}, state)
    with pytest.raises(NotThisModel, match=r"positions\.weight has the shape \(16, 24\)"):
        hf_export({**GPT, "context": 8}, state)


def test_a_model_that_transformers_does_not_have_is_refused() -> None:
    with pytest.raises(WrongSettings, match="no form of the model classifier"):
        hf_export({"name": "classifier"}, {})
