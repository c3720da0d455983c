"""Networks of Hugging Face in folders, their tokenizers, and texts as they take them."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchpact as tp
from torchpact.checks import one_line
from torchpact_recipes import pretrained
from torchpact_recipes.data import DataError
from torchpact_recipes.data.texts import text_batches

NAMES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "minilm": pretrained.minilm,
    "smollm2": pretrained.smollm2,
    "stories15m": pretrained.stories15m,
}
_TOKENIZERS = ("tokenizer*", "*vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""Names of files that tokenizers are saved in."""
_UNKNOWN = 0.9
"""A tokenizer that does not know this share of the tokens is not the network's."""


def import_transformers() -> Any:
    """Return the package transformers, without its progress bars.

    Raises:
        ValueError: It is not installed.

    """
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "expected the package transformers to be installed, for folders of its networks"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def from_folder(folder: Path) -> tuple[Any, Any]:
    """Return a network of Hugging Face, or an adapted one, and its tokenizer.

    Args:
        folder: Where both are.

    Raises:
        DataError: It holds something else, or no tokenizer.
        ValueError: transformers is not installed.

    """
    if not folder.is_dir():
        raise DataError(
            f"{folder}: expected a folder, {', '.join(NAMES)}, or a name of the zoo; got none of them"
        )
    if not (folder / "config.json").is_file():
        raise DataError(
            f"{folder}: expected a network of Hugging Face with its tokenizer, got a folder without "
            "config.json: for other networks call tp.diagnose or tp.distill in Python"
        )
    # transformers would make an empty tokenizer, to which all words are unknown
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS):
        raise DataError(
            f"{folder}: expected a tokenizer beside the network, got none: call "
            f"tokenizer.save_pretrained({str(folder)!r})"
        )
    transformers = import_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        if (folder / "torchpact.json").is_file():
            return tp.from_pretrained(folder), tokenizer
        config = transformers.AutoConfig.from_pretrained(folder)
        (name,) = config.architectures or ("AutoModel",)
        kind = getattr(transformers, name, transformers.AutoModel)
        return kind.from_pretrained(folder).eval(), tokenizer
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder}: expected a network of Hugging Face with its tokenizer: {one_line(error)}"
        ) from None


def batches_for(
    net: Any, tokenizer: Any, texts: list[str], length: int, size: int
) -> list[dict[str, Tensor]]:
    """Return batches of texts as a network takes them.

    Args:
        net: The network.
        tokenizer: Its tokenizer.
        texts: The texts.
        length: How many tokens of each.
        size: How many texts a batch has.

    Raises:
        DataError: The tokenizer knows hardly any word of the texts.

    """
    batches = text_batches(texts, tokenizer, length, size)
    unknown = _unknown_share(tokenizer, batches)
    if unknown >= _UNKNOWN:
        raise DataError(
            f"expected the tokenizer to know the words of the texts, got {unknown:.0%} unknown ones: is it "
            "the network's own? tokenizer.save_pretrained(folder) saves it with its vocabulary"
        )
    accepts = net.forward.__code__.co_varnames if hasattr(net.forward, "__code__") else ()
    if "token_type_ids" not in accepts:
        batches = [{k: x for k, x in batch.items() if k != "token_type_ids"} for batch in batches]
    return batches


def _unknown_share(tokenizer: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
    """Return the share of unknown tokens among all that are not special otherwise; 0 where none are."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    roles = ("bos", "eos", "cls", "sep", "pad", "mask")
    special = {getattr(tokenizer, f"{role}_token_id", None) for role in roles} - {None}
    if unknown is None or unknown in special:  # such as a tokenizer of bytes, which knows everything
        return 0.0
    tokens = torch.cat([batch["input_ids"].flatten() for batch in batches])
    words = tokens[~torch.isin(tokens, torch.tensor([*special], dtype=tokens.dtype))]
    return float((words == unknown).double().mean()) if len(words) else 0.0
