"""The engine "attention": layers of pretrained transformers, on their active tokens only."""

from torchpact.core.call_args import CallArgs
from torchpact.engines.attention.layers import LayersRunner
from torchpact.engines.base import Engine, Unsupported
from torchpact.specs import AttentionLayer, BlockSpec, CriterionHead, NetworkSpec


class AttentionEngine(Engine):
    """Computes queries, output projections and MLPs of active tokens; keys and values of all real ones."""

    name = "attention"
    host_sync = True
    hooked = True
    kinds = (AttentionLayer,)

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Return None for runs of known transformer layers in a mode in which tokens halt for good."""
        if not isinstance(spec, BlockSpec) or not spec.hooked:
            return "attention: expected layers that their network calls itself"
        if not (spec.mode.hard and spec.mode.can_exit_early):
            return f"attention: expected a mode in which tokens halt for good, got {spec.mode}"
        for number, step in enumerate(spec.steps, start=1):
            if not isinstance(step, AttentionLayer):
                reason = getattr(step, "reason", "")
                known = reason or (
                    f"nothing is known of layer {number} of {spec.label!r}, so that nothing is skipped "
                    "there; as steps of a tp.AdaptiveBlock such layers can be skipped"
                )
                return f"attention: expected known transformer layers, got others: {known}"
            if step.read_call is None:
                return f"attention: expected layers whose calls can be read, got others in layer {number}"
        heads = [head.module for head in spec.heads if isinstance(head, CriterionHead)]
        if any(head.needs_context for head in heads):
            return "attention: expected criteria that do not look at the context of layers"
        if spec.batch_dim:
            return "attention: expected states whose first dimension is the batch"
        return None

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> LayersRunner:
        """Return a runner with a copy of the weights.

        Raises:
            Unsupported: See :meth:`supports`.

        """
        reason = self.supports(spec, example)
        if reason is not None:
            raise Unsupported(reason)
        assert isinstance(spec, BlockSpec)
        return LayersRunner(spec)
