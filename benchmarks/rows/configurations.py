"""What the configuration file or script of a run says beside its row: fields of the row, and of the scenario.

Each function names its evidence, a file that the source itself published for the run or the defaults of its framework
at that time. What such a file contradicts, or what has no cost here, is a reason to leave the row out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .configuration import Configuration, Section
from .nvidia_configurations import ablations, automodel, bridge, modelzoo, nemo, nemo_2025
from .row import RowSkippedError, count_at, mapping_at, number_at, text_at


def configuration_of(row: Section, source: str) -> Configuration:
    """The configuration of a row; an empty one where none is known.

    Raise RowSkippedError where it says that the run is not one that can be expressed.
    """
    known = _CONFIGURATIONS.get(source)
    return known(row) if known else Configuration()


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
    "nemo-24.07": nemo,
    "nemo-24.12": nemo,
    "nemo-25.02-25.04": nemo_2025,
    "megatron-bridge": bridge,
    "megatron-bridge-ablations": ablations,
    "moe-modelzoo": modelzoo,
    "nemo-automodel": automodel,
    "torchtitan-bench": _torchtitan,
    "ccl-bench": _ccl_bench,
    "megatron-sc21": _sc21,
    "fms-fsdp": _fms,
    "nnscaler": _kernels,
    "torchtitan-issue-773": _unnamed_gpu,
    "nemo-longseq": _longseq,
}
