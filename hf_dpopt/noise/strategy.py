"""Contract of a noise strategy: its matrices, sensitivity, error, stream, cost and JSON.

A strategy is a matrix C and a left inverse B of it. The noise of step t is row t of ``B Z`` with independent standard
normal rows of Z: the whole run is one Gaussian mechanism on ``C G``, whose sensitivity is that of C. Both are square
and lower-triangular but for trees, where C has a row for every node.

To add one, write one file: a frozen dataclass with a `name` and `strategy_matrix` (or, for a `ToeplitzStrategy`,
`strategy_coefs`), and a function that tunes it, under `hf_dpopt.noise.registry.register`. All else has a default here
that is right for every C and slow for some.

n = steps, t = step, 0-based.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from scipy.linalg import solve_triangular, toeplitz
from scipy.signal import fftconvolve, lfilter

from hf_dpopt.common.checks import check_choice, check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import sensitivity
from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.streams import (
    BACKENDS,
    HistoryStream,
    NoiseStream,
    RecurrentStream,
    RegeneratedStream,
    Rows,
    StreamCost,
)
from hf_dpopt.noise.workloads import Workload, scheduled_errors
from hf_dpopt.randomness.source import NoiseSource

CHECKED_STEPS = 64  # of what a strategy says of itself, whenever noise is made of it
MAX_ROW_NORM = 1e3  # stddev of the noise of a step relative to that of its draw, which float32 can hold beside it

_BY_NAME: dict[str, type[NoiseStrategy]] = {}


class NoiseStrategy(abc.ABC):
    """A pair (C, B) with ``B C = I``; for any number of steps if it is `anytime`. Equal parameters, equal strategy.

    A subclass that has a `name` of its own can be read back from JSON (`from_parameters`) from then on.
    """

    name: ClassVar[str]
    anytime: ClassVar[bool] = False  # the first t steps of a longer run are the run of t steps, and charged as such
    is_independent: ClassVar[bool] = False  # B = I: no step takes back what another one added
    is_square: ClassVar[bool] = True  # C has one row a step
    is_whole_in_json: ClassVar[bool] = True  # `parameters` says all, so that a resumed run need not tune again
    default_backend: ClassVar[str] = "history"  # what "auto" means where there is no faster stream: one draw a step

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__dict__.get("name")
        if name is None:
            if hasattr(cls, "name"):
                raise TypeError(f"{cls.__qualname__} needs a name of its own: a ledger would read its base back.")
            return
        taken = _BY_NAME.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"Strategies {taken.__qualname__} and {cls.__qualname__} have the same name {name!r}.")
        _BY_NAME[name] = cls

    # --- matrices and errors -----------------------------------------------------------------------------------------

    @property
    def num_bands(self) -> int | None:
        """Number p of bands, if entries of C more than p - 1 below the diagonal are zero, else None."""
        return None

    @abc.abstractmethod
    def strategy_matrix(self, n: int) -> np.ndarray:
        """C, (n, n) lower-triangular; (nodes, n) for a tree."""

    def noising_matrix(self, n: int) -> np.ndarray:
        """B, (n, n); (n, nodes) for a tree."""
        return solve_triangular(self.strategy_matrix(n), np.eye(n), lower=True)

    def toeplitz_coefs(self, n: int) -> np.ndarray | None:
        """First column of C, (n,), if C is Toeplitz; None if it is not."""
        return None

    def sensitivity(self, n: int, participation: Participation) -> float:
        """Largest ``||C u||`` over the participation patterns; unitless; exact or an upper bound, never below."""
        matrix = self.strategy_matrix(n)
        return sensitivity.gram_sensitivity(matrix.T @ matrix, participation)

    def per_query_error(self, n: int, workload: Workload | None = None) -> np.ndarray:
        """Variance of every iterate per unit of noise variance: ``sum_s (A B)[t, s]^2``, (n,). None: prefix sums."""
        noising = self.noising_matrix(n)
        if workload is None:
            return np.square(np.cumsum(noising, axis=0)).sum(axis=1)
        workload.check(n)
        return np.square(workload.matrix() @ noising).sum(axis=1)

    def row_norm(self, t: int, num_steps: int | None = None) -> float:
        """``||B[t, :]||``: stddev of the noise of step t relative to that of its normals.

        Args:
            t: step.
            num_steps: length of the run; needed where a step depends on it, that is, unless the strategy is anytime.
        """
        if num_steps is None and not self.anytime:
            raise DPConfigError(f"The noise of {self.name} depends on the steps of the run: give num_steps.")
        return float(np.linalg.norm(self.noising_matrix(num_steps or t + 1)[t]))

    def noising_rows(self, first: int, end: int, num_steps: int | None = None) -> np.ndarray:
        """Rows first .. end - 1 of B without columns of zeros, (end - first, columns); arguments as for `row_norm`."""
        if num_steps is None and not self.anytime:
            raise DPConfigError(f"The noise of {self.name} depends on the steps of the run: give num_steps.")
        return self.noising_matrix(num_steps or end)[first:end]

    def mean_loss(self, n: int, participation: Participation, workload: Workload | None = None) -> float:
        """Root mean square error of the iterates at noise multiplier 1 and clip 1."""
        return self.sensitivity(n, participation) * float(np.sqrt(self.per_query_error(n, workload).mean()))

    def restarted(self, every: int) -> NoiseStrategy | None:
        """Itself with restarts of its own after `every` steps; None where copies do (`hf_dpopt.noise.restarts`)."""
        return None

    # --- stream and cost ---------------------------------------------------------------------------------------------

    def stream(
        self,
        source: NoiseSource,
        *,
        scale: float,
        num_steps: int,
        first_step: int = 0,
        backend: str = "auto",
    ) -> NoiseStream:
        """Noise of one run, step by step.

        Args:
            source: standard normals under a key that no other stream uses.
            scale: stddev of a coordinate of ``scale * Z``, absolute, in gradient units.
            num_steps: steps at most.
            first_step: step under which the trainer asks for the first.
            backend: "auto": buffers, a ring or a stack where the strategy has them; "history" keeps all draws that
                later steps use, "regenerate" none. The noise is the same, rounding aside.

        Raises:
            DPConfigError: for an unknown backend, counts below 1, or noise that outgrows float32.
        """
        check_choice("backend", backend, BACKENDS)
        check_count("num_steps", num_steps)
        self.check_row_norms(num_steps)
        common = {"scale": scale, "num_steps": num_steps, "first_step": first_step}
        return self._make_stream(source, backend, common)

    def _make_stream(self, source: NoiseSource, backend: str, common: dict[str, Any]) -> NoiseStream:
        """Stream for checked options; `common` is what every `CorrelatedStream` takes by keyword."""
        rows = self.rows(common["num_steps"])
        if (self.default_backend if backend == "auto" else backend) == "history":
            return HistoryStream(rows, source, window=self._window(common["num_steps"]), **common)
        return RegeneratedStream(rows, source, **common)

    def rows(self, num_steps: int) -> Rows:
        """Rows of a lower-triangular B for a run of at most `num_steps` steps: t -> row t, (t + 1,).

        Raises:
            DPConfigError: for a B that does not make its noise from one draw a step.
        """
        matrix = self.noising_matrix(num_steps)
        if matrix.shape != (num_steps, num_steps) or np.triu(matrix, 1).any():
            raise DPConfigError(
                f"The noise of {self.name} is not made step by step from one draw a step. Give it a "
                "restart_every of its own, if it takes one, or use another mechanism."
            )
        return lambda t: matrix[t, : t + 1]

    def check_claims(self, num_steps: int) -> None:
        """Refuse a strategy that is not what it says of itself, where privacy rests on it.

        Samplers ask whether noise is independent, how many bands it has, and whether the first steps of a run are a
        run: a wrong answer makes epsilon false. The first `CHECKED_STEPS` steps are looked at.

        Args:
            num_steps: steps that it was made for.

        Raises:
            DPConfigError: for a matrix that contradicts `is_independent`, `num_bands`, `is_square` or `anytime`.
        """
        n = min(num_steps, CHECKED_STEPS)
        matrix, bands = self.strategy_matrix(n), self.num_bands
        claim = ""
        if self.is_square != (len(matrix) == n) or (self.is_square and np.triu(matrix, 1).any()):
            claim = f"is_square={self.is_square}"
        elif self.is_independent and not np.array_equal(matrix, np.eye(n)):
            claim = "is_independent=True"
        elif bands is not None and np.tril(matrix, -bands).any():
            claim = f"num_bands={bands}"
        elif self.anytime and self.is_square:
            begun = self.strategy_matrix(n - n // 2)
            if not np.allclose(begun, matrix[: len(begun), : len(begun)], rtol=1e-9, atol=1e-12):
                claim = "anytime=True"
        if claim:
            raise DPConfigError(
                f"{type(self).__name__} says {claim}, and its matrix of {n} steps is not so: what it would be charged "
                "rests on that. Correct the strategy."
            )

    def check_row_norms(self, num_steps: int) -> None:
        """Refuse noise that grows so much beyond its draws that float32 loses the new draw."""
        largest = self._largest_row_norm(num_steps)
        if not largest <= MAX_ROW_NORM:
            raise DPConfigError(
                f"The noise of {self.name} grows to {largest:.3g} times its draws within {num_steps} steps: float32 "
                "would round the new draw away. Use coefficients whose inverse does not grow."
            )

    def _largest_row_norm(self, num_steps: int) -> float:
        return float(np.linalg.norm(self.noising_matrix(num_steps), axis=1).max())

    def cost(self, num_steps: int, *, backend: str = "auto") -> StreamCost:
        """Cost of what `stream` makes of the same arguments."""
        used, window = float(self._draws_used(num_steps).mean()), self._window(num_steps)
        if (self.default_backend if backend == "auto" else backend) == "history":
            return StreamCost(1, used, num_steps if window is None else min(window - 1, num_steps))
        return StreamCost(used, used, 0)

    def _window(self, num_steps: int) -> int | None:
        """Last draws that the noise of a step is made of, its own included, in every step; None if all may be."""
        return None

    def _draws_used(self, num_steps: int) -> np.ndarray:
        """Number of draws that the noise of each step is made of, (num_steps,)."""
        return np.arange(1, num_steps + 1)

    # --- JSON --------------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Any]:
        """Name and every number that fixes the strategy; JSON-able."""
        return {"name": self.name, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def read(cls, values: dict[str, Any]) -> NoiseStrategy:
        """Make the strategy from its `parameters` without the name."""
        if "base" in values:
            values["base"] = from_parameters(values["base"])
        return cls(**values)

    def digest(self) -> str:
        """Digest that a calibration, a stream and a checkpoint are bound to."""
        return hashlib.sha256(json.dumps(self.parameters(), sort_keys=True).encode()).hexdigest()


class ToeplitzStrategy(NoiseStrategy):
    """A strategy whose matrices are Toeplitz: two sequences of coefficients say all, for every n."""

    anytime: ClassVar[bool] = True

    @abc.abstractmethod
    def strategy_coefs(self, n: int) -> np.ndarray:
        """First column of C, (n,)."""

    def noising_coefs(self, n: int) -> np.ndarray:
        """First column of B, (n,)."""
        return inverse_coefs(self.strategy_coefs(n))

    def toeplitz_coefs(self, n: int) -> np.ndarray | None:
        return self.strategy_coefs(n)

    def strategy_matrix(self, n: int) -> np.ndarray:
        return np.tril(toeplitz(self.strategy_coefs(n)))

    def noising_matrix(self, n: int) -> np.ndarray:
        return np.tril(toeplitz(self.noising_coefs(n)))

    def sensitivity(self, n: int, participation: Participation) -> float:
        coefs, bands = self.strategy_coefs(n), self.num_bands
        if sensitivity.is_monotone(coefs):
            return sensitivity.toeplitz_sensitivity(coefs, participation)
        if participation.fits(n) == 1:
            return float(np.linalg.norm(coefs))
        if bands is not None and bands <= participation.min_sep:
            return sensitivity.banded_sensitivity(np.sqrt(np.cumsum(coefs**2))[::-1], participation)
        return sensitivity.toeplitz_sensitivity_bound(coefs, participation)

    def per_query_error(self, n: int, workload: Workload | None = None) -> np.ndarray:
        noising = self.noising_coefs(n)
        if workload is None:
            return np.cumsum(np.cumsum(noising) ** 2)
        workload.check(n)
        if workload.step_sizes is None:
            return np.cumsum(fftconvolve(workload.coefs, noising)[:n] ** 2)
        return scheduled_errors(fftconvolve(workload.decay, noising)[:n], np.asarray(workload.step_sizes))

    def row_norm(self, t: int, num_steps: int | None = None) -> float:
        return float(np.linalg.norm(self.noising_coefs(t + 1)))

    def noising_rows(self, first: int, end: int, num_steps: int | None = None) -> np.ndarray:
        coefs = np.concatenate([self.noising_coefs(end)[::-1], np.zeros(end - 1)])
        return np.stack([coefs[end - 1 - t : 2 * end - 1 - t] for t in range(first, end)])

    def rows(self, num_steps: int) -> Rows:
        coefs = self.noising_coefs(num_steps)
        return lambda t: coefs[: t + 1][::-1]

    def _make_stream(self, source: NoiseSource, backend: str, common: dict[str, Any]) -> NoiseStream:
        if backend == "auto" and self.num_bands is not None:
            return RecurrentStream(self.strategy_coefs(self.num_bands).tolist(), source, **common)
        return super()._make_stream(source, backend, common)

    def cost(self, num_steps: int, *, backend: str = "auto") -> StreamCost:
        if backend == "auto" and self.num_bands is not None:
            return StreamCost(1, self.num_bands, self.num_bands - 1)
        return super().cost(num_steps, backend=backend)

    def _largest_row_norm(self, num_steps: int) -> float:
        return self.row_norm(num_steps - 1)  # every row holds the one before

    def _draws_used(self, num_steps: int) -> np.ndarray:
        return np.cumsum(self.noising_coefs(num_steps) != 0)

    def _window(self, num_steps: int) -> int | None:
        return int(np.flatnonzero(self.noising_coefs(num_steps))[-1]) + 1


# --- JSON ------------------------------------------------------------------------------------------------------------


def strategies() -> dict[str, type[NoiseStrategy]]:
    """Name -> class, of all that can be read from JSON."""
    return dict(_BY_NAME)


def from_parameters(parameters: Mapping[str, Any]) -> NoiseStrategy:
    """The strategy with these parameters.

    Formal guarantee: the parameters of what is returned are those that were given; the digest is then the same, too.

    Args:
        parameters: what `NoiseStrategy.parameters` gave, also after a way through JSON.

    Raises:
        DPConfigError: for a name that no strategy has, and for parameters that no strategy wrote.
    """
    name = parameters.get("name") if isinstance(parameters, Mapping) else None
    if not isinstance(name, str) or name not in _BY_NAME:
        raise DPConfigError(f"No strategy has the name {name!r}. Use one of {', '.join(sorted(_BY_NAME))}.")
    cls = _BY_NAME[name]
    if not cls.is_whole_in_json:
        raise DPConfigError(f"The parameters of {name} do not contain its matrix. Tune it again.")
    try:
        strategy = cls.read({key: value for key, value in parameters.items() if key != "name"})
        as_written = _canonical(strategy.parameters()) == _canonical(parameters)
    except DPConfigError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DPConfigError(f"The parameters of {name} were edited: {error}. Use what parameters() gave.") from error
    if not as_written:
        raise DPConfigError(f"The parameters of {name} were edited: {parameters!r:.200}. Use what parameters() gave.")
    return strategy


def is_whole(parameters: Mapping[str, Any]) -> bool:
    """Whether a strategy can be read back from its parameters alone."""
    cls = _BY_NAME.get(parameters["name"])
    known = cls is None or cls.is_whole_in_json  # an unknown name is refused where it is read
    return known and ("base" not in parameters or "name" not in parameters["base"] or is_whole(parameters["base"]))


def _canonical(parameters: Mapping[str, Any]) -> str:
    """JSON in which tuples are lists, and 1 is 1.0, but true is neither."""
    return json.dumps(json.loads(json.dumps(dict(parameters)), parse_int=float), sort_keys=True)


# --- linear algebra --------------------------------------------------------------------------------------------------


def lower_root(gram: np.ndarray) -> np.ndarray:
    """The lower-triangular C with ``C^T C = gram``."""
    return np.linalg.cholesky(gram[::-1, ::-1]).T[::-1, ::-1].copy()


def inverse_coefs(coefs: np.ndarray) -> np.ndarray:
    """Coefficients of 1 / f(z) from those of f(z), (n,)."""
    unit = np.zeros(len(coefs))
    unit[0] = 1.0
    return lfilter([1.0], coefs, unit)
