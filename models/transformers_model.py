"""A causal language model of Hugging Face's library, from its config: `name = "transformers"`.

    [model]
    name = "transformers"
    context = 128                       # a sample is a window of one byte more

    [model.config]                      # as in config.json
    model_type = "llama"
    vocab_size = 256
    hidden_size = 256
    ...

`config` may also be the name of a model in this machine's cache of Hugging Face, such as
"openai-community/gpt2"; its config.json is read, and nothing else. Nothing is downloaded.

A definition comes from the network, so its config is data and no more. It may have the keys of
`SHAPE`, within their limits, for the architectures of `ARCHITECTURES`, whose code is in the
installed library. Keys that choose code, such as `auto_map` or an attention kernel of the hub, are
refused; keys that do not change the network (`WITHOUT_EFFECT`) are ignored. There is no dropout,
as in all models here.

The library's own initial values depend on the machine. Ours are those of models/initial.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from models.errors import NotThisModel, WrongSettings, nearest
from models.extras import install
from models.gpt import BYTES, INITIAL_DEVIATION, LOGIT_BYTES
from models.hub_cache import cached_file
from models.initial import fill_constants, fill_evenly, seeded
from models.settings import checked
from models.trainable import FLOAT32_BYTES, Trainable

PREFIX: Final = "network."
"""In front of the library's own names of the parameters."""

ARCHITECTURES: Final = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2")
"""Tested. Others may build any number of modules from a few keys that are not limited here."""

LARGEST_CONFIG_BYTES: Final = 256 << 10

_LAYERS, _WIDTH, _WIDE, _VOCABULARY = (1, 256), (1, 16_384), (1, 262_144), (BYTES, 1_000_000)
_HEADS, _POSITIONS = (1, 256), (1, 1 << 20)
ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")

SHAPE: Final[dict[str, Any]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), _LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner"), _WIDE),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), _HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), _POSITIONS),
    "head_dim": (1, 1_024),
    "vocab_size": _VOCABULARY,
    **dict.fromkeys(
        (
            "layer_norm_epsilon",
            "layer_norm_eps",
            "rms_norm_eps",
            "rotary_pct",
            "initializer_range",
        ),
        (0.0, 1.0),
    ),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), (1.0, 1e9)),  # 0 would make nan of all
    **dict.fromkeys(("activation_function", "hidden_act"), ACTIVATIONS),
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_parallel_residual"), bool
    ),
}
"""The keys that a config may have: the least and the largest value, or the words, or a switch."""

OWN_HEAD_SIZE: Final = ("llama", "mistral", "qwen2")
"""The architectures that know `head_dim`. In the others it would be wrong in some places."""
ROTARY: Final = (*OWN_HEAD_SIZE, "gpt_neox")

ALWAYS: Final[dict[str, dict[str, Any]]] = {"mistral": {"sliding_window": None}}
"""Its default is a window of 4,096, for which the library would build a mask of positions²."""

WITHOUT_EFFECT: Final = frozenset(
    {
        *("architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "n_ctx"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "task_specific_params"),
        *("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("summary_type", "summary_use_proj", "classifier_dropout", "max_window_layers"),
    }
)

NO_IDS: Final = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
"""Ids are bytes; the library's defaults are beyond them."""

NO_DROPOUT: Final = dict.fromkeys(
    ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout"), 0.0
)
INTO_STREAM: Final = ("c_proj.weight", "o_proj.weight", "down_proj.weight", "dense.weight")
"""What adds to the stream of a block, twice for each: scaled so that it keeps its size (GPT-2)."""

# Values that autograd keeps of a block, for each position: some in float32, and some in the pass's
# own type, of the stream's width, of all heads together (queries, keys, values and what comes of
# them), and of the wide layer's
KEPT_EXACTLY, KEPT, KEPT_OF_HEADS, KEPT_WIDE = 4, 2, 4, 4


class TransformersSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`config`: a table as in config.json, or the name of a model in the cache."""

    config: Any  # not the union of both, with which msgspec 0.22 spoils memory
    context: Annotated[int, Meta(ge=1, le=65_536)] = 64


SIZES: Final[dict[str, TransformersSettings]] = {
    # about the gpt of that size, in the shape of Llama
    "tiny": TransformersSettings(
        context=64,
        config={
            "model_type": "llama",
            "vocab_size": BYTES,
            "hidden_size": 128,
            "intermediate_size": 344,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1_024,
            "tie_word_embeddings": True,
        },
    )
}


class TransformersModel(Trainable):
    """`seed` decides the initial parameters; None leaves it on the meta device, without values."""

    def __init__(self, settings: TransformersSettings, seed: int | None = 0) -> None:
        super().__init__()
        settings = checked(settings, "the model transformers")
        self.config = shape_of(settings.config)
        self.settings = settings
        self.window = settings.context + 1
        self.vocabulary = self.config["vocab_size"]
        kind = "bytes" if self.vocabulary == BYTES else "ids"
        self.sample = f"a window of {self.window} {kind}, each but the first to be predicted"
        network, config = _network(self.config, on="meta" if seed is None else "cpu")
        if settings.context > config.max_position_embeddings:
            raise WrongSettings(
                f"A context of {settings.context:,} is longer than the {config.model_type}'s "
                f"{config.max_position_embeddings:,} positions.",
                advice="Lower `context`, or raise the positions of the config.",
            )
        heads = config.num_attention_heads
        kept = getattr(config, "num_key_value_heads", None) or heads
        if heads % kept:
            raise WrongSettings(
                f"{heads} attention heads cannot share {kept} heads of keys and values.",
                advice="Set num_key_value_heads so that it divides num_attention_heads.",
            )
        head = _head_size(config)
        if config.model_type in ROTARY and (head < 2 or head % 2):
            raise WrongSettings(
                f"A head of {head} values cannot be rotated: it must be an even number.",
                advice="Change hidden_size or num_attention_heads, of which it is the quotient, or "
                "set head_dim where the architecture has it.",
            )
        self.network = network
        self._places = (
            config.num_hidden_layers,
            config.hidden_size,
            heads * head,
            _wide_of(config),
        )
        if seed is not None:
            self._fill(seeded(seed), config)

    def _fill(self, generator: torch.Generator, config: Any) -> None:
        fill_constants(self)
        deviation = getattr(config, "initializer_range", INITIAL_DEVIATION)
        into_stream = deviation / math.sqrt(2 * config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                adds = name.endswith(INTO_STREAM)
                fill_evenly(parameter, into_stream if adds else deviation, generator)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits for the id after each.  ids: (samples, length); (samples, length, vocabulary)."""
        logits: Tensor = self.network(input_ids=ids, use_cache=False).logits
        return logits

    def loss(self, batch: Tensor) -> Tensor:  # (samples, window), uint8 or int64
        if batch.dim() != 2 or not 2 <= batch.shape[1] <= self.window:
            raise NotThisModel(
                f"A batch of shape {tuple(batch.shape)} is not made of windows of 2 to "
                f"{self.window} bytes.",
                advice="The model's `window` says how long the data should cut them.",
            )
        ids = batch.long()
        logits = self(ids[:, :-1])
        if logits.dtype != torch.float64:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def plain_settings(self) -> dict[str, Any]:
        """With the config itself, so that they need no cache."""
        return {"name": "transformers", "context": self.settings.context, "config": self.config}

    def activation_bytes(self, samples: int, value_bytes: int = FLOAT32_BYTES) -> int:
        layers, width, of_heads, wide = self._places
        values = KEPT * width + KEPT_OF_HEADS * of_heads + KEPT_WIDE * wide
        each = layers * (width * KEPT_EXACTLY * FLOAT32_BYTES + values * value_bytes)
        vocabulary: int = self.config["vocab_size"]
        each += KEPT_OF_HEADS * of_heads * value_bytes  # while the backward pass is in a block
        each += vocabulary * LOGIT_BYTES
        return samples * self.settings.context * int(each)


def shape_of(config: Mapping[str, Any] | str) -> dict[str, Any]:
    """The part of a config that makes the network. WrongSettings for everything that is not known
    to be harmless."""
    given = _cached(config) if isinstance(config, str) else config
    if not isinstance(given, Mapping):
        raise WrongSettings(
            f"The config {given!r:.60} is neither a table nor the name of a model.",
            advice="Write the keys of its config.json into [model.config].",
        )
    kind = given.get("model_type")
    if kind not in ARCHITECTURES:
        raise WrongSettings(
            f"There is no model_type {kind!r:.60} for the model transformers.",
            advice=nearest(str(kind), ARCHITECTURES),
        )
    shape: dict[str, Any] = {"model_type": kind}
    if "num_key_value_heads" in given and given["num_key_value_heads"] is None:
        # as many as there are heads; the library has another default for some
        given = {**given, "num_key_value_heads": given.get("num_attention_heads")}
    for key, value in given.items():
        if key == "model_type" or key in WITHOUT_EFFECT or value is None:
            continue
        if key not in SHAPE or (key == "head_dim" and kind not in OWN_HEAD_SIZE):
            raise WrongSettings(
                f"The config's key {key!r:.60} cannot be used.",
                why="It may change the network, or choose code.",
                advice=nearest(key, SHAPE),
            )
        shape[key] = _checked_value(key, value, SHAPE[key])
    shape.setdefault("vocab_size", BYTES)
    return shape


def _checked_value(key: str, value: Any, allowed: Any) -> Any:
    if allowed is bool:
        if isinstance(value, bool):
            return value
        must = "true or false"
    elif isinstance(allowed[0], str):
        if value in allowed:
            return value
        must = f"one of {', '.join(allowed)}"
    else:
        least, most = allowed
        kinds = (int,) if isinstance(least, int) else (int, float)
        if type(value) in kinds and least <= value <= most:
            return float(value) if float in kinds else value
        must = f"from {least:,} to {most:,}"
    raise WrongSettings(f"The config's {key} cannot be {value!r:.60}: it must be {must}.")


def _cached(name: str) -> dict[str, Any]:
    """The config.json of a model in this machine's cache."""
    data = cached_file(name, "config.json", largest=LARGEST_CONFIG_BYTES)
    try:
        config = json.loads(data)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise WrongSettings(f"The config.json of {name} is damaged: it is no JSON object.")
    return config


def _library() -> Any:
    import importlib

    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise WrongSettings(
            "The model transformers needs the library transformers, which is not installed here.",
            advice=install("transformers"),
        ) from None


def _network(shape: Mapping[str, Any], *, on: str) -> tuple[nn.Module, Any]:
    """The library's network and its config. torch's own generator is left as it is."""
    library = _library()
    own = {key: value for key, value in shape.items() if key != "model_type"}
    own |= ALWAYS.get(shape["model_type"], {})
    try:
        config = library.AutoConfig.for_model(shape["model_type"], **NO_IDS, **own)
        for key, value in NO_DROPOUT.items():
            if hasattr(config, key):
                setattr(config, key, value)
        with torch.random.fork_rng(devices=[]), torch.device(on):
            network: nn.Module = library.AutoModelForCausalLM.from_config(
                config, attn_implementation="sdpa", dtype=torch.float32
            )
    except Exception as error:  # noqa: BLE001 - the library and those below it raise all kinds
        said = str(error.__cause__ or error).splitlines()
        raise WrongSettings(
            f"There is no {shape['model_type']} with this config.",
            why=f"transformers says: {said[-1].strip()[:200] if said else repr(error)[:200]}",
        ) from None
    _without_buffers(network)
    network.train()
    return network, config


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size)


def _wide_of(config: Any) -> int:
    wide = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return int(wide or 4 * config.hidden_size)


def _without_buffers(network: nn.Module) -> None:
    """Keep the frequencies of rotations as plain tensors. They are constants, which differ in the
    last bit between machines: as buffers, they would be part of the run's state."""
    for module in network.modules():
        for name in list(module._buffers):
            module.__dict__[name] = module._buffers.pop(name)
