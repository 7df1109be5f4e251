"""Figures of chunked scans, ``scan.efficiency``, ``scan.step_us`` and ``scan.backward_ratio``, on published timings.

H100: the five kernels of Mamba-2's scan in Triton at the sizes of Granite 4.0 H Small (128 heads of 64, one group,
states of 128, chunks of 256), as tokens a second (a comment on vllm-project/vllm, pull request 27299); shorter
sequences are bound by launches. B200: the forward kernels of the gated delta rule of flash-linear-attention in Triton,
8 value heads with keys and values of 128, for 8 and 16 sequences of 8,192 tokens (flashinfer-ai/flashinfer, pull
request 3902). The value at which the median error is zero.

The step of a pass through the chunks follows from single sequences of 4,096 to 65,536 tokens in the same tables (H100:
pull request 3866), whose 8 heads leave most of a chip idle.

Neither has a backward pass. What it takes follows from the training rate of a Mamba-2 model on H200 (48 layers of width
2,048, 16,384 tokens; github.com/state-spaces/mamba/issues/904), read as six FLOPs a parameter and token: all that its
step takes longer than its other operations. The source says nothing of those, so the ratio is rather low than high; the
rates of other machines there, whose efficiency of the forward is less certain, ask for 0.21 (A100) and 0.25 (GB200). As
one sequence, because mamba_ssm needs no copies between orders; without work of the host. No row of the scoreboard took
part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np

from hardware_profiles import HardwareProfile, load_profile
from op_graphs.parameters import count_parameters
from op_graphs.presets import model_from_mapping
from op_graphs.vocabulary import OpKind, Phase
from tracesim.cost import CostModel
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario
from tracesim.simulation import iteration_ms

from .host import zero_of_median
from .kernels import with_figure
from .result import Fit, installed_value

EFFICIENCY, STEP, BACKWARD = "scan.efficiency", "scan.step_us", "scan.backward_ratio"
FIGURES = (EFFICIENCY, STEP, BACKWARD)

SSD_TOKENS_PER_S = {
    4096: 1.206409e7,
    8192: 1.262327e7,
    16384: 1.292440e7,
    32768: 1.180002e7,
    65536: 1.106830e7,
    131072: 1.070444e7,
    262144: 1.081547e7,
}
"""H100, by tokens of the one sequence."""
DELTA_MS = {
    "h100-sxm": {
        (1, 4096): 0.144,
        (1, 8192): 0.259,
        (1, 16384): 0.508,
        (1, 32768): 0.997,
        (1, 65536): 1.954,
    },
    "b200-sxm": {
        (1, 4096): 0.141,
        (1, 8192): 0.250,
        (1, 16384): 0.483,
        (1, 32768): 0.948,
        (1, 65536): 1.862,
        (8, 8192): 0.866,
        (16, 8192): 1.710,
    },
}
"""By machine, and by sequences and tokens of each."""
TRAINING_TFLOPS = {"h200-sxm": 239.2}
"""Of the Mamba-2 model, by machine."""

_SSD = {"heads": 128, "head_size": 64, "state_size": 128, "groups": 1, "chunk_size": 256}
_DELTA = {"key_heads": 8, "value_heads": 8, "key_head_size": 128, "value_head_size": 128}
_MODEL: dict[str, Any] = {
    "layers": 48,
    "hidden_size": 2048,
    "ffn_size": 2048,
    "heads": 32,
    "vocab_size": 50_280,
    "tied_embeddings": True,
    "layer_pattern": "M" * 48,
    "state_space": {"heads": 64, "head_size": 64, "state_size": 128, "groups": 1, "chunk_size": 256},
}
_TRAINING: dict[str, Any] = {
    "seq_len": 16_384,
    "micro_batch_size": 1,
    "num_microbatches": 1,
    "cross_entropy_fusion": "torch",
    "gradient_accumulation_fusion": False,
}
_VALUES = {
    EFFICIENCY: tuple(share / 100 for share in range(3, 13)),
    STEP: (0.0, 0.5, 1.0, 1.5, 2.0),
    BACKWARD: tuple(share / 100 for share in range(16, 64, 4)),
}
_NEUTRAL = {EFFICIENCY: 1.0, STEP: 0.0, BACKWARD: 1.0}


@dataclass(frozen=True)
class _Kernels:
    """The forward kernels of one scan, and how long they took."""

    layer: str
    sequences: int
    tokens: int
    ms: float

    def predicted_ms(self, profile: HardwareProfile) -> float:
        """What they take on a machine."""
        model: dict[str, Any] = {"layers": 1, "hidden_size": 1024, "ffn_size": 1024, "heads": 8}
        model |= {"vocab_size": 1024, "layer_pattern": self.layer}
        model |= {"state_space": _SSD} if self.layer == "M" else {"delta_net": _DELTA}
        training = {"seq_len": self.tokens, "micro_batch_size": self.sequences, "num_microbatches": 1}
        graph = lower_scenario(
            load_scenario({"model": model, "hardware": profile.name, "training": training})
        )
        operations = graph.operations
        mine = (operations.kind == OpKind.SCAN) & (operations.phase == Phase.FORWARD)
        return float(np.sum(CostModel(profile).durations_ns(graph)[mine])) / 1e6


@dataclass(frozen=True)
class _Step:
    """A training step of a Mamba-2 model, and the rate that it reached."""

    tflops: float

    @property
    def ms(self) -> float:
        """How long it took."""
        tokens = _TRAINING["seq_len"]
        parameters = count_parameters(model_from_mapping(_MODEL, "mamba-2"))
        return float(6 * parameters * tokens / self.tflops / 1e9)

    def predicted_ms(self, profile: HardwareProfile) -> float:
        """What it takes on a machine whose host is always ahead."""
        libraries = {"transformer_engine": False}
        document = {"model": _MODEL, "hardware": profile.name, "training": _TRAINING, "libraries": libraries}
        hardware = replace(profile, host=replace(profile.host, operation_us=0.0))
        return float(iteration_ms(replace(load_scenario(document), hardware=hardware)))


@dataclass(frozen=True)
class _Table:
    """Rows that decide a figure of a machine."""

    profile: str
    figure: str
    rows: tuple[_Kernels | _Step, ...]
    what: str


def _tables() -> list[_Table]:
    ssd = tuple(_Kernels("M", 1, tokens, tokens / rate * 1e3) for tokens, rate in SSD_TOKENS_PER_S.items())
    tables = [_Table("h100-sxm", EFFICIENCY, ssd, "timings of Mamba-2's scan (vllm 27299)")]
    pulls = {"h100-sxm": 3866, "b200-sxm": 3902}
    for profile, timings in DELTA_MS.items():
        rows = [_Kernels("G", count, tokens, ms) for (count, tokens), ms in timings.items()]
        source = f"(flashinfer {pulls[profile]})"
        many, one = (
            tuple(row for row in rows if (row.sequences > 1) == several) for several in (True, False)
        )
        if many:
            tables.append(_Table(profile, EFFICIENCY, many, f"timings of delta rules {source}"))
        tables.append(_Table(profile, STEP, one, f"timings of delta rules over one sequence {source}"))
    for profile, tflops in TRAINING_TFLOPS.items():
        tables.append(_Table(profile, BACKWARD, (_Step(tflops),), "training rate of Mamba-2 (mamba 904)"))
    return tables


def fit(figure: str = "") -> list[Fit]:
    """The fits of all figures on the machines that were timed, or of one figure."""
    return [_fit(table) for table in _tables() if figure in ("", table.figure)]


def _fit(table: _Table) -> Fit:
    base = load_profile(table.profile)
    sign = 1 if table.figure == STEP else -1
    errors = {value: [sign * e for e in _errors(table, base, value)] for value in _VALUES[table.figure]}
    value = float(f"{zero_of_median(errors):.3g}")
    after = _errors(table, base, value)
    return Fit(
        table.figure,
        table.profile,
        f"{len(table.rows)} {table.what}",
        "the median error is zero",
        value,
        "mean |error| of the time, %",
        _mean(_errors(table, base, _NEUTRAL[table.figure])),
        _mean(after),
        _mean(_errors(table, base, installed_value(table.profile, table.figure))),
        (f"median error {median(after):+.2f} % after",),
    )


def _errors(table: _Table, base: HardwareProfile, value: float) -> list[float]:
    profile = with_figure(base, table.figure, value)
    if table.figure != BACKWARD:
        profile = replace(profile, training_clock_ratio=1.0)
    return [100 * (row.predicted_ms(profile) / row.ms - 1) for row in table.rows]


def _mean(errors: Sequence[float]) -> float:
    return mean(abs(error) for error in errors)
