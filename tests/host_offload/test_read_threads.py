"""Threads that read: the urgent first, each result for who waits, and an end that leaves nobody waiting."""

import threading
from concurrent.futures import CancelledError, Future

import pytest

from host_offload.read_threads import AHEAD, DEMAND, ReadThreads


def submit(threads, rank, job):
    future = Future()
    threads.submit(rank, future, job)
    return future


def test_what_is_waited_for_comes_before_what_may_be_needed_and_else_in_order():
    threads, gate, log = ReadThreads(1), threading.Event(), []
    submit(threads, AHEAD, gate.wait)
    jobs = [(AHEAD, "a"), (DEMAND, "b"), (AHEAD, "c"), (DEMAND, "d")]
    futures = [submit(threads, rank, lambda name=name: log.append(name)) for rank, name in jobs]
    gate.set()
    for future in futures:
        future.result(60)
    threads.close()
    assert log == ["b", "d", "a", "c"]


def test_results_exceptions_and_cancelled_jobs():
    threads, gate = ReadThreads(1, "mine"), threading.Event()
    assert submit(threads, DEMAND, lambda: threading.current_thread().name).result(60) == "mine-0"
    submit(threads, DEMAND, gate.wait)
    broken, dropped = submit(threads, DEMAND, lambda: 1 / 0), submit(threads, DEMAND, lambda: log.append("ran"))
    log = []
    assert dropped.cancel()
    gate.set()
    with pytest.raises(ZeroDivisionError):
        broken.result(60)
    assert submit(threads, DEMAND, lambda: 7).result(60) == 7 and log == []
    threads.close()


def test_closing_ends_threads_and_cancels_what_was_not_begun():
    before, gate = threading.active_count(), threading.Event()
    threads = ReadThreads(2)
    running = [submit(threads, DEMAND, lambda: gate.wait(60)) for _ in range(2)]
    waiting = submit(threads, DEMAND, lambda: None)
    while not all(future.running() for future in running):
        pass
    opening = threading.Timer(0.02, gate.set)
    opening.start()
    threads.close()
    opening.join()
    assert [future.result(0) for future in running] == [True, True] and threading.active_count() == before
    for future in (waiting, submit(threads, DEMAND, lambda: None)):
        with pytest.raises(CancelledError):
            future.result(0)
    threads.close()
