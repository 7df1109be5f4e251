"""Memory that the arguments of a Megatron-LM run decide, in closed form."""

from __future__ import annotations

import pytest

from hardware_profiles import load_profile
from op_graphs.plan import LibraryPlan
from tests.graphs import bytes_by_name
from tracesim.lowering import lower_scenario
from tracesim.memory.curves import memory_curve
from tracesim.memory.workspaces import library_workspaces
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

MIB = 1 << 20
LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY = 2, 256, 4, 128, 4, 1024
TOKENS = SEQUENCE * BATCH
BASE = {
    "name": "small",
    "model": {
        "name": "gpt",
        "layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_size": 4 * HIDDEN,
        "heads": HEADS,
        "vocab_size": VOCABULARY,
        "activation": "gelu",
    },
    "hardware": "a100-sxm-80g",
    "parallel": {"zero": 0},
    "training": {"seq_len": SEQUENCE, "micro_batch_size": BATCH, "num_microbatches": 1},
}


def scenario_of(**changes):
    """The small model with some fields of sections changed; a field is written section__field."""
    sections = {section: dict(BASE[section]) for section in ("model", "parallel", "training")}
    top = {}
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            sections.setdefault(section, {})[key] = value
        else:
            top[section] = value
    return load_scenario({**BASE, **sections, **top})


def sizes_of(**changes):
    return bytes_by_name(lower_scenario(scenario_of(**changes)))


def peak_of(stage=0, **changes):
    simulation = simulate(scenario_of(**changes))
    return memory_curve(simulation.graph, simulation.execution, stage).peak


@pytest.mark.parametrize(
    ("profile", "libraries", "grouped", "tp", "mib"),
    [
        ("a100-sxm-80g", LibraryPlan(), False, 1, 2 * 8.125 + 4),
        ("a100-sxm-80g", LibraryPlan(cublas_workspace_kib=32768), False, 1, 2 * 32 + 4),
        ("h100-sxm", LibraryPlan(), True, 1, 2 * 32 + 5 * 32),
        ("a100-sxm-80g", LibraryPlan(False, cublas_workspace_kib=32768), False, 1, 4 * 32),
        ("a100-sxm-80g", LibraryPlan(False, cublas_workspace_kib=32768), False, 4, 3 * 32),
        ("toy", LibraryPlan(cublas_workspace_kib=32768), True, 1, 0),
    ],
)
def test_workspaces(profile, libraries, grouped, tp, mib):
    found = library_workspaces(load_profile(profile), libraries, grouped=grouped, tp=tp)
    assert sum(found) == mib * MIB


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, 2),
        ({"training__micro_batch_size": 1}, 1),
        ({"hardware": "h100-sxm"}, 1),
        ({"hardware": "b200-sxm"}, 1),
        ({"hardware": "b200-sxm", "libraries__deterministic": True}, 2),
        ({"libraries__transformer_engine": False}, 1),
        ({"hardware": "h100-sxm", "training__attention": "flash-2"}, 2),
    ],
)
def test_the_output_of_flash_attention_is_copied_where_layouts_differ(changes, copies):
    tokens = SEQUENCE * (changes.get("training__micro_batch_size") or BATCH)
    assert sizes_of(**changes)["attention_output"] == copies * 2 * tokens * HIDDEN * LAYERS


def test_the_mask_of_the_data_loader_is_a_byte_a_pair_on_first_and_last_stage():
    assert sizes_of(training__attention_mask=True)["attention_mask"] == BATCH * SEQUENCE**2
    sizes = sizes_of(
        training__attention_mask=True, model__layers=4, parallel__pp=4, training__num_microbatches=1
    )
    assert sizes["attention_mask"] == 2 * BATCH * SEQUENCE**2
    assert sizes_of()["attention_mask"] == 0


@pytest.mark.parametrize(("fusion", "bytes_a_logit"), [(False, 6), ("native", 10), (True, 2)])
def test_bytes_of_the_loss_at_once(fusion, bytes_a_logit):
    # So many words that the loss is the peak; what is there beside it is the same with all kernels.
    words = 1 << 18
    changes = {"model__vocab_size": words, "training__cross_entropy_fusion": fusion}
    simulation = simulate(scenario_of(**changes))
    alive = {tensor.name: tensor.size for tensor in simulation.memory[0].alive_at_peak}
    of_loss = ("logits", "softmax_fp32", "logits_fp32", "logit_gradient", "logit_gradient_fp32")
    assert sum(alive.get(name, 0) for name in of_loss) == bytes_a_logit * TOKENS * words


def test_without_accumulation_in_the_gemm_a_gradient_is_written_and_added():
    names = [
        {graph.strings[name] for name in graph.operations.name}
        for graph in (
            lower_scenario(scenario_of(training__gradient_accumulation_fusion=on)) for on in (True, False)
        )
    ]
    assert names[1] - names[0] == {
        f"{linear}_wgrad_accumulate" for linear in ("qkv", "proj", "fc1", "fc2", "head")
    }
    dummies = {name for name in sizes_of() if name.startswith("dummy_weight_gradient")}
    # One for each shape; that of fc1 is that of the head.
    assert len(dummies) == 4
    assert not any(name in sizes_of(training__gradient_accumulation_fusion=False) for name in dummies)


def test_gradients_of_the_head_wait_for_as_many_microbatches_as_the_limit_says():
    changes = {"model__layers": 2, "parallel__pp": 2, "training__num_microbatches": 4}
    kept = sizes_of(**changes, training__deferred_head_gradients=3)["deferred_head_gradients"]
    assert kept == 3 * 2 * TOKENS * VOCABULARY + 2 * VOCABULARY * HIDDEN
    # A limit beyond the microbatches of the step is the same as all of them.
    more, every = (
        sizes_of(**changes, training__deferred_head_gradients=limit)["deferred_head_gradients"]
        for limit in (100, 4)
    )
    assert more == every


def test_a_stage_holds_on_to_the_gradient_it_sent():
    sizes = sizes_of(model__layers=4, parallel__pp=4, training__num_microbatches=4)
    assert sizes["sent_gradient"] == 3 * 2 * TOKENS * HIDDEN


def test_a_ring_keeps_a_copy_of_keys_and_values():
    changes = {"parallel__cp": 2, "model__kv_heads": 2}
    sizes = sizes_of(**changes)
    of_keys = 2 * 2 * (TOKENS // 2) * (HIDDEN // 2) * LAYERS
    assert sizes["ring_kv"] == of_keys
    assert sizes_of(**changes, parallel__cp_comm="allgather")["ring_kv"] == 0


@pytest.mark.parametrize(("activation", "kept"), [("swiglu", 0), ("gelu", 1)])
def test_products_with_scores_keep_the_activation_unless_one_kernel_does_both(activation, kept):
    moe = {"experts": 4, "top_k": 2, "expert_ffn_size": 512}
    sizes = sizes_of(model__moe=moe, model__activation=activation)
    assert sizes["expert_activation_output"] == kept * 2 * 2 * TOKENS * 512 * LAYERS


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_persistent_allocations_sum_to_what_a_plan_holds(zero):
    changes = {"parallel__zero": zero, "parallel__dp": 2}
    graph = lower_scenario(scenario_of(**changes))
    lasting = graph.buffers.take((graph.buffers.allocate < 0).nonzero()[0])
    states = [int(s) for n, s in zip(lasting.name, lasting.size, strict=True)
              if graph.strings[n] == "optimizer_states"]  # fmt: skip
    parameters = sizes_of(parallel__zero=0)["weights"] // 2
    assert sum(states) == (12 if zero < 3 else 8) * parameters // (1 if zero == 0 else 2)
    # Master and two moments of each tensor; one shard in two holds about half of the tensors.
    assert len(states) % (2 if zero == 3 else 3) == 0
    assert len(states) > 6


def test_blocks_are_a_little_more_than_the_buffers_in_them():
    # Hidden states of 1.6 MiB: twelve of them fill a segment of 20 MiB but for a rest too small to split off.
    report = simulate(scenario_of(training__seq_len=808, model__layers=6)).report
    assert report["peak_allocated_gib"] < report["peak_allocated_blocks_gib"]
    assert report["peak_allocated_blocks_gib"] < report["peak_allocated_gib"] + 64 / 1024


def test_shards_of_the_distributed_optimizer_over_a_part_of_the_ranks():
    whole = sizes_of(parallel__zero=1, parallel__dp=4)["optimizer_states"]
    halves = sizes_of(parallel__zero=1, parallel__dp=4, parallel__hsdp_shard=2)["optimizer_states"]
    assert halves == 2 * whole
