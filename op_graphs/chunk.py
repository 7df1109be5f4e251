"""A model chunk, and what it is lowered to."""

from __future__ import annotations

from dataclasses import dataclass

from .buckets import Bucket
from .chunk_buffers import ChunkBuffer
from .lowering_context import LoweringContext
from .parameters import ParameterTensor
from .program import Program


@dataclass(frozen=True)
class Chunk:
    """Which part of the model a program covers."""

    stage: int
    """Global stage: chunk * pp + pipeline rank."""
    index: int
    """Model chunk on its rank."""
    layers: range
    has_embedding: bool
    has_head: bool
    has_encoder: bool | None = None
    """Whether a vision-language model's encoder lies here; None where the embedding does."""

    def encodes(self, context: LoweringContext) -> bool:
        """Whether a vision encoder runs in this chunk."""
        here = self.has_embedding if self.has_encoder is None else self.has_encoder
        return here and context.model.vision is not None


@dataclass(frozen=True)
class ChunkPrograms:
    """Programs of a chunk; ``first``/``last`` are the variants with data-parallel communication.

    The backward exists whole, and for schedules that split it (zero-bubble ones) as one for the input and one for the
    weights; None for others.
    """

    chunk: Chunk
    forward: Program
    forward_first: Program
    backward: Program
    backward_last: Program
    backward_input: Program | None
    backward_weight: Program | None
    backward_weight_last: Program | None
    parameters: tuple[ParameterTensor, ...]
    buckets: tuple[Bucket, ...]
    sent_bytes: int | None = None
    """Bytes passed to the next stage, and of the gradient that comes back; None: those of a hidden state."""
    held: tuple[ChunkBuffer, ...] = ()
    """Buffers that outlive an action."""
