"""The controller of a budget: it moves the price of a step until the cost is the one asked for."""

import math
from collections.abc import Mapping
from typing import Any

from torchpact.checks import check_number

_SPAN = 10
"""Over how many updates the trend of the cost is taken."""
_AHEAD = 50
"""The price does not move on where the trend meets the target within so many updates."""


class PriceController:
    """Moves a price τ multiplicatively: I ← I + ``rate``·e and τ = exp(I + ``gain``·e), with an error e.

    e is the excess of the cost over the target, divided by the room above the target (or below it), so that
    it lies in [−1, 1]. The proportional term lowers τ at once when the cost falls, before heads have halted
    everywhere. I stands still while the cost moves towards the target fast enough to be there in 50 updates:
    heads that take long to move do not make it wind up. τ and I are kept within ``floor`` and ``ceiling``.

    Args:
        start: τ at the beginning.
        floor: The least τ, above 0.
        ceiling: The largest τ.
        rate: How fast I moves, as a fraction of τ an update.
        gain: The weight of the present error.

    Raises:
        ValueError: A number is out of its range, or the start is not within floor and ceiling.

    Example:
        >>> controller = PriceController(start=0.01)
        >>> controller.move(share=1.0, target=0.5, least=0.2, most=1.0)
        >>> round(controller.tau, 4)  # 0.01·exp(2·1 + 0.03·1)
        0.0761

    """

    def __init__(
        self,
        start: float = 0.01,
        *,
        floor: float = 1e-4,
        ceiling: float = 10.0,
        rate: float = 0.03,
        gain: float = 2.0,
    ) -> None:
        self.floor = check_number("floor", floor, 0, open_low=True, open_high=True)
        self.ceiling = check_number("ceiling", ceiling, self.floor, open_high=True)
        start = check_number("start", start, self.floor, self.ceiling)
        self.rate = check_number("rate", rate, 0, 1, open_low=True)
        self.gain = check_number("gain", gain, 0, open_high=True)
        self.tau, self.level = start, math.log(start)
        self.trail: list[float] = []

    def move(self, share: float, target: float, least: float, most: float) -> None:
        """Take in a measured cost.

        Args:
            share: The cost.
            target: What it should be.
            least: The least that it can be.
            most: The most that it can be.

        """
        room = most - target if share > target else target - least
        # near an end, a small error would otherwise be a large one
        error = (share - target) / max(room, 0.3 * (most - least), 1e-9)
        error = min(max(error, -1.0), 1.0)
        self.trail = [*self.trail[-(_SPAN - 1) :], share]
        trend = (share - self.trail[0]) / _SPAN
        arriving = trend * (share - target) < 0 and abs(trend) * _AHEAD > abs(share - target)
        low, high = math.log(self.floor), math.log(self.ceiling)
        if not arriving:
            self.level = min(max(self.level + self.rate * error, low), high)
        self.tau = math.exp(min(max(self.level + self.gain * error, low), high))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        return {"tau": self.tau, "level": self.level, "trail": [*self.trail]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: It is not what :meth:`state_dict` returns.

        """
        try:
            tau, level = float(state["tau"]), float(state["level"])
            trail = [float(each) for each in state["trail"]]
        except (KeyError, TypeError, ValueError):
            raise ValueError("expected the state of a price with tau, level and trail, got another") from None
        if not all(map(math.isfinite, (tau, level, *trail))) or tau <= 0:
            raise ValueError(f"expected finite numbers in the state of a price, got tau={tau}, level={level}")
        self.tau, self.level, self.trail = tau, level, trail[-_SPAN:]
