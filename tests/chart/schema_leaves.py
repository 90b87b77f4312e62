"""Walks values.schema.json: every value that an operator may set, with what it may be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.chart.chart_rig import CHART

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
# Texts that somebody might set, the most telling first; {n} is a number that stands nowhere else.
_TEXTS = (
    "zz{n}",
    "/zz{n}",
    "zz.example/zz{n}",
    "zz{n}:1",
    "{n}Gi",
    "{n}s",
    "https://zz{n}",
    "sha256:{n:a<64}",
    "{n:a<64}",
)


@dataclass(frozen=True, slots=True)
class Leaf:
    path: str
    schema: Mapping[str, Any]

    @property
    def choices(self) -> tuple[object, ...]:
        """All it may be, where that is a list."""
        listed = self.schema.get("if", self.schema)  # else says why nothing else goes
        return (False, True) if self.schema.get("type") == "boolean" else tuple(listed.get("enum", ()))

    def telling(self, number: int) -> object | None:
        """A value in which `number` can be found again; None: it may be none such."""
        kinds = [kind for kind in (self.schema, *self.schema.get("anyOf", ())) if kind.get("type") == "string"]
        for kind in kinds if not self.choices else ():
            for text in _TEXTS:
                if re.search(kind.get("pattern", ""), candidate := text.format(n=number)):
                    return candidate
        is_number = self.schema.get("type") in ("integer", "number")
        fits = self.schema.get("minimum", number) <= number <= self.schema.get("maximum", number)
        return number if is_number and fits else None


def objects(schema: Mapping[str, Any] = SCHEMA, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every map with names of its own, wherever it is, definitions too."""
    if "properties" in schema:
        yield path, schema
    for name, child in {**schema.get("properties", {}), **schema.get("$defs", {})}.items():
        yield from objects(child, f"{path}.{name}".strip("."))
    if "items" in schema:
        yield from objects(schema["items"], f"{path}[]")


def leaves(schema: Mapping[str, Any] = SCHEMA, path: str = "") -> Iterator[Leaf]:
    """Those of lists and free maps are the list or map itself. Names that are only there to be refused are left out."""
    for name, child in schema["properties"].items():
        if "$ref" in child:
            child = SCHEMA["$defs"][child["$ref"].rpartition("/")[2]]
        where = f"{path}.{name}".strip(".")
        if "properties" in child:
            yield from leaves(child, where)
        elif "const" not in child and where != "global":
            yield Leaf(where, child)


def get(values: Mapping[str, Any], path: str) -> Any:
    """Raises: KeyError."""
    value: Any = values
    for name in path.split("."):
        value = value[name]
    return value
