"""Runs the kernel of clusters, emulated, on memory between pages that nobody may touch; prints what it read.

A process of its own: a place outside of a tensor, or an index outside of an array in shared memory, ends it.
"""

import ctypes
import itertools
import mmap

import torch
from torch import Tensor, nn

from tests.engines.recurrent_emulation import BOUNDS, library
from torchpact.engines.recurrent.cluster import Clusters, shape_of
from torchpact.engines.recurrent.gpu_call import Result, UnderWay, pieces_of
from torchpact.engines.recurrent.layer import layer_of
from torchpact.models import AdaptiveRNN, HaltingUnit
from torchpact.specs import block_spec

LIBC = ctypes.CDLL(None, use_errno=True)
NONE, BOTH = 0, mmap.PROT_READ | mmap.PROT_WRITE
KEPT: list[mmap.mmap] = []


def fenced(x: Tensor, low: bool) -> Tensor:
    """A copy that begins right after a page that cannot be read or, if not ``low``, ends right before one."""
    size = x.numel() * x.element_size()
    pages = -(-size // mmap.PAGESIZE)
    area = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE, prot=BOTH)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for page in (0, pages + 1):
        if LIBC.mprotect(
            ctypes.c_void_p(address + page * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), NONE
        ):
            raise OSError(ctypes.get_errno(), "mprotect")
    KEPT.append(area)
    begin = mmap.PAGESIZE if low else (pages + 1) * mmap.PAGESIZE - size
    return torch.frombuffer(area, dtype=x.dtype, count=x.numel(), offset=begin).view(x.shape).copy_(x)


def unknown(x: Tensor, low: bool) -> Tensor:
    """Memory for a result: what is not written shows."""
    return fenced(torch.full_like(x, torch.nan if x.is_floating_point() else -1), low)


@torch.no_grad()
def read(cell: nn.RNNCellBase, head: HaltingUnit, sizes: Tensor, low: bool, slots: int, begun: bool) -> None:
    """Read sequences of which so many are as long as each time step, and look at what came of it.

    If they are ``begun``, as others leave them, in another order.
    """
    rows, max_steps, kind = int(sizes.sum()), 3, cell.weight_hh.dtype
    rnn = AdaptiveRNN(cell, max_steps, halting=head, mode="thresholded")
    for module in (cell, head.linear):
        for parameter in module.parameters():
            parameter.data = fenced(parameter.data, low)
    layer = layer_of(block_spec(rnn), [kind])
    data, shape = torch.zeros(rows, 1, dtype=kind), shape_of(layer)._replace(slots=slots)
    h = torch.randn(int(sizes[0]), cell.hidden_size).to(kind)
    count = 2 if shape.kind == 0 else 1
    first, final = ([made(h, low) for _ in range(count)] for made in (fenced, unknown))
    result = Result(data, tuple(first), tuple(final), max_steps)
    for name in ("output", "probs", "steps", "cost", "expected"):
        setattr(result, name, unknown(getattr(result, name), low))

    def launch(args: ctypes.Structure, clusters: int) -> None:
        fault = library(shape, BOUNDS).emulate(ctypes.byref(args), clusters, 0)
        assert fault is None, fault.decode()

    clusters = Clusters(layer, launch, at_once=2)
    clusters.shape = shape
    for piece in pieces_of(sizes, most=rows if begun else 9):
        inputs = torch.randn(piece.rows.stop - piece.rows.start, shape.gates * shape.units).to(kind)
        clusters.places.kept = piece.places, 0, fenced(piece.places.int(), low)
        if begun:
            order = torch.arange(len(h)).flip(0)
            notes = torch.stack([order, 0 * order, order, 0 * order], 1).int()
            odds, left = torch.ones(len(h), 2), torch.tensor([len(h)]).int()
            states, cells, noted, chances, known = (fenced(x, low) for x in (h, h, notes, odds, left))
            under_way = UnderWay(states, cells, noted, chances, known, most=len(h))
            clusters.finish(fenced(inputs, low), piece, result, 0.0, under_way)
        else:
            clusters.read(fenced(inputs, low), piece, result, 0.0)
        result.state = result.final
    for x in (result.output, result.probs, result.cost, result.expected, *final):
        assert x.isfinite().all()
    assert ((result.steps >= 1) & (result.steps <= max_steps)).all()
    print(type(cell).__name__, shape.units, kind, result.steps.unique().tolist())


def main() -> None:
    torch.manual_seed(0)
    sizes = torch.tensor([5, 5, 2])
    layers = [
        (nn.LSTMCell, 96, torch.float32, False),  # more CTAs than groups of 32 units
        (nn.LSTMCell, 96, torch.float32, True),
        (nn.GRUCell, 5, torch.bfloat16, False),
        (nn.RNNCell, 64, torch.float32, False),
        (nn.GRUCell, 290, torch.float32, False),  # weights in shared memory
    ]
    for (kind, units, dtype, begun), low in itertools.product(layers, (False, True)):
        head = HaltingUnit(units, 0.0)
        nn.init.normal_(head.linear.weight, std=20.0)
        read(kind(4, units).to(dtype), head.to(dtype), sizes, low, slots=2, begun=begun)


if __name__ == "__main__":
    main()
