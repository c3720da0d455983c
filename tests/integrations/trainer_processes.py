"""What each of two processes does under torchrun: a step of the Trainer, compared with the whole batch."""

import tempfile

import torchpact as tp
from tests.integrations.networks import apart, bert
from tests.integrations.test_trainer import AdaptiveTrainer, by_hand, examples, llama, trainer

if __name__ == "__main__":
    for causal in (False, True):
        net = tp.adapt(llama() if causal else bert(), bias=-1.0)
        tp.use_mode(net, tp.ACT())
        wanted = by_hand(net, causal)
        with tempfile.TemporaryDirectory() as folder:
            made = trainer(
                folder,
                AdaptiveTrainer,
                net,
                examples(causal=causal),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
            )
            made.train()
        assert made.args.world_size == 2
        difference = apart(made.seen.gradients[0], wanted)
        assert difference < 1e-5, f"{causal=}, {difference}"
