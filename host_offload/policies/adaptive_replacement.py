"""ARC."""

from host_offload.policies.queues import QueuePolicy, Queues, first
from host_offload.policy import register


class AdaptiveQueues(Queues):
    """`once` and `often` (T1, T2) hold residents by recency, `once_ghosts` and `often_ghosts` (B1, B2) who left them.

    `target` (p) is the size that T1 should have.
    """

    def __init__(self, capacity):
        super().__init__(capacity)
        self.once, self.often, self.once_ghosts, self.often_ghosts = {}, {}, {}, {}
        self.target = 0.0
        self.last_from_often = False  # whether the last missing key was one of `often_ghosts`, a tie-break of ARC

    def residents(self):
        return self.once, self.often

    def hit(self, key):
        self.once.pop(key, None)
        self.often.pop(key, None)
        self.often[key] = 0

    def missed(self, key):
        once, often = len(self.once_ghosts), len(self.often_ghosts)
        self.last_from_often = key in self.often_ghosts
        if key in self.once_ghosts:
            self.target = min(self.capacity, self.target + max(1, often / once))
            del self.once_ghosts[key]
            return "often"
        if key in self.often_ghosts:
            self.target = max(0, self.target - max(1, once / often))
            del self.often_ghosts[key]
            return "often"
        return "once"

    def evict(self, leaving):
        size = len(self.once)
        from_once = size > self.target or (self.last_from_often and size == self.target)
        pairs = [(self.once, self.once_ghosts), (self.often, self.often_ghosts)]
        for held, ghosts in pairs if from_once else reversed(pairs):
            key = first(held, leaving)
            if key is not None:
                del held[key]
                ghosts[key] = 0
                return key
        raise KeyError("no resident is leaving")

    def trim(self):
        self.last_from_often = False
        while self.once_ghosts and len(self.once) + len(self.once_ghosts) > self.capacity:
            del self.once_ghosts[next(iter(self.once_ghosts))]
        held = len(self.once) + len(self.often) + len(self.once_ghosts)
        while self.often_ghosts and held + len(self.often_ghosts) > 2 * self.capacity:
            del self.often_ghosts[next(iter(self.often_ghosts))]


@register
class ARC(QueuePolicy):
    """LRU of experts needed once against LRU of those needed again; ghosts of either list move the border.

    Megiddo and Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003.
    """

    name = "arc"

    def make_queues(self, capacity):
        return AdaptiveQueues(capacity)
