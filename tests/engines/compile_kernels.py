"""Compiles the Triton kernels of the GPU engine for a device that need not be there; prints what each takes.

A process of its own, since Triton's interpreter, which tests use, cannot be left once it was chosen.
"""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torchpact.engines.gpu_kernels import activate, convolve
from torchpact.engines.gpu_lists import advance, decide, prepare
from torchpact.engines.gpu_tiles import TILES, deciding

MAPS = {"x", "y", "u", "old", "before"}
INTEGERS = {"pixels", "height", "width", "iteration", "last"}
POINTERS = {"goes_on": "*u8", "steps": "*i64", "counts": "*i64"}


def type_of(name: str, kernel: Any) -> str:
    """The type of an argument, by its name."""
    if name in INTEGERS:
        return "i32"
    if name == "bound":
        return "fp32"
    if name in MAPS or (name == "weight" and kernel is not decide):
        return "*bf16"
    if name.endswith(("far", "near", "active", "places", "count", "list")):
        return "*i32"
    return POINTERS.get(name, "*fp32")


def compiled(kernel: Any, warps: int, stages: int = 3, **constants: Any) -> None:
    """Compile for an H100, with pointers to multiples of 16 bytes."""
    names = list(kernel.arg_names)
    types = {name: "constexpr" if name in constants else type_of(name, kernel) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "*" in types[name]}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    made = compile(
        ASTSource(kernel, types, fixed, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    print(kernel.__name__, made.metadata.shared, len(made.asm["ptx"]))


def main() -> None:
    tiles, size = TILES[256][1], {"P": 64, "K": 32}
    cut = {"P": tiles.pixels, "N": tiles.outputs, "K": tiles.inputs}
    common: dict[str, Any] = {"ALL": False, "PRECISION": "tf32"}
    compiled(
        convolve, tiles.warps, tiles.stages, C=256, D=256, TAPS=9, LAST=True, SUMS=False, **cut, **common
    )
    compiled(convolve, 4, C=64, D=256, TAPS=1, LAST=True, SUMS=True, **cut, **common)
    compiled(activate, 4, C=256, **size)
    compiled(decide, 4, C=64, ALL=False, SAMPLES=True, **size)
    compiled(prepare, 4, C=64, ALL=False, **size)
    for looks in (False, True):
        tiles = deciding(14 * 14, 256, size=2, room=227 * 1024, alone=not looks)
        cut = {"P": tiles.pixels, "K": tiles.inputs, "LOOKS": looks}
        compiled(advance, tiles.warps, tiles.stages, C=256, ALL=False, SAMPLES=False, **cut)


if __name__ == "__main__":
    main()
