"""What a run costs whoever takes part: memory, disk, traffic. Nothing is built or measured.

    costs = costs_of(definition)
    costs.memory_bytes(samples=8)           # of the whole process, with that many at once
    costs.memory_bytes(samples=8, on_gpu=True)      # of it, what is not in the GPU's memory
    costs.gpu_bytes(samples=8)                      # and what is
    costs.state_bytes                       # what a newcomer downloads first
    costs.traffic(volunteers=8, samples_per_second=40.0).up_bytes_per_hour

Easy to get wrong: these are estimates from shapes, not measurements: within a third of what a
process was seen to take. The model is looked at without its memory (torch's meta device), so a
definition of a terabyte costs nothing to look at, and is refused by whoever has less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from node.run.definition import RunDefinition

if TYPE_CHECKING:
    from models.data.settings import DataSettings
    from models.trainable import Trainable

PROCESS_BYTES = 430_000_000
"""Python, torch without its compiler, a node with peers. Where the model is next to nothing three
such processes held 361 to 364 MB as they began and 375 to 377 after two minutes. What is above that
is for what allocators keep of a small model's batches, of which its shapes say too little: the tiny
GPT was seen to hold 407 to 421 MB with 4 samples at once (452 by these figures) and 471 to 545 with
32 (493). With 377 here a cap would let in what it then has to end."""
GPU_PROCESS_BYTES = 700_000_000
"""What CUDA's context and libraries hold of the machine's memory on top: the process of a small
model held 1.1 GB in all beside an H100."""
FLOAT_BYTES, HALF_BYTES = 4, 2
KEPT_APART = 1.25  # what allocators hold beside what is asked of them: 1.2 to 1.35 measured
STATISTICS = {"sgd": 0, "lars": 1, "lamb": 2, "adamw": 2}  # tensors of each parameter's size
# Flat buffers of a parameter's size each: the gradients of the epoch and the result of its round;
# with `delayed` a second pair; with local steps where they began, and the outer momentum.
BUFFERS, BUFFERS_DELAYED, BUFFERS_LOCAL = 2, 4, 4
# Where a GPU computes: the buffers that a round reads and writes stay in the machine's memory. The
# GPU has the gradients of the epoch and the average to step with; with `delayed` the shadow, too.
HOST_BUFFERS, HOST_BUFFERS_LOCAL = 2, 4
GPU_BUFFERS, GPU_BUFFERS_DELAYED, GPU_BUFFERS_LOCAL = 2, 3, 1
CODEC_BYTES = {"none": 4.0, "float64": 8.0, "float16": 2.0, "bfloat16": 2.0, "blockwise-int8": 1.02}
HEADERS = 1.02  # frames, encryption, TCP: measured on loopback
EXAMPLE_OVERHEAD_BYTES = 200  # of an example in the shuffle buffer, beside its text
TALK_BYTES_PER_SECOND = 1_500  # the directory, progress and signs of life, each way
HOUR = 3600.0
MEGA = 1_000_000


@dataclass(frozen=True)
class Traffic:
    """Of one volunteer among equals."""

    step_seconds: float
    round_bytes: int
    """Sent, and as much received, in one round."""
    up_bytes_per_hour: int
    down_bytes_per_hour: int


@dataclass(frozen=True)
class Costs:
    parameters: int
    state_bytes: int
    """Parameters and the optimizer's statistics: what a newcomer fetches first."""
    fixed_bytes: int
    """Of memory, whatever the batch, where a processor computes: Python and torch, parameters,
    gradients, statistics, the collaborative optimizer's buffers, the data's shuffle buffer."""
    fixed_beside_gpu_bytes: int
    """The same of the machine's memory, where a GPU computes: the process, the buffers of a round,
    the shuffle buffer."""
    fixed_on_gpu_bytes: int
    """And of the GPU's memory: parameters, gradients, statistics, and what is accumulated."""
    sample_bytes: int
    """For each sample at once, of the memory where it is computed."""
    disk_bytes: int
    """Of a volunteer: the state while it is fetched."""
    keeper_disk_bytes: int
    """Of whoever keeps the checkpoints: those that stay, and one that is being written. What
    `keep_every` keeps for ever comes on top."""
    round_bytes: int
    """Of one round, each way, among many equals; fewer keep a part of it to themselves."""
    samples_per_round: int

    def memory_bytes(self, samples: int, *, on_gpu: bool = False) -> int:
        """Of the machine's memory, for the whole process with so many samples at once. What a GPU
        computes is in its own memory, however many samples there are."""
        if on_gpu:
            return self.fixed_beside_gpu_bytes
        return self.fixed_bytes + samples * self.sample_bytes

    def gpu_bytes(self, samples: int) -> int:
        """Of a GPU's memory that computes so many samples at once."""
        return self.fixed_on_gpu_bytes + samples * self.sample_bytes

    def most_samples(self, memory_bytes: int) -> int:
        """How many samples at once a processor can compute in it; 0 if not even one."""
        return max(0, (memory_bytes - self.fixed_bytes) // max(1, self.sample_bytes))

    def traffic(self, *, volunteers: int, samples_per_second: float) -> Traffic:
        """With so many volunteers who compute so many samples a second each. A lone one has nobody
        to exchange with."""
        seconds = self.samples_per_round / max(volunteers * samples_per_second, 1e-9)
        shared = int(self.round_bytes * (1.0 - 1.0 / volunteers))  # one's own share stays here
        hourly = int(shared * HOUR / seconds + TALK_BYTES_PER_SECOND * HOUR)
        return Traffic(seconds, shared, hourly, hourly)


def costs_of(definition: RunDefinition, trusted: Mapping[str, Path] | None = None) -> Costs:
    """Of this run. Models' errors for a model that cannot be; a module's model has to be built to
    be looked at, and UntrustedModule says that it must be trusted for it."""
    from models.trainable import parameter_count
    from node.run.building import task_to_look_at

    task = task_to_look_at(definition, trusted or {})
    model, training = task.model, definition.training
    parameters = parameter_count(model)
    statistics = STATISTICS.get(str(definition.optimizer.get("name")), 2)
    buffers, on_host, on_gpu = BUFFERS, HOST_BUFFERS, GPU_BUFFERS
    if training.delayed:
        buffers, on_gpu = BUFFERS_DELAYED, GPU_BUFFERS_DELAYED
    if training.local_steps > 1:
        buffers, on_host, on_gpu = BUFFERS_LOCAL, HOST_BUFFERS_LOCAL, GPU_BUFFERS_LOCAL
    state = FLOAT_BYTES * parameters * (1 + statistics)
    tensors = FLOAT_BYTES * parameters * (2 + statistics)  # with the gradients
    if training.precision != "float32":
        tensors += HALF_BYTES * parameters  # autocast's copy, while a batch is computed
    of_parameters = FLOAT_BYTES * parameters
    shuffled = _buffer_bytes(task.data, model)
    sample = int(KEPT_APART * task.activation_bytes())
    fixed = PROCESS_BYTES + int(KEPT_APART * (tensors + buffers * of_parameters)) + shuffled
    stated = MEGA * definition.limits.memory_mb - sample  # what the organiser says, with one sample
    return Costs(
        parameters=parameters,
        state_bytes=state,
        fixed_bytes=max(fixed, stated),
        fixed_beside_gpu_bytes=PROCESS_BYTES
        + GPU_PROCESS_BYTES
        + on_host * of_parameters
        + shuffled,
        fixed_on_gpu_bytes=max(int(KEPT_APART * (tensors + on_gpu * of_parameters)), stated),
        sample_bytes=sample,
        disk_bytes=state,
        keeper_disk_bytes=state * (definition.checkpoints.keep_last + 1),
        round_bytes=_round_bytes(definition, model),
        samples_per_round=training.batch * training.local_steps,
    )


def _round_bytes(definition: RunDefinition, model: Trainable) -> int:
    """Every peer sends what others reduce and gets it back, and reduces its share for them: with
    many equals, twice the vector each way."""
    codec = definition.averaging.codec
    total = 0.0
    for name, parameter in model.named_parameters():
        which = codec if isinstance(codec, str) else codec.get(name, "none")
        total += CODEC_BYTES[which] * parameter.numel()
    return int(2 * HEADERS * total)


def _buffer_bytes(data: DataSettings | object, model: Trainable) -> int:
    """Of the shuffle buffers of all sources, full, and of a document of each as it is read."""
    from models.data.opening import PIECE_BYTES
    from models.data.settings import DataSettings

    if not isinstance(data, DataSettings):
        return 0
    piece = data.piece_bytes or model.window or PIECE_BYTES
    examples = data.shuffle_examples * len(data.source)
    shuffled = min(data.shuffle_bytes, examples * piece) + examples * EXAMPLE_OVERHEAD_BYTES
    usual = DataSettings().largest_document_bytes  # is in what was measured of a process
    larger = max(0, data.largest_document_bytes - usual)
    return shuffled + larger * len(data.source)
