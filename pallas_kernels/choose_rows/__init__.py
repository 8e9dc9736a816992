"""Which experts of a layer to bring ahead: the likeliest that have no slot.

`implementation` is "pallas" (compiled for an NVIDIA GPU), "interpret" (the same kernel in Pallas' interpreter) or "xla"
(any platform).
"""

from pallas_kernels.choose_rows import kernel, ref

__all__ = ["choose_rows"]

IMPLEMENTATIONS = ("pallas", "interpret", "xla")


def choose_rows(likely, slot_of, on, *, layer, count, width, implementation):
    """Ids of up to `count` experts of `layer` that have no slot and are among the `width` likeliest, best first.

    Ties: the lower id. Of the experts beyond `width`, which an event will hardly need, none is chosen, even if all
    likelier ones have slots.

    Args:
      likely: [E] f32, higher = likelier; -inf is never chosen.
      slot_of: [L, E] i32, bank row of each expert with a slot, -1 for the others.
      on: [L] i32, 0 for a layer of which nothing is to be chosen.
      layer: static; count: P, static, at least 1; width: static, as many as an event needs.
      implementation: see the module.

    Returns:
      ids [P] i32, -1 where there is no further one, and `slot_of`, unchanged: what changes it next must take it from
      here, or XLA copies it.

    Raises:
      ValueError: unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "xla":
        return ref.choose_rows(likely, slot_of, on, layer=layer, count=count, width=width)
    interpret = implementation == "interpret"
    return kernel.choose_rows(likely, slot_of, on, layer=layer, count=count, width=width, interpret=interpret)
