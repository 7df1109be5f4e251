"""From a kernel back to the host: its launch, what stood around the launch, and the phase that means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int8, Int32, Int64
from op_graphs.vocabulary import Communication, OpKind, Phase
from tracesim.kernel_kinds import (
    classify_kernels,
    classify_operators,
    kind_of_communication,
    parse_communication,
)
from tracesim.readers.distinct import distinct
from tracesim.readers.nesting import Nesting

_PHASES: tuple[tuple[Phase, re.Pattern[str]], ...] = tuple(
    (phase, re.compile(pattern))
    for phase, pattern in (
        (
            Phase.OPTIMIZER,
            r"^Optimizer\.(step|zero_grad)#|^#+ optimizer #+$|^optimizer[-_. ]?(step|update)$|^opt(imizer)?$",
        ),
        # Checkpointing runs the forward pass again, inside the backward pass.
        (
            Phase.RECOMPUTE,
            r"evaluate_function: \w*Checkpoint\w*Backward|recompute|torch/utils/checkpoint\.py\(\d+\): unpack_hook",
        ),
        (
            Phase.GRADIENT_SYNC,
            r"evaluate_function: torch::autograd::AccumulateGrad|FSDP::post_backward_reduce"
            r"|^torch\.distributed\.ddp\.reducer::|^torch::distributed::reducer::",
        ),
        (Phase.PARAM_SYNC, r"^FSDP::(all_gather|.*unshard|pre_forward$|rate_limiter)"),
        # Schedules that split the backward pass name its halves; the engine's own nodes do not tell them apart.
        (Phase.BACKWARD_WEIGHT, r"\(W\)$|^PP:\d+W\d+"),
        (
            Phase.BACKWARD_INPUT,
            r"^autograd::engine::evaluate_function|^#+ backward #+$|\(B\)$|^PP:\d+[BI]\d+"
            r"|^[Bb]ackward([-_ ]?(step|pass|\d+))?$",
        ),
        (
            Phase.FORWARD,
            r"\(F\)$|^#+ forward #+$|^PP:\d+F\d+|^(DistributedDataParallel|FullyShardedDataParallel)\.forward$"
            r"|^[Ff]orward([-_ ]?(step|pass|\d+))?$",
        ),
    )
)
_ENGINE = "autograd::engine::evaluate_function"
_CHECKPOINT_FRAME = "torch/utils/checkpoint.py("
_COMPOSITE_FORWARD = frozenset(
    f"aten::{name}"
    for name in (
        "linear", "conv1d", "conv2d", "conv3d", "batch_norm", "layer_norm", "rms_norm", "group_norm", "dropout",
        "scaled_dot_product_attention", "relu_", "embedding", "max_pool2d", "adaptive_avg_pool2d", "silu", "gelu",
    )
)  # fmt: skip
"""Operators that only a forward pass calls: inside a backward pass they recompute."""
_PIPELINE_ACTION = re.compile(r"^PP:(\d+)[FBIW](\d+)|^(?:[Ff]orward|[Bb]ackward) ()(\d+)$")


@dataclass(frozen=True)
class Host:
    """Operators and annotations of the host threads, as columns of one length."""

    row: Int64
    """Row of the slice."""
    thread: Int32
    start: Int64
    end: Int64
    name: Int64
    """Index into ``names``."""
    is_operator: Bool
    names: Sequence[str]
    nesting: Nesting

    @classmethod
    def build(
        cls,
        row: Int64,
        thread: Int32,
        start: Int64,
        end: Int64,
        name: Int64,
        is_operator: Bool,
        names: Sequence[str],
    ) -> Host:
        """With the nesting of the slices."""
        return cls(row, thread, start, end, name, is_operator, names, Nesting.build(thread, start, end))

    def operator_at(self, thread: Int32, time: Int64) -> Int64:
        """Row of the innermost operator around each instant of a thread, -1 if none."""
        nesting = self.nesting
        position = nesting.innermost(thread, time)
        return _nearest(nesting, position, self.is_operator[nesting.order], self.row[nesting.order], -1)


@dataclass(frozen=True)
class Context:
    """What stood around the launch of each kernel."""

    operator: Int64
    """Name id of the innermost operator, -1 if none."""
    operator_row: Int64
    """Row of that operator, -1 if none."""
    record_row: Int64
    """Row of the innermost ``record_param_comms``, -1 if none."""
    phase: Int8
    collective: Int8
    """:class:`Communication` of the innermost ``nccl:...`` annotation."""
    stage: Int64
    """Pipeline stage and microbatch of the innermost action annotation, -1 if none."""
    microbatch: Int64


def is_checkpoint_frame(name: str) -> bool:
    """Whether a Python function is one by which checkpointing recomputes."""
    return _CHECKPOINT_FRAME in name and "unpack_hook" in name


def launch_rows(launch_correlation: Int64, device_correlation: Int64) -> Int64:
    """For each device event the row of the launch with the same correlation (the first of them), -1 if none."""
    launched = np.nonzero(launch_correlation >= 0)[0]
    if not len(launched):
        return np.full(len(device_correlation), -1, dtype=np.int64)
    order = launched[np.argsort(launch_correlation[launched], kind="stable")]
    keys = launch_correlation[order]
    at = np.minimum(np.searchsorted(keys, device_correlation), len(keys) - 1)
    return np.where((keys[at] == device_correlation) & (device_correlation >= 0), order[at], -1)


def contexts(host: Host, thread: Int32, time: Int64) -> Context:
    """What stands around each launch, given by its thread and start; ``time < 0`` for none."""
    nesting = host.nesting
    position = nesting.innermost(thread, time)
    position[time < 0] = -1
    used, local = distinct(host.name)
    names = [host.names[i] for i in used]
    by_position = local[nesting.order]

    def nearest(marked: Bool, values: Int64 | Int8, default: int) -> Int64:
        return _nearest(nesting, position, marked, values, default)

    def by_name(values: list[int]) -> Int64:
        return np.array(values, dtype=np.int64)[by_position] if len(values) else np.zeros(0, dtype=np.int64)

    phase = _refined_phases(
        nesting, by_name([_phase(name) for name in names]), by_name([n in _COMPOSITE_FORWARD for n in names])
    )
    collective = by_name(
        [parse_communication(n[:200]) if n.startswith("nccl:") else Communication.NONE for n in names]
    )
    recorded = by_name([n == "record_param_comms" for n in names])
    actions = [_PIPELINE_ACTION.match(n) for n in names]
    stage = by_name([int(m.group(1)[:8] or 0) if m and m.group(1) else -1 for m in actions])
    microbatch = by_name([int((m.group(2) or m.group(4))[:8]) if m else -1 for m in actions])
    is_operator = host.is_operator[nesting.order]
    return Context(
        operator=nearest(is_operator, host.name[nesting.order], -1),
        operator_row=nearest(is_operator, host.row[nesting.order], -1),
        record_row=nearest(recorded > 0, host.row[nesting.order], -1),
        phase=_with_engine_threads(host, nearest(phase > 0, phase, 0).astype(np.int8), thread, position),
        collective=nearest(collective > 0, collective, 0).astype(np.int8),
        stage=nearest(microbatch >= 0, stage, -1),
        microbatch=nearest(microbatch >= 0, microbatch, -1),
    )


def _refined_phases(nesting: Nesting, phase: Int64, composite: Int64) -> Int64:
    """Forward operators inside a backward pass recompute."""
    inside = np.flatnonzero(composite > 0)
    around = np.append(nesting.nearest_marked(phase > 0), -1)[inside]
    phase = phase.copy()
    phase[inside[np.append(phase, 0)[around] == Phase.BACKWARD_INPUT]] = Phase.RECOMPUTE
    return phase


def _with_engine_threads(host: Host, phase: Int8, thread: Int32, position: Int64) -> Int8:
    """Launches of a thread that does little but run the autograd engine are backward."""
    top = np.flatnonzero(host.nesting.parent < 0)
    rows = host.nesting.order[top]
    engine_names = [i for i in np.unique(host.name[rows]).tolist() if host.names[i].startswith(_ENGINE)]
    if not engine_names:
        return phase
    count = int(host.thread.max()) + 1
    total = np.bincount(host.thread[rows], minlength=count)
    engine = np.bincount(host.thread[rows[np.isin(host.name[rows], engine_names)]], minlength=count)
    backward = 2 * engine > total
    inside = (position >= 0) & backward[np.clip(thread, 0, count - 1)]
    return np.where((phase == 0) & inside, Phase.BACKWARD_INPUT, phase).astype(np.int8)


def _nearest(nesting: Nesting, position: Int64, marked: Bool, values: Int64 | Int8, default: int) -> Int64:
    """The value at the nearest marked slice around each position."""
    target = np.append(nesting.nearest_marked(marked), -1)[position]
    return np.where(target >= 0, np.append(values, default)[target], default).astype(np.int64)


def _phase(name: str) -> int:
    return next((int(phase) for phase, pattern in _PHASES if pattern.search(name)), 0)


def kinds(names: Sequence[str], name: Int64, context: Context) -> tuple[Int8, Int8]:
    """Kind and communication of kernels from their names (ids into ``names``) and the context of their launches."""
    used, local = distinct(name)
    kind_by_name, communication_by_name = classify_kernels([names[i] for i in used])
    kind, communication = kind_by_name[local], communication_by_name[local]
    operators, operator = distinct(context.operator)
    kind_by_operator = classify_operators([names[i] if i >= 0 else "" for i in operators])
    launched_as = kind_by_operator[operator]
    kind = np.where((communication == 0) & (launched_as != OpKind.OTHER), launched_as, kind)
    told = np.isin(communication, (Communication.SEND_RECEIVE, Communication.UNKNOWN)) & (
        context.collective > 0
    )
    communication = np.where(told, context.collective, communication).astype(np.int8)
    for transfer in np.unique(communication[communication > 0]):
        kind[communication == transfer] = kind_of_communication(int(transfer))
    return kind.astype(np.int8), communication


def phases(context: Context, kind: Int8, communication: Int8) -> tuple[Int8, Int8]:
    """Phase of each kernel, and its kind once the phase is known.

    Launches outside any marked region of a trace that has a backward pass are forward. Elementwise kernels of an
    optimizer step are the optimizer. Under a gradient accumulation only communication is gradient synchronisation.
    """
    phase = context.phase.copy()
    synchronising = np.isin(phase, (Phase.GRADIENT_SYNC, Phase.PARAM_SYNC)) & (communication == 0)
    phase[synchronising & (phase == Phase.GRADIENT_SYNC)] = Phase.BACKWARD_INPUT
    phase[synchronising & (phase == Phase.PARAM_SYNC)] = Phase.UNKNOWN
    if np.isin(phase, (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)).any():
        phase[(phase == Phase.UNKNOWN) & (context.operator >= 0)] = Phase.FORWARD
    stepping = (phase == Phase.OPTIMIZER) & np.isin(kind, (OpKind.ELEMENTWISE, OpKind.OTHER))
    return phase, np.where(stepping, OpKind.OPTIMIZER, kind).astype(np.int8)


def chunks(context: Context) -> Int64:
    """Model chunk of each kernel: the place of its pipeline stage among the stages that the rank runs, -1 if none."""
    stages = np.unique(context.stage[context.stage >= 0])
    return np.where(context.stage >= 0, np.searchsorted(stages, context.stage), -1)
