"""Typed access to a Hugging Face configuration, which collects what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .model import Activation
from .model_checks import (
    LARGEST_SIZE,
    choice_problem,
    probability_problem,
    shown,
    switch_problem,
    whole_number_problem,
)

_GELU_NAMES = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python", "quick_gelu")
_SILU_NAMES = ("silu", "swish")


class Keys:
    """Typed access to a configuration that collects what is wrong instead of stopping at the first."""

    def __init__(
        self, config: Mapping[Any, Any], problems: list[str] | None = None, prefix: str = ""
    ) -> None:
        self._config = config
        self._prefix = prefix
        self.problems: list[str] = [] if problems is None else problems

    def section(self, key: str) -> Keys:
        """The configuration nested under a key; its problems are noted here too."""
        value = self._config.get(key)
        if not isinstance(value, Mapping):
            self.problems.append(f"{self._prefix}{key}: must be a mapping of its keys, not {shown(value)}")
            value = {}
        return Keys(value, self.problems, f"{self._prefix}{key}.")

    def __contains__(self, key: str) -> bool:
        return key in self._config

    def raw(self, key: str) -> Any:  # noqa: ANN401
        """The value of a key as it is; None for an absent key."""
        return self._config.get(key)

    def refuse(self, key: str, value: object, reason: str) -> None:
        """Note that a key has a value that is not supported, and why."""
        self.problems.append(f"{self._prefix}{key}: {reason} (it is {shown(value)})")

    def size(self, key: str, default: int | None = None, limit: int = LARGEST_SIZE, least: int = 1) -> int:
        """A whole number of at least ``least``; without ``default`` the key is required and not null."""
        value = self._config.get(key)
        if value is None:
            if default is None:
                self.problems.append(f"{self._prefix}{key}: is missing")
                return 1
            return default
        if self._rejects(key, whole_number_problem(value, least, limit)):
            return 1
        return int(value)

    def switch(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._config.get(key)
        if value is None:
            return default
        return default if self._rejects(key, switch_problem(value)) else bool(value)

    def choice(self, key: str, words: Sequence[str], default: str) -> str:
        """One of a few words."""
        value = self._config.get(key)
        if value is None:
            return default
        return default if self._rejects(key, choice_problem(value, words)) else str(value)

    def positive(self, key: str, default: float) -> bool:
        """Whether a coefficient is above 0."""
        value = self._config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return not self._rejects(key, f"must be a number, not {shown(value)}")
        return value > 0

    def layer_numbers(self, key: str, layers: int) -> list[int] | None:
        """A list of layer numbers; None where the key is absent or null."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(whole_number_problem(n, 0, layers - 1) for n in value):
            self._rejects(key, f"must be a list of layer numbers below {layers}, not {shown(value)}")
            return None
        return sorted(set(value))

    def dropout(self, key: str, default: float) -> float:
        """A probability below 1."""
        value = self._config.get(key)
        if value is None:
            return default
        return default if self._rejects(key, probability_problem(value)) else float(value)

    def activation(self, key: str, default: str, gated: bool) -> Activation:
        """The activation of a ``gated`` or plain MLP, by the name ``transformers`` has for it."""
        value = self._config.get(key)
        value = default if value is None else value
        names: dict[str, Activation] = dict.fromkeys(_GELU_NAMES, "geglu" if gated else "gelu")
        if gated:
            names.update(dict.fromkeys(_SILU_NAMES, "swiglu"))
        return "gelu" if self._rejects(key, choice_problem(value, sorted(names))) else names[value]

    def _rejects(self, key: str, problem: str) -> bool:
        if problem:
            self.problems.append(f"{self._prefix}{key}: {problem}")
        return bool(problem)

    def check_heads(self, fields: Mapping[str, Any]) -> None:
        """Whether key-value heads divide the heads; only meaningful when the keys themselves were right."""
        heads, kv_heads = fields["heads"], fields["kv_heads"]
        if not self.problems and heads % kv_heads:
            self.problems.append(
                f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}"
            )

    def head_size(self, hidden: int, heads: int, default: int | None = None) -> int:
        """``head_dim`` if given, else what the type says, else the width split over the heads."""
        size = self._config.get("head_dim")
        if size is not None:
            return self.size("head_dim")
        if default is not None:
            return default
        if hidden % heads and not self.problems:
            self.problems.append(
                f"num_attention_heads: {heads} does not divide hidden_size {hidden}, and there is no head_dim"
            )
        return max(hidden // heads, 1)

    def layer_letters(self, layers: int, switch: bool, first: int = 0) -> str:
        """A letter a layer: ``w`` where it has the window, ``f`` where not.

        From ``layer_types`` if the configuration lists them; otherwise, if the type's ``switch`` is on, every layer
        from ``first`` on has it.
        """
        kinds = self._config.get("layer_types")
        if kinds is None:
            return "f" * min(first, layers) + "w" * max(layers - first, 0) if switch else "f" * layers
        letters = {"sliding_attention": "w", "chunked_attention": "w", "full_attention": "f"}
        if not isinstance(kinds, list) or len(kinds) != layers:
            self.problems.append(
                f"{self._prefix}layer_types: must be a list with a word for each of {layers} layers"
            )
            return "f" * layers
        other = sorted({str(kind) for kind in kinds} - set(letters))
        if other:
            self.refuse("layer_types", other, f"only {', '.join(letters)} layers are supported")
            return "f" * layers
        return "".join(letters[kind] for kind in kinds)

    def window(self, letters: str, key: str = "sliding_window", default: int | None = None) -> dict[str, Any]:
        """Fields of the attention window: none where no layer has it or no sequence is longer than it."""
        if "w" not in letters or (key in self._config and self._config[key] is None):
            return {}
        size = self.size(key, default)
        longest = self._config.get("max_position_embeddings")
        if isinstance(longest, int) and size >= longest:
            return {}
        return {"window": size, "window_pattern": shortest_period(letters)}


def shortest_period(letters: str) -> str:
    """The shortest pattern that, repeated, begins with ``letters``."""
    for length in range(1, len(letters)):
        if all(letters[i] == letters[i % length] for i in range(length, len(letters))):
            return letters[:length]
    return letters


Reader = Callable[[Keys], dict[str, Any]]
"""Reads the fields of a :class:`~op_graphs.model.ModelDescription` from the configuration of one ``model_type``."""
