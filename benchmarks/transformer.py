"""Transformer layers whose tokens halt, beside those of PyTorch and masked ones, trained and evaluated.

    python benchmarks/transformer.py [--device cpu] [--seconds 5] [--out benchmarks/transformer.csv]

Layers as those of ViT-S and of a small text model: of all but the first, a share of the tokens is open, of
every example as large or, with ``0 to 0.5``, of every one another; and layers too small to gain anything.
``ours`` is ``tp.models.TransformerUnit``, which computes open tokens by rows, ``masked`` the same in dense
execution, which computes everything and multiplies by the gate, and ``plain`` a stack of
``nn.TransformerEncoderLayer`` without halting; the latter two eager or by torch.compile. To train is a
forward and a backward pass. All take turns, and medians are compared. ``of_theory`` is the measured speed-up
over the best of the others divided by the one that FLOPs promise.
"""

from collections.abc import Callable, Sequence

import torch
from gated import Dense, Gated, compared, evaluate, train
from options import parser_for
from table import write_csv
from torch import Tensor, nn

from torchpact.flops.attention import attention_flops
from torchpact.models import TransformerUnit
from torchpact.nn.transformer import attention_layer

SIZES = ((8, 197, 384, 6, 6), (1, 197, 384, 6, 6), (32, 64, 256, 4, 6), (64, 12, 32, 4, 6))
"""Batch, tokens, features, heads, layers."""


class Plain(nn.Module):
    """The layers of PyTorch, without halting."""

    def __init__(self, units: Sequence[TransformerUnit]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for unit in units:
            layer = nn.TransformerEncoderLayer(
                unit.size,
                unit.self_attn.num_heads,
                unit.linear1.out_features,
                dropout=0.0,
                activation="gelu",
                norm_first=True,
                batch_first=True,
            )
            layer.load_state_dict(unit.state_dict())
            self.layers.append(layer)

    def forward(self, u: Tensor, _gate: Tensor) -> Tensor:
        """Return the last state."""
        for layer in self.layers:
            u = layer(u)
        return u


def promised(units: Sequence[TransformerUnit], gate: Tensor) -> float:
    """Return the speed-up by FLOPs."""
    everyone = torch.ones_like(gate, dtype=torch.bool)
    specs, length = [attention_layer(unit) for unit in units], gate.size(1)
    plain = [float(attention_flops(spec, everyone, length).sum()) for spec in specs]
    ours = [float(attention_flops(spec, gate > 0, length).sum()) for spec in specs]
    return sum(plain) / (plain[0] + sum(ours[1:]))


def main() -> None:
    parser = parser_for("transformer layers whose tokens halt", __file__, seconds=5.0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for batch, length, size, heads, layers in SIZES:
        units = [TransformerUnit(size, heads) for _ in range(layers)]
        ours, masked, plain = (made(units).to(arguments.device) for made in (Gated, Dense, Plain))
        ways: dict[str, Callable[..., Tensor]] = {"ours": ours, "masked": masked, "plain": plain}
        if arguments.compile:
            ways |= {f"{name} compiled": torch.compile(ways[name]) for name in ("masked", "plain")}
        for share in (0.1, 0.25, "0 to 0.5", 0.5, 0.9, 1.0):
            u = torch.randn(batch, length, size, device=arguments.device)
            each = 0.5 * torch.rand(batch, 1, 1) if isinstance(share, str) else share
            gate = (torch.rand(batch, length, 1) < each).float().to(arguments.device)
            theory = promised(units, gate)
            for what in (train, evaluate):
                for net in (ours, masked, plain):
                    net.train(what is train)
                row: dict[str, object] = {"tokens": f"{batch}×{length}×{size}", "does": what.__name__}
                row |= {"open": share}
                row |= compared(what, ways, "ours", u, gate, theory=theory, seconds=arguments.seconds)
                rows.append(row)
                print(*row.values(), sep="\t", flush=True)
                write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
