"""Functions in processes of their own: kernels that trust the shapes they are given may bring a process down."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


class DiedError(Exception):
    """The process ended without a result."""


def apart(function: Callable[[], T]) -> T:
    """The result of a function, run in a copy of this process.

    Raises:
        DiedError: the process ended before it had one.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(function, sender))
    child.start()
    sender.close()
    try:
        result: T = receiver.recv()
    except EOFError:
        child.join()
        raise DiedError(f"the process ended with {child.exitcode}") from None
    child.join()
    return result


def _send(function: Callable[[], object], sender: Connection) -> None:
    sender.send(function())
