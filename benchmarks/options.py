"""What every benchmark of seconds can be told."""

import argparse
import shutil
from pathlib import Path


def parser_for(description: str, file: str, seconds: float) -> argparse.ArgumentParser:
    """Return a parser of --seconds, --compile and --out, by default a CSV beside the file."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=seconds, help="of measuring, for each row")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=shutil.which("c++") is not None
    )
    parser.add_argument("--out", type=Path, default=Path(file).with_suffix(".csv"))
    return parser
