"""Results of runs as lines for people, whatever was trained."""

from typing import Any


def result_lines(results: dict[str, Any]) -> str:
    """One line for every run and mode.

    >>> print(result_lines({"runs/a": {"act": {"accuracy": 0.75, "nll": 0.5, "steps": 2.0}}}))
    runs/a  act          accuracy 75.00%  steps 2.00
    """
    return "\n".join(
        f"{folder}  {mode:<11}  {result_text(measured)}"
        for folder, modes in results.items()
        for mode, measured in modes.items()
    )


def result_text(measured: dict[str, Any]) -> str:
    """What was measured in one mode, in a few words.

    >>> result_text({"accuracy": 0.5, "bits_per_character": 1.5, "steps": 2.0})
    'accuracy 50.00%  1.500 bits a character  steps 2.00'
    """
    parts = [f"accuracy {measured['accuracy']:.2%}"]
    if "bits_per_character" in measured:
        parts.append(f"{measured['bits_per_character']:.3f} bits a character")
    if "flops" in measured:
        parts.append(f"{measured['flops'] / 1e6:.1f} ± {measured['flops_std'] / 1e6:.1f} MFLOPs")
    steps = measured["steps"] if isinstance(measured["steps"], list) else [measured["steps"]]
    if steps:
        parts.append("steps " + " ".join(f"{s:.2f}" for s in steps))
    if "transfer" in measured:
        parts.append(f"transfer {measured['transfer']['accuracy']:.2%}")
    return "  ".join(parts)
