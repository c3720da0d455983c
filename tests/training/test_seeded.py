"""Evaluation draws by its own seed and leaves the program's generator alone."""

import torch

from tests.training.small import config, images
from torchpact.models import SequenceNet, build
from torchpact_recipes.data import Parity
from torchpact_recipes.training.evaluate import evaluate
from torchpact_recipes.training.sequence_config import network_for
from torchpact_recipes.training.sequence_evaluate import evaluate_on_task
from torchpact_recipes.training.text import evaluate_on_text


def _after(evaluation):
    torch.manual_seed(5)
    found = evaluation()
    return found, torch.rand(3)


def test_evaluation_does_not_disturb_who_draws_beside_it():
    torch.manual_seed(5)
    undisturbed = torch.rand(3)
    net = build(config().network, "discrete")
    parity = SequenceNet(network_for("parity", {"size": 4}, "relaxed", hidden=8, max_steps=3), "discrete")
    text = SequenceNet(network_for("enwik8", {}, "relaxed", hidden=8, embedding=4, max_steps=2), "discrete")
    characters = torch.randint(0, 256, (400,), dtype=torch.uint8)
    data = images("test", 20)
    for evaluation in (
        lambda: evaluate(net, data),
        lambda: evaluate_on_task(parity, Parity(4), count=64),
        lambda: evaluate_on_text(text, characters, batch=2, window=20),
    ):
        (one, drawn), (two, _) = _after(evaluation), _after(evaluation)
        assert one == two
        assert torch.equal(drawn, undisturbed)
