"""Several GPUs as one peer: torchrun --nproc-per-node 2 train_ranks.py [ADDRESS OF A PEER …]"""

import hashlib
import logging
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from node.training import collaborate
from protocols.accumulation.ranks import RankedOptimizer

logging.basicConfig(level=logging.INFO, format="%(message)s")  # tells where others can join
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8).long()

dist.init_process_group("gloo")  # nccl, and a device for each rank, where there are GPUs
rank = dist.get_rank()
torch.manual_seed(0)  # everybody begins with the same parameters …
model = nn.Sequential(
    nn.Embedding(256, 32), nn.Flatten(), nn.Linear(8 * 32, 256), nn.GELU(), nn.Linear(256, 256)
)
torch.seed()  # … and every rank goes on with samples of its own
parallel = nn.parallel.DistributedDataParallel(model)
peer = collaborate(run="example", batch=4096, bootstrap=sys.argv[1:]) if rank == 0 else None
with (
    peer or nullcontext() as bridge,
    RankedOptimizer(
        model.named_parameters(), lambda named: torch.optim.AdamW(named, lr=3e-3), bridge
    ) as optimizer,
):
    while optimizer.epoch < 1000:
        starts = torch.randint(len(text) - 8, (32,))
        context = torch.stack([text[start : start + 8] for start in starts])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(context), text[starts + 8])
        loss.backward()
        if optimizer.step(samples=32, loss=loss):
            bits = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
            model_name = hashlib.sha256(bits).hexdigest()[:16]
            print(f"step {optimizer.epoch} loss {loss:.3f} model {model_name}", flush=True)
dist.destroy_process_group()
