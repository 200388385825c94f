"""The examples with Trainer of Hugging Face and with Lightning: together, and as alone."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import trio
from torch import nn

from node.training import collaborate
from node.training.frameworks import FrameworkOptimizer
from protocols.accumulation.events import StepTaken
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.errors import ProtocolMisuse
from tests.processes.children import Child, started
from tests.processes.test_scripts_that_train import GIVEN_UP, LOOPBACK, address_of

EXAMPLES: Final = Path(__file__).parents[2] / "docs" / "examples"
LIBRARIES: Final = {
    "train_transformers.py": ("transformers", "accelerate"),
    "train_lightning.py": ("lightning",),
}
SHARED_STEPS: Final = 10
TRAINING_SECONDS: Final = 480.0  # some sixty on a quiet machine
STEP: Final = re.compile(r"step (\d+) model (\w+)\Z")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs, not ours


def skip_without(libraries: tuple[str, ...]) -> None:
    missing = [one for one in libraries if importlib.util.find_spec(one) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.mark.parametrize("example", LIBRARIES)
async def test_two_processes_hold_the_same_model_after_each_step(
    example: str, tmp_path: Path
) -> None:
    skip_without(LIBRARIES[example])
    told: list[dict[int, str]] = [{}, {}]
    together = trio.Event()

    def shared() -> set[int]:
        return set.intersection(*map(set, told))

    async def follow(number: int, child: Child) -> None:
        while line := (await child.read_line()).decode():
            if GIVEN_UP in line:
                told[number].clear()
            if found := STEP.match(line.rstrip()):
                told[number][int(found[1])] = found[2]
                if len(shared()) >= SHARED_STEPS:
                    together.set()

    async def run(stack: AsyncExitStack, *words: str) -> Child:
        environment = {
            "POTLUCK_HOME": str(tmp_path / str(len(words))),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, str(EXAMPLES / example), *words]
        child = started(command, environment, errors_to=subprocess.STDOUT)
        return await stack.enter_async_context(child)

    with trio.fail_after(TRAINING_SECONDS):
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            first = await run(stack)
            second = await run(stack, await address_of(first))
            nursery.start_soon(follow, 0, first)
            nursery.start_soon(follow, 1, second)
            await together.wait()
            for child in (first, second):
                child.send_signal(signal.SIGKILL)
    for step in shared():
        assert told[0][step] == told[1][step], f"step {step}"


def in_a_run(home: Path, model: nn.Module, train: Callable[[CollaborativeOptimizer], None]) -> Any:
    """Train alone in a run whose batch is one of the loop's; returns the losses of its steps."""
    with collaborate(run="test", batch=8, listen=[LOOPBACK], home=home) as bridge:
        shared = CollaborativeOptimizer(
            model.named_parameters(), lambda named: torch.optim.AdamW(named, lr=1e-2), bridge
        )
        train(shared)
        assert shared.epoch == 5
        return [event.loss for event in bridge.events if isinstance(event, StepTaken)]


def test_trainer_makes_the_steps_of_a_plain_loop(tmp_path: Path) -> None:
    skip_without(LIBRARIES["train_transformers.py"])
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.set_num_threads(1)
    ids = torch.randint(256, (80, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": one, "labels": one} for one in ids]

    def trained(make: Callable[[nn.Module, Callable[[Any], None]], None]) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=256, n_positions=16, n_embd=32, n_layer=1, n_head=2)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        model = GPT2LMHeadModel(config)
        told: list[float] = []

        class Noted(Trainer):
            def training_step(self, *words: Any, **named: Any) -> Any:
                loss = super().training_step(*words, **named)
                told.append(float(loss))
                return loss

        def run(optimizer: Any) -> None:
            arguments = TrainingArguments(
                tempfile.mkdtemp(dir=tmp_path),
                max_steps=5,
                max_grad_norm=0.0,
                lr_scheduler_type="constant",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            )
            Noted(model, arguments, train_dataset=data, optimizers=(optimizer, None)).train()

        make(model, run)
        return model, told

    def alone(model: nn.Module, run: Callable[[Any], None]) -> None:
        run(torch.optim.AdamW(model.named_parameters(), lr=1e-2))

    losses_of_run: list[float] = []

    def together(model: nn.Module, run: Callable[[Any], None]) -> None:
        losses_of_run.extend(
            in_a_run(
                tmp_path / "home", model, lambda one: run(FrameworkOptimizer(one, model=model))
            )
        )

    plain, losses = trained(alone)
    ours, same_losses = trained(together)
    assert same_losses == pytest.approx(losses, abs=1e-5)
    assert losses_of_run == pytest.approx(losses, abs=1e-5)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_lightning_makes_the_steps_of_a_plain_loop(tmp_path: Path) -> None:
    skip_without(LIBRARIES["train_lightning.py"])
    import lightning

    torch.set_num_threads(1)
    values = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))

    class Model(lightning.LightningModule):
        def __init__(self, make: Callable[[Any], Any]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.make, self.losses = nn.Linear(4, 1), make, list[float]()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self.layer(batch).square().mean()
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return self.make(self)

    def fit(model: Model) -> None:
        lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        ).fit(model, torch.utils.data.DataLoader(values, batch_size=8))

    plain = Model(lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-2))
    fit(plain)
    made: list[FrameworkOptimizer] = []
    ours = Model(lambda _: made[0])

    def train(shared: CollaborativeOptimizer) -> None:
        made.append(FrameworkOptimizer(shared, samples=8))
        fit(ours)

    losses = in_a_run(tmp_path / "home", ours, train)
    assert ours.losses == pytest.approx(plain.losses, abs=1e-6)
    assert losses == pytest.approx(plain.losses, abs=1e-6)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_the_samples_of_a_step_have_to_be_known(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    with collaborate(run="test", batch=8, listen=[LOOPBACK], home=tmp_path) as bridge:
        shared = CollaborativeOptimizer(
            model.named_parameters(), lambda named: torch.optim.SGD(named, lr=0.1), bridge
        )
        with pytest.raises(ProtocolMisuse, match="samples"):
            FrameworkOptimizer(shared)
        with pytest.raises(ProtocolMisuse, match="samples"):
            FrameworkOptimizer(shared, samples=8, model=model)


class Scaled(nn.Module):
    """Called with what it was given in place, by name, or without any tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, values: torch.Tensor | None = None, scale: Any = 1.0) -> torch.Tensor:
        return self.line(torch.ones(1, 4) if values is None else values).mean() * scale


def test_the_samples_are_those_of_the_first_tensor_wherever_it_stands(tmp_path: Path) -> None:
    model = Scaled()
    with collaborate(run="test", batch=8, listen=[LOOPBACK], home=tmp_path) as bridge:
        shared = CollaborativeOptimizer(
            model.named_parameters(), lambda named: torch.optim.SGD(named, lr=0.1), bridge
        )
        optimizer = FrameworkOptimizer(shared, model=model)
        model(torch.ones(5, 4))
        assert optimizer._samples == 5
        model(scale=torch.tensor(2.0), values=torch.ones(6, 4))
        assert optimizer._samples == 6
        with pytest.raises(ProtocolMisuse, match="without a tensor"):
            model(scale=2.0)
