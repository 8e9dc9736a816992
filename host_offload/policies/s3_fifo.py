"""S3-FIFO: three static queues."""

from host_offload.policies.common import check_share
from host_offload.policies.queues import QueuePolicy, Queues
from host_offload.policy import register

MOST = 3  # a counter of two bits


class ThreeQueues(Queues):
    """`small` takes newcomers, `main` what proved useful, `ghosts` remembers who left `small`; values count hits."""

    def __init__(self, capacity, share):
        super().__init__(capacity)
        self.small, self.main, self.ghosts = {}, {}, {}
        self.small_size = max(1, round(share * capacity))
        self.main_size = max(1, capacity - self.small_size)

    def residents(self):
        return self.small, self.main

    def hit(self, key):
        held = self.small if key in self.small else self.main
        held[key] = min(held[key] + 1, MOST)

    def missed(self, key):
        if key in self.ghosts:
            del self.ghosts[key]
            return "main"
        return "small"

    def evict(self, leaving):
        if len(self.small) >= self.small_size or not any(key in leaving for key in self.main):
            for key in list(self.small):
                if self.small[key] > 1:  # needed at least twice since it came: it moves on
                    del self.small[key]
                    self.main[key] = 0
                    if len(self.main) > self.main_size and any(k in leaving for k in self.main):
                        return self._evict_main(leaving)
                elif key in leaving:
                    del self.small[key]
                    self.ghosts[key] = 0
                    return key
        return self._evict_main(leaving)

    def _evict_main(self, leaving):
        while True:
            for key in list(self.main):
                hits = self.main.pop(key)
                if hits == 0 and key in leaving:
                    return key
                self.main[key] = max(hits - 1, 0)  # once more through the queue

    def trim(self):
        while len(self.ghosts) > self.main_size:
            del self.ghosts[next(iter(self.ghosts))]


@register
class S3FIFO(QueuePolicy):
    """A small FIFO filters newcomers before a main FIFO with reinsertion; ghosts of the small one enter the main one.

    Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023. `small`: its share of the slots, 0.1; at
    least one slot each.
    """

    name = "s3-fifo"

    def __init__(self, small=0.1):
        self.small = check_share(self.name, "small", small, 0, 1)

    def make_queues(self, capacity):
        return ThreeQueues(capacity, self.small)
