"""What others have published of networks like the paper's, whose own figures survive as text only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A network of CIFAR-10; accuracy in per cent."""

    label: str
    accuracy: float
    mflops: float
    source: str


PUBLISHED = {
    32: (
        Published("SACT τ=0.01", 91.82, 82.4, "README of SACT's code"),
        Published("vanilla", 92.5, 137.7, "README of ResNet in tensorflow/models"),
        Published("dynconv", 93.58, 110.9, "README of dynconv's code: budget 0.7, 350 epochs"),
    ),
    110: (
        Published("vanilla", 93.6, 505.8, "README of ResNet in tensorflow/models"),
        Published("SkipNet", 93.3, 0.495 * 505.8, "README of SkipNet's code: 49.5 % of vanilla"),
    ),
}
"""By depth of the network."""
