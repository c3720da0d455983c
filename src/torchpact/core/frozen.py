"""Modules that stay as they were made: on one device, in one precision, without gradients."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn


class FrozenModule(nn.Module):
    """What neither moves, nor is cast, copied or saved, such as a deployed network.

    Args:
        like: A tensor of the precision and on the device that it has.
        kind: What it is called in errors.

    """

    blocks: Mapping[str, Any]
    """The adaptive blocks whose work it does, by their names in it."""

    def __init__(self, like: Tensor, kind: str = "network") -> None:
        super().__init__()
        self.__dict__["blocks"] = {}  # not as submodules
        self.dtype, self.device, self.kind = like.dtype, like.device, kind

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(self._not_saved())

    def state_dict(self, *_args: Any, **_options: Any) -> NoReturn:
        """Refuse: there is nothing to save, and a file of it would be empty."""
        raise TypeError(self._not_saved())

    def load_state_dict(self, *_args: Any, **_options: Any) -> NoReturn:
        """Refuse: there is nothing to load into."""
        raise TypeError(self._not_saved())

    def _not_saved(self) -> str:
        return (
            f"a deployed {self.kind} can be neither copied nor saved: threads may share it, and elsewhere "
            "the model is deployed again"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FrozenModule":
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if (probe.dtype, probe.device) == (self.dtype, self.device):
            return self  # nothing would change
        raise RuntimeError(
            f"a deployed {self.kind} stays what it was measured as: move or cast the model and deploy again"
        )
