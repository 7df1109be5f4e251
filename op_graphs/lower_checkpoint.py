"""What it costs to run a part of a layer again, beside what runs again.

Megatron-Core has two kinds of checkpoint (``core/tensor_parallel/random.py``): whole layers, core attention, MLPs and
experts run in an autograd function that keeps their inputs (``checkpoint``); norms, up-projections of latents and the
activation of experts in one whose outputs are freed as well once their reader has run (``CheckpointWithoutOutput``).

- The host works twice more for each: in the forward pass (the function, states of random generators) and when the
  part runs again (these states put back and forth, the gradient through a graph of its own). Both are counted as an
  operation of the host that launches nothing. Nothing waits for the device: generators keep their states on the host.
- Outputs that were freed are copied from those that were made again into storage of the old ones, to which their
  readers hold on; until the part's backward both are there.
"""

from __future__ import annotations

from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .recompute import Part, checkpointed_parts
from .vocabulary import OpKind, Phase, Stream


def host_enters(builder: ProgramBuilder, context: LoweringContext) -> None:
    """The host's work for a checkpoint in the forward pass, added behind its part."""
    _host_work(builder, context, "checkpoint")


def host_runs_again(builder: ProgramBuilder, context: LoweringContext) -> None:
    """The host's work for a checkpoint in the backward pass, added behind what runs again."""
    phase, builder.phase = builder.phase, Phase.RECOMPUTE
    _host_work(builder, context, "checkpoint_again")
    builder.phase = phase


def is_checkpoint(context: LoweringContext, part: Part) -> bool:
    """Whether a part runs again as a checkpoint of its own, and not by a policy of operators."""
    return part in checkpointed_parts(context.training.recompute)


def restored(
    builder: ProgramBuilder, context: LoweringContext, part: Part, name: str, size: float, outputs: int = 1
) -> Tensor | None:
    """Copy what a part made again to where its readers look for it.

    Args:
        builder: of the backward program, behind the part.
        context: of the stage.
        part: what ran again.
        name: of its output.
        size: bytes of all its outputs.
        outputs: number of them.

    Returns:
        What was made again, until :func:`dropped` behind the part's backward; None where nothing is copied.
    """
    if not (is_checkpoint(context, part) and context.libraries.checkpoints):
        return None
    phase, builder.phase = builder.phase, Phase.RECOMPUTE
    row = builder.memory_bound(
        f"{name}_restored", OpKind.MEMCPY, read=size, written=size, passes=outputs, dtype=context.dtype
    )
    builder.phase = phase
    return builder.temporary(f"{name}_made_again", size, row)


def dropped(builder: ProgramBuilder, again: Tensor | None) -> None:
    """Free what :func:`restored` returned, behind the last row."""
    if again is not None:
        builder.release(again, builder.last_row)


def _host_work(builder: ProgramBuilder, context: LoweringContext, name: str) -> None:
    if context.libraries.checkpoints:
        builder.beside(name, OpKind.HOST, Stream.HOST, after=[builder.last_row])
