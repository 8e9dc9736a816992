"""Ctrl-C for commands: heard at any moment."""

import _thread
import sys
import threading

SOON = 0.05  # seconds: the hook that was interrupted has returned by then, and if it runs again the next try comes


def keep_interrupts() -> None:
    """Lets a Ctrl-C count that falls into a hook of the garbage collector or a finaliser; once a process is enough.

    Python prints "Exception ignored" for what is raised in such code and goes on. jax has a hook that runs at every
    collection, so while a program is traced and compiled every third Ctrl-C was lost. It is raised again in the main
    thread, after the hook. For commands: it changes `sys.unraisablehook`, which a library leaves alone.
    """
    before = sys.unraisablehook
    if getattr(before, "keeps_interrupts", False):
        return

    def hook(unraisable):
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        again = threading.Timer(SOON, _thread.interrupt_main)
        again.daemon = True
        again.start()

    hook.keeps_interrupts = True
    sys.unraisablehook = hook
