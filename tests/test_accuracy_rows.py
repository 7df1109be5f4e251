"""The scoreboard: rows of public sources become scenarios, or are left out with the reason."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import accuracy
from benchmarks.accuracy import as_document, evaluate, find_files, scores_by_source
from benchmarks.rows import RowFile, RowSkippedError, express
from benchmarks.rows.source_settings import SETTINGS
from benchmarks.scores import score, spearman
from op_graphs.stage_layout import layers_per_stage
from op_graphs.vocabulary import DType
from tests.measured_rows import GPT_22B, changed, expressed, fake_report, simulate_by, write_rows


def test_a_row_of_the_selective_recompute_paper(tmp_path):
    row = expressed(GPT_22B, tmp_path)
    scenario = row.scenario
    assert (row.time_ms, row.allocated_gib, row.reserved_gib) == (1100.0, None, None)
    assert (scenario.model.layers, scenario.model.hidden_size, scenario.model.vocab_size) == (48, 6144, 51200)
    assert (scenario.model.activation, scenario.model.norm, scenario.model.hidden_dropout) == (
        "gelu",
        "layernorm",
        0.1,
    )
    assert (scenario.parallel.tp, scenario.parallel.sp, scenario.parallel.dp) == (8, True, 1)
    assert (scenario.training.dtype, scenario.training.attention) == (DType.FP16, "unfused")
    assert scenario.training.recompute.modules == ("core_attn",)
    assert (scenario.training.micro_batch_size, scenario.training.num_microbatches) == (4, 1)
    assert scenario.hardware.name == "a100-sxm-80g"


def test_model_chunks_make_the_schedule_interleaved(tmp_path):
    row = changed(
        GPT_22B, num_gpus=16, gbs=32, parallel={"tp": 8, "pp": 2, "vpp": 3, "sp": False}, recompute="full"
    )
    scenario = expressed(row, tmp_path).scenario
    assert (scenario.schedule, scenario.training.num_microbatches) == ("interleaved-1f1b", 8)
    assert scenario.training.recompute.mode == "full"


@pytest.mark.parametrize(
    ("metrics", "time_ms"),
    [
        ({"iter_time_s": 2.0}, 2000.0),
        ({"tokens_per_s_per_gpu": 1024.0}, 4 * 2048 / (1024 * 8) * 1e3),
        ({"tokens_per_s": 8192.0}, 1000.0),
        ({"samples_per_s": 8.0}, 500.0),
        ({"samples_per_gpu_s": 2.0}, 250.0),
        ({"iter_time_s": 2.0, "tokens_per_s": 1.0}, 2000.0),
    ],
)
def test_iteration_time_from_whichever_figure_is_given(metrics, time_ms, tmp_path):
    assert expressed(changed(GPT_22B, metrics=metrics), tmp_path).time_ms == pytest.approx(time_ms)


def test_tflops_are_turned_back_by_the_convention_of_their_source(tmp_path):
    row = changed(GPT_22B, source="megatron-sc21", metrics={"tflops_per_gpu": 100.0}, recompute="full")
    tokens, layers, hidden, seq, vocab = 4 * 2048, 48, 6144, 2048, 51200
    flops = 96 * tokens * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert expressed(row, tmp_path).time_ms == pytest.approx(1e3 * flops / (100e12 * 8))


def test_tflops_of_an_unknown_convention_are_not_compared(tmp_path):
    with pytest.raises(RowSkippedError, match="none of its figures is compared: tflops_per_gpu"):
        expressed(changed(GPT_22B, metrics={"tflops_per_gpu": 100.0}), tmp_path)


def test_memory_is_compared_only_where_it_says_what_it_is(tmp_path):
    row = changed(
        GPT_22B, metrics={"peak_alloc_gib": 3.0, "peak_reserved_gb": 2**30 / 1e9, "peak_mem_gib": 9.0}
    )
    found = expressed(row, tmp_path)
    assert (found.time_ms, found.allocated_gib, found.reserved_gib) == (None, 3.0, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mbs": None}, "the row does not say mbs"),
        ({"gbs": None}, "the row does not say num_microbatches"),
        ({"num_gpus": None}, "the row does not say num_gpus"),
        ({"num_gpus": 12}, "tp \\* pp \\* cp \\* dp = 8 is not its number of GPUs, 12"),
        ({"recompute": None}, "recompute is given as 'nothing'"),
        ({"recompute": "selective everything"}, "recompute 'selective everything' is not expressed"),
        ({"gpu": "V100"}, "no hardware profile fits the GPU 'V100'"),
        ({"gpu": None}, "no hardware profile fits the GPU ''"),
        ({"gpu": 3}, "gpu is 3, a text was expected"),
        ({"model__layers": None}, "the row does not say layers of GPT 22B"),
        ({"model__vocab": None}, "the row does not say the vocabulary of GPT 22B"),
        ({"model__name": "Parrot 7B"}, "no preset and no rule for the architecture"),
        ({"model__layers": "48"}, "layers is '48', a positive whole number was expected"),
        ({"model": 5}, "model is 5, a mapping was expected"),
        ({"metrics": {}}, "it has none"),
        ({"metrics": {"oom": True}}, "the run ended out of memory"),
        ({"metrics": {"iter_time_s": "fast"}}, "iter_time_s is 'fast', a positive number was expected"),
        ({"metrics": {"iter_time_s": -1}}, "iter_time_s is -1, a positive number was expected"),
        ({"parallel__ulysses": 4}, "the parallel plan ulysses = 4 is not expressed"),
        ({"parallel__vpp": "two"}, "the number of model chunks is given as 'two'"),
        ({"precision": "FP8"}, "training.dtype: fp8-tensorwise"),
        ({"schedule": "DualPipe-X"}, "schedule DualPipe-X is not expressed"),
        ({"gbs": 6}, "training.global_batch_size: 6 .* is not a multiple"),
        ({"offload": "parameters"}, "offload 'parameters' is not expressed"),
        ({"source": "somebody"}, "which attention kernel ran"),
        ({"source": "megatron-golden"}, "without its argument list"),
        (
            {"source": "megascale", "framework": "MegaScale"},
            "runs of MegaScale differ from a plain Megatron-LM run",
        ),
    ],
)
def test_a_row_that_says_too_little_is_left_out_with_the_reason(changes, reason, tmp_path):
    with pytest.raises(RowSkippedError, match=reason):
        expressed(changed(GPT_22B, **changes), tmp_path)


def test_one_layer_is_the_difference_of_two_models(tmp_path):
    row = changed(
        GPT_22B, gbs=None, metrics={"layer_fwd_ms": 0.4, "layer_bwd_ms": 0.6}, parallel={"tp": 8, "sp": True}
    )
    results, skipped = evaluate([write_rows(tmp_path / "rows.json", [row])], fake_report)
    assert not skipped
    assert results[0].figures == {"time": (1.0, 1.0)}


def test_a_preset_lends_what_the_row_does_not_state(tmp_path):
    row = {
        "framework": "Megatron-core 0.6.0",
        "gbs": 512,
        "gpu": "A100/A800-80GB",
        "mbs": 1,
        "metrics": {"tokens_per_s_per_gpu": 3698.7},
        "model": {"name": "Llama 3 8B", "seq": 8192},
        "num_gpus": 8,
        "parallel": {"dp": 4, "pp": 2, "sp": True, "tp": 1},
        "precision": "bf16",
        "recompute": "recompute-activations (selective)",
        "source": "flagperf",
    }
    scenario = expressed(row, tmp_path).scenario
    assert (scenario.model.name, scenario.parallel.zero) == ("llama3-8b", 1)
    assert scenario.hardware.network.domain.bandwidth_gb_per_s == 200


def test_ends_of_the_pipeline_hold_a_layer_less_where_the_source_says_so(tmp_path):
    row = {
        "gbs": 192,
        "gpu": "A100-80GB-SXM",
        "mbs": 6,
        "metrics": {"samples_per_gpu_s": 12.5},
        "model": {"heads": 24, "hidden": 2304, "layers": 22, "name": "GPT 1.5B", "seq": 1024},
        "num_gpus": 8,
        "parallel": {"dp": 1, "pp": 8, "tp": 1},
        "recompute": "none stated",
        "schedule": "1F1B",
        "source": "zero-bubble",
    }
    scenario = expressed(row, tmp_path).scenario
    assert layers_per_stage(22, scenario.parallel) == (2, 3, 3, 3, 3, 3, 3, 2)
    # "1F1B-I" of that source makes every layer a chunk.
    chunks = changed(row, parallel__vp="layers per stage", schedule="1F1B-I")
    scenario = expressed(chunks, tmp_path).scenario
    assert (scenario.schedule, scenario.parallel.vpp) == ("interleaved-1f1b", 3)
    assert layers_per_stage(22, scenario.parallel) == (0, *([1] * 22), 0)


def test_dimensions_in_the_notes_of_a_row_count(tmp_path):
    row = {
        "gbs": 2048,
        "gpu": "A100-80GB-SXM",
        "mbs": 4,
        "metrics": {"iter_time_s": 120.0},
        "model": {"heads": 64, "name": "GPT 181B", "seq": 2048},
        "notes": "shape text above: NHIDDEN=14336 / NLAYERS=72 ; 02-23",
        "num_gpus": 384,
        "parallel": {"dp": 8, "pp": 6, "tp": 8},
        "source": "bigscience-tr11",
    }
    scenario = expressed(row, tmp_path).scenario
    assert (scenario.model.hidden_size, scenario.model.layers, scenario.model.vocab_size) == (
        14336,
        72,
        250_000,
    )
    assert (scenario.parallel.zero, scenario.training.recompute.mode) == (1, "full")


@pytest.mark.parametrize(
    "row",
    [None, 3, "text", [], {}, {"metrics": 3}, {"strategy": 1}, {"strategy": {}}, {"model": {"name": 3}}],
)
def test_an_odd_row_never_stops_the_others(row, tmp_path):
    results, skipped = evaluate([write_rows(tmp_path / "rows.json", [row, GPT_22B])], fake_report)
    assert [result.source for result in results] == ["korthikanti2022"]
    assert len(skipped) == 1
    assert skipped[0].reason


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
    st.sampled_from(
        sorted(itertools.chain(GPT_22B, ["strategy", "notes", "offload", "schedule", "num_microbatches"]))
    ),
    st.sampled_from([*SETTINGS, "unknown"]),
)
def test_any_value_in_any_field_gives_a_row_or_a_reason(value, key, source):
    row = {**GPT_22B, "source": source, key: value}
    file = RowFile(Path("rows.json"), {})
    with contextlib.suppress(RowSkippedError):
        assert express(row, 0, file).scenario.parallel.world_size == 8


def test_a_row_the_simulator_refuses_is_left_out_with_its_reason(tmp_path):
    def refuse(scenario):
        raise ValueError("stage 3 does\n not fit")

    _, skipped = evaluate([write_rows(tmp_path / "rows.json", [GPT_22B])], refuse)
    assert skipped[0].reason == "the simulator refuses it: stage 3 does not fit"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"rows": 3}', "\0"])
def test_a_file_without_rows_is_left_out_with_the_reason(content, tmp_path):
    path = tmp_path / "odd.json"
    path.write_text(content)
    results, skipped = evaluate([path], fake_report)
    assert not results
    assert "odd.json" in skipped[0].reason


def test_json_holds_scores_rows_and_reasons(tmp_path, monkeypatch):
    rows = [
        changed(GPT_22B, metrics={"iter_time_s": 0.050}),
        changed(GPT_22B, gbs=8, metrics={"iter_time_s": 0.202, "peak_alloc_gib": 8.0}),
        changed(GPT_22B, gpu="abacus"),
    ]
    simulate_by(fake_report, monkeypatch)
    path = str(write_rows(tmp_path / "rows.json", rows))
    done = CliRunner().invoke(accuracy.main, [path, "--json", "--jobs", "1"])
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert set(document) == {"sources", "rows", "skipped", "skip_reasons"}
    scores = document["sources"]["korthikanti2022"]
    assert set(scores) == set(accuracy.FIGURES)
    # predicted 53 and 101 ms: +6 % and -50 %
    assert scores["time"] == {
        "n": 2,
        "mean_abs_pct": pytest.approx(28.0),
        "mean_signed_pct": pytest.approx(-22.0),
        "max_abs_pct": pytest.approx(50.0),
        "spearman": pytest.approx(1.0),
    }
    assert scores["allocated"]["mean_signed_pct"] == pytest.approx(25.0)
    assert scores["reserved"] == dict.fromkeys(scores["time"]) | {"n": 0}
    assert len(document["rows"]) == 2
    assert document["skipped"] == [
        {
            "row": "korthikanti2022: row 2: Table 5 GPT 22B tp8 pp1 dp1 on 8",
            "reason": "no hardware profile fits the GPU 'abacus'",
        }
    ]
    assert document["skip_reasons"] == {"korthikanti2022": {"no hardware profile fits the GPU 'abacus'": 1}}


def test_the_tables_show_every_row_and_every_reason(tmp_path, monkeypatch):
    simulate_by(fake_report, monkeypatch)
    path = write_rows(tmp_path / "rows.json", [GPT_22B, changed(GPT_22B, mbs=None)])
    done = CliRunner().invoke(accuracy.main, [str(path), "--jobs", "1"])
    assert done.exit_code == 0
    for shown in ("1100.00", "53.00", "-95.18", "1 of 2 rows not expressed", "the row does not say mbs"):
        assert shown in done.stdout


@pytest.mark.parametrize("name", ["missing.json", "empty"])
def test_a_path_without_rows_is_one_message_and_exit_2(name, tmp_path):
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(accuracy.main, [str(tmp_path / name)])
    assert done.exit_code == 2
    assert name in done.stderr


def test_a_folder_stands_for_its_files_in_order(tmp_path):
    for name in ("b.json", "a.json", "c.txt"):
        (tmp_path / name).write_text("{}")
    assert [path.name for path in find_files([tmp_path])] == ["a.json", "b.json"]


@pytest.mark.parametrize(
    ("first", "second", "correlation"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [9, 4, 1], -1.0),
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8),
        ([1, 2, 2, 3], [1, 2, 2, 3], 1.0),
        ([1, 1, 2], [1, 2, 3], 3**0.5 / 2),
        ([1], [1], None),
        ([], [], None),
        ([1, 2], [3, 3], None),
    ],
)
def test_spearman(first, second, correlation):
    assert spearman(first, second) == (None if correlation is None else pytest.approx(correlation))


@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1, max_size=30))
def test_scores_are_consistent(pairs):
    found = score(pairs)
    assert found.n == len(pairs)
    assert abs(found.mean_signed_pct) <= found.mean_abs_pct * (1 + 1e-9) + 1e-9
    assert found.mean_abs_pct <= found.max_abs_pct * (1 + 1e-9)
    assert found.spearman is None or -1 - 1e-9 <= found.spearman <= 1 + 1e-9


@pytest.mark.shared_data
def test_dense_rows_of_the_known_sources_are_expressed(shared_data):
    results, skipped = evaluate(find_files([shared_data / "measured"]), fake_report)
    rows = {source: by["time"].n for source, by in scores_by_source(results).items()}
    assert rows["simumax-b200"] == 22
    assert rows["simumax-a100-pcie"] == 12
    assert rows["korthikanti2022"] == 7
    assert rows["vtrain-ground-truth"] == 443
    assert all(row.reason for row in skipped)
    json.dumps(as_document(results, skipped), allow_nan=False)


@pytest.mark.shared_data
def test_memory_of_a_simumax_row_is_the_largest_over_its_ranks(shared_data):
    results, _ = evaluate([shared_data / "measured" / "simumax-b200.json"], fake_report)
    first = results[0]
    assert first.row == "llama3_70b_l12_tp1_pp2_dp4_mbc4_cef"
    assert first.figures["time"][0] == 843.0
    assert (first.figures["allocated"][0], first.figures["reserved"][0]) == (66.552, 70.8848)
