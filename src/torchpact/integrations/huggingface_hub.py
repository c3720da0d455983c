"""Push adapted networks to the Hugging Face hub, with a model card, and load them from there.

Needs the package huggingface_hub, which comes with transformers.
"""

import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download

import torchpact as tp

CARD = "README.md"


def push_to_hub(
    net: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str = "Upload an adapted network",
) -> str:
    """Upload what :func:`~torchpact.save_pretrained` writes, in one commit.

    An existing model card in the repository is kept.

    Args:
        net: What :func:`~torchpact.adapt` returned.
        repo_id: The repository, ``user/name``; it is created if it does not exist.
        private: Whether it is private, if it is created.
        token: A token of the user; by default the stored one.
        commit_message: The message of the commit.

    Returns:
        The address of the commit.

    Raises:
        ValueError: The network is not adapted; nothing is uploaded.

    Example:
        ::

            push_to_hub(ada, "somebody/adaptive-minilm")

    """
    with tempfile.TemporaryDirectory(prefix="torchpact-") as folder:
        tp.save_pretrained(net, folder)
        api = HfApi(token=token)
        place = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if api.file_exists(place, CARD):
            (Path(folder) / CARD).unlink(missing_ok=True)
        done = api.upload_folder(repo_id=place, folder_path=folder, commit_message=commit_message)
    return str(done.commit_url)


def from_hub(repo_id: str, *, revision: str | None = None, token: str | None = None, **options: Any) -> Any:
    """Download the adapted network of a repository.

    Args:
        repo_id: The repository, ``user/name``.
        revision: A branch, tag or commit; by default the main branch.
        token: That of the user, by default the one that is stored.
        options: For :func:`~torchpact.from_pretrained`, such as ``net`` or ``dtype``.

    Returns:
        The network, in evaluation.

    Raises:
        FileNotFoundError: The repository holds no adapted network.
        ValueError: Its files do not fit each other, or are damaged.

    Example:
        ::

            ada = from_hub("somebody/adaptive-minilm")

    """
    # weights in other formats would have to be unpickled
    kinds = ["*.safetensors", "*.json", "*.txt", "*.model"]
    folder = snapshot_download(repo_id, revision=revision, token=token, allow_patterns=kinds)
    return tp.from_pretrained(folder, **options)
