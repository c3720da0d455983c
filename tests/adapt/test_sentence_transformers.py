"""A SentenceTransformer, adapted: the network in it halts, and encode() and training go on as they did."""

import numpy as np
import pytest
import torch

import torchpact as tp
from tests.adapt.networks import randomize, weights

sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers is not installed"
)
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

TEXTS = ["a good film", "the plot was bad and the film was very bad", "good"]
WORDS = ["a", "the", "film", "good", "bad", "plot", "was", "and", "very"]


@pytest.fixture
def encoder(tmp_path):
    torch.manual_seed(0)
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    net = transformers.BertModel(transformers.BertConfig(vocab_size=len(vocabulary), **sizes))
    for name, parameter in net.named_parameters():
        if "encoder" in name and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    net.save_pretrained(tmp_path)
    from sentence_transformers import models

    word = models.Transformer(str(tmp_path))
    return sentence_transformers.SentenceTransformer(modules=[word, models.Pooling(16)], device="cpu")


def features(encoder):
    return encoder.preprocess(TEXTS) if hasattr(encoder, "preprocess") else encoder.tokenize(TEXTS)


def test_untrained_it_encodes_as_before_and_unadapt_leaves_nothing(encoder):
    before = encoder.encode(TEXTS)
    assert tp.adapt(encoder) is encoder
    assert np.array_equal(encoder.encode(TEXTS), before)
    assert "encoder.layer: 3 × BertLayer" in str(tp.summary(encoder))
    tp.unadapt(encoder)
    assert np.array_equal(encoder.encode(TEXTS), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in encoder.modules())


def test_padding_weighs_nothing_though_hooks_of_the_network_itself_are_passed_by(encoder):
    tp.adapt(encoder)
    inputs = features(encoder)
    with tp.collect(encoder) as ponders:
        encoder(dict(inputs))
    assert torch.equal(weights(ponders[0]), inputs["attention_mask"].float())
    with tp.collect(encoder) as ponders:
        encoder.encode(TEXTS)  # which sorts them by length
    assert weights(ponders[0]).sum() == inputs["attention_mask"].sum()


@pytest.mark.parametrize("per", ["token", "example"])
def test_an_embedding_does_not_depend_on_the_padding_of_others(encoder, per):
    randomize(tp.adapt(encoder, per=per)[0].auto_model)
    together, alone = encoder.encode(TEXTS), [encoder.encode([text])[0] for text in TEXTS]
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-4, atol=1e-5)


def test_deployed_it_gives_the_same_embeddings_and_it_trains(encoder):
    tp.adapt(encoder)
    randomize(encoder[0].auto_model)
    inputs = dict(features(encoder))
    fast = tp.deploy(encoder.eval(), (inputs,), engines=["attention"])
    with torch.no_grad():
        expected = encoder(dict(inputs))["sentence_embedding"]
    torch.testing.assert_close(fast(dict(inputs))["sentence_embedding"], expected, rtol=1e-4, atol=1e-5)
    with tp.collect(encoder.train()) as ponders:
        embedding = encoder(dict(inputs))["sentence_embedding"]
    tp.map_loss(embedding.square().mean(), ponders, tau=0.1).backward()
    assert all(head.weight.grad.abs().sum() > 0 for head in encoder[0].auto_model.torchpact.runs[0].heads)
