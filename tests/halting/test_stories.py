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
from torchpact_recipes.halting.story_heads import bound_for, learn_to_halt, mean_layers, recorded
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
from torchpact_recipes.halting.story_training import exits_loss, last_loss

LAYERS = 3
SETTINGS = StorySettings(
    updates=6, own=2, size=2, histogram=(0.3, 0.3, 0.4), head_updates=4, head_tokens=32, hidden=8, layers=2.0
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


def test_the_loss_of_exits_counts_tokens_at_the_exits_that_they_got_to():
    net, teacher, tokens = adapted(), decoder()[0], made_up(decoder()[0], 4, 12)
    torch.manual_seed(3)
    drawn = tp.use_heads(net, criteria.RandomExit([0.3, 0.3, 0.4])), tp.use_mode(net, "discrete")
    with torch.no_grad():
        ponders, target = ran(net, tokens, *drawn), taught(teacher, tokens)
        states, steps = states_of(ponders)
        expected = 0.0
        for row in range(4):
            for column in range(12):
                for layer in range(1, int(steps[row, column])):  # the first exit has share 0 below
                    ours = Readout(net)(states[layer][row, column])
                    expected += float(divergence(target[row, column], ours)) / tokens.numel()
        found = exits_loss(Readout(net), ponders, target, (0.0, 0.5, 0.5))
        assert len(steps.unique()) == LAYERS
        assert float(found) == pytest.approx(expected, rel=1e-4)
        own = [divergence(target, Readout(net)(each)) for each in states]
        left = torch.stack(own).gather(0, (steps - 1).unsqueeze(0)).mean()
        assert float(last_loss(Readout(net), ponders, target)) == pytest.approx(float(left), rel=1e-4)


def test_heads_are_trained_alone_and_the_record_is_that_of_a_run():
    net, teacher, tokens = adapted(), decoder()[0], made_up(decoder()[0], 8, 12)
    vocabulary = torch.arange(20)
    states, losses = recorded(net, teacher, tokens, vocabulary, size=3)
    assert states.shape == (LAYERS, 96, 16)
    assert losses.shape == (LAYERS, 96)
    assert float(losses[-1].abs().max()) < 1e-2  # the untrained network is the teacher, in bfloat16
    before = {name: x.clone() for name, x in net.state_dict().items()}
    learn_to_halt(net, teacher, tokens, vocabulary, SETTINGS, seed=0)
    moved = {name for name, x in net.state_dict().items() if not torch.equal(x, before[name])}
    assert moved
    assert all(name.startswith("torchpact") for name in moved)


def test_one_bound_meets_the_layers_from_below():
    net, tokens = adapted(), made_up(decoder()[0], 8, 12)
    torch.manual_seed(0)
    for name, p in net.named_parameters():
        if name.startswith("torchpact"):
            torch.nn.init.normal_(p)
    bounds = bound_for(net, tokens, 2.0, low=-30.0, high=30.0)
    layers = mean_layers(net, tokens, bounds)
    assert 1.7 < layers <= 2.0


def test_the_whole_comparison_runs_and_what_is_there_is_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr(stories, "TEST", 6)
    monkeypatch.setattr(stories, "VALIDATION", 4)
    monkeypatch.setattr(stories, "LENGTH", 12)
    monkeypatch.setattr(story_judging, "CURVE", (2.0, 2.5))
    work = stories.Stories(tmp_path / "work", SETTINGS, 16, decoder, made_up)
    stories.validated(work, 0)
    story_judging.write(work, [0], tmp_path / "out", students=(2,))
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
