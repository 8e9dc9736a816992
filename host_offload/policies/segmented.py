"""Segmented LRU."""

from host_offload.policies.common import check_share
from host_offload.policies.queues import QueuePolicy, Queues, first
from host_offload.policy import register


class SegmentedQueues(Queues):
    """`probation` takes newcomers, `protected` what was hit there; both by recency."""

    def __init__(self, capacity, share):
        super().__init__(capacity)
        self.probation, self.protected = {}, {}
        self.most = int(share * capacity)

    def residents(self):
        return self.probation, self.protected

    def hit(self, key):
        self.probation.pop(key, None)
        self.protected.pop(key, None)
        self.protected[key] = 0
        while len(self.protected) > self.most:
            oldest = next(iter(self.protected))
            del self.protected[oldest]
            self.probation[oldest] = 0

    def missed(self, key):
        return "probation"

    def trim(self):
        pass  # nothing is remembered of absent keys

    def evict(self, leaving):
        for held in self.residents():
            key = first(held, leaving)
            if key is not None:
                del held[key]
                return key
        raise KeyError("no resident is leaving")


@register
class SLRU(QueuePolicy):
    """Two LRU lists: a hit in probation is promoted, what falls out of `protected` goes back to probation.

    Karedla, Love and Wherry, Caching strategies to improve disk system performance, IEEE Computer 27(3), 1994.
    `protected`: its share of the slots, 0.8 here. The oldest of probation leave first.
    """

    name = "slru"

    def __init__(self, protected=0.8):
        self.protected = check_share(self.name, "protected", protected, 0, 1)

    def make_queues(self, capacity):
        return SegmentedQueues(capacity, self.protected)
