import pytest
import torch

from tests.training.small import METHODS, config, images
from torchpact_recipes.training import Learner, Trainer
from torchpact_recipes.training.run_files import Event
from torchpact_recipes.training.state import derived_seed
from torchpact_recipes.training.variance import gradient_variance, gradients_of, undisturbed


@pytest.mark.parametrize("method", METHODS)
def test_training_goes_on_as_if_it_had_not_been_asked(method):
    data, states = images(), []
    for asked in (False, True):
        learner = Learner(config(method), data)
        for k in range(9):  # 8 batches an epoch: before the first, within one and at its end
            if asked and k in (0, 3, 8):
                gradient_variance(learner, 3)
            learner.advance()
        states.append(learner.state())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("method", ["relaxed", "reinforce"])
def test_is_the_variance_of_the_gradients(method):
    data, samples = images(), 5
    learner = Learner(config(method), data)
    for _ in range(2):
        learner.advance()
    found = gradient_variance(learner, samples)
    # the same by hand: all gradients side by side, in the same order of noise
    names = [name for name, _ in learner.model.named_parameters()]
    with undisturbed(learner):
        torch.manual_seed(derived_seed(0, "variance", 2))
        batch = learner.batch()
        same = [gradients_of(learner, *batch) for _ in range(samples)]
        others = [learner.batch(k) for k in range(samples)]
        total = [gradients_of(learner, *batch) for batch in others]

    def variance(gradients, of=lambda name: True):
        rows = [
            torch.cat([g.flatten() for name, g in zip(names, row, strict=True) if of(name)])
            for row in gradients
        ]
        return torch.stack(rows).double().var(0).mean().item()

    assert found["latents"] == pytest.approx(variance(same), rel=1e-4)
    assert found["halting"] == pytest.approx(variance(same, lambda name: ".halting." in name), rel=1e-4)
    assert found["total"] == pytest.approx(variance(total), rel=1e-4)


def test_without_noise_in_the_network_only_images_vary():
    found = gradient_variance(Learner(config("act"), images()), 4)
    assert found["latents"] == found["halting"] == 0
    assert found["total"] > 0
    assert "halting" not in gradient_variance(Learner(config("plain"), images()), 2)


def test_more_decisions_make_the_estimate_of_reinforce_noisier_than_the_relaxation():
    variance = {
        method: gradient_variance(Learner(config(method, tau=0.1), images()), 16)["latents"]
        for method in ("relaxed", "reinforce")
    }
    assert variance["reinforce"] > variance["relaxed"]


def test_a_run_has_it_in_its_history(tmp_path):
    trainer = Trainer(config(variance_samples=2, iterations=6), tmp_path, images(), images("test", 20))
    events: list[Event] = []
    trainer.report = events.append
    trainer.run()
    (validated,) = [event for event in events if event["kind"] == "validate"]
    assert set(validated["gradient_variance"]) == {"latents", "halting", "total"}
    with pytest.raises(ValueError, match="expected samples to be an integer of at least 2, got 1"):
        gradient_variance(trainer.learner, 1)
