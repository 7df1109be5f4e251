"""Process groups for every rank order, against a second way to find them: axes of an array of ranks."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_graphs.plan import ParallelPlan
from op_graphs.vocabulary import Dimension
from tests.dense_scenarios import dense_mapping
from tracesim.errors import ScenarioError
from tracesim.scenario import load_scenario

ORDERS = ["-".join(order) for order in permutations(("tp", "cp", "ep", "dp", "pp"))]
DENSE = {
    Dimension.TP: ("tp",),
    Dimension.CP: ("cp",),
    Dimension.PP: ("pp",),
    Dimension.DP: ("cp", "dp"),
    Dimension.WORLD: ("tp", "cp", "dp", "pp"),
}
EXPERT = {
    Dimension.ETP: ("tp",),
    Dimension.EP: ("ep",),
    Dimension.EDP: ("dp",),
    Dimension.ETP_EP: ("tp", "ep"),
}


def groups_of_axes(order: str, sizes: dict[str, int], varying: tuple[str, ...]) -> set[tuple[int, ...]]:
    """Groups along axes of the array whose fastest axis is the first of the order (C order: the last)."""
    names = [name for name in reversed(order.split("-")) if name in sizes]
    world = np.arange(np.prod([sizes[name] for name in names])).reshape([sizes[name] for name in names])
    axes = [names.index(name) for name in varying]
    width = int(np.prod([sizes[name] for name in varying]))
    rows = np.moveaxis(world, axes, range(len(names) - len(axes), len(names))).reshape(-1, width)
    return {tuple(sorted(row.tolist())) for row in rows}


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    """Plans Megatron-LM accepts: with pp before another dimension, experts are shared by as many ranks as dp."""
    order = draw(st.sampled_from(ORDERS))
    tp, cp, pp, dp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    ranks = tp * cp * dp
    fitting = [(etp, ep) for etp in (1, 2, 3, 4) for ep in (1, 2, 3, 4, 6, 8) if ranks % (etp * ep) == 0]
    if pp > 1 and not order.endswith("pp"):
        fitting = [(etp, ep) for etp, ep in fitting if etp * ep == tp * cp] or [(tp, cp)]
    etp, ep = draw(st.sampled_from(fitting))
    return ParallelPlan(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, etp=etp, order=order)


@given(plans())
def test_groups_are_those_of_the_axes(plan):
    ranks = range(plan.world_size)
    dense = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp, "pp": plan.pp}
    for dimension, varying in DENSE.items():
        found = {plan.group_ranks(dimension, rank) for rank in ranks}
        assert found == groups_of_axes(plan.order, dense, varying)
    expert = {"tp": plan.etp, "ep": plan.ep, "dp": plan.expert_data_parallel_size, "pp": plan.pp}
    stages = groups_of_axes(plan.order, dense, ("tp", "cp", "dp"))
    if groups_of_axes(plan.order, expert, ("tp", "ep", "dp")) != stages:
        # Megatron-LM stops there: experts would lie on other pipeline stages than the attention before them.
        return
    for dimension, varying in EXPERT.items():
        found = {plan.group_ranks(dimension, rank) for rank in ranks}
        assert found == groups_of_axes(plan.order, expert, varying)


@given(plans())
def test_groups_of_a_dimension_partition_the_world(plan):
    sizes = {
        Dimension.TP: plan.tp,
        Dimension.CP: plan.cp,
        Dimension.PP: plan.pp,
        Dimension.DP: plan.dp * plan.cp,
        Dimension.ETP: plan.etp,
        Dimension.EP: plan.ep,
        Dimension.EDP: plan.expert_data_parallel_size,
        Dimension.ETP_EP: plan.etp * plan.ep,
        Dimension.WORLD: plan.world_size,
    }
    for dimension, size in sizes.items():
        groups = {plan.group_ranks(dimension, rank) for rank in range(plan.world_size)}
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(plan.world_size))
        assert all(rank in plan.group_ranks(dimension, rank) for rank in range(0, plan.world_size, 3))


@given(plans())
def test_coordinates_name_a_rank(plan):
    for rank in range(plan.world_size):
        at = plan.coordinates(rank)
        assert plan.rank_of(**{name: at[name] for name in ("tp", "cp", "dp", "pp")}) == rank
        group = plan.group_ranks(Dimension.EP, rank)
        assert group.index(rank) == at["ep"]


@pytest.mark.parametrize(
    ("order", "dimension", "group"),
    # 16 ranks: tp 2, ep 2, dp 4, pp 2. Megatron-LM's documentation of initialize_model_parallel has the first.
    [
        ("tp-cp-ep-dp-pp", Dimension.TP, (0, 1)),
        ("tp-cp-ep-dp-pp", Dimension.DP, (0, 2, 4, 6)),
        ("tp-cp-ep-dp-pp", Dimension.PP, (0, 8)),
        ("tp-cp-ep-dp-pp", Dimension.EP, (0, 2)),
        ("tp-cp-ep-dp-pp", Dimension.EDP, (0, 4)),
        ("tp-cp-dp-ep-pp", Dimension.EP, (0, 4)),
        ("dp-tp-cp-ep-pp", Dimension.TP, (0, 4)),
        ("tp-cp-ep-pp-dp", Dimension.PP, (0, 2)),
        ("pp-tp-cp-ep-dp", Dimension.PP, (0, 1)),
    ],
)
def test_the_group_of_rank_0(order, dimension, group):
    plan = ParallelPlan(tp=2, dp=4, pp=2, ep=2, etp=2, order=order)
    assert plan.group_ranks(dimension, 0) == group


@pytest.mark.parametrize("order", ORDERS)
def test_tensor_parallel_ranks_are_neighbours_where_tp_comes_first(order):
    plan = ParallelPlan(tp=4, cp=2, dp=2, pp=2, order=order)
    neighbours = plan.group_ranks(Dimension.TP, 0) == (0, 1, 2, 3)
    assert neighbours == (order.replace("ep-", "").startswith("tp"))


def test_experts_on_other_stages_than_their_attention_are_refused():
    moe = {"experts": 8, "top_k": 2, "expert_ffn_size": 64}
    plan = {"pp": 2, "dp": 4, "ep": 2, "order": "tp-cp-ep-pp-dp"}
    with pytest.raises(ScenarioError, match=r"parallel.order: tp-cp-ep-pp-dp .* nearest: tp-cp-ep-dp-pp"):
        load_scenario(dense_mapping(model__moe=moe, parallel=plan))
