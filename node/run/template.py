"""The text of a new run.toml: every section explained, settings at their default behind a #.

    new_definition("poem", "albert")          # bytes

There is one text, and a recipe says what is different in it: a model with the optimizer, schedule
and batch that go together, as in a paper but small. Every recipe trains at once on two weak
processor cores, on data that need no download. The text itself is the recipe `gpt`.

`small_with_experts` is a run with mixtures of experts for the demo, benches and tests, without the
explanations.

The text is for people; the structs in definition.py are what is read. A test checks that the text
has every field of the structs with its default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
LONGEST_NAME = 64

TEMPLATE = """\
# The definition of a run, written by `potluck run init`: everybody in the run trains by it.
#
#   potluck run check DIR     finds mistakes, and shows what the run costs a volunteer
#   potluck run sign DIR      signs it with your organiser's key
#   potluck run start DIR     starts the run's first peer, which keeps its checkpoints
#   potluck run invite DIR    prints the invite for volunteers
#
# A key behind a # shows its default or an example. docs/organisers.md explains them all.

format = 1

[run]
name = "NAME"
# A line for people, shown to volunteers before they train.
description = ""

# The model: gpt, albert, classifier, swav or transformers, in one of its sizes. Further keys change
# single fields of that size (for gpt: context, width, layers, heads).
[model]
name = "gpt"
size = "tiny"
# Your own model: volunteers need its file on their disk, and have to trust it by name.
#module = "my_model"        # my_model.py has build_model(settings, seed=…)
#sha256 = "…"               # then it must be exactly this file

# The data. Without a source it is the source code of Python's standard library (for classifier and
# swav: built-in figures). Sources are http(s) addresses, or data sets of Hugging Face: nothing is
# read from a volunteer's disk.
[data]
#shuffle_examples = 10_000
#[[data.source]]
#kind = "jsonl"             # text, jsonl, parquet, datasets, standard-library
#paths = ["https://data.example.org/wikipedia-{000..099}.jsonl.gz"]
#field = "text"
#probability = 1.0
#[data.tokenizer]           # of Hugging Face's library; without one the ids are bytes
#path = "https://data.example.org/tokenizer.json"
#sha256 = "…"

# As for one large computer with the whole batch: adamw, lamb, lars or sgd.
[optimizer]
name = "adamw"
lr = 0.003
betas = [0.9, 0.95]
weight_decay = 0.1

# Counted in steps of the whole run: cosine, linear, polynomial or constant.
[schedule]
name = "cosine"
warmup = 20
steps = 2000
floor = 0.1                 # of the full rate, where it ends

[training]
# Samples of one step of all peers together. Larger: fewer exchanges, less traffic.
batch = 1024
# The most that one machine computes at once; a weak one takes fewer by itself.
samples_at_once = 32
# The run ends after this many steps; 0: when you stop it.
steps = 2000
# For the initial parameters and the order of the data.
seed = 0
# The averaged gradient is clipped to this norm; without the line it is not clipped.
max_norm = 1.0
# The number type of the passes, on GPUs that have it: float32, bf16 or fp16.
#precision = "float32"
# Compile the model on the machines that can (torch.compile): each takes a minute for it, and then
# computes faster.
#compile = false
# Compute the next batch while the last one is averaged: if rounds take as long as computing.
#delayed = false
# More than 1: this many steps of each machine's own between two exchanges, for slow uplinks.
#local_steps = 1
# More than 1: such steps are exchanged in this many parts, one after the other, while the machines
# go on with theirs. It divides local_steps, and a step of the run is then one part's exchange.
#fragments = 1

[averaging]
# The codec for gradients on the wire: none, or one in docs/organisers.md that sends half of the
# bytes, a quarter or an eighth; with local steps also a hundredth.
codec = "float16"
# Sends the gradient of each large matrix as two thin ones of this many columns (PowerSGD), with a
# fraction of the bytes; what they leave out is sent later. 0: gradients are sent whole.
#powersgd_rank = 0
# The longest that a round waits for expected peers: at least seven times what the slowest machine
# takes for a batch of its own.
#grace_seconds = 10.0
# The longest that a round may take.
#round_seconds = 300.0
# The most peers in a group, 8 at least. A run with more averages by cohorts: docs/organisers.md.
#group_size = 64
# Lets all peers take part: steps then use averages over a grid. They differ between its groups, so
# peers no longer hold the same bits.
#approximate = false
# Averages the parameters, too, every so many steps, for machines that round differently; 0: never.
#parameters_every = 0

# For a model whose feed-forward blocks are mixtures of experts, which volunteers serve: dmoe_gpt or
# dmoe_classifier. docs/experts.md describes such a run.
#[experts]
# One grid for each mixture of the model, all of these sizes: more cells than there are experts.
#grids = ["ffn0", "ffn1"]
#sizes = [16, 16]
# How many experts an example goes to, and how many of them must answer.
#k = 4
#quorum = 1
# How long the others are waited for, and the longest that a pass may take.
#grace_seconds = 3.0
#timeout_seconds = 30.0
#codec = "float16"
# The weight of the loss that keeps the gates from choosing always the same experts.
#balance = 0.01
# The batches that a trainer has under way while it waits for experts.
#in_flight = 4
# The gradient of an expert's step is clipped to this norm.
#max_norm = 1.0
# One expert: feed-forward or gated, as wide as the model.
#[experts.network]
#name = "gated"
#width = 128
#inner = 128
# For the steps that each expert makes by itself.
#[experts.optimizer]
#name = "adamw"
#lr = 0.001
#[experts.schedule]
#name = "constant"
#warmup = 100

[limits]
# The oldest version of potluck that can take part.
#least_version = "0.1.0"
# Millions of bytes of memory that a volunteer needs; 0: the estimate of `run check`.
#memory_mb = 0

# For `potluck run start`.
[checkpoints]
#every_seconds = 300.0
#keep_last = 3
# Keeps a checkpoint for ever every this many steps; 0: none.
#keep_every = 0

# What is public on the run's page: "names" or "pseudonyms" ("auto": names in an open run,
# pseudonyms in a closed one), and whether the last events are. Needs the newest potluck.
#[page]
#names = "auto"
#events = true

# What `potluck run start` writes a row of figures to for each step, where your organiser's key is:
# "jsonl:FILE", "tensorboard:DIR", "wandb:PROJECT" or "mlflow:DIR", in this folder. Nobody else's
# machine heeds this, but everybody in the run can read it: write no password here.
#[tracking]
#track = []
"""


SMALL_WITH_EXPERTS = """\
[run]
name = "NAME"
[model]
name = "dmoe_gpt"
size = "tiny"
context = WIDTH
width = WIDTH
layers = 2
heads = 2
[optimizer]
name = "adamw"
lr = 0.004
[training]
batch = BATCH
samples_at_once = 8
[experts]
grids = ["ffn0", "ffn1"]
sizes = SIZES
k = K
[experts.network]
name = "feed-forward"
width = WIDTH
inner = [INNER]
[experts.optimizer]
name = "adamw"
lr = 0.004
"""


@dataclass(frozen=True)
class Recipe:
    """`trains`: the model and its data, in words. `changes`: keys by their section. The tables of
    `WHOLE` have these keys only, other sections keep theirs; None: the run has no such key."""

    trains: str
    changes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


WHOLE = ("model", "optimizer", "schedule", "experts.network", "experts.optimizer")

RECIPES: dict[str, Recipe] = {
    "gpt": Recipe("a small GPT on Python's own source code"),
    # Douillard et al. 2023: AdamW on each machine, and a Nesterov step of all between
    "diloco": Recipe(
        "a small GPT on Python's own source code, with an exchange every 50 steps of each machine",
        {
            "schedule": {"name": "cosine", "warmup": 5, "steps": 200, "floor": 0.1},
            "training": {"batch": 64, "steps": 200, "local_steps": 50},
            "averaging": {"codec": "blockwise-int4"},
        },
    ),
    # Ryabinin and Gusev 2020: experts that volunteers serve
    "moe": Recipe(
        "a small GPT with mixtures of experts, on Python's own source code",
        {
            "model": {
                "name": "dmoe_gpt",
                "size": "tiny",
                "context": 32,
                "width": 64,
                "layers": 2,
                "heads": 2,
            },
            "optimizer": {"name": "adamw", "lr": 0.004},
            "training": {"batch": 128, "samples_at_once": 8},
            "experts": {
                "grids": ["ffn0", "ffn1"],
                "sizes": [4, 4],
                "k": 2,
            },
            "experts.network": {"name": "gated", "width": 64, "inner": 64},
            "experts.optimizer": {"name": "adamw", "lr": 0.004},
        },
    ),
    # Lan et al. 2020, and section 4.2 of DeDLOC: masked ids and the order of segments, with LAMB
    "albert": Recipe(
        "a small ALBERT on Python's own source code",
        {
            "model": {"name": "albert", "size": "tiny"},
            "optimizer": {"name": "lamb", "lr": 0.01, "weight_decay": 0.01},
            "schedule": {"name": "linear", "warmup": 20, "steps": 2000},
            "training": {"batch": 512},
        },
    ),
    # Caron et al. 2020, and section 4.1 of DeDLOC: swapped assignments of crops, with LARS
    "swav": Recipe(
        "a small network of pictures without labels, by SwAV on built-in figures",
        {
            "model": {"name": "swav", "size": "tiny", "frozen": 20, "queue_from": 200},
            "optimizer": {"name": "lars", "lr": 4.0, "weight_decay": 1e-6, "trust": 0.001},
            "schedule": {"name": "cosine", "warmup": 10, "steps": 2000, "floor": 0.001},
            "training": {"batch": 512, "samples_at_once": 64, "max_norm": None},
        },
    ),
}

_HEADER, _KEY = re.compile(r"#?\[([a-z.]+)\]$"), re.compile(r"#?([a-z_]+) = ")


def new_definition(name: str, recipe: str = "gpt") -> bytes:
    """The text for a new run of this name."""
    text = TEMPLATE.replace('name = "NAME"', f'name = "{name}"', 1)
    return _changed(text, RECIPES[recipe].changes).encode()


def _changed(text: str, changes: Mapping[str, Mapping[str, object]]) -> str:
    """The text with these keys. Every section with changes is in it, if only behind a #."""
    lines: list[str] = []
    section, given = "", dict[str, object]()
    for line in text.splitlines():
        header, key = _HEADER.match(line), _KEY.match(line)
        if header is not None:
            section = header[1]
            given = dict(changes.get(section, {}))
            lines.append(f"[{section}]" if given else line)
            if section in WHOLE:
                lines += [_with(f"{name} = ", value) for name, value in given.items()]
        elif key is None or not given:
            lines.append(line)
        elif section not in WHOLE:
            lines.append(_with(line, given[key[1]]) if key[1] in given else line)
        elif line.startswith("#") and key[1] not in given:
            lines.append(line)
    return "\n".join([*lines, ""])


def _with(line: str, value: object) -> str:
    key, _, _ = line.lstrip("#").partition(" = ")
    return f"#{line}" if value is None else f"{key} = {json.dumps(value)}"


def small_with_experts(
    name: str, *, batch: int, sizes: Sequence[int], k: int = 2, width: int = 32, **sections: str
) -> str:
    """A run with two mixtures that any machine trains, to try things with: for the demo, benches
    and tests. `sections`: further lines of a section, such as `experts="max_norm = 1.0"`."""
    given: dict[str, object] = {
        "NAME": name,
        "WIDTH": width,
        "INNER": 2 * width,
        "BATCH": batch,
        "K": k,
    }
    given["SIZES"] = list(sizes)
    text = re.sub(r"\b[A-Z]+\b", lambda word: str(given[word[0]]), SMALL_WITH_EXPERTS)
    for section, lines in sections.items():
        head = f"[{section}]\n"
        text = text.replace(head, f"{head}{lines}\n") if head in text else f"{text}{head}{lines}\n"
    return text


def name_for(folder: Path) -> str:
    """A run's name after its folder's; "run" if that gives none."""
    words = NAME_CHARACTERS.sub("-", folder.absolute().name).strip("-._")
    return words[:LONGEST_NAME].strip("-._") or "run"
