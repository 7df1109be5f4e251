"""Rows with a whole argument list of Megatron-LM: the golden values of its functional tests.

A row's memory is ``torch.cuda.max_memory_allocated`` of the last rank, so of the last pipeline stage. Its time is not
compared: the models are small, bound by launches and by the host they ran on, and the golden times of unchanged tests
differ by more than half (the source's own note).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tracesim.errors import ScenarioError
from tracesim.megatron import import_megatron

from .row import MeasuredRow, RowSkippedError, count_at, mapping_at, number_at, scenario_of, text_at
from .row_models import machine_of
from .source_settings import UNKNOWN_SOURCE

_VOCABULARIES = {
    # tokenizers of Megatron-LM's release tests, whose vocabularies are files: nemotron_2 SentencePiece, Llama 2,
    # Mistral's.
    "GPTSentencePieceTokenizer": 256_000,
    "Llama2Tokenizer": 32_000,
}
_SHARDS_STATE = ("use-distributed-optimizer", "use-megatron-fsdp", "num-experts")
_ONE_NODE = 8
"""GPUs of the machines on which the functional tests ran; those named ``_1node`` are of four (GB200)."""


def is_megatron_row(row: Mapping[str, Any]) -> bool:
    """Whether a row has an argument list."""
    return "megatron_args_full" in row


def express(row: Mapping[str, Any], label: str) -> MeasuredRow:
    """The scenario of a row; raise RowSkippedError with the reason where the arguments do not determine the memory."""
    table = text_at(row, "table")
    arguments = mapping_at(row, "megatron_args_full")
    notes: list[str] = []
    machine = _machine(row)
    gpus = _gpus(row, table)
    is_bert = table.startswith("bert/")
    try:
        imported = import_megatron(
            arguments,
            machine,
            world_size=gpus,
            vocab_size=_VOCABULARIES.get(str(arguments.get("tokenizer-type"))),
            environment=mapping_at(row, "env"),
            is_bert=is_bert,
            default_backend=_automatic_backend(row, table),
            name=re.sub(r"[/\\]", ":", label),
        )
    except ScenarioError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise RowSkippedError("; ".join(lines)) from None
    scenario = scenario_of(imported.mapping)
    if scenario.training.cuda_graphs:
        raise RowSkippedError("the private memory pools of CUDA graphs are not counted")
    allocated = number_at(mapping_at(row, "metrics"), "peak_alloc_gib")
    return MeasuredRow(
        label,
        scenario,
        allocated_gib=allocated,
        memory_stage=scenario.parallel.pp - 1,
        notes=tuple(notes),
    )


def _machine(row: Mapping[str, Any]) -> str | dict[str, Any]:
    if text_at(row, "gpu").startswith("unspecified"):
        return "a100-sxm-80g"
    return machine_of(row, UNKNOWN_SOURCE)


def _gpus(row: Mapping[str, Any], table: str) -> int:
    if row.get("num_gpus") is not None:
        return count_at(row, "num_gpus")
    arguments = mapping_at(row, "megatron_args_full")
    if not any(arguments.get(name) for name in _SHARDS_STATE) and "release" in table:
        # Nothing is spread over data-parallel ranks, so their number does not matter for the memory of one.
        tp, pp = (arguments.get(f"{kind}-model-parallel-size", 1) for kind in ("tensor", "pipeline"))
        return int(tp) * int(pp)
    if "release" in table:
        raise RowSkippedError("the row does not say how many GPUs the release test ran on")
    return 4 if "_1node" in table else _ONE_NODE


def _automatic_backend(row: Mapping[str, Any], table: str) -> str:
    """The attention kernel that Transformer Engine takes where none is named.

    It must be deterministic where the environment says so. FlashAttention's backward is from version 2.4.1 on; the
    long-term-support container (``lts`` in the name) has an older one, which leaves the unfused kernels.
    """
    deterministic = str(mapping_at(row, "env").get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")) == "0"
    return "unfused" if deterministic and "_lts" in table else "flash"
