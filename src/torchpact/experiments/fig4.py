"""Fig. 4: training by the relaxation against training by REINFORCE, for fewer and more latent variables."""

from torchpact.experiments.runs import Run, Scale, adaptive, looks

TAU = 0.1
GROUPS = {8: 21, 4: 84, 2: 336, 1: 1344}
"""Pixels a side that share a decision, and the number M of latent variables that makes."""
METHODS = ("relaxed", "reinforce")


def runs(scale: Scale, seeds: list[int]) -> list[Run]:
    """Both methods for every M, with the variance of their gradients."""
    groups = GROUPS if scale.name != "smoke" else {8: 21}
    samples = 32 if scale.name != "smoke" else 2
    often = looks(scale, 8) | {"variance_samples": samples}
    return [
        adaptive(scale, 32, method, TAU, seed, network={"group": group}, **often)
        for seed in seeds
        for group in groups
        for method in METHODS
    ]
