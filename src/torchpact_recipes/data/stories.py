"""Stories that a decoder tells itself: sampled once from the network, kept in the user's cache."""

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from torchpact.files import write_whole
from torchpact_recipes.data.files import Progress, data_folder, silent


def told_stories(
    net: nn.Module,
    count: int,
    length: int,
    *,
    seed: int = 0,
    batch: int = 256,
    root: str | Path | None = None,
    progress: Progress = silent,
) -> Tensor:
    """Return texts that a decoder of Hugging Face tells from its first token on, at temperature 1.

    Samples of the network's own distribution, computed in bfloat16: the expected loss of another network on
    them exceeds that of the teller by about the KL divergence of the two. Each batch is a file of its own, so
    that an interrupted call goes on where it stopped; the first stories are the same however many are asked
    for.

    Args:
        net: The decoder.
        count: How many stories.
        length: Tokens of each, the first included.
        seed: Of the samples.
        batch: How many are told at once.
        root: The folder of the files; by default one below $TORCHPACT_DATA, or in the user's cache.
        progress: Told how many are there.

    Returns:
        Tokens, (count, length).

    """
    teller = copy.deepcopy(net).to(torch.bfloat16)
    folder = data_folder("stories") if root is None else Path(root).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    name, found = _name_of(net), []
    for number in range(-(-count // batch)):
        path = folder / f"{name}-{length}-{batch}-{seed}-{number}.safetensors"
        if not path.is_file():
            generator = torch.Generator().manual_seed(1000 * seed + number)
            tokens = tell(teller, batch, length, generator)
            write_whole(path, save({"tokens": tokens}))
        found.append(load_file(path)["tokens"])
        progress("stories", min(count, (number + 1) * batch), count)
    return torch.cat(found)[:count]


@torch.no_grad()
def tell(net: Any, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return samples of a decoder at temperature 1, (batch, length), each from its first token on.

    Args:
        net: The decoder, with ``config.bos_token_id``.
        batch: How many.
        length: Tokens of each, the first included.
        generator: Of random numbers.

    """
    net.eval()
    tokens = torch.full((batch, 1), net.config.bos_token_id)
    cache = None
    while tokens.size(1) < length:
        out = net(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        p = out.logits[:, -1].float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], 1)
    return tokens


def _name_of(net: nn.Module) -> str:
    """Return a name for the weights of a network."""
    digest = hashlib.sha256()
    for name, weight in sorted(net.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.double().sum():.12g}".encode())
    return digest.hexdigest()[:16]
