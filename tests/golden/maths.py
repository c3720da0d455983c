"""Cases of the functions on tensors: halting distributions, the prior, objectives, svo."""

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

import torchpact as tp
from tests.golden.common import Case, fill, flat, uniform
from tests.golden.digest import Fields


def halting() -> Fields:
    logits = (uniform(5, 3, 4) * 2).requires_grad_()
    h = logits.sigmoid()
    fields: Fields = {}
    for dim in (0, 1, -1):
        fields[f"stick.{dim}"] = tp.stick_breaking(h, dim)
        fields[f"log.{dim}"] = tp.log_stick_breaking(logits, dim)
        fields[f"expected.{dim}"] = tp.expected_steps(h, dim)
        fields |= flat(f"act.{dim}", tp.act_halting(h, 0.1, dim))
    total = sum(x.square().sum() for x in (tp.stick_breaking(h), tp.expected_steps(h), tp.act_halting(h)[3]))
    total = total + tp.log_stick_breaking(logits).sum()
    fields["grad"] = torch.autograd.grad(total, logits)[0]
    extreme = torch.tensor([-200.0, 200.0, 0.0, 5.0, -torch.inf, torch.inf])
    fields |= {"extreme": tp.log_stick_breaking(extreme), "half": tp.stick_breaking(h.detach().half())}
    ties = tp.act_halting(torch.tensor([[0.5, 0.25, 0.99], [0.5, 0.74, 0.5], [0.5, 0.5, 0.5]]))
    return fields | flat("ties", ties)


def prior() -> Fields:
    fields: Fields = {}
    taus: dict[str, float | Tensor] = {
        "number": 0.3,
        "uniform": 0.0,
        "batch": torch.tensor([[0.1, 2.0, 40.0]]),
    }
    for name, tau in taus.items():
        p = tp.TruncatedGeometric(tau, max_steps=5)
        z = p.enumerate_support()
        torch.manual_seed(0)
        fields |= flat(name, {"z": z, "log": p.log_prob(z), "probs": p.probs, "entropy": p.entropy()})
        fields |= flat(name, {"mean": p.mean, "variance": p.variance, "mode": p.mode})
        fields[f"{name}.drawn"] = p.sample((9,))
    wide = tp.TruncatedGeometric(0.3, 5).expand((2, 3))
    return fields | {"expanded": wide.log_prob(torch.full((2, 3), 2.0))}


def objectives() -> Fields:
    losses, logits = uniform(5, 4).square(), uniform(5, 4, seed=1).requires_grad_()
    fields: Fields = {}
    for tau, beta in ((0.0, 0.01), (0.5, 0.01), (0.2, 1.0)):
        loss = tp.ponder_loss(losses, logits, tau=tau, beta=beta)
        fields |= {f"{tau}.{beta}": loss, f"{tau}.{beta}.grad": torch.autograd.grad(loss, logits)[0]}
    block = fill(tp.AdaptiveBlock(nn.Tanh(), nn.Linear(6, 1), max_steps=4, mode="discrete"))
    torch.manual_seed(1)
    baseline = tp.EMABaseline(decay=0.5)
    for turn in range(3):
        output, ponder = block(uniform(7, 6, seed=turn))
        nll = output.square().sum(1)
        two = [ponder, ponder]
        loss = tp.reinforce_loss(nll, two, torch.tensor([0.1, 0.2]), baseline)
        fields |= {f"reinforce.{turn}": loss, f"map.{turn}": tp.map_loss(nll, two, [0.1, 0.3])}
        fields |= {f"plain.{turn}": tp.reinforce_loss(nll, ponder, 0.1)}
        fields |= {f"total.{turn}": baseline.total.clone(), f"weight.{turn}": baseline.weight.clone()}
        fields |= {f"number.{turn}": tp.reinforce_loss(nll, ponder, 0.1, baseline=-2.0)}
    return fields


def quadratic(z: Tensor) -> Tensor:
    target = torch.tensor([0.3, 0.9, -0.4, 0.7])
    return -((z - target) ** 2 * torch.tensor([1.0, 2.0, 0.5, 1.5])).sum(-1) + z[..., 0] * z[..., 1]


FAMILIES = {
    "normal": lambda: tp.svo.NormalVector(4, scale=0.8),
    "bernoulli": lambda: tp.svo.BernoulliVector(4),
    "chain": lambda: tp.svo.LinearChain(4),
}
PAIRS = {
    "normal": ("reparameterization", "reinforce"),
    "bernoulli": ("reinforce", "concrete"),
    "chain": ("reinforce", "concrete"),
}


def maximised() -> Fields:
    fields: Fields = {"estimators": " ".join(sorted(tp.svo.ESTIMATORS))}
    for family, estimators in PAIRS.items():
        for estimator in estimators:
            q = FAMILIES[family]()
            found = tp.svo.maximize(quadratic, q, estimator, iterations=20, samples=8, seed=3)
            name = f"{family}.{estimator}"
            fields |= flat(name, vars(found)) | {f"{name}.q.{key}": x for key, x in q.state_dict().items()}
    return fields


def statistics() -> Fields:
    fields: Fields = {}
    for family, estimators in PAIRS.items():
        for estimator in estimators:
            torch.manual_seed(4)
            q = fill(FAMILIES[family]())
            found = tp.svo.gradient_statistics(quadratic, q, estimator, samples=60, chunk=40)
            fields |= flat(f"{family}.{estimator}", found)
            fields[f"{family}.{estimator}.error"] = found.standard_error
    for name, baseline in {"none": None, "ema": tp.EMABaseline(0.5)}.items():
        torch.manual_seed(4)
        given = tp.svo.Reinforce(baseline)
        found = tp.svo.gradient_statistics(quadratic, tp.svo.BernoulliVector(4), given, 60, 40)
        fields |= flat(f"baseline.{name}", found)
    return fields


def families() -> Fields:
    fields: Fields = {}
    for name, make in FAMILIES.items():
        q: Distribution = fill(make())()
        torch.manual_seed(4)
        z = q.sample((6,))
        fields |= {f"{name}.sample": z, f"{name}.log": q.log_prob(z), f"{name}.mode": q.mode}
        if name != "normal":
            fields |= {f"{name}.relaxed": tp.svo.Concrete(0.5).sample(q, 6)}
    chain = tp.svo.ChainedBernoulli(lambda before: before.sum(1) - 0.5, length=3)
    fields |= {"own.relaxed": chain.relaxed_rsample(0.5, (4,)), "own.mode": chain.mode}
    return fields | {"own.log": chain.log_prob(torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))}


CASES = [
    Case("maths-halting", halting),
    Case("maths-prior", prior),
    Case("maths-objectives", objectives),
    Case("svo-maximize", maximised),
    Case("svo-statistics", statistics),
    Case("svo-families", families),
]
