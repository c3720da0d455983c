"""The Trainer of transformers with adapted networks: gradients, logs, evaluation, checkpoints."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import torchpact as tp
from tests.integrations.networks import apart, batch, bert

pytest.importorskip("transformers", reason="its Trainer is what is tested")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from torchpact.integrations.transformers import (
    PonderCallback,
    PonderMixin,
    ignores_item_count,
    price_scale,
)

TAU = 0.1


class AdaptiveTrainer(PonderMixin, Trainer):
    tau = TAU


class OwnLoss(Trainer):
    """With a mean as its loss, as documented."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with tp.collect(model) as ponders:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        PonderCallback.of(self).add(ponders)
        loss = tp.map_loss(loss, ponders, TAU * price_scale(self, num_items_in_batch))
        return (loss, outputs) if return_outputs else loss


class Seen(TrainerCallback):
    """Keeps the gradients of every step, and the logs as a reporter sees them."""

    def __init__(self):
        self.gradients, self.logs = [], []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )

    def on_log(self, args, state, control, logs, **_):
        self.logs.append(dict(logs))


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def examples(count=8, causal=False):
    """Examples for a Trainer; where tokens are predicted, with unequally many labels."""
    given = batch(count)
    if causal:
        given["labels"] = given["input_ids"].clone()
        given["labels"][given["attention_mask"] == 0] = -100
        for index in range(count):
            given["labels"][index, : index % 5] = -100
    return [{name: values[index] for name, values in given.items()} for index in range(count)]


def trainer(folder, kind=AdaptiveTrainer, net=None, data=None, **settings):
    settings = {"learning_rate": 1e-2, "max_grad_norm": 0.0, "logging_steps": 1, "max_steps": 1} | settings
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_only_model=False,
        **settings,
    )
    seen = Seen()
    net = tp.adapt(bert(), bias=-1.0) if net is None else net
    made = kind(
        model=net,
        args=arguments,
        train_dataset=data or examples(),
        eval_dataset=examples(4),
        callbacks=[seen],
    )
    made.seen = seen
    return made


def by_hand(net, causal=False):
    """The gradients of the objective on the whole batch."""
    given = torch.utils.data.default_collate(examples(causal=causal))
    with tp.collect(net.train()) as ponders:
        loss = net(**given).loss
    tp.map_loss(loss, ponders, TAU).backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    return found


@pytest.mark.parametrize(("size", "accumulated"), [(8, 1), (4, 2)])
@pytest.mark.parametrize(
    ("kind", "causal"), [(AdaptiveTrainer, False), (OwnLoss, False), (AdaptiveTrainer, True)]
)
def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path, kind, causal, size, accumulated):
    net = tp.adapt(llama() if causal else bert(), bias=-1.0)
    tp.use_mode(net, tp.ACT())  # without noise, which depends on how examples are put together
    wanted = by_hand(net, causal)
    made = trainer(
        tmp_path,
        kind,
        net,
        examples(causal=causal),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulated,
    )
    made.train()
    assert apart(made.seen.gradients[0], wanted) < 1e-5


def test_models_that_take_the_count_of_items_and_return_a_mean_are_told():
    given = batch()
    assert ignores_item_count(bert(), given)
    means = [bert()(**given, num_items_in_batch=count).loss for count in (8, 800)]
    assert torch.equal(*means)
    given["labels"] = given["input_ids"]
    assert not ignores_item_count(llama(), given)
    few, many = (llama()(**given, num_items_in_batch=count).loss for count in (8, 800))
    torch.testing.assert_close(few, 100 * many)


def test_asking_leaves_a_network_and_the_noise_as_they_were():
    net = tp.adapt(bert()).train()
    net.bert.embeddings.eval()
    before = torch.get_rng_state()
    ignores_item_count(net, batch())
    assert net.training
    assert not net.bert.embeddings.training
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_two_processes_that_accumulate_have_the_gradients_of_the_whole_batch():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.integrations.trainer_processes"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_evaluation_is_thresholded_and_its_loss_is_the_objective(tmp_path):
    made = trainer(tmp_path)
    net = made.model
    for head in net.torchpact.runs[0].heads:
        torch.nn.init.normal_(head.weight)
    metrics = made.evaluate()
    with tp.collect(net.eval()) as ponders, torch.no_grad():
        nll = net(**torch.utils.data.default_collate(examples(4))).loss
    assert 1 < float(ponders.steps) < 3
    assert metrics["eval_loss"] == pytest.approx(float(nll + TAU * ponders.steps), rel=1e-4)
    assert metrics["eval_ponder/steps"] == pytest.approx(float(ponders.steps), abs=1e-4)


@pytest.mark.parametrize("kind", [AdaptiveTrainer, OwnLoss])
def test_reporters_see_what_blocks_did_in_training_and_evaluation(tmp_path, kind):
    made = trainer(tmp_path, kind, max_steps=2, eval_strategy="steps", eval_steps=2)
    if kind is OwnLoss:
        PonderCallback.of(made)
    made.train()
    first, second, evaluated, last = made.seen.logs
    assert 1 < first["ponder/cost"] < 3
    assert first["ponder/bert.encoder.layer/steps"] == first["ponder/steps"]
    assert first["ponder/cost"] != second["ponder/cost"]
    assert 1 <= evaluated["eval_ponder/steps"] <= 3
    assert not any("ponder" in key for key in last)  # train_runtime and so on
    for log, kept in zip(made.seen.logs, made.state.log_history, strict=True):
        assert kept.items() >= log.items()


def test_ponders_of_a_log_are_means_over_the_examples_since_the_last(tmp_path):
    """In two passes, of 6 and 2 examples."""
    net = tp.adapt(bert(), bias=-1.0)
    tp.use_mode(net, tp.ACT())
    data = examples()
    with tp.collect(net.train()) as ponders:
        net(**torch.utils.data.default_collate(data))
    made = trainer(tmp_path, net=net, data=data, per_device_train_batch_size=6, gradient_accumulation_steps=2)
    made.train()
    assert made.seen.logs[0]["ponder/cost"] == pytest.approx(float(ponders.cost.detach()), abs=1e-3)


def test_checkpoints_hold_heads_and_resuming_is_exact(tmp_path):
    settings = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2}
    whole = trainer(tmp_path, **settings)
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = trainer(tmp_path, net=tp.adapt(bert(), bias=-3.0), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for one, two in zip(whole.seen.gradients[2:], resumed.seen.gradients, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    wanted, found = whole.model.state_dict(), resumed.model.state_dict()
    assert any("torchpact" in name for name in wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    loaded = tp.from_pretrained(tmp_path / "checkpoint-4")
    assert not loaded.training
    assert all(torch.equal(loaded.state_dict()[name], wanted[name]) for name in wanted)
    given = {name: values for name, values in batch().items() if name != "labels"}
    assert torch.equal(loaded(**given).logits, whole.model.eval()(**given).logits)


def lora(bias):
    peft = pytest.importorskip("peft", reason="checkpoints of its networks are tested")
    net = tp.adapt(bert(), bias=bias)
    torch.manual_seed(0)
    model = peft.get_peft_model(net, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    net.torchpact.requires_grad_(True)
    return model


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_resuming_is_exact_where_peft_saves_adapters_only(tmp_path):
    settings = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2}
    whole = trainer(tmp_path, net=lora(-1.0), **settings)
    whole.train()
    wanted = trained(whole.model)
    assert any("torchpact" in name for name in wanted)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = trainer(tmp_path, net=lora(-3.0), **settings)
    resumed.train(resume_from_checkpoint=True)
    found = trained(resumed.model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    (tmp_path / "checkpoint-2" / "torchpact.safetensors").unlink()
    with pytest.raises(ValueError, match="expected the heads of this network"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("wrapped", [False, True])
def test_checkpoints_keep_thresholds(tmp_path, wrapped):
    thresholds = tp.Thresholds({"bert.encoder.layer": ["never", 0.25]})
    made = trainer(tmp_path, net=lora(-1.0) if wrapped else None, max_steps=1, save_steps=1)
    tp.use_thresholds(made.model, thresholds)
    made.train()
    if wrapped:
        resumed = trainer(tmp_path, net=lora(-3.0), max_steps=1)
        resumed.train(resume_from_checkpoint=True)
        net = resumed.model.get_base_model()
    else:
        net = tp.from_pretrained(tmp_path / "checkpoint-1")
    assert net.torchpact.runs[0].bounds == (float("inf"), 0.25)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_best_checkpoint_is_loaded_with_its_heads(tmp_path, wrapped):
    made = trainer(
        tmp_path,
        Rigged,
        lora(-1.0) if wrapped else None,
        max_steps=3,
        save_steps=1,
        eval_steps=1,
        eval_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="eval_score",
    )
    made.train()
    assert made.state.best_model_checkpoint.endswith("checkpoint-2")
    if wrapped:
        best, last = (load_file(tmp_path / f"checkpoint-{n}" / "torchpact.safetensors") for n in (2, 3))
        found = made.model.get_base_model().torchpact.state_dict()
    else:
        best, last = (tp.from_pretrained(tmp_path / f"checkpoint-{n}").state_dict() for n in (2, 3))
        found = made.model.state_dict()
    heads = [name for name in best if "heads" in name]
    assert heads
    assert not any(torch.equal(best[name], last[name]) for name in heads)
    assert all(torch.equal(found[name], best[name]) for name in best)


class Rigged(AdaptiveTrainer):
    """The second of three evaluations has the highest score."""

    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_score"] = {1: 0, 2: 2, 3: 1}[self.state.global_step]
        return output


@pytest.mark.slow
def test_importing_torchpact_imports_no_transformers():
    code = "import sys, torchpact; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
