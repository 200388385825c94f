"""The costs of a run for a volunteer: memory, disk, traffic. Nothing is built or measured.

    costs = costs_of(definition)
    costs.memory_bytes(samples=8)                   # of the whole process, with 8 samples at once
    costs.memory_bytes(samples=8, on_gpu=True)      # the part of it that is not in the GPU's memory
    costs.gpu_bytes(samples=8)                      # and the part that is
    costs.gpu_bytes(samples=8, offload=True)        # if the copies for averaging stay off it
    costs.state_bytes                       # a newcomer's first download
    costs.traffic(volunteers=8, samples_per_second=40.0).up_bytes_per_hour

These are estimates from shapes, within a third of the measured use of processes. The model is
built without its memory (torch's meta device). So a definition of a terabyte costs nothing to
inspect, and any machine with less memory refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from node.core.caps.memory import PROCESS_BYTES
from node.run.definition import RunDefinition

if TYPE_CHECKING:
    from models.data.settings import DataSettings
    from models.trainable import Trainable

GPU_PROCESS_BYTES = 700_000_000
"""The machine's memory that CUDA's context and libraries take on top: the process of a small model
held 1.1 GB in all beside an H100."""
COMPILER_BYTES = 280_000_000
"""The machine's memory that torch's compiler takes in the process: one that had compiled a single
layer held 180 MB more, and one with the tiny GPT 270."""
FLOAT_BYTES, HALF_BYTES = 4, 2
KEPT_APART = 1.25  # what allocators hold beyond what is requested: 1.2 to 1.35 measured
STATISTICS = {"sgd": 0, "lars": 1, "lamb": 2, "adamw": 2}  # without momentum
IN_FLIGHT = 2  # with experts: the parameters of each batch in flight, and its gradients
HEADERS = 1.02  # frames, encryption, TCP: measured on loopback
EXAMPLE_OVERHEAD_BYTES = 200  # of an example in the shuffle buffer, beside its text
TOKENIZER_BYTES_PER_ID = 850  # its library held 80 MB with 100,000 ids
TOKENIZING_BYTES = 220  # that the library takes for each byte of a document meanwhile
TALK_BYTES_PER_SECOND = 1_500  # the directory, progress and keepalives, each way
HOUR = 3600.0
MEGA = 1_000_000


@dataclass(frozen=True)
class KeptCopies:
    """What a peer keeps beyond a plain training loop, in copies of the trained parameters: on a
    processor; or with a GPU, in its memory and in the machine's. `while_averaging`: that many more
    of the machine's while parameters are averaged."""

    on_processor: float
    on_gpu: int
    beside_gpu: float
    while_averaging: int = 0


def copies_of(
    *,
    delayed: bool,
    local_steps: int,
    parameters_every: int,
    offload: bool,
    fragments: int = 1,
    is_coarse: bool = False,
    powersgd_rank: int = 0,
    statistics: int = 0,
) -> KeptCopies:
    """The table of docs/organisers.md. tests/accumulation/test_copies.py measures it.

    A round reads one flat buffer and writes another, in the machine's memory. The GPU has the
    gradients of the epoch and the average to step with. `delayed` needs a shadow and accumulates
    during a round. PowerSGD has what was not sent yet, and the decoded average in place of what a
    round writes. Local steps have the starting point and the outer momentum, and what a coarse
    codec has lost; the buffers of a round are as large as a fragment. `offload` moves the GPU's
    copies; with `delayed` the optimizer's statistics (so many copies), too.
    """
    if local_steps > 1:
        kept = 2 + 2 / fragments + (1 if is_coarse else 0)
        return KeptCopies(kept, 0, kept)
    more, rest = 2 if parameters_every else 0, 1 if powersgd_rank else 0
    if delayed:
        if offload:
            return KeptCopies(4 + rest, -statistics, 4 + statistics + rest, more)
        return KeptCopies(4 + rest, 3, 2 + rest, more)
    return KeptCopies(2 + rest, 0 if offload else 2, 2 + rest, more)


@dataclass(frozen=True)
class GpuBytes:
    """The memory that does not depend on the batch, when training on a GPU.

    - `on_gpu`: parameters, gradients, statistics, and the copies for averaging there.
    - `beside`: the machine's: the process, the buffers of a round, the shuffle buffer.
    """

    on_gpu: int
    beside: int


@dataclass(frozen=True)
class RunTraffic:
    """The traffic of one volunteer among equals."""

    step_seconds: float
    round_bytes: int
    """Sent in one round, and received in the same amount."""
    up_bytes_per_hour: int
    down_bytes_per_hour: int


@dataclass(frozen=True)
class Costs:
    parameters: int
    state_bytes: int
    """Parameters and the optimizer's statistics: what a newcomer fetches first."""
    fixed_bytes: int
    """Memory that does not depend on the batch, when training on a CPU: Python and torch,
    parameters, gradients, statistics, the collaborative optimizer's buffers, the data's shuffle
    buffer."""
    with_gpu: GpuBytes
    offloaded: GpuBytes
    sample_bytes: int
    """For each sample at once, in the memory of the device that computes it."""
    disk_bytes: int
    """A volunteer's disk: the state while it is fetched."""
    keeper_disk_bytes: int
    """The disk of a peer that keeps checkpoints: those that stay, and one that is being written.
    Epochs that `keep_every` keeps forever are not included."""
    results_bytes: int
    """The machine's memory for the last steps' results while other peers follow the run by them: as
    many as are kept, but no more than a state; 256 MiB where that is smaller."""
    round_bytes: int
    """One round, each way, among many equals; with fewer, each keeps part of it to itself."""
    samples_per_round: int
    call_up_bytes: int = 0
    """For each sample, to the experts of a run with some."""
    call_down_bytes: int = 0

    def memory_bytes(self, samples: int, *, on_gpu: bool = False, offload: bool = False) -> int:
        """The machine's memory for the whole process with this many samples at once. A GPU keeps
        its samples in its own memory, however many there are."""
        if on_gpu:
            return self._beyond_samples(offload).beside
        return self.fixed_bytes + samples * self.sample_bytes

    def gpu_bytes(self, samples: int, *, offload: bool = False) -> int:
        """The GPU's memory to compute this many samples at once."""
        return self._beyond_samples(offload).on_gpu + samples * self.sample_bytes

    def most_samples(self, memory_bytes: int) -> int:
        """How many samples a CPU can compute at once in this memory; 0 if not even one."""
        return max(0, (memory_bytes - self.fixed_bytes) // max(1, self.sample_bytes))

    def most_samples_on_gpu(self, memory_bytes: int, *, offload: bool = False) -> int:
        """The same for a GPU with so much memory of its own."""
        fixed = self._beyond_samples(offload).on_gpu
        return max(0, (memory_bytes - fixed) // max(1, self.sample_bytes))

    def _beyond_samples(self, offload: bool) -> GpuBytes:
        return self.offloaded if offload else self.with_gpu

    def traffic(self, *, volunteers: int, samples_per_second: float) -> RunTraffic:
        """With `volunteers` who compute `samples_per_second` each. A lone volunteer has nobody to
        exchange with."""
        seconds = self.samples_per_round / max(volunteers * samples_per_second, 1e-9)
        shared = int(self.round_bytes * (1.0 - 1.0 / volunteers))  # one's own share stays here
        hourly = int(shared * HOUR / seconds + TALK_BYTES_PER_SECOND * HOUR)
        samples = samples_per_second * HOUR
        return RunTraffic(
            seconds,
            shared,
            hourly + int(samples * self.call_up_bytes),
            hourly + int(samples * self.call_down_bytes),
        )


def costs_of(definition: RunDefinition, trusted: Mapping[str, Path] | None = None) -> Costs:
    """The costs of this run. Raises models' errors for an impossible model. A module's model has to
    be built to be inspected; UntrustedModule if it is not trusted."""
    from models.trainable import parameter_count
    from node.run.building import task_to_look_at
    from node.run.experts import call_bytes
    from node.run.mixtures import near_bytes
    from protocols.accumulation.state_messages import MOST_RESULTS, ROOM_OF_SMALL_BYTES

    task = task_to_look_at(definition, trusted or {})
    model, training = task.model, definition.training
    parameters = parameter_count(model)
    statistics = statistics_of(definition.optimizer)
    plain, offloaded = (
        copies_of(
            delayed=training.delayed,
            local_steps=training.local_steps,
            fragments=training.fragments,
            is_coarse=_is_coarse(definition),
            parameters_every=definition.averaging.parameters_every,
            powersgd_rank=definition.averaging.powersgd_rank,
            offload=offload,
            statistics=statistics,
        )
        for offload in (False, True)
    )
    state = FLOAT_BYTES * parameters * (1 + statistics)
    if definition.averaging.powersgd_rank:
        state += FLOAT_BYTES * _factor_values(definition, model)
    tensors = FLOAT_BYTES * parameters * (2 + statistics)  # with the gradients
    if training.precision != "float32":
        tensors += HALF_BYTES * parameters  # autocast's copy, while a batch is computed
    of_parameters = FLOAT_BYTES * parameters
    vector = _vector_bytes(definition, model) // training.fragments
    shuffled = _buffer_bytes(task.data, model)
    of_any_pass, of_a_sample = task.activation_bytes()
    sample = int(KEPT_APART * of_a_sample)
    tensors += of_any_pass + sum(one.nbytes for one in model.buffers())
    up, down = 0, 0
    if definition.experts is not None:
        in_flight = definition.experts.in_flight
        sample *= in_flight
        tensors += in_flight * IN_FLIGHT * FLOAT_BYTES * parameters
        tensors += near_bytes(definition, trusted or {})
        up, down = call_bytes(definition, trusted or {})
    process = PROCESS_BYTES + (COMPILER_BYTES if training.compile else 0)
    buffers = plain.on_processor + plain.while_averaging
    fixed = process + int(KEPT_APART * (tensors + buffers * of_parameters)) + shuffled
    stated = MEGA * definition.limits.memory_mb - sample  # the organiser's figure has one sample

    def with_gpu(copies: KeptCopies) -> GpuBytes:
        beside = int((copies.beside_gpu + copies.while_averaging) * of_parameters)
        on_gpu = int(KEPT_APART * (tensors + copies.on_gpu * of_parameters))
        return GpuBytes(max(on_gpu, stated), process + GPU_PROCESS_BYTES + shuffled + beside)

    return Costs(
        parameters=parameters,
        state_bytes=state,
        fixed_bytes=max(fixed, stated),
        with_gpu=with_gpu(plain),
        offloaded=with_gpu(offloaded),
        sample_bytes=sample,
        disk_bytes=state,
        keeper_disk_bytes=state * (definition.checkpoints.keep_last + 1),
        results_bytes=min(MOST_RESULTS * vector, max(state, ROOM_OF_SMALL_BYTES)),
        round_bytes=int(2 * HEADERS * vector),
        samples_per_round=training.step_samples,
        call_up_bytes=up,
        call_down_bytes=down,
    )


def statistics_of(optimizer: Mapping[str, object]) -> int:
    """How many tensors of its size the optimizer of this section keeps for each parameter."""
    if optimizer.get("name") == "sgd" and optimizer.get("momentum"):
        return 1
    return STATISTICS.get(str(optimizer.get("name")), 2)


def _is_coarse(definition: RunDefinition) -> bool:
    """Whether a codec is so coarse that peers with local steps keep what it has lost."""
    from protocols.tensors import CODECS

    codec = definition.averaging.codec
    names = [codec] if isinstance(codec, str) else codec.values()
    return any(CODECS[name].is_coarse for name in names)


def _vector_bytes(definition: RunDefinition, model: Trainable) -> int:
    """The size of the vector that a round averages, as it travels. A peer sends the other parts to
    their reducers and gets them back, and reduces its own part: with many equals, twice that each
    way."""
    from protocols.accumulation.powersgd import values_sent
    from protocols.tensors import CODECS

    codec, rank = definition.averaging.codec, definition.averaging.powersgd_rank
    total = 0
    for name, parameter in model.named_parameters():
        which = codec if isinstance(codec, str) else codec.get(name, "none")
        total += CODECS[which].encoded_bytes(values_sent(parameter.shape, rank))
    return total


def _factor_values(definition: RunDefinition, model: Trainable) -> int:
    """The values of PowerSGD's factors, which are part of the state."""
    from protocols.accumulation.powersgd import as_matrix

    rank = definition.averaging.powersgd_rank
    shapes = [as_matrix(one.shape, rank) for one in model.parameters()]
    return sum(rank * sum(shape) for shape in shapes if shape is not None)


def _buffer_bytes(data: DataSettings | object, model: Trainable) -> int:
    """All sources' shuffle buffers when full, one document of each as it is read, and the
    tokenizer."""
    from models.data.opening import piece_bytes_of
    from models.data.settings import DataSettings

    if not isinstance(data, DataSettings):
        return 0
    piece = piece_bytes_of(data, model.window) or data.largest_document_bytes  # whole documents
    examples = data.shuffle_examples * len(data.source)
    shuffled = min(data.shuffle_bytes, examples * piece) + examples * EXAMPLE_OVERHEAD_BYTES
    usual = DataSettings().largest_document_bytes  # included in the measured size of a process
    larger = max(0, data.largest_document_bytes - usual)
    total = shuffled + larger * len(data.source)
    if data.tokenizer is not None:
        total += model.vocabulary * TOKENIZER_BYTES_PER_ID + piece * TOKENIZING_BYTES
    return total
