"""Distillation to a budget: exits, heads, calibration; what it keeps, what it refuses, what it resumes."""

import itertools
import math

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.budget.networks import Classifier, Tokens
from torchpact.budget.exit_outputs import exit_run
from torchpact.core.call_args import call_args
from torchpact.core.halting_module import halting_modules

SHORT = tp.budget.DistillConfig(exit_updates=6, head_updates=6, check_every=3, lr=1e-3)
WORDS = 30


def network(name):
    """A tiny network of random weights, large enough for layers to matter."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    text = {"vocab_size": WORDS, **sizes}
    made = {
        "encoder": lambda: transformers.BertModel(transformers.BertConfig(**text)),
        "classifier": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**text)),
        "decoder": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**text)),
        "vit": lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=8, patch_size=4, **sizes)
        ),
    }[name]()
    for module in made.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.25)
    return made.eval()


def batches(name, count=5, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return [{"pixel_values": torch.randn(size, 3, 8, 8, generator=generator)} for _ in range(count)]
    found = []
    for _ in range(count):
        mask = torch.ones(size, 7, dtype=torch.long)
        mask[1::2, 4:] = 0
        ids = torch.randint(1, WORDS, (size, 7), generator=generator)
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def encoder(layers=3):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def states(count=5, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 5, 16, generator=generator) for _ in range(count)]


def share(ada, given):
    """The mean cost over batches of equal size."""
    return sum(float(tp.count_flops(ada, each).share) for each in given) / len(given)


NAMES = ("encoder", "classifier", "decoder", "vit")


@pytest.mark.parametrize("name", NAMES)
def test_outputs_of_exits_are_those_of_runs_that_are_pinned_there(name):
    net = tp.adapt(network(name))
    (batch,) = batches(name, 1)
    (run,) = halting_modules(net)
    with torch.no_grad():
        found = exit_run(net, call_args(batch))
        for step in (1, 2, 3):
            with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, tp.exit_thresholds(net, step)):
                expected = net(**batch)
            torch.testing.assert_close(found.output_at({run: step})[0], expected[0], rtol=0, atol=1e-6)
    with torch.no_grad(), tp.use_thresholds(net, tp.Thresholds("never")):  # and nothing is left in it
        torch.testing.assert_close(net(**batch)[0], found.output[0], rtol=0, atol=0)


def test_outputs_of_exits_have_the_gradients_of_runs_that_are_pinned_there():
    net = tp.adapt(encoder())
    (x,) = states(1)
    output = exit_run(net, call_args(x)).output_at({"layers": 2})
    output.square().sum().backward()
    first = net.layers[0].linear1.weight.grad.clone()
    assert net.layers[2].linear1.weight.grad is None
    net.zero_grad()
    u = net.layers[1](tp.unadapt(net).layers[0](x))
    u.square().sum().backward()
    torch.testing.assert_close(net.layers[0].linear1.weight.grad, first)


def test_outputs_of_exits_of_several_blocks_are_those_of_pinned_runs():
    net = tp.adapt(Tokens())
    (x,) = states(1)
    seen = []
    with torch.no_grad():
        run = exit_run(net, call_args(x))
        for name in ("first", "second"):
            net.get_submodule(name).layers[0].linear1.register_forward_hook(
                lambda *_, name=name: seen.append(name)
            )
        for one, other in itertools.product((1, 2, 3), repeat=2):
            seen.clear()
            output = run.output_at({"first.layers": one, "second.layers": other})
            # what comes before the first early exit does not run again
            assert seen == (["second"] if one < 3 else [])
            u = x
            for layer in [*net.first.layers[:one], *net.second.layers[:other]]:
                u = layer(u)
            torch.testing.assert_close(output, net.last(u))


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_a_pretrained_network_meets_its_budget_on_held_out_batches(name):
    net, given = network(name), batches(name)
    before = {key: x.clone() for key, x in net.state_dict().items()}
    ada = tp.distill(net, given[:4], 0.7, held_out=given[4:], config=SHORT)
    assert share(ada, given[4:]) <= 0.7 * (1 + 1e-9)
    assert all(torch.equal(x, before[key]) for key, x in net.state_dict().items())
    assert not halting_modules(net)
    assert not ada.training
    assert all(run.bounds is not None for run in ada.torchpact.runs)


@pytest.mark.parametrize("make", [Tokens, Classifier])
def test_networks_of_several_runs_and_of_blocks_meet_their_budgets(make):
    given = states() if make is Tokens else [torch.randn(4, 8) for _ in range(5)]
    ada = tp.distill(make(), given[:4], 0.7, held_out=given[4:], config=SHORT, logits=True)
    with tp.use_mode(ada, "thresholded"):
        assert share(ada, given[4:]) <= 0.7 * (1 + 1e-9)


def test_training_of_exits_lowers_their_held_out_loss():
    net, given = encoder(), states(12, 16)
    config = tp.budget.DistillConfig(exit_updates=80, head_updates=0, check_every=20, lr=3e-3)

    def loss_at(ada, step):
        with (
            torch.no_grad(),
            tp.use_mode(ada, "thresholded"),
            tp.use_thresholds(ada, tp.exit_thresholds(ada, step)),
        ):
            output = torch.cat([ada(x) for x in given[10:]])
        target = torch.cat([net(x) for x in given[10:]]).detach()
        return float((output - target).square().sum() / target.square().sum())

    ada = tp.distill(net, given[:10], 0.8, held_out=given[10:], config=config)
    before = tp.adapt(encoder())
    assert loss_at(ada, 1) < 0.5 * loss_at(before, 1)
    assert loss_at(ada, 3) < 0.02


def test_labels_come_in_by_a_loss_of_ones_own():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Classifier())
    x = [torch.randn(64, 8) for _ in range(6)]
    given = [(each, (each[:, 0] > 0).long()) for each in x]

    def loss(output, teacher, batch):
        assert teacher.shape == output.shape
        return nn.functional.cross_entropy(output, batch[1], reduction="none")

    config = tp.budget.DistillConfig(exit_updates=150, head_updates=50, lr=1e-2, check_every=30)
    ada = tp.distill(net, given, 0.6, loss=loss, inputs=lambda batch: batch[0], config=config)
    with torch.no_grad(), tp.use_mode(ada, "thresholded"):
        right = torch.cat([ada(each).argmax(1) == labels for each, labels in given]).float().mean()
    assert right > 0.9


def test_a_frozen_network_keeps_its_weights_and_trains_its_heads():
    net = encoder()
    ada = tp.distill(net, states(), 0.8, frozen=True, config=SHORT)
    for name, weight in net.state_dict().items():
        assert torch.equal(ada.state_dict()[name], weight)
    assert any(bool(head.weight.any()) for head in ada.torchpact.runs[0].heads)


def test_heads_separate_examples_that_are_solved_early_from_others():
    """A block that does nothing to examples whose first feature is positive: these leave at once."""

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.move = nn.Linear(16, 16, bias=False)
            self.move.weight.data[0] = 0.0

        def forward(self, u):
            return u + self.move((u[:, :1] <= 0) * torch.ones_like(u))

    torch.manual_seed(0)
    heads = [nn.Linear(16, 1) for _ in range(3)]
    for head in heads:
        nn.init.zeros_(head.weight)
        nn.init.constant_(head.bias, -5.0)
    block = tp.AdaptiveBlock([Step() for _ in range(4)], heads)
    given = [torch.randn(64, 16) for _ in range(6)]
    config = tp.budget.DistillConfig(head_updates=300, head_lr=0.05)
    ada = tp.distill(block, given[:4], 0.7, held_out=given[4:], frozen=True, config=config)
    x = torch.cat(given[4:])
    with torch.no_grad():
        _, ponder = ada(x, mode="thresholded")
    steps = ponder.steps.flatten().float()
    assert steps[x[:, 0] > 0].mean() < 1.5 < 3.5 < steps[x[:, 0] <= 0].mean()


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, second, third = (
        tp.distill(encoder(), states(), 0.7, config=config).state_dict()
        for config in (SHORT, SHORT, tp.budget.DistillConfig(**{**SHORT.__dict__, "seed": 1}))
    )
    assert all(torch.equal(x, second[name]) for name, x in first.items())
    assert any(not torch.equal(x, third[name]) for name, x in first.items())


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    net, given = encoder(), states()
    torch.manual_seed(3)
    tp.distill(net, given, 0.7, config=SHORT)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_outputs_among_halted_tokens_are_those_of_a_run_with_these_decisions():
    net = tp.adapt(network("decoder"))
    (batch,) = batches("decoder", 1)
    (run,) = halting_modules(net)
    with torch.no_grad():
        torch.manual_seed(5)
        found = exit_run(net, call_args(batch), (0.3, 0.3, 0.4))
        with tp.use_heads(net, tp.criteria.RandomExit((0.3, 0.3, 0.4))), tp.use_mode(net, "discrete"):
            torch.manual_seed(5)
            with tp.collect(net, exits=True) as ponders:
                expected = net(**batch).logits
        kept = ponders[0].exits
        assert kept is not None
        for step in (1, 2):
            by_hand = net.lm_head(net.model.norm(kept.states[step - 1]))
            torch.testing.assert_close(found.output_at({run: step}).logits, by_hand, rtol=0, atol=1e-6)
    assert torch.equal(found.ponders[0].steps, ponders[0].steps)
    assert len(ponders[0].steps.unique()) == 3
    torch.testing.assert_close(found.output.logits, expected, rtol=0, atol=0)


def test_exits_of_share_0_are_not_trained():
    shares = (0.0, 0.5, 0.5)
    config = tp.budget.DistillConfig(exit_updates=3, head_updates=0, lr=1e-2, exit_shares=shares)
    seen = []

    def loss(output, teacher, batch):
        seen.append(output)
        return (output - teacher).square().mean((1, 2))

    tp.distill(encoder(), states(2), 0.9, loss=loss, config=config, progress=lambda _: seen.append(None))
    first = seen.index(None)
    calls = "".join("|" if each is None else "o" for each in seen[first:]).split("|")
    assert [len(each) for each in calls[1:3]] == [2, 2 + 3]  # two an update; at the end three held out
    with pytest.raises(ValueError, match="exit_shares of 3 steps that sum to 1, got 2"):
        tp.distill(encoder(), states(2), 0.9, config=tp.budget.DistillConfig(exit_shares=(0.5, 0.5)))


def test_training_ends_early_where_nothing_gets_better():
    seen: list[tp.budget.Progress] = []
    config = tp.budget.DistillConfig(exit_updates=50, head_updates=0, check_every=1, patience=3, lr=50.0)
    ada = tp.distill(encoder(), states(), 0.7, config=config, progress=seen.append)
    exits = [each for each in seen if each.stage == "exits"]
    assert exits[-1].done == 3
    for name, weight in encoder().state_dict().items():  # the best were those before
        assert torch.equal(ada.state_dict()[name], weight)


def test_a_network_that_already_fits_is_trained_by_another_teacher():
    teacher, given = encoder(4), states()
    ada = tp.distill(encoder(2), given, 0.9, teacher=teacher, config=SHORT)
    assert len(ada.layers) == 2


def nan_loss(output, teacher, batch):
    return torch.full((len(batch),), math.nan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0.01}, r"expected a budget of 0\.\d+ to 1 of the FLOPs, the least being one step"),
        ({"budget": 1.5}, r"expected flops .* got 1.5"),
        ({"budget": math.nan}, r"expected flops .* got nan"),
        ({"batches": []}, "expected batches to train on and to hold out, got 0 and 0"),
        ({"batches": states(1)}, "expected batches to train on and to hold out, got 1 and 0"),
        (
            {"batches": [*states(2), torch.zeros(0, 5, 16)]},
            "expected batches with examples, got none in batch 3",
        ),
        ({"loss": nan_loss}, "expected finite losses, got 4 of 4 that are not"),
        ({"loss": lambda o, t, b: o.mean()}, "expected a loss of each of 4 examples"),
        ({"budget": tp.Budget({"layers": 0.5})}, "expected a budget for all blocks together"),
    ],
)
def test_what_cannot_be_distilled_is_refused_in_one_line(change, message):
    settings = {"budget": 0.7, "batches": states(), "config": SHORT, **change}
    with pytest.raises(ValueError, match=message) as caught:
        tp.distill(encoder(), settings.pop("batches"), settings.pop("budget"), **settings)
    assert "\n" not in str(caught.value)


def test_losses_that_become_nan_in_training_say_where():
    calls = []

    def loss(output, teacher, batch):
        calls.append(1)
        value = (output - teacher).square().mean((1, 2))
        return value * math.nan if len(calls) > 12 else value

    with pytest.raises(ValueError, match=r"expected finite losses.*in update \d of the exits"):
        tp.distill(encoder(), states(), 0.7, loss=loss, config=SHORT)


def test_numbers_of_a_config_are_checked():
    with pytest.raises(ValueError, match="lr"):
        tp.budget.DistillConfig(lr=0.0)
    with pytest.raises(ValueError, match="patience"):
        tp.budget.DistillConfig(patience=0)
