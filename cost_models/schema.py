"""Checks a decoded JSON document against a small subset of JSON Schema, with errors that name the place.

The subset is what ``cluster.schema.json`` uses: ``type``, ``properties``, ``required``, ``additionalProperties``,
``items``, ``minItems``, ``maxItems``, ``enum``, ``minimum`` and ``exclusiveMinimum``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.cost_models.errors import ClusterError

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}


def check(value: object, schema: Mapping[str, Any], where: str) -> None:
    """Raise ClusterError unless ``value`` satisfies ``schema``; ``where`` names the document in the message.

    >>> check({"a": 1}, {"type": "object", "properties": {"a": {"type": "number"}}}, "file")
    >>> check({"b": 1}, {"type": "object", "required": ["a"]}, "file")
    Traceback (most recent call last):
    ...
    autopar.cost_models.errors.ClusterError: file: field 'a' is missing; it holds ['b']
    """
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        raise ClusterError(f"{where}: needs {kind}, got {type(value).__name__} {value!r}")
    if "enum" in schema and value not in schema["enum"]:
        raise ClusterError(f"{where}: needs one of {schema['enum']}, got {value!r}")
    if isinstance(value, dict):
        _check_object(value, schema, where)
    elif isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            raise ClusterError(f"{where}: needs at least {schema['minItems']} entries, got {len(value)}")
        if len(value) > schema.get("maxItems", len(value)):
            raise ClusterError(f"{where}: needs at most {schema['maxItems']} entries, got {len(value)}")
        for i, item in enumerate(value):
            check(item, schema.get("items", {}), f"{where}[{i}]")
    elif isinstance(value, int | float):
        _check_number(value, schema, where)


def _check_object(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> None:
    for name in schema.get("required", ()):
        if name not in value:
            raise ClusterError(f"{where}: field {name!r} is missing; it holds {sorted(value)}")
    properties = schema.get("properties", {})
    extra = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in properties:
            check(item, properties[name], f"{where}.{name}")
        elif extra is False:
            raise ClusterError(f"{where}: unknown field {name!r}; known are {sorted(properties)}")
        elif isinstance(extra, dict):
            check(item, extra, f"{where}.{name}")


def _check_number(value: float, schema: Mapping[str, Any], where: str) -> None:
    if value != value or value in (float("inf"), float("-inf")):
        raise ClusterError(f"{where}: needs a finite number, got {value}")
    if "minimum" in schema and value < schema["minimum"]:
        raise ClusterError(f"{where}: needs at least {schema['minimum']}, got {value}")
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        raise ClusterError(f"{where}: needs more than {schema['exclusiveMinimum']}, got {value}")
