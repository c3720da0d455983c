"""The paper's networks by name, fresh or pretrained."""

from typing import TypedDict, Unpack

from torchpact.core.modes import Mode
from torchpact.nn.resnet import ResNet, build
from torchpact.nn.resnet_config import Per, ResNetConfig
from torchpact.plugins import pretrained_weights


class Settings(TypedDict, total=False):
    """What may be set of a network whose depth is in its name; see :class:`ResNetConfig`."""

    width: int
    classes: int
    per: Per
    group: int
    halting_norm: bool
    halting_bias: float
    image_size: int


def resnet32(pretrained: str | None = None, **settings: Unpack[Settings]) -> ResNet:
    """ResNet-32: five units a block; ``settings`` are those of :class:`ResNetConfig`.

    ``pretrained`` is the name of weights in the zoo, as "plain" or in full "resnet32-plain"; such a network
    is in evaluation.

    >>> logits, ponders = resnet32(classes=100)(torch.randn(1, 3, 32, 32))
    >>> logits.shape, ponders
    (torch.Size([1, 100]), [])
    >>> model = resnet32(pretrained="plain")
    """
    return _network(ResNetConfig(units=5, adaptive=False, **settings), None, pretrained, settings)


def resnet110(pretrained: str | None = None, **settings: Unpack[Settings]) -> ResNet:
    """ResNet-110: eighteen units a block; see :func:`resnet32`.

    >>> model = resnet110(pretrained="plain")
    """
    return _network(ResNetConfig(units=18, adaptive=False, **settings), None, pretrained, settings)


def psact_resnet32(
    mode: Mode | str | None = None, pretrained: str | None = None, **settings: Unpack[Settings]
) -> ResNet:
    """ResNet-32 that decides, per pixel or per image, how many of its units to run.

    ``pretrained`` is the name of weights in the zoo, as "tau0.01", "sact-tau0.01" or in full
    "resnet32-tau0.01"; such a network is in evaluation, and in the mode it was trained in unless ``mode``
    says otherwise.

    >>> model = psact_resnet32(mode="thresholded", group=2)
    >>> logits, ponders = model(torch.randn(1, 3, 32, 32))
    >>> model.latents, sum(ponder.steps.numel() for ponder in ponders)
    (336, 336)
    >>> model = psact_resnet32(mode="thresholded", pretrained="tau0.01")
    """
    return _network(ResNetConfig(units=5, **settings), mode, pretrained, settings)


def psact_resnet110(
    mode: Mode | str | None = None, pretrained: str | None = None, **settings: Unpack[Settings]
) -> ResNet:
    """ResNet-110 that decides how many of its units to run; see :func:`psact_resnet32`.

    >>> model = psact_resnet110(mode="thresholded", pretrained="tau0.005")
    """
    return _network(ResNetConfig(units=18, **settings), mode, pretrained, settings)


def _network(
    config: ResNetConfig, mode: Mode | str | None, pretrained: str | None, settings: Settings
) -> ResNet:
    if pretrained is None:
        return build(config, mode)
    zoo = pretrained_weights()
    entries = [e for e in zoo.entries() if e.is_like(config)]
    entry = next((e for e in entries if pretrained in (e.short_name, e.name)), None)
    if entry is None:
        names = [e.short_name for e in entries]
        kind = "an adaptive" if config.adaptive else "a plain"
        raise ValueError(
            f"expected pretrained weights of {kind} ResNet-{config.layers} among "
            f"{', '.join(names) or 'none, as there are none yet'}; got {pretrained!r}"
        )
    model: ResNet = zoo.load(entry.name, mode)
    for name in settings:
        ours, theirs = getattr(config, name), getattr(model.config, name)
        if ours != theirs:
            raise ValueError(f"expected {name}={theirs!r}, as {pretrained} was trained with; got {ours!r}")
    return model
