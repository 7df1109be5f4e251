"""What the values of a model description must satisfy together: one function for each part of a model.

Each problem reads ``key: value, rule, nearest choice``, as those of single values in :mod:`op_graphs.model_checks`.
"""

from __future__ import annotations

from collections.abc import Iterator

from .model import MixtureOfExperts, ModelDescription


def inconsistencies(model: ModelDescription) -> list[str]:
    """Everything that does not fit together in a model whose values are sound one by one."""
    patterns = list(_patterns(model))
    if patterns:
        return patterns
    checks = (
        _heads,
        _vocabulary,
        _latent_attention,
        _state_space,
        _delta_net,
        _experts,
        _windows,
        _overrides,
        _patches,
        _vision,
    )
    return [problem for check in checks for problem in check(model)]


def _heads(model: ModelDescription) -> Iterator[str]:
    heads, kv_heads = model.heads, model.kv_heads
    if heads % kv_heads:
        near = max(d for d in range(1, min(kv_heads, heads) + 1) if heads % d == 0)
        yield f"kv_heads: {kv_heads} does not divide heads {heads}; the nearest that does is {near}"
    if model.positions == "rotary" and model.latent_attention is None and model.head_size % 2:
        yield f"head_size: rotary positions turn pairs of elements, {model.head_size} is odd"


def _patterns(model: ModelDescription) -> Iterator[str]:
    """What a pattern of layers asks for and the rest of the model does not have."""
    pattern, heads = model.layer_pattern, model.mtp_pattern
    if pattern and len(pattern) != model.layers:
        yield f"layer_pattern: names {len(pattern)} layers, the model has {model.layers}; give a letter for each"
    if pattern and model.mixer_pattern != "*":
        yield f"mixer_pattern: {model.mixer_pattern}, but layer_pattern says what each layer is; leave one of them out"
    if pattern and model.layer_overrides:
        yield "layer_overrides: layer_pattern says what each layer is; leave out one of them"
    if heads and not model.mtp_layers:
        yield f"mtp_pattern: {heads}, but the model has no prediction heads; give mtp_layers"
    if heads and not pattern:
        yield f"mtp_pattern: {heads}, but layers are not given by layer_pattern; leave it out"
    if pattern and model.mtp_layers and not heads:
        yield f"mtp_layers: {model.mtp_layers} heads of layers that are not given; give mtp_pattern, as *E"
    if model.mtp_repeated and model.mtp_layers < 2:
        yield f"mtp_repeated: true, but there are {model.mtp_layers} prediction heads; leave it out, or give 2"
    letters = set(pattern or model.mixer_pattern) | set(heads)
    mixers = (("M", "state_space", model.state_space), ("G", "delta_net", model.delta_net))
    for letter, field, part in (*mixers, ("E", "moe", model.moe)):
        if letter in letters and part is None:
            yield f"{field}: is missing; a pattern has layers of it ({letter})"
    for letter, field, part in mixers:
        if part is not None and letter not in letters:
            yield f"{field}: no layer is of it; give layer_pattern or mixer_pattern with {letter}"
    if pattern and model.moe is not None and "E" not in letters:
        yield "moe: layer_pattern has no layer with experts; write E for each, or leave moe out"


def _state_space(model: ModelDescription) -> Iterator[str]:
    space = model.state_space
    if space is None:
        return
    if space.heads % space.groups:
        near = max(d for d in range(1, min(space.groups, space.heads) + 1) if space.heads % d == 0)
        yield f"state_space.groups: {space.groups} does not divide the {space.heads} heads; nearest: {near}"
    if not model.causal or model.patches is not None:
        yield "state_space: its scan goes one way; set causal: true"


def _delta_net(model: ModelDescription) -> Iterator[str]:
    net = model.delta_net
    if net is None:
        return
    if net.value_heads % net.key_heads:
        near = max(d for d in range(1, min(net.key_heads, net.value_heads) + 1) if net.value_heads % d == 0)
        yield f"delta_net.key_heads: {net.key_heads} does not divide the {net.value_heads} value heads; nearest: {near}"
    if not model.causal or model.patches is not None:
        yield "delta_net: its rule goes one way; set causal: true"


def _vocabulary(model: ModelDescription) -> Iterator[str]:
    if model.patches is None and model.vocab_size < 1:
        yield "vocab_size: must be at least 1; only an encoder of image patches has no vocabulary"
    if model.tied_embeddings and model.patches is not None:
        yield "tied_embeddings: a model of image patches has no embedding that its head could share"
    if model.mtp_layers and (model.patches is not None or not model.causal):
        yield f"mtp_layers: {model.mtp_layers}, but only a causal language model predicts further tokens"


def _latent_attention(model: ModelDescription) -> Iterator[str]:
    latent = model.latent_attention
    if latent is None:
        return
    if model.kv_heads != model.heads:
        yield f"kv_heads: {model.kv_heads}, but latent attention has as many as heads, {model.heads}"
    if model.head_size != latent.qk_head_size:
        yield (
            f"head_size: {model.head_size}, but latent attention's is qk_nope_head_size + qk_rope_head_size = "
            f"{latent.qk_nope_head_size} + {latent.qk_rope_head_size} = {latent.qk_head_size}"
        )
    if latent.qk_rope_head_size % 2:
        yield (
            "latent_attention.qk_rope_head_size: rotary positions turn pairs of elements, "
            f"{latent.qk_rope_head_size} is odd"
        )
    if model.attention_output_gate:
        yield "attention_output_gate: latent attention has no gate here; leave it false"
    if model.qk_norm:
        yield "qk_norm: latent attention normalises the compressed queries and keys, not the heads; leave it false"


def _experts(model: ModelDescription) -> Iterator[str]:
    moe = model.moe
    if moe is None:
        return
    if moe.top_k > moe.experts:
        yield f"moe.top_k: {moe.top_k} is more than the {moe.experts} experts"
    if moe.layer_offset >= moe.layer_frequency:
        yield (
            f"moe.layer_offset: {moe.layer_offset} must be below layer_frequency {moe.layer_frequency}; "
            f"nearest: {moe.layer_frequency - 1}"
        )
    if moe.first_dense_layers > model.layers:
        yield f"moe.first_dense_layers: {moe.first_dense_layers} is more than the {model.layers} layers"
    if moe.shared_gate and not moe.shared_ffn_size:
        yield "moe.shared_gate: there are no shared experts to scale; give shared_ffn_size"
    if moe.capacity_factor is None and not moe.pad_to_capacity:
        yield "moe.pad_to_capacity: false says what follows from a capacity; give capacity_factor, or leave it out"
    if moe.capacity_factor is None and moe.drop_policy != "probs":
        yield f"moe.drop_policy: {moe.drop_policy}, but no token is dropped; give capacity_factor, or leave it out"
    yield from _routing_groups(moe)


def _routing_groups(moe: MixtureOfExperts) -> Iterator[str]:
    groups = moe.routing_groups
    if moe.experts % groups:
        near = max(divisor for divisor in range(1, groups) if moe.experts % divisor == 0)
        yield f"moe.routing_groups: {groups} does not divide the {moe.experts} experts; nearest: {near}"
    elif moe.top_groups > groups:
        yield f"moe.top_groups: {moe.top_groups} is more than routing_groups {groups}"
    elif moe.top_k > moe.top_groups * (moe.experts // groups):
        fitting = -(-moe.top_k // (moe.experts // groups))
        yield (
            f"moe.top_groups: {moe.top_groups} of {groups} groups hold fewer experts than top_k {moe.top_k}; "
            f"nearest: {fitting}"
        )


def _windows(model: ModelDescription) -> Iterator[str]:
    windowed = model.window or any(override.window for override in model.layer_overrides)
    if "f" in model.window_pattern and not model.window:
        yield f"window_pattern: {model.window_pattern}, but window is 0, so every layer is full"
    if not model.rotary_on_full_attention and not windowed:
        yield "rotary_on_full_attention: false, but no layer has a window; for no positions at all set positions: none"
    if model.latent_attention is not None and windowed:
        yield "window: latent attention with a window is not described here; leave window 0"


def _overrides(model: ModelDescription) -> Iterator[str]:
    for override in model.layer_overrides:
        where = f"{override.first}-{override.last}"
        if override.first > override.last:
            yield f"layer_overrides: {where} ends before it begins"
        elif override.last >= model.layers:
            yield f"layer_overrides: {where} is beyond the last of {model.layers} layers, {model.layers - 1}"
        if override.moe and model.moe is None:
            yield f"layer_overrides: {where} asks for experts, and the model has none; give moe"
        if override.moe is None and override.window is None and override.ffn_size is None:
            yield f"layer_overrides: {where} changes nothing; give ffn_size, window or moe"


def _patches(model: ModelDescription) -> Iterator[str]:
    patches = model.patches
    if patches is None:
        return
    if patches.image_size % patches.patch_size:
        near = patches.image_size // patches.patch_size * patches.patch_size
        yield (
            f"patches.image_size: {patches.image_size} is not a multiple of patch_size {patches.patch_size}; "
            f"nearest: {near or patches.patch_size}"
        )
    if model.positions == "learned":
        yield "positions: the table of learned positions of patches is patches.position_rows; set positions: none"
    if patches.position_rows and patches.position_rows < patches.tokens:
        yield (
            f"patches.position_rows: {patches.position_rows} are fewer than the {patches.tokens} tokens of an image"
        )
    if model.vision is not None:
        yield "vision: a model of image patches has no second encoder"
    if model.causal:
        yield "causal: image patches see each other; set causal: false"


def _vision(model: ModelDescription) -> Iterator[str]:
    if model.vision is None:
        return
    encoder, merge = model.vision.encoder, model.vision.merge_size
    if encoder.patches is None:
        yield "vision.encoder.patches: is missing"
        return
    side = encoder.patches.image_size // encoder.patches.patch_size
    if side % merge:
        yield f"vision.merge_size: {merge} does not divide the {side} patches of an image's side"
    if encoder.vocab_size:
        yield f"vision.encoder.vocab_size: {encoder.vocab_size}, but an encoder inside a model has no output head"
    yield from (f"vision.encoder.{problem}" for problem in inconsistencies(encoder))
