"""A pool of gloo processes: started once for each number of ranks, because importing torch takes seconds."""

import contextlib
import importlib.util
import multiprocessing
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import pytest

LIMIT_S = 120


def load(path):
    """The module in the file ``path``, imported once a process."""
    name = f"_pool_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def serve(rank, world_size, store, pipe):
    """A rank: run the functions that come through the pipe."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=LIMIT_S / 4)
    )
    while (task := pipe.recv()) is not None:
        path, name, args = task
        torch.manual_seed(0)
        try:
            result = (True, getattr(load(path), name)(*args))
        except BaseException:  # noqa: BLE001 - told to the test
            result = (False, traceback.format_exc())
        pipe.send(result)
    dist.destroy_process_group()


class Ranks:
    """Processes that form one world."""

    def __init__(self, world_size, folder):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        store = Path(tempfile.mkdtemp(dir=folder)) / "store"
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, world_size, store, theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, function, args):
        """Run ``function(*args)`` on every rank; returns the results by rank."""
        for pipe in self.pipes:
            pipe.send((function.__code__.co_filename, function.__name__, args))
        outcomes = []
        for rank, pipe in enumerate(self.pipes):
            try:
                outcomes.append(pipe.recv() if pipe.poll(LIMIT_S) else (False, f"no answer within {LIMIT_S} s"))
            except EOFError:
                outcomes.append((False, f"rank {rank} died"))
        if all(good for good, _ in outcomes):
            return [value for _, value in outcomes]
        self.stop(kill=True)
        bad = [f"rank {rank}: {value}" for rank, (good, value) in enumerate(outcomes) if not good]
        raise AssertionError("\n".join(bad))

    def stop(self, *, kill=False):
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if kill:
                process.kill()
            else:
                with contextlib.suppress(OSError):
                    pipe.send(None)
        for process in self.processes:
            process.join(10)
        self.pipes = []


@pytest.fixture(scope="session")
def _pools(tmp_path_factory):
    pools = {}
    yield pools, tmp_path_factory.mktemp("stores")
    for pool in pools.values():
        if pool.pipes:
            pool.stop()


@pytest.fixture
def ranks(_pools):
    """``ranks(2, function, *args)`` runs a function of the test's file on every rank and returns the results."""
    pools, folder = _pools

    def run(world_size, function, *args):
        if world_size not in pools or not pools[world_size].pipes:
            pools[world_size] = Ranks(world_size, folder)
        return pools[world_size].run(function, args)

    return run


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.distributed)
