"""The fields of a config.json, each checked when it is read."""

from typing import Any

from moeblaze_ref.core import checks


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
        try:
            return checks.check_int(f"{self.where}: {name}", self._get(name, default), at_least, at_most)
        except TypeError as error:
            raise ValueError(str(error)) from None

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._fields.get(name) is not None

    def only(self, **counted: Any) -> None:
        """Refuse a field with another value than the one whose tensors are counted; a missing field has that value."""
        for name, value in counted.items():
            if self._fields.get(name, value) != value:
                raise ValueError(f"{self.where}: {name} is {self._fields[name]!r}, but only {value!r} is counted")

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} is {value!r}, but it must be true or false")
        return value

    def name(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of some names."""
        return checks.check_name(f"{self.where}: {name}", self._get(name, default), allowed)

    def entries(self, name: str, count: int, default: list[Any]) -> list[Any]:
        """A list with an entry for each layer."""
        value = self._get(name, default)
        if not isinstance(value, list) or len(value) != count:
            raise ValueError(f"{self.where}: {name} is {value!r}, but it must be a list of {count}, one for each layer")
        return value

    def some(self, name: str, count: int, default: list[int]) -> list[int]:
        """The numbers of some layers."""
        value = self._get(name, default)
        if not isinstance(value, list) or not set(value) <= set(range(count)):
            raise ValueError(
                f"{self.where}: {name} is {value!r}, but it must be a list of layers, from 0 to {count - 1}"
            )
        return value

    def within(self, name: str, default: float, at_most: float) -> float:
        """A number from 0 on."""
        return checks.check_within(f"{self.where}: {name}", self._get(name, default), 0, at_most)
