"""Training and evaluating the autoencoder: its runs, a plain loop, and the bound on held-out images."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

import torchpact as tp
from torchpact.files import write_whole
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.vae.model import DrawingVAE

Method = Literal["fixed", "relaxed", "act"]
MODES: dict[str, tuple[str, ...]] = {
    "fixed": ("fixed",),
    "relaxed": ("discrete", "thresholded"),
    "act": ("thresholded", "act"),
}
"""In which each method is evaluated; the last is the one that it is compared in."""
VALIDATION = 10_000
"""How many of the training images, the last ones, are kept for validation."""
LOOKS = 5
"""How often a run is looked at while it is trained."""
EVALUATION_SEED = 2**31
"""Of the noise that networks are evaluated with: unlike that of any training."""
LOOKED_AT = 2000
"""How many validation images are looked at then."""


@dataclass(frozen=True)
class VaeConfig:
    """What is trained, and how."""

    method: Method = "relaxed"
    max_steps: int = 8
    """L, or the fixed number of steps."""
    tau: float = 0.0
    """The price of a step, in nats."""
    seed: int = 0
    iterations: int = 2000
    batch: int = 128
    lr: float = 2e-3
    head_lr: float = 3e-3
    clip: float = 100.0
    """The largest norm of a gradient; a larger one is made as short."""
    latents: int = 16
    width: int = 64
    encoder: int = 128
    samples: int = 2
    """How many v an image is evaluated with."""
    validation: int = VALIDATION
    task: str = "fashion-mnist"

    @property
    def modes(self) -> tuple[str, ...]:
        """In which it is evaluated."""
        return MODES[self.method]

    @property
    def log_every(self) -> int:
        """After how many iterations something is noted."""
        return max(self.iterations // LOOKS, 1)

    @property
    def validate_every(self) -> int:
        """After how many it is validated."""
        return self.log_every

    @property
    def checkpoint_every(self) -> int:
        """Weights are kept at the end: a run takes a minute."""
        return self.iterations

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, such as JSON holds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "VaeConfig":
        """Build a configuration from what :meth:`to_dict` gave."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def network(self) -> DrawingVAE:
        """Return an untrained network."""
        return DrawingVAE(
            latents=self.latents, width=self.width, encoder=self.encoder, max_steps=self.max_steps
        )


@dataclass(frozen=True)
class VaeRun:
    """A network to train; it starts from nothing."""

    config: VaeConfig

    @property
    def needs(self) -> tuple["VaeRun", ...]:
        """Nothing."""
        return ()

    @property
    def setting(self) -> str:
        """What it has in common with runs of other seeds.

        >>> VaeRun(VaeConfig("act", tau=0.5)).name, VaeRun(VaeConfig("fixed", max_steps=3)).name
        ('vae-act-tau0.5-seed0', 'vae-fixed3-seed0')
        """
        config = self.config
        what = (
            f"fixed{config.max_steps}" if config.method == "fixed" else f"{config.method}-tau{config.tau:g}"
        )
        return f"vae-{what}"

    @property
    def name(self) -> str:
        """What tells it from other runs of its scale; the folder of its files."""
        return f"{self.setting}-seed{self.config.seed}"

    @property
    def kind(self) -> VaeConfig:
        """What runs that are alike have in common."""
        return replace(self.config, tau=0.0, seed=0)


def train(run: VaeRun, archive: Archive, images: Tensor, test: Tensor) -> DrawingVAE:
    """Train a network, evaluate it on validation and test images once, and keep what came of it.

    Args:
        run: What is trained.
        archive: Takes its numbers and weights.
        images: Of training and validation, rows of booleans.
        test: Others.

    """
    config = run.config
    learn, held_out = images[: -config.validation], images[-config.validation :]
    net, history = fit(config, learn, held_out)
    modes = {
        split: {mode: evaluate(net, config, data, mode) for mode in config.modes}
        for split, data in (("validation", held_out), ("test", test))
    }
    files = archive.files(run)
    files.folder.mkdir(parents=True, exist_ok=True)
    write_whole(files.last, save(net.state_dict()))
    write_whole(files.history, "".join(f"{json.dumps(event)}\n" for event in history).encode())
    record = {"status": "finished", "config": config.to_dict(), "results": modes}
    write_whole(
        files.run, f"{json.dumps(record, indent=1)}\n".encode()
    )  # last: what says that it is finished
    archive.finish(run)
    return net


def fit(config: VaeConfig, images: Tensor, held_out: Tensor) -> tuple[DrawingVAE, list[dict[str, Any]]]:
    """Train a network; return it, and what was seen on the way.

    Raises:
        ValueError: The loss is not finite any more.

    """
    torch.manual_seed(config.seed)
    net = config.network()
    heads = [*net.decoder.halting.parameters()]
    others = [p for name, p in net.named_parameters() if not name.startswith("decoder.halting.")]
    optimizer = torch.optim.Adam(
        [{"params": others, "lr": config.lr}, {"params": heads, "lr": config.head_lr}]
    )
    # constant, and in the second half linearly to nothing
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, 2 * (1 - i / config.iterations))
    )
    history: list[dict[str, Any]] = []
    losses, norms = [], []
    for iteration, x in enumerate(_batches(images, config), start=1):
        noise = torch.randn(len(x), config.latents)
        if config.method == "fixed":
            loss = -net(x, noise, steps=config.max_steps).elbo.mean()
        else:
            elbo, _, ponder = net(x, noise, mode=config.method)
            assert ponder is not None
            loss = tp.map_loss(-elbo, ponder, config.tau)
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), config.clip).item())
        losses.append(loss.item())
        if not losses[-1] < float("inf"):
            raise ValueError(f"expected a finite loss, got {losses[-1]} in iteration {iteration}")
        optimizer.step()
        schedule.step()
        if iteration % config.validate_every == 0:
            few, mode = held_out[:LOOKED_AT], config.modes[-1]
            look = evaluate(net, replace(config, samples=1), few, mode)
            history.append(
                {
                    "kind": "validate",
                    "iteration": iteration,
                    "loss": sum(losses) / len(losses),
                    "gradient_norm": {"median": sorted(norms)[len(norms) // 2], "max": max(norms)},
                    "modes": {mode: {"elbo": look["elbo"], "steps": look["steps"]}},
                }
            )
            losses, norms = [], []
    return net, history


def _batches(images: Tensor, config: VaeConfig) -> Iterator[Tensor]:
    """Yield batches for all iterations: every image once, in random order, and again."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(config.iterations):
        if len(order) < config.batch:
            order = torch.randperm(len(images))
        yield images[order[: config.batch]].float()
        order = order[config.batch :]


@torch.no_grad()
def evaluate(net: DrawingVAE, config: VaeConfig, images: Tensor, mode: str) -> dict[str, Any]:
    """Return the mean bound in nats, KL and steps, with the same v for all networks of equal q.

    Returns:
        ``elbo``, its standard error over images ``error``, ``kl``, ``steps``, and ``share``, the share of
        images (and draws) that took 1, 2, … L steps.

    """
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    # decisions are drawn by another, so that v is the same in all modes
    drawn: Any = tp.Discrete(torch.Generator().manual_seed(0)) if mode == "discrete" else mode
    chosen = config.max_steps if mode == "fixed" else None
    bounds, kl, counts = [], 0.0, torch.zeros(config.max_steps)
    for part in images.split(1000):
        x, total = part.float(), torch.zeros(len(part))
        for _ in range(config.samples):
            noise = torch.randn(len(x), config.latents, generator=generator)
            found = net(x, noise, mode=None if mode == "fixed" else drawn, steps=chosen)
            total += found.elbo
            kl += float(found.kl.sum())
            taken = torch.full((len(x),), config.max_steps) if found.ponder is None else found.ponder.steps
            counts += torch.bincount(taken.flatten(), minlength=config.max_steps + 1)[1:]
        bounds.append(total / config.samples)
    each, share = torch.cat(bounds), counts / counts.sum()
    return {
        "elbo": each.mean().item(),
        "error": (each.std() / len(each) ** 0.5).item(),
        "kl": kl / (len(images) * config.samples),
        "steps": float((share * torch.arange(1, config.max_steps + 1)).sum()),
        "share": share.tolist(),
    }


def load(run: VaeRun, archive: Archive) -> DrawingVAE:
    """Return the network of a finished run.

    Raises:
        ValueError: Its weights are not kept any more.

    """
    path = archive.weights(run)
    if path is None:
        raise ValueError(f"expected the weights of {run.name} in {archive.work}, got none")
    net = run.config.network()
    net.load_state_dict(load_file(path))
    return net
