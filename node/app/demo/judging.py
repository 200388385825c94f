"""The result of the run: losses on text that nobody trained on, the digest, a sample. Loads torch.

    found = judge(definition_text, checkpoint_path)

Both losses are of the same samples: from the source code of PyTorch's optimizers, which is Python
like the training data, but not part of it. The first is of the initial parameters, which every peer
built for itself; the last is of the checkpoint that the backbone peer wrote.

A peer's own loss is that of its last few samples, which is noise. So the losses that count are of
the same samples before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from models.gpt import GPT
from models.initial import seeded
from node.run.building import build_task
from node.run.checkpoint_file import read_checkpoint
from node.run.definition import read_definition
from node.training.parameters_digest import digest_of

WINDOWS = 128  # some eight thousand predictions: their mean is good to a hundredth
PROMPT = b"def "
SAMPLE_BYTES = 160
TEMPERATURE = 0.8  # a little randomness: the likeliest of all is a space
THREADS = 1  # on a busy machine two threads that wait for each other are slower than one


@dataclass(frozen=True)
class Judged:
    parameters: int
    loss_first: float
    loss_last: float
    digest: str
    epoch: int
    sample: str


def judge(definition_text: bytes, checkpoint: Path) -> Judged:
    """CheckpointBroken if the file is not a whole checkpoint."""
    torch.set_num_threads(THREADS)
    model = build_task(read_definition(definition_text)).model
    assert isinstance(model, GPT)
    windows = held_out_windows(model.window)
    first = _loss(model, windows)
    state = read_checkpoint(checkpoint).state
    tensors = state.model_tensors()
    model.load_state_dict(tensors)
    written = bytes(
        model.generate(PROMPT, SAMPLE_BYTES, generator=seeded(7), temperature=TEMPERATURE)
    )
    return Judged(
        parameters=sum(one.numel() for one in model.parameters()),
        loss_first=first,
        loss_last=_loss(model, windows),
        digest=digest_of(tensors),
        epoch=state.epoch,
        sample=(PROMPT + written).decode("utf-8", "replace"),
    )


def held_out_windows(length: int) -> torch.Tensor:
    """(samples, length) bytes of Python from outside the standard library, from all over it."""
    files = sorted(Path(torch.optim.__path__[0]).rglob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    starts = torch.linspace(0, len(text) - length, WINDOWS).long().tolist()
    return torch.tensor([list(text[start : start + length]) for start in starts])


@torch.no_grad()
def _loss(model: GPT, windows: torch.Tensor) -> float:
    return float(model.loss(windows))
