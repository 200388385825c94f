"""A model's tensors under their names in transformers, and its config.json.

Pure: nothing is read or written here, and Hugging Face's library is not needed. `potluck export
--format hf` writes what this returns: `tensors` into model.safetensors (with the metadata
{"format": "pt"}), `config` into config.json; `GPT2LMHeadModel.from_pretrained(folder)`, or
`AlbertForPreTraining`, loads it. No tokenizer is written: ids are bytes, or the run's definition
says whose they are.

GPT-2's linear layers are stored transposed there, (in, out).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.albert import INITIAL_DEVIATION, NORM_EPSILON, SEGMENTS, AlbertSettings
from models.errors import NotThisModel, WrongSettings
from models.gpt import GPTSettings
from models.registry import build_model, model_settings
from models.transformers_model import NO_DROPOUT, NO_IDS, PREFIX, TransformersSettings, shape_of

GPT2_NORM_EPSILON = 1e-5  # torch's and GPT-2's own


@dataclass(frozen=True)
class HuggingFaceFiles:
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def hf_export(settings: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> HuggingFaceFiles:
    """From the model's plain settings and its state dict.

    NotThisModel, which names tensors that are missing, left over or of another shape, before
    anything is made; WrongSettings for a model that transformers does not have.
    """
    read = model_settings(settings)
    match read:
        case GPTSettings():
            _check(settings, parameters)
            return HuggingFaceFiles(_gpt_config(read), _gpt_tensors(read, parameters))
        case AlbertSettings():
            _check(settings, parameters)
            return HuggingFaceFiles(_albert_config(read), _albert_tensors(parameters))
        case TransformersSettings():
            _check(settings, parameters)
            named = {name.removeprefix(PREFIX): one for name, one in parameters.items()}
            config = {"dtype": "float32", **NO_IDS, **NO_DROPOUT, **shape_of(read.config)}
            return HuggingFaceFiles(config, named)
        case _:
            raise WrongSettings(
                f"There is no form of the model {settings['name']} for transformers.",
                advice="Export it with --format safetensors.",
            )


def _check(settings: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    model = build_model(settings, seed=None)  # tied parameters have one name
    expected = dict([*model.named_parameters(), *model.named_buffers()])
    missing = sorted(expected.keys() - parameters.keys())
    surplus = sorted(parameters.keys() - expected.keys())
    if missing or surplus:
        raise NotThisModel(
            "These are not the parameters of the model that the settings describe.",
            why=" ".join(
                f"{len(names)} {kind}, the first is {names[0]!r}."
                for kind, names in (("are missing", missing), ("are too many", surplus))
                if names
            ),
        )
    for name, tensor in expected.items():
        if parameters[name].shape != tensor.shape:
            raise NotThisModel(
                f"{name} has the shape {tuple(parameters[name].shape)}, and in the model that the "
                f"settings describe {tuple(tensor.shape)}."
            )


def _gpt_config(settings: GPTSettings) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": settings.vocabulary,
        "n_positions": settings.context,
        "n_embd": settings.width,
        "n_layer": settings.layers,
        "n_head": settings.heads,
        "activation_function": "gelu_new",  # gelu by tanh
        "layer_norm_epsilon": GPT2_NORM_EPSILON,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,  # the defaults are ids beyond 256 bytes
        "eos_token_id": None,
    }


GPT_OUTSIDE = {
    "embedding.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
GPT_NORMS = {"attention_norm": "ln_1", "wide_norm": "ln_2"}
GPT_LINEAR = {
    "attention.queries_keys_values": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "widen": "mlp.c_fc",
    "narrow": "mlp.c_proj",
}


def _gpt_tensors(settings: GPTSettings, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = {theirs: parameters[ours] for ours, theirs in GPT_OUTSIDE.items()}
    for block in range(settings.layers):
        ours, theirs = f"blocks.{block}", f"transformer.h.{block}"
        for norm, name in GPT_NORMS.items():
            tensors[f"{theirs}.{name}.weight"] = parameters[f"{ours}.{norm}.weight"]
            tensors[f"{theirs}.{name}.bias"] = parameters[f"{ours}.{norm}.bias"]
        for linear, name in GPT_LINEAR.items():
            transposed = parameters[f"{ours}.{linear}.weight"].t()
            tensors[f"{theirs}.{name}.weight"] = transposed.contiguous()
            tensors[f"{theirs}.{name}.bias"] = parameters[f"{ours}.{linear}.bias"]
    return tensors


def _albert_config(settings: AlbertSettings) -> dict[str, Any]:
    vocabulary = settings.vocabulary
    return {
        "model_type": "albert",
        "architectures": ["AlbertForPreTraining"],
        "vocab_size": vocabulary.size,
        "embedding_size": settings.embedding,
        "hidden_size": settings.width,
        "intermediate_size": settings.wide,
        "num_hidden_layers": settings.layers,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "num_attention_heads": settings.heads,
        "max_position_embeddings": settings.context,
        "type_vocab_size": SEGMENTS,
        "hidden_act": "gelu_new",  # gelu by tanh
        "layer_norm_eps": NORM_EPSILON,
        "initializer_range": INITIAL_DEVIATION,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
        "tie_word_embeddings": True,
        "pad_token_id": vocabulary.pad,
        "bos_token_id": vocabulary.cls,
        "eos_token_id": vocabulary.sep,
    }


_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"

ALBERT_BOTH = {  # modules with a weight and a bias
    "embedding_norm": "albert.embeddings.LayerNorm",
    "into_width": "albert.encoder.embedding_hidden_mapping_in",
    "layer.query": f"{_LAYER}.attention.query",
    "layer.key": f"{_LAYER}.attention.key",
    "layer.value": f"{_LAYER}.attention.value",
    "layer.output": f"{_LAYER}.attention.dense",
    "layer.attention_norm": f"{_LAYER}.attention.LayerNorm",
    "layer.widen": f"{_LAYER}.ffn",
    "layer.narrow": f"{_LAYER}.ffn_output",
    "layer.norm": f"{_LAYER}.full_layer_layer_norm",
    "pool": "albert.pooler",
    "order": "sop_classifier.classifier",
    "guess": "predictions.dense",
    "guess_norm": "predictions.LayerNorm",
}
ALBERT_SINGLE = {
    "words.weight": "albert.embeddings.word_embeddings.weight",
    "positions.weight": "albert.embeddings.position_embeddings.weight",
    "segments.weight": "albert.embeddings.token_type_embeddings.weight",
    "guess_bias": "predictions.bias",
}


def _albert_tensors(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = {theirs: parameters[ours] for ours, theirs in ALBERT_SINGLE.items()}
    for ours, theirs in ALBERT_BOTH.items():
        tensors[f"{theirs}.weight"] = parameters[f"{ours}.weight"]
        tensors[f"{theirs}.bias"] = parameters[f"{ours}.bias"]
    return tensors
