"""What a running model has seen of its routing: counts that live predictors learn from, kept from run to run.

An `Experience` takes the decode steps of every request. It counts which experts follow which (`TableCounts`), which are
hot (`counts.total`), and keeps an EAM of each of the last requests. Its file belongs to one checkpoint.
"""

import json
import zipfile
from pathlib import Path

import numpy as np

from host_offload.predictors.replay import request_needs, trace_shape
from host_offload.predictors.tables import TableCounts
from host_offload.trace import write_whole

# Requests whose EAM is kept, the latest ones.
REQUESTS = 128
# Tables are made anew when so many tokens have come since, or this share of all of them if that is more.
LEAST_TOKENS, SHARE = 16, 0.25
FORMAT = 1


class ExperienceError(ValueError):
    """A file of experience cannot be used: it is none, or it is of another checkpoint or shape."""


class Experience:
    """Routing seen while decoding, over L MoE layers of E experts; tables reach `lead` layers ahead.

    Attributes:
      counts: `TableCounts` of all tokens taken so far. eams: list of [L, E] int64, uses by request, oldest first.
    Owner: the thread that makes the host calls (XLA's while a program runs, else the engine's).
    """

    def __init__(self, L, E, lead=1):
        self.L, self.E = L, E
        self.counts = TableCounts(L, E, lead)
        self.eams: list[np.ndarray] = []
        self.requests = 0  # ended so far: whether `eams` has news
        self._clear()

    def _clear(self):
        self._steps: list[np.ndarray] = []  # of the running request, not counted yet
        self._earlier: np.ndarray | None = None  # the step before these
        self._eam = np.zeros((self.L, self.E), np.int64)
        self._step = np.zeros((self.L, self.E), bool)

    def observe(self, layer, need, last):
        """An event of decode: need [E] bool; `last`: its step ends with it."""
        self._step[layer] = need
        if last:
            self._steps.append(self._step)
            self._step = np.zeros_like(self._step)

    def pass_by(self, need):
        """Whole decode steps at once, need [steps, L, E] bool; none of them may have begun in `observe`."""
        self._steps += list(need)

    @property
    def due(self) -> bool:
        """Whether so many steps wait that the tables deserve to be made anew."""
        return len(self._steps) >= max(LEAST_TOKENS, SHARE * self.counts.tokens)

    def count(self):
        """Takes the waiting steps into the counts."""
        if not self._steps:
            return
        need = np.stack(self._steps)
        self.counts.add(need, self._earlier)
        self._eam += need.sum(axis=0)
        self._earlier, self._steps = need[-1], []

    def end_request(self):
        """The running request is over: its EAM joins the others. Without a step nothing happens."""
        self.count()
        if self._eam.any():
            self.eams = [*self.eams, self._eam][-REQUESTS:]
            self.requests += 1
        self._clear()

    def learn(self, trace):
        """Takes all requests of a `Trace`, prompts included, as if the model had decoded them.

        Raises ValueError for a trace of another shape.
        """
        if trace_shape(trace) != (self.L, self.E):
            raise ValueError(f"trace: its (L, E) = {trace_shape(trace)} is not the model's {(self.L, self.E)}")
        self.end_request()
        for need in request_needs([trace]):
            self._steps = list(need)
            self.end_request()

    def hot(self):
        """(layer, expert) pairs that were ever needed, most often needed first: [n, 2] int64; ties: the lower first."""
        uses = self.counts.total.reshape(-1)
        order = np.argsort(-uses, kind="stable")
        return np.stack(np.divmod(order[uses[order] > 0], self.E), axis=1)

    # ------------------------------------------------------------------------------------------------------------ file

    def save(self, path, fingerprint):
        """Writes all of it to `path` for the checkpoint of that fingerprint, whole or not at all. Raises OSError."""
        self.end_request()
        counts = self.counts
        header = {
            "format": FORMAT,
            "fingerprint": fingerprint,
            **{"L": self.L, "E": self.E, "lead": counts.lead},
            **{"tokens": counts.tokens, "following": counts.following, "requests": self.requests},
        }
        arrays = {name: getattr(counts, name) for name in TableCounts.ARRAYS}
        arrays["eams"] = np.array(self.eams, np.int64).reshape(-1, self.L, self.E)
        header_bytes = np.frombuffer(json.dumps(header).encode(), np.uint8)
        write_whole(Path(path), lambda file: np.savez_compressed(file, header=header_bytes, **arrays))

    @classmethod
    def load(cls, path, L, E, fingerprint, lead=1):
        """What `save` wrote. Raises ExperienceError that names the file and what to do, OSError if it cannot be
        read."""
        try:
            with np.load(path, allow_pickle=False) as file:
                content = {name: file[name] for name in file.files}
            header = json.loads(content.pop("header").tobytes())
            made_of = header["format"], header["fingerprint"], (header["L"], header["E"], header["lead"])
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ExperienceError(
                f"{path} is not a file of warm starts ({error!r}): name another file, or remove it and start cold"
            ) from error
        if made_of != (FORMAT, fingerprint, (L, E, lead)):
            raise ExperienceError(
                f"{path} was learned from another checkpoint (fingerprint {made_of[1]!r} with (L, E, lead) = "
                f"{made_of[2]}, format {made_of[0]}; this one is {fingerprint!r} with {(L, E, lead)}, format {FORMAT})"
                ": name a file of this checkpoint, a new one to start cold, or remove it"
            )
        self = cls(L, E, lead)
        try:
            for name in TableCounts.ARRAYS:
                if content[name].shape != getattr(self.counts, name).shape:
                    raise ValueError(f"{name} has shape {content[name].shape}")
                setattr(self.counts, name, content[name].astype(np.float64))
            self.counts.tokens, self.counts.following = int(header["tokens"]), int(header["following"])
            self.requests = int(header["requests"])
            self.eams = list(content["eams"].reshape(-1, L, E).astype(np.int64))
        except (ValueError, KeyError, TypeError) as error:
            raise ExperienceError(f"{path} is damaged ({error}): remove it to start cold") from error
        return self
