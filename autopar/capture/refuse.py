"""What cannot be captured, said in one line: what happened, on which line of the user's code, and the way out."""

from __future__ import annotations

import linecache
import traceback
from types import TracebackType

from autopar.capture.labels import describe_line, is_internal
from autopar.cost_models.errors import CaptureError
from autopar.torch_private import DataDependentOutputException, DynamicOutputShapeException

VALUE_ADVICE = (
    "use torch.where on the tensors, keep the number as a tensor, or compute it outside the model and pass it in"
)
SHAPE_ADVICE = (
    "use torch.where, masked_fill or ignore_index with a fixed shape, or compute the indices outside the model and "
    "pass them in"
)
LOCAL_ADVICE = "write the model for one device on the global batch and leave communication to autopar"
HIGHER_ADVICE = "compute both sides and choose with torch.where, or decide outside the model"


def refusal(error: Exception, layer: str) -> CaptureError:
    """The CaptureError that says why the model could not be traced.

    Args:
        error: what was raised while the model, its loss or their backward was traced.
        layer: path of the module that raised, where known.
    """
    if isinstance(error, CaptureError):
        return error
    where, code, expression = _user_line(error.__traceback__)
    at = (f" in layer {layer}" if layer else "") + (f" at {where}: `{code}`" if where else "")
    part = f" (expression `{expression}`)" if expression and expression != code else ""
    if isinstance(error, DataDependentOutputException):
        return CaptureError(
            f"a Python value depends on tensor data{at}{part}: while capturing, tensors have no data; {VALUE_ADVICE}"
        )
    if isinstance(error, DynamicOutputShapeException):
        return CaptureError(f"a shape depends on tensor data ({error.func}){at}{part}: {SHAPE_ADVICE}")
    frames = traceback.extract_tb(error.__traceback__)
    if any("/torch/_higher_order_ops/" in frame.filename for frame in frames):
        return CaptureError(f"control-flow operators (torch.cond, ...) are not captured{at}{part}: {HIGHER_ADVICE}")
    if any("/torch/distributed/" in frame.filename for frame in frames):
        return CaptureError(f"the model communicates by itself{at}{part} ({error}): {LOCAL_ADVICE}")
    message = f"the model raised {type(error).__name__} while it was captured{at}: {error}"
    if "device" in message and "meta" in message:
        message += "; a tensor attribute that is not a registered buffer is on meta: register it as a buffer"
    return CaptureError(message)


def _user_line(trace: TracebackType | None) -> tuple[str, str, str]:
    """("folder/file.py:12", code, expression) of the innermost frame of the user's code, or empty strings."""
    for frame in reversed(traceback.extract_tb(trace)):
        if is_internal(frame.filename):
            continue
        line = frame.lineno or 0
        where, _, code = describe_line(frame.filename, line).partition(": ")
        return where, code, _expression(frame)
    return "", "", ""


def _expression(frame: traceback.FrameSummary) -> str:
    """The part of the line that was being evaluated, where it lies on one line."""
    if frame.lineno is None or frame.lineno != frame.end_lineno or frame.colno is None:
        return ""
    encoded = linecache.getline(frame.filename, frame.lineno).encode()
    return encoded[frame.colno : frame.end_colno].decode(errors="replace").strip()
