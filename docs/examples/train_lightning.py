"""Lightning, together: train_lightning.py [ADDRESS OF A PEER …]"""

import hashlib
import logging
import sys
import sysconfig
from pathlib import Path

import lightning
import torch
from torch import nn

from node.training import collaborate
from node.training.frameworks import FrameworkOptimizer
from protocols.accumulation.optimizer import CollaborativeOptimizer

logging.basicConfig(level=logging.INFO, format="%(message)s")  # tells where others can join
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8).long()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(256, 32),
            nn.Flatten(),
            nn.Linear(8 * 32, 256),
            nn.GELU(),
            nn.Linear(256, 256),
        )

    def training_step(self, windows):
        return nn.functional.cross_entropy(self.layers(windows[:, :8]), windows[:, 8])

    def configure_optimizers(self):
        return FrameworkOptimizer(shared, samples=32)


class Told(lightning.Callback):
    def on_train_batch_end(self, trainer, model, *_):
        if shared.epoch > getattr(self, "epoch", 0):
            self.epoch = shared.epoch
            bits = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
            model_name = hashlib.sha256(bits).hexdigest()[:16]
            print(f"step {self.epoch} model {model_name}", flush=True)
        trainer.should_stop = shared.epoch >= 1000


torch.manual_seed(0)  # everybody begins with the same parameters …
model = Model()
torch.seed()  # … and goes on with samples of their own
windows = text.unfold(0, 9, 1)
batches = torch.utils.data.DataLoader(windows, batch_size=32, shuffle=True, drop_last=True)
options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": -1}
with collaborate(run="example", batch=1024, bootstrap=sys.argv[1:]) as bridge:
    shared = CollaborativeOptimizer(
        model.named_parameters(), lambda named: torch.optim.AdamW(named, lr=3e-3), bridge
    )
    lightning.Trainer(callbacks=[Told()], enable_progress_bar=False, **options).fit(model, batches)
