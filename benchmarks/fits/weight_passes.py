"""The epilogue of fp16 products on A100 (``gemm.dtypes.fp16`` of ``a100-sxm-80g``), from passes of products alone.

Table 6 of arXiv:2401.10241 has, for GPT models of four widths, how long a profiled backward pass for weights took. In
that runtime such a pass is nothing but the four products of each layer that add to an fp16 gradient: autograd sums the
gradients of biases in the backward for the input. Widths differ in how much output a FLOP makes, from which the share
of the output that nothing hides follows. The sustained rate stays that of bf16: fitted with it, it would be 0.83, which
other sources in fp16, whose steps are fast as they are, do not bear out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean

from hardware_profiles import HardwareProfile, load_profile
from op_graphs.graph import GemmShape
from op_graphs.vocabulary import DType
from tracesim.cost import ComputeCost

from .result import Fit, installed_value

PROFILE = "a100-sxm-80g"
FIGURE = "gemm.dtypes.fp16.exposed_epilogue"
_TRIED = tuple(round(0.05 * step, 2) for step in range(15))


@dataclass(frozen=True)
class WeightPass:
    """Layers of a middle stage, tokens of a microbatch, and the profiled times of a model of the table."""

    hidden: int
    layers: int
    tokens: int
    measured_ms: tuple[float, ...]
    """With three numbers of microbatches a step."""

    @property
    def products(self) -> tuple[GemmShape, ...]:
        """The weight gradients of a layer: QKV and projection, and the two linears of the MLP."""
        hidden = self.hidden
        sizes = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
        return tuple(GemmShape(m, n, self.tokens, "NT", DType.FP16, DType.FP16, True) for m, n in sizes)


PASSES = (
    WeightPass(2304, 3, 6 * 1024, (9.337, 9.331, 9.321)),
    WeightPass(4096, 4, 3 * 1024, (19.927, 19.530, 19.388)),
    WeightPass(5120, 3, 1024, (8.132, 8.101, 8.109)),
    WeightPass(6144, 2, 1024, (7.715, 7.703, 7.698)),
)


def fit() -> list[Fit]:
    """The share of the output of fp16 products that is exposed."""
    profile = load_profile(PROFILE)
    installed, before = installed_value(PROFILE, FIGURE), profile.gemm.exposed_epilogue
    errors = {value: pass_errors(profile, value) for value in {*_TRIED, installed, before}}
    best = min(_TRIED, key=lambda value: (_size(errors[value]), value))
    return [
        Fit(
            FIGURE,
            PROFILE,
            "backward passes for weights of four models (arXiv:2401.10241, table 6)",
            "smallest mean |error| of the passes",
            best,
            "mean |error| of the passes, %",
            _size(errors[before]),
            _size(errors[best]),
            _size(errors[installed]),
            tuple(
                f"width {one.hidden}: {error:+.1f} %, at the figure of bf16 {old:+.1f} %"
                for one, error, old in zip(PASSES, errors[best], errors[before], strict=True)
            ),
        )
    ]


def pass_errors(profile: HardwareProfile, epilogue: float) -> tuple[float, ...]:
    """Percent by which each pass is longer than measured, with a share of the output exposed."""
    figures = replace(profile.gemm.dtypes["fp16"], exposed_epilogue=epilogue)
    changed = replace(profile, gemm=replace(profile.gemm, dtypes={"fp16": figures}))
    cost = ComputeCost(changed)
    return tuple(
        100 * (one.layers * sum(map(cost.duration_ns, one.products)) / (1e6 * mean(one.measured_ms)) - 1)
        for one in PASSES
    )


def _size(errors: tuple[float, ...]) -> float:
    return mean(map(abs, errors))
