"""The bridge of a PCIe server: what crosses it, and how many groups share it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_profiles import ProfileError, import_simumax, load_profile
from hardware_profiles.loader import profile_from_mapping, profile_to_mapping
from op_graphs.vocabulary import Communication
from tracesim.cost import CollectiveCost
from tracesim.cost.bridge import Crossing, crossing

PROFILE = load_profile("a100-pcie-80g")
BRIDGE = replace(PROFILE.network, gpus_per_domain=8, gpus_per_bridge_side=4, bridge_gb_per_s=16.0)
ALL = tuple(range(8))


@pytest.mark.parametrize(
    ("ranks", "is_send", "expected"),
    [
        # one socket
        ((0, 1, 2, 3), False, None),
        ((4, 6), False, None),
        # the whole server is one group
        (ALL, False, Crossing(4, 4, groups=1)),
        # every second card: two groups cross; every fourth: four
        ((0, 2, 4, 6), False, Crossing(2, 2, groups=2)),
        ((1, 5), False, Crossing(1, 1, groups=4)),
        # a second server: its own bridge
        ((9, 13), False, Crossing(1, 1, groups=4)),
        ((0, 1, 8, 9), False, None),
        # sends between stages of four cards, and of two
        ((3, 7), True, Crossing(1, 1, groups=4)),
        ((2, 4), True, Crossing(1, 1, groups=2)),
        ((3, 4), True, Crossing(1, 1, groups=1)),
        ((1, 2), True, None),
        ((7,), False, None),
    ],
)
def test_who_crosses(ranks, is_send, expected):
    assert crossing(ranks, BRIDGE, is_send=is_send) == expected


def time_ns(ranks: tuple[int, ...], what: Communication, size: float, **network: object) -> int:
    figures = replace(BRIDGE, collective_base_us=0.0, **network)
    for tier in ("domain", "fabric"):
        link = replace(getattr(figures, tier), latency_us=0.0, efficiency=1.0, p2p_efficiency=1.0)
        figures = replace(figures, **{tier: replace(link, bandwidth_gb_per_s=32.0)})
    return CollectiveCost(replace(PROFILE, network=figures)).duration_ns(what, size, ranks).time_ns


@pytest.mark.parametrize(
    ("ranks", "what", "expected_ns"),
    [
        # in one socket, at the rate of the links: 3/4 of 32 MB at 32 B/ns
        ((0, 1, 2, 3), Communication.ALL_GATHER, 750_000),
        # two rings of 24 MB over 16 B/ns
        ((0, 2, 4, 6), Communication.ALL_GATHER, 3_000_000),
        # four of 16 MB
        ((0, 4), Communication.REDUCE_SCATTER, 4_000_000),
        ((0, 4), Communication.SEND, 8_000_000),
        # each of four cards sends an eighth to each of four others
        (ALL, Communication.ALL_TO_ALL, 4_000_000),
    ],
)
def test_groups_that_cross_share_the_bridge(ranks, what, expected_ns):
    assert time_ns(ranks, what, 32e6) == expected_ns


def test_a_bridge_as_fast_as_all_links_together_costs_nothing():
    for ranks in ((0, 2, 4, 6), (0, 4), ALL):
        with_bridge = time_ns(ranks, Communication.ALL_GATHER, 32e6, bridge_gb_per_s=4 * 32.0)
        without = time_ns(ranks, Communication.ALL_GATHER, 32e6, gpus_per_bridge_side=0)
        assert with_bridge == without


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bridge_gb_per_s": 0.0}, "give both or neither"),
        ({"gpus_per_bridge_side": 8}, "a side of 8 GPUs leaves none of 8 on the other"),
        ({"gpus_per_bridge_side": -1}, "must be 0 or more"),
    ],
)
def test_a_bridge_that_cannot_be_is_refused(changes, message):
    mapping = profile_to_mapping(PROFILE)
    mapping["network"] |= changes
    with pytest.raises(ProfileError, match=message):
        profile_from_mapping(mapping, "here")


@pytest.mark.shared_data
def test_the_rate_of_the_bridge_is_what_simumax_saw_in_a_job(shared_data):
    folder = shared_data / "simumax_system"
    imported = import_simumax(folder / "a100_pcie.json").network
    # Two rings of 7.65 and of 7, four of 4 and of 3.9, in 2**30 bytes a second.
    expected = (2 * 7.65 + 2 * 7 + 4 * 4 + 4 * 3.9) / 4 * 2**30 / 1e9
    assert imported.gpus_per_bridge_side == PROFILE.network.gpus_per_bridge_side == 4
    assert imported.bridge_gb_per_s == pytest.approx(expected, abs=0.01)
    assert PROFILE.network.bridge_gb_per_s == pytest.approx(expected, abs=0.1)
    assert import_simumax(folder / "b200_bf16_ceperm.json").network.bridge_gb_per_s == 0
