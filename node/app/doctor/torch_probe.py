"""A process of its own that loads torch, computes something on each GPU, and prints what it saw.

    python -m node.app.doctor.torch_probe        # one JSON object

Loading torch takes seconds, and a build that does not suit the processor or the driver ends the
process. `potluck doctor` must survive that. It begins the process before all else, with
`loading_torch`, because no other check takes as much of the processor.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def loading_torch() -> Iterator[subprocess.Popen[bytes]]:
    """The process, which this block ends if it has not ended by itself."""
    command = [sys.executable, "-m", "node.app.doctor.torch_probe"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def seen() -> dict[str, Any]:
    """The fields of `TorchFacts` that torch knows."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of its own is missing
        return {"missing": str(error)}
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "mps": torch.backends.mps.is_available(),
        "devices": [],
        "trouble": "",
    }
    if torch.version.cuda is None and torch.version.hip is None:
        return facts
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for number in range(torch.cuda.device_count()):
            torch.ones(8, device=f"cuda:{number}").sum().item()
            facts["devices"].append(torch.cuda.get_device_name(number))
    except (RuntimeError, AssertionError) as error:
        facts["trouble"] = str(error).strip().split("\n")[0]
    return facts


if __name__ == "__main__":
    print(json.dumps(seen()), flush=True)
