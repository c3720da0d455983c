"""FLOPs of layers of attention, from which tokens are active."""

from torch import Tensor

from torchpact.specs.steps import AttentionLayer


def attention_flops(spec: AttentionLayer, active: Tensor, length: int) -> Tensor:
    """Return the FLOPs of a layer for each example.

    Active tokens are charged for queries, scores, weighted sums, output projection and MLP; keys and values
    of all tokens are charged where any token of the example is active. Causal layers are charged as others.

    Args:
        spec: The layer.
        active: Booleans, of shape (batch, length, 1) or (batch, 1, 1).
        length: The tokens of an example.

    Returns:
        Integers of shape (batch,).

    Example:
        >>> from torchpact.specs import step_spec
        >>> spec = step_spec(tp.models.TransformerUnit(32, heads=4))
        >>> active = torch.tensor([[False] * 10, [True] * 5 + [False] * 5, [True] * 10]).unsqueeze(2)
        >>> attention_flops(spec, active, 10)
        tensor([     0, 149760, 258560])

    """
    tokens = active.expand(len(active), length, 1).sum((1, 2))
    return tokens * token_flops(spec, length) + (tokens > 0) * key_value_flops(spec, length)


def token_flops(spec: AttentionLayer, length: int) -> int:
    """Return the FLOPs of an active token that attends to ``length`` tokens, without its key and its value.

    >>> from torchpact.specs import step_spec
    >>> token_flops(step_spec(tp.models.TransformerUnit(32, heads=4)), 10) == 4 * 32 * (32 + 10 + 128)
    True
    """
    return 4 * spec.size * (spec.size + length + spec.linear1.out_features)


def key_value_flops(spec: AttentionLayer, length: int) -> int:
    """Return the FLOPs of the keys and values of an example.

    >>> from torchpact.specs import step_spec
    >>> key_value_flops(step_spec(tp.models.TransformerUnit(32, heads=4)), 10) == 2 * 2 * 10 * 32 * 32
    True
    """
    return 4 * length * spec.size**2
