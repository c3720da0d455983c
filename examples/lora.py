"""LoRA by peft: adapters, heads and classifier learn, the backbone does not; all are merged and saved."""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import torchpact as tp


def main(steps: int, folder: str) -> bool:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    net = tp.adapt(BertForSequenceClassification(BertConfig(vocab_size=100, **sizes)))
    lora = LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"])
    model = get_peft_model(net, lora)  # after tp.adapt
    net.torchpact.requires_grad_(True)  # peft has frozen the heads: not by modules_to_save, which copies them
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        tokens = torch.randint(1, 100, (32, 12))  # random; the first token decides the label
        with tp.collect(model.train()) as ponders:
            loss = model(input_ids=tokens, labels=(tokens[:, 0] > 50).long()).loss
        optimizer.zero_grad()
        tp.map_loss(loss, ponders, tau=0.02).backward()
        optimizer.step()
    merged = model.merge_and_unload().eval()  # peft's own save_pretrained would leave the heads out
    tp.save_pretrained(merged, folder)
    again = tp.from_pretrained(folder)
    print(ponders.table())
    return torch.equal(again(input_ids=tokens).logits, merged(input_ids=tokens).logits)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    with tempfile.TemporaryDirectory() as folder:
        print("loaded as saved:", main(parser.parse_args().steps, folder))
