"""Names by which the runs of one page can be told apart."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchpact_recipes.training import SequenceTrainConfig, TrainConfig


def traits(config: TrainConfig | SequenceTrainConfig, name: str, folder: Path) -> list[str]:
    """What may tell a run from others of its ``name``, the most telling first; "" is for the usual."""
    said = [name.partition(", ")[0]]
    if isinstance(config, TrainConfig):
        network = config.network
        said += ["" if network.width == 1 else f"width {network.width}"]
        said += ["" if network.per == "pixel" else f"per {network.per}"]
        said += ["" if network.group == 1 else f"groups of {network.group}×{network.group}"]
    return [*said, f"seed {config.seed}", folder.name, str(folder)]


def distinct(names: Sequence[str], known: Sequence[Sequence[str]]) -> list[str]:
    """Add to names that several runs have what differs between these: no more than it takes.

    >>> distinct(["plain", "PSACT", "PSACT"], [["14", "seed 0"], ["14", "seed 0"], ["14", "seed 1"]])
    ['plain', 'PSACT, seed 0', 'PSACT, seed 1']
    """
    found = list(names)
    for place in range(max(map(len, known), default=0)):
        for name in {name for name in found if found.count(name) > 1}:
            same = [i for i, other in enumerate(found) if other == name]
            said = {i: known[i][place] if place < len(known[i]) else "" for i in same}
            if len(set(said.values())) > 1:
                for i in same:
                    found[i] = ", ".join(filter(None, (name, said[i])))
    return found


def told_apart(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs with titles and labels of their own; one given twice remains the same."""
    known = [run["traits"] for run in runs]
    titles = distinct([run["title"] for run in runs], known)
    labels = distinct([run["label"] for run in runs], known)
    return [
        {**run, "title": title, "label": label}
        for run, title, label in zip(runs, titles, labels, strict=True)
    ]
