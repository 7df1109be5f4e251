"""What a model is: the dimensions that decide its operators, parameters and activations.

A :class:`ModelDescription` is one stack of transformer layers with what lies before and behind it. The parts that not
every model has are values of their own, ``None`` where a model lacks them: :class:`MixtureOfExperts`,
:class:`LatentAttention`, :class:`PatchInput` (the stack reads image patches) and :class:`VisionEncoder` (a second stack
whose output joins the tokens). What differs from layer to layer is answered by :meth:`ModelDescription.layer_kind`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Activation = Literal["swiglu", "clamped_swiglu", "geglu", "gelu", "squared_relu"]
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rotary", "learned", "none"]
WindowKind = Literal["sliding", "chunked"]
RouterScore = Literal["softmax", "sigmoid"]
DropPolicy = Literal["probs", "position"]
MixerName = Literal["attention", "state_space", "delta_net"]
MIXER_LETTERS: dict[str, MixerName] = {"*": "attention", "M": "state_space", "G": "delta_net"}
"""Letters of patterns for what mixes tokens (``op_graphs.mixers``)."""
MLP_LETTER, EXPERTS_LETTER = "-", "E"


class ModelError(ValueError):
    """A model description is wrong or cannot be read; the message lists every problem found, one a line."""


@dataclass(frozen=True)
class MixtureOfExperts:
    """MLPs of which a router chooses ``top_k`` for every token, in place of the one MLP of a dense layer.

    Experts have the model's activation; layers without experts have the model's ``ffn_size``.
    """

    experts: int
    """Routed experts of a layer, on all ranks together."""
    top_k: int
    expert_ffn_size: int
    """Width of one routed expert, after the activation."""
    shared_ffn_size: int = 0
    """Width of all shared experts together, which see every token; 0 means there are none."""
    shared_gate: bool = False
    """Whether a sigmoid gate (a linear of one output) scales the shared experts' output (Qwen2-MoE)."""
    first_dense_layers: int = 0
    """Layers before the first with experts (DeepSeek's ``first_k_dense_replace``)."""
    layer_frequency: int = 1
    """From there on, layers whose number leaves ``layer_offset`` when divided by this have experts."""
    layer_offset: int = 0
    router_score: RouterScore = "softmax"
    router_fp32: bool = False
    """Whether the router's product runs in fp32; its weight has the model's dtype all the same."""
    router_linear_bias: bool = False
    """Whether the router's linear has a bias (gpt-oss)."""
    router_bias: bool = False
    """Whether a correction, updated without gradient, is added to the scores before the choice (auxiliary-loss-free
    balancing, DeepSeek-V3): an fp32 buffer of one number an expert, not a parameter."""
    normalize_top_k: bool = True
    """Whether the scores of the chosen experts are divided by their sum (softmax after the choice counts as that)."""
    aux_loss: bool = False
    """Whether a load-balancing loss is computed from the scores."""
    capacity_factor: float | None = None
    """Tokens an expert takes, relative to its balanced share; more are dropped. None is dropless."""
    pad_to_capacity: bool = True
    """Whether every expert gets as many tokens as its capacity, missing ones as padding; matters with a capacity only
    (Megatron-LM ``--moe-pad-expert-input-to-capacity``)."""
    drop_policy: DropPolicy = "probs"
    """Which tokens beyond the capacity are dropped: those with the lowest scores, or the last (``position``)."""
    routing_groups: int = 1
    """Groups of experts for node-limited routing; 1 means every token may go to any expert."""
    top_groups: int = 1
    """Groups the experts of one token may come from."""
    expert_bias: bool = False
    """Whether the two linears of an expert have biases (gpt-oss)."""
    latent_size: int = 0
    """Width that tokens are projected to in front of their experts, and from behind them; 0: experts read the hidden
    state (LatentMoE, Nemotron 3)."""
    scores_on_input: bool = False
    """Whether scores scale an expert's input, not its output (Llama 4)."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434): low-rank queries, keys and values.

    The model's ``head_size`` is that of queries and keys, ``qk_nope_head_size + qk_rope_head_size``, and its
    ``kv_heads`` equal its heads. The rotary part of the key is one head, shared by all.
    """

    kv_lora_rank: int
    qk_nope_head_size: int
    qk_rope_head_size: int
    v_head_size: int
    q_lora_rank: int = 0
    """0 means queries are projected from the hidden state directly."""

    @property
    def qk_head_size(self) -> int:
        """Elements of one head of queries and keys."""
        return self.qk_nope_head_size + self.qk_rope_head_size


@dataclass(frozen=True)
class StateSpace:
    """Mamba-2 layers (state-space duality; Dao and Gu 2024, arXiv:2405.21060), as Megatron-Core's ``MambaMixer``."""

    heads: int
    head_size: int = 64
    state_size: int = 128
    groups: int = 8
    """Groups of heads that share the projections into and out of the state (B and C)."""
    conv_width: int = 4
    """Tokens that the causal convolution in front of the scan sees."""
    chunk_size: int = 128
    """Tokens that the scan multiplies as one matrix."""

    @property
    def inner_size(self) -> int:
        """Elements of all heads of a token."""
        return self.heads * self.head_size

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: the heads, B and C."""
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def projection_size(self) -> int:
        """Outputs of the projection in front: gate, channels of the convolution, and a step size for each head."""
        return self.inner_size + self.conv_channels + self.heads


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated DeltaNet layers (Yang et al. 2024, arXiv:2412.06464), as Megatron-Core's ``GatedDeltaNet``."""

    key_heads: int
    value_heads: int
    key_head_size: int = 128
    value_head_size: int = 128
    conv_width: int = 4

    @property
    def value_size(self) -> int:
        """Elements of the values of a token, and of its gate."""
        return self.value_heads * self.value_head_size

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_head_size + self.value_size

    @property
    def projection_size(self) -> int:
        """Outputs of the projection in front: channels, gate, and step size and decay of each value head."""
        return self.conv_channels + self.value_size + 2 * self.value_heads


@dataclass(frozen=True)
class LayerOverride:
    """What is different in the layers ``first`` to ``last`` (both included); None leaves what the model says."""

    first: int
    last: int
    ffn_size: int | None = None
    window: int | None = None
    """Attention window in tokens; 0 is full attention."""
    moe: bool | None = None


@dataclass(frozen=True)
class PatchInput:
    """Image patches in place of token ids: a linear on each patch, learned positions, perhaps a class token."""

    image_size: int
    """Pixels of a side."""
    patch_size: int
    channels: int = 3
    temporal_patch: int = 1
    """Frames a patch spans (Qwen2.5-VL: 2, an image is doubled)."""
    bias: bool = True
    class_token: bool = False
    position_rows: int = 0
    """Rows of the learned position table; 0 means none."""
    pre_norm: bool = False
    """Whether a norm comes between the embedding and the first layer (CLIP)."""

    @property
    def patch_elements(self) -> int:
        """Inputs of the patch embedding: pixels of a patch, in all channels and frames."""
        return self.channels * self.temporal_patch * self.patch_size**2

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens(self) -> int:
        """Length of the sequence an image gives: its patches and the class token."""
        return self.patches + self.class_token


@dataclass(frozen=True)
class VisionEncoder:
    """The encoder of a vision-language model and the projector that brings its output to the model's width.

    ``merge_size**2`` neighbouring patches are joined to one token; the projector is a chain of linears, GELU between
    them, of ``projector_sizes`` outputs each and at last the model's hidden size.
    """

    encoder: ModelDescription
    merge_size: int = 1
    projector_sizes: tuple[int, ...] = ()
    projector_bias: bool = False

    @property
    def merged_size(self) -> int:
        """Inputs of the projector."""
        return self.encoder.hidden_size * self.merge_size**2

    @property
    def tokens_per_image(self) -> int:
        """Tokens of an image in the language model's sequence."""
        return self.encoder.patches.patches // self.merge_size**2 if self.encoder.patches else 0

    def projector_shapes(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of each linear of the projector, for a language model of ``hidden_size``."""
        widths = (self.merged_size, *self.projector_sizes, hidden_size)
        return tuple((outputs, inputs) for inputs, outputs in pairwise(widths))


@dataclass(frozen=True)
class LayerKind:
    """What distinguishes a layer from others of its model: layers of one kind have the same operators."""

    moe: bool
    ffn_size: int
    """Width of the dense MLP; 0 in a layer with experts."""
    window: int
    """Attention window in tokens; 0 is full attention."""
    rotary: bool
    mixer: MixerName | None = "attention"
    """What mixes tokens; None in a layer that is an MLP or experts and no more."""


@dataclass(frozen=True)
class ModelDescription:
    """A transformer: a decoder over tokens, or, with ``patches``, an encoder over image patches.

    Sizes are in elements. ``ffn_size`` is the width after the activation: a SwiGLU layer has a first linear of
    ``2 * ffn_size`` outputs.
    """

    name: str
    layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    """Size of the tokenizer's vocabulary, before padding; classes of an image classifier, 0 without output head."""
    max_positions: int = 0
    """Rows of the learned position table; 0 means the sequence length of the scenario."""
    activation: Activation = "swiglu"
    norm: Norm = "rmsnorm"
    positions: Positions = "rotary"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    """Biases of the dense MLP; experts have ``moe.expert_bias``."""
    qk_norm: bool = False
    """Norm over the head size on queries and keys (Qwen 3)."""
    tied_embeddings: bool = False
    vocab_padding_multiple: int = 128
    """Megatron's ``--make-vocab-size-divisible-by``; the vocabulary is padded to a multiple of this times tp."""
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    causal: bool = True
    """Whether a token sees only those before it."""
    window: int = 0
    """Tokens a token attends to (itself included) in the layers that ``window_pattern`` marks; 0 is full attention."""
    window_kind: WindowKind = "sliding"
    """``chunked``: the sequence is cut into chunks of ``window`` tokens, and no token sees another chunk (Llama 4)."""
    window_pattern: str = "w"
    """A letter a layer, repeated over the layers: ``w`` has the window, ``f`` is full (gpt-oss: ``wf``)."""
    rotary_on_full_attention: bool = True
    """False: layers without window have no rotary positions and no norm of queries and keys (Llama 4)."""
    attention_sinks: bool = False
    """Whether each head has a learned logit beside the scores (gpt-oss)."""
    attention_output_gate: bool = False
    """Whether the output of attention is multiplied by the sigmoid of a gate, which the projection of queries, keys and
    values makes beside them (Qwen3-Next)."""
    qk_norm_weight: bool = True
    """Whether the norm of queries and keys has a weight (Llama 4: no)."""
    head_bias: bool = False
    """Whether the output head has a bias (image classifiers)."""
    moe: MixtureOfExperts | None = None
    latent_attention: LatentAttention | None = None
    mtp_layers: int = 0
    """Multi-token prediction heads behind the last layer (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
    layer_pattern: str = ""
    """What each layer is, a letter a layer: one part and no more. ``M`` state space, ``G`` Gated DeltaNet, ``*``
    attention, ``-`` MLP, ``E`` experts (Megatron-LM ``--hybrid-layer-pattern``). Empty: every layer has a mixer and an
    MLP or experts."""
    mixer_pattern: str = "*"
    """Of layers that have both: a letter a layer for the mixer, repeated over the layers."""
    mtp_pattern: str = ""
    """Layers of one prediction head, as ``layer_pattern``; empty: one layer like the last."""
    mtp_repeated: bool = False
    """Whether all prediction heads are one, applied again and again (Megatron-LM ``--mtp-use-repeated-layer``)."""
    state_space: StateSpace | None = None
    delta_net: GatedDeltaNet | None = None
    layer_overrides: tuple[LayerOverride, ...] = ()
    patches: PatchInput | None = None
    vision: VisionEncoder | None = None
    source: str = field(default="", compare=False)
    """Where the figures come from: a paper, a published configuration or a file."""

    @property
    def gated(self) -> bool:
        """Whether the first linear of the MLP has a gate beside it."""
        return self.activation in ("swiglu", "clamped_swiglu", "geglu")

    @property
    def query_size(self) -> int:
        """Outputs of the query projection."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.kv_heads * self.head_size

    @property
    def value_head_size(self) -> int:
        """Elements of one head of values."""
        return self.latent_attention.v_head_size if self.latent_attention else self.head_size

    @property
    def attention_output_size(self) -> int:
        """Inputs of the projection behind attention."""
        return self.heads * self.value_head_size

    @property
    def has_head(self) -> bool:
        """Whether there is an output head (over a vocabulary or classes) at all."""
        return self.vocab_size > 0

    @property
    def prediction_layers(self) -> int:
        """Layers of one prediction head."""
        return max(1, len(self.mtp_pattern))

    @property
    def layer_numbers(self) -> range:
        """Numbers of all layers, and behind them of those of one prediction head, where there is any."""
        return range(self.layers + (self.prediction_layers if self.mtp_layers else 0))

    @property
    def distinct_prediction_heads(self) -> int:
        """Prediction heads with parameters of their own."""
        return min(self.mtp_layers, 1) if self.mtp_repeated else self.mtp_layers

    def letter(self, layer: int) -> str:
        """The letter of a layer that is one part and no more, by its global number; '' where layers have two."""
        if layer >= self.layers and self.mtp_pattern:
            return self.mtp_pattern[(layer - self.layers) % len(self.mtp_pattern)]
        return self.layer_pattern[min(layer, self.layers - 1)] if self.layer_pattern else ""

    def mixer(self, layer: int) -> MixerName | None:
        """What mixes the tokens of a layer, by its global number; None where nothing does."""
        pattern = self.mixer_pattern
        letter = self.letter(layer) or pattern[min(layer, self.layers - 1) % len(pattern)]
        return MIXER_LETTERS.get(letter)

    def has_feed_forward(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        return self.letter(layer) in ("", MLP_LETTER, EXPERTS_LETTER)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer, by its global number, has experts; a prediction head (``layers`` and up) is as the last."""
        if self.moe is None:
            return False
        if letter := self.letter(layer):
            return letter == EXPERTS_LETTER
        layer = min(layer, self.layers - 1)
        forced = self._override(layer, "moe")
        if forced is not None:
            return bool(forced)
        moe = self.moe
        return layer >= moe.first_dense_layers and layer % moe.layer_frequency == moe.layer_offset

    def attention_window(self, layer: int) -> int:
        """Tokens of the attention window of a layer, by its global number; 0 is full attention."""
        layer = min(layer, self.layers - 1)
        forced = self._override(layer, "window")
        if forced is not None:
            return forced
        return self.window if self.window_pattern[layer % len(self.window_pattern)] == "w" else 0

    def layer_ffn_size(self, layer: int) -> int:
        """Width of the dense MLP of a layer; 0 where it has experts, or no MLP at all."""
        if self.is_moe_layer(layer) or not self.has_feed_forward(layer):
            return 0
        forced = self._override(min(layer, self.layers - 1), "ffn_size")
        return self.ffn_size if forced is None else forced

    def is_rotary_layer(self, layer: int) -> bool:
        """Whether queries and keys of a layer get rotary positions."""
        return self.positions == "rotary" and (
            self.rotary_on_full_attention or self.attention_window(layer) > 0
        )

    def has_qk_norm(self, layer: int) -> bool:
        """Whether queries and keys of a layer are normalised."""
        return self.qk_norm and (self.rotary_on_full_attention or self.attention_window(layer) > 0)

    def layer_kind(self, layer: int) -> LayerKind:
        """The kind of a layer, by its global number; prediction heads have that of the last layer."""
        return LayerKind(
            self.is_moe_layer(layer),
            self.layer_ffn_size(layer),
            self.attention_window(layer),
            self.is_rotary_layer(layer),
            self.mixer(layer),
        )

    def padded_vocab(self, tp: int = 1) -> int:
        """Vocabulary rows as allocated: padded to ``vocab_padding_multiple * tp``.

        Source: Megatron-LM ``training/vocab_utils.py``, ``calculate_padded_vocab_size``.
        """
        multiple = self.vocab_padding_multiple * tp
        return -(-self.vocab_size // multiple) * multiple

    def _override(self, layer: int, name: Literal["ffn_size", "window", "moe"]) -> int | bool | None:
        for override in reversed(self.layer_overrides):
            value: int | bool | None = getattr(override, name)
            if value is not None and override.first <= layer <= override.last:
                return value
        return None
