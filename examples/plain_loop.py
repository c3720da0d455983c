"""A plain PyTorch loop: a BERT classifier learns where to halt, at a price for every layer of a token."""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification

import torchpact as tp


def batch(examples: int = 64) -> dict[str, torch.Tensor]:
    """Return random tokens, the later ones padding; the first token decides the label."""
    tokens = torch.randint(1, 100, (examples, 12))
    mask = (torch.arange(12) < torch.randint(4, 13, (examples, 1))).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": (tokens[:, 0] > 50).long()}


def main(steps: int, tau: float = 0.02) -> tuple[float, float]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    net = tp.adapt(BertForSequenceClassification(BertConfig(vocab_size=100, **sizes)))  # or from_pretrained
    backbone = [p for name, p in net.named_parameters() if not name.startswith("torchpact.")]
    heads = {"params": net.torchpact.parameters(), "lr": 0.1}  # they start far from halting, at σ(−5)
    optimizer = torch.optim.AdamW([{"params": backbone}, heads], lr=3e-3)
    for _ in range(steps):
        with tp.collect(net.train()) as ponders:  # relaxed: differentiable
            loss = net(**batch()).loss
        optimizer.zero_grad()
        tp.map_loss(loss, ponders, tau).backward()
        optimizer.step()
    given = batch(256)
    with tp.collect(net.eval()) as ponders, torch.no_grad():  # thresholded: as it will be deployed
        accuracy = (net(**given).logits.argmax(1) == given["labels"]).float().mean()
    print(f"accuracy {accuracy:.3f}\n{ponders.table()}")
    return float(accuracy), float(ponders.steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    torch.manual_seed(0)
    main(parser.parse_args().steps)
