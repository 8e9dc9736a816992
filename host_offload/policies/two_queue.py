"""2Q, the full version."""

from host_offload.policies.queues import QueuePolicy, Queues, first
from host_offload.policy import register


class TwoQueues(Queues):
    """`fifo` (A1in) takes newcomers, `ghosts` (A1out) remembers who left it, `lru` (Am) takes those that came back."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.fifo, self.lru, self.ghosts = {}, {}, {}
        self.fifo_size, self.ghost_size = max(1, capacity // 4), max(1, capacity // 2)

    def residents(self):
        return self.fifo, self.lru

    def hit(self, key):
        if key in self.lru:  # a hit in A1in changes nothing: it is taken for one use in two parts
            del self.lru[key]
            self.lru[key] = 0

    def missed(self, key):
        if key in self.ghosts:
            del self.ghosts[key]
            return "lru"
        return "fifo"

    def evict(self, leaving):
        lists = (self.fifo, self.lru) if len(self.fifo) > self.fifo_size else (self.lru, self.fifo)
        for held in lists:
            key = first(held, leaving)
            if key is not None:
                del held[key]
                if held is self.fifo:
                    self.ghosts[key] = 0
                return key
        raise KeyError("no resident is leaving")

    def trim(self):
        while len(self.ghosts) > self.ghost_size:
            del self.ghosts[next(iter(self.ghosts))]


@register
class TwoQueue(QueuePolicy):
    """A FIFO of newcomers before an LRU list that only experts enter which are needed again after leaving the FIFO.

    Johnson and Shasha, 2Q, VLDB 1994, with its sizes: A1in a quarter of the slots, A1out half as many keys as slots, at
    least one each.
    """

    name = "2q"

    def make_queues(self, capacity):
        return TwoQueues(capacity)
