"""A run of layers that halts, in a network that owns the loop over them: its heads and settings.

:mod:`torchpact.core.layer_hooks` has the hooks that drive its halting loop.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from torchpact.core.criterion import BatchSecond, Criterion, Head, never_bounds
from torchpact.core.exits import Exits
from torchpact.core.halting_module import HaltingModule
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import map_state
from torchpact.core.thresholds import spelled

Per = Literal["token", "example", "pixel"]


class LayerRun(HaltingModule):
    """Layers that a network calls one after the other, each but the last with a halting head.

    It is not called: a :class:`~torchpact.core.layer_hooks.LayerHook` on every layer drives its loop. Layers
    belong to the network; only the heads are submodules here.

    Args:
        name: The name of the layers' container in the network, which its ponders carry.
        layers: The modules in the order of the calls; one that is called several times stands there as often.
        layer_names: Their names in the network.
        heads: One module for every layer but the last, or one for all, called as ``head(u)`` on the hidden
            state, or as ``head(u, weights)`` if it is a :class:`~torchpact.core.criterion.PoolingHead`; or a
            :class:`~torchpact.core.criterion.Criterion`. Of criteria that are not learned the run starts at
            the threshold *never*.
        per: For what decisions are made: tokens, pixels or examples.
        batch_dim: The dimension of the hidden state that is the batch.
        causal: Whether tokens see those before them only, as in decoders, so that a call with a cache has the
            last tokens of a sequence.
        price: What a layer costs, relative to those of other runs.
        width: The features of the hidden state, which are checked in every call; None if they are not known.
        is_map: Whether the state is a map, whose features are its channels.
        known_layout: Whether it is known that ``batch_dim`` is the batch; otherwise calls are checked.

    """

    mode: Mode | None

    def __init__(
        self,
        name: str,
        layers: Sequence[nn.Module],
        layer_names: Sequence[str],
        heads: Sequence[nn.Module],
        *,
        per: Per = "token",
        batch_dim: int = 0,
        causal: bool = False,
        price: float = 1.0,
        width: int | None = None,
        is_map: bool = False,
        known_layout: bool = True,
    ) -> None:
        super().__init__(len(layers), None, name, price)
        self.heads = nn.ModuleList(heads)
        self.bounds = never_bounds(self.heads, len(layers) - 1)
        self.per, self.batch_dim, self.causal = per, batch_dim, causal
        self.layer_names = tuple(layer_names)
        self.width, self.is_map, self.known_layout = width, is_map, known_layout
        self.__dict__["layers"] = tuple(layers)  # they are submodules of the network, not of this
        self.enabled = True

    enabled: bool
    """Whether hooks do anything; without, the network is the original."""
    _bounds: tuple[float, ...] | None
    _noted: dict[str, list[float | str]] | None

    @property
    def bounds(self) -> tuple[float, ...] | None:
        """What logits must exceed in thresholded mode, if not its threshold."""
        return self._bounds

    @bounds.setter
    def bounds(self, bounds: tuple[float, ...] | None) -> None:
        self._bounds = bounds
        self.note_thresholds(self.__dict__.get("_noted"))

    def note_thresholds(self, record: dict[str, list[float | str]] | None) -> None:
        """Note the thresholds that are set, now and whenever they change, by the name of the run.

        Args:
            record: Where; None is nowhere.

        """
        self._noted = record
        if record is None:
            return
        if self._bounds is None:
            record.pop(self.name, None)
        else:
            record[self.name] = spelled(self._bounds)

    @property
    def all_heads(self) -> nn.ModuleList:
        """Its heads."""
        return self.heads

    def put_heads(self, heads: nn.ModuleList) -> None:
        """Put other heads in their place."""
        self.heads = heads

    def place_within(self, path: str) -> tuple[str | None, str]:
        """Return the path of the adapted network, which has the run as ``torchpact.runs.0``, and the name."""
        return ".".join(path.split(".")[:-3]), self.name

    def extra_repr(self) -> str:
        """Return the settings for ``print``."""
        mode = "train(): relaxed, eval(): thresholded" if self.mode is None else f"{self.mode}"
        return f"{self.name!r}, {self.max_steps} layers, per {self.per}, mode={mode}"

    def check_state(self, u: Tensor) -> None:
        """Refuse a state that heads were not made for.

        Args:
            u: The state after the first layer.

        Raises:
            ValueError: It has other features.

        """
        if self.width is None or (u.dim() > 1 and u.size(1 if self.is_map else -1) == self.width):
            return
        kind = "channels of a map" if self.is_map else "features"
        raise ValueError(
            f"expected states of {self.width} {kind} in the layers of {self.name!r}, got a state of shape "
            f"{tuple(u.shape)}: pass example= to tp.adapt, or leave this run out by where="
        )

    def head_after(self, index: int) -> Head:
        """Return what is asked for logits after the layer at ``index``, from 0."""
        head = self.heads[index if len(self.heads) > 1 else 0]
        return BatchSecond(head) if self.batch_dim and isinstance(head, Criterion) else head

    def finished(self, ponder: Ponder, weights: Tensor | None) -> Ponder:
        """Return a ponder with what the run knows besides: weights, name and price."""
        if self.batch_dim and ponder.steps.dim() == 3:
            ponder = ponder.map(lambda x: x.transpose(x.dim() - 3, x.dim() - 2))
        exits = ponder.exits
        if exits is not None and self.batch_dim:
            turned = [map_state(lambda x: x.transpose(0, 1), each) for each in exits.states]
            exits = Exits(tuple(turned), exits.logits)
        if weights is not None:
            if self.batch_dim:
                weights = weights.transpose(0, 1)
            if self.per == "example":  # an example counts if any of its positions does
                weights = (weights > 0).flatten(1).any(1).to(weights.dtype).view(-1, 1, 1)
        probs, steps, expected, cost, log_prob, *_ = ponder
        return Ponder(probs, steps, expected, cost, log_prob, weights, self.name, self.price, exits)
