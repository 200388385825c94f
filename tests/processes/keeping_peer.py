"""A script that trains with others, or keeps their checkpoints: started by test_kept_runs.py.

    python -m tests.processes.keeping_peer HOME [--keeps FOLDER] [--every SECS] [--assists] [PEER]

It learns to imitate a small fixed network, and prints a line of JSON for each epoch that it comes
to (`epoch`, `loss` on samples that all peers have) and for each event of the keeper.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import nn

from models.uncompiled import AdamW
from node.run.checkpoint_keeper import CheckpointSettings
from node.run.checkpoints import KeepPolicy
from node.training.guest import collaborate
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.events import CheckpointMissed, CheckpointSaved
from protocols.accumulation.optimizer import CollaborativeOptimizer

RUN: Final = "kept"
TARGET_BATCH: Final = 160
BATCH: Final = 8
BATCH_SECONDS: Final = 0.04  # a peer's speed: two of them take 0.4 s for an epoch
GRACE_SECONDS: Final = 3.0  # in place of ten: killed peers are waited for in each test
LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("home")
    parser.add_argument("--keeps")
    parser.add_argument("--every", type=float, default=0.0)
    parser.add_argument("--assists", action="store_true")
    parser.add_argument("addresses", nargs="*")
    arguments = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    kept = None
    if arguments.keeps:
        policy = KeepPolicy(keep_last=2)
        folder, every_seconds = Path(arguments.keeps), arguments.every
        kept = CheckpointSettings(folder, every_seconds=every_seconds, policy=policy)
    with collaborate(
        run=RUN,
        batch=TARGET_BATCH,
        bootstrap=arguments.addresses,
        listen=[LOOPBACK],
        home=arguments.home,
        checkpoints=kept,
        begins=kept is not None,
        grace_seconds=GRACE_SECONDS,
    ) as bridge:
        train(bridge, assists=arguments.assists)


def train(bridge: Bridge, *, assists: bool) -> None:
    torch.manual_seed(0)
    teacher, model = network(), network()
    held_out = torch.randn(512, 16)
    torch.seed()
    optimizer = CollaborativeOptimizer(
        model.named_parameters(), partial(AdamW, lr=3e-3), bridge, auxiliary=assists
    )
    events = 0
    said = -1
    while True:
        if optimizer.epoch != said:
            said = optimizer.epoch
            with torch.no_grad():
                loss = float(nn.functional.mse_loss(model(held_out), teacher(held_out)))
            say(epoch=said, loss=loss)
        for event in tuple(bridge.events)[events:]:
            events += 1
            if isinstance(event, CheckpointSaved | CheckpointMissed):
                say(**msgspec.to_builtins(event))
        if assists:
            optimizer.assist(epochs=1)
            continue
        time.sleep(BATCH_SECONDS)
        samples = torch.randn(BATCH, 16)
        optimizer.zero_grad()
        loss_here = nn.functional.mse_loss(model(samples), teacher(samples).detach())
        loss_here.backward()
        optimizer.step(samples=BATCH, loss=loss_here)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")  # at once, or a line of the log comes in between
    sys.stdout.flush()


if __name__ == "__main__":
    main()
