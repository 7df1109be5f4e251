"""Fabrics with leaves: what stays under one costs as before, what leaves it shares the uplinks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_profiles import ProfileError, load_profile
from hardware_profiles.loader import profile_from_mapping, profile_to_mapping
from op_graphs.graph import ExchangeShape
from op_graphs.vocabulary import Communication
from tests.graphs import graph_of
from tests.test_cost_contention import scenario
from tracesim.contention import execute
from tracesim.cost import Algorithm, CollectiveCost, CollectiveEstimate, CostModel
from tracesim.cost.contention import FABRIC_OUT, UPLINK_OUT, sharing_policy
from tracesim.cost.uplink import departure
from tracesim.lowering import lower_scenario
from tracesim.sharing import Demand, SharingPolicy

ALL_GATHER, ALL_TO_ALL = Communication.ALL_GATHER, Communication.ALL_TO_ALL
TOY = load_profile("toy")
SIZE = 64e6


def machine(leaf: int = 4, ratio: float = 4.0, gpus: int = 8):
    """NICs of 50 B/ns, links inside that cost nothing, no latency; ``leaf`` domains share uplinks of a ``ratio``-th."""
    network = replace(
        TOY.network,
        gpus_per_domain=gpus,
        domain=replace(TOY.network.domain, bandwidth_gb_per_s=1e6, efficiency=1.0, latency_us=0.0),
        fabric=replace(TOY.network.fabric, bandwidth_gb_per_s=50.0, efficiency=1.0, latency_us=0.0),
        collective_base_us=0.0,
        multicast=False,
        domains_per_leaf=leaf,
        oversubscription=ratio,
    )
    return replace(TOY, network=network, measured_collectives=())


def estimate(
    ranks, what=ALL_GATHER, *, exchange: ExchangeShape | None = None, **figures
) -> CollectiveEstimate:
    algorithm = Algorithm.RING if what is ALL_GATHER else None
    costs = CollectiveCost(machine(**figures))
    return costs.duration_ns(what, SIZE, tuple(ranks), algorithm=algorithm, exchange=exchange)


LEAF = range(32)
TWO_LEAVES = range(64)
ONE_GPU_A_DOMAIN = range(0, 64, 8)
ONE_GPU_A_LEAF = range(0, 64, 32)


@pytest.mark.parametrize(
    ("what", "ranks", "expected_ns"),
    [
        # under one leaf: the NICs' rate
        (ALL_GATHER, range(0, 32, 8), 3 / 4 * SIZE / 50),
        (ALL_TO_ALL, LEAF, 24 / 32 * SIZE / 50),
        (Communication.SEND, (0, 8), SIZE / 50),
        # a ring of four domains a leaf leaves it on one edge: a quarter of uplinks that are a quarter suffices
        (ALL_GATHER, ONE_GPU_A_DOMAIN, 7 / 8 * SIZE / 50),
        # with one GPU a leaf all siblings leave at once
        (ALL_GATHER, ONE_GPU_A_LEAF, 1 / 2 * SIZE / (50 / 4)),
        # half of an exchange over two leaves leaves
        (ALL_TO_ALL, TWO_LEAVES, 32 / 64 * SIZE / (50 / 4)),
        # a send to the next domain: a quarter of the leaf's ranks send out
        (Communication.SEND, (24, 32), SIZE / 50),
        # ... to the rank two domains on: half of them, over a quarter of the rate
        (Communication.SEND, (16, 32), 2 * SIZE / 50),
        (Communication.SEND, (0, 32), 4 * SIZE / 50),
    ],
)
def test_what_leaves_a_leaf_shares_its_uplinks(what, ranks, expected_ns):
    assert estimate(ranks, what).time_ns == pytest.approx(expected_ns, rel=1e-4)


@pytest.mark.parametrize("what", [ALL_GATHER, ALL_TO_ALL])
@pytest.mark.parametrize("ranks", [LEAF, TWO_LEAVES, ONE_GPU_A_DOMAIN, ONE_GPU_A_LEAF])
def test_uplinks_as_wide_as_the_nics_and_no_leaves_cost_nothing(what, ranks):
    flat = estimate(ranks, what, leaf=0, ratio=1.0)
    assert flat.uplink_bytes == 0
    assert estimate(ranks, what, ratio=1.0).time_ns == flat.time_ns


def test_a_whole_fast_domain_a_leaf_is_an_nvl72_rack():
    """72 GPUs a domain, one domain a leaf: what leaves the rack leaves the leaf."""
    ring = estimate(range(144), leaf=1, gpus=72)
    assert ring.uplink_bytes == pytest.approx(ring.fabric_bytes)
    assert ring.time_ns == pytest.approx(4 * ring.fabric_bytes / 50, rel=1e-4)
    assert estimate(range(72), leaf=1, gpus=72).uplink_bytes == 0


def test_tokens_that_cross_once_a_domain_leave_with_the_domains_outside():
    exchange = ExchangeShape(token_bytes=SIZE, top_k=8, groups=8, top_groups=4)
    found = estimate(TWO_LEAVES, ALL_TO_ALL, exchange=exchange)
    # seven other domains, four of them under the other leaf
    assert found.uplink_bytes == pytest.approx(4 / 7 * found.fabric_bytes)


@given(
    st.sets(st.integers(0, 127), min_size=2, max_size=40),
    st.sampled_from([1, 2, 4, 8]),
    st.floats(1.0, 16.0),
    st.booleans(),
)
def test_no_more_leaves_than_is_moved_and_more_oversubscription_is_never_faster(ranks, leaf, ratio, is_send):
    group = tuple(sorted(ranks))
    found = departure(group, machine(leaf).network, is_send=is_send)
    assert 0 <= found.passing <= 1
    assert 0 <= found.exchanged <= 1
    for what in (ALL_GATHER, ALL_TO_ALL):
        slower, faster = (estimate(group, what, leaf=leaf, ratio=of).time_ns for of in (2 * ratio, ratio))
        assert slower >= faster


def test_collectives_of_different_groups_share_the_uplinks():
    """Two gathers that each need a NIC of their own at full rate, but together the uplinks of the leaf twice."""
    profile = machine(leaf=1, ratio=1.0)
    alone = estimate(ONE_GPU_A_DOMAIN, leaf=1, ratio=1.0)
    demand = Demand(uses=((0, alone.uplink_bytes / alone.time_ns),))
    graph = graph_of([{"stream": 1}, {"stream": 3}])
    sharing = SharingPolicy(
        np.zeros(2, dtype=np.int64), (demand,), (profile.network.fabric.bandwidth_gb_per_s,), admission=False
    )
    lasts = np.array([alone.time_ns, alone.time_ns])
    assert execute(graph, lasts, sharing=sharing).end == pytest.approx(2 * lasts, abs=2)


def test_the_policy_has_the_uplinks_at_their_rate_and_what_leaves_as_their_use():
    changed = scenario(parallel__tp=1, parallel__pp=1, parallel__dp=16)
    costs = CostModel(machine(leaf=1, ratio=3.0))
    graph = lower_scenario(changed)
    durations = costs.durations_ns(graph)
    policy = sharing_policy(costs, graph, durations)
    assert policy.capacities[UPLINK_OUT] == pytest.approx(policy.capacities[FABRIC_OUT] / 3)
    # gradients of all sixteen ranks in two domains cross between leaves
    used = [dict(policy.demands[number].uses) for number in policy.classes.tolist()]
    assert any(uses.get(UPLINK_OUT, 0) > 0 for uses in used)
    assert all(
        uses[UPLINK_OUT] <= policy.capacities[UPLINK_OUT] * 1.01 for uses in used if UPLINK_OUT in uses
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"oversubscription": 2.0}, "network.oversubscription: 2.0 of what\\? domains_per_leaf says"),
        ({"domains_per_leaf": 4, "oversubscription": 0.5}, "must be 1 or more"),
        ({"domains_per_leaf": -1}, "must be 0 or more"),
    ],
)
def test_a_fabric_that_cannot_be_is_refused(changes, message):
    mapping = profile_to_mapping(load_profile("h100-sxm"))
    mapping["network"] |= changes
    mapping["sources"] |= {f"network.{key}": "made up" for key in changes}
    with pytest.raises(ProfileError, match=message):
        profile_from_mapping(mapping, "here")
