"""Layers of a pretrained transformer, called one by one by the network that owns them, on active tokens only.

A :class:`LayersRunner` holds the weights of a run of layers, and makes a :class:`LayersRun` for each call of
the network. Of a layer it computes queries, output projection and MLP of the active tokens of all examples in
one batch; keys and values of all real tokens of examples that have active ones, and with a cache of all
examples. Padding is not computed, and stays as it is.
"""

from typing import Any

import torch
from torch import Tensor

from torchpact.core.ponder import Ponder
from torchpact.core.state import versions
from torchpact.engines.attention.criteria import Scope, scope_of
from torchpact.engines.attention.decisions import Decisions
from torchpact.engines.attention.packed_layer import PackedLayer, Rotary, prepared, rotary_of
from torchpact.engines.attention.ragged import Ragged, Ranges, Selection, ranges_of, select
from torchpact.engines.attention.stacked import MOST_STACKED, StackedKeys
from torchpact.engines.base import Unsupported
from torchpact.specs.attention import AttentionLayer, LayerContext
from torchpact.specs.blocks import BlockSpec, Bounds
from torchpact.specs.heads import LinearHead, RowHead


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
        self.scope: Scope = "batch"
        if spec.has_criteria:
            like = torch.empty(0, dtype=steps[0].dtype, device=steps[0].device)
            self.scope = scope_of(spec, steps[0].size, like)
            by_token |= self.scope == "tokens"
        made: dict[tuple[int, bool], PackedLayer] = {}
        self.layers = []
        with torch.no_grad():
            for index, step in enumerate(steps):
                whole = index == 0 or not by_token
                key = id(step), whole
                if key not in made:
                    # the tokens of a decoder's call often halt together: there is one
                    made[key] = PackedLayer(step, fused=whole or step.causal, separate=not whole)
                self.layers.append(made[key])
            self.stacked = StackedKeys.of(steps)

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
        # criteria see the state before a layer, too
        in_place &= runner.scope == "tokens" or not runner.spec.has_criteria
        self.runner, self.cached, self.in_place = runner, cached, in_place
        self.shape, self.device = (u.size(0), u.size(1)), u.device
        self.real = None if real is None or bool(real.all()) else real
        self._decisions = Decisions(runner.spec, self.real, bounds, self.shape, self.device, runner.scope)
        everything = torch.ones(self.shape, dtype=torch.bool, device=self.device)
        active = everything if self.real is None else self.real
        self._selection = select(active, self.real, cached)
        self._ranges: list[tuple[tuple[object, ...], Ranges]] = []
        self._ragged: tuple[Ranges, Selection, Ragged] | None = None
        self._written = None if self.real is None else self.real.flatten().nonzero().squeeze(1)
        self._rotary: dict[int, tuple[Rotary, Selection | None, tuple[Rotary, Rotary], Rotary]] = {}
        self._last: Tensor | None = None
        self._moved: tuple[Selection, Tensor, Any] | None = None
        self._stacked: tuple[Rotary | None, Tensor, int, Tensor, Tensor] | None = None

    def layer(self, index: int, u: Tensor, context: LayerContext) -> Tensor:
        """Run a layer, and decide which tokens go on.

        Args:
            index: The number of the layer, from 0; layers are called in order.
            u: The state before it, (batch, length, size).
            context: What else the layer is given.

        Returns:
            The state after it; halted tokens and padding are as they were. With ``in_place`` it may be ``u``.

        """
        if not torch.is_grad_enabled():  # to enter what is entered already would take time in every layer
            return self._layer(index, u, context)
        with torch.no_grad():
            return self._layer(index, u, context)

    def _layer(self, index: int, u: Tensor, context: LayerContext) -> Tensor:
        layer, selection = self.runner.layers[index], self._selection
        if selection is None:
            if self.cached:
                self._fill_cache(index, u, context)
            return u
        flat = u.reshape(-1, u.size(-1))
        x = flat if selection.keys is None else flat.index_select(0, selection.keys)
        own = x  # the active ones
        if selection.picks is not None:
            assert selection.rows is not None
            known = self._moved_last(u, selection)
            own = flat.index_select(0, selection.rows) if known is None else known
        queries, keys, values = layer.project(x, own, selection.picks, *self._rotary_of(context, selection))
        if self.cached:
            keys, values = self._update(keys, values, selection.keys, context)
        ranges = self._ranges_of(layer.spec, context, keys.size(2) if self.cached else None)
        ragged = self._ragged_of(ranges, selection)
        seen = layer.attend(queries, keys, values, selection, ranges, ragged, self.shape[1])
        moved = layer.finish(own, seen)
        if selection.rows is None:
            after = moved.view(u.shape)
        else:
            after = u if self.in_place and u is self._last else u.clone(memory_format=torch.contiguous_format)
            after.view(flat.shape).index_copy_(0, selection.rows, moved)
        self._last, self._moved = after, (selection, moved, versions(after))
        if index + 1 < len(self.runner.layers) and self._decisions.adaptive:
            active = self._decisions.after(index, after, moved, selection.rows, u, own)
            if active is not None:
                self._selection = select(active, self.real, self.cached)
                if self._selection is None:
                    self._decisions.end()
        return after

    def _moved_last(self, u: Tensor, selection: Selection) -> Tensor | None:
        """Return the active tokens, if they are those of the layer before, and nobody has changed them."""
        if self._moved is None or u is not self._last or self._moved[0] is not selection:
            return None
        _, moved, version = self._moved
        return moved if version is not None and versions(u) == version else None

    def ponder(self) -> Ponder:
        """Return what every position did; padding weighs 0.

        Raises:
            ValueError: No layer has run.

        """
        return self._decisions.ponder()

    def _fill_cache(self, index: int, u: Tensor, context: LayerContext) -> None:
        """Write keys and values of a layer that no token runs."""
        layer, stacked = self.runner.layers[index], self.runner.stacked
        rotary, _ = self._rotary_of(context, None)
        if stacked is None or u.size(0) * u.size(1) > MOST_STACKED or self._written is not None:
            flat = u.reshape(-1, u.size(-1))
            x = flat if self._written is None else flat.index_select(0, self._written)
            self._update(*layer.keys_and_values(x, rotary), self._written, context)
            return
        known = self._stacked
        if known is None or known[0] is not rotary or known[1] is not u:
            # the state stays as it is until the last layer
            made = stacked.keys_and_values(u.reshape(-1, u.size(-1)), index, rotary)
            known = self._stacked = rotary, u, index, *made
        _, _, begin, keys, values = known
        self._update(keys[index - begin], values[index - begin], None, context)

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
