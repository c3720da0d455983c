"""Compiles the Triton kernels of recurrent layers for a device that need not be there; prints what it took.

A process of its own, since Triton's interpreter, which tests use, cannot be left once it was chosen.
"""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torchpact.engines.recurrent.gpu_kernels import begin, move

TYPES = {
    "table": "*i64", "notes": "*i32", "next_notes": "*i32", "count": "*i32", "next_count": "*i32",
    "offsets": "*i32", "steps": "*i64", "bound": "fp32", "batch": "i32", "rows": "i32", "max_steps": "i32",
}  # fmt: skip
IN_SINGLE = {"bound_kept", "odds", "next_odds", "probs", "cost", "expected"}


def compiled(kernel: Any, precision: str, warps: int, **constants: Any) -> str:
    """Compile for an H100, with pointers to multiples of 16 bytes, and return the assembly."""
    names = list(kernel.arg_names)
    types = {name: TYPES.get(name, "*fp32" if name in IN_SINGLE else f"*{precision}") for name in names}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "*" in types[name]}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    made = compile(
        ASTSource(kernel, types, fixed, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    ptx: str = made.asm["ptx"]
    wide = sum("ld.global" in line and (".v4" in line or ".v2" in line) for line in ptx.splitlines())
    print(kernel.__name__, precision, *constants.values(), made.metadata.shared, wide)
    return ptx


def main() -> None:
    for precision in ("fp32", "bf16", "fp16"):
        compiled(begin, precision, 4, H=512, BLOCK=512, LSTM=True)
        for kind, gates in enumerate((4, 3, 1)):
            given = {
                "KIND": kind,
                "GATES": gates,
                "BIASED": True,
                "ASKS": True,
                "HEAD_BIASED": True,
                "GATHERS": kind == 0,
            }
            compiled(move, precision, 4, H=512, BLOCK=512, **given)
    bare = {"BIASED": False, "ASKS": False, "HEAD_BIASED": False, "GATHERS": False}
    compiled(move, "fp32", 16, H=1500, BLOCK=2048, KIND=0, GATES=4, **bare)
    compiled(move, "fp32", 1, H=5, BLOCK=16, KIND=1, GATES=3, **bare)


if __name__ == "__main__":
    main()
