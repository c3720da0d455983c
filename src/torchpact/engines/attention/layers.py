"""Layers of a pretrained transformer, called one by one by the network that owns them, on active tokens only.

A :class:`LayersRunner` holds the weights of a run of layers, and makes a :class:`LayersRun` for each call of
the network. Of a layer it computes queries, output projection and MLP of the active tokens of all examples in
one batch; keys and values of all real tokens of examples that have active ones, and with a cache of all
examples. Padding is not computed, and stays as it is.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.checks import at_least_single
from torchpact.core.layer_run import PoolingHead
from torchpact.core.loop import HaltingLoop, decide
from torchpact.core.modes import Thresholded
from torchpact.core.ponder import Ponder
from torchpact.engines.attention.packed_layer import PackedLayer, Rotary, prepared, rotary_of
from torchpact.engines.attention.ragged import Ragged, Ranges, Selection, ranges_of, select
from torchpact.engines.base import Unsupported
from torchpact.specs.attention import AttentionLayer, LayerContext
from torchpact.specs.blocks import BlockSpec, Bounds
from torchpact.specs.heads import HeadSpec, LinearHead, NeverHead, RowHead


class LayersRunner:
    """A run of transformer layers ready to be called one by one; several threads may use it.

    Args:
        spec: Its steps are :class:`~torchpact.specs.AttentionLayer`, each with weights of its own or shared;
            its mode is a hard one. Heads are asked about active tokens if they are linear, otherwise about
            the whole state, (batch, length, size). On a CPU weights are copied; dropouts are left out.

    Raises:
        Unsupported: A step is none, the mode is not a hard one, or there are not as many heads as decisions.

    Example:
        >>> from torchpact.specs import LayerContext, block_spec
        >>> units = [tp.models.TransformerUnit(32, heads=4) for _ in range(3)]
        >>> block = tp.AdaptiveBlock(units, nn.Linear(32, 1), mode="thresholded").eval()
        >>> runner, u = LayersRunner(block_spec(block)), torch.randn(2, 10, 32)
        >>> with torch.no_grad():
        ...     expected, ponder = block(u)
        >>> run = runner.begin(u)
        >>> for index in range(3):
        ...     u = run.layer(index, u, LayerContext())
        >>> torch.allclose(u, expected, atol=1e-5), torch.equal(run.ponder().steps, ponder.steps)
        (True, True)

    """

    def __init__(self, spec: BlockSpec) -> None:
        steps = [step for step in spec.steps if isinstance(step, AttentionLayer)]
        if len(steps) < len(spec.steps) or not steps:
            raise Unsupported("expected layers of attention, got others")
        if not (spec.mode.hard and spec.mode.can_exit_early):
            raise Unsupported(f"expected a mode that takes hard decisions, got {spec.mode}")
        if spec.heads and len(spec.heads) != len(steps) - 1:
            raise Unsupported(
                f"expected {len(steps) - 1} heads for {len(steps)} layers, got {len(spec.heads)}"
            )
        self.spec, self.heads = spec, spec.heads
        # decisions for whole examples leave either all of their tokens or none
        by_token = any(isinstance(head, LinearHead | RowHead) for head in self.heads)
        made: dict[tuple[int, bool], PackedLayer] = {}
        self.layers = []
        with torch.no_grad():
            for index, step in enumerate(steps):
                key = id(step), index == 0 or not by_token
                if key not in made:
                    made[key] = PackedLayer(step, fused=key[1])
                self.layers.append(made[key])

    @torch.no_grad()
    def begin(
        self,
        u: Tensor,
        real: Tensor | None = None,
        bounds: Bounds = None,
        cached: bool = False,
        *,
        in_place: bool = False,
    ) -> "LayersRun":
        """Return a run of all layers, before the first.

        Args:
            u: The state before the first layer, (batch, length, size).
            real: False for padding, (batch, length); None where there is none.
            bounds: What logits must exceed in thresholded mode, for each head; None is what the spec says.
            cached: Whether keys and values of all examples go to a cache, in every layer.
            in_place: Whether a layer may change the tensor that the one before it returned; not where states
                are kept between layers.

        Raises:
            ValueError: A shape does not fit.

        """
        if u.dim() != 3 or u.size(-1) != self.layers[0].spec.size:
            size = self.layers[0].spec.size
            raise ValueError(f"expected tokens of shape (batch, length, {size}), got {tuple(u.shape)}")
        if real is not None and (real.shape != u.shape[:2] or real.dtype != torch.bool):
            got = f"{tuple(real.shape)} of {real.dtype}"
            raise ValueError(f"expected {tuple(u.shape[:2])} booleans for real tokens, got {got}")
        return LayersRun(self, u, real, bounds, cached, in_place)


class LayersRun:
    """One call of a network: the halting loop, and the tokens that are active; made by ``begin``."""

    def __init__(
        self,
        runner: LayersRunner,
        u: Tensor,
        real: Tensor | None,
        bounds: Bounds,
        cached: bool,
        in_place: bool,
    ) -> None:
        spec = runner.spec
        self.runner, self.cached, self.in_place = runner, cached, in_place
        self.shape, self.device = (u.size(0), u.size(1)), u.device
        self.real = None if real is None or bool(real.all()) else real
        if bounds is None and isinstance(spec.mode, Thresholded):
            bounds = spec.bounds
        self.adaptive = bool(runner.heads)
        self._loop = HaltingLoop.start(
            spec.mode,
            len(runner.layers) if self.adaptive else 1,
            bounds=bounds if self.adaptive else None,
            may_stop=not all(isinstance(head, LinearHead) for head in runner.heads),  # have +∞ already
            keeps_logits=spec.keeps_details,
        )
        if not self.adaptive:
            self._loop, _ = decide(self._loop, torch.zeros(*self.shape, 1, device=self.device))
        everything = torch.ones(self.shape, dtype=torch.bool, device=self.device)
        active = everything if self.real is None else self.real
        self._open: int | None = None  # positions that have not halted
        self._selection = select(active, self.real, cached)
        self._ranges: list[tuple[tuple[object, ...], Ranges]] = []
        self._ragged: tuple[Ranges, Selection, Ragged] | None = None
        self._written = None if self.real is None else self.real.flatten().nonzero().squeeze(1)
        self._rotary: dict[int, tuple[Rotary, Selection | None, tuple[Rotary, Rotary], Rotary]] = {}
        self._last: Tensor | None = None

    @torch.no_grad()
    def layer(self, index: int, u: Tensor, context: LayerContext) -> Tensor:
        """Run a layer, and decide which tokens go on.

        Args:
            index: The number of the layer, from 0; layers are called in order.
            u: The state before it, (batch, length, size).
            context: What else the layer is given.

        Returns:
            The state after it; halted tokens and padding are as they were. With ``in_place`` it may be ``u``.

        """
        layer, selection = self.runner.layers[index], self._selection
        if selection is None:
            if self.cached:
                self._fill_cache(layer, u, context)
            return u
        flat = u.reshape(-1, u.size(-1))
        x = flat if selection.keys is None else flat.index_select(0, selection.keys)
        queries, keys, values = layer.project(x, selection.picks, *self._rotary_of(context, selection))
        if self.cached:
            keys, values = self._update(keys, values, selection.keys, context)
        ranges = self._ranges_of(layer.spec, context, keys.size(2) if self.cached else None)
        ragged = self._ragged_of(ranges, selection)
        seen = layer.attend(queries, keys, values, selection, ranges, ragged, self.shape[1])
        if selection.picks is not None:
            assert selection.rows is not None
            x = flat.index_select(0, selection.rows)
        moved = layer.finish(x, seen)
        if selection.rows is None:
            after = moved.view(u.shape)
        else:
            after = u if self.in_place and u is self._last else u.clone(memory_format=torch.contiguous_format)
            after.view(flat.shape).index_copy_(0, selection.rows, moved)
        self._last = after
        if index + 1 < len(self.runner.layers) and self.adaptive:
            self._decide(self.runner.heads[index], after, moved, selection.rows)
        return after

    def ponder(self) -> Ponder:
        """Return what every position did; padding weighs 0.

        Raises:
            ValueError: No layer has run.

        """
        if self._loop.remaining is None:
            raise ValueError("expected at least one layer before the ponder, got none")
        ponder = self._loop.ponder()
        spec, weights = self.runner.spec, None
        if self.real is not None and ponder.steps.shape[1:] == (self.shape[1], 1):
            weights = self.real.unsqueeze(2).to(ponder.cost.dtype)
        return ponder._replace(weights=weights, name=spec.label, price=spec.price)

    def _decide(self, head: HeadSpec, u: Tensor, moved: Tensor, rows: Tensor | None) -> None:
        logits = self._logits(head, u, moved, rows)
        self._loop, _ = decide(self._loop, logits)
        gate = self._loop.gate
        assert gate is not None
        count = int(torch.count_nonzero(gate))
        if count == (gate.numel() if self._open is None else self._open):
            return  # positions never come back
        active = (gate > 0).squeeze(2).expand(self.shape)
        active = active if self.real is None else active & self.real
        self._open, self._selection = count, select(active, self.real, self.cached)
        if self._selection is None:
            self._loop.draw_the_rest()

    def _logits(self, head: HeadSpec, u: Tensor, moved: Tensor, rows: Tensor | None) -> Tensor:
        """Return the logits of all positions; +∞ for tokens that are not computed."""
        batch, length = self.shape
        like = self._loop.remaining
        if isinstance(head, NeverHead):
            shape = (batch, length, 1) if like is None else like.shape
            return torch.full(shape, -torch.inf, device=self.device)
        if isinstance(head, LinearHead | RowHead):
            x = moved.to(head.weight.dtype)
            if isinstance(head, RowHead) and head.normalized:
                x = F.layer_norm(x, (x.size(-1),))
            found = at_least_single(F.linear(x, head.weight, head.bias))
            if rows is not None:
                everything = found.new_full((batch * length, 1), torch.inf)
                found = everything.index_copy_(0, rows, found)
            found = found.view(batch, length, 1)
        else:
            found = at_least_single(self._asked(head.module, u))
            if found.shape not in ((batch, length, 1), (batch, 1, 1)):
                raise Unsupported(f"expected a logit a token or an example, got {tuple(found.shape)}")
            if self.real is not None and found.size(1) == length:
                found = torch.where(self.real.unsqueeze(2), found, torch.inf)
        if like is not None and found.shape != like.shape:
            if found.size(1) != 1:
                raise Unsupported("expected one decision an example of all heads, got one a token")
            found = found.expand(like.shape)
        return found

    def _asked(self, head: Callable[..., Tensor], u: Tensor) -> Tensor:
        if not isinstance(head, PoolingHead):
            return head(u)
        found: Tensor = head(u, None if self.real is None else self.real.unsqueeze(2).to(u.dtype))
        return found

    def _fill_cache(self, layer: PackedLayer, u: Tensor, context: LayerContext) -> None:
        """Write keys and values of a layer that no token runs."""
        flat = u.reshape(-1, u.size(-1))
        x = flat if self._written is None else flat.index_select(0, self._written)
        rotary, _ = self._rotary_of(context, None)
        self._update(*layer.keys_and_values(x, rotary), self._written, context)

    def _update(
        self, keys: Tensor, values: Tensor, places: Tensor | None, context: LayerContext
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values to the cache, zeros for padding; return all of them."""
        if context.update is None:
            raise ValueError("expected a context with update in a run with a cache, got none")
        both = []
        for part in (keys, values):
            if places is not None:
                whole = part.new_zeros(self.shape[0] * self.shape[1], *part.shape[1:])
                part = whole.index_copy_(0, places, part)
            both.append(part.unflatten(0, self.shape).transpose(1, 2))
        return context.update(both[0], both[1])

    def _ranges_of(self, spec: AttentionLayer, context: LayerContext, total: int | None) -> Ranges:
        """Return what tokens attend to; layers that are given the same mask share the answer."""
        mask, causal = context.mask, context.causal or spec.causal
        window = spec.window if mask is None else None
        wanted = (id(mask), causal, window, total)
        for known, ranges in self._ranges:
            if known[1:] == wanted:
                return ranges
        made = ranges_of(mask, causal, window, self.shape, total, self.real, self.device)
        self._ranges.append(((mask, *wanted), made))  # with the mask, whose id stays its own so
        return made

    def _ragged_of(self, ranges: Ranges, selection: Selection) -> Ragged:
        known = self._ragged
        if known is not None and known[0] is ranges and known[1] is selection:
            return known[2]
        first, last, rows = ranges.first, ranges.last, selection.rows
        if rows is not None and ranges.mask is None:
            first, last = first.index_select(0, rows), last.index_select(0, rows)
        made = Ragged(selection.starts, selection.offsets, first.contiguous(), last.contiguous())
        self._ragged = ranges, selection, made
        return made

    def _rotary_of(
        self, context: LayerContext, selection: Selection | None
    ) -> tuple[Rotary | None, Rotary | None]:
        """Return cosines and sines of the keys and of the rows."""
        if context.rotary is None:
            return None, None
        known = self._rotary.get(id(context.rotary[0]))
        if known is not None and known[1] is selection:
            return known[2]
        everything = known[3] if known is not None else prepared(context.rotary, *self.shape)
        of_keys = of_rows = rotary_of(everything, self._written if selection is None else selection.keys)
        if selection is not None and selection.picks is not None:
            of_rows = rotary_of(everything, selection.rows)
        made = of_keys, of_rows
        self._rotary[id(context.rotary[0])] = context.rotary, selection, made, everything
        return made
