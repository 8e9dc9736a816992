"""Division that rounds alike in NumPy and on every device."""

import numpy as np

MANTISSA = 1 << 23


def quotient(xp, a, b):
    """float32 [...]: `a` / `b`, correctly rounded, for float32 a and b that broadcast, a >= 0 and b > 0.

    XLA's division on a GPU is an approximation that may miss by a unit in the last place, enough to turn the order of
    two priorities around. So under jax the quotient of the mantissas is worked out in integers, eight bits a step. `b`,
    the quotient and an `a` that is not 0 must be normal numbers.
    """
    if xp is np:
        return np.divide(a, b, dtype=np.float32)
    a, b = xp.broadcast_arrays(xp.asarray(a, xp.float32), xp.asarray(b, xp.float32))
    a_bits, b_bits = a.view(xp.uint32), b.view(xp.uint32)
    above, below = (bits % MANTISSA + MANTISSA for bits in (a_bits, b_bits))  # 2^23 to 2^24 - 1
    short = above < below
    above = xp.where(short, 2 * above, above)
    exponent = a_bits // MANTISSA + 127 - b_bits // MANTISSA - short
    digits, rest = above // below, above % below  # the leading 1; 23 binary digits follow
    for bits in (8, 8, 7):
        rest = rest << bits
        digits, rest = (digits << bits) + rest // below, rest % below
    # Half a unit cannot be left: it would take a mantissa of 25 bits. A carry out of the mantissa raises the exponent.
    digits = digits + (2 * rest > below)
    return xp.where(a == 0, 0, ((exponent - 1) * MANTISSA + digits).view(xp.float32))
