"""Threads that run reads in the order of their urgency: what is waited for first, what may be needed later after it."""

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

# Ranks in the queue; the last stops a thread before anything else is begun.
AHEAD, DEMAND, STOP = 2, 1, 0


class ReadThreads:
    """A thread pool with two ranks of jobs, `DEMAND` before `AHEAD`, and order of submission within each.

    concurrent.futures has no ranks; its futures are used here, so a job that no thread has begun can be cancelled. The
    threads are daemons and know the queue only: an owner that was never closed neither stays alive nor holds up the end
    of the process.
    """

    def __init__(self, count: int, name: str = "read"):
        self._jobs: queue.PriorityQueue = queue.PriorityQueue()
        self._number = itertools.count()
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, rank: int, future: Future, job: Callable[[], None]) -> None:
        """Has `job` run by one of the threads; the new `future` ends with its result or exception."""
        self._jobs.put((rank, next(self._number), future, job))
        if not self._threads:
            self._cancel_rest()

    def close(self) -> None:
        """Ends the threads, each after the job it is at; other jobs, later ones too, are cancelled. May be repeated."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put((STOP, next(self._number), None, None))
        for thread in threads:
            thread.join()
        self._cancel_rest()

    def _cancel_rest(self) -> None:
        while True:
            try:
                future = self._jobs.get_nowait()[2]
            except queue.Empty:
                return
            if future is not None:
                future.cancel()
                future.set_running_or_notify_cancel()  # wakes who waits for it


def _work(jobs: queue.PriorityQueue) -> None:
    while True:
        rank, _, future, job = jobs.get()
        if rank == STOP:
            return
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # for whoever waits for the future
                future.set_exception(error)
        del future, job  # a job holds its rows: not while this thread waits for the next
