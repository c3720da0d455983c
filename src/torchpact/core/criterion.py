"""Halting criteria: heads that see more of an exit than its state, and may remember what they saw before."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.core.call_args import CallArgs
from torchpact.core.state import State

Memory = Tensor | tuple["Memory", ...] | None
"""What a criterion keeps from one exit to the next: tensors whose first dimension is the batch."""

_NOTHING = CallArgs()
_PRECISIONS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Exit(NamedTuple):
    """An exit of a run, as a :class:`Criterion` sees it."""

    state: State
    """The state to go on with; the batch is its first dimension."""
    before: State
    """The state before the step; before the first it may have another shape."""
    index: int  # type: ignore[assignment]
    """The number of the step, from 0; None where examples have taken different numbers, as in a stream."""
    weights: Tensor | None = None
    """How much each position counts, of a shape that broadcasts to the state; None where all do."""
    memory: Memory = None
    """What the criterion kept at the exit before; None at the first."""
    context: CallArgs = _NOTHING
    """What the step was given besides the state; nothing unless the criterion has ``needs_context``."""


class Criterion(nn.Module):
    """The base of halting heads that see an :class:`Exit` rather than the state alone.

    ``forward(exit)`` returns halting logits, as any head does: they have as many dimensions as the state and
    broadcast to it. To keep something until the next exit it returns ``(logits, memory)``, a tensor or a
    tuple of tensors whose first dimension is the batch; it finds them as ``exit.memory``. It holds no state
    of a run itself, so that one criterion may serve all exits, threads, and recomputations.

    Logits are on a scale on which a threshold means something: that of a probability where there is one.

    Example:
        >>> class Settled(Criterion):
        ...     "Halts examples whose state has changed by less than 0.1 in two steps in a row."
        ...     learned = False
        ...     def forward(self, exit):
        ...         small = (exit.state - exit.before).abs().amax(1, keepdim=True) < 0.1
        ...         twice = small & exit.memory if exit.memory is not None else small & False
        ...         return torch.where(twice, 1.0, -1.0), small
        >>> block = tp.AdaptiveBlock(lambda u: u / 2, Settled(), max_steps=8, mode="thresholded")
        >>> u = torch.tensor([[0.1], [1.0]])
        >>> block(u)[1].steps.flatten(), block(u, thresholds=0.5)[1].steps.flatten()
        (tensor([8, 8]), tensor([2, 5]))

    """

    learned: bool = True
    """Whether it is trained. A run whose criteria are not starts at the threshold *never*."""
    needs_context: bool = False
    """Whether it looks at ``exit.context``, which not all engines can hand out."""
    settings: dict[str, Any] | None = None
    """What a ready-made criterion can be made of again; None where that is not known."""

    def place(self, net: nn.Module, per: Any, width: int) -> None:
        """Prepare to be a head of a network; called once, by :func:`torchpact.adapt` and ``use_heads``.

        Args:
            net: The network.
            per: For what its layers decide: "token", "pixel" or "example"; None where that is not known.
            width: The features of the state; 0 where that is not known.

        """


def placed(
    net: nn.Module, heads: Any, layers: Sequence[nn.Module], per: Any = None, width: int = 0
) -> list[nn.Module]:
    """Return the heads of layers, made as a user wants them.

    Args:
        net: The network of the layers.
        heads: A criterion, of which each layer gets a copy if it is learned or has parameters of its own,
            and all share one otherwise; another module, which all share; a list of modules, one a layer or
            one for all; or a factory, called with each layer and the width of its state.
        layers: Those with a head each.
        per: For what they decide.
        width: The features of the state.

    Raises:
        TypeError: A factory returns no module, or there is none where the width is not known.
        ValueError: There are not as many heads as layers.

    """
    own = {id(x): x for x in (*net.modules(), *net.parameters(), *net.buffers())}
    made: list[nn.Module]
    if isinstance(heads, Criterion):
        mine = heads.learned or any(id(each) not in own for each in heads.parameters())
        # what belongs to the network is not copied
        made = [copy.deepcopy(heads, {**own}) for _ in (layers if mine else layers[:1])]
    elif isinstance(heads, nn.ModuleList | list | tuple):
        made = [*heads]
    elif isinstance(heads, nn.Module):
        made = [heads]
    elif width:
        made = [heads(layer, width) for layer in layers]
    else:
        raise TypeError(
            "expected a criterion or modules as heads of a block, whose width is not known; got a "
            f"{type(heads).__name__}"
        )
    for head in made:
        if not isinstance(head, nn.Module):
            raise TypeError(
                f"expected heads to be modules, or to return a module, got a {type(head).__name__}"
            )
    if len(made) not in (1, len(layers)):
        raise ValueError(f"expected {len(layers)} heads, or one for all, got {len(made)}")
    for head, layer in zip(made, layers, strict=False):
        if isinstance(head, Criterion):
            head.place(net, per, width)
        move_to_layer(head, layer)
    return made


def move_to_layer(head: nn.Module, layer: nn.Module) -> None:
    """Move a head, in place, to the device and the precision of a layer, if that has floating-point weights.

    Args:
        head: The head.
        layer: The layer that it stands after. Precisions that heads cannot compute in are left out.

    """
    like = next((p for p in layer.parameters() if p.is_floating_point()), None)
    if like is not None:
        head.to(device=like.device, dtype=like.dtype if like.dtype in _PRECISIONS else None)


class PoolingHead(nn.Module):
    """The base of heads that look at a whole example: called as ``head(u, weights)`` rather than ``head(u)``.

    Weights say how much each position counts, so that a mean can leave padding out; None where all do.
    """


@dataclass(frozen=True)
class BatchSecond:
    """A criterion on states (positions, batch, features): it sees the batch first, as all criteria do."""

    criterion: Criterion

    def __call__(self, exit: Exit) -> tuple[Tensor, Memory]:
        """Return logits of the state's layout, and the memory."""
        turned = exit._replace(
            state=_swapped(exit.state), before=_swapped(exit.before), weights=_swapped(exit.weights)
        )
        logits, memory = asked(self.criterion, turned)
        return _swapped(logits), memory


Head = Callable[[State], Tensor] | Criterion | BatchSecond


def asked(head: Callable[..., Any], exit: Exit) -> tuple[Tensor, Memory]:
    """Ask a head of any kind about an exit.

    Args:
        head: A :class:`Criterion`, called with the exit; a :class:`PoolingHead`, called with the state and
            the weights; or a callable of the state.
        exit: What is known of the exit.

    Returns:
        The halting logits, and the memory for the next exit; heads that are no criteria leave it as it is.

    """
    if isinstance(head, BatchSecond):
        return head(exit)
    if isinstance(head, Criterion):
        found = head(exit if head.needs_context else exit._replace(context=_NOTHING))
        return found if isinstance(found, tuple) else (found, None)
    if isinstance(head, PoolingHead):
        return head(exit.state, exit.weights), exit.memory
    return head(exit.state), exit.memory


def map_memory(function: Callable[..., Tensor], memory: Memory, *others: Memory) -> Memory:
    """Return a memory with each of its tensors changed by a function, which gets those of others besides.

    >>> map_memory(len, (torch.zeros(2), (None, torch.zeros(3))))
    (2, (None, 3))
    """
    if memory is None or isinstance(memory, Tensor):
        return None if memory is None else function(memory, *others)
    inner = [part for part in others if isinstance(part, tuple)]
    return tuple([map_memory(function, part, *each) for part, *each in zip(memory, *inner, strict=True)])


def never_bounds(heads: nn.ModuleList, decisions: int) -> tuple[float, ...] | None:
    """Return the threshold *never* for the decisions of criteria that are not learned; None for other heads.

    Args:
        heads: The heads of a block.
        decisions: How many decisions they take.

    """
    unlearned = [isinstance(head, Criterion) and not head.learned for head in heads]
    return (float("inf"),) * decisions if unlearned and all(unlearned) else None


def _swapped(x: Any) -> Any:
    return x.transpose(0, 1) if isinstance(x, Tensor) and x.dim() == 3 else x
