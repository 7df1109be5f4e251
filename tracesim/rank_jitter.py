"""Ranks that do the same do not take the same time, and collectives inside of layers wait for the slowest of them.

``rank_jitter`` of a machine's profile is the standard deviation, over ranks, of the time that the same layer takes, as
a share of it: chips differ in voltage and temperature and so in the clock their power allows, hosts interrupt, links
differ. Where ``N`` ranks meet in every layer, each layer takes as long as on the slowest of them: for a normal
distribution the mean plus ``E(N)`` standard deviations, ``E(N)`` being the expected largest of ``N`` standard normal
values (Blom 1958, order statistics: the quantile ``(N - 0.375) / (N + 0.25)``).

What whole steps tell of a machine they tell of nodes of eight, and so of the slowest of eight ranks already. What is
added is the difference: ``1 + rank_jitter * (E(N) - E(8))``, and nothing for up to eight.

Who meets in every layer: ranks of tensor and context parallelism, those that exchange tokens of experts, and with ZeRO
stage 2 or 3 those among which weights of each layer are gathered or gradients scattered in every microbatch. Ranks that
meet once in a step (data parallelism with ZeRO 0 or 1) do not count: layers of many passes add up before they wait, and
what differs at random evens out. Stages of a pipeline are not counted either.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import OpGraph
from op_graphs.plan import ParallelPlan
from op_graphs.vocabulary import Phase

from .scenario import Scenario

CALIBRATED_RANKS = 8
"""Ranks of the steps that the figures of profiles are taken from."""

_PASSES = (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT, Phase.RECOMPUTE)


def ranks_that_meet(parallel: ParallelPlan) -> int:
    """Ranks that wait for each other in every layer."""
    dense = parallel.tp * parallel.cp
    if parallel.zero >= 2 and parallel.pp == 1:
        # Replicas of a sharding group reduce gradients among each other too, but no layer waits for that.
        sharded = parallel.hsdp_shard or parallel.data_parallel_size
        return parallel.tp * max(parallel.cp, sharded)
    return max(dense, parallel.ep * parallel.etp)


def expected_largest(count: int) -> float:
    """Expected largest of ``count`` independent standard normal values; 0 for one (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def slowest_rank_factor(scenario: Scenario) -> float:
    """Time of a layer where many ranks meet in it, over the time where eight do."""
    hardware = scenario.hardware
    meet = ranks_that_meet(scenario.parallel)
    if meet <= CALIBRATED_RANKS:
        return 1.0
    return 1.0 + hardware.rank_jitter * (expected_largest(meet) - expected_largest(CALIBRATED_RANKS))


def with_rank_jitter(scenario: Scenario, graph: OpGraph, durations: Int64) -> Int64:
    """Durations with compute of forward and backward passes as long as on the slowest of the ranks that meet.

    Args:
        scenario: whose ranks and machine.
        graph: the operations.
        durations: nanoseconds of each on a rank by itself.
    """
    factor = slowest_rank_factor(scenario)
    if factor == 1.0:
        return durations
    slowed = ~graph.is_communication() & np.isin(graph.operations.phase, [int(phase) for phase in _PASSES])
    return np.where(slowed, np.rint(durations * factor), durations).astype(np.int64)
