"""Kernels that bring tokens into the order of their experts and back.

With ``libraries.permute_fusion`` each is one kernel of Transformer Engine (``pytorch/permutation.py``), which handles
the routing scores as well. Without, Megatron-Core calls PyTorch (``transformer/moe/moe_utils.py``): the routing map is
transposed, token numbers and scores are selected by it (sorted, where experts are padded to their capacity), copies are
gathered by ``index_select``; the way back fills zeros and adds with ``scatter_add``. Autograd then keeps the token
number of every copy, and the transposed map and scores. The backward of the first is zeros and ``index_add``, that of
the second a gather. Scores multiply inside the experts either way.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import DType, OpKind, Phase

_INDEX, _SCORE = 8.0, 4.0
"""Bytes of an index (int64) and of a score (fp32); an entry of the map has one."""
_SELECT_KERNELS = 4
"""Kernels of a selection by a mask: count, flag, write indices, gather (PyTorch ``nonzero`` and ``index``)."""
_GATHER_LAUNCHES = 4
"""Kernels that Transformer Engine launches to gather copies: three that turn the map into places, and the gather
(``pytorch/triton/permutation.py``)."""
_MULTIHOT_KERNELS = 12
"""Kernels that make a map of chosen experts (Megatron-Core ``_indices_to_multihot``): two fills, a comparison, two
selections of four, and two writes by index, some of them joined."""


@dataclass(frozen=True)
class Permutation:
    """A reordering of ``tokens`` rows into ``copies`` rows by a map of ``[tokens, experts]``."""

    tokens: float
    copies: float
    experts: int
    row_bytes: float
    """Bytes of a token."""

    @property
    def token_bytes(self) -> float:
        """Bytes of the tokens."""
        return self.tokens * self.row_bytes

    @property
    def copy_bytes(self) -> float:
        """Bytes of the copies."""
        return self.copies * self.row_bytes

    @property
    def entries(self) -> float:
        """Entries of the map, of a byte each."""
        return self.tokens * self.experts


def _is_forward(builder: ProgramBuilder) -> bool:
    return builder.phase in (Phase.FORWARD, Phase.RECOMPUTE)


def _pads(context: LoweringContext) -> bool:
    return context.experts.capacity_factor is not None and context.experts.pad_to_capacity


def gather_copies(
    builder: ProgramBuilder,
    context: LoweringContext,
    permutation: Permutation,
    name: str,
    result: str,
    source: Tensor | None = None,
) -> Tensor:
    """Copies of tokens in the order of their experts, in a new buffer ``result``; releases ``source``."""
    if context.libraries.permute_fusion:
        # A token that no expert here chose is not read.
        read = min(permutation.token_bytes, permutation.copy_bytes)
    else:
        read = permutation.copy_bytes + _INDEX * permutation.copies
        if _is_forward(builder):
            _select_by_map(builder, context, permutation, name)
    row = reorder(builder, context, name, read, permutation.copy_bytes, _GATHER_LAUNCHES)
    copies = builder.temporary(result, permutation.copy_bytes, row)
    if source is not None:
        builder.release(source, row)
    return copies


def add_copies(
    builder: ProgramBuilder,
    context: LoweringContext,
    permutation: Permutation,
    name: str,
    result: str,
    source: Tensor,
) -> Tensor:
    """Tokens in their own order, each the sum of its copies, in a new buffer ``result``; releases ``source``."""
    read, written = permutation.copy_bytes, permutation.token_bytes
    zeros = -1
    if not context.libraries.permute_fusion:
        if not _is_forward(builder):
            _scores_backward(builder, context, permutation, name)
        zeros = builder.memory_bound(
            f"{name}_zeros", OpKind.ELEMENTWISE, read=0, written=permutation.token_bytes, dtype=context.dtype
        )
        # Every copy is added in memory, with an atomic operation.
        read = 2 * permutation.copy_bytes + _INDEX * permutation.copies
        written = permutation.copy_bytes
    row = reorder(builder, context, name, read, written)
    tokens = builder.temporary(result, permutation.token_bytes, row if zeros < 0 else zeros)
    builder.release(source, row)
    return tokens


def kept_bytes(context: LoweringContext, permutation: Permutation) -> float:
    """Bytes that autograd keeps of a reordering made by PyTorch; 0 where Transformer Engine's kernel makes it.

    The number of the token of each copy; and the transposed map and scores, or where experts are padded, places.
    """
    if context.libraries.permute_fusion:
        return 0.0
    numbers = _INDEX * permutation.copies
    return 2 * numbers if _pads(context) else numbers + (1 + _SCORE) * permutation.entries


def make_map(
    builder: ProgramBuilder, context: LoweringContext, permutation: Permutation, top_k: int, name: str
) -> None:
    """The map of what a dispatcher brought, from the numbers of chosen experts that came with it."""
    if context.libraries.permute_fusion or not _is_forward(builder):
        return
    chosen = permutation.tokens * top_k
    _small(
        builder,
        f"{name}_map",
        read=(_INDEX + 2) * chosen + 5 * _INDEX * permutation.copies,
        written=chosen + (_INDEX + _SCORE) * permutation.entries + 6 * _INDEX * permutation.copies,
        passes=_MULTIHOT_KERNELS,
    )


def _select_by_map(
    builder: ProgramBuilder, context: LoweringContext, permutation: Permutation, name: str
) -> None:
    """Token number and score of every copy."""
    entries, copies = permutation.entries, permutation.copies
    scores = _SCORE * entries
    _small(builder, f"{name}_map_transpose", read=entries, written=entries)
    if _pads(context):
        # A stable sort of each expert's column, of which the first places are taken.
        sorted_read = (1 + _INDEX) * entries + _INDEX * copies
        _small(builder, f"{name}_sort", read=sorted_read, written=(1 + 2 * _INDEX) * entries, passes=3)
        chosen = (_INDEX + _SCORE) * copies
        _small(builder, f"{name}_scores", read=scores + chosen, written=scores + chosen, passes=3)
        return
    # Positions are found first, two indices each, then what is at them is gathered; once for numbers, once for scores.
    found_read, found_written = 2 * entries + 3 * _INDEX * copies, 3 * _INDEX * copies
    _small(
        builder,
        f"{name}_select",
        read=found_read + _INDEX * copies,
        written=found_written + _INDEX * copies,
        passes=_SELECT_KERNELS,
    )
    _small(
        builder,
        f"{name}_scores",
        read=scores + found_read + _SCORE * copies,
        written=scores + found_written + _SCORE * copies,
        passes=1 + _SELECT_KERNELS,
    )


def _scores_backward(
    builder: ProgramBuilder, context: LoweringContext, permutation: Permutation, name: str
) -> None:
    """Gradients of the selected scores at their places in the matrix of all."""
    entries, copies = permutation.entries, permutation.copies
    matrix = _SCORE * entries
    # By a mask, places are counted first.
    places = 0.0 if _pads(context) else _INDEX * entries
    _small(
        builder,
        f"{name}_scores",
        read=2 * entries + places + _SCORE * copies + matrix,
        written=matrix + places + _SCORE * copies + matrix,
        passes=3 if _pads(context) else 4,
    )


def _small(builder: ProgramBuilder, name: str, *, read: float, written: float, passes: int = 1) -> None:
    builder.memory_bound(
        name, OpKind.PERMUTE, read=read, written=written, access="strided", passes=passes, dtype=DType.FP32
    )


def reorder(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    read: float,
    written: float,
    launches: int = 1,
) -> int:
    """A kernel that reorders tokens, with what else its function launches where it is fused; returns its row."""
    fused = context.libraries.permute_fusion
    return builder.memory_bound(
        name,
        OpKind.PERMUTE,
        read=read,
        written=written,
        access="strided",
        function=fused,
        launches=launches if fused else 0,
        dtype=context.dtype,
    )
