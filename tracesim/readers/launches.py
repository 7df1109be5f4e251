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
from tracesim.readers.nesting import Nesting

_PHASES: tuple[tuple[Phase, re.Pattern[str]], ...] = tuple(
    (phase, re.compile(pattern))
    for phase, pattern in (
        (Phase.OPTIMIZER, r"^Optimizer\.step#|^#+ optimizer #+$|^optimizer[-_. ]?step$"),
        (Phase.RECOMPUTE, r"evaluate_function: \w*Checkpoint\w*Backward|recompute"),
        (
            Phase.GRADIENT_SYNC,
            r"evaluate_function: torch::autograd::AccumulateGrad|FSDP::post_backward_reduce",
        ),
        (Phase.PARAM_SYNC, r"^FSDP::(all_gather|.*unshard|pre_forward$|rate_limiter)"),
        # Schedules that split the backward pass name its halves; the engine's own nodes do not tell them apart.
        (Phase.BACKWARD_WEIGHT, r"\(W\)$|^PP:\d+W\d+"),
        (
            Phase.BACKWARD_INPUT,
            r"^autograd::engine::evaluate_function|^#+ backward #+$|\(B\)$|^PP:\d+[BI]\d+",
        ),
        (
            Phase.FORWARD,
            r"\(F\)$|^#+ forward #+$|^PP:\d+F\d+|^(DistributedDataParallel|FullyShardedDataParallel)\.forward$",
        ),
    )
)


@dataclass(frozen=True)
class Host:
    """Operators and user annotations of the host threads, as columns of one length."""

    thread: Int32
    start: Int64
    end: Int64
    name: Int64
    """Index into ``names``."""
    is_operator: Bool
    names: Sequence[str]


@dataclass(frozen=True)
class Context:
    """What stood around the launch of each kernel."""

    operator: Int64
    """Name id of the innermost operator, -1 if none."""
    phase: Int8
    collective: Int8
    """:class:`Communication` of the innermost ``nccl:...`` annotation."""


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
    """The operator, phase and collective around each launch, given by its thread and start; ``time < 0`` for none."""
    nesting = Nesting.build(host.thread, host.start, host.end)
    position = nesting.innermost(thread, time)
    position[time < 0] = -1
    used, local = np.unique(host.name, return_inverse=True)
    names = [host.names[i] for i in used]
    name_phase = np.array([_phase(name) for name in names], dtype=np.int8)
    name_collective = np.array(
        [parse_communication(n) if n.startswith("nccl:") else Communication.NONE for n in names],
        dtype=np.int8,
    )
    by_position = local[nesting.order]
    operator = _nearest(nesting, position, host.is_operator[nesting.order], host.name[nesting.order], -1)
    phase = _nearest(nesting, position, name_phase[by_position] > 0, name_phase[by_position], 0)
    collective = _nearest(
        nesting, position, name_collective[by_position] > 0, name_collective[by_position], 0
    )
    return Context(operator, phase.astype(np.int8), collective.astype(np.int8))


def _nearest(nesting: Nesting, position: Int64, marked: Bool, values: Int64 | Int8, default: int) -> Int64:
    """The value at the nearest marked slice around each position."""
    target = np.append(nesting.nearest_marked(marked), -1)[position]
    return np.where(target >= 0, np.append(values, default)[target], default).astype(np.int64)


def _phase(name: str) -> int:
    return next((int(phase) for phase, pattern in _PHASES if pattern.search(name)), 0)


def kinds(names: Sequence[str], name: Int64, context: Context) -> tuple[Int8, Int8]:
    """Kind and communication of kernels from their names (ids into ``names``) and the context of their launches."""
    used, local = np.unique(name, return_inverse=True)
    kind_by_name, communication_by_name = classify_kernels([names[i] for i in used])
    kind, communication = kind_by_name[local], communication_by_name[local]
    operators, operator = np.unique(context.operator, return_inverse=True)
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
