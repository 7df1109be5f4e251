"""What the configuration file or script of a run says beside its row: fields of the row, and of the scenario.

Each function names its evidence, a file that the source itself published for the run or the defaults of its framework
at that time. What such a file contradicts, or what has no cost here, is a reason to leave the row out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .row import RowSkippedError, count_at, mapping_at, number_at, text_at

Section = Mapping[str, Any]


@dataclass(frozen=True)
class Configuration:
    """What a configuration adds to a row."""

    row: Section = field(default_factory=dict)
    """Fields that the row leaves out, or prints in another sense."""
    scenario: Mapping[str, Section | str] = field(default_factory=dict)
    """Fields of the scenario by section; the schedule by its name."""
    notes: tuple[str, ...] = ()

    def completed(self, row: Section) -> dict[str, Any]:
        """The row with the fields of the configuration."""
        return {**row, **self.row}

    def apply(self, mapping: dict[str, Any]) -> None:
        """Put the configuration's fields into a scenario's mapping."""
        for section, values in self.scenario.items():
            given = mapping.get(section)
            if isinstance(values, Mapping):
                values = {**given, **values} if isinstance(given, dict) else dict(values)
            mapping[section] = values


def configuration_of(row: Section, source: str) -> Configuration:
    """The configuration of a row; an empty one where none is known.

    Raise RowSkippedError where it says that the run is not one that can be expressed.
    """
    known = _CONFIGURATIONS.get(source)
    return known(row) if known else Configuration()


# -- NVIDIA's fine-tuning with low-rank adapters -------------------------------------------------------------------

_SQUAD_TOKENS = 160
"""Tokens of a document of SQuAD, which all these runs pack. The rows say it themselves: TFLOP/s over tokens/s, less the
4 FLOPs a weight of frozen matrices, is the attention of documents of 145 to 178 tokens (Llama 2 on H100)."""


def _adapters(rank: int) -> Configuration:
    return Configuration(
        scenario={
            "training": {
                "lora": {"rank": rank, "targets": ["linear_qkv"]},
                **_PACKED,
            }
        },
        notes=(
            f"adapters of rank {rank} at linear_qkv are the recipe's, SQuAD's documents of about 160 tokens the row's "
            "own FLOPs",
        ),
    )


_PACKED: Section = {"sequence_lengths": {"mean": _SQUAD_TOKENS}}
_PACKED_NOTE = "packed documents of SQuAD of about 160 tokens are those of rows with adapters"


def _nemo(row: Section) -> Configuration:
    """Adapters at ``linear_qkv``, of the default rank of NeMo's class (nemo/collections/llm/peft/lora.py).

    The place is that of its performance recipes (nemo/collections/llm/recipes/llama3_70b.py, ``target_modules``).
    """
    return _adapters(32) if "LoRA" in text_at(row, "table") else Configuration()


def _bridge(row: Section) -> Configuration:
    """Rank 16 at ``linear_qkv`` and packed sequences of SQuAD, for fine-tuning of whole models too.

    recipes/llama/llama3.py and scripts/performance/configs/llama/llama3_llm_finetune.py of Megatron Bridge.
    """
    table = text_at(row, "table")
    if "LoRA" not in table and "SFT" not in table:
        return Configuration()
    training: dict[str, Any] = {**_PACKED, "recompute": "none", **_fine_tuning_graphs(row)}
    notes = [_PACKED_NOTE]
    if "LoRA" in table:
        adapters = _adapters(16)
        training = {**training, **mapping_at(adapters.scenario, "training")}
        notes = list(adapters.notes)
        if "h100" in text_at(row, "gpu").lower() and text_at(row, "precision").lower() == "bf16":
            training["recompute"] = {"layers": 1, "method": "block"}
    if training["cuda_graphs"]:
        notes.append(_CAPTURED_MLP)
    return Configuration(scenario={"training": training}, notes=tuple(notes))


_CAPTURED_MLP = "MLPs in CUDA graphs are those of the performance recipe for fine-tuning"


def _fine_tuning_graphs(row: Section) -> dict[str, list[str] | None]:
    """``cuda_graph_scope`` of scripts/performance/configs/llama/llama3_workload_base_configs.py: MLPs, in 70 B models.

    On Blackwell always, on H100 in 8-bit fine-tuning of the whole model.
    """
    whole, eight_bits = "SFT" in text_at(row, "table"), "fp8" in text_at(row, "precision").lower()
    captured = "h100" not in text_at(row, "gpu").lower() or (whole and eight_bits)
    large = "70B" in text_at(mapping_at(row, "model"), "name")
    return {"cuda_graphs": ["mlp"] if captured and large else None}


_EXPERT_OVERLAP = re.compile(r"\b(ep|moe|expert|a2a|all-?to-?all)[\w /-]*overlap", re.IGNORECASE)
_NOT_THERE = re.compile(r"\b(no|without|off|disabled|baseline)\b", re.IGNORECASE)


def _ablations(row: Section) -> Configuration:
    """The recipes that these rows change one setting of, and what they say of the exchanges of experts.

    An overlap of exchanges is Megatron-Core's of a forward and a backward (``overlap_moe_expert_parallel_comm``), whose
    weight gradients are delayed only where a row says so (``delay_wgrad_compute``).
    """
    known = _ablated_recipe(row)
    said = " ".join(text_at(row, key) for key in ("technique", "notes"))
    scenario = dict(known.scenario)
    named = next((name for name in ("hybridep", "deepep") if name in said.lower()), None)
    if named is not None:
        parallel = scenario.get("parallel")
        scenario["parallel"] = {
            **(parallel if isinstance(parallel, Mapping) else {}),
            "ep_dispatcher": named,
        }
    part = next((part for part in re.split(r"[,;]", said) if _EXPERT_OVERLAP.search(part)), "")
    if part and not _NOT_THERE.search(part):
        delayed = re.search(r"delay\w*[ _-](w|weight)", said, re.IGNORECASE) is not None
        scenario["overlap"] = {"ep": True, "wgrad": delayed}
        scenario["schedule"] = "1f1b-overlap"
    return replace(known, scenario=scenario)


def _ablated_recipe(row: Section) -> Configuration:
    """The recipe of a row, by its heading.

    Moonlight: src/megatron/bridge/recipes/moonlight/moonlight_16b.py, ``moonlight_16b_pretrain_config``: gradients are
    reduced and kept in bf16, and so are both moments (``use_precision_aware_optimizer``). Nemotron 3 Nano, whose rows
    name HybridEP and CUDA graphs: scripts/performance/configs/nemotronh, ``nemotron_3_nano_llm_pretrain.py`` (gradients
    reduced in bf16) and ``nemotron_3_workload_base_configs.py`` (graphs of attention and Mamba layers on H100 in bf16).
    Llama 3 70B SFT: ``llama3_llm_finetune.py`` in scripts/performance/configs/llama.
    """
    table = text_at(row, "table")
    if table.startswith("Moonlight"):
        return Configuration(
            scenario={
                "training": {"grad_reduce_dtype": "bf16", "optimizer_dtypes": {"moments": "bf16"}},
                "libraries": {"nan_checks": True},
            },
            notes=("bf16 gradients and moments are those of the recipe for pre-training Moonlight 16B",),
        )
    if table.startswith("Nemotron 3 Nano"):
        return Configuration(
            scenario={
                "training": {"grad_reduce_dtype": "bf16", "cuda_graphs": ["attn", "mamba"]},
                "parallel": {"ep_dispatcher": "hybridep"},
                "libraries": {"weighted_squared_relu_fusion": True},
            },
            notes=(
                "bf16 gradients, HybridEP and graphs of attention and Mamba are those of the performance recipe",
            ),
        )
    if "SFT" in table:
        return Configuration(
            scenario={
                "training": {**_PACKED, **_fine_tuning_graphs(row), "grad_reduce_dtype": "bf16"},
                "overlap": {"tp": "userbuffers"},
            },
            notes=(
                _PACKED_NOTE,
                "bf16 gradients, overlap of tp and graphs are those of the performance recipe",
            ),
        )
    return Configuration()


_DISPATCHERS = {"DeepEP": "deepep", "A2A": "alltoall"}


def _modelzoo(row: Section) -> Configuration:
    """What rows of Megatron-MoE-ModelZoo say in columns and notes of their own."""
    scenario: dict[str, Section | str] = {}
    notes: tuple[str, ...] = ()
    if dispatcher := _DISPATCHERS.get(text_at(row, "dispatcher")):
        scenario["parallel"] = {"ep_dispatcher": dispatcher}
    elif text_at(row, "table") == "Blackwell":
        # best_practice/qwen3/run_gb200_235b.sh, run_gb300_235b.sh; model_configs/benchmarking.
        scenario |= {
            "parallel": {"ep_dispatcher": "hybridep"},
            "training": {"cuda_graphs": ["attn", "moe_router", "moe_preprocess"]},
            "libraries": {"router_fusion": True},
        }
        notes = (
            "HybridEP, CUDA graphs, the fused router and on GB300 overlapped exchanges are those of the scripts beside "
            "the table",
        )
    overlaps = "1f1b overlap" in text_at(row, "notes")
    if overlaps or (notes and text_at(row, "gpu") == "GB300"):
        scenario |= {"overlap": {"ep": True}, "schedule": "1f1b-overlap"}
    return Configuration(scenario=scenario, notes=notes)


# -- NeMo AutoModel --------------------------------------------------------------------------------------------------


def _automodel(row: Section) -> Configuration:
    """examples/llm_benchmark of NeMo AutoModel, a YAML file for each row.

    ``num_microbatches`` of a row is the number of its local batches; each goes through the pipeline on its own.
    """
    changes = _automodel_adapters(row) if "LoRA" in text_at(row, "table") else _automodel_mixture(row)
    local, size = row.get("local_batch"), row.get("mbs", row.get("local_batch"))
    calls = row.get("num_microbatches") or 1
    if not (isinstance(local, int) and isinstance(size, int) and isinstance(calls, int)) or local % size:
        return changes
    a_call = local // size
    scenario = dict(changes.scenario)
    if calls > 1 and count_at(mapping_at(row, "parallel"), "pp", default=1) > 1:
        scenario["schedule"] = f"{_automodel_schedule(row)}:flush={a_call}"
    stated = {"num_microbatches": a_call * calls, "mbs": size, "local_batch": None, "gbs": None}
    return replace(changes, row={**changes.row, **stated}, scenario=scenario)


def _automodel_schedule(row: Section) -> str:
    return "interleaved-1f1b" if count_at(mapping_at(row, "parallel"), "vpp", default=1) > 1 else "1f1b"


def _automodel_adapters(row: Section) -> Configuration:
    """``*_peft_benchmark.yaml``, ``*_peft_pp.yaml``: adapters of rank 16 at every ``*_proj`` of weights in bf16.

    ``qkv_proj`` and ``gate_up_proj`` are one each in AutoModel's own models; models of 7 and 8 B are Hugging Face's
    (``force_hf``), without activation checkpointing, and Llama 3 8B has dropout of 0.1. The larger ones checkpoint
    whole layers; Llama 3 70B runs sequence parallelism and asynchronous tensor parallelism, unless cut into stages.
    """
    name = text_at(mapping_at(row, "model"), "name")
    small = re.search(r"\b[78]B\b", name) is not None
    rings = "70B" in name and count_at(mapping_at(row, "parallel"), "pp", default=1) == 1
    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    if small:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    dropout = 0.1 if small and name.startswith("Llama") else 0.0
    return Configuration(
        row={"recompute": "none" if small else "full"},
        scenario={
            "training": {
                "lora": {"rank": 16, "targets": targets, "dropout": dropout},
                **({} if small else {"recompute": {"layers": 1, "stops_early": True}}),
            },
            "parallel": {"sp": rings},
            "overlap": {"tp": "async-tp" if rings else False},
            "libraries": {"transformer_engine": False},
        },
        notes=("adapters, recompute and overlap are those of the benchmark's YAML file",),
    )


def _automodel_mixture(row: Section) -> Configuration:
    """``*_te_deepep.yaml``: FSDP2 with gradients in bf16, DeepEP, a gate without scores (``fake_balanced_gate``).

    Activation checkpointing of whole layers, but for Moonlight and GPT-OSS 20B, and GPT-OSS 120B in local batches of
    two. No file has heads for multi-token prediction.
    """
    name = text_at(mapping_at(row, "model"), "name")
    known = re.sub(r"[^a-z0-9]", "", name.lower())
    kept = known.startswith(("moonlight", "gptoss20b")) or (
        known.startswith("gptoss120b") and row.get("local_batch") != 1
    )
    scenario: dict[str, Section | str] = {
        "parallel": {"ep_dispatcher": "deepep"},
        "training": {
            "grad_reduce_dtype": "bf16",
            **({} if kept else {"recompute": {"layers": 1, "stops_early": True}}),
        },
        "libraries": {"experts_in_turn": True},
    }
    if known.startswith("deepseekv3"):
        scenario["model"] = {"base": "deepseek-v3", "name": "deepseek-v3", "mtp_layers": 0}
    return Configuration(
        row={"recompute": "none" if kept else "full"},
        scenario=scenario,
        notes=(
            "recompute, DeepEP, bf16 gradients and local batches are those of the benchmark's YAML file, which has no "
            "heads for multi-token prediction",
        ),
    )


# -- torchtitan ------------------------------------------------------------------------------------------------------


def _torchtitan(row: Section) -> Configuration:
    """The command lines of benchmarks/*.md and the configurations that they name (llama3_8b.toml)."""
    if not text_at(row, "table").startswith("2025-06 Trainy"):
        return Configuration()
    gathers = "all-gather" in text_at(row, "technique")
    return Configuration(
        row={"recompute": "per-op SAC"},
        scenario={"training": {"fp8_param_gather": True}} if gathers else {},
        notes=(
            "selective checkpointing by operators is that of llama3_8b.toml, which the command line names",
        ),
    )


_CCL = {
    "llama3-torchtitan-nccl-4gpu-fsdp_2-tp_2-b_4-s_512": (4, 4),
    "llama3-torchtitan-nccl-4gpu-fsdp_4-b_4-s_512": (4, 4),
    "deepseek-v3-16b-torchtitan-ep8-dp2-pp2-tp4-perlmutter": (4, 2),
    "deepseek-v3-16b-torchtitan-ep32-dp8-pp4-tp4-perlmutter": (8, 2),
    "deepseek-v3-236b-torchtitan-ep32-dp8-pp8-tp4-perlmutter": (8, 1),
    "deepseek_v3_16b_ep8_dp2_tp4_w8_batch8_seq1024-nccl-perlmutter": (4, 4),
}
"""Local batch and microbatch of the TOML file beside each trace (``local_batch_size``,
``pipeline_parallel_microbatch_size``)."""
_SLINGSHOT_GB_PER_S = 25.0
_GPUS_A_NODE = 4


def _ccl_bench(row: Section) -> Configuration:
    """trace_collection/NAME/*.toml: no activation checkpointing, units dropped behind each use, nothing compiled.

    Perlmutter has four A100 a node. DeepSeek's flavors are those of torchtitan/models/deepseek_v3, attention of both
    PyTorch's: FlashAttention 2, or FlexAttention for latent attention.
    """
    table, parallel = text_at(row, "table"), mapping_at(row, "parallel")
    framework = text_at(row, "framework")
    if not framework.startswith("torchtitan"):
        raise RowSkippedError(
            f"ran on a TPU with {framework}, for which there is neither profile nor kernels"
        )
    if "mscclpp" in table:
        raise RowSkippedError("its collectives are those of MSCCL++, which have no cost here")
    if parallel.get("dp_shard") == 1 and parallel.get("dp_replicate") == 1:
        # distributed/utils.py, maybe_enable_amp.
        raise RowSkippedError(
            "without data parallelism torchtitan trains in fp32, in which attention runs in PyTorch's "
            "memory-efficient kernel, which has no cost here"
        )
    if table not in _CCL:
        raise RowSkippedError("the row and the configuration beside its trace give different degrees")
    _check_transport(row)
    local, micro = _CCL[table]
    return Configuration(
        row={"mbs": micro, "num_microbatches": local // micro, "recompute": "none"},
        scenario={
            "parallel": {"reshard": "always"},
            "hardware": {"base": "a100-sxm-80g", "network": {"gpus_per_domain": 4}},
        },
        notes=("batch, microbatch and checkpointing are those of the TOML file beside the trace",),
    )


def _check_transport(row: Section) -> None:
    """Raise RowSkippedError where a run between nodes moved far less than its network can, by its own figures.

    NCCL without a plugin for Slingshot falls back to sockets; the cards do not say what it had.
    """
    metrics = mapping_at(row, "metrics")
    seconds, share = number_at(metrics, "iter_time_s"), number_at(metrics, "communication_fraction_pct")
    moved = sum(value for key, value in metrics.items() if key.startswith("collective_vol_"))
    if count_at(row, "num_gpus") <= _GPUS_A_NODE or seconds is None or share is None:
        return
    rate = moved / (seconds * share / 100)
    if rate < _SLINGSHOT_GB_PER_S / 5:
        raise RowSkippedError(
            f"its collectives moved {rate:.1f} GB/s a GPU by its own figures, of {_SLINGSHOT_GB_PER_S:g} that the "
            "network has: which transport NCCL used is not stated"
        )


# -- fms-fsdp --------------------------------------------------------------------------------------------------------


def _fms(row: Section) -> Configuration:
    """fms_fsdp/policies/ac_handler.py recomputes a part of the layers, ``selective_checkpointing``.

    The table does not say which, but gives MFU and HFU: they differ by that part of a third forward pass.
    """
    if text_at(row, "recompute") != "Selective AC":
        return Configuration()
    metrics = mapping_at(row, "metrics")
    mfu, hfu = number_at(metrics, "mfu"), number_at(metrics, "hfu")
    if mfu is None or hfu is None:
        return Configuration()
    low, high = (3 * ((hfu - off) / (mfu + off) - 1) for off in (_ROUNDING, -_ROUNDING))
    if not low <= 1 <= high:
        raise RowSkippedError(
            f"which part of the layers it recomputes is not stated; its HFU and MFU leave {low:.2f} to {high:.2f}"
        )
    # CheckpointImpl.NO_REENTRANT stops where the backward needs no more, as in torchtitan.
    return Configuration(
        row={"recompute": "full AC"},
        notes=("that every layer is recomputed follows from the row's HFU and MFU",),
    )


_ROUNDING = 0.005
"""Half of the last digit that the table prints."""


# -- sources whose rows are no steps, or name no machine --------------------------------------------------------------


def _kernels(row: Section) -> Configuration:
    if "kernel timing" in text_at(row, "table"):
        raise RowSkippedError("it times single kernels, not a step")
    return Configuration()


def _unnamed_gpu(row: Section) -> Configuration:
    raise RowSkippedError("which GPU it ran on is not stated")


# -- Megatron-LM -----------------------------------------------------------------------------------------------------

_TABLE_1 = {"1.7B": (16, 1), "7.5B": (16, 1), "39.1B": (4, 1), "76.1B": (2, 3), "310.1B": (1, 2)}
"""Micro-batch size and model chunks a rank by size: examples/sc21/run_table_1.sh of Megatron-LM."""


def _sc21(row: Section) -> Configuration:
    size = text_at(mapping_at(row, "model"), "name").removeprefix("GPT ")
    if text_at(row, "table") != "Table 1" or size not in _TABLE_1:
        return Configuration()
    micro, chunks = _TABLE_1[size]
    return Configuration(
        row={"mbs": micro, "parallel": {**mapping_at(row, "parallel"), "vpp": chunks}},
        notes=("micro-batch size and model chunks are those of examples/sc21/run_table_1.sh",),
    )


def _longseq(row: Section) -> Configuration:
    """NeMo's recipes for long sequences (llama3_8b_16k.py, llama3_8b_64k.py) have one sequence a microbatch.

    The page's first version prints the node count of the B200 table four times too large: its later version has 2 to 32
    GPUs, as the degrees multiply to.
    """
    model, parallel = mapping_at(row, "model"), mapping_at(row, "parallel")
    fields: dict[str, Any] = {}
    if re.search("B200", text_at(row, "table")):
        fields["num_gpus"] = parallel["tp"] * parallel["pp"] * parallel["cp"] * parallel["dp"]
    if model.get("seq", 0) >= 16384:
        fields["mbs"] = 1
    return Configuration(
        row=fields,
        notes=(
            "one sequence a microbatch is that of the recipes for long sequences; B200 GPUs as the page has them now",
        ),
    )


_CONFIGURATIONS: dict[str, Callable[[Section], Configuration]] = {
    "nemo-24.07": _nemo,
    "nemo-24.12": _nemo,
    "megatron-bridge": _bridge,
    "megatron-bridge-ablations": _ablations,
    "moe-modelzoo": _modelzoo,
    "nemo-automodel": _automodel,
    "torchtitan-bench": _torchtitan,
    "ccl-bench": _ccl_bench,
    "megatron-sc21": _sc21,
    "fms-fsdp": _fms,
    "nnscaler": _kernels,
    "torchtitan-issue-773": _unnamed_gpu,
    "nemo-longseq": _longseq,
}
