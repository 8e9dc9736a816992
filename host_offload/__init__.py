"""Experts in host memory behind a cache of device slots: storage, slots, transports, policies, plans and traces.

Nothing is imported here; take what you need from its module (`host_offload.policy`, `.plan`, `.capacity`, `.trace`,
...), so that reading a trace or writing a policy needs NumPy only.
"""
