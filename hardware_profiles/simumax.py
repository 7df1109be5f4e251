"""Conversion of SimuMax machine files (``simumax_system/*.json`` of MooreThreads/SimuMax) to hardware profiles.

Such a file holds efficiencies measured by shape. They become times again, because a time needs no convention:

=================  =================================================================================================
table              FLOPs that its efficiency is defined on (read from SimuMax's own measuring scripts)
=================  =================================================================================================
``matmul``         ``2 b m n k``; TN forward, NN data gradient, NT weight gradient with ``k`` the tokens
``group_matmul``   ``2 ng M N K`` in all three stages, ``M`` tokens, ``N`` and ``K`` of the forward product
``sdp_fwd``        ``2 b h S^2 (dqk + dv)``: not halved for the causal mask although the kernels are causal, hence
                   efficiencies above 1; halved, the A100 rows at 4096 tokens and 32 heads give 0.57 of peak
``sdp_bwd``        ``5 b h S^2 (dqk + dv)``: not halved either, and five products of the mean head size
=================  =================================================================================================

A collective takes ``scale (n - 1) latency + fixed + scale (n - 1) / n size / (gbps 2^30 efficiency)`` in SimuMax on
machines with eight GPUs a node; ``gbps`` counts in 2^30 bytes, so efficiencies are restated for 10^9.

What is not taken over, and why:

- Anything without a measurement of its own: a table's average, tiers with default efficiencies, ``mem_gbs`` (80 on a
  B200), the dense peak of a dtype without measured shapes. These figures come from the base profile.
- The ``bandwidth`` section: its 30 to 40 us a memory operation stand for host time; kernels in traces take 2 us.
- ``dp_fixed_bw``, bandwidths of each of several groups at once inside one training job: on PCIe they give the rate of
  the bridge between the two halves of the server, elsewhere they are kept as text in ``extra`` only.
- Sends faster than the link they use: a copy inside one GPU was measured.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from .loader import (
    list_profiles,
    load_profile,
    profile_from_mapping,
    profile_to_mapping,
    read_bounded,
)
from .profile import (
    HardwareProfile,
    LinkFigures,
    MeasuredAttention,
    MeasuredCollective,
    MeasuredGemm,
    NetworkFigures,
    ProfileError,
)

GIB_PER_GB = 2**30 / 1e9
"""SimuMax multiplies ``gbps`` by 2^30; profiles count 10^9 bytes."""

SUSTAINED_FROM_US = 1000.0
"""Dense GEMMs at least this long run at the rate the chip sustains under its power limit."""

SUSTAINED_NEEDS = 3
"""GEMMs needed to fit that rate: three random ones reproduce the fit on all within 2 %."""

_COLLECTIVES = {
    "all_reduce": ("all_reduce", 2.0, -1.0),
    "all_gather": ("all_gather", 1.0, -1.0),
    "reduce_scatter": ("reduce_scatter", 1.0, -1.0),
    "all2all": ("all_to_all", 1.0, -1.0),
    "p2p": ("p2p", 1.0, 0.0),
}
"""SimuMax name -> (name in profiles, scale, offset): the traffic both sides mean is ``scale (n + offset) / n``."""

_PCIE_TIERS = {"intra_node_pcie_8x": 8, "intra_node_pcie_4x": 4, "intra_node_pcie_2x": 2}
_NVLINK_TIERS = ("high_intra_node", "low_intra_node")
_STEPS_COUNTED_FOR_NODE = 8
_STAGES = {"fwd": "TN", "bwd_grad_act": "NN", "bwd_grad_w": "NT"}
_ERRORS_SHOWN = 5
_ERROR_TYPES = (KeyError, TypeError, ValueError, AttributeError)

_Measured = TypeVar("_Measured", MeasuredGemm, MeasuredAttention)
_Row = TypeVar("_Row")


def import_simumax(path: str | os.PathLike[str], base: HardwareProfile | None = None) -> HardwareProfile:
    """Convert a SimuMax machine file, with its measured shapes, to a hardware profile.

    Args:
        path: the JSON file.
        base: profile that gives what the file does not hold (tiles, SM count, memory, kernel floor, host). By default
            the installed profile whose name shares most words with the file's ``sys_name``, then the one whose
            bf16 peak is nearest.

    Returns:
        A profile named after ``sys_name``. The sources of figures kept from ``base`` say so.

    Raises:
        ProfileError: if the file is not a SimuMax machine file, or no profile is near enough to be the base.
    """
    path = Path(path)
    document = _read(path)
    system = str(document.get("sys_name") or path.stem)
    try:
        operations = document["accelerator"]["op"]
        networks = document["networks"]
        peak = _positive(operations["matmul"]["tflops"], "accelerator.op.matmul.tflops")
        per_node = _size({"num_per_node": str(document["num_per_node"])}, "num_per_node")
    except _ERROR_TYPES as error:
        raise ProfileError(
            f"{path} is not a SimuMax machine file: {_reason(error)}; accelerator.op.matmul.tflops, networks and "
            "num_per_node were expected"
        ) from error
    base = base or _nearest_preset(system, peak, path)
    tables = _Tables(path)
    gemms = tables.gemms(operations)
    attentions = tables.attentions(operations)
    network = _Networks(networks, per_node, base.network, path, tables.errors)
    tables.raise_errors()
    profile = _assemble(path, system, base, peak, gemms, attentions, network)
    return profile_from_mapping(profile_to_mapping(profile), str(path))


def _read(path: Path) -> Mapping[str, Any]:
    text = read_bounded(path, "SimuMax machine file (JSON)")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is not a SimuMax machine file: it is not valid JSON ({error})") from error
    if not isinstance(document, dict):
        raise ProfileError(f"{path} is not a SimuMax machine file: its top level is not an object")
    return document


def _nearest_preset(system: str, peak: float, path: Path) -> HardwareProfile:
    words = set(re.split(r"[^a-z0-9]+", system.lower()))

    def distance(profile: HardwareProfile) -> tuple[float, float, str]:
        shared = len(words & set(profile.name.split("-")))
        return -shared, abs(math.log(profile.peak_tflops["bf16"] / peak)), profile.name

    presets = [load_profile(name) for name in list_profiles() if name != "toy"]
    best = min(presets, key=distance)
    shared, logarithm, _ = distance(best)
    if shared == 0 and logarithm > math.log(2):
        raise ProfileError(
            f"{path}: no installed profile is near {system!r} ({peak:g} TFLOPS in bf16); give the profile that what "
            f"the file lacks shall come from as base, one of {', '.join(list_profiles())} or a file of your own"
        )
    return best


class _Tables:
    """Reads the tables of measured shapes and collects what is wrong in them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors: list[str] = []

    def gemms(self, operations: Mapping[str, Any]) -> tuple[MeasuredGemm, ...]:
        """Dense and grouped products; equal shapes measured several times are averaged."""
        rows: list[MeasuredGemm] = []
        for table, dtype in (("matmul", "bf16"), ("fp8_matmul", "fp8")):
            rows += self._rows(operations, table, partial(_dense_gemm, dtype=dtype))
        for table, dtype in (("group_matmul", "bf16"), ("fp8_group_matmul", "fp8")):
            rows += self._rows(operations, table, partial(_grouped_gemm, dtype=dtype))
        return _averaged(rows)

    def attentions(self, operations: Mapping[str, Any]) -> tuple[MeasuredAttention, ...]:
        """Attention rows; where contiguous and strided inputs were measured, the contiguous row stays (<= 5 %)."""
        rows: list[MeasuredAttention] = []
        for table, backward in (("sdp_fwd", False), ("sdp_bwd", True)):
            found = self._rows(operations, table, partial(_attention, backward=backward))
            contiguous = {_shape(row) for is_contiguous, row in found if is_contiguous}
            rows += [row for flag, row in found if flag or _shape(row) not in contiguous]
        return _averaged(rows)

    def _rows(
        self, operations: Mapping[str, Any], table: str, convert: Callable[[dict[str, str], float], _Row]
    ) -> list[_Row]:
        section = operations.get(table)
        if section is None:
            return []
        try:
            items = list((section.get("accurate_efficient_factor") or {}).items())
            peak_flop_per_us = _positive(section["tflops"], "tflops") * 1e6
        except _ERROR_TYPES as error:
            self.errors.append(f"{table}: {_reason(error)}")
            return []
        rows = (self._row(table, key, value, peak_flop_per_us, convert) for key, value in items)
        return [row for row in rows if row is not None]

    def _row(
        self,
        table: str,
        key: str,
        efficiency: object,
        peak_flop_per_us: float,
        convert: Callable[[dict[str, str], float], _Row],
    ) -> _Row | None:
        try:
            flop_per_us = _positive(efficiency, "its efficiency") * peak_flop_per_us
            return convert(dict(part.split("=") for part in key.split(", ")), flop_per_us)
        except _ERROR_TYPES as error:
            self.errors.append(f"{table}, {key!r}: {_reason(error)}")
            return None

    def raise_errors(self) -> None:
        """Raise one error for everything found, the first few written out."""
        if self.errors:
            shown = "".join(f"\n  - {error}" for error in self.errors[:_ERRORS_SHOWN])
            more = len(self.errors) - _ERRORS_SHOWN
            rest = f"\n  - and {more} more" if more > 0 else ""
            raise ProfileError(f"{self.path} cannot be converted from SimuMax:{shown}{rest}")


def _dense_gemm(key: dict[str, str], flop_per_us: float, dtype: str) -> MeasuredGemm:
    batch, m, n, k = (_size(key, name) for name in ("b", "m", "n", "k"))
    layout = key["layout"]
    if layout not in _STAGES.values():
        raise ValueError(f"layout {layout!r} is not one of TN, NN, NT")
    # Tokens are rows of the operands of a forward and a data gradient, and are summed over in a weight gradient.
    rows, summed = (m, batch * k) if layout == "NT" else (batch * m, k)
    time = 2.0 * rows * n * summed / flop_per_us
    return MeasuredGemm(rows, n, summed, layout, dtype, key["out_dtype"], _flag(key, "accumulate"), 1, time)


def _grouped_gemm(key: dict[str, str], flop_per_us: float, dtype: str) -> MeasuredGemm:
    experts, tokens, n, k = (_size(key, name) for name in ("ng", "M", "N", "K"))
    if key["stage"] not in _STAGES:
        raise ValueError(f"stage {key['stage']!r} is not one of {', '.join(_STAGES)}")
    layout = _STAGES[key["stage"]]
    sizes = {"TN": (tokens, n, k), "NN": (tokens, k, n), "NT": (n, k, tokens)}[layout]
    # The file names the dtype of the forward output in every stage; a weight gradient goes to the main gradient.
    output = key["main_grad_dtype"] if layout == "NT" else key["out_dtype"]
    time = 2.0 * experts * tokens * n * k / flop_per_us
    return MeasuredGemm(*sizes, layout, dtype, output, _flag(key, "accumulate"), experts, time)


def _attention(key: dict[str, str], flop_per_us: float, backward: bool) -> tuple[bool, MeasuredAttention]:
    batch, length, heads, kv_heads = (
        _size(key, name) for name in ("batch", "seq_len", "head_num", "kv_head_num")
    )
    head_size, value_head_size = _size(key, "qk_head_dim"), _size(key, "v_head_dim")
    products = 5.0 if backward else 2.0
    flops = products * batch * max(heads, kv_heads) * float(length) ** 2 * (head_size + value_head_size)
    row = MeasuredAttention(
        *(batch, length, length, heads, kv_heads, head_size, value_head_size),
        causal=True,
        backward=backward,
        dtype="bf16",
        time_us=flops / flop_per_us,
    )
    return _flag(key, "qkv_contiguous"), row


def _shape(row: _Measured) -> _Measured:
    return replace(row, time_us=0.0)


def _averaged(rows: list[_Measured]) -> tuple[_Measured, ...]:
    times: dict[_Measured, list[float]] = {}
    for row in rows:
        times.setdefault(_shape(row), []).append(row.time_us)
    return tuple(replace(shape, time_us=fmean(found)) for shape, found in times.items())


class _Networks:
    """Tiers and measured collectives of the ``networks`` section.

    On a PCIe machine SimuMax has a tier for groups of two, four and eight GPUs; the one of eight also stands for sizes
    without a line of their own.
    """

    def __init__(
        self, networks: Mapping[str, Any], per_node: int, base: NetworkFigures, path: Path, errors: list[str]
    ) -> None:
        self.collectives: list[MeasuredCollective] = []
        self.extra: dict[str, str] = {}
        self.sources: dict[str, str] = {}
        self.figures = base
        self._origin = f"SimuMax machine file {path.name}"
        self._per_node = per_node
        try:
            self.figures = self._read(networks, base)
        except _ERROR_TYPES as error:
            errors.append(f"networks: {_reason(error)}")

    def _read(self, networks: Mapping[str, Any], base: NetworkFigures) -> NetworkFigures:
        pcie = networks.get("intra_with_pcie") is True
        candidates = list(_PCIE_TIERS) if pcie else list(_NVLINK_TIERS)
        tiers = [name for name in candidates if name in networks]
        if not tiers:
            raise ValueError(f"none of the tiers {', '.join(candidates)} is there")
        domain = self._tier(networks, tiers[0], "domain", base.domain)
        for name in tiers[1:] if pcie else ():
            self._tier(networks, name, "domain", base.domain, group_size=_PCIE_TIERS[name])
        fabric = base.fabric
        if "inter_node" in networks:
            # SimuMax gives the NICs of a whole node and divides among its GPUs.
            fabric = self._tier(networks, "inter_node", "fabric", base.fabric, share=1 / self._per_node)
        if pcie and base.multicast:
            self.sources["network.multicast"] = f"{self._origin}: GPUs are on PCIe"
        self.sources["network.gpus_per_domain"] = f"{self._origin}, num_per_node"
        return replace(
            base,
            gpus_per_domain=self._per_node,
            domain=domain,
            fabric=fabric,
            multicast=base.multicast and not pcie,
            **self._bridge(networks[tiers[0]], base, pcie),
        )

    def _bridge(self, section: Mapping[str, Any], base: NetworkFigures, pcie: bool) -> dict[str, Any]:
        """What groups that cross between the halves of a PCIe server reach together."""
        side = self._per_node // 2
        if not pcie or side == 0:
            return {"gpus_per_bridge_side": 0, "bridge_gb_per_s": 0.0}
        rates = [
            _positive(rate, "dp_fixed_bw") * (self._per_node / int(members)) * GIB_PER_GB
            for entry in section["op"].values()
            for members, rate in (entry.get("dp_fixed_bw") or {}).items()
            # Only groups that are spread over both halves cross.
            if int(members) <= side
        ]
        if not rates:
            kept = base.gpus_per_bridge_side if 2 * base.gpus_per_bridge_side == self._per_node else 0
            return {"gpus_per_bridge_side": kept, "bridge_gb_per_s": base.bridge_gb_per_s if kept else 0.0}
        origin = f"{self._origin}, mean of dp_fixed_bw times the groups that cross at once"
        self.sources["network.bridge_gb_per_s"] = origin
        self.sources["network.gpus_per_bridge_side"] = f"{self._origin}, half of num_per_node"
        return {"gpus_per_bridge_side": side, "bridge_gb_per_s": round(fmean(rates), 2)}

    def _tier(
        self,
        networks: Mapping[str, Any],
        name: str,
        tier: str,
        base: LinkFigures,
        group_size: int = 0,
        share: float = 1.0,
    ) -> LinkFigures:
        section = networks[name]
        bandwidth = _positive(section["bandwidth"]["gbps"], f"{name}.bandwidth.gbps") * share
        measured = self._collectives_of(name, section, tier, group_size)
        self.collectives += measured.values()
        self.sources[f"network.{tier}.bandwidth_gb_per_s"] = (
            f"{self._origin}, networks.{name}.bandwidth.gbps"
            + ("" if share == 1 else ", the NICs of a node divided among its GPUs")
        )
        # A ring: multicast changes what an all-reduce reaches, so the all-gather stands for large collectives.
        ring = measured.get("all_gather") or measured.get("reduce_scatter") or measured.get("all_reduce")
        if ring is None:
            return replace(base, bandwidth_gb_per_s=bandwidth)
        p2p = measured.get("p2p")
        origin = f"{self._origin}, networks.{name}.op, measured {ring.communication.replace('_', '-')}"
        self.sources[f"network.{tier}.efficiency"] = origin
        self.sources[f"network.{tier}.p2p_efficiency"] = (
            f"{self._origin}, networks.{name}.op.p2p" if p2p else "no usable measurement; as the collectives"
        )
        # The latency of a line fitted through messages of gigabytes is not the one of a step of a small message.
        return replace(
            base,
            bandwidth_gb_per_s=bandwidth,
            efficiency=ring.efficiency,
            p2p_efficiency=p2p.efficiency if p2p else 0.0,
        )

    def _collectives_of(
        self, name: str, section: Mapping[str, Any], tier: str, group_size: int
    ) -> dict[str, MeasuredCollective]:
        lines: dict[str, MeasuredCollective] = {}
        for operation, entry in section["op"].items():
            if operation not in _COLLECTIVES:
                raise ValueError(f"{name}.op.{operation} is not one of {', '.join(_COLLECTIVES)}")
            if entry.get("dp_fixed_bw"):
                self.extra[f"simumax.{name}.{operation}.dp_fixed_bw"] = json.dumps(entry["dp_fixed_bw"])
            if entry.get("efficient_factor") is None:
                continue
            communication, scale, offset = _COLLECTIVES[operation]
            if (entry["scale"], entry["offset"]) != (scale, offset):
                raise ValueError(
                    f"{name}.op.{operation} has scale {entry['scale']} and offset {entry['offset']}; only the ring "
                    f"traffic with {scale:g} and {offset:g} can be converted"
                )
            efficiency = _positive(entry["efficient_factor"], f"{name}.op.{operation}.efficient_factor")
            efficiency *= GIB_PER_GB
            if communication == "p2p" and efficiency > 1:
                continue
            latency = float(entry.get("latency_us", section["bandwidth"].get("latency_us", 0.0)))
            fixed = float(entry.get("fixed_latency_us") or 0.0)
            stepwise = self._per_node == _STEPS_COUNTED_FOR_NODE and communication != "p2p"
            line = MeasuredCollective(
                *(communication, tier, efficiency),
                fixed_us=fixed if stepwise else fixed + latency,
                per_step_us=scale * latency if stepwise else 0.0,
                group_size=group_size,
            )
            lines[communication] = line
            for size, by_size in (entry.get("fixed_latency_us_by_comm_num") or {}).items():
                fixed_of_size = float(by_size) + (line.fixed_us - fixed)
                self.collectives.append(replace(line, fixed_us=fixed_of_size, group_size=int(size)))
        return lines


def _assemble(
    path: Path,
    system: str,
    base: HardwareProfile,
    peak: float,
    gemms: tuple[MeasuredGemm, ...],
    attentions: tuple[MeasuredAttention, ...],
    network: _Networks,
) -> HardwareProfile:
    origin = f"SimuMax machine file {path.name}"
    sources = {
        figure: source if source.startswith("carried over") else f"carried over from {base.name}: {source}"
        for figure, source in base.sources.items()
        if not figure.startswith("measured_")
    }
    sources |= network.sources
    sources["peak_tflops.bf16"] = f"{origin}, accelerator.op.matmul.tflops"
    figures = base.gemm
    sustained = _sustained_efficiency(gemms, base, peak)
    if sustained is not None:
        figures = replace(base.gemm, sustained_efficiency=sustained)
        sources["gemm.sustained_efficiency"] = (
            f"{origin}, median of its dense GEMMs of at least {SUSTAINED_FROM_US / 1000:g} ms without the epilogue"
        )
    for table, rows in (
        ("measured_gemms", gemms),
        ("measured_attentions", attentions),
        ("measured_collectives", network.collectives),
    ):
        if rows:
            sources[table] = f"{origin}, converted to times"
    return replace(
        base,
        name=re.sub(r"[^a-z0-9]+", "-", system.lower()).strip("-") or "simumax",
        description=f"{system}, from the {origin} on the basis of {base.name}",
        peak_tflops={**base.peak_tflops, "bf16": peak},
        gemm=figures,
        network=network.figures,
        sources=sources,
        measured_gemms=gemms,
        measured_attentions=attentions,
        measured_collectives=tuple(network.collectives),
        extra={**base.extra, "simumax.sys_name": system, **network.extra},
    )


def _sustained_efficiency(
    gemms: tuple[MeasuredGemm, ...], base: HardwareProfile, peak: float
) -> float | None:
    """Median rate of long dense GEMMs over the peak, after the exposed part of their output traffic is taken off."""
    bytes_per_us = base.memory.bandwidth_gb_per_s * base.memory.stream_efficiency * 1e3
    item_size = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
    rates = []
    for row in gemms:
        if row.count == 1 and row.dtype == "bf16" and row.time_us >= SUSTAINED_FROM_US:
            output = float(row.m) * row.n * item_size.get(row.output, 2) * (2 if row.accumulate else 1)
            epilogue = base.gemm.exposed_epilogue * output / bytes_per_us
            if epilogue < row.time_us:
                rates.append(2.0 * row.m * row.n * row.k / (row.time_us - epilogue) / (peak * 1e6))
    return round(median(rates), 4) if len(rates) >= SUSTAINED_NEEDS else None


def _size(key: Mapping[str, str], name: str) -> int:
    size = int(key[name])
    if size < 1:
        raise ValueError(f"{name}={size} is not a size")
    return size


def _flag(key: Mapping[str, str], name: str) -> bool:
    if key[name] not in ("True", "False"):
        raise ValueError(f"{name}={key[name]} is neither True nor False")
    return key[name] == "True"


def _positive(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{what} is {value!r}, not a number above 0")
    return float(value)


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
