"""Transports: how a missing expert reaches the device. `resident`, `device` and `callback` behind one interface."""

from host_offload.transport.base import Transport
from host_offload.transport.callback import CallbackTransport
from host_offload.transport.graph import GraphTransport, ResidentTransport

TRANSPORTS = {cls.name: cls for cls in (ResidentTransport, GraphTransport, CallbackTransport)}

__all__ = ["TRANSPORTS", "CallbackTransport", "GraphTransport", "ResidentTransport", "Transport"]
