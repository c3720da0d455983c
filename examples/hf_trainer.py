"""The Trainer of transformers: ten lines of compute_loss, as in PonderMixin of torchpact.integrations."""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import torchpact as tp
from torchpact.integrations.transformers import PonderCallback


class AdaptiveTrainer(Trainer):
    loss_is_scaled_for_ga = False  # BERT returns a mean: the Trainer divides it by the accumulated batches

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with tp.collect(model) as ponders:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        PonderCallback.of(self).add(ponders)  # to the logs
        loss = tp.map_loss(loss, ponders, tau=0.02)
        return (loss, outputs) if return_outputs else loss


def main(steps: int, folder: str) -> dict[str, float]:
    tokens = torch.randint(1, 100, (256, 12))  # random; the first token decides the label
    data = [{"input_ids": row, "labels": int(row[0] > 50)} for row in tokens]
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    net = tp.adapt(BertForSequenceClassification(BertConfig(vocab_size=100, **sizes)))
    settings = {"max_steps": steps, "save_steps": steps, "logging_steps": 5}
    arguments = TrainingArguments(folder, gradient_accumulation_steps=2, report_to=[], **settings)
    # heads begin at a halting probability of 0.7 % and have far to go: a larger learning rate
    heads = {"params": net.torchpact.parameters(), "lr": 0.1}
    backbone = [p for name, p in net.named_parameters() if not name.startswith("torchpact.")]
    optimizers = torch.optim.AdamW([{"params": backbone}, heads], lr=3e-3), None
    sets = {"train_dataset": data, "eval_dataset": data[:64]}
    trainer = AdaptiveTrainer(model=net, args=arguments, optimizers=optimizers, **sets)
    trainer.train()
    again = tp.from_pretrained(f"{folder}/checkpoint-{steps}")  # a checkpoint has the heads
    print(tp.summary(again))
    return trainer.evaluate()  # thresholded


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args().steps, folder)
