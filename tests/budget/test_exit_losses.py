"""What exits give, against a loop that pins each exit and runs the whole network for it."""

import math

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.budget.networks import Classifier, Tokens, with_random_heads
from tests.budget.test_distill import batches, network, states
from torchpact.budget import exit_losses
from torchpact.budget.exit_states import replaced
from torchpact.core.halting_module import halting_modules


def of_classes(output, batch):
    logits = output.logits if hasattr(output, "logits") else output
    labels = (batch["input_ids"] if isinstance(batch, dict) else batch)[:, 0].long() % 2
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def of_next_tokens(output, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    loss = nn.functional.cross_entropy(output.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return loss.masked_fill(mask[:, 1:] == 0, math.nan)


def of_states(output, batch):
    return output.square().mean((1, 2))


CASES = {
    "block": (Classifier, lambda: [torch.randn(6, 8) for _ in range(4)], of_classes),
    "example": (
        lambda: tp.adapt(network("classifier"), per="example"),
        lambda: batches("classifier", 4),
        of_classes,
    ),
    "token": (lambda: tp.adapt(network("decoder")), lambda: batches("decoder", 4), of_next_tokens),
    "two blocks": (lambda: with_random_heads(Tokens()), lambda: states(4), of_states),
}


def called(net, batch):
    return net(**batch) if isinstance(batch, dict) else net(batch)


def at_exit(net, name, step):
    """Return thresholds at which one block halts after a step, and others after their last."""
    return tp.Thresholds(
        {
            each: [
                tp.Thresholds.ALWAYS if each == name and index >= step else tp.Thresholds.NEVER
                for index in range(1, block.max_steps)
            ]
            for each, block in halting_modules(net).items()
        }
    )


@pytest.mark.parametrize("case", CASES)
def test_losses_and_costs_of_exits_are_those_of_whole_runs_pinned_there(case, monkeypatch):
    torch.manual_seed(0)
    make, given, loss = CASES[case]
    net, given = make().eval(), given()
    blocks = halting_modules(net)
    readouts: dict[nn.Module, list[torch.Tensor]] = {block: [] for block in blocks.values()}

    def noted(block, weights):
        readouts[block].append(weights)
        return replaced(block, weights)

    monkeypatch.setattr(exit_losses, "replaced", noted)
    found = exit_losses.exits_by_block(net, given, loss, None, None)
    assert [exits.name for exits in found] == [*blocks]
    for exits in found:
        block = blocks[exits.name]
        early = exits.steps - 1
        for step in range(1, exits.steps + 1):
            losses, fitted, flops, plain, counts = [], [], [], [], []
            for half, batch in [(number, each) for number in (0, 1) for each in given[number::2]]:
                pinned = tp.use_thresholds(net, at_exit(net, exits.name, step))
                with torch.no_grad(), tp.use_mode(net, "thresholded"), pinned:
                    each = loss(called(net, batch), batch)
                    counted = tp.count_flops(net, batch)
                    if step <= early:  # read-outs were put in batch by batch, two batches a half
                        with replaced(block, readouts[block][2 * half * early + step - 1]):
                            through = loss(called(net, batch), batch)
                    else:
                        through = each
                real = ~each.isnan()
                losses.append(each[real])
                fitted.append(through[real])
                flops.append(counted.total.double())
                plain.append(counted.plain)
                counts.append(real.reshape(len(real), -1).sum(1))
            torch.testing.assert_close(exits.raw[step - 1], torch.cat(losses), rtol=1e-6, atol=1e-7)
            assert exits.readout is not None
            torch.testing.assert_close(exits.readout[step - 1], torch.cat(fitted), rtol=1e-6, atol=1e-7)
            share, many = torch.cat(flops) / (sum(plain) / len(plain)), torch.cat(counts)
            if int(many.max()) > 1:  # positions cost what their half does in the mean
                halves = [(s * c).sum() / c.sum() for s, c in zip(share.chunk(2), many.chunk(2), strict=True)]
                share = torch.stack(halves).repeat_interleave(torch.stack([c.sum() for c in many.chunk(2)]))
            torch.testing.assert_close(exits.costs[step - 1], share, rtol=1e-12, atol=0)


def counted_calls(layers):
    """Return how often each of some layers computes, counted from now on."""
    count = [0] * len(layers)
    for index, layer in enumerate(layers):
        layer.linear1.register_forward_hook(lambda *_, at=index: count.__setitem__(at, count[at] + 1))
    return count


# with four batches: one run of each for halting logits, one for exits and one for exits through read-outs;
# one a half to count FLOPs, and one to count those after blocks
RUNS = 3 * 4 + 2 + 1


@pytest.mark.parametrize("layers", [2, 5])
def test_layers_run_as_often_however_many_exits_there_are(layers):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, dropout=0.0)
    net = tp.adapt(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), per="example")
    count = counted_calls(net.layers)
    tp.diagnose(net, states(4))
    assert count == [RUNS] * layers


def test_of_two_blocks_only_the_second_runs_again_for_exits_of_the_first():
    net = with_random_heads(Tokens(layers=3))
    count = counted_calls([*net.first.layers, *net.second.layers])
    tp.diagnose(net, states(4))
    assert (
        count == [RUNS] * 3 + [RUNS + 2 * 4 * 2] * 3
    )  # two exits before the last, raw and through read-outs
