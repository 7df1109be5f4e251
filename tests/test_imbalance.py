"""Uneven experts and packed documents: shares, work, memory and the spread over ranks, in closed form."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from op_graphs.imbalance import expert_chances, pack, stage_loads
from op_graphs.plan import Routing, SequenceLengths
from op_graphs.vocabulary import Communication, OpKind
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.report_tables import render_report
from tracesim.scenario import Scenario, load_scenario, scenario_to_mapping
from tracesim.simulation import simulate

MOE = {"experts": 8, "top_k": 2, "expert_ffn_size": 64}
HIDDEN = 256


def mixture(folder: Path | None = None, **changes: Any) -> Scenario:
    # So small a model would be bound by its launches, which no imbalance changes.
    hardware = {"base": "h100-sxm", "host": {"operation_us": 0}}
    mapping = {"model__moe": MOE, "parallel": {"ep": 4, "dp": 4}, "hardware": hardware, **changes}
    return load_scenario(dense_mapping(**mapping))


# -- routing -----------------------------------------------------------------------------------------------------


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(any),
    top_k=st.integers(1, 12),
)
def test_every_token_chooses_top_k_experts_each_at_most_once(weights, top_k):
    top_k = min(top_k, len(weights))
    chances = np.array(expert_chances(Routing(counts=tuple(weights)), len(weights), top_k))
    assert chances.sum() == pytest.approx(top_k)
    assert chances.min() >= 0
    assert chances.max() <= 1 + 1e-9
    order = np.argsort(weights, kind="stable")
    assert (np.diff(chances[order]) >= -1e-9).all()


@pytest.mark.parametrize(
    ("routing", "experts", "top_k", "expected"),
    [
        (Routing(zipf=0.0), 4, 2, (0.5, 0.5, 0.5, 0.5)),
        # 1, 1/2, 1/3, 1/4 over their sum 25/12
        (Routing(zipf=1.0), 4, 1, (12 / 25, 6 / 25, 4 / 25, 3 / 25)),
        # half of all choices would be the first expert's twice over: it is in every choice, the rest share one
        (Routing(counts=(6.0, 1.0, 1.0, 2.0)), 4, 2, (1.0, 0.25, 0.25, 0.5)),
        (Routing(counts=(1.0, 0.0, 0.0, 0.0)), 4, 2, (1.0, 1 / 3, 1 / 3, 1 / 3)),
    ],
)
def test_chances(routing, experts, top_k, expected):
    assert expert_chances(routing, experts, top_k) == pytest.approx(expected)


def histogram_file(folder: Path, text: str) -> str:
    (folder / "histogram.txt").write_text(text)
    return str(folder / "histogram.txt")


def expert_flops(scenario: Scenario, level: Any = "most") -> float:
    operations = lower_scenario(scenario, level).operations
    return float(operations.flops[operations.kind == OpKind.GROUPED_GEMM].sum())


def test_experts_of_a_rank_do_the_work_their_tokens_ask_for(tmp_path):
    """Experts 2 r and 2 r + 1 lie on rank r; the loads of the 4 ranks are 3, 7, 4 and 2 quarters of 4."""
    path = histogram_file(tmp_path, "# tokens of 8 experts\n1, 2\n3 4\n2 2\n1 1\n")
    balanced = expert_flops(mixture())
    scenario = mixture(training__routing={"histogram": path})
    for level, load in (("most", 7 / 4), ("mean", 1.0), ("least", 2 / 4)):
        assert expert_flops(scenario, level) == pytest.approx(balanced * load, rel=1e-9)
    loads = stage_loads(scenario.model, scenario.parallel, scenario.training)
    assert loads.coordinates == {"most": {"ep": 1}, "least": {"ep": 3}}
    graph = lower_scenario(scenario)
    assert graph.ranks.tolist() == [1]
    assert_nothing_leaks(graph)


def test_an_exchange_takes_as_long_as_its_most_loaded_rank():
    exchanged = []
    for routing in (None, {"zipf": 1.0}):
        scenario = mixture(training__routing=routing)
        graphs = [lower_scenario(scenario, level) for level in ("most", "least")]
        sizes = [
            set(
                g.operations.communication_bytes[
                    g.operations.communication == Communication.ALL_TO_ALL
                ].tolist()
            )
            for g in graphs
        ]
        assert sizes[0] == sizes[1]
        exchanged.append(sizes[0])
    # 256 tokens to 2 experts each, 2 bytes: balanced
    assert exchanged[0] == {256 * 2 * HIDDEN * 2}
    weights = 1 / np.arange(1, 9)
    # Popular experts are dealt like cards: the first and the fifth lie on the first rank.
    share = (weights[0] + weights[4]) / weights.sum() * 4
    assert list(exchanged[1]) == pytest.approx([256 * 2 * HIDDEN * 2 * share], abs=1)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "deepep", "hybridep"])
@pytest.mark.parametrize("etp", [1, 2])
def test_no_routing_and_even_routing_are_the_same(dispatcher, etp):
    plan = {"ep": 2, "etp": etp, "tp": 2, "sp": True, "dp": 2, "ep_dispatcher": dispatcher}
    none, even = (
        lower_scenario(mixture(parallel=plan, training__routing=routing)) for routing in (None, {"zipf": 0.0})
    )
    for column in ("flops", "communication_bytes", "bytes_read", "bytes_written"):
        expected = getattr(none.operations, column)
        np.testing.assert_allclose(getattr(even.operations, column), expected, rtol=1e-9, atol=1)
    np.testing.assert_allclose(even.buffers.size, none.buffers.size, atol=1)
    assert_nothing_leaks(even)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "deepep", "hybridep"])
def test_the_spread_of_time_and_memory_holds_the_run(dispatcher):
    plan = {"ep": 4, "dp": 4, "pp": 2, "ep_dispatcher": dispatcher}
    report = simulate(mixture(parallel=plan, training__routing={"zipf": 1.2})).report
    even = simulate(mixture(parallel=plan)).report
    assert report["iteration_time_ms"] > even["iteration_time_ms"]
    assert report["hfu"] * report["iteration_time_ms"] == pytest.approx(
        even["hfu"] * even["iteration_time_ms"], rel=1e-9
    )
    printed, even_printed = printed_report(report), printed_report(even)
    assert "spread over the ranks" in printed
    assert "spread over the ranks" not in even_printed
    for stage, balanced in zip(report["stages"], even["stages"], strict=True):
        assert "spread" not in balanced
        compute, peak = stage["spread"]["compute_ms"], stage["spread"]["peak_allocated_gib"]
        assert compute["min"] < compute["mean"] < compute["max"] == stage["compute_ms"]
        assert peak["min"] < peak["mean"] <= peak["max"] == stage["peak_allocated_gib"]
        # Where a token comes once to a rank, how many different ones come depends on who shares it.
        within = 1e-3 if dispatcher in ("deepep", "hybridep") else 1e-6
        assert compute["mean"] == pytest.approx(balanced["compute_ms"], rel=within)


def printed_report(report: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    render_report(report, console)
    return console.export_text()


def test_the_mean_over_all_ranks_is_the_mean_load():
    """Loads of the ranks of a group sum to its size, however uneven."""
    scenario = mixture(training__routing={"zipf": 1.5})
    chances = np.array(expert_chances(scenario.training.routing, 8, 2))
    loads = chances.reshape(2, 4).sum(axis=0) * 4 / 2
    assert loads.sum() == pytest.approx(4)
    found = stage_loads(scenario.model, scenario.parallel, scenario.training)
    assert (found.most.copies, found.least.copies) == pytest.approx((loads.max(), loads.min()))


# -- packed documents --------------------------------------------------------------------------------------------


@given(
    mean=st.floats(1, 300), sigma=st.floats(0, 2), seq_len=st.integers(1, 200), sequences=st.integers(1, 20)
)
def test_packed_documents_fill_every_sequence(mean, sigma, seq_len, sequences):
    pieces, sequence = pack(SequenceLengths(mean=mean, sigma=sigma), seq_len, sequences)
    assert pieces.min() >= 1
    assert np.bincount(sequence, weights=pieces).tolist() == [seq_len] * sequences
    again = pack(SequenceLengths(mean=mean, sigma=sigma), seq_len, sequences)
    assert (pieces == again[0]).all()


def attention_flops(scenario: Scenario, level: Any = "most") -> float:
    operations = lower_scenario(scenario, level).operations
    return float(operations.flops[operations.kind == OpKind.ATTENTION].sum())


@pytest.mark.parametrize(
    ("changes", "whole", "part"),
    # Pairs of 128 tokens, and of 4 documents of 32: n^2 / 2, or n w - w^2 / 2 with a window of w < n
    [
        ({}, 128**2 / 2, 4 * 32**2 / 2),
        ({"model__window": 16}, 128 * 16 - 16**2 / 2, 4 * (32 * 16 - 16**2 / 2)),
        ({"model__window": 64}, 128 * 64 - 64**2 / 2, 4 * 32**2 / 2),
        ({"parallel__cp": 2}, 128**2 / 2, 4 * 32**2 / 2),
        ({"parallel__cp": 2, "parallel__cp_comm": "allgather"}, 128**2 / 2, 4 * 32**2 / 2),
    ],
)
def test_attention_stays_inside_documents(tmp_path, changes, whole, part):
    path = histogram_file(tmp_path, "32 7\n")
    plain = load_scenario(dense_mapping(**changes))
    packed = load_scenario(dense_mapping(**changes, training__sequence_lengths={"histogram": path}))
    assert attention_flops(packed) == pytest.approx(attention_flops(plain) * part / whole, rel=1e-9)
    assert_nothing_leaks(lower_scenario(packed))
    linears = [
        float(graph.operations.flops[graph.operations.kind == OpKind.GEMM].sum())
        for graph in map(lower_scenario, (plain, packed))
    ]
    assert linears[0] == linears[1]


def test_documents_longer_than_a_sequence_change_nothing(tmp_path):
    path = histogram_file(tmp_path, "128000\n")
    plain = load_scenario(dense_mapping())
    packed = load_scenario(dense_mapping(training__sequence_lengths={"histogram": path}))
    # One border in a thousand sequences falls inside one.
    assert attention_flops(packed) == pytest.approx(attention_flops(plain), rel=1e-12)


def test_a_lognormal_has_its_mean_and_its_spread():
    pieces, _ = pack(SequenceLengths(mean=1000, sigma=0.8), 10**6, 20)
    assert pieces.mean() == pytest.approx(1000, rel=0.03)
    # E[n^2] = mean^2 exp(sigma^2)
    assert (pieces.astype(float) ** 2).mean() == pytest.approx(1000**2 * np.exp(0.64), rel=0.1)


def test_ranks_with_longer_documents_compute_longer():
    changes = {"training__seq_len": 1024, "training__sequence_lengths": {"mean": 200, "sigma": 1.2}}
    scenario = load_scenario(dense_mapping(parallel={"dp": 8}, **changes))
    report = simulate(scenario).report
    (stage,) = report["stages"]
    compute = stage["spread"]["compute_ms"]
    assert compute["min"] < compute["mean"] < compute["max"] == stage["compute_ms"]
    assert stage["representative_rank"] == scenario.parallel.rank_of(
        dp=stage_loads(scenario.model, scenario.parallel, scenario.training).coordinates["most"]["dp"]
    )
    # Attention of short documents is less work, and MFU counts what there is.
    whole = simulate(load_scenario(dense_mapping(parallel={"dp": 8}, training__seq_len=1024))).report
    tokens = [r["model_tflops_per_gpu"] / r["tokens_per_second_per_gpu"] for r in (report, whole)]
    assert tokens[0] < tokens[1]
    # One rank has no others to differ from.
    (alone,) = simulate(load_scenario(dense_mapping(**changes))).report["stages"]
    assert len(set(alone["spread"]["compute_ms"].values())) == 1


# -- the fields --------------------------------------------------------------------------------------------------


FILE = {"histogram": "FILE"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__moe": None, "training__routing": {"zipf": 1}}, "small has no experts; leave it out"),
        ({"training__routing": {"zipf": -1}}, "training.routing.zipf: -1 (from scenario) must be a number from 0"),
        ({"training__routing": {"zipf": True}}, "training.routing.zipf: true (from scenario) must be a number"),
        ({"training__routing": {"zipff": 1}}, "did you mean zipf?"),
        ({"training__routing": {}}, "must be {zipf: 1.0} or {histogram: FILE}, or null"),
        ({"training__routing": "zipf"}, "is a text, must be {zipf: 1.0}"),
        ({"training__routing": {"zipf": 1, "histogram": "x"}}, "takes one of zipf and histogram"),
        ({"training__routing": {"histogram": "absent.txt"}}, "absent.txt (from scenario) is not a file in"),
        ({"training__routing": FILE, "text": "1 2 3"}, "holds 3 numbers, small has 8 experts"),
        ({"training__routing": FILE, "text": "1 2\n3 -4"}, "line 2, 3 -4: must hold numbers of 0 or more"),
        ({"training__routing": FILE, "text": "one"}, "line 1, one: must hold numbers"),
        ({"training__routing": FILE, "text": "# no\n"}, "holds no numbers"),
        ({"training__routing": FILE, "text": "0 " * 8}, "holds no number above 0"),
        ({"training__routing": {"zipf": 1}, "model__moe": {**MOE, "capacity_factor": 1.5}}, "changes nothing"),
        ({"training__sequence_lengths": {"sigma": 1}}, "training.sequence_lengths.mean: null"),
        ({"training__sequence_lengths": {"mean": 0.5}}, "must be the mean tokens of a document, from 1"),
        ({"training__sequence_lengths": {"mean": 5, "sigma": 9}}, "training.sequence_lengths.sigma: 9"),
        ({"training__sequence_lengths": {"mean": 5, "histogram": "x"}}, "a histogram or mean and sigma, not both"),
        ({"training__sequence_lengths": FILE, "text": "1.5 2"}, "has the line 1.5 2; a line is a length"),
        ({"training__sequence_lengths": FILE, "text": "1 2 3"}, "has the line 1 2 3"),
        ({"training__sequence_lengths": FILE, "text": "5 0"}, "holds no documents"),
        ({"training__sequence_lengths": {"mean": 50}, "training__attention": "unfused"}, "set attention: flash"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, changes, said):
    text = changes.get("text")
    changes = {key: value for key, value in changes.items() if key != "text"}
    if text is not None:
        path = histogram_file(tmp_path, text)
        changes = {key: {"histogram": path} if value == FILE else value for key, value in changes.items()}
    with pytest.raises(ScenarioError) as error:
        mixture(**{"parallel": {}, **changes})
    assert said in str(error.value)
    assert "has a problem" in str(error.value)


def test_a_scenario_writes_its_distributions_back(tmp_path):
    path = histogram_file(tmp_path, "1 2 3 4 5 6 7 8")
    for routing in ({"zipf": 1.25}, {"histogram": path}):
        for lengths in ({"mean": 50.0, "sigma": 0.5}, None):
            scenario = mixture(training__routing=routing, training__sequence_lengths=lengths)
            assert load_scenario(scenario_to_mapping(scenario)) == scenario


def test_overrides_reach_below_the_fields():
    scenario = load_scenario(dense_mapping(model__moe=MOE), ["training.routing.zipf=1.5"])
    assert scenario.training.routing == Routing(zipf=1.5)
    with pytest.raises(ScenarioError, match=r"unknown field training.routing.zip; did you mean zipf\?"):
        load_scenario(dense_mapping(model__moe=MOE), ["training.routing.zip=1.5"])
