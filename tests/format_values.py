"""The values of stored weights in float64, one by one from the formats' definitions: slow, obvious, the reference."""

import numpy as np

from pallas_kernels.formats import FP8, INT4, MXFP4, Dense

# e2m1: sign, two bits of exponent (bias 1), one of mantissa.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(byte: int) -> float:
    """Sign, four bits of exponent (bias 7), three of mantissa; no infinities, NaN where all bits but the sign are 1."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([e4m3(byte) for byte in range(256)])


def e8m0(byte: int) -> float:
    return np.nan if byte == 255 else 2.0 ** (byte - 127.0)


def field(words, r, c, bits):
    """Value c of row r of uint32 words that hold `bits` bits a value, the lowest bits first."""
    each = 32 // bits
    return int(words[r, c // each]) >> bits * (c % each) & 2**bits - 1


def values(form, parts, outs, width) -> np.ndarray:
    """The stacked matrices [sum(outs), width] of parts {suffix: NumPy array} of one row."""
    w = np.empty((sum(outs), width))
    first = block_row = 0
    with np.errstate(invalid="ignore"):  # infinite scale times zero
        for m, out in enumerate(outs):
            for i in range(out):
                for c in range(width):
                    r, to = first + i, c
                    code = (
                        None if isinstance(form, Dense) else field(parts[""], r, c, 8 if isinstance(form, FP8) else 4)
                    )
                    if isinstance(form, Dense):
                        value = np.float64(parts[""][r, c])
                    elif isinstance(form, MXFP4):
                        value = E2M1[code] * e8m0(field(parts["_scale"], r, c // 32, 8))
                    elif isinstance(form, FP8):
                        value = E4M3[code] * np.float64(parts["_scale"][block_row + i // form.block, c // form.block])
                    elif isinstance(form, INT4):
                        zero = field(parts["_zero"], r, c // form.group, 4) if form.zeros else 8
                        value = np.float64(code - zero) * np.float64(parts["_scale"][r, c // form.group])
                        to = parts["_order"][m, c] if form.order else c
                    w[r, to] = value
            first += out
            block_row += -(-out // form.block) if isinstance(form, FP8) else 0
    return w


def random_parts(rng, form, outs, width, scale=1.0, dtype="float32") -> dict[str, np.ndarray]:
    """Parts of random codes whose values are about `scale`; floats of no fixed dtype get `dtype`."""
    parts = {}
    for suffix, (shape, fixed) in form.row_tensors(outs, width).items():
        if suffix == "_order":
            parts[suffix] = np.stack([rng.permutation(width) for _ in outs]).astype(np.int32)
        elif suffix == "_scale" and isinstance(form, MXFP4):
            exponents = np.full((shape[0], 4 * shape[1]), 255, np.uint8)  # NaN: what is past the end must not be used
            low = int(np.floor(np.log2(scale / 3))) + 127
            exponents[:, : width // 32] = rng.integers(low, low + 3, (shape[0], width // 32))
            parts[suffix] = exponents.view(np.uint32)
        elif suffix == "_scale":
            step = scale / {"fp8": 64, "int4": 4}[form.name]
            parts[suffix] = (step * rng.uniform(0.5, 1.5, shape)).astype(fixed or dtype)
        elif isinstance(form, Dense):
            parts[suffix] = (scale * rng.normal(size=shape)).astype(dtype)
        elif isinstance(form, FP8):
            # Not NaN: the two bytes with all bits set but the sign.
            bytes_ = rng.choice(np.delete(np.arange(256), [127, 255]), (shape[0], 4 * shape[1])).astype(np.uint8)
            parts[suffix] = bytes_.view(np.uint32)
        else:
            parts[suffix] = rng.integers(0, 2**32, shape, dtype=np.uint32)
    return parts
