"""FLOPs of layers of attention, from which tokens are active."""

from torch import Tensor

from torchpact.specs.attention import AttentionLayer


def attention_flops(
    spec: AttentionLayer, active: Tensor, length: int, real: Tensor | None = None, past: int = 0
) -> Tensor:
    """Return the FLOPs of a layer for each example.

    Active tokens are charged for queries, scores, weighted sums, output projection and MLP; keys and values
    of all real tokens are charged where any token of the example is active. Padding is charged for nothing.
    Causal layers are charged as others; a window limits the tokens that one attends to.

    Args:
        spec: The layer.
        active: Booleans, of shape (batch, length, 1) or (batch, 1, 1).
        length: The tokens of an example.
        real: False for padding, of shape (batch, length); None where there is none.
        past: How many tokens more have their keys and values in a cache.

    Returns:
        Integers of shape (batch,).

    Example:
        >>> from torchpact.specs import step_spec
        >>> spec = step_spec(tp.models.TransformerUnit(32, heads=4))
        >>> active = torch.tensor([[False] * 10, [True] * 5 + [False] * 5, [True] * 10]).unsqueeze(2)
        >>> attention_flops(spec, active, 10)
        tensor([     0, 149760, 258560])

    """
    active = active.expand(len(active), length, 1).squeeze(2)
    if real is None:
        tokens = active.sum(1)
        return tokens * token_flops(spec, length + past) + (tokens > 0) * key_value_flops(spec, length)
    tokens, lengths = (active & real).sum(1), real.sum(1)
    attended = lengths + past
    if spec.window is not None:
        attended = attended.clamp(max=spec.window)
    each = token_flops(spec, 0) + attended * _pair_flops(spec)
    return tokens * each + (tokens > 0) * lengths * key_value_flops(spec, 1)


def token_flops(spec: AttentionLayer, length: int) -> int:
    """Return the FLOPs of an active token that attends to ``length`` tokens, without its key and its value.

    >>> from torchpact.specs import step_spec
    >>> token_flops(step_spec(tp.models.TransformerUnit(32, heads=4)), 10) == 4 * 32 * (32 + 10 + 128)
    True
    """
    attended = length if spec.window is None else min(length, spec.window)
    width, products = spec.heads * spec.head_size, 2 if spec.gate is None else 3
    return 4 * spec.size * width + attended * _pair_flops(spec) + 2 * products * spec.size * spec.hidden


def key_value_flops(spec: AttentionLayer, length: int) -> int:
    """Return the FLOPs of the keys and values of an example.

    >>> from torchpact.specs import step_spec
    >>> key_value_flops(step_spec(tp.models.TransformerUnit(32, heads=4)), 10) == 2 * 2 * 10 * 32 * 32
    True
    """
    return 4 * length * spec.size * spec.kv_heads * spec.head_size


def _pair_flops(spec: AttentionLayer) -> int:
    """Those of a score and its part of the weighted sum, in all heads."""
    return 4 * spec.heads * spec.head_size
