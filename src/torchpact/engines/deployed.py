"""What deploy returns: a network that runs block by block or as a whole, or a block; neither changes."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.core.ponder import Ponder, is_unknown, unknown, without_details
from torchpact.engines.block_spec import FoldedBlock, Runner, Unsupported, fold_norm
from torchpact.engines.graphs import MOST_SIZES, Outputs
from torchpact.engines.report import Report
from torchpact.nn.resnet import ResNet
from torchpact.nn.resnet_config import check_group


class BlockByBlock:
    """A network run by one engine for each block; of blocks without ``details`` only decisions are kept."""

    direct = False  # there are many kernels to start

    def __init__(self, net: ResNet, runners: Sequence[Runner], details: Sequence[bool]) -> None:
        self.runners, self.details = list(runners), list(details)
        self._stem_weight = net.stem.weight.detach().to(memory_format=torch.channels_last, copy=True)
        self._norm = [x[:, None, None].to(net.stem.weight.dtype) for x in fold_norm(net.norm)]
        self._classifier = [x.detach().clone() for x in (net.classifier.weight, net.classifier.bias)]

    @property
    def waits(self) -> bool:
        """Whether any block looks at what the device has found, which no CUDA graph can do."""
        return any(getattr(run, "waits", False) for run in self.runners)

    def __call__(self, images: Tensor) -> Outputs:
        """Return the logits of the classes, and what each adaptive block did."""
        u = self.stem(images)
        ponders, excess = [], []
        for run, details in zip(self.runners, self.details, strict=True):
            u, ponder = run(u)
            if ponder is not None:
                excess.append(not details and not is_unknown(ponder.probs))
                ponders.append(ponder)
        scale, shift = self._norm
        pooled = torch.addcmul(shift, u, scale).relu_().mean((2, 3))
        logits = F.linear(pooled, *self._classifier)
        if any(excess):
            nan = unknown(logits.device)
            ponders = [without_details(p, nan) if x else p for p, x in zip(ponders, excess, strict=True)]
        return logits, ponders

    def stem(self, images: Tensor) -> Tensor:
        """Return what the first block is given."""
        return F.conv2d(images.contiguous(memory_format=torch.channels_last), self._stem_weight, padding=1)


class Whole:
    """A network run by one engine, and block by block where images have a size that it does not know."""

    def __init__(self, network: Callable[[Tensor], Outputs], in_turn: BlockByBlock) -> None:
        self.network = network
        self.in_turn: Callable[[Tensor], Outputs] = in_turn
        self.direct: bool = getattr(network, "direct", False)
        """Whether it starts so little that a CUDA graph would gain nothing."""
        self.waits: bool = getattr(network, "waits", False) or in_turn.waits
        """Whether it looks at what the device has found, which no CUDA graph can do."""

    def __call__(self, images: Tensor) -> Outputs:
        """Return the logits of the classes, and what each adaptive block did."""
        try:
            return self.network(images)
        except Unsupported:
            return self.in_turn(images)


class OneBlock:
    """A block run by one engine, as if it were a network; without ``details`` only decisions are kept."""

    direct = False

    def __init__(self, run: Runner, details: bool) -> None:
        self.run, self.details = run, details
        self.waits: bool = getattr(run, "waits", False)

    def __call__(self, u: Tensor) -> Outputs:
        """Return the output, and what the block did."""
        output, ponder = self.run(u.contiguous(memory_format=torch.channels_last))
        assert ponder is not None  # there are heads
        brief = not self.details and not is_unknown(ponder.probs)
        return output, [without_details(ponder) if brief else ponder]


def _not_saved(kind: str) -> str:
    return (
        f"a deployed {kind} can be neither copied nor saved: threads may share it, and elsewhere the model "
        "is deployed again"
    )


class Fixed(nn.Module):
    """What runs without gradients on one device, in one precision, and stays as it is."""

    takes, kind = "images", "network"
    _deployed, _countable = True, False
    network: Any

    def __init__(self, network: Callable[..., Any], like: Tensor) -> None:
        super().__init__()
        self.report = Report(0, [])
        self.__dict__["network"] = network  # even a module: it has no children, and nobody may change it
        self.dtype, self.device = like.dtype, like.device
        self._fitting: set[torch.Size] = set()  # that came before
        self.eval()  # as it runs, whatever the model is in

    def explain(self) -> str:
        """Return a table of what runs each block, and how fast it was on the example, for ``print``."""
        return str(self.report)

    def check(self, x: Tensor) -> None:
        """Refuse what does not have the right shape, precision and device."""
        if x.shape in self._fitting and x.dtype == self.dtype and x.device == self.device:
            return
        self._check_shape(x)
        if x.dtype != self.dtype or x.device != self.device:
            raise ValueError(
                f"expected {self.takes} of {self.dtype} on {self.device}, as the {self.kind} was when "
                f"deployed; got {x.dtype} on {x.device}"
            )
        if len(self._fitting) >= MOST_SIZES:
            self._fitting.clear()
        self._fitting.add(x.shape)

    def _check_shape(self, x: Tensor) -> None:
        """Refuse what does not have the right shape."""

    def _called(self, x: Tensor) -> Any:
        self.check(x)
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):  # where Triton starts kernels
                return self._run(x)
        return self._run(x)

    def _run(self, *inputs: Any, **options: Any) -> Any:
        # to enter and leave what need not be changed would take a good part of a small network's time
        grad, cast = torch.is_grad_enabled(), torch.is_autocast_enabled(self.device.type)
        if not (grad or cast):
            return self.network(*inputs, **options)
        with torch.no_grad():
            if not cast:
                return self.network(*inputs, **options)
            with torch.autocast(self.device.type, enabled=False):  # its precision is what it was measured in
                return self.network(*inputs, **options)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(_not_saved(self.kind))

    def state_dict(self, *_args: Any, **_options: Any) -> NoReturn:
        """Refuse: there is nothing to save, and who does would find it empty."""
        raise TypeError(_not_saved(self.kind))

    def load_state_dict(self, *_args: Any, **_options: Any) -> NoReturn:
        """Refuse likewise."""
        raise TypeError(_not_saved(self.kind))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Fixed":
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if (probe.dtype, probe.device) == (self.dtype, self.device):
            return self  # nothing would change
        raise RuntimeError(
            f"a deployed {self.kind} stays what it was measured as: move or cast the model and deploy again"
        )


class Deployed(Fixed):
    """A network made by :func:`deploy`; called like the one it was made of, by several threads if need be."""

    def __init__(self, net: ResNet, network: Callable[[Tensor], Outputs]) -> None:
        super().__init__(network, net.stem.weight)
        self.config = net.config

    def forward(self, images: Tensor) -> Outputs:
        """Return the logits of the classes, and what each adaptive block did; without gradients."""
        outputs: Outputs = self._called(images)
        return outputs

    def _check_shape(self, x: Tensor) -> None:
        if x.dim() != 4 or x.size(1) != 3:
            raise ValueError(f"expected images of shape (batch, 3, height, width), got {tuple(x.shape)}")
        check_group(self.config.group if self.config.adaptive else 1, *x.shape[2:])


class DeployedBlock(Fixed):
    """A block made by :func:`deploy`, likewise; in the network around it, it takes the block's place."""

    takes, kind = "maps", "block"

    def __init__(self, block: FoldedBlock, network: OneBlock) -> None:
        super().__init__(network, block.weight)
        self.inputs = block.weight.size(1)

    def forward(self, u: Tensor) -> tuple[Tensor, Ponder]:
        """Return the output, channels last, and what the block did; without gradients."""
        if u.requires_grad and torch.is_grad_enabled():
            warnings.warn(
                "expected maps that need no gradients, which end at a deployed block: call it within "
                "torch.no_grad(), and train the block that it was made of",
                stacklevel=4,
            )
        output, (ponder,) = self._called(u)
        return output, ponder

    def extra_repr(self) -> str:
        """Return what runs it for ``print``."""
        rows = [f"{each.engine}, maps of {each.output}" for each in self.report.measurements]
        return f"{self.inputs} channels, {', '.join(rows)}"

    def _check_shape(self, x: Tensor) -> None:
        if x.dim() != 4 or x.size(1) != self.inputs:
            raise ValueError(
                f"expected maps of shape (batch, {self.inputs}, height, width), got {tuple(x.shape)}"
            )
