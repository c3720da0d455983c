"""What a layer is called with and returns: its hidden state, and the arguments besides."""

from typing import Any

from torch import Tensor

from torchpact.core.call_args import CallArgs


def first_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state among the arguments of a layer: the first tensor.

    Args:
        args: Its positional arguments.
        kwargs: Its arguments by name.

    Raises:
        TypeError: There is none, or a collection of several stands before it.

    Example:
        >>> first_state((), {"attention_mask": None, "hidden_states": torch.zeros(1)})
        tensor([0.])

    """
    for given in (*args, *kwargs.values()):
        if isinstance(given, Tensor):
            return given
        if isinstance(given, tuple | list | dict) and given:
            break
    raise TypeError(
        "expected a layer that takes one hidden state first, got another: leave its run out by where="
    )


def context_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArgs:
    """Return the arguments of a layer besides its hidden state, the first tensor.

    >>> context_of((torch.zeros(1), 2), {"mask": None})
    CallArgs(args=(2,), kwargs={'mask': None})
    """
    for place, given in enumerate(args):
        if isinstance(given, Tensor):
            return CallArgs((*args[:place], *args[place + 1 :]), kwargs)
    state_name = next((name for name, given in kwargs.items() if isinstance(given, Tensor)), None)
    return CallArgs(args, {name: given for name, given in kwargs.items() if name != state_name})


def first_output(name: str, output: Any) -> Tensor:
    """Return the hidden state that a layer returned: the output, or the first of several.

    Args:
        name: The name of the layer's run.
        output: What the layer returned.

    Raises:
        TypeError: It is something else.

    Example:
        >>> first_output("layers", (torch.zeros(1), None))
        tensor([0.])

    """
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise TypeError(
            f"expected the layers of {name!r} to return a hidden state, or a tuple that begins with it; got "
            f"a {type(output).__name__}: leave this run out by where="
        )
    return first
