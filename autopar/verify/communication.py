"""What a communication node says, and what its peers must agree on.

A :class:`Message` is everything of a ``torch.ops._c10d_functional`` call that other ranks can see; it holds no rank, so
that programs which communicate alike have equal messages.  A :class:`Call` is a message of one rank.  The checks serve
both the static check and the lockstep interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import Mesh, Phase

NAMESPACE = "_c10d_functional"
WAIT = "wait_tensor"
REDUCE_OPS = frozenset({"sum", "avg", "max", "min", "product", "band", "bor", "bxor"})
POINT_TO_POINT = frozenset({"isend", "irecv"})

# Positional parameters of every communication op; "tensors" is one tensor or, in the coalesced forms, a list of them.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("tensors", "reduce_op", "group"),
    "all_reduce_coalesced": ("tensors", "reduce_op", "group"),
    "all_gather_into_tensor": ("tensors", "group_size", "group"),
    "all_gather_into_tensor_coalesced": ("tensors", "group_size", "group"),
    "reduce_scatter_tensor": ("tensors", "reduce_op", "group_size", "group"),
    "reduce_scatter_tensor_coalesced": ("tensors", "reduce_op", "group_size", "group"),
    "all_to_all_single": ("tensors", "receives", "sends", "group"),
    "broadcast": ("tensors", "root", "group"),
    "isend": ("tensors", "peer", "tag", "group"),
    "irecv": ("tensors", "peer", "tag", "group"),
    "batch_p2p_ops": ("ops", "peers", "tags", "tensors", "group"),
}
# torch's own names of the parameters, for calls that pass them by keyword.
_KEYWORDS: Mapping[str, str] = {
    "input": "tensors",
    "inputs": "tensors",
    "tensor": "tensors",
    "group_name": "group",
    "output_split_sizes": "receives",
    "input_split_sizes": "sends",
    "src": "root",
    "op_list": "ops",
    "peer_list": "peers",
    "tag_list": "tags",
}


def communication_name(node: fx.Node) -> str | None:
    """Name of the communication op that ``node`` calls, or None where it computes."""
    return _name_of(node.target) if node.op == "call_function" else None


@functools.lru_cache(maxsize=4096)
def _name_of(target: Any) -> str | None:  # noqa: ANN401 - whatever a node calls
    if getattr(target, "namespace", None) != NAMESPACE:
        return None
    return str(target.name()).split("::")[1].split(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One communication as seen from outside; positions (``root``, ``peer``) count within the group.

    Attributes:
        op: ``all_reduce``, ``all_gather_into_tensor``, ..., ``isend``, ``irecv``.
        group: mesh axis, or several joined by "+".
        shapes, dtypes: of the tensors handed in (of the buffer, for ``irecv``).
        reduce_op: how values are combined, or "".
        group_size: number of members that the call names, or None where the op does not name it.
        root: who broadcasts, or -1.
        sends, receives: rows for and from each member (``all_to_all_single``).
        peer, tag: the other end of an ``isend`` or ``irecv``, or -1.
        layer, phase: what the communication belongs to; members must agree, so that two gradients of equal shape cannot
            be exchanged for one another.
    """

    op: str
    group: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    reduce_op: str = ""
    group_size: int | None = None
    root: int = -1
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    peer: int = -1
    tag: int = -1
    layer: str = ""
    phase: Phase | None = None

    @property
    def symmetric(self) -> bool:
        """Whether the group agrees as soon as all its members' messages are equal."""
        return self.op not in POINT_TO_POINT and len({*self.sends, *self.receives}) <= 1

    def __str__(self) -> str:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return f"{self.op}({', '.join(f'{str(dtype)[6:]}{list(shape)}' for shape, dtype in pairs)})"


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Where in a program something happens: what is told of a node, without its graph, so that it can be sent."""

    name: str
    layer: str
    source: str

    @classmethod
    def of(cls, node: fx.Node) -> Site:
        """The site of ``node``."""
        return cls(node.name, str(node.meta.get("layer", "")), str(node.meta.get("source", "")))

    def __str__(self) -> str:
        layer = f"layer {self.layer}" if self.layer else ""
        return f"[{', '.join(part for part in (f'node {self.name}', layer, self.source) if part)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A message of one rank.

    Attributes:
        message: what is communicated.
        rank: who calls.
        members: ranks of the group, in the group's order.
        node: where in the program.
    """

    message: Message
    rank: int
    members: tuple[int, ...]
    node: fx.Node | Site

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message} {where(self.node)}"


def where(node: fx.Node | Site) -> str:
    """Name, layer and source line of ``node``, for messages."""
    return str(Site.of(node) if isinstance(node, fx.Node) else node)


def read_arguments(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a communication node by this module's parameter names; ``args`` hold values (or fake tensors)."""
    name = str(communication_name(node))
    if name not in _PARAMETERS:
        raise VerificationError(
            f"{node.target} cannot be verified {where(node)}; the communications of a program are {sorted(_PARAMETERS)}"
        )
    found = dict(zip(_PARAMETERS[name], args, strict=False))
    for key, value in kwargs.items():
        key = "peer" if key in {"src", "dst"} and name in POINT_TO_POINT else _KEYWORDS.get(key, key)
        found[key] = value
    missing = [p for p in _PARAMETERS[name] if p not in found]
    if missing:
        raise VerificationError(f"{node.target} lacks {', '.join(missing)} {where(node)}")
    return found


def tensors_of(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a communication hands in."""
    tensors = arguments["tensors"]
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def read_messages(node: fx.Node, arguments: Mapping[str, Any]) -> list[Message]:
    """The messages of a communication node: one, or one per entry of ``batch_p2p_ops``."""
    tensors = tensors_of(arguments)
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        raise VerificationError(f"{node.target} got {tensors} in place of tensors {where(node)}")
    common = {"group": str(arguments["group"]), "layer": node.meta.get("layer", ""), "phase": node.meta.get("phase")}
    if "ops" in arguments:
        rows = zip(arguments["ops"], arguments["peers"], arguments["tags"], tensors, strict=True)
        return [
            Message(op=op, peer=peer, tag=tag, shapes=(tuple(t.shape),), dtypes=(t.dtype,), **common)
            for op, peer, tag, t in rows
        ]
    return [
        Message(
            op=str(communication_name(node)),
            shapes=tuple(tuple(t.shape) for t in tensors),
            dtypes=tuple(t.dtype for t in tensors),
            sends=tuple(arguments.get("sends", ())),
            receives=tuple(arguments.get("receives", ())),
            **{k: arguments[k] for k in ("reduce_op", "group_size", "root", "peer", "tag") if k in arguments},
            **common,
        )
    ]


def group_members(mesh: Mesh, group: str, rank: int, node: fx.Node | Site) -> tuple[int, ...]:
    """Ranks of ``group`` as seen from ``rank``; an unknown axis is an error."""
    unknown = [axis for axis in group.split("+") if axis not in mesh.axes]
    if unknown:
        raise VerificationError(f"rank {rank}: group {group!r} names no axis of the mesh {mesh.axes} {where(node)}")
    return mesh.group_ranks(group, rank)


def check_alone(call: Call) -> None:
    """Raise VerificationError where a call is wrong whatever its peers do."""
    message, size = call.message, len(call.members)
    reason = ""
    if message.op in POINT_TO_POINT:
        if not 0 <= message.peer < size or call.members[message.peer] == call.rank:
            reason = f"peer {message.peer} is no other member of the group of {size} ranks {call.members}"
    elif message.op == "broadcast":
        if not 0 <= message.root < size:
            reason = f"root {message.root} is no member of the group of {size} ranks {call.members}"
    elif message.op == "all_to_all_single":
        reason = _split_fault(message, size)
    else:
        reason = _reduce_fault(message, size)
    if reason:
        raise VerificationError(f"{call}: {reason}")


def _split_fault(message: Message, size: int) -> str:
    if len(message.sends) != size or len(message.receives) != size:
        return f"{len(message.sends)} rows to send and {len(message.receives)} to receive for a group of {size} ranks"
    rows = message.shapes[0][0] if message.shapes[0] else -1
    if sum(message.sends) != rows:
        return f"it sends {list(message.sends)} = {sum(message.sends)} rows of a tensor that has {rows}"
    return ""


def _reduce_fault(message: Message, size: int) -> str:
    if message.reduce_op and message.reduce_op not in REDUCE_OPS:
        return f"unknown reduce op {message.reduce_op!r}; torch knows {sorted(REDUCE_OPS)}"
    if message.group_size is None:
        return ""
    if message.group_size != size:
        return f"it says group_size {message.group_size}, but group {message.group!r} has {size} ranks"
    if any(not shape for shape in message.shapes):
        return "a 0-d tensor can be neither gathered nor scattered"
    if message.op.startswith("reduce_scatter") and any(shape[0] % size for shape in message.shapes):
        return f"the first dim does not divide by the {size} ranks of the group; pad it"
    return ""


def check_pair(one: Call, other: Call) -> None:
    """Raise VerificationError where two calls that meet (same group, same position in it) do not agree."""
    if one.message.op in POINT_TO_POINT:
        _check_equal(one, other, ("shapes", "dtypes", "tag"))
        return
    if one.message == other.message and one.message.symmetric:
        return
    _check_equal(one, other, ("op", "reduce_op", "dtypes", "group_size", "root", "layer", "phase"))
    if one.message.op != "all_to_all_single":
        _check_equal(one, other, ("shapes",))
        return
    if one.message.shapes[0][1:] != other.message.shapes[0][1:]:
        raise VerificationError(f"rows of different shape are exchanged:\n  {one}\n  {other}")
    for sender, receiver in ((one, other), (other, one)):
        sent = sender.message.sends[sender.members.index(receiver.rank)]
        expected = receiver.message.receives[receiver.members.index(sender.rank)]
        if sent != expected:
            raise VerificationError(
                f"rank {sender.rank} sends {sent} rows, rank {receiver.rank} expects {expected}:\n"
                f"  {sender}\n  {receiver}"
            )


def _check_equal(one: Call, other: Call, fields: Sequence[str]) -> None:
    for field in fields:
        ours, theirs = getattr(one.message, field), getattr(other.message, field)
        if ours != theirs:
            raise VerificationError(f"{field} differ, {ours} against {theirs}:\n  {one}\n  {other}")
