"""Kept activations that wait for their backward pass in the memory of the host: what is copied, when, and what waits.

Two kinds. *Modules* (Megatron-Core ``pipeline_parallel/fine_grained_activation_offload.py``): what a module of every
layer keeps is copied to the host behind the module; it is brought back when the backward pass of the same module in
the layer above has ended, one layer ahead. *Layers* (Transformer Engine ``get_cpu_offload_context``): all that the
first layers of a chunk keep is copied behind each layer, and brought back when the backward pass of the layer above
begins, so that beside the layer at work there is one buffer for the next (double buffering).

Copies to the host and from it have a stream each. In the count of allocated memory the tensors of a layer leave the
device when their copy has ended, those of a module when it is queued. What a backward pass needs first is copied
beside the action before it, except where a chunk's backward follows its forward at once: there the last layer keeps
its tensors (modules). Who waits for a copy to the host, and whether one back is queued ahead, is the policy of
``overlap.offload`` (``op_graphs.overlap``); what is said here is that of ``ahead``.

The layers only say what they keep, where a module ends, and where its backward pass begins and ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from .graph import HostCopyShape
from .lowering_context import LoweringContext
from .overlap.registry import COPIES
from .program import HostGroup, ProgramBuilder, Tensor
from .vocabulary import OpKind, Stream

MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""Megatron-Core's names (``--offload-modules``). Of each, what it keeps for its backward pass."""
LAYER = "layer"
"""The part that stands for a whole layer."""


def offload(
    builder: ProgramBuilder, context: LoweringContext, layer: int, part: str, tensors: Sequence[Tensor]
) -> None:
    """Copy what ``part`` of a layer keeps to the host, of those tensors that are not released already.

    Called in forward programs behind the last reader of the tensors; does nothing where the plan does not say so.
    """
    plan = context.training.offload
    if not _selected(builder, context, layer, part):
        return
    key = (part, layer)
    if _stays(context, layer, part):
        builder.host_groups[key] = HostGroup(part, layer)
        return
    moved = [t for t in builder.kept_among(tensors) if builder.size_of(t) >= plan.minimum_bytes]
    if not moved:
        return
    size = sum(builder.size_of(tensor) for tensor in moved)
    row = builder.beside(
        f"offload_{part}",
        OpKind.MEMCPY,
        Stream.COPY_TO_HOST,
        after=[builder.last_row],
        read=size,
        shape=HostCopyShape(to_host=True, copies=len(moved)),
    )
    # A module's tensors are given back to the allocator as soon as their copy is queued, which counts them as free
    # from then on and reuses them when the copy has ended. Whole layers are held until then.
    released = row if part == LAYER else builder.last_row
    for tensor in moved:
        builder.release(tensor, released)
    before = [group.row for group in builder.host_groups.values() if group.part == part and group.tensors]
    builder.host_groups[key] = HostGroup(part, layer, tuple(moved), size, row)
    COPIES.chosen(context.overlap.offload).behind_copy(builder, [*before, row], plan.in_flight)


def _selected(builder: ProgramBuilder, context: LoweringContext, layer: int, part: str) -> bool:
    """Whether a part may be moved: in a forward pass, not what is recomputed, not of encoders and prediction heads."""
    plan = context.training.offload
    chosen = plan.layers > 0 if part == LAYER else part in plan.modules and builder.keep_activations
    return chosen and builder.forward is None and not context.module_prefix and layer < context.model.layers


def _stays(context: LoweringContext, layer: int, part: str) -> bool:
    if part == LAYER:
        return layer - context.chunk_layers.start >= context.training.offload.layers
    last = max((at for at in context.chunk_layers if _has(context, at, part)), default=-1)
    return context.backward_at_once and layer == last


def _has(context: LoweringContext, layer: int, part: str) -> bool:
    model = context.model
    if part in ("expert_fc1", "moe_act"):
        return model.is_moe_layer(layer)
    if part == "mlp_norm":
        return model.has_feed_forward(layer)
    return (part == "attn_norm" and model.mixer(layer) is not None) or model.mixer(layer) == "attention"


# -- backward ----------------------------------------------------------------------------------------------------


def begin_backward(builder: ProgramBuilder, context: LoweringContext) -> None:
    """Bring back what no layer above announces; the first rows of a backward program."""
    assert builder.forward is not None
    assert not len(builder), "these rows lie in front of all others"
    if not COPIES.chosen(context.overlap.offload).announces:
        return
    top: dict[str, HostGroup] = {}
    for group in builder.forward.host_groups.values():
        if group.part not in top or group.layer > top[group.part].layer:
            top[group.part] = group
    for group in sorted(top.values(), key=lambda one: -one.row):
        if group.tensors:
            _reload(builder, group, after=-1)
    builder.lead = len(builder)
    builder.input_row = builder.lead


def begin_part(builder: ProgramBuilder, context: LoweringContext, layer: int, part: str) -> None:
    """The backward pass of a part begins: it waits for what it kept, and a layer announces the one below."""
    if context.module_prefix:
        return
    if part == LAYER:
        _announce(builder, context, layer, part)
    group = _group(builder, layer, part)
    if group is None or not group.tensors:
        return
    if (part, layer) not in builder.reload_rows:
        _reload(builder, group, after=builder.last_row)
    builder.wait_for_arrival(builder.reload_rows[part, layer])


def end_part(builder: ProgramBuilder, context: LoweringContext, layer: int, part: str) -> None:
    """The backward pass of a module has ended: the same module of the layer below is brought back."""
    if not context.module_prefix:
        _announce(builder, context, layer, part)


def _group(builder: ProgramBuilder, layer: int, part: str) -> HostGroup | None:
    return builder.forward.host_groups.get((part, layer)) if builder.forward is not None else None


def _announce(builder: ProgramBuilder, context: LoweringContext, layer: int, part: str) -> None:
    announces = COPIES.chosen(context.overlap.offload).announces
    if not announces or _group(builder, layer, part) is None:
        return
    assert builder.forward is not None
    below = [at for of, at in builder.forward.host_groups if of == part and at < layer]
    group = _group(builder, max(below), part) if below else None
    if group is not None and group.tensors and (part, group.layer) not in builder.reload_rows:
        _reload(builder, group, after=builder.last_row)


def _reload(builder: ProgramBuilder, group: HostGroup, after: int) -> None:
    layer, builder.layer = builder.layer, group.layer
    row = builder.beside(
        f"reload_{group.part}",
        OpKind.MEMCPY,
        Stream.COPY_TO_DEVICE,
        after=[after],
        written=group.size,
        shape=HostCopyShape(to_host=False, copies=len(group.tensors)),
    )
    builder.layer = layer
    # The new buffers of a module are there once the copy is queued.
    allocated = row if after < 0 or group.part == LAYER else after
    for tensor in group.tensors:
        builder.reload(tensor, allocated)
    builder.reload_rows[group.part, group.layer] = row
