"""Blocks that users gave a name of their own, in ponders that are looked up by the place of their block."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torchpact.core.halting_module import HaltingModule


@contextmanager
def named_by_place(blocks: Mapping[str, HaltingModule]) -> Iterator[None]:
    """Name the ponders of blocks as :func:`~torchpact.core.halting_module.halting_modules` does, within.

    Otherwise they have the name that a user gave to the block, ``tp.AdaptiveBlock(…, name="mine")``.

    Args:
        blocks: The blocks of a network by name.

    """
    before = [block.name for block in blocks.values()]
    for name, block in _of_own_name(blocks).items():
        block.name = name
    try:
        yield
    finally:
        for block, name in zip(blocks.values(), before, strict=True):
            if block.name != name:
                block.name = name


def places_of(blocks: Mapping[str, HaltingModule]) -> dict[str, str]:
    """Return the place in the network of each block that has a name of its own, which no other has.

    Args:
        blocks: The blocks of a network by name.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3, name="mine")
        >>> places_of({"layers.1": block})
        {'mine': 'layers.1'}

    """
    own = {name: block.name for name, block in _of_own_name(blocks).items()}
    times = Counter(own.values())
    return {name: place for place, name in own.items() if times[name] == 1 and name not in blocks}


def _of_own_name(blocks: Mapping[str, HaltingModule]) -> dict[str, HaltingModule]:
    """Return the blocks whose ponders do not have the name of their place; runs of layers always have it."""
    return {
        name: block for name, block in blocks.items() if not block.layers and block.name not in ("", name)
    }
