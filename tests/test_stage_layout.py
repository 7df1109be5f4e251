"""Megatron pipeline layouts: which stage holds what, what is refused, and what such a pipeline does."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_graphs.plan import ParallelPlan
from op_graphs.stage_layout import layers_per_stage, parse_layout
from op_graphs.vocabulary import Communication, Phase
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks, step_flops
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EtL", ("EtL",)),
        ("Et*3|t*4|t*4L", ("Ettt", "tttt", "ttttL")),
        ("E|t|L", ("E", "t", "L")),
        ("Et||tL", ("Et", "", "tL")),
        ("Et|*3tL", ("Et", "", "", "tL")),
        ("E(t|)*2L", ("Et", "t", "L")),
        ("E(tt|)*2,mL", ("Ett", "tt", "mL")),
        ("E((t|)*2t|)*2L", ("Et", "t", "t", "t", "t", "t", "L")),
        # DeepSeek-V3 on 16 ranks with 2 chunks each
        ("Et*2|(tt|)*29 t|mL", ("Ett", *["tt"] * 29, "t", "mL")),
        (" E t , L ", ("EtL",)),
    ],
)
def test_reading_a_layout(text, stages):
    assert parse_layout(text) == stages


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Et*L", "character 3: * needs a number from 1 behind it"),
        ("Et*0L", "character 3: * needs a number from 1"),
        ("Et*-1L", "character 3: * needs a number from 1"),
        ("ExL", "character 2: 'x' means nothing; E embedding, t layer, m prediction head, L loss"),
        ("E(t|L", "character 2: ( is never closed"),
        ("Et)L", "character 3: ) closes no group"),
        ("*3EtL", "character 1: '*' means nothing"),
        ("Et*2*2L", "'*' means nothing"),
        ("E" + "(" * 17 + "t" + ")" * 17 + "L", "nested deeper than 16"),
        ("Et*999999L", "more than 65536 parts"),
        ("E((t*60000)*60000)*60000L", "more than 65536 parts"),
    ],
)
def test_what_is_no_layout(text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_layout(text)


@pytest.mark.parametrize(
    ("layout", "plan", "heads", "said"),
    [
        # The model has 4 layers.
        ("Et|ttL", {"pp": 2}, 0, "it places 3 layers (t), the model has 4: 1 missing"),
        ("Ettt|ttL", {"pp": 2}, 0, "it places 5 layers (t), the model has 4: 1 too many"),
        ("tt|ttL", {"pp": 2}, 0, "it places 0 embeddings (E), the model has 1: 1 missing"),
        ("Ett|tt", {"pp": 2}, 0, "it places 0 losses (L), the model has 1: 1 missing"),
        ("Ett|ttL", {"pp": 2}, 1, "it places 0 prediction heads (m), the model has 1: 1 missing"),
        ("Ett|ttmL", {"pp": 2}, 0, "it places 1 prediction heads (m), the model has 0: 1 too many"),
        ("tE|tttL", {"pp": 2}, 0, "the embedding (E) must be the first part of the first stage"),
        ("Ett|Ltt", {"pp": 2}, 0, "the loss (L) must be the last part of the last stage"),
        ("Ett|tmt|L", {"pp": 3}, 1, "prediction heads (m) must stand together right before the loss"),
        ("Ett|t|t|L", {"pp": 2}, 0, "it has 4 stages, and pp * vpp = 2 * 1 = 2; set vpp: 2"),
        ("Ett|t|tL", {"pp": 2}, 0, "it has 3 stages, and pp * vpp = 2 * 1 = 2"),
        ("Ett|ttL", {"pp": 2, "first_stage_layers": 2}, 0, "leave out first_stage_layers"),
        ("Ett|ttX", {"pp": 2}, 0, "character 7: 'X' means nothing"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_what_is_missing(layout, plan, heads, said):
    mapping = dense_mapping(model__mtp_layers=heads, parallel={**plan, "layout": layout})
    with pytest.raises(ScenarioError) as error:
        load_scenario(mapping)
    assert f"parallel.layout: {layout} (from scenario) does not fit small: " in str(error.value)
    assert said in str(error.value)
    assert "has a problem" in str(error.value)


@given(
    held=st.lists(st.integers(0, 5), min_size=2, max_size=12),
    layers=st.integers(1, 20),
    pp=st.integers(1, 6),
)
def test_every_layer_is_placed_once_or_the_layout_refused(held, layers, pp):
    vpp, rest = divmod(len(held), pp)
    text = "E" + "|".join("t" * count for count in held) + "L"
    plan = ParallelPlan(pp=pp, vpp=max(vpp, 1), layout=text)
    try:
        stages = layers_per_stage(layers, plan)
    except ValueError:
        assert rest or sum(held) != layers or vpp == 0
        return
    assert stages == tuple(held)
    assert sum(stages) == layers


def run(**changes: Any) -> Any:
    return simulate(load_scenario(dense_mapping(**changes)))


def test_a_layout_equal_to_the_default_changes_nothing():
    default, written = (run(parallel={"pp": 2, "dp": 2, "layout": layout}) for layout in (None, "Ett|ttL"))
    assert default.report == written.report


UNEVEN = [
    ("E|t*4|L", 3, 1),
    ("E|t||t*3L", 4, 1),
    ("Et|t|t|tL", 2, 2),
    ("E|t*2|t*2|L", 2, 2),
    ("E|||t*4L", 2, 2),
    ("E|t*4mL", 2, 1),
    ("E|t*4||mL", 2, 2),
]


@pytest.mark.parametrize(("layout", "pp", "vpp"), UNEVEN)
@pytest.mark.parametrize("plan", [{}, {"tp": 2, "sp": True, "dp": 2}, {"tp": 2, "dp": 2, "zero": 3}])
def test_stages_without_layers_work(layout, pp, vpp, plan):
    """The same work as without a pipeline, every layer once, and nothing left behind."""
    heads = layout.count("m")
    changes: dict[str, Any] = {"model__mtp_layers": heads, "training__num_microbatches": 4}
    scenario = load_scenario(
        dense_mapping(
            **changes,
            parallel={**plan, "pp": pp, "vpp": vpp, "layout": layout},
            schedule="interleaved-1f1b" if vpp > 1 else "1f1b",
        )
    )
    graph = lower_scenario(scenario)
    assert_nothing_leaks(graph)
    single = load_scenario(dense_mapping(**changes, parallel=plan))
    whole = lower_scenario(single)
    assert step_flops(graph, scenario) == pytest.approx(step_flops(whole, single), rel=1e-12)
    stage_of = {}
    for layer in range(4 + heads):
        rows = graph.operations.layer == layer
        assert len(set(graph.operations.rank[rows].tolist())) == 1
        stage_of[layer] = int(graph.operations.rank[rows][0])
    stages = parse_layout(layout)
    expected = [stage % pp for stage, text in enumerate(stages) for letter in text if letter in "tm"]
    assert list(stage_of.values()) == expected
    report = simulate(scenario).report
    assert [stage["layers"] for stage in report["stages"]] == [
        sum(text.count("t") for text in stages[rank::pp]) for rank in range(pp)
    ]
    # One tensor crosses every border between stages of different ranks, both ways, for every microbatch.
    sends = np.flatnonzero(graph.operations.communication == Communication.SEND)
    borders = sum(a % pp != (a + 1) % pp for a in range(len(stages) - 1))
    assert len(sends) == 2 * 4 * borders


@pytest.mark.parametrize("zero", [0, 1])
def test_a_split_backward_of_an_embedding_alone_reduces_its_gradient(tmp_path, zero):
    rows = "0F0,0I0,0W0\r\n1F0,1I0,1W0\r\n"
    (tmp_path / "split.csv").write_text(rows)
    scenario = load_scenario(
        dense_mapping(
            parallel={"pp": 2, "dp": 2, "zero": zero, "layout": "E|t*4L"},
            training__num_microbatches=1,
            schedule=str(tmp_path / "split.csv"),
        )
    )
    graph = lower_scenario(scenario)
    assert_nothing_leaks(graph)
    operations = graph.operations
    reductions = (operations.phase == Phase.GRADIENT_SYNC) & (operations.communication_bytes > 0)
    embedding = reductions & (operations.rank == 0)
    assert operations.communication_bytes[embedding].tolist() == [4 * 1024 * 256]
    execution = simulate(scenario).execution
    filled = [r for r, n in enumerate(operations.name) if graph.strings[n] == "word_embedding_accumulate"]
    assert execution.start[np.flatnonzero(embedding)].min() >= execution.end[filled].max()


def test_the_embedding_alone_sends_what_its_collective_wrote():
    """With sequence parallelism the reduce-scatter behind the lookup writes the output: the send waits for it."""
    result = run(parallel={"tp": 2, "sp": True, "pp": 2, "layout": "E|t*4L"})
    operations, strings = result.graph.operations, result.graph.strings
    names = np.array([strings[n] for n in operations.name])
    first_send = np.flatnonzero(names == "send_activation")[0]
    scatter = np.flatnonzero(names == "embedding_reduce_scatter")[0]
    assert result.execution.start[first_send] >= result.execution.end[scatter]


def test_a_layout_of_deepseek_v3():
    """61 layers and a prediction head over 16 ranks of 2 chunks."""
    text = "Et*2|(tt|)*29t|mL"
    assert layers_per_stage(61, ParallelPlan(pp=16, vpp=2, layout=text), 1) == (2, *[2] * 29, 1, 0)
    with pytest.raises(ValueError, match=r"places 62 layers \(t\), the model has 61: 1 too many"):
        layers_per_stage(61, ParallelPlan(pp=16, vpp=2, layout="Et*3|(tt|)*29t|mL"), 1)
