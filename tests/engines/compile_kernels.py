"""Compiles the Triton kernels of the GPU engine for a device that need not be there; prints what each takes.

A process of its own, since Triton's interpreter, which tests use, cannot be left once it was chosen.
"""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torchpact.engines.conv.triton.gpu_kernels import convolve, survey_all
from torchpact.engines.conv.triton.lists import advance
from torchpact.engines.conv.triton.tiles import FROZEN, TILES, fitting, region_for

MAPS = {"x", "y", "u", "old", "raised", "weight", "columns"}
INTEGERS = {"zero", "pixels", "height", "width", "height_before", "width_before", "iteration", "last", "left"}
POINTERS = {"was_on": "*u8", "goes_on": "*u8", "steps": "*i64", "counts": "*i64", "zeros": "*i32"}


def type_of(name: str) -> str:
    """The type of an argument, by its name."""
    if name in INTEGERS:
        return "i32"
    if name == "bound":
        return "fp32"
    if name in MAPS:
        return "*bf16"
    if name.endswith(("places", "count", "list")):
        return "*i32"
    return POINTERS.get(name, "*fp32")


def compiled(kernel: Any, warps: int, stages: int = 3, **constants: Any) -> None:
    """Compile for an H100, with pointers to multiples of 16 bytes."""
    names = list(kernel.arg_names)
    types = {name: "constexpr" if name in constants else type_of(name) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "*" in types[name]}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    made = compile(
        ASTSource(kernel, types, fixed, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    print(kernel.__name__, made.metadata.shared, len(made.asm["ptx"]))


def main() -> None:
    common: dict[str, Any] = {"ALL": False, "PRECISION": "tf32", "STRIDE": 1, "KEPT": 256, "RAISES": False}
    common |= {"W": 16, "HEADS": 4}
    for channels in (64, 256):
        tiles = TILES[channels][1]
        cut = {"P": tiles.pixels, "N": tiles.outputs, "K": tiles.inputs}
        shape = {"C": channels, "D": channels, "TAPS": 9, "KEPT": channels}
        compiled(convolve, tiles.warps, tiles.stages, LAST=True, ASKED=True, **common | shape | cut)
    few = fitting(tiles, torch.empty(256, 64, 1, 1, dtype=torch.bfloat16), 227 * 1024)
    compiled(convolve, 4, C=64, D=256, TAPS=1, LAST=True, ASKED=True, **cut | {"K": few.inputs}, **common)
    first = common | {"ALL": True, "STRIDE": 2, "KEPT": 128}
    compiled(convolve, 4, C=64, D=256, TAPS=1, LAST=True, ASKED=True, **cut | {"K": few.inputs}, **first)
    compiled(convolve, 4, C=256, D=256, TAPS=9, LAST=False, ASKED=False, **cut, **first)
    first |= {"STRIDE": 1, "RAISES": True, "raised": None}
    compiled(convolve, 4, C=256, D=256, TAPS=1, LAST=False, ASKED=False, **cut, **first)
    compiled(survey_all, 4, C=256, N=128, P=16, K=128, W=32, HEADS=17, ASKED=True)
    for channels, size in ((64, 56), (128, 28), (256, 14)):
        region, part = region_for(size, size), TILES[channels][1].outputs
        known = {
            "C": channels,
            "N": part,
            "R": FROZEN,
            "K": channels,
            "SHARE": 2 if region.whole else 1,
            "W": 16,
            "HEADS": 4,
            "REACH": 2,
            "ASKED": True,
        }
        area = {
            "ROWS": region.rows,
            "COLUMNS": region.columns,
            "ABOVE": region.above,
            "BESIDE": region.beside,
        }
        absent = ("noise", "log_q", "probs", "survival", "expected") if region.whole else ()
        missing: dict[str, Any] = dict.fromkeys(absent)
        compiled(advance, 8, ALL=False, **known, **area, **missing)


if __name__ == "__main__":
    main()
