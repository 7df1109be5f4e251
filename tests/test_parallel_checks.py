"""What experts, context parallelism, sharding and recompute allow, and the process groups that follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_graphs.plan import ParallelPlan
from op_graphs.vocabulary import Dimension
from tests.scenario_mappings import problems_of, scenario


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel__ep": 2}, "parallel.ep: 2 (from scenario) llama3-8b has no experts; set it to 1"),
        ({"parallel__etp": 2}, "parallel.etp: 2 (from scenario) llama3-8b has no experts; set it to 1"),
        (
            {"model": "mixtral-8x7b", "parallel__ep": 3, "parallel__dp": 3},
            "parallel.ep: 3 (from scenario) does not divide the 8 experts of mixtral-8x7b; nearest: 2",
        ),
        (
            {"model": "mixtral-8x7b", "parallel__ep": 8, "parallel__dp": 2},
            "parallel.ep: 8 (from scenario) times etp = 1 does not divide the tp * cp * dp = 2 * 1 * 2 = 4 ranks of a "
            "stage; nearest ep: 4",
        ),
        (
            {"model": "mixtral-8x7b", "parallel__sp": False},
            "parallel.sp: false (from scenario) experts with tp = 2 need sequence parallelism",
        ),
        (
            {"parallel__cp": 8, "parallel__cp_comm": "a2a"},
            "parallel.cp: 8 (from scenario) does not divide the 4 key-value heads of a rank (tp = 2), over which a2a "
            "spreads; nearest: 4, or cp_comm: p2p",
        ),
        (
            {"parallel__cp": 3, "parallel__cp_comm": "a2a+p2p", "training__seq_len": 4128},
            "has no divisor that the 4 key-value heads of a rank divide by",
        ),
        (
            {"parallel__cp": 2, "training__attention": "unfused"},
            "training.attention: unfused (from scenario) cannot run with cp > 1; set attention: flash",
        ),
        (
            {"model": "gpt-oss-20b", "parallel__cp": 2},
            "parallel.cp_comm: p2p (default) cannot run the attention windows of gpt-oss-20b; use a2a or allgather",
        ),
        ({"parallel__zero": 2}, "parallel.zero: 2 (from scenario) scatters gradients after every microbatch"),
        (
            {"parallel__hsdp_shard": 8, "parallel__zero": 0},
            "needs something that is sharded, zero is 0; leave it out",
        ),
        (
            {"parallel__hsdp_shard": 3, "parallel__zero": 3},
            "parallel.hsdp_shard: 3 (from scenario) does not divide the dp * cp = 8 data-parallel ranks; nearest: 2",
        ),
        (
            {"training__recompute": {"modules": ["moe_act"]}},
            "moe_act (from scenario) llama3-8b has no such module; it has core_attn, layernorm, mlp",
        ),
        (
            {"model": "mixtral-8x7b", "training__recompute": {"modules": ["moe", "moe_act"]}},
            "recomputes the experts whole; leave out moe_act",
        ),
    ],
)
def test_experts_context_parallelism_sharding_and_recompute_have_rules(changes, said):
    assert said in problems_of(scenario(**changes))


DEGREES = st.sampled_from((1, 2, 3, 4))


@st.composite
def plans(draw):
    """A plan whose expert degrees divide the ranks of a stage, in any rank order."""
    tp, cp, dp = draw(DEGREES), draw(DEGREES), draw(DEGREES)
    ranks = tp * cp * dp
    etp = draw(st.sampled_from([degree for degree in range(1, ranks + 1) if ranks % degree == 0]))
    left = ranks // etp
    ep = draw(st.sampled_from([degree for degree in range(1, left + 1) if left % degree == 0]))
    order = "-".join(draw(st.permutations(("tp", "cp", "ep", "dp", "pp"))))
    return ParallelPlan(tp=tp, cp=cp, dp=dp, pp=draw(DEGREES), ep=ep, etp=etp, order=order)


@given(plans())
def test_groups_of_every_dimension_divide_the_world_into_equal_parts(plan):
    sizes = {
        Dimension.TP: plan.tp,
        Dimension.CP: plan.cp,
        Dimension.PP: plan.pp,
        Dimension.DP: plan.dp * plan.cp,
        Dimension.EP: plan.ep,
        Dimension.ETP: plan.etp,
        Dimension.ETP_EP: plan.ep * plan.etp,
        Dimension.EDP: plan.expert_data_parallel_size,
        Dimension.WORLD: plan.world_size,
    }
    world = range(plan.world_size)
    for dimension, size in sizes.items():
        groups = {plan.group_ranks(dimension, rank) for rank in world}
        assert all(len(group) == size for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(world)
        assert all(rank in plan.group_ranks(dimension, rank) for rank in world)


@given(plans())
def test_coordinates_name_a_rank_and_only_it(plan):
    at = [plan.coordinates(rank) for rank in range(plan.world_size)]
    assert all(
        plan.rank_of(tp=c["tp"], cp=c["cp"], dp=c["dp"], pp=c["pp"]) == rank for rank, c in enumerate(at)
    )


def test_tensor_parallel_ranks_are_neighbours_in_the_default_order():
    plan = ParallelPlan(tp=4, cp=2, dp=2, pp=2, ep=2, etp=2)
    assert plan.group_ranks(Dimension.TP, 5) == (4, 5, 6, 7)
    assert plan.group_ranks(Dimension.ETP, 5) == (4, 5)
    assert plan.group_ranks(Dimension.EP, 5) == (5, 7)
    assert plan.group_ranks(Dimension.EDP, 5) == (1, 5, 9, 13)
