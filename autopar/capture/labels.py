"""Which module and which line of the user's code every traced node comes from."""

from __future__ import annotations

import contextlib
import linecache
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.torch_private import annotate, checkpoint_regions

TORCH_FOLDER = str(pathlib.Path(torch.__file__).parent)
CAPTURE_FOLDER = str(pathlib.Path(__file__).parent)
PRIVATE_FILE = str(pathlib.Path(__file__).parent.parent / "torch_private.py")


class Labels:
    """Annotates a trace with layers, checkpoint regions and source lines.

    Attributes:
        called: layer paths in the order in which their modules first ran.
        checkpoints: paths of the layers that ran directly inside a checkpoint block, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        """Name the modules of ``model``; a module with several names keeps the first."""
        self._model = model
        self.called: dict[str, None] = {}
        self.checkpoints: dict[str, None] = {}
        self._open: list[contextlib.ExitStack] = []
        self._num_regions = 0
        self._direct = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Label everything that runs inside; code outside any module is labelled with the empty path."""
        self._num_regions = 0
        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with checkpoint_regions(self._region), annotate({"layer": ""}), SourceLines():
                yield
        finally:
            for handle in handles:
                handle.remove()
            while self._open:
                self._open.pop().close()

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.called.setdefault(name)
            if self._direct:
                self.checkpoints.setdefault(name)
            stack = contextlib.ExitStack()
            stack.enter_context(annotate({"layer": name}))
            direct, self._direct = self._direct, False
            stack.callback(setattr, self, "_direct", direct)
            self._open.append(stack)

        return hook

    def _leave(self, *_: Any) -> None:
        self._open.pop().close()

    @contextlib.contextmanager
    def _region(self) -> Iterator[None]:
        """A checkpoint block: its nodes carry the block's number, its directly called layers are remembered."""
        number = self._num_regions
        self._num_regions += 1
        direct, self._direct = self._direct, True
        try:
            with annotate({"checkpoint": number}):
                yield
        finally:
            self._direct = direct


class SourceLines(TorchFunctionMode):
    """Annotates the nodes of every torch call with the innermost line outside torch that led to it."""

    def __init__(self) -> None:
        """Start with an empty cache of lines."""
        super().__init__()
        self._lines: dict[tuple[str, int], str] = {}
        self._inside_torch: dict[str, bool] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` under an annotation with its source line."""
        with annotate({"source": self._source(sys._getframe(1))}):
            return func(*args, **(kwargs or {}))

    def _source(self, frame: FrameType | None) -> str:
        while frame is not None:
            file = frame.f_code.co_filename
            internal = self._inside_torch.get(file)
            if internal is None:
                internal = self._inside_torch[file] = is_torch_file(file)
            if not internal:
                if is_capture_file(file):
                    return ""
                key = (file, frame.f_lineno)
                if key not in self._lines:
                    self._lines[key] = describe_line(*key)
                return self._lines[key]
            frame = frame.f_back
        return ""


def is_torch_file(file: str) -> bool:
    """Whether a frame of ``file`` belongs to torch or to the interpreter's own machinery."""
    return file.startswith((TORCH_FOLDER, "<frozen")) or file.endswith(("/contextlib.py", "/functools.py"))


def is_capture_file(file: str) -> bool:
    """Whether a frame of ``file`` belongs to capture itself."""
    return file.startswith(CAPTURE_FOLDER) or file == PRIVATE_FILE


def describe_line(file: str, line: int) -> str:
    """"folder/file.py:12: code" of a line.

    >>> describe_line("/a/b/c.py", 3)
    'b/c.py:3: '
    """
    return f"{'/'.join(pathlib.PurePath(file).parts[-2:])}:{line}: {linecache.getline(file, line).strip()}"
