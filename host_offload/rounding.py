"""Division that rounds alike in NumPy and on every device."""

import numpy as np

MANTISSA = 1 << 23


def quotient(xp, a, b):
    """float32 [...]: `a` / `b`, correctly rounded, for float32 a and b that broadcast, a >= 0 and b > 0.

    XLA's division on a GPU is an approximation that may miss by a unit in the last place, enough to turn the order of
    two priorities around. So under jax a long division of the mantissas corrects its digits in integers. `b`, the
    quotient and an `a` that is not 0 must be normal numbers.
    """
    if xp is np:
        return np.divide(a, b, dtype=np.float32)
    return long_division(xp, xp.asarray(a, xp.float32), xp.asarray(b, xp.float32), lambda number: 1 / number)


def long_division(xp, a, b, reciprocal):
    """`quotient` under jax; `reciprocal` may be wrong by some units in the last place, the result is not."""
    a, b = xp.broadcast_arrays(a, b)
    a_bits, b_bits = a.view(xp.int32), b.view(xp.int32)
    above, below = (bits % MANTISSA + MANTISSA for bits in (a_bits, b_bits))  # 2^23 to 2^24 - 1
    short = above < below
    exponent = a_bits // MANTISSA - b_bits // MANTISSA + 127 - short
    guess = reciprocal(below.astype(xp.float32))
    digits, rest = 1, xp.where(short, 2 * above, above) - below  # the leading 1; 23 binary digits follow
    for bits in (12, 11):
        # Few enough digits that the guess is wrong by one at most, which the remainder shows; it is small again however
        # often the numbers that it is made of have wrapped around.
        digit = (rest.astype(xp.float32) * np.float32(1 << bits) * guess).astype(xp.int32)
        rest = (rest << bits) - digit * below
        wrong = (rest >= below).astype(xp.int32) - (rest < 0)
        digits, rest = (digits << bits) + digit + wrong, rest - wrong * below
    # Half a unit cannot be left: it would take a mantissa of 25 bits. A carry out of the mantissa raises the exponent.
    digits = digits + (2 * rest > below)
    return xp.where(a == 0, 0, ((exponent - 1) * MANTISSA + digits).view(xp.float32))
