"""Top-k of router scores."""

from pallas_kernels.router_topk.kernel import router_topk

__all__ = ["router_topk"]
