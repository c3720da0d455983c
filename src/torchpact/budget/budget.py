"""Budget: how much the deployed network may cost, and the training objective that meets it."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.budget.controller import PriceController
from torchpact.budget.latency import share_of_ms
from torchpact.budget.objectives import OBJECTIVES, objective_loss, ponders_in
from torchpact.budget.prices import KINDS, NetworkPrices, assumed_prices, block_shares, measured_prices
from torchpact.checks import check_choice, check_number, readable
from torchpact.core.baseline import EMABaseline
from torchpact.core.ponder import Ponder

ALL = ""
"""The name under which a price of all blocks together is kept."""


class Budget:
    """How much a network may cost once it is deployed, and the price of a step that makes training meet it.

    ``flops`` is the mean FLOPs of an example in deployed, thresholded use (halting heads, read-outs, keys and
    values included) divided by those of the original network, padding excluded in both. ``ms`` are the
    milliseconds that the deployed network takes on this machine for ``example``, a batch.

    :meth:`loss` is the objective at the present price, and :meth:`step`, once after each step of the
    optimizer, moves the price until the expected cost of training batches meets the budget. Calls of
    :meth:`loss` without gradients, as in evaluation, leave no trace. The price moves multiplicatively and
    does not wind up, see :class:`~torchpact.budget.PriceController`. On several processes the mean over all
    of them counts.

    :meth:`bind` measures what steps cost on a batch. Without, all steps cost what ``price`` of their block
    says, and the rest of the network nothing. The expected cost is that of training mode; thresholds that
    meet the budget in deployed use come from :func:`~torchpact.calibrate`.

    Args:
        flops: A share in (0, 1]; or a share for each block, by name, of the FLOPs that the block takes in the
            original network, each with a price of its own.
        ms: Milliseconds; give one of the two.
        example: The batch that ``ms`` is for.
        start: The price of a step at the beginning, in the unit of the losses.
        floor: The least price.
        ceiling: The largest price.
        rate: How fast the price moves, as a fraction an update.
        gain: The weight of the present deviation in the price.

    Raises:
        TypeError: Not exactly one of ``flops`` and ``ms`` is given, or ``ms`` without an example.
        ValueError: A number is out of its range.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4)
        >>> optimizer = torch.optim.Adam(block.parameters(), lr=0.05)
        >>> budget = Budget(flops=0.4)
        >>> for _ in range(100):
        ...     output, ponder = block(torch.randn(64, 8))
        ...     loss = budget.loss(output.square().mean(1), ponder)
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     budget.step()
        >>> abs(budget.log["relaxed"] - 0.4) < 0.1
        True

    """

    def __init__(
        self,
        flops: float | Mapping[str, float] | None = None,
        *,
        ms: float | None = None,
        example: Any = None,
        start: float = 0.01,
        floor: float = 1e-4,
        ceiling: float = 10.0,
        rate: float = 0.03,
        gain: float = 2.0,
    ) -> None:
        if (flops is None) == (ms is None):
            raise TypeError("expected Budget(flops=…) or Budget(ms=…, example=batch), one of the two")
        if ms is not None and example is None:
            raise TypeError("expected an example with ms: Budget(ms=…, example=batch)")
        self.ms = None if ms is None else check_number("ms", ms, 0, open_low=True, open_high=True)
        self.example = example
        self.targets: dict[str, float] = {}
        """The share of the FLOPs for all blocks, under "", or of each. Empty until ms is measured."""
        if flops is not None:
            asked = flops if isinstance(flops, Mapping) else {ALL: flops}
            if not asked:
                raise ValueError("expected a share for at least one block, got none")
            for name, share in asked.items():
                what = f"the budget of {name!r}" if name else "flops"
                self.targets[name] = check_number(what, share, 0, 1, open_low=True)
        self.prices: NetworkPrices | None = None
        self.note = ""
        """Of a budget in ms: the batch, engines and time of the measurement."""
        self._settings: dict[str, float] = {"floor": floor, "ceiling": ceiling, "rate": rate, "gain": gain}
        self._controllers = {
            name: PriceController(start, **self._settings) for name in (self.targets or {ALL: 0.0})
        }
        self.baseline = EMABaseline()
        self.updates = 0
        self.log: dict[str, float] = {}
        self._seen: tuple[NetworkPrices, Tensor] | None = None  # sums over examples since the last step

    @property
    def tau(self) -> float:
        """The present price of a step.

        Raises:
            ValueError: Each block has one of its own, see :attr:`taus`.

        """
        if ALL not in self._controllers:
            raise ValueError("expected one budget for all blocks, got one for each: see budget.taus")
        return self._controllers[ALL].tau

    @property
    def taus(self) -> dict[str, float]:
        """The present prices by block; of all blocks together under ""."""
        return {name: controller.tau for name, controller in self._controllers.items()}

    @property
    def target(self) -> float | None:
        """The share of the FLOPs that is asked for; None where it is by block, or not known before bind."""
        return self.targets.get(ALL)

    def __repr__(self) -> str:
        asked = f"ms={self.ms:g}" if self.ms is not None else f"flops={self.target or self.targets}"
        taus = {name: f"{tau:.4g}" for name, tau in self.taus.items()}
        price = taus.get(ALL) or ", ".join(f"{name}: {tau}" for name, tau in taus.items())
        shares = "".join(f", {kind}={self.log[kind]:.3f}" for kind in KINDS if kind in self.log)
        note = f" [{self.note}]" if self.note else ""
        return f"Budget({asked}, tau={price}{shares}, updates={self.updates}){note}"

    def bind(self, net: nn.Module, batch: Any = None) -> "Budget":
        """Measure what steps of a network cost on a batch; a budget in milliseconds also how long they take.

        Args:
            net: A network with adaptive blocks.
            batch: What it is called with: a mapping by name, a tuple by position, or the only argument; by
                default the budget's example.

        Returns:
            The budget itself.

        Raises:
            TypeError: There is neither a batch nor an example.
            ValueError: The budget is below one step of every block, or in milliseconds above the whole.

        """
        given = self.example if batch is None else batch
        if given is None:
            raise TypeError("expected a batch to measure costs on: budget.bind(net, batch)")
        prices = measured_prices(net, given)
        targets = dict(self.targets)
        if self.ms is not None:
            share, self.note = share_of_ms(net, self.example, self.ms, prices)
            targets = {ALL: share}
        for name, target in targets.items():
            least = prices.least if name == ALL else _own_least(prices, name)
            if target < least:
                what = "one step of every block" if name == ALL else f"one step of {name!r}"
                raise ValueError(
                    f"expected a budget of {least:.4g} to 1 of the FLOPs, the least being {what}; got "
                    f"{target:g}"
                )
        self.prices, self.targets = prices, targets
        return self

    def loss(
        self,
        losses: Any,
        ponders: Ponder | Sequence[Ponder] | Sequence[Sequence[Ponder]],
        objective: str = "relaxed",
    ) -> Tensor:
        """Return the objective at the present price, and note what the batch cost, if gradients are enabled.

        =============  =====================================  ==========================================
        objective      ``losses``                             function
        =============  =====================================  ==========================================
        "relaxed"      one per example, or their mean         :func:`~torchpact.map_loss`
        "exact"        after every exit, (L, batch, …)        :func:`~torchpact.exact_loss`
        "advantage"    after every exit, (L, batch, …)        :func:`~torchpact.advantage_loss`
        "ponder"       after every exit, (L, batch)           :func:`~torchpact.ponder_loss`
        "reinforce"    one per example                        :func:`~torchpact.reinforce_loss`
        "rloo"         K runs of one per example              :func:`~torchpact.rloo_loss`
        =============  =====================================  ==========================================

        Losses of every exit need ponders with exits, as of ``tp.collect(net, exits=True)``, of one block.

        Args:
            losses: As the objective takes them.
            ponders: What the blocks did.
            objective: Its name.

        Returns:
            A scalar.

        Raises:
            TypeError: Ponders are something else.
            ValueError: Losses or halting probabilities are NaN, shapes do not fit, the objective is unknown,
                or a budget in milliseconds is not bound to a network yet. Nothing of the batch is kept then.

        """
        check_choice("objective", objective, OBJECTIVES)
        if not self.targets:
            raise ValueError("expected a budget in ms to be measured first: budget.bind(net)")
        blocks = ponders_in(ponders)
        given = losses if isinstance(losses, Sequence) else [losses]
        for each in given:
            if isinstance(each, Tensor) and readable(each) and each.isnan().any():
                raise ValueError(
                    f"expected losses without NaN, got {int(each.isnan().sum())} of {each.numel()}; tau stays"
                )
        prices = self.prices or assumed_prices(blocks)
        taus = self._taus(prices, blocks)
        value = objective_loss(objective, losses, ponders, taus, self.baseline)
        if torch.is_grad_enabled() and value.requires_grad:
            self._note(prices, blocks)
        return value

    def _taus(self, prices: NetworkPrices, blocks: Sequence[Ponder]) -> list[float]:
        """Return the price of a step of each ponder: τ times what a step costs, in the mean over blocks 1."""
        unknown = next((each.name for each in blocks if prices.place(each) not in prices.blocks), None)
        if unknown is not None:
            known = ", ".join(map(repr, prices.blocks))
            raise ValueError(f"expected ponders of the blocks {known}, got one of {unknown!r}")
        steps = {name: block.per_step for name, block in prices.blocks.items()}
        mean = sum(steps.values()) / len(steps)
        taus = []
        for each in blocks:
            place = prices.place(each)
            controller = self._controllers.get(ALL) or self._controllers.get(place)
            if controller is None:
                raise ValueError(f"expected a budget for each block, got none for {each.name!r}")
            taus.append(controller.tau * (steps[place] / mean if mean else 1.0))
        return taus

    @torch.no_grad()
    def _note(self, prices: NetworkPrices, blocks: Sequence[Ponder]) -> None:
        """Add up over examples what each block cost."""
        rows = []
        for name, block in prices.blocks.items():
            own = [block_shares(block, each).double() for each in blocks if prices.place(each) == name]
            shares = torch.cat(own, 1) if own else torch.zeros(len(KINDS), 0, dtype=torch.double)
            rows.append(torch.cat([shares.sum(1), shares.new_full((1,), shares.size(1))]))
        sums = torch.stack([row.to(blocks[0].probs.device) for row in rows])
        if readable(sums) and sums.isnan().any():
            raise ValueError("expected halting probabilities without NaN, got some; tau stays")
        if self._seen is not None:
            sums = sums + self._seen[1]
        self._seen = prices, sums

    def step(self) -> None:
        """Move the price by what :meth:`loss` saw since the last step: once after each optimizer step.

        Where it saw no example, nothing moves, with a warning.
        """
        seen, self._seen = self._seen, None
        prices = self.prices if seen is None else seen[0]
        sums = None
        if prices is not None:
            nothing = torch.zeros(len(prices.blocks), len(KINDS) + 1, dtype=torch.double)
            sums = _of_all_processes(nothing if seen is None else seen[1]).cpu()
        if prices is None or sums is None or not float(sums[:, -1].max()) > 0:
            warnings.warn(
                "expected a loss of at least one example, with gradients, since the last step of the budget, "
                "got none: tau stays",
                stacklevel=2,
            )
            return
        shares = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        totals = [prices.fixed + float(x) for x in shares.sum(0)]
        log = dict(zip(KINDS, totals, strict=True)) | {"gap": totals[2] - totals[0]}
        own = {
            name: {kind: float(x) / block.plain for kind, x in zip(KINDS, row, strict=True)}
            for (name, block), row in zip(prices.blocks.items(), shares, strict=True)
        }
        for name, target in self.targets.items():
            controller = self._controllers[name]
            if name == ALL:
                controller.move(totals[0], target, prices.least, prices.most)
                log["tau"] = controller.tau
                continue
            most = prices.blocks[name].by_exit[-1] / prices.blocks[name].plain
            controller.move(own[name]["relaxed"], target, _own_least(prices, name), most)
            log |= {f"{name}/{kind}": x for kind, x in own[name].items()} | {f"{name}/tau": controller.tau}
        self.updates, self.log = self.updates + 1, log

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, for JSON or a checkpoint; what was measured is no part."""
        return {
            "updates": self.updates,
            "prices": {name: controller.state_dict() for name, controller in self._controllers.items()},
            "baseline": {name: float(x) for name, x in self.baseline.state_dict().items()},
            "log": {**self.log},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            ValueError: It is another record, or one of other blocks; the budget stays as it is then.

        """
        keys = {"updates", "prices", "baseline", "log"}
        if (
            not isinstance(state, Mapping)
            or not keys <= set(state)
            or set(state["prices"]) != set(self._controllers)
        ):
            raise ValueError("expected the state of a budget of the same blocks, got another record")
        start = next(iter(self._controllers.values())).floor
        loaded = {name: PriceController(start, **self._settings) for name in self._controllers}
        for name, controller in loaded.items():
            controller.load_state_dict(state["prices"][name])
        self._controllers, self._seen = loaded, None
        self.updates, self.log = int(state["updates"]), dict(state["log"])
        self.baseline.load_state_dict({name: torch.tensor(x) for name, x in state["baseline"].items()})


def _own_least(prices: NetworkPrices, name: str) -> float:
    """Return the least share of its own FLOPs that a block can take."""
    if name not in prices.blocks:
        known = ", ".join(map(repr, prices.blocks))
        raise ValueError(f"expected budgets for blocks among {known}; got {name!r}")
    return prices.blocks[name].by_exit[0] / prices.blocks[name].plain


def _of_all_processes(sums: Tensor) -> Tensor:
    """Return sums over the processes of a distributed run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        if torch.distributed.get_backend() == "nccl":
            sums = sums.to("cuda")
        torch.distributed.all_reduce(sums)
    return sums
