"""What recipes and benchmark files of NVIDIA's frameworks say beside the rows of their tables.

NeMo, Megatron Bridge, Megatron-MoE-ModelZoo and NeMo AutoModel; each function names its evidence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .configuration import Configuration, Section
from .row import count_at, mapping_at, text_at

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


def nemo(row: Section) -> Configuration:
    """Adapters at ``linear_qkv``, of the default rank of NeMo's class (nemo/collections/llm/peft/lora.py).

    The place is that of its performance recipes (nemo/collections/llm/recipes/llama3_70b.py, ``target_modules``). Rows
    of whole models pack the same documents: TFLOP/s over tokens/s leave next to nothing to attention.
    """
    table = text_at(row, "table")
    if "SFT" in table:
        return Configuration(scenario={"training": _PACKED}, notes=(_PACKED_NOTE,))
    return _adapters(32) if "LoRA" in table else Configuration()


_CAPTURED = {"gb200": ("GPT3-175B", "Nemotron-340B"), "b200": ("Nemotron-340B",)}
"""Models that NeMo's recipes of 2025 capture layer by layer beside those of 8B and 15B, in 8 bits."""


def nemo_2025(row: Section) -> Configuration:
    """``cuda_graphs`` of scripts/performance/recommended_model_configs/model_configs_*.csv of NeMo: whole layers."""
    gpu = text_at(row, "gpu").lower().removeprefix("dgx-")
    name = text_at(mapping_at(row, "model"), "name")
    small = gpu in _CAPTURED and name.endswith(("-8B", "-15B"))
    if "LoRA" in text_at(row, "table") or not (small or name in _CAPTURED.get(gpu, ())):
        return Configuration()
    return Configuration(
        scenario={"training": {"cuda_graphs": ["attn", "mlp"]}},
        notes=("layers launched as CUDA graphs are those of the performance recipe",),
    )


def bridge(row: Section) -> Configuration:
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


def ablations(row: Section) -> Configuration:
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


def modelzoo(row: Section) -> Configuration:
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


def automodel(row: Section) -> Configuration:
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
