"""What criteria share: for what they decide, which positions are real, and read-outs of the state."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchpact.core import state
from torchpact.core.criterion import Criterion, Exit
from torchpact.core.layer_run import Per

Readout = nn.Module | Callable[[Tensor], Tensor] | str | Sequence[str]
"""Class logits of a state: a module, a function, or the names of modules of the network, called in turn."""
Pool = Literal["mean", "first"]


class StateCriterion(Criterion):
    """The base of criteria that decide for positions or for examples, of states of two to four dimensions.

    States are (batch, features), tokens (batch, length, features) or maps (batch, channels, height, width);
    of a tuple the first tensor.

    Args:
        per: "token", "pixel" or "example"; None is what the network decides for where :func:`torchpact.adapt`
            or :class:`~torchpact.use_heads` put the criterion, otherwise each position.
        settings: What the criterion can be made of again, as JSON has it; None where that is not possible.

    Raises:
        ValueError: ``per`` is something else.

    """

    def __init__(self, per: Per | None, settings: dict[str, Any] | None) -> None:
        super().__init__()
        if per not in (None, "token", "pixel", "example"):
            raise ValueError(f"expected per='token', 'pixel' or 'example', or None; got {per!r}")
        self.per: Per | None = per
        self.settings = None if settings is None else {**settings, "per": per}

    def extra_repr(self) -> str:
        """Return the settings for ``print``."""
        return "" if self.settings is None else ", ".join(f"{k}={v!r}" for k, v in self.settings.items())

    def place(self, net: nn.Module, per: Per | None, width: int) -> None:
        """See :meth:`Criterion.place`; refuses to decide for something else than the network does."""
        if self.per is not None and per is not None and self.per != per:
            raise ValueError(f"expected a criterion per {per}, as the network decides, got per={self.per!r}")
        self.per = per if self.per is None else self.per

    def shaped(self, values: Tensor, exit: Exit) -> Tensor:
        """Return one number a position, or an example, as logits of the state's dimensions."""
        u = first(exit)
        if values.dim() == 1:
            if self.per in ("token", "pixel") and u.dim() > 2:
                raise ValueError(
                    f"expected a read-out with class logits for every {self.per}, got one decision an "
                    "example: decide per='example'"
                )
            return values.view(state.per_example(u))
        return values.unsqueeze(1 if u.dim() == 4 else -1)

    def reduced(self, values: Tensor, exit: Exit) -> Tensor:
        """Return the mean over real positions of each example, if the criterion decides for examples."""
        if self.per != "example" or values.dim() == 1:
            return values
        real = real_positions(exit, values)
        flat = values.flatten(1)
        if real is None:
            return flat.mean(1)
        real = real.flatten(1)
        return torch.where(real, flat, 0.0).sum(1) / real.sum(1).clamp(min=1)


class ReadoutCriterion(StateCriterion):
    """The base of criteria that look at class logits: those of a read-out of the state.

    Args:
        readout: Maps the state to class logits: (batch, length, classes) or (batch, classes) of tokens,
            (batch, classes, height, width) or (batch, classes) of maps. Of the names of modules of the
            network, such as ``["model.norm", "lm_head"]``, none is registered, copied or saved again; nor is
            a module that has the network's own parameters. Another module is registered as one of the
            criterion. What a function encloses is neither.
        per: See :class:`StateCriterion`.
        pool: What the read-out is given: the state (None), the mean over real positions, or the first token.
        detach: Whether the read-out runs without gradients.
        settings: Those besides these.

    """

    one_row: bool = False
    """Whether states are maps of one row that read-outs take as (batch, channels, length): see ``Looped``."""

    def __init__(
        self,
        readout: Readout,
        per: Per | None,
        pool: Pool | None,
        detach: bool,
        settings: dict[str, Any],
    ) -> None:
        if pool not in (None, "mean", "first"):
            raise ValueError(f"expected pool='mean' or 'first', or None; got {pool!r}")
        names = _names(readout)
        known = None if names is None else {"readout": [*names], **settings, "pool": pool, "detach": detach}
        super().__init__(per, known)
        self.pool, self.detach = pool, detach
        self.names = names
        if isinstance(readout, nn.Module):
            self.readout: Any = readout
        else:
            self.__dict__["readout"] = readout if names is None else None

    def place(self, net: nn.Module, per: Per | None, width: int) -> None:
        """See :meth:`Criterion.place`."""
        super().place(net, per, width)
        if self.names is not None:
            self.__dict__["readout"] = _Chain(_found(net, name) for name in self.names)
        elif "readout" in self._modules:
            own, theirs = {*map(id, self.readout.parameters())}, {*map(id, net.parameters())}
            if own and own <= theirs:
                self.__dict__["readout"] = self._modules.pop("readout")

    def classes(self, exit: Exit) -> Tensor:
        """Return the class logits of an exit in fp32 or better, with the classes along the last dimension."""
        u = first(exit)
        if self.readout is None:
            raise ValueError(
                f"expected tp.adapt or tp.use_heads to find the modules {self.names}, got a criterion that "
                "neither was given"
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            if self.pool == "first":
                u = u[:, 0]
            elif self.pool == "mean":
                u = pooled(u, exit)
            found: Tensor = self.readout(u.squeeze(2) if self.one_row and u.dim() == 4 else u)
        found = found.unsqueeze(2) if self.one_row and found.dim() == 3 else found
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        found = found.movedim(1, -1) if found.dim() == 4 else found
        return torch.cat([torch.zeros_like(found), found], -1) if found.size(-1) == 1 else found


class _Chain:
    """Modules of a network, called in turn; they are not registered."""

    def __init__(self, modules: Any) -> None:
        self.modules = tuple(modules)

    def __call__(self, u: Any) -> Any:
        for module in self.modules:
            u = module(u)
        return u


def _names(readout: Any) -> tuple[str, ...] | None:
    if isinstance(readout, str):
        return (readout,)
    if isinstance(readout, Sequence) and readout and all(isinstance(each, str) for each in readout):
        return tuple(readout)
    if not callable(readout):
        raise TypeError(
            f"expected a read-out as a module, a function or names of modules, got a {type(readout).__name__}"
        )
    return None


def _found(net: nn.Module, name: str) -> nn.Module:
    try:
        return net.get_submodule(name)
    except AttributeError:
        raise ValueError(f"expected the name of a module of {type(net).__name__}, got {name!r}") from None


def first(exit: Exit) -> Tensor:
    """Return the state of an exit, or the first tensor of it."""
    return state.parts(exit.state)[0]


def real_positions(exit: Exit, values: Tensor) -> Tensor | None:
    """Return which positions count, of the shape of ``values`` (batch, …positions); None where all do."""
    if exit.weights is None:
        return None
    weights = exit.weights
    if weights.dim() > values.dim():
        weights = weights.squeeze(1 if first(exit).dim() == 4 else -1)
    return (weights > 0).expand(values.shape)


def log(x: Tensor) -> Tensor:
    """Return log x, −∞ at 0 with gradient 0 there, where that of torch.log gives NaN.

    >>> x = torch.tensor([0.0, 1.0], requires_grad=True)
    >>> log(x), torch.autograd.grad((log(x) * torch.tensor([0.0, 1.0])).nansum(), x)
    (tensor([-inf, 0.], grad_fn=<WhereBackward0>), (tensor([0., 1.]),))
    """
    positive = x > 0
    others = torch.where(x.isnan(), x, -torch.inf)
    return torch.where(positive, torch.where(positive, x, 1.0).log(), others)


def last(u: Tensor) -> Tensor:
    """Return a state with its features along the last dimension."""
    return u.movedim(1, -1) if u.dim() == 4 else u


def pooled(u: Tensor, exit: Exit) -> Tensor:
    """Return the mean of features over the real positions of each example: (batch, features)."""
    rows = last(u)
    if rows.dim() == 2:
        return rows
    real = real_positions(exit, rows[..., 0])
    flat = rows.flatten(1, -2)
    if real is None:
        return flat.mean(1)
    real = real.flatten(1).unsqueeze(2).to(u.dtype)
    return (flat * real).sum(1) / real.sum(1).clamp(min=1)
