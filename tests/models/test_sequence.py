from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn

from torchpact.nn.sequence import SequenceConfig, SequenceNet, sequence_nll


def test_a_plain_network_is_an_lstm_with_a_readout():
    torch.manual_seed(0)
    config = SequenceConfig(features=256, classes=256, symbols=True, embedding=6, hidden=7, adaptive=False)
    model = SequenceNet(replace(config, max_steps=1, layers=2))
    lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True)
    for index, layer in enumerate(model.rnn.layers):
        cell: Any = layer.cell
        with torch.no_grad():
            cell.weight_ih[:, -1] = 0
            for name in ("weight_hh", "bias_ih", "bias_hh"):
                getattr(lstm, f"{name}_l{index}").copy_(getattr(cell, name))
            getattr(lstm, f"weight_ih_l{index}").copy_(cell.weight_ih[:, :-1])
    x = torch.randint(256, (3, 9))
    logits, states, _ = model(x)
    torch.testing.assert_close(logits[:, :, 0], model.readout(lstm(model.entry(x))[0]))
    first, states, _ = model(x[:, :4])
    second, _, _ = model(x[:, 4:], states)
    torch.testing.assert_close(torch.cat([first, second], 1), logits)


def test_nll_is_that_of_the_answers_asked_for_over_the_time():
    logits = torch.randn(2, 3, 2, 5)
    targets = torch.tensor([[[0, 1], [-100, -100], [2, 3]], [[4, 0], [-100, 1], [-100, -100]]])
    expected = []
    for example, answers in zip(logits.log_softmax(-1), targets, strict=True):
        asked = [
            -example[t, o, answers[t, o]].item() for t in range(3) for o in range(2) if answers[t, o] >= 0
        ]
        expected.append(sum(asked) / 3)
    torch.testing.assert_close(sequence_nll(logits, targets), torch.tensor(expected))


def test_configurations_are_plain_values():
    config = SequenceConfig(features=8, cell="gru", max_steps=3)
    assert SequenceConfig(**asdict(config)) == config


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SequenceConfig(features=0), "expected features to be an integer of at least 1, got 0"),
        (lambda: SequenceConfig(8, symbols=True), "expected embedding to be an integer of at least 1, got 0"),
        (lambda: SequenceConfig(8, cell="cnn"), "expected cell to be one of rnn, gru, lstm; got 'cnn'"),  # type: ignore[arg-type]
        (lambda: SequenceConfig(8, max_steps=0), "expected max_steps to be an integer of at least 1, got 0"),
        (
            lambda: SequenceNet(SequenceConfig(8))(torch.zeros(2, 3, 7)),
            r"expected floats of shape \(batch, time, 8\), got torch.float32 \(2, 3, 7\)",
        ),
        (
            lambda: SequenceNet(SequenceConfig(8, symbols=True, embedding=3))(torch.zeros(2, 3)),
            r"expected symbols of shape \(batch, time\), got torch.float32 \(2, 3\)",
        ),
        (
            lambda: SequenceNet(SequenceConfig(8, layers=2)).unroll(torch.zeros(2, 1, 8)),
            "expected one time step and one layer, got 1 and 2",
        ),
        (
            lambda: sequence_nll(torch.zeros(2, 3, 4), torch.zeros(2, 3)),
            r"expected logits \(batch, time, outputs, classes\) and targets .* got \(2, 3, 4\) and \(2, 3\)",
        ),
    ],
)
def test_wrong_use_is_told_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
