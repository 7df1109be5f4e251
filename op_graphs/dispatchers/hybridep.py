"""Node-limited dispatch by kernels for one NVLink domain: ``hybridep`` (Hybrid-EP, on a branch of DeepEP).

Tokens take the ways of DeepEP; what differs is what travels beside them (``csrc/hybrid_ep``, Megatron-Core
``transformer/moe/fused_a2a.py``):

- in front of the first dispatch the routing map of every rank is gathered (``extension/allgather.cu``), a byte for each
  token and expert, and scanned for where tokens go and which of those that arrive are for which local expert;
- tokens travel forward, and gradients back behind the experts, with their scores for all experts of the domain that
  they go to, in fp32 (``expert_output_prob``, ``expert_input_prob``);
- a kernel makes the places of copies from the part of the map that is this rank's (``permute_processing_kernel``).
"""

from __future__ import annotations

from ..lowering_context import LoweringContext
from ..program import ProgramBuilder
from ..vocabulary import DType, OpKind
from .deepep import DeepEP
from .permutation import Permutation
from .routing import FIRST_DISPATCH, RoutedSizes

_SCORE, _PLACE = 4.0, 4.0
"""Bytes of a score (fp32) and of a place (int32)."""
_PLACE_PASSES = 3
"""Phases between which all blocks of the kernel that makes places wait for each other."""


class HybridEP(DeepEP):
    """A token goes once to each domain, and there once to each rank, with its scores for all experts of the domain."""

    def map_bytes(self, context: LoweringContext, sizes: RoutedSizes, name: str) -> float:
        """The routing map of a rank, gathered once a layer and forward pass."""
        return float(sizes.tokens * context.experts.experts) if name == FIRST_DISPATCH else 0.0

    def lay_out(
        self, builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, name: str
    ) -> None:
        """Scan the gathered maps, once a layer and forward pass.

        The gather is part of the exchange behind the scan: both run in a row, and nothing comes between them.
        """
        if name != FIRST_DISPATCH:
            return
        tokens = float(sizes.tokens * context.parallel.ep)
        # Read are the maps; written a place on each rank for the own tokens, and the part for the own experts.
        builder.memory_bound(
            f"{name}_map_scan",
            OpKind.PERMUTE,
            read=tokens * context.experts.experts,
            written=_PLACE * tokens + tokens * sizes.local_experts,
            access="strided",
            dtype=DType.INT8,
        )

    def find_rows(
        self, builder: ProgramBuilder, context: LoweringContext, permutation: Permutation, name: str
    ) -> None:
        """Make the places of copies, once a layer and forward pass."""
        if name != FIRST_DISPATCH:
            return
        entries = permutation.entries
        builder.memory_bound(
            f"{name}_places",
            OpKind.PERMUTE,
            read=(1 + _PLACE) * entries,
            written=2 * _PLACE * entries,
            access="strided",
            passes=_PLACE_PASSES,
            dtype=DType.INT32,
        )

    def score_bytes(self, name: str) -> float:
        """Bytes of scores, for one token and expert: fp32 with tokens to experts, and with gradients from them."""
        return _SCORE if name in (FIRST_DISPATCH, f"{FIRST_DISPATCH}_backward") else 0.0
