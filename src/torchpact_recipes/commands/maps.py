"""torchpact maps: where networks compute, drawn beside the image."""

import json
import secrets
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from torchpact.checks import check_count, one_line
from torchpact.models import ResNet
from torchpact_recipes.commands.common import (
    Device,
    Network,
    find_network,
    load_test,
    pick_device,
)
from torchpact_recipes.data import DataError, read_picture
from torchpact_recipes.data.cifar10_formats import CLASSES
from torchpact_recipes.outputs import check_folder
from torchpact_recipes.training.titles import title, title_of
from torchpact_recipes.viz import PonderMaps, compare_maps, ponder_maps, save, show_blocks
from torchpact_recipes.viz.map_figures import shortened

MOST_IMAGES = 60
MODEL = "resnet110-tau0.005"
"""Of the zoo, the one whose maps follow objects most closely."""


def maps(
    images: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Image files: the square in the middle of each, resized to what the network was trained on. "
            "Without any, random test images.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="An adaptive network: a checkpoint, a run, one of the zoo or a folder of save_pretrained; "
            "several side by side, if repeated.",
            show_default=MODEL,
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the figures.")] = Path("maps"),
    mode: Annotated[
        str | None,
        typer.Option(
            help="relaxed, discrete, thresholded or act; the one a network was trained in, if none."
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="How many test images.")] = 6,
    data: Annotated[
        Path, typer.Option(help="Folder of CIFAR-10, or 'sample', whose 1,000 test images are bundled.")
    ] = Path("sample"),
    seed: Annotated[
        int, typer.Option(help="Seed of the choice of images, and of the modes that sample.")
    ] = 0,
    random: Annotated[bool, typer.Option("--random", help="Take another seed every time.")] = False,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the means as JSON.")] = False,
) -> None:
    """Draw how much a network computes at each position: per block, and summed over blocks.

    That is the expected number of residual units (PSACT), the ponder cost (SACT), or in the hard modes
    the units that were run. maps.png compares networks, maps-blocks.png has every block of one; both are
    written as PDF too.

    [dim]Example: torchpact maps photo.jpg -o out[/dim]
    """
    place = pick_device(device)
    check_folder(output)
    seed = secrets.randbelow(2**31) if random else check_count("seed", seed, 0, 2**63 - 1)
    models = model or [MODEL]
    networks = [(name, find_network(name)) for name in models]
    size = _image_size([(name, network.model) for name, network in networks])
    problems: list[str] = []
    if images:
        names, pixels, problems = _read(images, size)
    else:
        if not 1 <= count <= MOST_IMAGES:
            raise ValueError(f"expected a count of 1 to {MOST_IMAGES}, got {count}")
        chosen = load_test(data, torch.device("cpu")).random(count, seed)
        names, pixels = [CLASSES[label] for label in chosen.labels.tolist()], chosen.images
    found = [_maps_of(network, pixels.to(place), mode, seed) for _, network in networks]
    titles = _titles(networks, mode)
    paths = _draw(pixels, titles, found, output, [Path(name).name for name in names] if images else [])
    titles = [title.replace("\n", ", ") for title in titles]
    results = [_numbers(*one, names) for one in zip(models, titles, found, strict=True)]
    files = [str(path) for path in paths]
    if as_json:
        print(json.dumps({"seed": seed, "networks": results, "files": files}, indent=2))
    else:
        for one in results:
            blocks = " ".join(f"{mean:.2f}" for mean in one["blocks"])
            print(
                f"{one['model']}  {one['title']}: {one['quantity']} by block {blocks}, sum {one['total']:.2f}"
            )
        print("\n".join(files) + (f"\nseed {seed}" if random else ""))
    if problems:
        raise DataError(f"{_print_all_but_last(problems)}; the others are drawn")


def _image_size(networks: list[tuple[str, ResNet]]) -> int:
    """The size of images that all networks take; plain networks are refused."""
    (first, network), *others = networks
    for name, other in others:
        if other.config.image_size != network.config.image_size:
            raise ValueError(
                f"{name}: expected a network for images of {network.config.image_size} pixels, "
                f"as {first} is, got one for {other.config.image_size}"
            )
    for name, one in networks:
        if not one.config.adaptive:
            raise ValueError(f"{name}: expected an adaptive network, got a plain one, which decides nothing")
    return network.config.image_size


def _read(paths: list[Path], size: int) -> tuple[list[str], torch.Tensor, list[str]]:
    """Read what can be read; return names, images, and what is wrong with the others."""
    if len(paths) > MOST_IMAGES:
        raise ValueError(f"expected at most {MOST_IMAGES} images, got {len(paths)}")
    pixels: list[tuple[str, torch.Tensor]] = []
    problems = []
    for path in paths:
        try:
            pixels.append((str(path), read_picture(path, size)))
        except DataError as error:
            problems.append(str(error))
    if not pixels:
        raise DataError(_print_all_but_last(problems))
    return [name for name, _ in pixels], torch.stack([picture for _, picture in pixels]), problems


def _maps_of(network: Network, pixels: torch.Tensor, mode: str | None, seed: int) -> PonderMaps:
    chosen = None if mode is None else network.mode(mode)
    return ponder_maps(network.model.to(pixels.device), pixels, chosen, seed=seed)


def _titles(networks: list[tuple[str, Network]], mode: str | None) -> list[str]:
    """What networks are called, in lines: with their depths where these differ, and never two alike."""
    depths = len({network.model.config.layers for _, network in networks}) > 1
    titles = [_title(name, network, depths) for name, network in networks]
    if mode is not None:
        kind = "as ACT" if mode == "act" else mode
        titles = [
            f"{one}\nevaluated {kind}" if _is_unlike(network, mode) else one
            for one, (_, network) in zip(titles, networks, strict=True)
        ]
    alike = Counter(titles)
    titles = [
        f"{one}\n{_called(name)}" if alike[one] > 1 else one
        for one, (name, _) in zip(titles, networks, strict=True)
    ]
    alike = Counter(titles)
    return [f"{one} ({n})" if alike[one] > 1 else one for n, one in enumerate(titles, start=1)]


def _called(name: str) -> str:
    """A network's folder, or its name in the zoo, hardly wider than a map."""
    path = Path(name).resolve()
    return shortened(path.parent.name if path.is_file() else path.name, 22)


def _title(name: str, network: Network, depth: bool) -> str:
    """The paper's name of a network and its τ, or the name of its folder where these are unknown."""
    if network.config is None:
        called = _called(name)
        return f"ResNet-{network.model.config.layers}\n{called}" if depth else called
    return title(network.config).replace(", ", "\n", 1) if depth else title_of(network.config)


def _is_unlike(network: Network, mode: str) -> bool:
    """Whether a mode is one of another kind than the network was trained for, or than it was saved in."""
    if network.config is None:
        return mode not in network.modes
    return (mode == "act") != (network.config.method == "act")


def _print_all_but_last(problems: list[str]) -> str:
    """Print a line for each problem but the last, which is returned."""
    *others, last = problems
    for problem in others:
        print(f"torchpact: {one_line(problem)}", file=sys.stderr)
    return last


def _draw(
    pixels: torch.Tensor, titles: list[str], found: list[PonderMaps], folder: Path, names: list[str]
) -> list[Path]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of names in letters that the font lacks
        with compare_maps(pixels, list(zip(titles, found, strict=True)), names=names) as figure:
            paths = save(figure, folder, "maps")
        for number, one in enumerate(found, start=1):
            with show_blocks(pixels, one, names=names) as figure:
                paths += save(figure, folder, "maps-blocks" if len(found) == 1 else f"maps-blocks-{number}")
    return paths


def _numbers(model: str, title: str, found: PonderMaps, names: list[str]) -> dict[str, Any]:
    """Means over positions: of each block and of all together, for every image and over images."""
    means = found.means()
    totals: list[float] = found.total.double().mean((1, 2)).tolist()
    return {
        "model": model,
        "title": title,
        "quantity": found.quantity,
        "blocks": [sum(block) / len(means) for block in zip(*means, strict=True)],
        "total": sum(totals) / len(totals),
        "images": [
            {"image": name, "blocks": blocks, "total": total}
            for name, blocks, total in zip(names, means, totals, strict=True)
        ],
    }
