"""The bridge from a graph to the cost models: a node becomes an Op, a Transfer or nothing.

Prices come from the fake tensors in ``node.meta["val"]``, which hold local shapes in a Program and global ones in a
StepGraph.  Bytes are always known, so an op without a formula is still priced, and :class:`Priced` names it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.cost_models.collectives import Collective, Transfer
from autopar.cost_models.compute import Op, OpKind, matmul
from autopar.cost_models.memory import Buffer
from autopar.passes.base import Phase
from autopar.passes.torch_ops import OpOverload

Shape = tuple[int, ...]

_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Views and bookkeeping: nothing runs on the device.
_FREE = _names(
    """view _unsafe_view reshape t transpose permute expand slice select split split_with_sizes unsqueeze squeeze detach
    alias as_strided unbind narrow view_as_real view_as_complex wait_tensor sym_size lift_fresh_copy lift_fresh
    _reshape_alias chunk diagonal unfold real imag resolve_conj resolve_neg empty empty_like new_empty
    new_empty_strided empty_strided"""
)

# Reductions, normalizations and copies: one pass over what they read and write, and they fuse with element-wise chains.
_ONE_PASS = _names(
    """native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm
    native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_no_stats batch_norm_backward
    _batch_norm_with_update _fused_rms_norm _fused_rms_norm_backward _softmax _softmax_backward_data _log_softmax
    _log_softmax_backward_data native_dropout native_dropout_backward sum mean var var_mean amax amin max min argmax
    argmin prod any all logsumexp std cumsum _to_copy to clone copy cat stack nll_loss_forward nll_loss_backward
    linalg_vector_norm norm full full_like zeros zeros_like ones ones_like new_zeros new_full new_ones scalar_tensor
    arange constant_pad_nd slice_backward select_backward slice_scatter select_scatter flip roll repeat triu tril
    bernoulli rand_like randn_like rand randn threshold_backward masked_fill where contiguous gelu silu gelu_backward
    silu_backward bitwise_not eye"""
)

# Ops that touch as many elements of their table as they return (reads) or are given (writes).
_ROWS_READ = frozenset({"embedding", "index", "gather", "index_select", "take", "_unsafe_index"})
_ROWS_WRITTEN = frozenset(
    {"embedding_dense_backward", "index_put", "index_put_", "index_add", "scatter", "scatter_add", "_unsafe_index_put"}
)

# Passes over their data that take several sweeps.
_MANY_PASSES = {"sort": 8.0, "topk": 4.0, "argsort": 8.0, "unique": 8.0}

_COLLECTIVES: Mapping[str, Collective] = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_reduce_coalesced": Collective.ALL_REDUCE,
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "all_gather_into_tensor_coalesced": Collective.ALL_GATHER,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Collective.REDUCE_SCATTER,
    "all_to_all_single": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "isend": Collective.SEND,
    "irecv": Collective.SEND,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedNode:
    """A node with what it costs, in graph order.

    Attributes:
        node: the node; for a fused chain its last one.
        phase: forward or backward.
        cost: what it does.
        by_bytes: whether no formula was known for the op, and its bytes alone were counted.
    """

    node: fx.Node
    phase: Phase
    cost: Op | Transfer
    by_bytes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """All costs of a graph.

    Attributes:
        nodes: costs in graph order.
        by_bytes: names of the ops that were priced by bytes alone.
    """

    nodes: tuple[PricedNode, ...]
    by_bytes: tuple[str, ...]

    def ops(self, phase: Phase | None = None) -> tuple[Op, ...]:
        """Computations, of one phase or of both."""
        return tuple(n.cost for n in self.nodes if isinstance(n.cost, Op) and phase in (None, n.phase))

    def transfers(self, phase: Phase | None = None) -> tuple[Transfer, ...]:
        """Communications, of one phase or of both."""
        return tuple(n.cost for n in self.nodes if isinstance(n.cost, Transfer) and phase in (None, n.phase))


def dtype_name(dtype: torch.dtype) -> str:
    """The cost models' name of ``dtype``.

    >>> dtype_name(torch.bfloat16)
    'bf16'
    """
    return _DTYPES.get(dtype) or {1: "int8", 2: "bf16", 4: "int32", 8: "int64"}[min(8, dtype.itemsize)]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value of ``meta["val"]``."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors(item)]
    return []


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements (a broadcast view counts what it stands on)."""
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or n == 1)
    return math.prod(sizes) * tensor.element_size()


def op_name(node: fx.Node) -> str:
    """ATen name without overload: ``mm``."""
    target = node.target
    if isinstance(target, OpOverload):
        return str(target._schema.name.split("::")[1])
    return getattr(target, "__name__", str(target))


def is_free(node: fx.Node) -> bool:
    """Whether the node runs nothing on the device."""
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    return op_name(node) in _FREE or not tensors(node.meta.get("val"))


def is_fusable(node: fx.Node) -> bool:
    """Whether a compiler (or a hand-written kernel) can run the node in one kernel with its neighbours."""
    if is_free(node) or not isinstance(node.target, OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or op_name(node) in _ONE_PASS


def price_node(node: fx.Node) -> PricedNode | None:
    """Cost of one node by itself; None for views, placeholders and the output."""
    if is_free(node):
        return None
    name = op_name(node)
    phase = node.meta.get("phase", Phase.FORWARD)
    namespace = getattr(node.target, "namespace", "")
    if namespace in ("_c10d_functional", "c10d_functional"):
        return PricedNode(node=node, phase=phase, cost=_transfer(node, name))
    known = name in _FORMULAS or name in _ROWS_READ or name in _ROWS_WRITTEN or name in _MANY_PASSES
    cost = _FORMULAS[name](node) if name in _FORMULAS else _by_bytes(node, name)
    return PricedNode(node=node, phase=phase, cost=cost, by_bytes=not (known or is_fusable(node)))


def price_graph(graph: fx.Graph | Sequence[fx.Node], *, fused: bool = False) -> Priced:
    """Costs of all nodes.

    Args:
        graph: a graph, or consecutive nodes of one.
        fused: run chains of element-wise and normalizing ops as one kernel each, which reads what comes from outside
            and writes what is used outside.

    Returns:
        The costs, in order.
    """
    nodes = list(graph.nodes if isinstance(graph, fx.Graph) else graph)
    chains = _chains(nodes) if fused else {}
    priced = []
    for node in nodes:
        item = price_node(node)
        if item is None:
            continue
        chain = chains.get(node)
        if chain is None:
            priced.append(item)
        elif node is chain[-1]:
            priced.append(PricedNode(node=node, phase=item.phase, cost=_chain_op(chain)))
    return Priced(nodes=tuple(priced), by_bytes=tuple(sorted({op_name(p.node) for p in priced if p.by_bytes})))


def recomputed(graph: fx.Graph) -> list[fx.Node]:
    """Forward nodes that have to run again when the backward keeps nothing of the forward but the graph's inputs.

    What only leads to the graph's result (the last projection of a block) does not run again.
    """
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        if _phase(node) is Phase.BACKWARD and node.op != "placeholder":
            needed.update(a for a in node.all_input_nodes if _phase(a) is Phase.FORWARD)
        elif node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed and node.op != "placeholder"]


def _transfer(node: fx.Node, name: str) -> Transfer:
    """Bytes are those of the full tensor: the larger of input and output."""
    got = sum(tensor_bytes(t) for t in tensors(node.meta.get("val")))
    given = sum(tensor_bytes(t) for a in node.all_input_nodes for t in tensors(a.meta.get("val")))
    group = next((a for a in reversed(node.args) if isinstance(a, str)), "")
    if name not in _COLLECTIVES:
        raise NotImplementedError(f"no price for the communication {node.target}")
    return Transfer(
        collective=_COLLECTIVES[name], group=group, bytes=float(max(got, given)), layer=node.meta.get("layer", "")
    )


def _inputs(node: fx.Node) -> list[torch.Tensor]:
    return [t for a in node.all_input_nodes for t in tensors(a.meta.get("val"))]


def _argument(node: fx.Node, index: int) -> torch.Tensor:
    """Fake tensor of the argument at ``index``."""
    argument = node.args[index]
    value = argument.meta["val"] if isinstance(argument, fx.Node) else argument
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{node.format_node()}: argument {index} is {value!r}, not a tensor")
    return value


def _by_bytes(node: fx.Node, name: str) -> Op:
    """Everything read and written once; lookups touch only the rows they use."""
    outputs, inputs = tensors(node.meta["val"]), _inputs(node)
    out_bytes = sum(tensor_bytes(t) for t in outputs)
    in_bytes = sum(tensor_bytes(t) for t in inputs)
    if name in _ROWS_READ:
        in_bytes = sum(tensor_bytes(t) for t in inputs if not t.is_floating_point()) + out_bytes
    elif name in _ROWS_WRITTEN:
        # The table is cleared or copied, and the rows are read, added and written.
        smaller = sum(sorted(tensor_bytes(t) for t in inputs)[:-1]) if len(inputs) > 1 else in_bytes
        in_bytes = 3 * smaller
    dtype = (outputs + inputs)[0].dtype
    return Op(
        name=name,
        kind=OpKind.MEMORY,
        shapes=tuple(tuple(t.shape) for t in inputs + outputs),
        dtype=dtype_name(dtype),
        flops=float(sum(t.numel() for t in outputs)),
        bytes=float(in_bytes + out_bytes) * _MANY_PASSES.get(name, 1.0),
        layer=node.meta.get("layer", ""),
    )


def _mm(node: fx.Node, first: int, second: int) -> Op:
    a, b = _argument(node, first), _argument(node, second)
    batch = a.shape[0] if a.dim() == 3 else 1
    return matmul(
        a.shape[-2] if a.dim() > 1 else 1,
        b.shape[-1] if b.dim() > 1 else 1,
        a.shape[-1],
        dtype_name(a.dtype),
        batch=batch,
        name=op_name(node),
        layer=node.meta.get("layer", ""),
        is_linear=a.dim() == 2,
    )


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"needs a whole number, got {value!r}")
    return value


def _convolution(node: fx.Node) -> Op:
    """As a matmul: pixels by channels; a grouped convolution is a batch of them."""
    x, weight = _argument(node, 0), _argument(node, 1)
    out = tensors(node.meta["val"])[0]
    transposed, groups = bool(node.args[6]), _int(node.args[8])
    pixels = x if transposed else out
    return _convolution_op(node, weight, pixels.shape[0] * math.prod(pixels.shape[2:]), groups, passes=1)


def _convolution_backward(node: fx.Node) -> Op:
    grad, x, weight = (_argument(node, i) for i in range(3))
    transposed, groups = bool(node.args[7]), _int(node.args[9])
    pixels = x if transposed else grad
    mask: Any = node.args[10]
    passes = int(bool(mask[0])) + int(bool(mask[1]))
    return _convolution_op(node, weight, pixels.shape[0] * math.prod(pixels.shape[2:]), groups, passes=passes)


def _convolution_op(node: fx.Node, weight: torch.Tensor, pixels: int, groups: int, *, passes: int) -> Op:
    rows, inner = weight.shape[0] // groups, math.prod(weight.shape[1:])
    moved = sum(tensor_bytes(t) for t in _inputs(node) + tensors(node.meta["val"]))
    return Op(
        name=op_name(node),
        kind=OpKind.MATMUL,
        shapes=((groups, pixels, inner), (groups, inner, rows * passes)),
        dtype=dtype_name(weight.dtype),
        flops=2.0 * groups * pixels * inner * rows * passes,
        bytes=float(moved),
        layer=node.meta.get("layer", ""),
    )


def _attention(node: fx.Node, query: int, *, backward: bool) -> Op:
    """Any form of scaled dot product attention; ``query`` is the index of q, which k and v follow."""
    q, k = _argument(node, query), _argument(node, query + 1)
    (b, heads, queries, d), keys = q.shape, k.shape[2]
    is_causal = _is_causal(node)
    share = (1 - (keys - 1) / (2 * keys)) if is_causal and queries == keys else 1.0
    # Two products forward; backward recomputes the scores and has four of its own.
    products = 5 if backward else 2
    value_d = _argument(node, query + 2).shape[-1]
    moved = sum(tensor_bytes(t) for t in _inputs(node) + tensors(node.meta["val"]))
    return Op(
        name=op_name(node),
        kind=OpKind.ATTENTION_BACKWARD if backward else OpKind.ATTENTION,
        shapes=((b, heads, queries, d), (b, k.shape[1], keys, d)),
        dtype=dtype_name(q.dtype),
        flops=products * b * heads * queries * keys * (d + value_d) * share,
        bytes=float(moved),
        layer=node.meta.get("layer", ""),
    )


def _is_causal(node: fx.Node) -> bool:
    """The ``is_causal`` argument of whichever overload it is."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    for index, argument in enumerate(target._schema.arguments):
        if argument.name == "is_causal":
            given = node.args[index] if index < len(node.args) else node.kwargs.get("is_causal", argument.default_value)
            return bool(given)
    return False


def _forms() -> dict[str, Callable[[fx.Node], Op]]:
    """Op name to formula."""
    forms: dict[str, Callable[[fx.Node], Op]] = {
        "mm": lambda n: _mm(n, 0, 1),
        "bmm": lambda n: _mm(n, 0, 1),
        "matmul": lambda n: _mm(n, 0, 1),
        "addmm": lambda n: _mm(n, 1, 2),
        "baddbmm": lambda n: _mm(n, 1, 2),
        "mv": lambda n: _mm(n, 0, 1),
        "dot": lambda n: _mm(n, 0, 1),
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
    }
    for kernel in ("flash", "efficient", "cudnn"):
        forms[f"_scaled_dot_product_{kernel}_attention"] = lambda n: _attention(n, 0, backward=False)
        forms[f"_scaled_dot_product_{kernel}_attention_backward"] = lambda n: _attention(n, 1, backward=True)
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"):
        forms[name] = lambda n: _attention(n, 0, backward=False)
        forms[f"{name}_backward"] = lambda n: _attention(n, 1, backward=True)
    forms["scaled_dot_product_attention"] = lambda n: _attention(n, 0, backward=False)
    return forms


_FORMULAS = _forms()


def _chains(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Fusable neighbours that can run at the same time, each with its chain in graph order."""
    when = _depths(nodes)
    leader = {node: node for node in nodes if is_fusable(node)}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            node = leader[node]
        return node

    for node in leader:
        for source in _sources(node):
            if source in leader and when[source] == when[node]:
                leader[find(node)] = find(source)
    chains: dict[fx.Node, list[fx.Node]] = {}
    for node in leader:
        chains.setdefault(find(node), []).append(node)
    return {node: chain for chain in chains.values() for node in chain}


def _depths(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[str, int]]:
    """(phase, heavy ops behind) of every node; two fusable neighbours that agree can share a kernel.

    A fusable node with fusable users only is put off to the first of them, as a compiler would.
    """
    behind: dict[fx.Node, int] = {}
    for node in nodes:
        steps = [behind.get(a, 0) + (not is_free(a) and not is_fusable(a)) for a in node.all_input_nodes]
        behind[node] = max(steps, default=0)
    for node in reversed(nodes):
        users = list(_final_users(node)) if is_fusable(node) else []
        if users and all(is_fusable(u) and _phase(u) is _phase(node) for u in users):
            behind[node] = max(behind[node], min(behind.get(u, 0) for u in users))
    return {node: (_phase(node).value, depth) for node, depth in behind.items()}


def _phase(node: fx.Node) -> Phase:
    return node.meta.get("phase", Phase.FORWARD)  # type: ignore[no-any-return]


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Inputs of ``node``, seen through views."""
    for source in node.all_input_nodes:
        current = source
        while is_free(current) and current.all_input_nodes:
            current = current.all_input_nodes[0]
        yield current


def _chain_op(chain: Sequence[fx.Node]) -> Op:
    """One kernel for a chain: what it reads from outside, each once, and what is used outside."""
    inside = set(chain)
    read = {s: None for node in chain for s in _sources(node) if s not in inside}
    written = [node for node in chain if any(u not in inside for u in _final_users(node))]
    moved = sum(_read_bytes(s) for s in read) + sum(tensor_bytes(t) for n in written for t in tensors(n.meta["val"]))
    flops = sum(t.numel() for n in chain for t in tensors(n.meta["val"])[:1])
    dtype = tensors(chain[-1].meta["val"])[0].dtype
    return Op(
        name="+".join(dict.fromkeys(op_name(n) for n in chain)),
        kind=OpKind.MEMORY,
        shapes=tuple(tuple(t.shape) for n in written for t in tensors(n.meta["val"])),
        dtype=dtype_name(dtype),
        flops=float(flops),
        bytes=float(moved),
        layer=chain[0].meta.get("layer", ""),
    )


def _read_bytes(node: fx.Node) -> int:
    return sum(tensor_bytes(t) for t in tensors(node.meta.get("val"))[:1])


def _final_users(node: fx.Node) -> Iterator[fx.Node]:
    """Users of ``node``, seen through views."""
    for user in node.users:
        if user.op == "call_function" and is_free(user) and user.users:
            yield from _final_users(user)
        else:
            yield user


def base_of(node: fx.Node) -> fx.Node:
    """The node whose storage ``node`` looks at: itself, or what it is a view of."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether the node's value shares the storage of its first input."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return op_name(node) in _FREE and not op_name(node).startswith(("empty", "new_empty"))


def saved(graph: fx.Graph, *, fused: bool = False) -> dict[fx.Node, int]:
    """Forward values that the backward reads, with their bytes; inputs of the graph are not among them.

    Args:
        graph: joint forward and backward.
        fused: leave out element-wise results that only element-wise backwards read and that other kept values
            determine: a fused backward kernel computes them again.
    """
    kept: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if _phase(node) is not Phase.BACKWARD or node.op in ("placeholder", "output"):
            continue
        for source in node.all_input_nodes:
            base = base_of(source)
            if _phase(base) is Phase.FORWARD and base.op != "placeholder":
                kept[base] = sum(tensor_bytes(t) for t in tensors(base.meta.get("val")))
    return {n: size for n, size in kept.items() if not (fused and _recomputable(n, kept))}


def _recomputable(node: fx.Node, kept: Mapping[fx.Node, int]) -> bool:
    users = [u for u in _final_users(node) if _phase(u) is Phase.BACKWARD and u.op != "output"]
    pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    known = all(s in kept or s.op == "placeholder" for s in (base_of(a) for a in node.all_input_nodes))
    return pointwise and known and all(is_fusable(u) for u in users)


def buffers(
    graph: fx.Graph, *, input_kinds: Mapping[str, str] | None = None, gradients: Collection[fx.Node] = ()
) -> list[Buffer]:
    """Every storage of a program with its life, in the order of the nodes.

    Args:
        graph: flat graph; inputs live throughout, outputs until the end.
        input_kinds: placeholder name to kind (``parameter``, ``input``...); ``input`` where absent.
        gradients: outputs that are gradients of parameters.

    Returns:
        One buffer a storage.
    """
    order = list(graph.nodes)
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        for source in node.all_input_nodes:
            last[base_of(source)] = i
    end = len(order)
    kinds = input_kinds or {}
    bases = {base_of(g) for g in gradients}
    out = []
    for i, node in enumerate(order):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or is_view(node) or node.op == "output":
            continue  # The items of an op with several results are storages of their own.
        is_input = node.op == "placeholder"
        dies = end if is_input else last.get(node, i)
        crosses = dies < end and _phase(order[dies]) is not _phase(node)
        kind = kinds.get(node.name, "input") if is_input else "activation" if crosses else "temporary"
        kind = "gradient" if node in bases else kind
        out.append(
            Buffer(
                name=node.name,
                bytes=float(tensor_bytes(value)),
                born=0 if is_input else i,
                dies=dies,
                layer=str(node.meta.get("layer", "")),
                kind=kind,
            )
        )
    return out
