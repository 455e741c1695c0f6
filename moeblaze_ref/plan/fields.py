"""The fields of a config.json, each checked when it is read."""

from typing import Any

from moeblaze_ref.core import checks

MOST = 10**9  # of any count


class Fields:
    """The fields of a config.json, each checked when it is read.

    Raises
    ------
    ValueError
        If a field is missing or is not what it must be; the message names the file and the field.
    """

    def __init__(self, fields: dict[str, Any], where: str):
        self._fields, self.where = fields, where

    def _get(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        if value is None and default is None:
            raise ValueError(f"{self.where}: {name} is missing")
        return default if value is None else value

    def size(self, name: str, default: int | None = None, at_least: int = 1, at_most: int | None = None) -> int:
        """A count."""
        most = MOST if at_most is None else at_most
        try:
            return checks.check_int(f"{self.where}: {name}", self._get(name, default), at_least, most)
        except TypeError as error:
            raise ValueError(str(error)) from None

    def has(self, name: str) -> bool:
        """Return True if the field is there and not null."""
        return self._fields.get(name) is not None

    def only(self, **counted: Any) -> None:
        """Refuse a field with another value than the one whose tensors are counted; a missing field has that value."""
        for name, value in counted.items():
            if self.has(name) and self._fields[name] != value:
                raise ValueError(f"{self.where}: {name} is {self._fields[name]!r}, but only {value!r} is counted")

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} is {value!r}, but it must be true or false")
        return value

    def name(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of some names."""
        value = self._get(name, default)
        if value not in allowed:
            raise ValueError(f"{self.where}: {name} is {value!r}, but it must be one of {', '.join(allowed)}")
        return str(value)

    def switches(self, name: str, default: list[int]) -> list[int]:
        """A list of 0 or 1 for each layer; an empty one is as if it were missing."""
        value = self._get(name, default) or default
        if not isinstance(value, list) or len(value) != len(default) or any(one not in (0, 1) for one in value):
            raise ValueError(f"{self.where}: {name} is {value!r}, but it must be a list of {len(default)}, each 0 or 1")
        return value

    def names(self, name: str, allowed: tuple[str, ...], default: list[str]) -> list[str]:
        """One of some names for each layer."""
        value = self._get(name, default)
        if not isinstance(value, list) or len(value) != len(default):
            raise ValueError(f"{self.where}: {name} is {value!r}, but it must be a list of {len(default)} names")
        for layer, one in enumerate(value):
            if one not in allowed:
                raise ValueError(
                    f"{self.where}: {name}[{layer}] is {one!r}, but it must be one of {', '.join(allowed)}"
                )
        return value

    def some(self, name: str, count: int, default: list[int]) -> list[int]:
        """The numbers of some layers."""
        value = self._get(name, default)
        if not isinstance(value, list) or any(one not in range(count) for one in value):
            raise ValueError(
                f"{self.where}: {name} is {value!r}, but it must be a list of layers, from 0 to {count - 1}"
            )
        return value

    def within_object(self, name: str) -> "Fields":
        """The fields of an object, none if it is missing."""
        value = self._fields.get(name) or {}
        if not isinstance(value, dict):
            raise ValueError(f"{self.where}: {name} is {value!r}, but it must be an object")
        return Fields(value, f"{self.where}: {name}")

    def within(self, name: str, default: float, at_most: float) -> float:
        """A number from 0 on."""
        return checks.check_within(f"{self.where}: {name}", self._get(name, default), 0, at_most)
