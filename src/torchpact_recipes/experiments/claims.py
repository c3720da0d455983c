"""What the paper says it found, and what was found here: a table of claims, each judged by numbers."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchpact.files import write_whole
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.evidence import Evidence
from torchpact_recipes.experiments.judgements import CLAIMS
from torchpact_recipes.experiments.runs import Run, Scale
from torchpact_recipes.experiments.verdicts import Verdict


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, what was measured of it, and whether it holds."""

    claim: str
    where: str
    verdict: Verdict
    measured: str


def findings(archive: Archive, scale: Scale, seeds: list[int]) -> list[Finding]:
    """Judge every claim by the runs that are finished."""
    evidence = Evidence(archive, scale, seeds)
    found = [Finding(text, where, *judge(evidence)) for text, where, judge in CLAIMS]
    if scale.images is None:
        return found
    # a few iterations on a few images show that it works, and nothing else
    return [replace(f, verdict="not measured yet", measured=f"{scale.name}: {f.measured}") for f in found]


def runs(scale: Scale, seeds: list[int]) -> list[Run]:
    """None of its own: it judges by what there is."""
    return []


def markdown(found: list[Finding]) -> str:
    """The findings as a table."""
    lines = ["| the paper says | where | verdict | measured here |", "|---|---|---|---|"]
    lines += [f"| {f.claim} | {f.where} | **{f.verdict}** | {f.measured} |" for f in found]
    return "\n".join(lines) + "\n"


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """The table, as Markdown, which is printed too, and as JSON."""
    made = files(findings(archive, scale, seeds))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        write_whole(folder / name, text.encode())
    print(made["claims.md"])
    return [folder / name for name in made]


def files(found: list[Finding]) -> dict[str, str]:
    """What is written of the findings, by the names of the files."""
    numbers = json.dumps([asdict(f) for f in found], indent=2) + "\n"
    return {"claims.md": markdown(found), "claims.json": numbers}
