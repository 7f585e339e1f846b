"""Calls that do not depend on each other, by whatever joblib is set to: threads, processes, or a cluster.

    threading   threads of this process              loky   processes of this machine
    dask        a ``distributed.Client``             ray    a cluster of Ray

Dask's client is asked for calls itself: joblib waits for ever for one that no worker of Dask survives, and for a result
that Dask cannot write. A backend that hands over all results at the end (Ray's) gets the calls in portions, so that
progress is seen, what was finished is kept, and results are the same in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from typing import Any, Literal

from quark.errors import ConfigError, QuarkError, check_name

BACKENDS = ("threading", "loky", "dask", "ray")
MOST = 1024  # workers; each is a thread or a process of this machine or of a cluster
SECONDS = 10  # that Dask's scheduler has for a first worker to come
LOST = ("TerminatedWorkerError", "KilledWorker", "FutureCancelledError", "WorkerCrashedError")  # loky, Dask twice, Ray
PORTION = 2  # calls per worker that are handed to a backend which returns them together
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # what ``joblib.delayed(function)(...)`` makes


_BEFORE: dict[Callable[..., Any], tuple[Any, ...]] = {}


@contextmanager
def before_calls(function: Callable[..., Any], *positional: Any) -> Iterator[None]:
    """Meanwhile every process that is not this one calls ``function`` before each call of ``results``."""
    _BEFORE[function] = positional
    try:
        yield
    finally:
        del _BEFORE[function]


class _Sealed:
    """A call or what it returned, in one piece: Dask takes lists apart, and writes no tensors of bfloat16."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _elsewhere(before: Mapping[Callable[..., Any], tuple[Any, ...]], call: Call) -> _Sealed:
    """A call in a process of its own."""
    for function, positional in before.items():
        function(*positional)
    function, positional, named = call
    return _Sealed(function(*positional, **named))


def _opened_elsewhere(call: _Sealed) -> _Sealed:
    return _elsewhere(*call.value)


def delayed(function: Callable[..., Any], *positional: Any) -> Call:
    """A call for ``results``, written down."""
    return function, positional, {}


def results(
    calls: Iterable[Call],
    workers: int | None,
    prefer: Literal["threads", "processes"] | None = None,
    ordered: bool = True,
    ahead: int | str = "2 * n_jobs",
) -> Iterator[Any]:
    """What the calls return.

    Args:
        calls: read as they are needed.
        workers: how many run at once; None: as joblib's ``parallel_config`` says.
        prefer: where joblib is set to nothing.
        ordered: in the order of the calls; else as they are done, where the backend tells that.
        ahead: calls that are read before they are needed.

    Raises:
        ConfigError: more workers than are taken, or a scheduler without any.
        QuarkError: a worker was killed.
    """
    if workers is not None and workers > MOST:
        raise ConfigError(f"workers is {workers}; at most {MOST} are taken")
    try:
        yield from _results(calls, workers, prefer, ordered, ahead)
    except Exception as error:
        if type(error).__name__ not in LOST:
            raise
        reason = " ".join(str(error).split())
        raise QuarkError(
            f"a worker was killed at its work, mostly for want of memory: let fewer work at once, or give each more; "
            f"what is finished is kept where the job can go on ({reason:.200})"
        ) from error


def _results(
    calls: Iterable[Call],
    workers: int | None,
    prefer: Literal["threads", "processes"] | None,
    ordered: bool,
    ahead: int | str,
) -> Iterator[Any]:
    import joblib

    backend, _ = joblib.parallel.get_active_backend(prefer=prefer)
    client = _client_of(backend)
    if client is not None:
        yield from _by_dask(client, calls, ordered, ahead if isinstance(ahead, int) else 2 * _threads_of(client))
        return
    if not getattr(backend, "supports_sharedmem", False):
        calls = (delayed(_elsewhere, dict(_BEFORE), call) for call in calls)
    streams = bool(getattr(backend, "supports_return_generator", False))
    kind = "list" if not streams else "generator" if ordered else "generator_unordered"
    parallel = joblib.Parallel(workers, prefer=prefer, return_as=kind, pre_dispatch=ahead, batch_size=1)
    if streams:
        yield from map(_opened, parallel(calls))
        return
    waiting, size = iter(calls), PORTION * max(1, joblib.effective_n_jobs(workers))
    while portion := list(islice(waiting, size)):
        yield from map(_opened, parallel(portion))


def _client_of(backend: Any) -> Any:
    """Dask's client that a backend of joblib works with; None: it is another backend."""
    return backend.client if type(backend).__name__ == "DaskDistributedBackend" else None


def _threads_of(client: Any) -> int:
    """How many calls Dask's workers make at once.

    Raises:
        ConfigError: there is no worker, nor comes one.
    """
    try:
        client.wait_for_workers(1, timeout=SECONDS)
    except TimeoutError as error:
        address = client.scheduler.address
        raise ConfigError(
            f"Dask's scheduler at {address} has no worker: start some, `dask worker {address}`"
        ) from error
    return sum(client.nthreads().values())


def _by_dask(client: Any, calls: Iterable[Call], ordered: bool, most: int) -> Iterator[Any]:
    """``results`` of Dask's workers, of which ``most`` are asked for before they are needed."""
    distributed, left = import_module("distributed"), iter(calls)

    def asked(count: int) -> list[Any]:
        sent = (client.scatter(_Sealed((dict(_BEFORE), call)), hash=False) for call in islice(left, count))
        return [client.submit(_opened_elsewhere, data, pure=False) for data in sent]

    waiting = asked(most)
    try:
        while waiting:
            done = waiting[0] if ordered else distributed.wait(waiting, return_when="FIRST_COMPLETED").done.pop()
            found = done.result().value
            waiting.remove(done)
            waiting.extend(asked(1))
            yield found
    finally:
        client.cancel(waiting)


def _opened(found: Any) -> Any:
    return found.value if isinstance(found, _Sealed) else found


def in_threads(calls: Iterable[Call], workers: int) -> Iterator[Any]:
    """The same in order, by threads where joblib is set to nothing; one worker calls them here, one by one."""
    if workers == 1 and is_serial():
        return (function(*positional, **named) for function, positional, named in calls)
    return results(calls, workers, "threads")


def count(workers: int | None, prefer: Literal["threads", "processes"]) -> int:
    """How many workers ``results`` has; ``prefer``: where joblib is set to nothing."""
    import joblib

    backend, set_to = joblib.parallel.get_active_backend(prefer=prefer)
    client = _client_of(backend)
    if client is not None:
        return workers or _threads_of(client)
    return max(1, backend.effective_n_jobs(n_jobs=set_to if workers is None else workers))


def shares_memory(prefer: Literal["threads", "processes"] = "threads") -> bool:
    """Whether the workers of joblib are threads of this process; ``prefer``: where joblib is set to nothing."""
    import joblib

    backend, _ = joblib.parallel.get_active_backend(prefer=prefer)
    return bool(getattr(backend, "supports_sharedmem", False))


def is_serial() -> bool:
    """Whether nobody has set joblib to more than one worker."""
    import joblib

    return joblib.parallel.get_active_backend(prefer="threads")[1] in (None, 1)


def _connect_to_dask() -> None:
    """The scheduler that this process or else the environment names, or a cluster made here.

    Raises:
        ConfigError: workers with several threads, which would change one model at the same time.
    """
    address, distributed = os.environ.get("DASK_SCHEDULER_ADDRESS"), import_module("distributed")
    try:
        client = distributed.default_client()
    except ValueError:  # none is connected
        client = distributed.Client(address) if address else distributed.Client(threads_per_worker=1)
    if max(client.nthreads().values(), default=1) > 1:
        raise ConfigError(f"--backend dask: workers of {address!r} have several threads: start them with --nthreads 1")


def choose_backend(name: str) -> None:
    """Set joblib for this process, and connect to a cluster: the one that the environment names, or one made here.

    Raises:
        ConfigError: an unknown backend, or a library that is not installed.
    """
    import joblib

    check_name("--backend", name, BACKENDS)
    try:
        if name == "ray":
            import_module("ray.util.joblib").register_ray()
        if name == "dask":
            _connect_to_dask()
    except ImportError as error:
        package = {"ray": "ray", "dask": "distributed"}[name]
        raise ConfigError(f"--backend {name} needs the package {package!r}, which is not installed here") from error
    joblib.parallel_config(backend=name)
