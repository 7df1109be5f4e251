"""Scenario files: what loads, what is refused with which words, and that writing one back loses nothing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from op_graphs.plan import OverlapPlan, ParallelPlan, Recompute, TrainingPlan
from op_graphs.stage_layout import layers_per_stage
from op_graphs.vocabulary import DType
from tests.scenario_mappings import SMALL, problems_of, scenario
from tracesim.scenario import (
    list_scenarios,
    load_scenario,
    scenario_to_mapping,
    scenario_to_yaml,
)
from tracesim.scenario_fields import FIELDS

DOCS = Path(__file__).resolve().parent.parent / "docs" / "scenarios.md"


def test_every_field_but_model_hardware_and_the_batch_has_a_default():
    loaded = load_scenario(
        {"model": "llama3-8b", "hardware": "h100-sxm", "training": {"num_microbatches": 1}}
    )
    assert loaded.parallel == ParallelPlan()
    assert loaded.training == TrainingPlan()
    assert loaded.overlap == OverlapPlan()
    assert (loaded.schedule, loaded.name) == ("1f1b", "llama3-8b-tp1-pp1-dp1")


def test_a_field_lands_where_it_belongs():
    loaded = load_scenario(
        scenario(
            training__dtype="fp16", training__attention="unfused", overlap={"p2p": False}, schedule="gpipe"
        )
    )
    assert loaded.parallel == ParallelPlan(tp=2, sp=True, pp=4, dp=8)
    assert loaded.training.dtype is DType.FP16
    assert loaded.training.attention == "unfused"
    assert not loaded.overlap.p2p
    assert loaded.schedule == "gpipe"


@pytest.mark.parametrize(
    ("training", "microbatches"),
    [
        ({"global_batch_size": 64}, 8),
        ({"global_batch_size": 64, "micro_batch_size": 2}, 4),
        ({"num_microbatches": 5}, 5),
        ({"num_microbatches": 8, "global_batch_size": 64}, 8),
    ],
)
def test_microbatches_of_a_data_parallel_rank(training, microbatches):
    loaded = load_scenario({**SMALL, "training": training})
    assert loaded.training.num_microbatches == microbatches
    assert loaded.global_batch_size == microbatches * loaded.training.micro_batch_size * 8


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("none", Recompute("none")),
        ("full", Recompute("full", (), 1, "uniform")),
        ({"layers": 3}, Recompute("full", (), 3, "uniform")),
        ({"method": "block", "layers": 2}, Recompute("full", (), 2, "block")),
        ({"modules": ["core_attn"]}, Recompute("selective", ("core_attn",))),
    ],
)
def test_recompute(written, meant):
    assert load_scenario(scenario(training__recompute=written)).training.recompute == meant


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel__tq": 2}, "parallel.tq: unknown key (from scenario); did you mean tp?"),
        (
            {"parallel__pipeline_size": 2},
            "parallel.pipeline_size: unknown key (from scenario); did you mean pp?",
        ),
        ({"modle": "x"}, "modle: unknown key (from scenario); did you mean model?"),
        ({"training__gbs": 4}, "training.gbs: unknown key (from scenario); did you mean global_batch_size?"),
        (
            {"parallel__tp": "two"},
            "parallel.tp: two (from scenario) is a text, must be a whole number from 1",
        ),
        ({"parallel__dp": True}, "parallel.dp: true (from scenario) is a true/false, must be a whole number"),
        ({"parallel__dp": 0}, "parallel.dp: 0 (from scenario) must be a whole number from 1"),
        ({"parallel__dp": 2.0}, "parallel.dp: 2.0 (from scenario) is a number, must be a whole number"),
        ({"parallel__sp": 1}, "parallel.sp: 1 (from scenario) must be true or false"),
        ({"parallel__zero": 4}, "parallel.zero: 4 (from scenario) must be 0, 1, 2 or 3"),
        ({"parallel": [2]}, "parallel: [2] (from scenario) is a list, must be a mapping of tp, sp"),
        (
            {"overlap__grad_reduce": "no"},
            "overlap.grad_reduce: no (from scenario) is a text, must be true, false or one of buckets, after-backward",
        ),
        (
            {"overlap__tp": "asnyc-tp"},
            "beside-weights, in-place, gathered-once, userbuffers, async-tp; did you mean async-tp?",
        ),
        (
            {"overlap__tp": "async-tp", "parallel__tp": 2, "parallel__sp": False},
            "overlap.tp: async-tp (from scenario) needs parallel.sp: true",
        ),
        (
            {"overlap__p2p": "batched", "parallel__pp": 2, "schedule": "zb-h1"},
            "overlap.p2p: batched (from scenario) needs a schedule whose ranks post their batches together: 1f1b",
        ),
        ({"training__dtype": "bf61"}, "must be one of fp32, fp16, bf16, fp8-tensorwise"),
        ({"training__dtype": "bf61"}, "; did you mean bf16?"),
        ({"parallel__order": "tp-cp-dp-pp"}, "must name tp, cp, ep, dp and pp once each"),
        ({"parallel__order": "tp-tp-ep-dp-pp"}, "must name tp, cp, ep, dp and pp once each"),
        ({"schedule": "1f1"}, "schedule: 1f1 (from scenario) is not a schedule; did you mean 1f1b?"),
        ({"schedule": 7}, "schedule: 7 (from scenario) is a whole number"),
        ({"schedule": "mine.csv"}, "schedule: mine.csv (from scenario) is not a file in"),
        ({"name": "a/b"}, "name: a/b (from scenario) must not hold /"),
        ({"name": ""}, "must be 1 to 200 characters of text"),
        ({"model": "lama3-8b"}, "did you mean llama3-8b"),
        ({"model": None}, "model: is missing; give a preset"),
        ({"model": 3}, "model: 3 (from scenario) is a whole number, must be a preset name"),
        (
            {"model": {"base": "llama3-8b", "layrs": 2}},
            "layrs: is not a key of a model; did you mean layers?",
        ),
        ({"hardware": "h100"}, "Nearest: h100-sxm"),
        ({"hardware": None}, "hardware: is missing; give a preset"),
        ({"hardware": {"base": "h100-sxm", "memory": {"capacity": 3}}}, "memory.capacity"),
        ({"hardware": {"base": 3}}, "base is a whole number, must be a preset name or a file"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_the_nearest_choice(changes, said):
    assert said in problems_of(scenario(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"parallel__tp": 3, "training__seq_len": 4095},
            "parallel.tp: 3 (from scenario) does not fit llama3-8b: 32 heads do not divide by it; 8 key-value heads "
            "do not divide by it, nor it by them; ffn_size 14336 does not divide by it. The nearest tp that fits is 2",
        ),
        ({"parallel__tp": 64}, "32 heads do not divide by it. The nearest tp that fits is 32"),
        (
            {"model": {"base": "llama3-8b", "heads": 12, "kv_heads": 6, "head_size": 64}, "parallel__tp": 4},
            "6 key-value heads do not divide by it, nor it by them. The nearest tp that fits is",
        ),
        (
            {"parallel__pp": 5},
            "32 layers do not divide over 5 pipeline ranks of 1 model chunks; nearest pp: 4 or 8",
        ),
        (
            {"parallel__pp": 64, "training": {"num_microbatches": 64}},
            "32 layers are fewer than the 64 stages",
        ),
        ({"parallel__pp": 5}, "or first_stage_layers: 4 or 8"),
        ({"parallel__first_stage_layers": 6}, "26 layers do not divide over 3 pipeline ranks"),
        ({"parallel__first_stage_layers": 6}, "nearest first_stage_layers: 5 or 8"),
        ({"parallel__last_stage_layers": 40}, "the first and last stages take 40 layers, the model has 32"),
        ({"parallel__pp": 1, "parallel__first_stage_layers": 8}, "needs pp > 1"),
        (
            {"parallel__pp": 2, "parallel__first_stage_layers": 8, "parallel__last_stage_layers": 8},
            "the two stages take 16 layers, 16 of the model's 32 are left over",
        ),
        (
            {"parallel__vpp": 2},
            "schedule 1f1b needs one model chunk a rank, not vpp=2 and pp=4; use interleaved-1f1b",
        ),
        (
            {"parallel__vpp": 2, "schedule": "gpipe"},
            "schedule: gpipe (from scenario) cannot be built: schedule gpipe",
        ),
        (
            {"parallel__vpp": 2, "parallel__pp": 1, "schedule": "interleaved-1f1b"},
            "needs at least 2 model chunks a rank and 2 ranks, not vpp=2 and pp=1; use 1f1b, or a larger pp",
        ),
        (
            {"parallel__vpp": 2, "schedule": "interleaved-1f1b", "training": {"num_microbatches": 6}},
            "make the microbatches a multiple of 4, as 4 or 8, or choose another group_size",
        ),
        (
            {"training__global_batch_size": 60},
            "training.global_batch_size: 60 (from scenario) is not a multiple of micro_batch_size * dp = 1 * 8 = 8 "
            "(world size tp*cp*pp*dp = 2*1*4*8 = 64); nearest: 56 or 64",
        ),
        ({"training__global_batch_size": 4}, "nearest: 8"),
        ({"training__num_microbatches": 3}, "does not agree with global_batch_size 64"),
        ({"training__seq_len": 4095}, "is not a multiple of tp = 2 (sp is true); nearest: 4094 or 4096"),
        (
            {"model": "gpt3-175b"},
            "longer than the table of 2048 learned positions of gpt3-175b; nearest: 2048",
        ),
        (
            {"training__recompute": "selective"},
            "selective recompute of Megatron-LM is {modules: [core_attn]}",
        ),
        ({"training__recompute": {}}, "is empty; write none, full, or give modules, layers or method"),
        ({"training__recompute": {"modul": []}}, "training.recompute.modul: unknown key"),
        ({"training__recompute": {"layers": 0}}, "training.recompute.layers: 0"),
        ({"training__recompute": {"method": "blok"}}, "must be uniform or block"),
        ({"training__recompute": {"modules": ["core_atn"]}}, "is not a module; did you mean core_attn?"),
        ({"training__recompute": {"modules": []}}, "must be a list of one or more of core_attn"),
        ({"training__recompute": {"modules": ["core_attn"], "layers": 2}}, "give one or the other"),
        (
            {"parallel__dp": 1 << 20, "training": {"num_microbatches": 1}},
            "ranks are more than the limit of 1048576",
        ),
        ({"training": {"num_microbatches": 1 << 20}}, "forward passes are more than the limit"),
    ],
)
def test_an_impossible_combination_says_the_limit_and_the_nearest_choice(changes, said):
    assert said in problems_of(scenario(**changes))


def test_a_precision_the_machine_has_no_rate_for_is_refused():
    found = problems_of(scenario(hardware="a100-sxm-80g", training__dtype="mxfp8"))
    assert (
        "training.dtype: mxfp8 (from scenario) has no peak rate in the hardware profile a100-sxm-80g;"
        in found
    )


def test_all_problems_are_told_at_once():
    found = problems_of(
        scenario(parallel__tp=3, parallel__order="x", trainin={}, training__global_batch_size=63)
    )
    assert found.startswith("scenario has 4 problems:")
    assert len(found.splitlines()) == 5


@pytest.mark.parametrize(
    ("overrides", "check"),
    [
        (["parallel.pp=8"], lambda s: s.parallel.pp == 8),
        (["training.num_microbatches=3"], lambda s: s.training.num_microbatches == 3),
        (["parallel.dp=4"], lambda s: s.training.num_microbatches == 16),
        (["parallel={tp: 4, dp: 16}"], lambda s: (s.parallel.tp, s.parallel.pp, s.parallel.dp) == (4, 1, 16)),
        (
            ["training.recompute.method=block"],
            lambda s: s.training.recompute == Recompute("full", (), 1, "block"),
        ),
        (
            ["training.recompute={modules: [core_attn]}"],
            lambda s: s.training.recompute.modules == ("core_attn",),
        ),
        (
            ["model.layers=12", "name=short"],
            lambda s: (s.model.layers, s.model.heads, s.name) == (12, 32, "short"),
        ),
        (["hardware.memory.capacity_gib=94"], lambda s: s.hardware.memory.capacity_gib == 94),
        (["parallel.pp=8", "parallel.pp=2"], lambda s: s.parallel.pp == 2),
    ],
)
def test_overrides(overrides, check):
    assert check(load_scenario("llama3-8b-tp2-pp4-dp8", overrides))


def test_an_overridden_figure_of_a_machine_says_that_it_was_set():
    loaded = load_scenario("llama2-7b-dp8", ["hardware.memory.capacity_gib=94"])
    assert loaded.hardware.sources["memory.capacity_gib"] == "set in the scenario"
    assert loaded.hardware.name == "h100-sxm-changed"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel.tq=2", "--set parallel.tq=2: unknown field parallel.tq; did you mean tp?"),
        ("paralel.tp=2", "unknown field paralel; did you mean parallel?"),
        ("parallel.tp.x=2", "parallel.tp has no fields below it"),
        ("schedule.x=2", "schedule has no fields below it"),
        ("training.recompute.method.x=2", "training.recompute has no fields below it"),
        ("parallel.tp", "is not key.path=value, such as parallel.pp=8"),
        ("=2", "is not key.path=value"),
        ("parallel.tp=[1", "--set parallel.tp=[1"),
        ("parallel.tp=3", "parallel.tp: 3 (from --set) does not fit llama3-8b: 32 heads do not divide by it"),
        ("parallel.tp=", "parallel.tp: null (from --set) must be a whole number"),
    ],
)
def test_a_bad_override_says_what_is_wrong_with_it(override, said):
    assert said in problems_of("llama3-8b-tp2-pp4-dp8", [override])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds nothing; a scenario is a YAML mapping with at least model and hardware"),
        (b"- a\n- b\n", "holds a list; a scenario is a YAML mapping"),
        (b"\x00\x01\xff\xfe", "is not a text file"),
        (b"a: [1, 2", "line 1, column 9"),
        (b"a: &x [1]\nb: *x\n", "alias *x is not allowed; write the value out"),
        (b"model: a\nmodel: b\n", "key 'model' is given twice; keep one"),
        (b"model: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        (b"a: " + b"[" * 40 + b"]" * 40, "nested deeper than 32 levels"),
        (b"#" * (1 << 20) + b"\n", "is larger than 1 MiB"),
        (b"seq: " + b"9" * 5000, "value cannot be read"),
        (b"1: 2\nmodel: llama3-8b\nhardware: toy\ntraining: {num_microbatches: 1}\n", "1: unknown key"),
    ],
)
def test_a_file_that_is_no_scenario_is_one_message(tmp_path, content, said):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    found = problems_of(path)
    assert said in found
    assert "bad.yaml" in found


def test_a_bomb_of_aliases_is_refused_before_it_expands(tmp_path):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(levels))
    assert "alias *a0 is not allowed" in problems_of(path)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("llama3-8b-tp2-pp4-dp9", "did you mean llama3-8b-tp2-pp4-dp8?"),
        ("nothing-like-it-here", "is neither a bundled scenario nor a file; bundled: gpt3-175b"),
        ("missing.yaml", "missing.yaml does not exist"),
        ("no\0name.yaml", "cannot be read"),
    ],
)
def test_a_source_that_is_not_there(source, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in problems_of(source)


def test_a_folder_is_no_scenario(tmp_path):
    assert "is a folder; give a scenario YAML file" in problems_of(tmp_path)


def test_files_are_relative_to_the_scenario(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.yaml").write_text(
        "{layers: 4, hidden_size: 64, ffn_size: 128, heads: 4, vocab_size: 100}"
    )
    (tmp_path / "run.yaml").write_text(
        "{model: models/tiny.yaml, hardware: toy, training: {num_microbatches: 2}}"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    loaded = load_scenario(tmp_path / "run.yaml")
    assert (loaded.name, loaded.model.name, loaded.model.layers) == ("run", "tiny", 4)


@pytest.mark.parametrize("name", list_scenarios())
def test_a_bundled_scenario_loads_and_writes_back_equal(name):
    loaded = load_scenario(name)
    assert loaded.name == name
    assert load_scenario(scenario_to_mapping(loaded)) == loaded
    assert load_scenario(yaml.safe_load(scenario_to_yaml(loaded))) == loaded
    assert scenario_to_mapping(loaded)["model"] == loaded.model.name


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"base": "llama3-8b", "layers": 12}},
        {"hardware": {"base": "h100-sxm", "memory": {"capacity_gib": 94}}},
        {"training__recompute": {"method": "block", "layers": 2}},
        {"training__recompute": {"modules": ["core_attn"]}},
        {
            "parallel__first_stage_layers": 5,
            "parallel__last_stage_layers": 5,
            "parallel__order": "pp-dp-ep-cp-tp",
        },
        {"parallel__pp": 2, "parallel__vpp": 2, "schedule": "interleaved-1f1b", "overlap": {"p2p": False}},
    ],
)
def test_a_scenario_of_ones_own_writes_back_equal(changes):
    loaded = load_scenario(scenario(**changes))
    assert load_scenario(yaml.safe_load(scenario_to_yaml(loaded))) == loaded


def test_the_contract_has_no_key_that_is_not_documented():
    text = DOCS.read_text(encoding="utf-8")
    block = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL).group(1))
    assert load_scenario(block) == dataclasses.replace(load_scenario("llama3-8b-tp2-pp4-dp8"))
    for section, fields in FIELDS.items():
        documented = set(block[section]) | ({"num_microbatches"} if section == "training" else set())
        assert documented == set(fields)
    assert all(f"`{name}`" in text for name in list_scenarios())


@given(
    ends=st.tuples(st.none() | st.integers(1, 9), st.none() | st.integers(1, 9)),
    pp=st.integers(1, 8),
    vpp=st.integers(1, 4),
    layers=st.integers(1, 128),
)
def test_layers_are_split_completely_or_refused(ends, pp, vpp, layers):
    plan = ParallelPlan(pp=pp, vpp=vpp, first_stage_layers=ends[0], last_stage_layers=ends[1])
    try:
        stages = layers_per_stage(layers, plan)
    except ValueError:
        if ends == (None, None):
            assert layers % (pp * vpp)
        return
    assert len(stages) == pp * vpp
    assert sum(stages) == layers
    assert min(stages) >= 1
    held = [sum(stages[rank::pp]) for rank in range(pp)]
    free = held[ends[0] is not None : pp - (ends[1] is not None)]
    assert len(set(free)) <= 1
    assert ends[0] is None or held[0] == ends[0]
    assert ends[1] is None or held[-1] == ends[1]


@pytest.mark.parametrize(
    ("layers", "plan", "stages"),
    [
        (32, {"pp": 4}, (8, 8, 8, 8)),
        (126, {"pp": 8, "first_stage_layers": 15, "last_stage_layers": 15}, (15, 16, 16, 16, 16, 16, 16, 15)),
        (16, {"pp": 2, "vpp": 4}, (2,) * 8),
        (14, {"pp": 3, "vpp": 2, "first_stage_layers": 2}, (1, 3, 3, 1, 3, 3)),
        (10, {"pp": 2, "first_stage_layers": 4, "last_stage_layers": 6}, (4, 6)),
    ],
)
def test_layers_on_stages(layers, plan, stages):
    assert layers_per_stage(layers, ParallelPlan(**plan)) == stages
