"""Compiles the kernels of joint LSTMs for a device that need not be there; prints the name of each."""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torchpact_recipes.training.ensemble.lstm_gpu_kernels import _backward, _forward

NUMBERS = {"batch", "first", "last", "H"}


def compiled(kernel: Any, rule: int) -> None:
    names = list(kernel.arg_names)
    constants = {"RULE": rule, "WIDE": 256}

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name == "setting":
            return "fp32"
        return "i32" if name in NUMBERS or name.endswith("stride") else "*fp32"

    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, {name: type_of(name) for name in names}, fixed)
    compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    print(kernel.__name__)


if __name__ == "__main__":
    for rule in range(4):
        compiled(_forward, rule)
    for rule in range(3):
        compiled(_backward, rule)
