"""Trainer of Hugging Face, together: train_transformers.py [ADDRESS OF A PEER …]"""

import hashlib
import logging
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from node.training import collaborate
from node.training.frameworks import FrameworkOptimizer
from protocols.accumulation.optimizer import CollaborativeOptimizer

logging.basicConfig(level=logging.INFO, format="%(message)s")  # tells where others can join
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8).long()
data = [{"input_ids": one, "labels": one} for one in text[: len(text) // 64 * 64].view(-1, 64)]


class Told(TrainerCallback):
    def on_step_end(self, _args, _state, control, **_):
        if optimizer.epoch > getattr(self, "epoch", 0):
            self.epoch = optimizer.epoch
            bits = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
            model_name = hashlib.sha256(bits).hexdigest()[:16]
            print(f"step {self.epoch} model {model_name}", flush=True)
        control.should_training_stop = optimizer.epoch >= 1000


torch.manual_seed(0)  # everybody begins with the same parameters …
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2))
orders = torch.seed() % 2**32  # … and goes on with an order of their own; nobody clips alone
options = {"max_steps": 10**9, "max_grad_norm": 0.0, "data_seed": orders, "report_to": "none"}
arguments = TrainingArguments(tempfile.mkdtemp(), save_strategy="no", disable_tqdm=True, **options)
with collaborate(run="example", batch=64, bootstrap=sys.argv[1:]) as bridge:
    shared = CollaborativeOptimizer(
        model.named_parameters(), lambda named: torch.optim.AdamW(named, lr=3e-3), bridge
    )
    optimizer = FrameworkOptimizer(shared, model=model)
    Trainer(
        model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[Told()]
    ).train()
