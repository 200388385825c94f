"""One rank of a machine that is one peer: ranks_peer.py STEPS SILENCE_SECONDS HOW.

HOW: it may "go", has to "wait" for somebody else to begin the run, brings "uneven" batches, or
makes "delayed" or "local" steps.

Prints a JSON object for each step: its number and the model's digest, and at the end
the digest of all that it held after each call and, at rank 0, the samples.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn

from models.uncompiled import SGD
from node.training import collaborate
from protocols.accumulation.events import StepTaken
from protocols.accumulation.ranks import RankedOptimizer
from protocols.errors import PotluckError

SAMPLES = 8


def tell(**said: object) -> None:
    print(json.dumps(said), flush=True)


def main() -> None:
    steps, silence_seconds = int(sys.argv[1]), float(sys.argv[2])
    waits, uneven = sys.argv[3] == "wait", sys.argv[3] == "uneven"
    options = {"delayed": {"delayed": True}, "local": {"local_steps": 2}}.get(sys.argv[3], {})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    torch.manual_seed(rank)
    parallel = nn.parallel.DistributedDataParallel(model)
    peer = None
    if rank == 0:
        peer = collaborate(
            run="ranks",
            batch=64,
            listen=["/ip4/127.0.0.1/tcp/0"],
            begins=not waits,
            grace_seconds=0.5,
        )
    with peer or nullcontext() as bridge:
        tell(ready=rank)
        with RankedOptimizer(
            model.named_parameters(),
            lambda named: SGD(named, lr=0.1),
            bridge,
            silence_seconds=silence_seconds,
            **options,
        ) as optimizer:
            passes, held, told = 0, sha256(), 0
            while optimizer.epoch < steps:
                optimizer.zero_grad()
                loss = parallel(torch.randn(SAMPLES, 4)).square().mean()
                loss.backward()
                passes += 1
                has_moved = optimizer.step(samples=SAMPLES + (rank if uneven else 0), loss=loss)
                bits = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
                held.update(bits)
                if has_moved:
                    told = optimizer.epoch
                    tell(step=told, model=sha256(bits).hexdigest())
            optimizer.finish()
            bits = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
            held.update(bits)
            if told < optimizer.epoch:  # delayed: the last step was made after the last call
                tell(step=optimizer.epoch, model=sha256(bits).hexdigest())
            tell(held=held.hexdigest())
            if bridge is not None and optimizer.first is not None:
                taken = [one for one in bridge.events if isinstance(one, StepTaken)]
                counted = sum(one.own_samples for one in taken) + optimizer.first.waiting_samples
                tell(passes=passes, counted=counted)


try:
    main()
    dist.destroy_process_group()
except PotluckError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(3)
