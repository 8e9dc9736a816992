"""The built-in predictors, registered by name (docs/predictors.md), and how their accuracy is measured."""

from host_offload.predictors.accuracy import Accuracy, evaluate
from host_offload.predictors.counts import PreviousToken, RequestCounts, StaticFrequency
from host_offload.predictors.eamc import EAMCMean, EAMCNearest
from host_offload.predictors.linear import LinearNeed, LinearScores
from host_offload.predictors.recorded import Gate1, Gate2, Gate3, Oracle, Recorded
from host_offload.predictors.replay import Step, replay_steps
from host_offload.predictors.tables import CrossLayer, CrossLayerTemporal, Temporal

__all__ = [
    "Accuracy",
    "CrossLayer",
    "CrossLayerTemporal",
    "EAMCMean",
    "EAMCNearest",
    "Gate1",
    "Gate2",
    "Gate3",
    "LinearNeed",
    "LinearScores",
    "Oracle",
    "PreviousToken",
    "Recorded",
    "RequestCounts",
    "StaticFrequency",
    "Step",
    "Temporal",
    "evaluate",
    "replay_steps",
]
