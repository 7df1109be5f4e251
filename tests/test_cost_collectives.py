"""Durations of collectives: closed forms, placement, the choice of algorithm and protocol, measured rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_profiles.profile import (
    AttentionFigures,
    GemmFigures,
    GemmTile,
    HardwareProfile,
    HostFigures,
    LinkFigures,
    MeasuredCollective,
    MemoryFigures,
    NetworkFigures,
)
from op_graphs.graph import OPERATION_DEFAULTS, Buffers, Operations, OpGraph, Segments
from op_graphs.timeline import CommunicationGroup
from op_graphs.vocabulary import Communication, OpKind
from tracesim.cost import Algorithm, CollectiveCost, CollectiveEstimate, Placement, Protocol, Tier

ALL_REDUCE, ALL_GATHER = Communication.ALL_REDUCE, Communication.ALL_GATHER
REDUCE_SCATTER, ALL_TO_ALL = Communication.REDUCE_SCATTER, Communication.ALL_TO_ALL
BROADCAST, REDUCE, BARRIER = Communication.BROADCAST, Communication.REDUCE, Communication.BARRIER
SEND, RECEIVE, SEND_RECEIVE = Communication.SEND, Communication.RECEIVE, Communication.SEND_RECEIVE
GATHER, SCATTER = Communication.GATHER, Communication.SCATTER
COSTED = [
    *(ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, REDUCE),
    *(SEND, SEND_RECEIVE, GATHER),
]

# Eight GPUs a domain at 400 B/ns, a NIC of 50 B/ns each.
FREE_LATENCY = NetworkFigures(
    gpus_per_domain=8,
    domain=LinkFigures(400, 1.0, 0.0),
    fabric=LinkFigures(50, 1.0, 0.0),
    collective_base_us=0.0,
)
MACHINE = HardwareProfile(
    name="round",
    description="",
    vendor="none",
    sm_count=100,
    peak_tflops={"bf16": 100.0},
    gemm=GemmFigures((GemmTile(100, 100),), 1.0, 1.0, 0.0, 0.0),
    attention=AttentionFigures(0.5, 0.5, 0.0),
    memory=MemoryFigures(80, 1000, 1.0, 0.5, 0.25, 2.0, 1.5),
    network=FREE_LATENCY,
    host=HostFigures(5.0),
    sources={},
)
REAL_LATENCY = replace(
    FREE_LATENCY,
    domain=LinkFigures(400, 0.8, 2.0),
    fabric=LinkFigures(50, 0.9, 5.0),
    collective_base_us=8.0,
)


def cost(network: NetworkFigures = FREE_LATENCY, **changes: Any) -> CollectiveCost:
    return CollectiveCost(replace(MACHINE, network=replace(network, **changes)))


def domain(count: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + count))


SIZE = 400_000_000
ONE_NODE, TWO_NODES, FOUR_NODES = domain(8), domain(16), domain(32)
ONE_RANK_A_NODE = tuple(range(0, 64, 8))

# Bandwidth terms of the ring and of direct exchange, all latencies zero: (what, ranks, expected nanoseconds).
BANDWIDTH_CASES = {
    "ring of n: 2(n-1)/n": (ALL_REDUCE, ONE_NODE, 2 * 7 / 8 * SIZE / 400),
    "ring of two": (ALL_REDUCE, domain(2), SIZE / 400),
    "gather: (n-1)/n of the full buffer": (ALL_GATHER, ONE_NODE, 7 / 8 * SIZE / 400),
    "scatter-reduction as a gather": (REDUCE_SCATTER, ONE_NODE, 7 / 8 * SIZE / 400),
    "all-to-all inside": (ALL_TO_ALL, ONE_NODE, 7 / 8 * SIZE / 400),
    "broadcast passes everything once": (BROADCAST, ONE_NODE, SIZE / 400),
    "reduce passes everything once": (REDUCE, ONE_NODE, SIZE / 400),
    "send inside": (SEND, domain(2), SIZE / 400),
    "receive costs as its send": (RECEIVE, domain(2), SIZE / 400),
    "both ways at once, full duplex": (SEND_RECEIVE, domain(2), SIZE / 400),
    "send across uses one NIC": (SEND, (0, 8), SIZE / 50),
    "one rank a node uses one NIC": (ALL_GATHER, ONE_RANK_A_NODE, 7 / 8 * SIZE / 50),
    "eight ranks a node reach the speed of NVLink": (ALL_GATHER, FOUR_NODES, 31 / 32 * SIZE / 400),
    "two ranks a node use two NICs": (ALL_GATHER, (0, 1, 8, 9), 3 / 4 * SIZE / 100),
    "the domain with fewest members decides": (ALL_GATHER, (0, 1, 2, 8), 3 / 4 * SIZE / 50),
    "all-to-all across: only what leaves the node": (ALL_TO_ALL, TWO_NODES, 1 / 2 * SIZE / 50),
    "gather at its root": (GATHER, ONE_NODE, 7 / 8 * SIZE / 400),
    "one's own data": (ALL_REDUCE, (5,), 0),
    "a pipeline send takes its slowest neighbours": (SEND, (0, 4, 8), SIZE / 50),
    "a chain inside a node": (SEND, (0, 2, 4), SIZE / 400),
    "two nodes reduce halves towards each other": (ALL_REDUCE, (0, 8), SIZE / 50),
}


@pytest.mark.parametrize("case", BANDWIDTH_CASES)
def test_time_without_latency_is_traffic_over_bandwidth(case: str) -> None:
    communication, ranks, expected_ns = BANDWIDTH_CASES[case]
    assert cost().duration_ns(communication, SIZE, ranks).time_ns == round(expected_ns)


def test_ring_around_the_nodes_closes_for_an_exchange_with_both_neighbours() -> None:
    # Context-parallel ring of four inside a node of two: the send 1 -> 2 crosses, and so does 3 -> 0.
    paired = cost(gpus_per_domain=2)
    assert paired.duration_ns(SEND_RECEIVE, SIZE, (0, 1, 2, 3)).tier == Tier.FABRIC
    assert cost().duration_ns(SEND_RECEIVE, SIZE, (0, 1, 2, 3)).tier == Tier.DOMAIN


def test_nvl72_keeps_in_the_domain_what_leaves_a_node_of_eight() -> None:
    assert cost(gpus_per_domain=72).duration_ns(ALL_GATHER, SIZE, FOUR_NODES).tier == Tier.DOMAIN
    assert cost().duration_ns(ALL_GATHER, SIZE, FOUR_NODES).tier == Tier.FABRIC


# ---- latency -----------------------------------------------------------------------------------------------

# Empty messages cost only steps: LL has half of the stated latency a step (1 us inside, 2.5 us across).
LATENCY_CASES = {
    "base and 14 steps": (ALL_REDUCE, ONE_NODE, Algorithm.RING, 8 + 14 * 1.0),
    "base and 7 steps": (ALL_GATHER, ONE_NODE, Algorithm.RING, 8 + 7 * 1.0),
    "ring of 16 over two nodes crosses twice": (
        ALL_GATHER,
        TWO_NODES,
        Algorithm.RING,
        8 + 13 * 1.0 + 2 * 2.5,
    ),
    "one rank a node: every step crosses": (ALL_GATHER, ONE_RANK_A_NODE, Algorithm.RING, 8 + 7 * 2.5),
    "tree of eight nodes: three levels up and down": (
        ALL_REDUCE,
        ONE_RANK_A_NODE,
        Algorithm.TREE,
        8 + 6 * 2.5,
    ),
    "tree with chains of eight inside": (ALL_REDUCE, FOUR_NODES, Algorithm.TREE, 8 + 14 * 1.0 + 4 * 2.5),
    "barrier as an empty all-reduce": (BARRIER, ONE_NODE, Algorithm.RING, 8 + 14 * 1.0),
    "one send": (SEND, (0, 1), Algorithm.EXCHANGE, 8 + 1.0),
    "seven peers at a time": (ALL_TO_ALL, ONE_NODE, Algorithm.EXCHANGE, 8 + 1.0),
    "63 peers in eight rounds": (ALL_TO_ALL, domain(64), Algorithm.EXCHANGE, 8 + 8 * 2.5),
}


@pytest.mark.parametrize("case", LATENCY_CASES)
def test_empty_message_costs_its_steps(case: str) -> None:
    communication, ranks, algorithm, expected_us = LATENCY_CASES[case]
    estimate = cost(REAL_LATENCY).duration_ns(communication, 0, ranks)
    assert (estimate.algorithm, estimate.protocol) == (algorithm, Protocol.LL)
    assert estimate.time_ns == round(expected_us * 1e3)


def test_protocol_grows_with_the_message_as_latency_stops_to_matter() -> None:
    chosen = [
        cost(REAL_LATENCY).duration_ns(ALL_GATHER, 2**power, ONE_NODE).protocol for power in range(10, 34)
    ]
    order = [Protocol.LL, Protocol.LL128, Protocol.SIMPLE]
    assert sorted(chosen, key=order.index) == chosen
    assert set(chosen) == set(order)


def test_tree_gives_way_to_the_ring_for_large_messages_on_many_nodes() -> None:
    chosen = [
        cost(REAL_LATENCY).duration_ns(ALL_REDUCE, 2**power, domain(128)).algorithm for power in range(10, 36)
    ]
    assert chosen[0] == Algorithm.TREE
    assert chosen[-1] == Algorithm.RING
    assert sorted(chosen, key=[Algorithm.TREE, Algorithm.RING].index) == chosen


# ---- multicast ---------------------------------------------------------------------------------------------


def test_multicast_all_reduce_moves_the_buffer_about_once() -> None:
    estimate = cost(multicast=True).duration_ns(ALL_REDUCE, SIZE, ONE_NODE)
    assert estimate.algorithm == Algorithm.NVLS
    # 1 + 1/8 of the buffer each way at 85 % of the rate, instead of 14/8 of it.
    assert estimate.time_ns == round(1.125 * SIZE / (400 * 0.85))
    assert estimate.domain_bytes == 1.125 * SIZE


def test_multicast_with_trees_across_nodes() -> None:
    estimate = cost(multicast=True, fabric=LinkFigures(100, 1.0, 0.0)).duration_ns(
        ALL_REDUCE, SIZE, FOUR_NODES
    )
    assert estimate.algorithm == Algorithm.NVLS_TREE
    # Two passes over eight NICs of 100 B/ns are done before 1.125 passes inside a node.
    assert estimate.time_ns == round(1.125 * SIZE / (400 * 0.85))
    assert estimate.fabric_bytes == 2 * SIZE / 8


def test_multicast_is_not_used_by_one_rank_a_node() -> None:
    estimate = cost(REAL_LATENCY, multicast=True).duration_ns(ALL_REDUCE, SIZE, ONE_RANK_A_NODE)
    assert estimate.algorithm in (Algorithm.RING, Algorithm.TREE)


# ---- what the links carry ----------------------------------------------------------------------------------


def test_links_carry_the_traffic_of_the_ring() -> None:
    estimate = cost().duration_ns(ALL_GATHER, SIZE, FOUR_NODES)
    assert estimate.domain_bytes == 31 / 32 * SIZE
    assert estimate.fabric_bytes == 31 / 32 * SIZE / 8


def test_bus_bandwidth_of_a_large_message_is_the_rate_of_the_link() -> None:
    network = replace(REAL_LATENCY, collective_base_us=0.0)
    for communication in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, SEND):
        ranks = ONE_NODE if communication != SEND else domain(2)
        estimate = cost(network).duration_ns(communication, 2**40, ranks)
        assert estimate.bus_gb_per_s == pytest.approx(400 * 0.8, rel=1e-3)


def test_sends_may_have_an_efficiency_of_their_own() -> None:
    network = replace(FREE_LATENCY, domain=LinkFigures(400, 0.8, 0.0, p2p_efficiency=0.5))
    assert cost(network).duration_ns(SEND, SIZE, domain(2)).time_ns == SIZE / 200
    assert cost(network).duration_ns(BROADCAST, SIZE, domain(2)).time_ns == SIZE / 320


# ---- properties --------------------------------------------------------------------------------------------

NETWORKS = st.sampled_from(
    [
        FREE_LATENCY,
        REAL_LATENCY,
        replace(REAL_LATENCY, multicast=True),
        replace(REAL_LATENCY, gpus_per_domain=72),
    ]
)
GROUPS = st.lists(st.integers(0, 71), min_size=1, max_size=24, unique=True).map(tuple)
BYTES = st.integers(0, 2**36)


@given(NETWORKS, st.sampled_from(COSTED), GROUPS, BYTES, BYTES)
def test_time_is_positive_and_grows_with_the_message(
    network: NetworkFigures, communication: Communication, ranks: tuple[int, ...], one: int, other: int
) -> None:
    few, many = (
        cost(network).duration_ns(communication, size, ranks).time_ns for size in sorted((one, other))
    )
    assert 0 <= few <= many
    assert (few == 0) == (len(ranks) == 1)


@given(NETWORKS, st.sampled_from(COSTED), GROUPS, BYTES, st.floats(1.0, 8.0))
def test_more_bandwidth_is_never_slower(
    network: NetworkFigures, communication: Communication, ranks: tuple[int, ...], size: int, factor: float
) -> None:
    before = cost(network).duration_ns(communication, size, ranks).time_ns
    for tier in ("domain", "fabric"):
        link: LinkFigures = getattr(network, tier)
        faster = replace(link, bandwidth_gb_per_s=link.bandwidth_gb_per_s * factor)
        assert cost(network, **{tier: faster}).duration_ns(communication, size, ranks).time_ns <= before


@given(
    NETWORKS,
    st.sampled_from([c for c in COSTED if c != SEND_RECEIVE and c != SEND]),
    GROUPS,
    BYTES,
    st.randoms(),
)
def test_order_of_ranks_does_not_matter(
    network: NetworkFigures, communication: Communication, ranks: tuple[int, ...], size: int, random: Any
) -> None:
    shuffled = list(ranks)
    random.shuffle(shuffled)
    model = cost(network)
    assert model.duration_ns(communication, size, tuple(shuffled)) == model.duration_ns(
        communication, size, ranks
    )


@given(st.sampled_from(COSTED), GROUPS, BYTES)
def test_ties_fall_the_same_way_every_time(
    communication: Communication, ranks: tuple[int, ...], size: int
) -> None:
    free = cost(FREE_LATENCY)
    first = free.duration_ns(communication, size, ranks)
    assert all(free.duration_ns(communication, size, ranks) == first for _ in range(3))


def test_a_tie_goes_to_the_first_candidate() -> None:
    # Free steps and no bytes: every pair costs the same.
    estimate = cost().duration_ns(ALL_REDUCE, 0, FOUR_NODES)
    assert (estimate.algorithm, estimate.protocol) == (Algorithm.RING, Protocol.LL)


# ---- measured lines ----------------------------------------------------------------------------------------

LINES = (
    MeasuredCollective("all_reduce", "domain", 0.5, fixed_us=20.0, per_step_us=5.0),
    MeasuredCollective("all_reduce", "domain", 0.25, fixed_us=0.0, per_step_us=0.0, group_size=4),
    MeasuredCollective("all_gather", "fabric", 0.5, fixed_us=10.0, per_step_us=1.0),
    MeasuredCollective("p2p", "domain", 0.1, fixed_us=3.0, per_step_us=0.0),
)

MEASURED_CASES = {
    "fixed, steps and efficiency": (ALL_REDUCE, ONE_NODE, 20_000 + 7 * 5_000 + 1.75 * SIZE / 200),
    "the line of this very size": (ALL_REDUCE, domain(4), 1.5 * SIZE / 100),
    "across, with as many NICs as ranks": (ALL_GATHER, (0, 1, 8, 9), 10_000 + 3 * 1_000 + 0.75 * SIZE / 50),
    "a send": (SEND, domain(2), 3_000 + SIZE / 40),
    "no line for this tier": (ALL_GATHER, ONE_NODE, 7 / 8 * SIZE / 400),
}


@pytest.mark.parametrize("case", MEASURED_CASES)
def test_measured_line_wins(case: str) -> None:
    communication, ranks, expected_ns = MEASURED_CASES[case]
    model = CollectiveCost(replace(MACHINE, measured_collectives=LINES))
    estimate = model.duration_ns(communication, SIZE, ranks)
    assert estimate.time_ns == round(expected_ns)
    assert (estimate.algorithm == Algorithm.MEASURED) == (not case.startswith("no line"))


# ---- placement and bad input -------------------------------------------------------------------------------


def test_placement_follows_from_rank_numbers() -> None:
    assert Placement.of((0, 1, 7, 8, 17), 8) == Placement(5, 3, 1, 3)
    assert Placement.of((9,), 8).tier == Tier.SELF


BAD: dict[str, tuple[Callable[[], CollectiveEstimate], str]] = {
    "unknown": (
        lambda: cost().duration_ns(Communication.UNKNOWN, 1, (0, 1)),
        "UNKNOWN cannot be costed; known are",
    ),
    "none": (lambda: cost().duration_ns(Communication.NONE, 1, (0, 1)), "NONE cannot be costed"),
    "size": (lambda: cost().duration_ns(ALL_REDUCE, -1, (0, 1)), "-1 bytes; it must be 0 or more"),
    "empty": (lambda: cost().duration_ns(ALL_REDUCE, 1, ()), "no ranks"),
    "twice": (lambda: cost().duration_ns(ALL_REDUCE, 1, (3, 3)), "repeated rank"),
    "negative": (lambda: cost().duration_ns(ALL_REDUCE, 1, (-1, 3)), "negative or a repeated rank"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


# ---- graphs ------------------------------------------------------------------------------------------------


def graph_of(rows: list[dict[str, Any]], groups: tuple[CommunicationGroup, ...]) -> OpGraph:
    return OpGraph(
        strings=("grads_reduce_scatter",),
        ranks=np.array([0]),
        operations=Operations.from_rows(rows, **{**OPERATION_DEFAULTS, "name": 0}),
        dependency_offsets=np.zeros(len(rows) + 1, dtype=np.int64),
        dependencies=np.empty(0, dtype=np.int64),
        segments=Segments.empty(),
        buffers=Buffers.empty(),
        groups=groups,
    )


def test_graph_durations_equal_single_durations_in_every_row() -> None:
    groups = (CommunicationGroup("tp", ONE_NODE), CommunicationGroup("dp", ONE_RANK_A_NODE))
    rows: list[dict[str, Any]] = []
    for size in (1000, 1_000_000):
        for group in (0, 1):
            for communication in (ALL_REDUCE, ALL_GATHER):
                row = {"kind": OpKind.COLLECTIVE, "communication": communication}
                rows.append({**row, "communication_bytes": size, "group": group})
    rows = [*rows, {"kind": OpKind.GEMM}] * 5
    model = cost(REAL_LATENCY)
    expected = [
        model.duration_ns(
            row["communication"], row["communication_bytes"], groups[row["group"]].ranks
        ).time_ns
        if "communication" in row
        else 0
        for row in rows
    ]
    assert model.durations_ns(graph_of(rows, groups)).tolist() == expected


def test_operation_of_a_graph_without_members_is_named() -> None:
    row = {"kind": OpKind.COLLECTIVE, "communication": REDUCE_SCATTER, "communication_bytes": 8, "group": 0}
    graph = graph_of([row], (CommunicationGroup("dp", size=8),))
    with pytest.raises(ValueError, match=r"operation 'grads_reduce_scatter' in group 'dp': .* has no ranks"):
        cost().durations_ns(graph)


# ---- measured rows -----------------------------------------------------------------------------------------

A100_SXM = NetworkFigures(8, LinkFigures(300, 0.77, 1.9), LinkFigures(25, 0.92, 4.0), collective_base_us=8.4)
H100_SXM = NetworkFigures(
    8, LinkFigures(450, 0.80, 1.9), LinkFigures(50, 0.92, 4.0), collective_base_us=8.4, multicast=True
)

# Tolerances in per cent. The domain efficiency is the one of large all-gathers; nothing is fitted on these rows.
PUBLISHED = [
    (
        "8 A100, 67 MB all-reduce in a GPT forward: 603 us",
        A100_SXM,
        ALL_REDUCE,
        4 * 2048 * 4096 * 2,
        603e3,
        7,
    ),
    ("8 A100, large all-reduce: bus 230 GB/s", A100_SXM, ALL_REDUCE, 2**33, 1.75 * 2**33 / 230, 2),
    ("8 H100 with NVLS, large all-reduce: bus 478 GB/s", H100_SXM, ALL_REDUCE, 2**33, 1.75 * 2**33 / 478, 3),
    ("8 H100, large all-gather: bus 357 GB/s", H100_SXM, ALL_GATHER, 2**33, 0.875 * 2**33 / 357, 2),
]


@pytest.mark.parametrize(("what", "network", "communication", "size", "measured_ns", "tolerance"), PUBLISHED)
def test_published_collective_inside_a_domain(
    what: str,
    network: NetworkFigures,
    communication: Communication,
    size: int,
    measured_ns: float,
    tolerance: float,
) -> None:
    estimate = cost(network).duration_ns(communication, size, ONE_NODE)
    error = (estimate.time_ns / measured_ns - 1) * 100
    print(f"{what}: {error:+.1f} %, {estimate.algorithm.value}/{estimate.protocol.value}")
    assert abs(error) <= tolerance


@pytest.mark.shared_data
def test_published_sweep_over_four_nodes(shared_data: Path) -> None:
    """An all-reduce sweep whose plateau, 92 GB/s of bus bandwidth, gives the NIC rate; the machine is not named.

    Sizes of 64 MiB and more have to follow; below, only that latency dominates and the rate rises is checked.
    """
    rates = json.loads((shared_data / "measured" / "achieved_rates.json").read_text())
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    model = cost(replace(A100_SXM, fabric=LinkFigures(12.5, 0.92, 4.0)))
    errors = {}
    for row in rates:
        if row["kind"] == "all_reduce busbw":
            size = int(row["payload"][:-3]) * units[row["payload"][-3:]]
            measured_ns = 2 * 31 / 32 * size / row["busbw_GBps"]
            errors[size] = (model.duration_ns(ALL_REDUCE, size, FOUR_NODES).time_ns / measured_ns - 1) * 100
    large = np.array([error for size, error in errors.items() if size >= 64 * 2**20])
    small = np.array([error for size, error in errors.items() if size < 64 * 2**20])
    print(
        f"64 MiB to 16 GiB: mean |error| {np.abs(large).mean():.1f} %; below: {np.abs(small).mean():.1f} %, "
        f"{small.min():+.0f} to {small.max():+.0f} %"
    )
    assert (len(small), len(large)) == (11, 9)
    assert np.abs(large).mean() <= 4
    assert np.abs(small).mean() <= 45
