"""What a decode step costs on a machine: measured once, then applied to simulated caches.

    step time = all-hit time
              + miss events * event time + misses * miss time
              + events without a miss * policy's host time beyond the calibrated policy's   (callback transport)
              + (bytes of the experts used - those used in calibration) / memory rate

The all-hit time holds kernels, launches, the router, attention, the head and, in the callback transport, the host's
part of every event. `miss time` is what one more missed expert adds to an event, `event time` what an event with any
miss takes beside its rows: until the first copy runs and after the last one. All three are measured on the running
engine by `python experiments/calibrate.py`, which writes the JSON file that `CostModel.load` reads. Misses of an event
are served one after the other on one link and nothing hides them, so their times add up (prefetch:
`host_offload/prefetch_sim.py`). Where a miss makes the device wait, the host decides meanwhile, so a slow policy costs
time only at events without one. All times are seconds, all sizes bytes, all rates bytes a second unless a name says
otherwise.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FORMAT = "moe-jax-cost-model"
VERSION = 1
# Levels whose misses an event differ by less than this share do not tell the cost of an event from that of its misses.
MIN_SPREAD = 0.05
# As few levels as numbers to fit would be met exactly, noise and all.
MIN_LEVELS = 4


class CostModelError(ValueError):
    """A cost model, or its file, is wrong or does not cover what was asked; the message names the field."""


@dataclasses.dataclass(frozen=True)
class LinkCurve:
    """Time of a copy: `copy_seconds` + nbytes / `bytes_per_second`; an infinite rate is allowed."""

    bytes_per_second: float
    copy_seconds: float = 0.0

    def __post_init__(self):
        _check_number("bytes_per_second", self.bytes_per_second, positive=True, infinite=True)
        _check_number("copy_seconds", self.copy_seconds)

    def seconds(self, nbytes, copies=1):
        """Seconds of `copies` copies of `nbytes` in all, one after the other; arrays broadcast."""
        return np.asarray(copies) * self.copy_seconds + np.asarray(nbytes) / self.bytes_per_second

    def rate(self, nbytes):
        """Bytes a second that one copy of `nbytes` reaches."""
        return np.asarray(nbytes) / self.seconds(nbytes)

    @classmethod
    def fit(cls, sizes: Sequence[float], seconds: Sequence[float]) -> "LinkCurve":
        """The curve through measured copies with the least squared relative error, its fixed cost never below 0.

        sizes: bytes, at least two different ones. seconds: time of one copy each. Raises CostModelError for other input
        or if time does not grow with size.
        """
        sizes, seconds = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
        if sizes.shape != seconds.shape or sizes.ndim != 1 or len(np.unique(sizes)) < 2:
            raise CostModelError(
                f"link: a fit needs the times of copies of at least two sizes, got {sizes.tolist()} bytes, "
                f"{seconds.tolist()} s"
            )
        if not ((sizes > 0) & (seconds > 0) & np.isfinite(sizes) & np.isfinite(seconds)).all():
            raise CostModelError(f"link: sizes and times must be positive, got {sizes.tolist()}, {seconds.tolist()}")
        # Relative errors: a microsecond counts in a small copy and not in a large one.
        columns = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
        fixed, slope = np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)[0]
        if fixed < 0:
            x = columns[:, 1]
            fixed, slope = 0.0, x.sum() / (x @ x)
        if slope <= 0:
            raise CostModelError(f"link: larger copies took no longer ({seconds.tolist()} s); measure again")
        return cls(bytes_per_second=float(1 / slope), copy_seconds=float(fixed))


@dataclasses.dataclass(frozen=True)
class DecodeCost:
    """Decode of one model in one transport, as calibrated at batch 1.

    all_hit_seconds: a step in which every expert hits. miss_seconds: what one missed expert adds. L, K: MoE layers and
    experts a token. row_bytes: bytes of an expert. policy: the policy that ran. fit_error: largest relative error of
    the fit at the points it was made from. event_seconds: what an event with any miss adds beside its rows; below 0
    where copies hide what an all-hit event would wait for.
    """

    all_hit_seconds: float
    miss_seconds: float
    L: int
    K: int
    row_bytes: int
    policy: str
    fit_error: float = 0.0
    event_seconds: float = 0.0

    def __post_init__(self):
        for field in ("all_hit_seconds", "miss_seconds"):
            _check_number(field, getattr(self, field), positive=field == "all_hit_seconds")
        _check_number("fit_error", self.fit_error)
        if not isinstance(self.event_seconds, int | float) or not math.isfinite(self.event_seconds):
            raise CostModelError(f"event_seconds: {self.event_seconds!r} is not a finite number")
        for field in ("L", "K", "row_bytes"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CostModelError(f"{field}: {value!r} is not an integer of at least 1")

    @classmethod
    def fit(
        cls, misses: Sequence[float], seconds: Sequence[float], miss_events: Sequence[float] | None = None, **geometry
    ) -> "DecodeCost":
        """From measured levels: `misses` a step (one level must have none) and `seconds` a step of each.

        seconds = all_hit + event * miss_events + miss * misses with the least squared relative error; `miss_events` are
        events with a miss a step. With fewer than four levels, or miss_events that are None or proportional to the
        misses, the two cannot be told apart, and the event's part is in the miss.

        Raises CostModelError without a level of no misses and one of some, if misses cost nothing, or if miss_events
        contradict misses.
        """
        misses, seconds = np.asarray(misses, np.float64), np.asarray(seconds, np.float64)
        if misses.shape != seconds.shape or not (misses == 0).any() or not (misses > 0).any():
            raise CostModelError(
                f"decode: a fit needs one level without misses and one with, got misses a step {misses.tolist()}"
            )
        if not (seconds > 0).all():
            raise CostModelError(f"decode: times must be positive, got {seconds.tolist()}")
        columns = [np.ones_like(misses), misses]
        if miss_events is not None:
            events = np.asarray(miss_events, np.float64)
            if events.shape != misses.shape or (events > misses).any() or ((events > 0) != (misses > 0)).any():
                raise CostModelError(
                    f"decode: miss_events {events.tolist()} contradict misses {misses.tolist()}: an event with a miss "
                    "has at least one"
                )
            ratio = events[misses > 0] / misses[misses > 0]
            if len(misses) >= MIN_LEVELS and np.ptp(ratio) > MIN_SPREAD * ratio.max():
                columns.append(events)
        weighted = np.stack(columns, axis=1) / seconds[:, None]
        all_hit, miss, event = np.append(np.linalg.lstsq(weighted, np.ones_like(misses), rcond=None)[0], 0.0)[:3]
        if miss <= 0:
            raise CostModelError(
                f"decode: steps with more misses took no longer ({seconds.tolist()} s at {misses.tolist()} misses); "
                "measure longer runs or larger experts"
            )
        error = np.abs(weighted @ np.array([all_hit, miss, event])[: len(columns)] - 1).max()
        return cls(float(all_hit), float(miss), fit_error=float(error), event_seconds=float(event), **geometry)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Measured costs of a machine.

    device: its name. link: the copy curve of the copy engine (on CPU: memcpy). memory_bytes_per_second: rate of reading
    device memory. decode: `DecodeCost` by transport. policy_seconds: host seconds an event, plan included, by policy.
    notes: anything JSON holds (versions, settings, measured points); kept, not used.
    """

    device: str
    link: LinkCurve
    memory_bytes_per_second: float
    decode: dict[str, DecodeCost]
    policy_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        _check_number("memory_bytes_per_second", self.memory_bytes_per_second, positive=True)
        for name, seconds in self.policy_seconds.items():
            _check_number(f"policy_seconds[{name!r}]", seconds)
        if not self.decode:
            raise CostModelError("decode: no transport was measured; run experiments/calibrate.py")

    def save(self, path):
        """Writes the JSON file."""
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path) -> "CostModel":
        """Reads a file of `save`; raises FileNotFoundError, or CostModelError naming file and field."""
        try:
            content = json.loads(Path(path).read_text())
        except ValueError as error:
            raise CostModelError(f"{path}: not JSON: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CostModelError(
                f"{path}: not a cost model (no format {FORMAT!r}); experiments/calibrate.py writes one"
            )
        if content.get("version") != VERSION:
            raise CostModelError(f"{path}: version {content.get('version')!r}, this reads {VERSION}; calibrate again")
        try:
            return cls(
                device=content["device"],
                link=LinkCurve(**content["link"]),
                memory_bytes_per_second=content["memory_bytes_per_second"],
                decode={name: DecodeCost(**values) for name, values in content["decode"].items()},
                policy_seconds=content["policy_seconds"],
                notes=content["notes"],
            )
        except KeyError as error:
            raise CostModelError(f"{path}: field {error} is missing; calibrate again") from error
        except (TypeError, AttributeError) as error:
            raise CostModelError(f"{path}: damaged: {error}") from error
        except CostModelError as error:
            raise CostModelError(f"{path}: {error}") from error

    def of(self, transport) -> DecodeCost:
        """The decode costs of a transport; raises CostModelError if it was not measured."""
        if transport not in self.decode:
            raise CostModelError(f"transport: {transport!r} was not measured; this model has {sorted(self.decode)}")
        return self.decode[transport]

    def miss_link(self, transport) -> LinkCurve:
        """The link as misses of a transport see it: one row of the calibrated size takes exactly `miss_seconds`.

        The rate is that of the copy engine and the rest a fixed cost; if a miss was faster than that (it saves reading
        the row from device memory), the rate it reached, without a fixed cost. `event_seconds` is not in it.
        """
        cost = self.of(transport)
        fixed = cost.miss_seconds - cost.row_bytes / self.link.bytes_per_second
        if fixed >= 0:
            return LinkCurve(self.link.bytes_per_second, fixed)
        return LinkCurve(cost.row_bytes / cost.miss_seconds)

    def all_hit_seconds(self, transport, *, accesses, row_bytes, policy=None, miss_events=0.0) -> float:
        """Seconds of a step that uses `accesses` experts of `row_bytes`, under `policy`, without what its misses add.

        Device memory must be read for other bytes than in calibration, the rest stays. In the callback transport the
        policy's time an event replaces that of the calibrated policy (None: it is that one) in the L - `miss_events`
        events that do not wait for a row. Raises CostModelError if it was not measured.
        """
        cost = self.of(transport)
        extra = (accesses * row_bytes - cost.L * cost.K * cost.row_bytes) / self.memory_bytes_per_second
        if transport == "callback" and policy is not None and policy != cost.policy:
            for name in (policy, cost.policy):
                if name not in self.policy_seconds:
                    raise CostModelError(
                        f"policy_seconds: {name!r} was not measured; calibrate with --policies {name}, or use "
                        "transport 'device'"
                    )
            slower = self.policy_seconds[policy] - self.policy_seconds[cost.policy]
            extra += (cost.L - miss_events) * slower
        return max(cost.all_hit_seconds + extra, 0.0)


def predict_ms_per_token(result, cost, *, transport="device", phase="decode", row_bytes=None, prefetch=None):
    """Milliseconds of a decode step (batch 1: of a token) that a simulated cache would reach.

    Args:
        result: a `Result` of `simulate` of the calibrated model's L layers.
        cost: `CostModel`.
        transport: which of its transports.
        phase: the result's phase to predict; only "decode" steps have the calibrated shape.
        row_bytes: bytes of an expert; None: the result's, or else the calibrated size.
        prefetch: a `PrefetchResult` of the same replay, made with `cost.miss_link(transport)`: its stall replaces the
            time of the misses.

    Returns:
        float ms.

    Raises:
        CostModelError: another number of layers, no decode steps, or something that was not measured.
    """
    if phase != "decode":
        raise CostModelError(
            f"phase: {phase!r}: only 'decode' was calibrated; prefill is bound by the link and compute"
        )
    measured = cost.of(transport)
    counts = result.in_phase(phase)
    L = result.counters.shape[1]
    if L != measured.L:
        raise CostModelError(
            f"result: {L} MoE layers, calibrated with {measured.L}; calibrate with --layers {L} for this model"
        )
    steps = counts["steps"]
    if not steps:
        raise CostModelError("result: no decode steps; simulate a trace with decode rows, phase None or 'decode'")
    row_bytes = row_bytes or result.row_bytes or measured.row_bytes
    waits = counts["miss_events"] if prefetch is None else prefetch.stall_events
    all_hit = cost.all_hit_seconds(
        transport,
        accesses=counts["accesses"] / steps,
        row_bytes=row_bytes,
        policy=result.policy,
        miss_events=waits / steps,
    )
    if prefetch is None:
        waiting = float(cost.miss_link(transport).seconds(row_bytes)) * counts["misses"] / steps
    else:
        if prefetch.misses != counts["misses"] or prefetch.steps != steps:
            raise CostModelError(
                f"prefetch: {prefetch.misses} misses in {prefetch.steps} steps, the result has {counts['misses']} in "
                f"{steps}; both must replay the same trace, policy, slots, contract and phase"
            )
        waiting = (prefetch.stall_seconds + prefetch.predict_seconds) / steps
    return (all_hit + waiting + measured.event_seconds * waits / steps) * 1e3


def _check_number(field, value, positive=False, infinite=False):
    valid = isinstance(value, int | float | np.number) and not isinstance(value, bool) and not math.isnan(value)
    if not valid or value < 0 or (positive and value == 0) or (math.isinf(value) and not infinite):
        raise CostModelError(f"{field}: {value!r} is not a {'positive' if positive else 'non-negative'} number")
