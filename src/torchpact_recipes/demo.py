"""A trained network made adaptive in minutes: what ``torchpact demo`` does, short enough to copy.

The plain network is the teacher. Its adaptive copy has fresh halting heads, and learns two things at once on
a small sample of images: to give the teacher's answers, and not to pay for what it can do without. In the
end the decisions stay as they are, and the units learn to make the best of them.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchpact import map_loss, use_mode
from torchpact.files import write_whole
from torchpact.models import ResNet, ResNetConfig, build, warm_start
from torchpact_recipes.data import Images, as_input, augment
from torchpact_recipes.training import TrainConfig
from torchpact_recipes.training.checkpoint import save_checkpoint
from torchpact_recipes.training.distillation import divergence
from torchpact_recipes.training.run_files import Event, RunFiles

SOFTNESS = 2.0
"""The temperature at which answers are compared: it makes the teacher's doubts heard."""

HEAD_RATE = 0.005
"""The learning rate of halting heads, which start from nothing; the rest has that of the configuration."""

WARM_UP = 0.2
"""The share of training over which the heads' learning rate rises, while units get used to halting."""

SETTLED = 0.5
"""The share of training after which heads stay as they are and decide by threshold, as they will in use."""


def configure(tau: float, iterations: int, seed: int, teacher: ResNetConfig) -> TrainConfig:
    """What the demo trains, in the words of the trainer."""
    network = replace(teacher, adaptive=True, halting_norm=True, halting_bias=-1.0)
    return TrainConfig(
        network=network,
        method="relaxed",
        tau=tau,
        iterations=iterations,
        batch=32,
        optimizer="adam",
        lr=5e-4,
        weight_decay=0.0,
        seed=seed,
        log_every=10,
    )


def make_adaptive(plain: ResNet, config: TrainConfig) -> ResNet:
    """Return an adaptive copy of a plain network, with halting heads that see no difference yet."""
    torch.manual_seed(config.seed)
    model = warm_start(build(config.network, config.training_mode()), plain)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".halting." in name and weight.dim() > 1:
                weight.mul_(0.1)
    return model


def train(
    model: ResNet,
    teacher: ResNet,
    data: Images,
    config: TrainConfig,
    report: Callable[[Event], None] = lambda event: None,
) -> None:
    """Teach an adaptive network to answer as its teacher does, at τ a unit."""
    heads = [p for name, p in model.named_parameters() if ".halting." in name]
    others = [p for name, p in model.named_parameters() if ".halting." not in name]
    optimizer = torch.optim.Adam([{"params": heads}, {"params": others}], betas=(0.9, 0.99))
    _keep_statistics(model)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    teacher.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    started, sums = time.monotonic(), []
    for iteration, (images, labels) in enumerate(_batches(data, config)):
        share = iteration / config.iterations
        if share >= SETTLED:
            use_mode(model.eval(), "thresholded")
        for group, rate in zip(optimizer.param_groups, learning_rates(share, config.lr), strict=True):
            group["lr"] = rate
        with torch.no_grad():
            wanted, _ = teacher(images)
        logits, ponders = model(images)
        # once decisions are made, units need not make halting easier
        loss = map_loss(divergence(logits, wanted, SOFTNESS), ponders, config.tau if share < SETTLED else 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (logits.argmax(1) == labels).float().mean()
        sums.append([loss.item(), right.item(), *(p.expected_steps.mean().item() for p in ponders)])
        done = iteration + 1
        if done % config.log_every == 0 or done == config.iterations:
            loss_mean, accuracy, *steps = torch.tensor(sums).mean(0).tolist()
            sums.clear()
            seconds = time.monotonic() - started
            event: Event = {"kind": "train", "iteration": done, "seconds": seconds}
            event |= {"images_per_second": done * config.batch / seconds, "loss": loss_mean}
            report(event | {"accuracy": accuracy, "expected_steps": steps})
    model.eval()


def learning_rates(share: float, rate: float) -> tuple[float, float]:
    """Those of halting heads and of the rest, after a share of training.

    >>> learning_rates(0.1, rate=0.01), learning_rates(0.7, rate=0.01)
    ((0.0025, 0.01), (0.0, 0.006))
    """
    heads = HEAD_RATE * min(1.0, share / WARM_UP, 2 * max(0.0, 1 - share / SETTLED))
    return heads, round(rate * min(1.0, 2 * (1 - share)), 12)


def save_run(
    folder: Path,
    model: ResNet,
    config: TrainConfig,
    results: dict[str, Any],
    history: list[Event],
    about: dict[str, Any],
) -> None:
    """Leave the files of a run, for ``torchpact report``, ``maps`` and ``evaluate``."""
    files = RunFiles(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    info = {"config": config.to_dict(), "iteration": config.iterations, "results": results}
    save_checkpoint(files.last, tensors, info)
    write_whole(files.history, "".join(json.dumps(event) + "\n" for event in history).encode())
    record = {"status": "finished", **info, **about}
    write_whole(files.run, (json.dumps(record, indent=2) + "\n").encode())


def _keep_statistics(model: ResNet) -> None:
    """Let only the halting heads' batch norms learn statistics: the others took many more images to find."""
    model.eval()
    for name, module in model.named_modules():
        if ".halting." in name and isinstance(module, nn.BatchNorm2d):
            module.train()


def _batches(data: Images, config: TrainConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Images, cropped and flipped by chance, epoch after epoch."""
    torch.manual_seed(config.seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(config.iterations):
        if len(order) < config.batch:
            order = torch.cat([order, torch.randperm(len(data))])
        index, order = order[: config.batch], order[config.batch :]
        images = as_input(augment(data.images[index], pad=config.pad)).contiguous(
            memory_format=torch.channels_last
        )
        yield images, data.labels[index]
