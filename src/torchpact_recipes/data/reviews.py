"""Sentences of film reviews: 10,604 of Rotten Tomatoes, from the material of a paper, fetched once.

They come with the sources of the package vaderSentiment (MIT; C. Hutto and E. Gilbert: *VADER: A
Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text*, ICWSM 2014), whose human ratings
are not used here.
"""

import tarfile
from pathlib import Path

from torchpact_recipes.data.files import DataError, Progress, silent
from torchpact_recipes.data.packages import Member, Package, fetch_package

ARCHIVE = "hutto_ICWSM_2014.tar.gz"
TABLE = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
PACKAGE = Package(
    "vaderSentiment",
    "3.3.2",
    "pip sources",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    {
        ARCHIVE: Member(
            f"vaderSentiment-3.3.2/additional_resources/{ARCHIVE}",
            2_338_514,
            "d5bb07d87474b3eb8d30b4deccbc23f19d742a6c5718fbacc65485b70b95c5fa",
        )
    },
)


def load_reviews(root: str | Path | None = None, progress: Progress = silent) -> list[str]:
    """Return the sentences, fetched where they are not at hand.

    Args:
        root: The folder of the file; by default one below $TORCHPACT_DATA, or in the user's cache.
        progress: Told how far the download has come.

    Raises:
        DataError: The package could not be downloaded.

    """
    path = fetch_package(PACKAGE, root, progress=progress) / ARCHIVE
    with tarfile.open(path) as archive:
        table = archive.extractfile(TABLE)
        assert table is not None  # the digest says so
        return read_sentences(table.read().decode("utf-8", errors="replace"), path)


def read_sentences(table: str, path: Path) -> list[str]:
    r"""Return the last column of a table of numbers, ratings and sentences.

    >>> read_sentences("1\t2.5\tA good film.\n", Path("ratings.txt"))
    ['A good film.']
    """
    rows = [line.split("\t") for line in table.split("\n") if line.strip()]
    for number, row in enumerate(rows, start=1):
        if len(row) != 3:
            raise DataError(f"{path}: expected three columns in line {number}, got {len(row)}")
    return [row[2].strip() for row in rows]
