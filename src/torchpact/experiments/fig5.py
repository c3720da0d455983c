"""Fig. 5: accuracy against FLOPs of PSACT and SACT, ResNet-32 and ResNet-110."""

from torchpact.experiments.runs import Run, Scale, adaptive, looks, plain

TAUS: dict[int, dict[str, tuple[float, ...]]] = {
    32: {"relaxed": (0.05, 0.02, 0.01, 0.005, 0.001), "act": (0.1, 0.05, 0.01, 0.005)},
    110: {"relaxed": (0.01, 0.005, 0.001), "act": (0.005, 0.001, 0.0005)},
}
"""The grids of the supplement."""


def runs(scale: Scale, seeds: list[int], depth: int = 32, halting_norm: bool = False) -> list[Run]:
    """PSACT and SACT for every τ of the supplement, and the plain networks they start from."""
    taus = TAUS[depth]
    if scale.name == "smoke":
        taus = {"relaxed": (0.01,), "act": (0.01,)}
    network = {"halting_norm": halting_norm}
    often = looks(scale, 4)
    return [
        *(plain(scale, depth, seed, **often) for seed in seeds),
        *(
            adaptive(scale, depth, method, tau, seed, network=network, **often)
            for method, grid in taus.items()
            for tau in grid
            for seed in seeds
        ),
    ]
