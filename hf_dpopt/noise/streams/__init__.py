"""Noise streams that serve several strategies; those that serve one lie beside it."""

from __future__ import annotations

from hf_dpopt.noise.streams.base import BACKENDS, CorrelatedStream, NoiseStream, State
from hf_dpopt.noise.streams.cost import StreamCost, cost_of_rows
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
    "State",
    "StreamCost",
    "cost_of_rows",
]
