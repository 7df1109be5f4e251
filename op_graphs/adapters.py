"""Low-rank adapters: which linears have them, the shapes of their two matrices on a rank, and what they add to counts.

``linear_in`` (``A``, ``rank`` outputs) and ``linear_out`` (``B``, ``rank`` inputs) are cut over the tensor-parallel
ranks as Megatron Bridge's ``ParallelLinearAdapter`` cuts them (``peft/utils.py``): beside a column-parallel linear both
are cut along their outputs, and what ``linear_in`` makes is gathered; beside a row-parallel one ``linear_in`` is cut
along its inputs, and its partial sums are reduced, and ``linear_out`` along its outputs, which are gathered.

A target is named as Megatron-Core names its module, with one adapter for a fused linear, or as Hugging Face names the
matrices that are fused there (``q_proj``), each with an adapter of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .model import ModelDescription
from .parameters_tensors import ParameterTensor, local_kv_heads
from .plan import LowRankAdapters

TARGETS: dict[str, tuple[str, str]] = {
    "linear_qkv": ("self_attention.linear_qkv", ""),
    "linear_proj": ("self_attention.linear_proj", ""),
    "linear_fc1": ("mlp.linear_fc1", ""),
    "linear_fc2": ("mlp.linear_fc2", ""),
    "q_proj": ("self_attention.linear_qkv", "q"),
    "k_proj": ("self_attention.linear_qkv", "k"),
    "v_proj": ("self_attention.linear_qkv", "v"),
    "o_proj": ("self_attention.linear_proj", ""),
    "gate_proj": ("mlp.linear_fc1", "gate"),
    "up_proj": ("mlp.linear_fc1", "up"),
    "down_proj": ("mlp.linear_fc2", ""),
}
"""Linear of a layer, and the part of its outputs, empty for all of them, by the name of a target."""
_ROW_PARALLEL = ("self_attention.linear_proj", "mlp.linear_fc2")


@dataclass(frozen=True)
class Adapter:
    """An adapter beside (a part of) a linear, as one rank holds it."""

    linear: str
    """Module of the linear inside its layer, ``self_attention.linear_qkv``."""
    part: str
    """Part of its outputs: ``q``, ``k``, ``v``, ``gate``, ``up``, or empty for all."""
    inputs: int
    """Inputs of the linear on this rank."""
    outputs: int
    """Outputs of the part on this rank; of a row-parallel linear all of them."""
    rank: int
    tp: int

    @property
    def is_row_parallel(self) -> bool:
        """Whether the linear is cut along its inputs."""
        return self.linear in _ROW_PARALLEL

    @property
    def low_outputs(self) -> int:
        """Outputs of ``linear_in`` on this rank."""
        return self.rank if self.is_row_parallel else self.rank // self.tp

    @property
    def high_outputs(self) -> int:
        """Outputs of ``linear_out`` on this rank."""
        return self.outputs // self.tp if self.is_row_parallel else self.outputs

    @property
    def module(self) -> str:
        """Module inside the layer, as Megatron Bridge names it."""
        return f"{self.linear}.adapter{'_' if self.part else ''}{self.part}"

    @property
    def elements(self) -> int:
        """Elements of both matrices on this rank."""
        return self.low_outputs * self.inputs + self.high_outputs * self.rank

    def tensors(self, layer_path: str, layer: int) -> list[ParameterTensor]:
        """Its two matrices in a layer, in forward order."""
        path = f"{layer_path}.{self.module}"
        axis = 1 if self.is_row_parallel else 0
        shapes = (self.low_outputs, self.inputs), (self.high_outputs, self.rank)
        return [
            ParameterTensor(f"{path}.linear_in.weight", shapes[0], "weight", layer, tp_axis=axis),
            ParameterTensor(f"{path}.linear_out.weight", shapes[1], "weight", layer, tp_axis=0),
        ]


def layer_adapters(
    model: ModelDescription, lora: LowRankAdapters, tp: int, layer: int
) -> tuple[Adapter, ...]:
    """The adapters of a dense layer with one projection to queries, keys and values, in the order of use."""
    hidden, head = model.hidden_size, model.head_size
    query, key = model.query_size // tp, local_kv_heads(model, tp) * head
    ffn = model.layer_ffn_size(layer) // tp
    first = 2 * ffn if model.gated else ffn
    sizes = {
        ("self_attention.linear_qkv", ""): (hidden, query + 2 * key),
        ("self_attention.linear_qkv", "q"): (hidden, query),
        ("self_attention.linear_qkv", "k"): (hidden, key),
        ("self_attention.linear_qkv", "v"): (hidden, key),
        ("self_attention.linear_proj", ""): (model.attention_output_size // tp, hidden),
        ("mlp.linear_fc1", ""): (hidden, first),
        ("mlp.linear_fc1", "gate"): (hidden, ffn),
        ("mlp.linear_fc1", "up"): (hidden, ffn),
        ("mlp.linear_fc2", ""): (ffn, hidden),
    }
    wanted = {TARGETS[target] for target in lora.targets}
    return tuple(
        Adapter(linear, part, *sizes[linear, part], lora.rank, tp)
        for linear, part in sizes
        if (linear, part) in wanted
    )


def linear_adapters(
    model: ModelDescription, lora: LowRankAdapters, tp: int, layer: int, module: str
) -> tuple[Adapter, ...]:
    """The adapters beside the linear whose module path ends as ``module`` does; none outside of layers."""
    if layer < 0:
        return ()
    found = layer_adapters(model, lora, tp, layer)
    return tuple(adapter for adapter in found if module.endswith(f".{adapter.linear}"))


def with_adapters(
    tensors: Iterable[ParameterTensor], model: ModelDescription, lora: LowRankAdapters | None, tp: int
) -> list[ParameterTensor]:
    """The tensors of a rank, frozen, each target followed by its adapters; as they are without ``lora``."""
    if lora is None:
        return list(tensors)
    found: list[ParameterTensor] = []
    for tensor in tensors:
        found.append(replace(tensor, frozen=True))
        if tensor.role == "weight" and tensor.layer >= 0:
            module = tensor.name.removesuffix(".weight")
            for adapter in linear_adapters(model, lora, tp, tensor.layer, module):
                layer_path = module.removesuffix(f".{adapter.linear}")
                found += adapter.tensors(layer_path, tensor.layer)
    return found


def trained(tensors: Sequence[ParameterTensor]) -> list[ParameterTensor]:
    """Those of the tensors that are not frozen."""
    return [tensor for tensor in tensors if not tensor.frozen]


def count_adapter_parameters(model: ModelDescription, lora: LowRankAdapters) -> int:
    """Parameters of all adapters: ``rank * (inputs + outputs)`` for each, over the layers."""
    return sum(
        adapter.elements for layer in range(model.layers) for adapter in layer_adapters(model, lora, 1, layer)
    )


def smallest_target(model: ModelDescription, lora: LowRankAdapters) -> tuple[str, int]:
    """The target with the smallest side, and that side: a rank from there on saves nothing."""
    wanted = {TARGETS[target]: target for target in lora.targets}
    sides = [
        (min(adapter.inputs, adapter.outputs), wanted[adapter.linear, adapter.part])
        for layer in range(model.layers)
        for adapter in layer_adapters(model, lora, 1, layer)
    ]
    side, target = min(sides, key=lambda found: found[0])
    return target, side
