"""The network within what users hold: a module itself, a pipeline, or an object with a model in it."""

from typing import Any

from torch import nn


def inner_network(holder: Any) -> nn.Module:
    """Return the network in an object: itself, what torch.compile or peft was given, or its ``model``.

    Args:
        holder: A module; a SentenceTransformer, whose first module holds the network as ``auto_model``; a
            network with adapters of peft; or an object with a module in its attribute ``model``, such as a
            pipeline.

    Raises:
        TypeError: There is none.

    Example:
        >>> class Pipeline:
        ...     model = nn.Sequential(nn.Tanh())
        >>> inner_network(Pipeline())
        Sequential(
          (0): Tanh()
        )

    """
    if isinstance(holder, nn.Module):
        inner = getattr(holder, "_orig_mod", holder)
        if isinstance(holder, nn.Sequential) and len(holder):
            inner = getattr(holder[0], "auto_model", holder)
        elif has_adapters_around(holder):
            inner = holder.get_base_model()  # type: ignore[operator]
        return inner_network(inner) if isinstance(inner, nn.Module) and inner is not holder else holder
    model = getattr(holder, "model", None)
    if isinstance(model, nn.Module):
        return inner_network(model)
    raise TypeError(f"expected a network, or an object with one as its model, got a {type(holder).__name__}")


def has_adapters_around(net: Any) -> bool:
    """Return whether a network is one that peft wraps.

    Args:
        net: Any network.

    Example:
        >>> has_adapters_around(nn.Tanh())
        False

    """
    return hasattr(net, "get_base_model") and hasattr(net, "peft_config")


def holders_of(root: nn.Module, holder: Any) -> list[nn.Module]:
    """Return the modules of a SentenceTransformer around its network, whose ``forward`` they call directly.

    Args:
        root: The network within, as :func:`inner_network` returned it.
        holder: What it was found in.

    Example:
        >>> net = nn.Tanh()
        >>> holders_of(net, net)
        []

    """
    if not isinstance(holder, nn.Sequential) or holder is root:
        return []
    return [module for module in holder.modules() if module is not root and root in [*module.modules()]]
