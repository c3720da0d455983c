"""The comparison on stories, with a tiny decoder and made-up stories."""

import csv

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import torchpact as tp
from torchpact import criteria
from torchpact_recipes.data.stories import tell, told_stories
from torchpact_recipes.halting import stories, story_judging
from torchpact_recipes.halting.story_heads import asked, bound_for, learn_closeness, mean_layers, recorded
from torchpact_recipes.halting.story_judging import told
from torchpact_recipes.halting.story_runs import (
    Readout,
    StorySettings,
    divergence,
    ran,
    states_of,
    taught,
    thresholded,
)
from torchpact_recipes.halting.story_training import exits_loss, train_exits, words

LAYERS = 3
SETTINGS = StorySettings(
    updates=6, size=2, first=2.8, layers=2.0, others=5, head_updates=4, head_tokens=32, hidden=8
)


def decoder():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 20}
    config = LlamaConfig(num_hidden_layers=LAYERS, tie_word_embeddings=True, **sizes)
    net = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(4)
    return net, None


def made_up(net, count, length):
    return tell(net, count, 12, torch.Generator().manual_seed(1))


def adapted():
    return tp.adapt(decoder()[0], per="token", heads=criteria.MLP(hidden=8, normalize=True))


def test_stories_are_samples_of_the_network():
    net, _ = decoder()
    found = tell(net, 4000, 3, torch.Generator().manual_seed(0))
    with torch.no_grad():
        first = net(input_ids=found[:1, :1]).logits[0, 0].softmax(-1)
    counts = torch.bincount(found[:, 1], minlength=20) / len(found)
    # total variation of 4000 draws of 20 tokens is below 0.07 but once in more than a million
    assert float((counts - first).abs().sum()) / 2 < 0.07
    second = found[found[:, 1] == found[:, 1].mode().values]
    with torch.no_grad():
        then = net(input_ids=second[:1, :2]).logits[0, 1].softmax(-1)
    counts = torch.bincount(second[:, 2], minlength=20) / len(second)
    assert float((counts - then).abs().sum()) / 2 < 0.15


def test_more_stories_begin_with_the_same_ones(tmp_path):
    net, _ = decoder()
    few = told_stories(net, 5, 6, batch=4, root=tmp_path)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    more = told_stories(net, 11, 6, batch=4, root=tmp_path)
    assert torch.equal(more[:5], few)
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())
    with torch.no_grad():
        next(net.parameters()).add_(1)
    other = told_stories(net, 5, 6, batch=4, root=tmp_path)
    assert not torch.equal(other, few)  # another network


def test_a_readout_over_all_words_is_that_of_the_network():
    net, tokens = adapted(), made_up(decoder()[0], 3, 12)
    never = thresholded(net, tp.Thresholds("never"))
    with torch.no_grad():
        states, steps = states_of(ran(net, tokens, *never))
        expected = decoder()[0](input_ids=tokens).logits.log_softmax(-1)
    assert torch.allclose(Readout(net)(states[-1]), expected, atol=1e-5)
    assert torch.allclose(taught(decoder()[0], tokens), expected, atol=1e-5)
    assert torch.equal(steps, torch.full_like(tokens, LAYERS))


def spread_heads(net):
    torch.manual_seed(0)
    for name, p in net.named_parameters():
        if name.startswith("torchpact"):
            torch.nn.init.normal_(p)


def test_the_loss_is_of_the_exits_taken_and_a_little_of_those_passed_by():
    net, teacher, tokens = adapted(), decoder()[0], made_up(decoder()[0], 4, 12)
    spread_heads(net)
    bounds = tp.Thresholds(bound_for(net, tokens, 2.2, low=-30.0, high=30.0))
    readout = Readout(net)
    with torch.no_grad():
        ponders, target = ran(net, tokens, *thresholded(net, bounds)), taught(teacher, tokens)
        states, steps = states_of(ponders)
        assert len(steps.unique()) == LAYERS
        taken = 0.0
        passed: list[list[float]] = [[] for _ in range(LAYERS)]
        heads: list[list[float]] = [[] for _ in range(LAYERS - 1)]
        for row in range(4):
            for column in range(12):
                for layer in range(LAYERS):
                    kl = float(divergence(target[row, column], readout(states[layer][row, column])))
                    step = int(steps[row, column])
                    if layer + 1 == step:
                        taken += kl / tokens.numel()
                    elif layer + 1 < step:
                        passed[layer].append(kl / (kl + 0.5))
                    if layer + 1 <= step and layer + 1 < LAYERS:
                        said = float(asked(net, layer, states[layer][row, column].unsqueeze(0)))
                        off = abs(said + torch.tensor(kl + 1e-3).log().item())
                        heads[layer].append(off**2 / 2 if off < 1 else off - 0.5)
        expected = taken + 0.3 / LAYERS * sum(sum(each) / len(each) for each in passed if each)
        network, ours = exits_loss(net, readout, ponders, target, SETTINGS)  # samples are of all tokens here
    assert float(network) == pytest.approx(expected, rel=1e-4)
    assert float(ours) == pytest.approx(sum(sum(each) / len(each) for each in heads), rel=1e-3)


def test_gradients_of_heads_do_not_reach_the_network():
    net, tokens = adapted(), made_up(decoder()[0], 4, 12)
    spread_heads(net)
    bounds = tp.Thresholds(bound_for(net, tokens, 2.2, low=-30.0, high=30.0))
    ponders, target = ran(net, tokens, *thresholded(net, bounds)), taught(decoder()[0], tokens)
    network, heads = exits_loss(net, Readout(net), ponders, target, SETTINGS)
    named = dict(net.named_parameters())
    for loss, own in ((network, False), (heads, True)):
        found = torch.autograd.grad(loss, [*named.values()], retain_graph=True, allow_unused=True)
        reached = {name for name, g in zip(named, found, strict=True) if g is not None and bool(g.any())}
        assert reached
        assert all(name.startswith("torchpact") is own for name in reached)


def test_other_words_are_compared_besides_those_of_the_stories():
    tokens = torch.tensor([[1, 2], [3, 2]])
    found = words(tokens, SETTINGS, 20, seed=0)
    assert found[:3].tolist() == [1, 2, 3]
    assert len(found.unique()) == 8  # five others


def test_training_moves_weights_and_heads_and_brings_the_layers_down():
    net, teacher, tokens = adapted(), decoder()[0], made_up(decoder()[0], 40, 12)
    before = {name: x.detach().clone() for name, x in net.named_parameters()}
    bounds = []
    told_bounds = tp.Thresholds

    def noted(bound):
        bounds.append(bound)
        return told_bounds(bound)

    settings = StorySettings(
        updates=30,
        size=8,
        first=2.9,
        layers=1.5,
        ramp=0.5,
        others=5,
        head_updates=20,
        head_tokens=64,
        hidden=8,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchpact_recipes.halting.story_training.tp.Thresholds", noted)
        train_exits(net.train(), teacher, tokens, settings, seed=0)
    assert {name.split(".")[0] for name, x in net.named_parameters() if not x.equal(before[name])} == {
        "model",
        "torchpact",
    }
    assert 1.0 <= mean_layers(net, tokens, told_bounds(bounds[-1])) < 2.3


def test_heads_are_trained_alone_and_the_record_is_that_of_a_run():
    net, teacher, tokens = adapted(), decoder()[0], made_up(decoder()[0], 8, 12)
    vocabulary = torch.arange(20)
    states, losses = recorded(net, teacher, tokens, vocabulary, size=3)
    assert states.shape == (LAYERS, 96, 16)
    assert losses.shape == (LAYERS, 96)
    assert float(losses[-1].abs().max()) < 1e-2  # the untrained network is the teacher, in bfloat16
    before = {name: x.clone() for name, x in net.state_dict().items()}
    learn_closeness(net, teacher, tokens, vocabulary, SETTINGS, seed=0)
    moved = {name for name, x in net.state_dict().items() if not torch.equal(x, before[name])}
    assert moved
    assert all(name.startswith("torchpact") for name in moved)


def test_one_bound_meets_the_layers_from_below():
    net, tokens = adapted(), made_up(decoder()[0], 8, 12)
    spread_heads(net)
    layers = mean_layers(net, tokens, tp.Thresholds(bound_for(net, tokens, 2.0, low=-30.0, high=30.0)))
    assert 1.7 < layers <= 2.0


def test_the_whole_comparison_runs_and_what_is_there_is_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr(stories, "TEST", 6)
    monkeypatch.setattr(stories, "VALIDATION", 4)
    monkeypatch.setattr(stories, "LENGTH", 12)
    monkeypatch.setattr(story_judging, "CURVE", (2.0, 2.5))
    work = stories.Stories(tmp_path / "work", SETTINGS, 16, decoder, made_up)
    stories.validated(work, 0)
    story_judging.write(work, [0], tmp_path / "out", students=(2,), part="test")
    monkeypatch.setattr(stories, "train_exits", None)
    monkeypatch.setattr(stories, "train_student", None)
    again = stories.Stories(tmp_path / "work", SETTINGS, 16, decoder, made_up)
    one = told(again.exits(0), again.test, *thresholded(again.exits(0), tp.Thresholds("never")))
    with (tmp_path / "out" / "stories.csv").open() as file:
        rows = {row["network"]: row for row in csv.DictReader(file)}
    assert {"full", "heads", "random", "confidence", "patience", "oracle", "student of 2 layers"} <= set(rows)
    assert float(rows[f"all leave after layer {LAYERS}"]["loss"]) == pytest.approx(
        float(one.by_story.mean()), abs=2e-3
    )
    assert float(rows["heads"]["layers"]) <= 2.3
    assert float(rows["oracle"]["loss"]) <= min(
        float(row["loss"]) for name, row in rows.items() if name.startswith("all") and name[-1] != "1"
    )


def test_losses_are_those_of_the_next_token():
    net, _ = decoder()
    tokens = made_up(net, 2, 12)
    with torch.no_grad():
        logits = net(input_ids=tokens).logits
    expected = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    found = told(net, tokens)
    assert float(found.losses.mean()) == pytest.approx(float(expected), abs=2e-2)  # in bfloat16
    assert found.layers == LAYERS
