"""Building blocks that the model families share: small nnx modules and pure functions.

Weights keep the orientation of the checkpoint files, [out, in]. Sums of products accumulate in float32 whatever the
compute dtype is; shape letters are those of docs/architecture.md.
"""
