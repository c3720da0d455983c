"""Pages about runs that nobody trained: what is on them is known exactly."""

import base64

import numpy as np

from torchpact_recipes.report import write_page


def run(title="ResNet-14, PSACT, τ = 0.05", method="relaxed", *, traits=(), images=100, end=12, **more):
    """What a page takes of a finished run of ``end`` iterations, in two modes unless it is plain."""
    modes = ("plain",) if method == "plain" else ("relaxed", "thresholded")
    results = {
        mode: {"accuracy": 0.9 - i / 50, "flops": (9 - i) * 1e6, "images": images, "steps": []}
        for i, mode in enumerate(modes)
    }
    history = [
        {"kind": "train", "iteration": i, "loss": more.get("loss", 1.0), "accuracy": 0.5}
        for i in range(0, end + 1, 2)
    ]
    values = {"folder": "runs/one", "title": title, "label": title.partition(", ")[2], "method": method}
    values |= {"traits": list(traits), "text": False, "seed": 0, "status": "finished"}
    values |= {"iteration": end, "iterations": end, "results": results, "history": history, "units": 2}
    return values | {"width": 1, "plain_flops": 1e7, "timing": None, "note": ""} | more


def gallery(index, size, units=2, shade=0):
    """Two images of one ``shade``; in the left half of a single block, positions halt after one unit."""
    steps = np.full((size, size), units, np.uint8)
    steps[:, : size // 2] = 1
    block = {"steps": _encoded(steps), "probs": _encoded(np.full((units - 1, size, size), 99, np.uint8))}
    image = {"pixels": _encoded(np.full((3, 32, 32), shade, np.uint8)), "size": [32, 32]}
    image |= {"label": "cat", "predicted": "cat", "mflops": 5.0, "blocks": [block, block]}
    images = [image | {"kind": kind} for kind in ("hardest", "easiest")]
    shown = {"mode": "thresholded", "units": units, "sizes": [[size, size]] * 2, "images": images}
    return shown | {"range": [2, 2 * units], "run": index}


def three(path, **first):
    """A page of two adaptive networks with maps of different sizes, and of a plain one."""
    runs = [run(**first), run("ResNet-14, SACT, τ = 0.1"), run("ResNet-14, plain", "plain")]
    return write_page(path, runs, [gallery(0, 32), gallery(1, 16)], "")


def _encoded(values):
    return base64.b64encode(values.tobytes()).decode()
