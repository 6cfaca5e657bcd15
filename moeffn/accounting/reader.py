"""Reading a model's config.json: strict about sizes, explicit about what is left out.

A size that is missing is an error that names it; no library's default ever fills it (OlmoeConfig's would turn a
6.9B model into 13.4B). A few keys have a plain meaning when absent (no `attention_bias` in a Llama config: no
biases); each such reading is written down in `Keys.assumed` and shown with the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

REQUIRED: Any = object()
# Names that families use for the same size; each is read wherever another of its group is.
ALIASES = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"),
    ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k",
     "top_k_experts"),
)


class Keys:
    """One level of a config. `outer` is the level above, from which the tying of embeddings is inherited."""

    def __init__(self, data: Mapping[str, Any], where: str = "config", outer: Keys | None = None) -> None:
        if not isinstance(data, Mapping):
            raise TypeError(f"{where}: expected an object of keys and values, got {type(data).__name__}")
        self.data = data
        self.where = where
        self.outer = outer
        self.assumed: dict[str, object] = outer.assumed if outer else {}
        self.excluded: list[str] = outer.excluded if outer else []

    def has(self, *names: str) -> bool:
        return any(self.data.get(name) is not None for name in names)

    def _find(self, names: tuple[str, ...], absent: Any) -> tuple[str, Any]:
        alike = (name for group in ALIASES if names[0] in group for name in group)
        for name in (*names, *alike):
            if self.data.get(name) is not None:
                return name, self.data[name]
        if absent is REQUIRED:
            known = f" (read as {' or '.join(names[1:])} too)" if len(names) > 1 else ""
            raise ValueError(f"{self.where}.{names[0]} is missing{known}: it is never filled from a default")
        self.assumed[names[0]] = absent
        return names[0], None

    def _integer(self, name: str, value: Any, minimum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{self.where}.{name}: expected an integer, got {type(value).__name__} {value!r}")
        if value < minimum:
            raise ValueError(f"{self.where}.{name}: expected at least {minimum}, got {value}")
        return value

    def integer(self, *names: str, absent: Any = REQUIRED, minimum: int = 1) -> int:
        """The first of `names` that is present; a list of equal integers is read as that integer."""
        name, value = self._find(names, absent)
        if value is None:
            return absent
        if isinstance(value, list | tuple):
            if not value or len(set(map(str, value))) > 1:
                raise TypeError(f"{self.where}.{name}: expected an integer, got a list that differs by layer: {value}")
            value = value[0]
        return self._integer(name, value, minimum)

    def each(self, *names: str, layers: int, absent: Any = REQUIRED, minimum: int = 0) -> list[int]:
        """One integer for every layer, from a list of `layers` integers or from one integer for all."""
        name, value = self._find(names, absent)
        if value is None:
            return [absent] * layers
        if not isinstance(value, list | tuple):
            return [self._integer(name, value, minimum)] * layers
        if len(value) != layers:
            raise ValueError(f"{self.where}.{name}: expected {layers} entries, one for each layer, got {len(value)}")
        return [self._integer(f"{name}[{i}]", v, minimum) for i, v in enumerate(value)]

    def _typed(self, names: tuple[str, ...], absent: Any, kind: type, label: str) -> Any:
        name, value = self._find(names, absent)
        if value is None:
            return absent
        if not isinstance(value, kind):
            raise TypeError(f"{self.where}.{name}: expected {label}, got {type(value).__name__} {value!r}")
        return value

    def flag(self, *names: str, absent: Any = REQUIRED) -> bool:
        return self._typed(names, absent, bool, "true or false")

    def flags(self, name: str, layers: int) -> list[bool]:
        """True or false for every layer."""
        value = self._typed((name,), REQUIRED, list, f"a list of {layers} of true and false")
        if len(value) != layers or not all(isinstance(v, bool) for v in value):
            raise ValueError(f"{self.where}.{name}: expected {layers} of true and false, one for each layer, "
                             f"got {value}")
        return value

    def number(self, name: str) -> float:
        """A number of at least 0."""
        _, value = self._find((name,), REQUIRED)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{self.where}.{name}: expected a number of at least 0, got {value!r}")
        return value

    def text(self, *names: str, absent: Any = REQUIRED) -> str:
        return self._typed(names, absent, str, "a string")

    def words(self, *names: str, layers: int, among: Iterable[str]) -> list[str]:
        """A word for every layer, each one of `among`."""
        name, value = self._find(names, REQUIRED)
        if not isinstance(value, list | tuple):
            raise TypeError(f"{self.where}.{name}: expected a list of {layers} names, got {type(value).__name__}")
        if len(value) != layers:
            raise ValueError(f"{self.where}.{name}: expected {layers} entries, one for each layer, got {len(value)}")
        allowed = set(among)
        for i, word in enumerate(value):
            if word not in allowed:
                raise ValueError(f"{self.where}.{name}[{i}]: expected one of {sorted(allowed)}, got {word!r}")
        return list(value)

    def indices(self, *names: str, required: bool = False) -> list[int]:
        """A list of integers, or one string of them with commas; empty when absent unless it is required."""
        name, value = self._find(names, REQUIRED if required else [])
        if value is None:
            return []
        if isinstance(value, str) and all(part.strip().isdecimal() for part in value.split(",")):
            value = [int(part) for part in value.split(",")]
        if not isinstance(value, list | tuple):
            raise TypeError(f"{self.where}.{name}: expected a list of layer numbers, got {type(value).__name__}")
        return [self._integer(f"{name}[{i}]", v, 0) for i, v in enumerate(value)]

    def inside(self, name: str) -> Keys:
        """The object under `name`."""
        _, value = self._find((name,), REQUIRED)
        return Keys(value, f"{self.where}.{name}", self)

    def layer(self, index: int) -> Keys:
        """This level with what `per_layer_config` says of one layer (its keys are numbers, "3" or "03")."""
        given = self.inside("per_layer_config") if self.has("per_layer_config") else self
        name = next((key for key in (str(index), f"{index:02d}") if key in given.data), None)
        if name is None:
            return self
        own = given.inside(name)
        return Keys({**self.data, **own.data}, own.where, self)

    def tied(self, absent: bool) -> bool:
        """`tie_word_embeddings`, of the outermost level that says it (a wrapper ties, not the model inside)."""
        level: Keys | None = self
        said = None
        while level is not None:
            said = level if level.has("tie_word_embeddings") else said
            level = level.outer
        if said is not None:
            return said.flag("tie_word_embeddings")
        self.assumed["tie_word_embeddings"] = absent
        return absent

    def divide(self, name: str, whole: int, parts: int) -> int:
        """`whole` / `parts`, as the value of `name`; an inexact division is an error."""
        if parts < 1 or whole % parts:
            raise ValueError(f"{self.where}.{name} is missing and {whole} does not divide by {parts}")
        self.assumed[name] = whole // parts
        return whole // parts
