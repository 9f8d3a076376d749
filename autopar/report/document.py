"""A program as JSON.

Schema 1: an object with ``format`` ("autopar dump"), ``schema``, ``rank``, ``mesh`` (``axes``, ``sizes``), ``nodes``
and ``parts`` (nodes of sub-programs, by name).  A node has ``name``, ``kind``, ``call``, ``arguments``, ``inputs``
(names of nodes of this document), ``outside`` (names of inputs that a filter left out), ``label``, ``layer``,
``phase``, ``source``, ``layout`` (placement text by mesh axis), ``local`` (dtype, shape, bytes of each result),
``global_shape``, ``communication`` (null, or ``op``, ``group``, ``num_ranks``, ``moved_bytes``, ``serves``) and
``roles``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from autopar.report.rows import Row, View

SCHEMA = 1


def as_json(view: View) -> str:
    """``view`` as JSON text of the schema that this module describes."""
    document = {
        "format": "autopar dump",
        "schema": SCHEMA,
        "rank": view.rank,
        "mesh": {"axes": view.mesh.axes, "sizes": view.mesh.sizes},
        "nodes": _nodes(view.rows),
        "parts": {name: _nodes(rows) for name, rows in view.parts.items()},
    }
    return json.dumps(document, indent=1)


def _nodes(rows: Sequence[Row]) -> list[dict[str, object]]:
    shown = {row.name for row in rows}
    return [_node(row, shown) for row in rows]


def _node(row: Row, shown: set[str]) -> dict[str, object]:
    return {
        **{f.name: getattr(row, f.name) for f in dataclasses.fields(row)},
        "kind": row.kind.value,
        "inputs": [name for name in row.inputs if name in shown],
        "outside": [name for name in row.inputs if name not in shown],
        "phase": row.phase.value if row.phase else None,
        "layout": dict(text.split(":", maxsplit=1) for text in row.layout),
        "local": [{"dtype": t.dtype, "shape": t.shape, "bytes": t.num_bytes} for t in row.local],
        "communication": dataclasses.asdict(row.communication) if row.communication else None,
    }
