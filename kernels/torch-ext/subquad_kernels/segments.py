"""
Shared by the Triton kernels of recurrences: sequences cut into segments, the state passed from segment to segment, and
products and exponentials of one precision.
"""

import torch
import triton
import triton.language as tl

from .backend import cdiv
from .memoize import memoize_by_tensor


# Arguments that depend on the length of the sequences. They do not specialize a kernel.
OF_LENGTH = ("T", "SEGMENT", "SEGMENTS", "SLOTS")

# Dtype and precision of the products for each dtype of the inputs. Scores and states may overflow float16.
_OPERANDS = {
    torch.bfloat16: (tl.bfloat16, "ieee"),
    torch.float16: (tl.float32, "tf32"),
    torch.float32: (tl.float32, "tf32x3"),
}


def operands(dtype: torch.dtype) -> dict:
    """The constants `DOT` and `PRECISION` of a kernel with inputs of this dtype."""
    dot, precision = _OPERANDS[dtype]
    if torch.version.hip is not None:
        precision = "ieee"  # few AMD GPUs support tf32
    return {"DOT": dot, "PRECISION": precision}


@triton.jit
def dot(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(DOT), b.to(DOT), input_precision=PRECISION)


@triton.jit
def sum_where(mask, x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """mask @ x. The mask is exact in any dtype; an inexact x is split into two parts."""
    if DOT == tl.bfloat16 and x.dtype != tl.bfloat16:
        x = x.to(tl.float32)
        head = x.to(tl.bfloat16).to(tl.float32)
        return tl.dot(mask.to(DOT), head.to(DOT), dot(mask, x - head, DOT, PRECISION))
    if DOT == tl.float32 and x.dtype == tl.float32 and PRECISION != "ieee":
        head = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # the bits that tf32 keeps
        return dot(mask, head, DOT, "tf32") + dot(mask, x - head, DOT, "tf32")
    return dot(mask, x, DOT, PRECISION)


@triton.jit
def exp(x):
    return tl.exp2(x * 1.4426950408889634)  # one instruction; tl.exp also handles denormals


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0, also accurate for small x."""
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24))))
    return tl.where(x > -0.0625, series, exp(x) - 1)


@triton.jit
def decayed(state, total):
    """state * exp(total), also accurate for slow decays that rounding exp(total) would lose."""
    return state + state * expm1(total)[:, None]


@triton.jit
def program(H, TILES):
    """The tile, the head and the index of the segment (or chunk) of this program."""
    n = tl.program_id(0)
    return n % TILES, n // TILES % H, n // TILES // H


@triton.jit
def tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED: tl.constexpr):
    """The first token of a segment, and the token after its last one."""
    if PACKED:
        return tl.load(boundaries + 2 * segment), tl.load(boundaries + 2 * segment + 1)
    row = (segment // SEGMENTS).to(tl.int64) * T
    begin = segment % SEGMENTS * SEGMENT
    return row + begin, row + tl.minimum(begin + SEGMENT, T)


@triton.jit(do_not_specialize=["SEGMENTS"])
def _pass_kernel(
    states,
    totals,
    initial,
    final,
    firsts,
    SEGMENTS,
    H,
    TILES,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
):
    """Replaces each segment's contribution by the state that enters it, and writes the state after the last one."""
    tile, head, sequence = program(H, TILES)
    cells = tile * BLOCK + tl.arange(0, BLOCK)
    there = cells < K * V
    here = (sequence.to(tl.int64) * H + head) * (K * V)
    state = tl.zeros((BLOCK,), tl.float32)
    if HAS_STATE:
        state = tl.load(initial + here + cells, mask=there, other=0.0)
    if PACKED:
        first, last = tl.load(firsts + sequence), tl.load(firsts + sequence + 1)
    else:
        first = sequence.to(tl.int64) * SEGMENTS
        last = first + SEGMENTS
    for n in range((last - first).to(tl.int32)):
        segment = first + n
        if REVERSE:
            segment = last - 1 - n
        offset = (segment * H + head) * (K * V)
        added = tl.load(states + offset + cells, mask=there, other=0.0)
        total = tl.load(totals + (segment * H + head) * K + cells // V, mask=there, other=0.0)
        tl.store(states + offset + cells, state, mask=there)
        state = state * exp(total) + added
    tl.store(final + here + cells, state, mask=there)


class Segments:
    """
    The division of sequences, or of a packed row's documents, into segments that are computed in parallel.

    Args:
        batch, length: number of rows, and of tokens of a row.
        chunk: number of tokens that a kernel computes together; segments are multiples of it.
        programs: number of programs if the sequences are not cut.
        wanted: number of programs that keep the device busy.
        shortest: shortest segment for which computing its entering state pays off.
        cu_seqlens: boundaries of documents, or None.
        longest: documents longer than this are always cut.
        start, total: the sequences are the tokens from `start` on of rows of `total` tokens, which `cu_seqlens`
            describes; a document may have none among them. None means that they are the rows.
    """

    def __init__(
        self,
        batch,
        length,
        *,
        chunk,
        programs,
        wanted,
        shortest,
        cu_seqlens=None,
        longest=None,
        start=0,
        total=None,
    ):
        # The number of documents is not used here, because their lengths may differ.
        segment = cdiv(cdiv(length * programs, wanted), chunk) * chunk
        segment = max(segment, shortest)
        if cu_seqlens is not None and longest is not None:
            segment = min(segment, longest)
        if segment >= length or (cu_seqlens is None and 2 * programs >= wanted):
            segment = length
        self.segment = segment
        self.whole = segment == length
        self.per_sequence = cdiv(length, segment)
        self.sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.segments = self.sequences * self.per_sequence
        self.boundaries = self.firsts = None
        if cu_seqlens is not None:
            numbers = length if total is None else total, start, length, self.segment, self.sequences
            self.boundaries, self.firsts = memoize_by_tensor(Segments._cut_documents, (cu_seqlens,), *numbers)
            self.segments = self.boundaries.shape[0]
        self.chunks = batch * length // chunk + self.segments + 1  # at most; the last one of a segment may be short

    @staticmethod
    def _cut_documents(cu_seqlens, total, start, length, segment, sequences):
        """The first token of each segment and the one after its last; the first segment of each document, or None."""
        # Kernels must stay within the tensors, even with wrong boundaries. Nothing here synchronizes with the device.
        bounds = cu_seqlens.long().clamp(0, total).cummax(0).values
        rises = (bounds == cu_seqlens).all() & (bounds[0] == 0) & (bounds[-1] == total)
        torch._assert_async(rises, f"`cu_seqlens` must rise from 0 to {total}.")
        bounds = bounds.clamp(start, start + length) - start
        if segment == length:
            return torch.stack((bounds[:-1], bounds[1:]), dim=1), None
        counts = ((bounds.diff() + segment - 1) // segment).clamp(min=1)
        firsts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        # An upper bound of the number of segments; the last ones may be empty.
        n = torch.arange(length // segment + sequences, device=bounds.device)
        document = torch.searchsorted(firsts[1:], n, right=True).clamp(max=sequences - 1)
        stop = bounds[document + 1]
        begin = torch.minimum(bounds[document] + (n - firsts[document]) * segment, stop)
        return torch.stack((begin, torch.minimum(begin + segment, stop)), dim=1), firsts


def passing(segments, states, totals, initial, final, reverse):
    """
    The launch (kernel, grid, arguments) that passes the state along the segments, in reverse from the last one to
    the first. A segment decays a state by exp(totals) (segments, H, K) and adds `states` (segments, H, K, V) to
    it; these are replaced by the states that enter the segments. States that leave the sequences go to `final`.
    """
    heads, key_size, value_size = states.shape[1:]
    tiles = cdiv(key_size * value_size, 1024)
    tensors = states, totals, initial, final, segments.firsts
    flags = reverse, segments.boundaries is not None, initial is not None
    grid = (segments.sequences * heads * tiles,)
    return _pass_kernel, grid, *tensors, segments.per_sequence, heads, tiles, key_size, value_size, 1024, *flags
