"""The text of a new run.toml: every section explained, what is at its default behind a #.

The default is a small GPT on the source code of Python's standard library: no download, and two
weak processor cores see the loss fall within a minute.

The text is for people; the structs in definition.py are what is read. A test checks that the text
has every field of the structs with its default.
"""

from __future__ import annotations

import re
from pathlib import Path

NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
LONGEST_NAME = 64

TEMPLATE = """\
# The definition of a run, written by `potluck run init`: everybody in the run trains by it.
#
#   potluck run check DIR     whether it can be right, and what it costs a volunteer
#   potluck run sign DIR      makes it binding, under your organiser's key
#   potluck run start DIR     the run's first peer, which keeps its checkpoints
#   potluck run invite DIR    what volunteers paste after `potluck join`
#
# A key behind a # shows its default, or an example. docs/organisers.md goes through it.

format = 1

[run]
name = "NAME"
# A line for people, shown to volunteers before they train.
description = ""

# What is trained: gpt, albert or classifier, in one of its sizes. Further keys change single fields
# of that size (for gpt: context, width, layers, heads).
[model]
name = "gpt"
size = "tiny"
# A model of your own: volunteers need its file on their disk, and have to trust it by name.
#module = "my_model"        # my_model.py has build_model(settings, seed=…)
#sha256 = "…"               # then it must be this very file

# What it is trained on. Without any source it is the source code of Python's standard library (for
# classifier: built-in figures). Sources are http(s) addresses, or data sets of Hugging Face:
# nothing is ever read from a volunteer's disk.
[data]
#shuffle_examples = 10_000
#[[data.source]]
#kind = "jsonl"             # text, jsonl, parquet, datasets, standard-library
#paths = ["https://data.example.org/wikipedia-{000..099}.jsonl.gz"]
#field = "text"
#probability = 1.0

# As on one large computer that has the whole batch: adamw, lamb, lars or sgd.
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
floor = 0.1                 # of the full rate, which is where it ends

[training]
# Samples of one step of all peers together. Larger: fewer exchanges, less traffic.
batch = 1024
# The most that one machine computes at once; a weak one takes fewer by itself.
samples_at_once = 32
# After how many steps the run is over; 0: when you stop it.
steps = 2000
# Of the initial parameters, and of the order of the data.
seed = 0
# What the averaged gradient is clipped to; without the line it is not clipped.
max_norm = 1.0
# What passes are computed in where a GPU can: float32, bf16 or fp16.
#precision = "float32"
# Compute the next batch while the last one is averaged: where rounds take as long as computing.
#delayed = false
# More than 1: so many steps of each machine's own between two exchanges, for slow uplinks.
#local_steps = 1

[averaging]
# The codec in which gradients travel: none, or one of those in docs/organisers.md, which send half
# or a quarter of the bytes.
codec = "float16"
# How long at most a round waits for those who are expected: at least six times what the slowest
# machine takes for a batch of its own.
#grace_seconds = 10.0
# How long a round may take.
#round_seconds = 300.0
# How many peers may be in a round. More follow the run, and take a place when one is free.
#group_size = 256
# Lets all of them take part: steps are then made with averages over a grid, which differ between
# its groups, so that peers no longer hold the same bits.
#approximate = false
# After so many steps the parameters are averaged, too, for machines that round unlike; 0: never.
#parameters_every = 0

[limits]
# The least potluck that can take part.
#least_version = "0.1.0"
# Millions of bytes of memory that a volunteer must have for it; 0: what `run check` works out.
#memory_mb = 0

# What `potluck run start` keeps.
[checkpoints]
#every_seconds = 300.0
#keep_last = 3
# Keeps every so many steps for ever; 0: none.
#keep_every = 0
"""


def new_definition(name: str) -> bytes:
    """The text for a new run of this name."""
    return TEMPLATE.replace('name = "NAME"', f'name = "{name}"', 1).encode()


def name_for(folder: Path) -> str:
    """A run's name after its folder's; "run" if that gives none."""
    words = NAME_CHARACTERS.sub("-", folder.absolute().name).strip("-._")
    return words[:LONGEST_NAME].strip("-._") or "run"
