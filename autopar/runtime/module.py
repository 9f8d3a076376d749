"""The module that ``autopar.compile`` returns: called and trained like the original, run by the engine."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autopar.cost_models.errors import RuntimeStateError
from autopar.passes.base import Program
from autopar.plan import Plan
from autopar.report.dump import dump
from autopar.runtime.engine import Engine
from autopar.runtime.hooks import close_hooks
from autopar.runtime.initialise import initialise
from autopar.runtime.loader import ShardedLoader
from autopar.runtime.optimizers import adopt, refuse_stale

METADATA = "_metadata"  # where a state dict keeps the versions of its modules


class ParallelModule(nn.Module):
    """A compiled module.

    It holds the parameters, buffers and submodules of the original under the same names, and reads and sets its other
    attributes.  Calling it with gradients enabled runs the whole training step; ``backward`` on the loss it returns
    hands out the gradients, without communication.

    Made by :func:`autopar.compile`.
    """

    def __init__(self, original: nn.Module, engine: Engine) -> None:
        super().__init__()
        own = self.__dict__
        own["_original"], own["_engine"] = original, engine
        for table in ("_parameters", "_buffers", "_modules"):
            own[table] = original.__dict__[table]

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]) -> None:
        """Make the first program, lay the model out, and give its optimizers the parameters that were made for it."""
        pairs = self.engine.prepare(args, kwargs, targets)
        parameters = [(old, new) for old, new in pairs if isinstance(old, nn.Parameter)]
        adopt(parameters, self.engine.state.laid_out_like)
        weakref.finalize(self, refuse_stale(parameters).remove)
        close_hooks(self._original)

    # as the original ------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, targets: Sequence[Any] = (), **kwargs: Any) -> Any:  # noqa: ANN401 - as the original's
        """Run one step (or, without gradients, one forward pass) and return what the original returns.

        Args:
            args: as the original's.
            targets: further arguments of ``loss_fn``.
            kwargs: as the original's.
        """
        return self.engine(args, kwargs, targets)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        original = self.__dict__.get("_original")
        return True if original is None else bool(original.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original" in self.__dict__:
            self._original.training = mode

    def train(self, mode: bool = True) -> ParallelModule:  # noqa: FBT001, FBT002 - torch's signature
        """Set training mode, as the original does it."""
        self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
        """The original's state dict: its keys, and DTensors where there are several ranks.  Communicates nothing."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002
        """Load whole tensors (the same on every rank) or DTensors.

        Raises:
            RuntimeStateError: ``assign=True``: the tensors of a compiled module stay where they are.
        """
        if assign:
            raise RuntimeStateError("load_state_dict(assign=True) would replace the compiled tensors; use assign=False")
        state = self.engine.state
        elsewhere = {name for e in state.stored if not e.present for name in e.names}
        ready = OrderedDict((n, self._laid_out(n, value)) for n, value in state_dict.items() if n not in elsewhere)
        setattr(ready, METADATA, getattr(state_dict, METADATA, None))
        report = self._original.load_state_dict(ready, strict=strict)
        state.loaded(ready.keys())
        return report

    def _laid_out(self, name: str, value: Any) -> Any:  # noqa: ANN401 - tensors and extra state
        state = self.engine.state
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if not plain or name not in state or value.shape != state[name].tensor.shape:
            return value
        return state.laid_out_like(state[name].tensor, value)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ParallelModule:  # noqa: FBT001, FBT002
        for entry in self.engine.state.stored:
            here = entry.local()
            there = fn(here)
            if there.device != here.device or there.dtype != here.dtype:
                raise RuntimeStateError(
                    f"{entry.name} is {here.dtype} on {here.device} and would become {there.dtype} on {there.device}: "
                    "convert and move the model before autopar.compile"
                )
        return self

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the original has
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - whatever the original takes
        if isinstance(value, nn.Parameter | nn.Module):
            raise RuntimeStateError(
                f"{name} cannot be set to a {type(value).__name__}: the structure of a compiled module is fixed; "
                "change the model before autopar.compile"
            )
        if "_original" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - a container's key
        """A layer of the original, where that is a container such as ``nn.Sequential``."""
        return self._original[key]

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._original)})

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        raise RuntimeStateError(
            "a compiled module cannot be copied: copy the original before autopar.compile and compile the copy as well"
        )

    def extra_repr(self) -> str:
        """The original's class and how it is split."""
        plan = self.plan
        return f"{type(self._original).__name__}, dp={plan.dp}, tp={plan.tp}, pp={plan.pp}, zero={plan.zero}"

    @property
    def original(self) -> nn.Module:
        """The module as the user wrote it, holding the compiled parameters."""
        original: nn.Module = self.__dict__["_original"]
        return original

    @property
    def engine(self) -> Engine:
        """What serves the calls; for autopar's own functions."""
        engine: Engine = self.__dict__["_engine"]
        return engine

    # beyond the original --------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """How the step is split."""
        plan: Plan | None = self.engine.plan
        if plan is None:
            raise RuntimeStateError("the module was not compiled yet")
        return plan

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph of :attr:`program`; groups go by the names of the mesh axes."""
        return self.program.graph_module

    @property
    def program(self) -> Program:
        """This rank's program for the latest kind of call."""
        last = self.engine.last
        if last is None:
            raise RuntimeStateError("the module was not compiled yet")
        program: Program = last.runner.compiled
        return program

    def dump(self, format: str = "text", *, layer: str | None = None, only: str | None = None) -> str:
        """This rank's program for the latest kind of call, for people and machines.

        Args:
            format: "text" (readable Python), "json", "dot" or "svg".
            layer: pattern of layer names, or None for all.
            only: "collectives", "parameters", "buffers", "inputs", "gradients" or "computation", or None for all.
        """
        return dump(self.program, format, layer=layer, only=only)

    def shard(self, loader: Iterable[Any]) -> ShardedLoader:
        """Let every rank keep its rows of the global batches that ``loader`` gives.

        Args:
            loader: a DataLoader (its rows are then loaded where they are needed) or another iterable of global batches,
                the same on every rank.

        Returns:
            an iterable of the same batches with DTensors in place of tensors, which the module takes as inputs.
        """
        return ShardedLoader(loader, self.engine.world, self.engine.groups)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """For loops written for DistributedDataParallel; it changes nothing.

        ``backward`` never communicates: the call itself reduces its gradients, so that those that accumulate in
        ``.grad`` are exact at any moment.  To reduce less often, let the module accumulate
        (``Constraints(microbatches=...)``) instead of calling it several times a step.
        """
        yield

    def init_weights(self, seed: int) -> None:
        """Initialise every parameter and buffer as the layers themselves do, from one seed.

        Needed for models built on meta.  The values do not depend on the number of ranks or the plan.

        Args:
            seed: start of the random numbers.

        Raises:
            RuntimeStateError: a tensor belongs to a layer that does not know how to initialise it.
        """
        engine = self.engine
        with torch.no_grad():
            initialise(self._original, engine.state, engine.world, seed)
