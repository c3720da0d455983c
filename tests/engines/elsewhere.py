"""Running what compiles Triton's kernels without its interpreter, which tests use and cannot leave."""

import os
import subprocess
import sys


def compiled_elsewhere(module, cache):
    """Run a module in a process of its own, with nothing cached; return the words of each line it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]
