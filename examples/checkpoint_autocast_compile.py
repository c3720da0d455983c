"""Less memory, more speed: activation checkpointing, bfloat16 autocast and torch.compile, each an option."""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification

import torchpact as tp


def main(steps: int, checkpoint: bool = False, autocast: bool = False, backend: str = "") -> float:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    net = tp.adapt(BertForSequenceClassification(BertConfig(vocab_size=100, use_cache=False, **sizes)))
    net.train()
    if checkpoint:
        net.activation_checkpointing_enable()  # not reentrant: in that heads would not learn
    run = torch.compile(net, backend=backend) if backend else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens = torch.randint(1, 100, (32, 12))  # random; the first token decides the label
        with tp.collect(net) as ponders, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(input_ids=tokens, labels=(tokens[:, 0] > 50).long()).loss
        optimizer.zero_grad()
        tp.map_loss(loss, ponders, tau=0.02).backward()  # outside of autocast
        optimizer.step()
    print(f"loss {loss.item():.3f}\n{ponders.table()}")
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument(
        "--backend", default="", help='of torch.compile, such as "inductor"; "" does not compile'
    )
    given = parser.parse_args()
    main(given.steps, given.checkpoint, given.autocast, given.backend)
