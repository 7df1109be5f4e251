"""Builds the parameter tensors of one rank, part by part: the names, shapes and sharding of Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .mixers import MIXERS
from .model import MixtureOfExperts, ModelError, PatchInput
from .parameters_tensors import ParameterTensor, Role, TensorCuts


@dataclass(frozen=True)
class Shards(TensorCuts):
    """Builds the tensors of one rank. Degrees must fit the model; see :mod:`op_graphs.parameters_checks`."""

    vocab_rows: int
    ep: int = 1
    etp: int = 1

    def embedding(self, seq_len: int) -> list[ParameterTensor]:
        """What turns tokens, or image patches, into the input of the first layer.

        Raises:
            ModelError: if the model has learned positions and neither it nor ``seq_len`` says how many.
        """
        model = self.model
        if model.patches is not None:
            return self._patch_embedding(model.patches)
        tensors = [self.vocabulary("embedding.word_embeddings.weight", "embedding")]
        if model.positions == "learned":
            rows = model.max_positions or seq_len
            if rows < 1:
                raise ModelError(
                    f"model {model.name} has learned positions: give max_positions, or the sequence length"
                )
            shape = (rows, model.hidden_size)
            tensors.append(ParameterTensor("embedding.position_embeddings.weight", shape, "positions"))
        return tensors

    def layer(self, layer: int, prefix: str = "") -> list[ParameterTensor]:
        """One layer, its mixer before its MLP; ``prefix`` is its module path, ``decoder.layers.N`` by default."""
        model, tensors = self.model, list[ParameterTensor]()
        prefix = prefix or f"decoder.layers.{layer}"
        name = model.mixer(layer)
        if name is not None:
            mixer = MIXERS[name]
            tensors += self.norm(f"{prefix}.{mixer.norm}", layer)
            tensors += mixer.parameters(self, f"{prefix}.{mixer.module}", layer)
        if not model.has_feed_forward(layer):
            return tensors
        tensors += self.norm(f"{prefix}.pre_mlp_layernorm", layer)
        if model.moe is not None and model.is_moe_layer(layer):
            return tensors + self._experts(f"{prefix}.mlp", layer, model.moe)
        ffn = model.layer_ffn_size(layer) // self.tp
        return tensors + self._mlp(f"{prefix}.mlp", layer, ffn, model.mlp_bias)

    def head(self, tied_to_embedding: bool) -> list[ParameterTensor]:
        """The output head; no matrix of its own where ``tied_to_embedding`` (an embedding on the same rank)."""
        tensors: list[ParameterTensor] = []
        if not self.model.has_head:
            return tensors
        if not tied_to_embedding:
            tensors.append(self.vocabulary("output_layer.weight", "head"))
        if self.model.head_bias:
            tensors.append(ParameterTensor("output_layer.bias", (self.vocab_rows,), "bias", tp_axis=0))
        return tensors

    def prediction_head(self, index: int) -> list[ParameterTensor]:
        """One multi-token prediction head (DeepSeek-V3), without the embedding and output head it shares."""
        prefix, layer, hidden = f"mtp.layers.{index}", self.model.layers + index, self.model.hidden_size
        tensors = self.norm(f"{prefix}.enorm", layer) + self.norm(f"{prefix}.hnorm", layer)
        tensors += self.column(f"{prefix}.eh_proj", layer, hidden // self.tp, 2 * hidden, bias=False)
        if self.model.mtp_pattern:
            inner = len(self.model.mtp_pattern)
            for at in range(inner):
                path = f"{prefix}.transformer_layer.layers.{at}"
                found = self.layer(self.model.layers + index * inner + at, path)
                tensors += [replace(tensor, layer=layer) for tensor in found]
        else:
            tensors += self.layer(layer, f"{prefix}.transformer_layer")
        return tensors + self.norm(f"{prefix}.final_layernorm", layer)

    def vocabulary(self, name: str, role: Role, tied: bool = False) -> ParameterTensor:
        """A vocabulary matrix: the embedding, the output head, or a copy of one of them."""
        shape = (self.vocab_rows, self.model.hidden_size)
        return ParameterTensor(name, shape, role, tp_axis=0, tied=tied or self.model.tied_embeddings)

    def _patch_embedding(self, patches: PatchInput) -> list[ParameterTensor]:
        hidden = self.model.hidden_size
        shape = (hidden, patches.patch_elements)
        tensors = [ParameterTensor("embedding.patch_embedding.weight", shape, "weight")]
        if patches.bias:
            tensors.append(ParameterTensor("embedding.patch_embedding.bias", (hidden,), "bias"))
        if patches.class_token:
            tensors.append(ParameterTensor("embedding.class_token", (1, hidden), "positions"))
        if patches.position_rows:
            shape = (patches.position_rows, hidden)
            tensors.append(ParameterTensor("embedding.position_embeddings.weight", shape, "positions"))
        return tensors + (self.norm("embedding.pre_layernorm", -1) if patches.pre_norm else [])

    def _experts(self, path: str, layer: int, moe: MixtureOfExperts) -> list[ParameterTensor]:
        hidden, ffn = self.model.hidden_size, moe.expert_ffn_size // self.etp
        tensors = [self.replicated(f"{path}.router.weight", (moe.experts, hidden), layer)]
        if moe.router_linear_bias:
            tensors.append(self.replicated(f"{path}.router.bias", (moe.experts,), layer, "bias"))
        outer = moe.latent_size or hidden
        if moe.latent_size:
            shape = (moe.latent_size, hidden)
            tensors.append(self.replicated(f"{path}.fc1_latent_proj.weight", shape, layer))
        linears = (
            ("linear_fc1", (2 * ffn if self.model.gated else ffn, outer), 0),
            ("linear_fc2", (outer, ffn), 1),
        )
        for name, shape, axis in linears:
            for part in ("weight", "bias") if moe.expert_bias else ("weight",):
                is_weight = part == "weight"
                tensors += [
                    ParameterTensor(
                        f"{path}.experts.{name}.{part}{expert}",
                        shape if is_weight else shape[:1],
                        "weight" if is_weight else "bias",
                        layer,
                        tp_axis=axis if is_weight or axis == 0 else None,
                        is_expert=True,
                    )
                    for expert in range(moe.experts // self.ep)
                ]
        if moe.latent_size:
            shape = (hidden, moe.latent_size)
            tensors.append(self.replicated(f"{path}.fc2_latent_proj.weight", shape, layer))
        if moe.shared_ffn_size:
            shared = f"{path}.shared_experts"
            tensors += self._mlp(shared, layer, moe.shared_ffn_size // self.tp, bias=False)
            if moe.shared_gate:
                tensors.append(self.replicated(f"{shared}.gate_weight", (1, hidden), layer))
        return tensors

    def _mlp(self, path: str, layer: int, ffn: int, bias: bool) -> list[ParameterTensor]:
        hidden, outputs = self.model.hidden_size, 2 * ffn if self.model.gated else ffn
        tensors = self.column(f"{path}.linear_fc1", layer, outputs, hidden, bias)
        return tensors + self.row(f"{path}.linear_fc2", layer, hidden, ffn, bias)
