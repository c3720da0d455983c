"""The history of a run, written for TensorBoard too."""

from typing import Any

from torchpact_recipes.training.run_files import Event


def summary_writer() -> Any:
    """Return TensorBoard's SummaryWriter, which only needs to be installed where it is asked for."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "expected the package tensorboard to be installed (from a clone: "
            'pip install "./src/torchpact_recipes[train]")'
        ) from None
    return SummaryWriter


def write_scalars(board: Any, event: Event) -> None:
    """Write the numbers of an event that TensorBoard draws."""
    for name, value in scalars(event).items():
        board.add_scalar(name, value, event["iteration"])
    board.flush()


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event that TensorBoard draws, by name.

    >>> event = {"kind": "validate", "modes": {"act": {"accuracy": 0.5, "nll": 1.0, "flops": 2e6}}}
    >>> scalars(event)
    {'validate/act/accuracy': 0.5, 'validate/act/nll': 1.0, 'validate/act/mflops': 2.0}
    """
    if event["kind"] == "train":
        names = [
            name for name in event if name in ("loss", "nll", "accuracy") or name.endswith("_per_second")
        ]
        blocks = enumerate(event["expected_steps"], 1)
        return {f"train/{name}": event[name] for name in names} | {
            f"train/expected_steps/block{k}": steps for k, steps in blocks
        }
    found = {}
    for mode, measured in event["modes"].items():
        for name in ("accuracy", "nll", "bits_per_character", "steps"):
            if isinstance(measured.get(name), float):
                found[f"validate/{mode}/{name}"] = measured[name]
        if "flops" in measured:
            found[f"validate/{mode}/mflops"] = measured["flops"] / 1e6
    return found
