"""Hand units to an executor, and take what comes of each as soon as it is there."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool

from ..errors import InputError
from ..messages import printable
from .measuring import Outcome
from .worker import Job, Setup, measure

_TRIES = 3  # of a unit whose worker dies
_KILLED = "it was killed, as by a system without memory left, or crashed in compiled code"


def run(executor: Executor, setup: Setup, jobs: Iterable[Job], take: Callable[[Job, Outcome], None]) -> None:
    """Measure all jobs.

    As many units are with the executor as it has workers, so that few are lost with it.

    Args:
        executor: see :mod:`.executors`.
        setup: what is the same for all jobs.
        jobs: what is to be measured.
        take: called with each job and its outcome, one after the other, in the order in which they end.

    Raises:
        InputError: the model or data cannot be made, or the executor is broken for good.
        KeyboardInterrupt: what had ended is taken before.
    """
    window = int(getattr(executor, "workers", None) or getattr(executor, "_max_workers", None) or 1)
    waiting, deaths = deque(jobs), Counter[int]()
    pending: dict[Future[Outcome], Job] = {}
    try:
        while waiting or pending:
            while waiting and len(pending) < window:
                job = waiting.popleft()
                pending[_submitted(executor, setup, job)] = job
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                job = pending.pop(future)
                if not isinstance(future.exception(), BrokenExecutor):
                    take(job, future.result())
                    continue
                deaths[id(job)] += 1
                if deaths[id(job)] < _TRIES:
                    waiting.append(job)
                else:
                    take(job, Outcome.failed(job.unit, _died(future.exception())))
    except KeyboardInterrupt:
        for future, job in pending.items():
            if future.done() and future.exception() is None:
                take(job, future.result())
        raise


def _died(error: BaseException | None) -> str:
    why = _KILLED if isinstance(error, BrokenProcessPool) else printable(str(error))
    return f"the worker died {_TRIES} times in this unit: {why}"


def _submitted(executor: Executor, setup: Setup, job: Job) -> "Future[Outcome]":
    try:
        return executor.submit(measure, setup, job)
    except BrokenExecutor as error:
        raise InputError(f"executor: it is broken and takes no more units ({error}); what was done is kept") from error
