"""What uses torchpact: data, training, experiments, pretrained networks, reports, benchmarks and commands."""

__version__ = "0.1.0"
