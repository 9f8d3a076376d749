"""Which module and which line of the user's code every traced node comes from."""

from __future__ import annotations

import contextlib
import linecache
import pathlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.cost_models.errors import CaptureError
from autopar.torch_private import annotate, checkpoint_regions

HERE = pathlib.Path(__file__).parent
TRACE_FILE = str(HERE / "trace.py")
_T = TypeVar("_T")
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
INTERNAL = (str(pathlib.Path(torch.__file__).parent), str(HERE), str(HERE.parent / "torch_private.py"), "<frozen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One checkpoint block: the layer that opened it and the layers that ran directly inside it."""

    owner: str
    layers: list[str] = field(default_factory=list)


class Labels:
    """Annotates a trace with layers, checkpoint regions and source lines.

    Attributes:
        called: layer paths in the order in which their modules first ran.
        failed_in: path of the layer that raised, if one did.
        regions: the checkpoint blocks, in order; nodes carry a block's position.
    """

    def __init__(self, model: nn.Module) -> None:
        """Name the modules of ``model``; a module with several names keeps the first."""
        self._model = model
        self.called: dict[str, None] = {}
        self.failed_in = ""
        self.regions: list[Region] = []
        self._open: list[contextlib.ExitStack] = []
        self._running = [""]
        self._region_of: list[int | None] = [None]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Label everything that runs inside; code outside any module is labelled with the empty path."""
        self.regions.clear()
        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            handles.append(module.register_forward_hook(self._leave(name)))
        try:
            with checkpoint_regions(self._region), annotate({"layer": ""}), SourceLines():
                yield
        except BaseException:
            self.failed_in = self._running[-1]
            raise
        finally:
            for handle in handles:
                handle.remove()
            while self._open:
                self._open.pop().close()
            del self._running[1:]

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self.called.setdefault(name)
            region = self._region_of[-1]
            if region is not None:
                self.regions[region].layers.append(name)
            stack = contextlib.ExitStack()
            stack.enter_context(annotate({"layer": name}))
            self._running.append(name)
            stack.enter_context(_pushed(self._region_of, None))
            self._open.append(stack)

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            # A layer that raised is still open: torch runs no hooks after an error while it compiles.
            while self._running.pop() != name:
                self._open.pop().close()
            self._open.pop().close()

        return hook

    @contextlib.contextmanager
    def _region(self) -> Iterator[None]:
        """A checkpoint block: its nodes carry the block's number."""
        number = len(self.regions)
        self.regions.append(Region(owner=self._running[-1]))
        with annotate({"checkpoint": number}), _pushed(self._region_of, number):
            yield


@contextlib.contextmanager
def _pushed(stack: list[_T], item: _T) -> Iterator[None]:
    """``item`` on top of ``stack`` while the context lasts."""
    stack.append(item)
    try:
        yield
    finally:
        stack.pop()


class SourceLines(TorchFunctionMode):
    """Annotates the nodes of every torch call with the innermost line outside torch that led to it.

    Refuses calls that would differentiate with respect to a tensor that is not an input of the trace: its gradient
    would be lost.
    """

    def __init__(self) -> None:
        """Start with an empty cache of lines."""
        super().__init__()
        self._lines: dict[tuple[str, int], str] = {}
        self._internal: dict[str, bool] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run ``func`` under an annotation with its source line."""
        kwargs = kwargs or {}
        source = self._source(sys._getframe(1))
        with annotate({"source": source}):
            out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.requires_grad:
            for value in (*args, *kwargs.values()):
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    if type(item) in (torch.Tensor, nn.Parameter) and item.requires_grad and item is not out:
                        raise _foreign(item, source)
        return out

    def _source(self, frame: FrameType | None) -> str:
        while frame is not None:
            file = frame.f_code.co_filename
            internal = self._internal.get(file)
            if internal is None:
                internal = self._internal[file] = file != TRACE_FILE and is_internal(file)
            if not internal:
                if file == TRACE_FILE:
                    return ""
                key = (file, frame.f_lineno)
                if key not in self._lines:
                    self._lines[key] = describe_line(*key)
                return self._lines[key]
            frame = frame.f_back
        return ""


def _foreign(tensor: torch.Tensor, source: str) -> CaptureError:
    """The refusal of a tensor that needs a gradient and is not part of the model."""
    return CaptureError(
        f"a tensor of shape {tuple(tensor.shape)} used at {source} requires grad and is not part of the model: "
        "register it as a parameter of it (if it belongs to loss_fn, make loss_fn's module a submodule of the model)"
    )


def is_internal(file: str) -> bool:
    """Whether a frame of ``file`` belongs to torch, to capture or to Python and its standard library."""
    return file.startswith(INTERNAL) or (file.startswith(STANDARD_LIBRARY) and "site-packages" not in file)


def describe_line(file: str, line: int) -> str:
    """Folder, file, number and code of a line.

    >>> describe_line("/a/b/c.py", 3)
    'b/c.py:3: '
    """
    return f"{'/'.join(pathlib.PurePath(file).parts[-2:])}:{line}: {linecache.getline(file, line).strip()}"
