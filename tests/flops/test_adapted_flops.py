"""FLOPs of adapted networks, against sums written by hand."""

import pytest
import torch

import torchpact as tp

transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZE, HIDDEN, LAYERS = 32, 48, 4
LENGTHS = [7, 4, 1]


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=HIDDEN,
        vocab_size=50,
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def batch(padded=True):
    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    inputs = {"input_ids": torch.randint(50, (3, 7))}
    return inputs | {"attention_mask": mask.long()} if padded else inputs


def layer(active, real):
    """Keys and values of real tokens; queries, attention, output and MLP of active ones."""
    if not active:
        return 0
    products = 2 * SIZE * SIZE * (2 * real + 2 * active)
    return products + 4 * active * real * SIZE + 4 * active * SIZE * HIDDEN


def heads(active):
    return 2 * SIZE * active


def with_random_heads(net, **options):
    ada = tp.adapt(net, **options)
    for head in ada.torchpact.runs[0].heads:
        torch.nn.init.normal_(head.weight, std=1.5)
        torch.nn.init.zeros_(head.bias)
    return ada


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_that_run_a_layer_are_charged_and_padding_is_not(padded):
    ada, given = with_random_heads(bert()), batch(padded)
    with torch.no_grad(), tp.collect(ada) as ponders:
        ada(**given)
    steps = ponders[0].steps.squeeze(2)
    lengths = LENGTHS if padded else [7] * 3
    expected = []
    for example, real in zip(steps, lengths, strict=True):
        active = [int((example[:real] > index).sum()) for index in range(LAYERS)]
        asked = sum(heads(count) for count in active[:-1])
        expected.append(sum(layer(count, real) for count in active) + asked)
    assert 1 < float(steps.float().mean()) < LAYERS
    count = tp.count_flops(ada, given)
    assert count.blocks.squeeze(1).tolist() == expected
    assert count.rest == 0


def test_examples_that_run_a_layer_are_charged_for_their_real_tokens():
    ada, given = with_random_heads(bert(), per="example"), batch()
    with torch.no_grad(), tp.collect(ada) as ponders:
        ada(**given)
    steps = ponders[0].steps.flatten().tolist()
    expected = [steps[i] * layer(n, n) for i, n in enumerate(LENGTHS)]
    # a head is one product an example
    asked = [2 * SIZE * min(steps[i], LAYERS - 1) for i in range(3)]
    assert tp.count_flops(ada, given).blocks.squeeze(1).tolist() == [
        a + b for a, b in zip(expected, asked, strict=True)
    ]


def test_before_it_is_adapted_a_network_costs_as_much_without_its_heads():
    net, given = bert(), batch(padded=False)
    plain = tp.count_flops(net, given).total
    ada = tp.adapt(net)
    asked = (LAYERS - 1) * 7 * heads(1)
    assert torch.equal(tp.count_flops(ada, given).total, plain + asked)
