"""Noise streams that serve several strategies; those that serve one lie beside it."""

from __future__ import annotations

from hf_dpopt.noise.streams.base import BACKENDS, CorrelatedStream, NoiseStream, State
from hf_dpopt.noise.streams.cost import Speed, StreamCost, cheapest, cost_of_rows, measure_speed
from hf_dpopt.noise.streams.recurrent import RecurrentStream
from hf_dpopt.noise.streams.rows import HistoryStream, RegeneratedStream, Rows

__all__ = [
    "BACKENDS",
    "CorrelatedStream",
    "HistoryStream",
    "NoiseStream",
    "RecurrentStream",
    "RegeneratedStream",
    "Rows",
    "Speed",
    "State",
    "StreamCost",
    "cheapest",
    "cost_of_rows",
    "measure_speed",
]
