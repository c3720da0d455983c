"""How long and how fast the stages of a distillation train."""

from dataclasses import dataclass

from torchpact.checks import check_count, check_number


@dataclass(frozen=True)
class DistillConfig:
    """How long and how fast :func:`torchpact.distill` trains.

    Args:
        exit_updates: Updates of all weights, so that exits are useful.
        head_updates: Updates of the heads.
        lr: The learning rate of the weights, by AdamW with a linear warm-up and a cosine.
        head_lr: That of the heads, by plain Adam.
        exits_an_update: How many exits are trained in an update, the last one always among them; None is all
            of networks with one block, and 3 of others.
        exit_shares: How many of the tokens or pixels halt after each step, at random, while exits are trained
            (of networks with one block, whose loss is of positions); equal shares by default. Exits of share
            0 are not trained, in any network.
        clip: The largest norm of gradients.
        held_out: The share of batches that is held out, where none are given.
        check_every: After how many updates of the exits the held-out loss is measured.
        patience: After how many such checks without a better one the stage ends.
        save_every: After how many updates the state is written, if there is a checkpoint.
        seed: Of the order of batches, and of all that is drawn.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> DistillConfig(lr=3e-4).head_updates
        400

    """

    exit_updates: int = 800
    head_updates: int = 400
    lr: float = 1e-4
    head_lr: float = 1e-2
    exits_an_update: int | None = None
    exit_shares: tuple[float, ...] | None = None
    clip: float = 1.0
    held_out: float = 0.2
    check_every: int = 50
    patience: int = 6
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("exit_updates", "head_updates"):
            check_count(name, getattr(self, name), 0)
        for name in ("check_every", "patience", "save_every"):
            check_count(name, getattr(self, name))
        if self.exits_an_update is not None:
            check_count("exits_an_update", self.exits_an_update)
        for name in ("lr", "head_lr", "clip"):
            check_number(name, getattr(self, name), 0, open_low=True, open_high=True)
        check_number("held_out", self.held_out, 0, 1, open_low=True, open_high=True)
