"""A network learns which byte comes next in Python's own source code, on one machine."""

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import nn

files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8).long()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, 32), nn.Flatten(), nn.Linear(8 * 32, 256), nn.GELU(), nn.Linear(256, 256)
)
optimizer = torch.optim.AdamW(model.named_parameters(), lr=3e-3)
for step in range(1, 1001):
    starts = torch.randint(len(text) - 8, (4096,))
    context = torch.stack([text[start : start + 8] for start in starts])
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(context), text[starts + 8])
    loss.backward()
    optimizer.step()
    bits = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    print(f"step {step} loss {loss:.3f} model {hashlib.sha256(bits).hexdigest()[:16]}", flush=True)
