"""Rows of the SimuMax benchmark files: Megatron-LM on one node, with the strategy in SimuMax's own keys.

How the runs were launched is in SimuMax's ``simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh`` and
``docs/b200/b200_real_repro_guide.md``: distributed optimizer without overlap of gradient reduction, parameter gather
or point-to-point transfers, flash attention, no dropout, fp32 gradient accumulation and reduction, untied embeddings.
On B200 it is a checkout of 2025, which looks for NaN in losses and gradients; which one the A100 ran is not said.
The strategy's ``overlap_grad_reduce`` describes SimuMax's prediction, not the run, so it is not read.

Memory of a row is the largest over its ranks; reserved memory is compared for each rank too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardware_profiles import HardwareProfile, ProfileError, import_simumax
from hardware_profiles.loader import profile_to_mapping

from .row import MeasuredRow, RowFile, RowSkippedError, count_at, mapping_at, number_at, scenario_of, text_at

_A100_PCIE_MACHINE = "a100_pcie.json"
"""Rows of the A100 file do not name their machine; SimuMax publishes one A100 PCIe machine file."""


def express(row: Mapping[str, Any], label: str, file: RowFile) -> MeasuredRow:
    """The scenario of a row; raise RowSkippedError with the reason where there is none."""
    strategy, model = mapping_at(row, "strategy"), mapping_at(row, "model")
    machine = Path(text_at(row, "system") or _A100_PCIE_MACHINE).name
    mapping = {
        "name": label,
        "model": _model(model, text_at(row, "family") or text_at(row, "model_config") or "llama3"),
        "hardware": profile_to_mapping(_machine(machine, file)),
        "parallel": _parallel(strategy),
        "training": _training(strategy),
        "schedule": "interleaved-1f1b" if count_at(strategy, "interleaving_size", default=1) > 1 else "1f1b",
        "overlap": {"grad_reduce": False, "param_gather": False, "p2p": False},
        "libraries": {"nan_checks": machine != _A100_PCIE_MACHINE},
    }
    time_ms = number_at(row, "real_ms") or number_at(row, "implied_real_ms")
    allocated, reserved = _memory(row)
    ranks = {
        int(rank): value
        for rank, of_rank in mapping_at(row, "real_mem_by_rank").items()
        if isinstance(of_rank, Mapping) and rank.isdigit() and (value := number_at(of_rank, "reserved_gib"))
    }
    scenario = scenario_of(mapping)
    if any(rank >= scenario.parallel.world_size for rank in ranks):
        raise RowSkippedError(
            f"real_mem_by_rank names ranks beyond the {scenario.parallel.world_size} there are"
        )
    return MeasuredRow(label, scenario, time_ms, allocated, reserved, reserved_by_rank=ranks)


def _memory(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    by_rank = [ranks for ranks in mapping_at(row, "real_mem_by_rank").values() if isinstance(ranks, Mapping)]
    allocated = [value for ranks in by_rank if (value := number_at(ranks, "alloc_gib"))]
    reserved = [value for ranks in by_rank if (value := number_at(ranks, "reserved_gib"))]
    return (
        max(allocated, default=None)
        or number_at(row, "real_alloc_gib")
        or number_at(row, "implied_real_peak_gib"),
        max(reserved, default=None) or number_at(row, "real_reserved_gib"),
    )


def _model(model: Mapping[str, Any], family: str) -> dict[str, Any]:
    heads = count_at(model, "head_num")
    hidden = count_at(model, "hidden_size")
    return {
        "name": family,
        "layers": count_at(model, "layer_num"),
        "hidden_size": hidden,
        "ffn_size": count_at(model, "intermediate_size"),
        "heads": heads,
        "kv_heads": count_at(model, "kv_head_num", default=heads),
        "head_size": count_at(model, "head_size", default=hidden // heads),
        "vocab_size": count_at(model, "orig_vocab_size", "vocab_size"),
        "activation": "swiglu" if model.get("use_swiglu", True) else "gelu",
        "norm": "rmsnorm",
        "positions": "rotary",
        "tied_embeddings": False,
        **_experts(model),
        **_latent_attention(model),
    }


def _experts(model: Mapping[str, Any]) -> dict[str, Any]:
    """The mixture of experts of a row; SimuMax pads every expert to an equal share of the tokens."""
    if (model.get("expert_num") or 1) == 1:
        return {}
    width = count_at(model, "moe_ffn_hidden_size")
    padded = model.get("moe_pad_expert_input_to_capacity", False)
    return {
        "moe": {
            "experts": count_at(model, "expert_num"),
            "top_k": count_at(model, "topk"),
            "expert_ffn_size": width,
            "shared_ffn_size": model.get("moe_shared_expert_intermediate_size") or 0,
            "first_dense_layers": model.get("dense_layers") or 0,
            "capacity_factor": float(model.get("capacity") or 1) if padded else None,
        }
    }


def _latent_attention(model: Mapping[str, Any]) -> dict[str, Any]:
    if text_at(model, "attention_type") != "mla":
        return {}
    nope, rope = count_at(model, "qk_head_dim"), count_at(model, "qk_pos_emb_head_dim")
    heads = count_at(model, "head_num")
    return {
        "head_size": nope + rope,
        "kv_heads": heads,
        "latent_attention": {
            "q_lora_rank": model.get("q_lora_rank") or 0,
            "kv_lora_rank": count_at(model, "kv_lora_rank"),
            "qk_nope_head_size": nope,
            "qk_rope_head_size": rope,
            "v_head_size": count_at(model, "v_head_dim"),
        },
    }


def _parallel(strategy: Mapping[str, Any]) -> dict[str, Any]:
    zero = strategy.get("zero_state", strategy.get("zero", 1))
    return {
        "tp": count_at(strategy, "tp_size", "tp", default=1),
        "sp": bool(strategy.get("enable_sequence_parallel", strategy.get("sp", True))),
        "cp": count_at(strategy, "cp_size", "cp", default=1),
        "cp_comm": text_at(strategy, "cp_comm_type") or "a2a",
        "pp": count_at(strategy, "pp_size", "pp", default=1),
        "vpp": count_at(strategy, "interleaving_size", default=1),
        "dp": count_at(strategy, "dp_size", "dp", default=1),
        "ep": count_at(strategy, "ep_size", "ep", default=1),
        "etp": count_at(strategy, "etp_size", default=1),
        "zero": zero,
    }


def _training(strategy: Mapping[str, Any]) -> dict[str, Any]:
    if strategy.get("fp8"):
        raise RowSkippedError("the row does not say which fp8 recipe ran")
    flash = strategy.get("use_flash_sdp", True)
    return {
        "seq_len": count_at(strategy, "seq_len"),
        "micro_batch_size": count_at(strategy, "micro_batch_size"),
        "num_microbatches": count_at(strategy, "micro_batch_num"),
        "dtype": text_at(strategy, "dtype") or "bf16",
        "grad_reduce_dtype": "bf16" if strategy.get("grad_reduce_in_bf16") else "fp32",
        "recompute": _recompute(strategy),
        "cross_entropy_fusion": bool(
            strategy.get("cross_entropy_loss_fusion", strategy.get("ce_fusion", False))
        ),
        "attention": "flash" if flash else "unfused",
    }


def _recompute(strategy: Mapping[str, Any]) -> str | dict[str, Any]:
    layers = strategy.get("recompute_layer_num")
    if "recompute_granularity" in strategy:
        granularity = strategy["recompute_granularity"]
        if granularity is None or layers == 0:
            return "none"
        if granularity in ("full", "full_block"):
            return {"method": "block", "layers": count_at(strategy, "recompute_layer_num")}
        raise RowSkippedError(f"recompute_granularity {granularity!r} is not expressed")
    stated = text_at(strategy, "recompute")
    if stated in ("none", "full"):
        return stated
    raise RowSkippedError(f"recompute {stated!r} is not expressed")


def _machine(name: str, file: RowFile) -> HardwareProfile:
    folders = (*file.machine_folders, file.path.parent.parent / "simumax_system", file.path.parent)
    for folder in folders:
        if (folder / name).is_file():
            try:
                return _imported(folder / name)
            except ProfileError as error:
                raise RowSkippedError(str(error)) from None
    searched = ", ".join(str(folder) for folder in folders)
    raise RowSkippedError(f"machine file {name} was not found in {searched}; give its folder with --machines")


@functools.lru_cache(maxsize=8)
def _imported(path: Path) -> HardwareProfile:
    return import_simumax(path)
