"""Serving state: the paged key/value cache and its host-side page allocator."""
