"""A loop with accelerate: gradient accumulation, and as many processes as `accelerate launch` starts."""

import argparse
import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import torchpact as tp


def main(steps: int, folder: str) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    tokens = torch.randint(1, 100, (64 * steps, 12))  # random; the first token decides the label
    data = [{"input_ids": row, "labels": int(row[0] > 50)} for row in tokens]
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    net = tp.adapt(BertForSequenceClassification(BertConfig(vocab_size=100, **sizes)))
    # heads begin at a halting probability of 0.7 % and have far to go: a larger learning rate
    heads = {"params": net.torchpact.parameters(), "lr": 0.1}
    backbone = [p for name, p in net.named_parameters() if not name.startswith("torchpact.")]
    optimizer = torch.optim.AdamW([{"params": backbone}, heads], lr=3e-3)
    net, optimizer, batches = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=32))
    for batch in batches:
        with accelerator.accumulate(net):  # backward divides the whole objective by 2
            with tp.collect(net.train()) as ponders:
                loss = net(**batch).loss
            accelerator.backward(tp.map_loss(loss, ponders, tau=0.02))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(ponders.table())
    if accelerator.is_main_process:
        tp.save_pretrained(accelerator.unwrap_model(net), folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args().steps, folder)
