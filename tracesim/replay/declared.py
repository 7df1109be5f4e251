"""Waits that need no inference: a trace of micro-operations says what each row is, and so what it waits for.

Of each rank, in the order of a step of training with pipeline and data parallelism:

- communication is issued after the compute before it on its rank, and waits for that;
- a forward waits for its activation, a backward for its gradient: the receive of the same number in the step;
- the first forward of a step waits for the parameters, the optimizer for the norm of the gradients, and gathering the
  parameters of the next step for the optimizer.

What starts later than that was launched late: `launch delay
<https://arxiv.org/abs/2505.05713>`_ of the trace, which a replay keeps as unexplained.
"""

from __future__ import annotations

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.vocabulary import Communication, Phase, TrackRole
from tracesim.replay.measured import Delays, Measured
from tracesim.replay.waits import NO_WAITS, Waits

NO_DELAYS = Delays(launch=0, graph=0, queue=0, event=0, return_=0)
OPERATION_CLOCK_NS = 100_000
"""By how much a row may start before what it waits for has ended: such traces agree to about 0.1 ms."""


def declared_waits(measured: Measured) -> Waits:
    """What the rows of a trace of micro-operations wait for on other streams of their rank."""
    waits = NO_WAITS
    for rank in range(len(measured.timeline.ranks)):
        waits = waits.joined(_Rank(measured, rank).waits())
    return waits


class _Rank:
    def __init__(self, measured: Measured, rank: int) -> None:
        slices, timeline = measured.timeline.slices, measured.timeline
        mine = measured.device[measured.rank[measured.device] == rank]
        self.rows = mine[np.lexsort((measured.end[mine], measured.start[mine]))]
        self.measured = measured
        begins = np.sort(timeline.steps.start[timeline.steps.rank == rank])
        self.step = np.searchsorted(begins, measured.start[self.rows], side="right")
        self.computes = timeline.slice_roles()[self.rows] == TrackRole.COMPUTE
        self.phase = slices.phase[self.rows]
        self.communication = slices.communication[self.rows]

    def waits(self) -> Waits:
        computes = self.computes
        forward = computes & (self.phase == Phase.FORWARD)
        optimizer = computes & (self.phase == Phase.OPTIMIZER)
        receives = self.communication == Communication.RECEIVE
        gathers = self.communication == Communication.ALL_GATHER
        norms = (self.communication == Communication.ALL_REDUCE) & (self.phase == Phase.OPTIMIZER)
        found = [self._after_the_last(~computes & ~gathers, computes)]
        for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
            same = self.phase == phase
            found.append(self._after_its_own(computes & same, receives & same))
        found.append(self._after_the_last(forward, gathers))
        found.append(self._after_the_last(optimizer, norms))
        found.append(self._after_the_last(gathers, optimizer))
        waits = NO_WAITS
        for target, source in found:
            waits = waits.joined(Waits(target, source))
        return waits

    def _after_the_last(self, targets: Bool, sources: Bool) -> tuple[Int64, Int64]:
        """Each target with the last source that had ended when it started."""
        source, target = self.rows[sources], self.rows[targets]
        source = source[np.argsort(self.measured.end[source], kind="stable")]
        limit = self.measured.start[target] + OPERATION_CLOCK_NS
        at = np.searchsorted(self.measured.end[source], limit, side="right") - 1
        return target[at >= 0], source[at[at >= 0]]

    def _after_its_own(self, targets: Bool, sources: Bool) -> tuple[Int64, Int64]:
        """The n-th target of a step with the n-th source; the last that had ended where the counts differ."""
        pairs = [self._after_the_last(np.zeros_like(targets), sources)]
        for step in np.unique(self.step[targets]).tolist():
            here = self.step == step
            target, source = self.rows[targets & here], self.rows[sources & here]
            if len(target) == len(source):
                pairs.append((target, source))
            else:
                pairs.append(self._after_the_last(targets & here, sources & here))
        return np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])
