"""A LightningModule: relaxed in training_step, thresholded in validation_step."""

import argparse

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import torchpact as tp


class Adaptive(lightning.LightningModule):
    def __init__(self, net: torch.nn.Module, tau: float = 0.02) -> None:
        super().__init__()
        self.tau = tau
        self.net = net.train()  # a network from from_pretrained is in eval(), and Lightning leaves it there

    def objective(self, batch, name):
        with tp.collect(self.net) as ponders:
            loss = self.net(**batch).loss
        self.log_dict({f"{name}/loss": loss, f"{name}/steps": ponders.steps}, batch_size=len(batch["labels"]))
        return tp.map_loss(loss, ponders, self.tau)

    def training_step(self, batch):
        return self.objective(batch, "train")

    def validation_step(self, batch):
        self.objective(batch, "valid")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(steps: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 100, (256, 12))  # random; the first token decides the label
    data = DataLoader([{"input_ids": row, "labels": int(row[0] > 50)} for row in tokens], batch_size=32)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    net = tp.adapt(BertForSequenceClassification(BertConfig(vocab_size=100, **sizes)))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(Adaptive(net), data, data)
    return trainer.callback_metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    print(main(parser.parse_args().steps))
