"""A Ctrl-C inside a hook of the garbage collector, where Python would drop it."""

import gc
import sys
import time

import pytest

from moe_jax.interrupts import keep_interrupts


@pytest.fixture
def unraised(monkeypatch):
    """What reached the hook that stood before."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))
    keep_interrupts()
    return seen


def collect_with(error):
    """A collection in which a hook raises `error`, once."""

    def callback(phase, info):
        gc.callbacks.remove(callback)
        raise error

    gc.callbacks.append(callback)
    gc.collect()


def test_an_interrupt_in_a_collection_reaches_the_main_thread(unraised):
    with pytest.raises(KeyboardInterrupt):
        collect_with(KeyboardInterrupt())
        for _ in range(1000):
            time.sleep(0.01)
    assert not unraised


def test_other_errors_are_for_the_hook_before(unraised):
    collect_with(ValueError())
    assert unraised == [ValueError]


def test_the_hook_is_set_once(unraised):
    hook = sys.unraisablehook
    keep_interrupts()
    assert sys.unraisablehook is hook
