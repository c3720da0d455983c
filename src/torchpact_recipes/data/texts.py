"""Texts of a user's file, one a line, and what a tokenizer makes of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from torchpact_recipes.data.files import DataError

KINDS = (".txt", ".jsonl")


def read_texts(path: Path, limit: int | None = None) -> list[str]:
    """Return the texts of a file, without empty ones: lines of ``.txt``, the values of "text" in ``.jsonl``.

    Args:
        path: The file.
        limit: How many at most, the first ones.

    Raises:
        DataError: There is no such file, it is of another kind, or a line holds no text.

    Example:
        >>> read_texts(Path("nowhere.txt"))
        Traceback (most recent call last):
        torchpact_recipes.data.files.DataError: nowhere.txt: no such file

    """
    if not path.is_file():
        raise DataError(f"{path}: {'expected a file, got a folder' if path.is_dir() else 'no such file'}")
    if path.suffix not in KINDS:
        raise DataError(
            f"{path}: expected a file of texts, {' or '.join(KINDS)}, got {path.suffix or 'another'}"
        )
    found: list[str] = []
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if len(found) == limit:
                    break
                text = line.strip() if path.suffix == ".txt" else _of_json(line, path, number)
                if text:
                    found.append(text)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected a file of texts in UTF-8, got {error}") from None
    if not found:
        raise DataError(f"{path}: expected texts, got none")
    return found


def _of_json(line: str, path: Path, number: int) -> str:
    if not line.strip():
        return ""
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise DataError(f'{path}: expected an object with "text" in line {number}, got {line.strip()[:40]!r}')
    return text.strip()


def text_batches(
    texts: Sequence[str], tokenizer: Any, length: int = 64, size: int = 16
) -> list[dict[str, Tensor]]:
    """Return batches of tokens, of texts of like lengths together.

    Args:
        texts: The texts.
        tokenizer: That of a Hugging Face network.
        length: How many tokens of each are kept.
        size: How many texts a batch has.

    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokens = tokenizer([*texts], truncation=True, max_length=length)["input_ids"]
    order = sorted(range(len(texts)), key=lambda i: len(tokens[i]))
    batches = []
    for start in range(0, len(order), size):
        chosen = [texts[i] for i in order[start : start + size]]
        batches.append(
            dict(tokenizer(chosen, truncation=True, max_length=length, padding=True, return_tensors="pt"))
        )
    return batches
