"""Does halting pay in a looped network? Prefix parity with resets, trained at length 32, tested up to 128.

    python benchmarks/looped_parity.py [--seeds 0 1 2 3] [--updates 3000] [--out benchmarks/looped_parity.csv]

Protocol, fixed before the test set is opened. A network of width 32 is trained on strings of length 32 (a
tenth of the positions reset, 30 % of the strings without a reset) by the mean loss of all of 20 exits.
Everything is chosen on 2,000 validation strings of length 32, with up to 100 steps: for each head the
threshold of the fewest mean steps at which no more than 0.5 points of strings are lost to the best fixed
number of steps there. Heads on the frozen network, with one decision a string (``string``) or one a position
(``position``: its prediction is that of the step it halts at): *confidence* (of a string the mean over
positions), *unchanged* (predictions stay as they are for n steps, n chosen; strings only), *learned* (300
updates of the advantage loss, τ = 0.002). Then the test: 2,000 strings of length 32, 64 and 128, with up to
100, 150 and 250 steps, other seeds, a string is right if all positions are. Columns:

    accuracy, steps      of the head, run by ``tp.stream`` (positions: by the network itself, on the first
                         500 strings); the same policy on recorded exits has to agree
    fixed, fixed_steps   the smallest fixed number of steps within 0.5 points of the best on the test set
    equal                the accuracy of fixed numbers of steps at the head's mean steps, interpolated
    share                steps / fixed_steps; the bar is at most 0.65 with at most one point less than fixed

Rows are written as they are found, and those that are there are not measured again.
"""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from table import read_rows, write_csv
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchpact as tp
from torchpact_recipes.data import LoopBatch, ResetParity

WIDTH, LENGTH, STEPS, COUNT = 32, 32, 20, 2000
TESTS = {32: 100, 64: 150, 128: 250}
LOST, TAU = 0.005, 0.002
KINDS = (
    "string, confidence",
    "string, unchanged",
    "string, learned",
    "position, confidence",
    "position, learned",
)


class Embed(nn.Embedding):
    """Tokens as channels."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (batch, width, length)."""
        return super().forward(tokens).transpose(1, 2)


class Record(NamedTuple):
    """What all exits of strings give."""

    right: Tensor
    """Which positions are right, (steps, strings, length)."""
    logits: dict[str, Tensor]
    """Halting logits by head, (steps, strings) or (steps, strings, length)."""


class Chosen(NamedTuple):
    """A head and its threshold."""

    setting: str
    bound: float


def strings(length: int, count: int, seed: int) -> LoopBatch:
    return ResetParity(length).sample(count, torch.Generator().manual_seed(seed))


def trained(seed: int, updates: int) -> tp.nn.Looped:
    """Return a network that has learned by the mean loss of all exits."""
    torch.manual_seed(seed)
    net = tp.nn.Looped(Embed(3, WIDTH), tp.nn.ConvUpdate(WIDTH), nn.Conv1d(WIDTH, 2, 1), max_steps=STEPS)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=updates)
    draw = torch.Generator().manual_seed(1000 + seed)
    for _ in range(updates):
        batch = ResetParity(LENGTH).sample(16, draw)
        loss = tp.nn.loop_loss(net, batch.inputs, lambda out: losses(out, batch), "every")  # noqa: B023
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return net.eval()


def losses(output: Tensor, batch: LoopBatch) -> Tensor:
    return cross_entropy(output, batch.targets, reduction="none")


def with_head(net: tp.nn.Looped, head: nn.Module | None, per: Any = "example") -> tp.nn.Looped:
    """Return the network with another head; all else is shared."""
    update = net.get_submodule("block.steps.0.update")
    return tp.nn.Looped(net.embed, update, net.readout, halting=head, per=per, max_steps=STEPS).eval()


def learned(net: tp.nn.Looped, seed: int, per: Any, updates: int = 300) -> nn.Module:
    """Return a head that has learned whether going on is worth its price."""
    torch.manual_seed(seed)
    own = with_head(net, None, per)
    optimizer = torch.optim.Adam(own.block.halting.parameters(), lr=0.02)
    draw = torch.Generator().manual_seed(2000 + seed)
    for _ in range(updates):
        batch = ResetParity(LENGTH).sample(64, draw)
        loss = tp.nn.loop_loss(own, batch.inputs, lambda out: losses(out, batch), "advantage", tau=TAU)  # noqa: B023
        found = torch.autograd.grad(loss, [*own.block.halting.parameters()])
        for parameter, gradient in zip(own.block.halting.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()
    head: nn.Module = own.block.halting[0]
    return head


def heads_of(net: tp.nn.Looped, seed: int) -> dict[str, nn.Module]:
    """Return all heads by name."""
    criteria: dict[str, nn.Module] = {
        "string, confidence": tp.criteria.Confidence(net.readout, per="example")
    }
    for count in range(1, 13):
        criteria[f"string, unchanged {count}"] = tp.criteria.Unchanged(net.readout, count, per="example")
    criteria["position, confidence"] = tp.criteria.Confidence(net.readout)
    found = {name: with_head(net, each).block.halting[0] for name, each in criteria.items()}
    found["string, learned"] = learned(net, seed, "example")
    found["position, learned"] = learned(net, seed, "position")
    return found


def logits_of(head: nn.Module, states: tuple[Tensor, ...]) -> Tensor:
    """Return the halting logits of a head after each step, as a run asks for them; the last is infinite."""
    found, memory = [], None
    for index, u in enumerate(states[:-1]):
        if isinstance(head, tp.criteria.Criterion):
            logits, memory = head(tp.criteria.Exit(u, states[max(index - 1, 0)], index, memory=memory))
        else:
            logits = head(u)
        found.append(logits.squeeze(1).squeeze(-1))
    return torch.stack([*found, torch.full_like(found[0], torch.inf)])


@torch.no_grad()
def recorded(net: tp.nn.Looped, heads: dict[str, nn.Module], batch: LoopBatch, steps: int) -> Record:
    """Run all steps once, and keep which positions are right after each, and the halting logits."""
    right: list[Tensor] = []
    logits: dict[str, list[Tensor]] = {name: [] for name in heads}
    for tokens, targets in zip(batch.inputs.split(100), batch.targets.split(100), strict=True):
        never = tp.Thresholds("never")
        _, ponder = net(tokens, mode="thresholded", thresholds=never, exits=True, max_steps=steps)
        assert ponder.exits is not None
        states = tuple(u for u in ponder.exits.states if isinstance(u, Tensor))
        right.append(torch.stack([net.read(u).argmax(1) == targets for u in states]))
        for name, head in heads.items():
            logits[name].append(logits_of(head, states))
    return Record(torch.cat(right, 1), {name: torch.cat(each, 1) for name, each in logits.items()})


def judged(record: Record, name: str, bound: float, count: int | None = None) -> tuple[float, float]:
    """Return accuracy and mean steps of halting at the first logit above a bound, of the first strings."""
    logits = record.logits[name][:, :count]
    fires = logits > bound
    fires[-1] = True
    step = fires.to(torch.uint8).argmax(0)
    index = (step if step.dim() > 1 else step.unsqueeze(1).expand(-1, record.right.size(2))).unsqueeze(0)
    right = record.right[:, :count].gather(0, index)[0].all(1)
    return float(right.double().mean()), float(step.double().mean()) + 1


def fixed(record: Record) -> tuple[float, int]:
    """Return the accuracy of the smallest number of steps within 0.5 points of the best, and that number."""
    each = record.right.all(2).double().mean(1)
    index = int((each >= each.max() - LOST).nonzero()[0])
    return float(each[index]), index + 1


def chosen(record: Record, kind: str) -> Chosen:
    """Return the head of a kind and the bound of the fewest mean steps that lose little."""
    best, fewest = None, math.inf
    least, _ = fixed(record)
    for setting, logits in record.logits.items():
        if not setting.startswith(kind):
            continue
        finite = logits[logits.isfinite()]
        finite = finite[:: max(1, finite.numel() // 2**20)]
        bounds = [0.0] if "unchanged" in setting else finite.quantile(torch.linspace(0, 1, 200)).tolist()
        for bound in (*bounds, math.inf):
            accuracy, steps = judged(record, setting, bound)
            if accuracy >= least - LOST and steps < fewest:
                best, fewest = Chosen(setting, bound), steps
    assert best is not None
    return best


@torch.no_grad()
def executed(net: tp.nn.Looped, head: Chosen, batch: LoopBatch, most: int) -> tuple[float, float]:
    """Return accuracy and mean steps of a head, run."""
    thresholds = tp.Thresholds(head.bound)
    pieces = list(zip(batch.inputs.split(500), batch.targets.split(500), strict=True))
    if head.setting.startswith("string"):
        results = tp.stream(
            net, [tokens for tokens, _ in pieces], batches=True, thresholds=thresholds, max_steps=most
        )
    else:
        pieces = pieces[:1]
        results = (net(t, mode="thresholded", thresholds=thresholds, max_steps=most) for t, _ in pieces)
    right, ran = [], []
    for (output, ponder), (_, targets) in zip(results, pieces, strict=True):
        right.append((output.argmax(1) == targets).all(1))
        ran.append(ponder.steps.flatten())
    return float(torch.cat(right).double().mean()), float(torch.cat(ran).double().mean())


def tested(net: tp.nn.Looped, head: Chosen, record: Record, batch: LoopBatch) -> dict[str, object]:
    """Return what a head comes to on a test set."""
    accuracy, steps = judged(record, head.setting, head.bound)
    ran = executed(net, head, batch, len(record.right))
    offline = accuracy, steps
    if head.setting.startswith("position"):
        offline = judged(record, head.setting, head.bound, 500)
    assert abs(ran[0] - offline[0]) < 0.005, (ran, offline)
    assert abs(ran[1] - offline[1]) < 0.1, (ran, offline)
    if head.setting.startswith("string"):
        accuracy, steps = ran
    best, count = fixed(record)
    each, low = record.right.all(2).double().mean(1), int(steps)
    equal = float(torch.lerp(each[low - 1], each[min(low, len(each) - 1)], steps - low))
    found = {"accuracy": accuracy, "steps": steps, "fixed": best, "fixed_steps": count, "equal": equal}
    return {key: f"{value:.4f}" for key, value in (found | {"share": steps / count}).items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="halting against fixed numbers of steps, on parity with resets"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = [dict(row) for row in read_rows(arguments.out)]
    for seed in arguments.seeds:
        if sum(row["seed"] == str(seed) for row in rows) == len(KINDS) * len(TESTS):
            continue
        rows = [row for row in rows if row["seed"] != str(seed)]
        net = trained(seed, arguments.updates)
        for parameter in net.parameters():
            parameter.requires_grad_(False)
        heads = heads_of(net, seed)
        validation = recorded(net, heads, strings(LENGTH, COUNT, 5000 + seed), TESTS[LENGTH])
        found = {kind: chosen(validation, kind) for kind in KINDS}
        del validation
        used = {each.setting: heads[each.setting] for each in found.values()}
        for length, most in TESTS.items():
            batch = strings(length, COUNT, 9000 + 100 * seed + length)
            record = recorded(net, used, batch, most)
            for kind, head in found.items():
                per = "example" if kind.startswith("string") else "position"
                own = with_head(net, heads[head.setting], per)
                row: dict[str, object] = {"seed": str(seed), "head": kind, "length": length}
                row |= {"setting": head.setting, "bound": f"{head.bound:.4f}"}
                rows.append(row | tested(own, head, record, batch))
                print(*rows[-1].values(), sep="\t", flush=True)
                write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
