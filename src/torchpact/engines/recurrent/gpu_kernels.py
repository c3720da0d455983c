"""The Triton kernels of recurrent layers: a program for each row that is under way; see gpu.py.

``notes`` of a row are its sequence, its time step, the place of that among all packed rows, and how many
iterations it has run there; ``odds`` are the probability of having got so far, and the expected number of
steps. What differs from call to call is kept in a ``table`` of addresses, so that a CUDA graph holds for all.
"""

import triton
import triton.language as tl

FIRST = ["first_h", "first_c"]
HANDED = ["inputs", "offsets", "final_h", "final_c", "output", "probs", "steps", "cost", "expected"]


@triton.jit(do_not_specialize=[*FIRST, *HANDED, "batch", "rows"])  # type: ignore[untyped-decorator]
def begin(  # type: ignore[no-untyped-def]
    table, bound_kept, bound, batch, rows, first_h, first_c,
    inputs, offsets, final_h, final_c, output, probs, steps, cost, expected,
    h, c, notes, odds, count, H: tl.constexpr, BLOCK: tl.constexpr, LSTM: tl.constexpr,
):  # fmt: skip
    """Put the first states of all sequences into rows, and keep what this call is about."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * H + k
    tl.store(h + at, tl.load(first_h + at, mask=k < H), mask=k < H)
    if LSTM:
        tl.store(c + at, tl.load(first_c + at, mask=k < H), mask=k < H)
    tl.store(notes + row * 4, row)
    tl.store(notes + row * 4 + 1, 0)
    tl.store(notes + row * 4 + 2, row)
    tl.store(notes + row * 4 + 3, 0)
    tl.store(odds + row * 2, 1.0)
    tl.store(odds + row * 2 + 1, 1.0)
    if row == 0:
        tl.store(count, batch)
        tl.store(bound_kept, bound)
        tl.store(table, inputs.to(tl.int64))
        tl.store(table + 1, offsets.to(tl.int64))
        tl.store(table + 2, final_h.to(tl.int64))
        tl.store(table + 3, final_c.to(tl.int64))
        tl.store(table + 4, output.to(tl.int64))
        tl.store(table + 5, probs.to(tl.int64))
        tl.store(table + 6, steps.to(tl.int64))
        tl.store(table + 7, cost.to(tl.int64))
        tl.store(table + 8, expected.to(tl.int64))
        tl.store(table + 9, rows.to(tl.int64))


@triton.jit(do_not_specialize=["max_steps"])  # type: ignore[untyped-decorator]
def move(  # type: ignore[no-untyped-def]
    table, bound_kept, gates, flag, hidden_bias, head, head_bias,
    h, c, notes, odds, count, next_h, next_c, next_notes, next_odds, next_count, max_steps,
    H: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GATES: tl.constexpr,
    BIASED: tl.constexpr, ASKS: tl.constexpr, HEAD_BIASED: tl.constexpr, GATHERS: tl.constexpr,
):  # fmt: skip
    """Finish an iteration of all rows, whose states have been multiplied by weights into ``gates``.

    If it ``GATHERS``, rows that go on are moved to the front of the next buffers, in any order, and counted;
    if not, the next buffers are the same, and a row that is done has the sequence −1.
    """
    row = tl.program_id(0)
    sequence = tl.load(notes + row * 4)
    time = tl.load(notes + row * 4 + 1)
    place = tl.load(notes + row * 4 + 2)
    done = tl.load(notes + row * 4 + 3)
    live = (row < tl.load(count)) & (sequence >= 0)
    kind = h.dtype.element_ty
    inputs = _address(table, kind)
    offsets = _address(table + 1, tl.int32)
    k = tl.arange(0, BLOCK)
    inside = k < tl.where(live, H, 0)
    at, given = row.to(tl.int64) * H, place.to(tl.int64) * (GATES * H)
    old = tl.load(h + at + k, mask=inside, other=0.0).to(tl.float32)
    c_new = old
    from_c = old
    if KIND == 0:
        from_c = tl.load(c + at + k, mask=inside, other=0.0).to(tl.float32)
    first = k < tl.where(live & (done == 0), H, 0)
    state, x = gates + at * GATES + k, inputs + given + k
    begins_next = tl.load(offsets + time + 1, mask=live, other=0)
    ends_next = tl.load(offsets + time + 2, mask=live, other=0)
    more = sequence < ends_next - begins_next  # the longest come first
    u0, x0 = _summands(state, x, flag + k, hidden_bias + k, inside, first, BIASED)
    u1, x1, u2, x2, u3, x3 = u0, x0, u0, x0, u0, x0
    if GATES > 1:
        at1, at2 = H, 2 * H
        u1, x1 = _summands(state + at1, x + at1, flag + at1 + k, hidden_bias + at1 + k, inside, first, BIASED)
        u2, x2 = _summands(state + at2, x + at2, flag + at2 + k, hidden_bias + at2 + k, inside, first, BIASED)
    if GATES > 3:
        at3 = 3 * H
        u3, x3 = _summands(state + at3, x + at3, flag + at3 + k, hidden_bias + at3 + k, inside, first, BIASED)
    position = row
    if GATHERS:  # early, to wait for memory only once: a row with more to read goes on in any case
        position = tl.atomic_add(next_count, 1, mask=live & more, sem="relaxed")
    elif row == 0:
        tl.store(next_count, 0)  # for the iteration that gathers
    if KIND == 0:
        c_new = _sigmoid(u1 + x1) * from_c + _sigmoid(u0 + x0) * _tanh(u2 + x2)
        new = _sigmoid(u3 + x3) * _tanh(c_new)
    elif KIND == 1:
        fresh = _tanh(x2 + _sigmoid(u0 + x0) * u2)
        new = fresh + _sigmoid(u1 + x1) * (old - fresh)
    else:
        new = _tanh(u0 + x0)
    new = new.to(kind)
    done += 1
    survival = tl.load(odds + row * 2)
    so_far = tl.load(odds + row * 2 + 1)
    logit = tl.where(live, float("-inf"), 0.0)
    if ASKS:
        weight = tl.load(head + k, mask=inside, other=0.0).to(tl.float32)
        # where nothing is computed, gates of 0 have made a state of 0
        logit = tl.sum(tl.where(inside, new.to(tl.float32) * weight, 0.0), 0)
        if HEAD_BIASED:
            logit += tl.load(head_bias).to(tl.float32)
    asked = done < max_steps
    bound = tl.load(bound_kept)
    halts = (done >= max_steps) | (logit > bound) | (bound == float("-inf"))  # which all logits exceed
    rows = tl.load(table + 9)
    if not GATHERS:
        tl.debug_barrier()  # what is known of the row may be overwritten once all threads have read it
    if live:
        if asked:
            probs = _address(table + 5, tl.float32)
            tl.store(probs + (done - 1) * rows + place, 1 / (1 + tl.exp(-logit)))
            survival *= 1 / (1 + tl.exp(logit))
            so_far += survival
        if halts:
            tl.store(_address(table + 4, kind) + place.to(tl.int64) * H + k, new, mask=inside)
            tl.store(_address(table + 6, tl.int64) + place, done.to(tl.int64))
            tl.store(_address(table + 7, tl.float32) + place, done.to(tl.float32))
            tl.store(_address(table + 8, tl.float32) + place, so_far)
        if halts & ~more:
            last = sequence.to(tl.int64) * H + k
            tl.store(_address(table + 2, kind) + last, new, mask=inside)
            if KIND == 0:
                tl.store(_address(table + 3, kind) + last, c_new.to(kind), mask=inside)
            if not GATHERS:
                tl.store(next_notes + row * 4, -1)
        else:
            if GATHERS:
                late = tl.atomic_add(next_count, 1, mask=~more, sem="relaxed")
                position = tl.where(more, position, late)
            to = position.to(tl.int64) * H + k
            tl.store(next_h + to, new, mask=inside)
            if KIND == 0:
                tl.store(next_c + to, c_new.to(kind), mask=inside)
            tl.store(next_notes + position * 4, sequence)
            tl.store(next_notes + position * 4 + 1, tl.where(halts, time + 1, time))
            tl.store(next_notes + position * 4 + 2, tl.where(halts, begins_next + sequence, place))
            tl.store(next_notes + position * 4 + 3, tl.where(halts, 0, done))
            tl.store(next_odds + position * 2, tl.where(halts, 1.0, survival))
            tl.store(next_odds + position * 2 + 1, tl.where(halts, 1.0, so_far))


@triton.jit  # type: ignore[untyped-decorator]
def _address(table, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(table).to(tl.pointer_type(kind)), 16)


@triton.jit  # type: ignore[untyped-decorator]
def _summands(state, x, flag, bias, inside, first, BIASED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the state adds to a gate, and what the input does."""
    from_state = tl.load(state, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        from_state += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    from_input = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    return from_state, from_input + tl.load(flag, mask=first, other=0.0).to(tl.float32)


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 / (1 + tl.exp(-2 * x)) - 1
