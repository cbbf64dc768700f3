"""Tables 1 and 2: how stationary error and sensitivity scale, by exact formulas.

Table 1 has rates of the stationary error of linear regression, with eigenvalues ``k^-a``, the largest of them 1, and
``nu = eta mu``: each error over its rate, which a right rate keeps within constants. So has the label noise of Eq. 10.

Table 2: squared sensitivities of a run without end, and the slope of the stationary error of linear regression in the
learning rate: 1 for DP-SGD, 3/2 for the best damped anti-PGD, 2 up to a squared logarithm for nu-DP-FTRL. On a finite
range the logarithm lowers the last one.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from hf_dpopt.noise import BandedInverse, NuDPFTRL, Participation
from recipes.paper.correlated_noise import exact
from recipes.paper.runs import experiment, log_slope

NUS = [0.1, 0.01, 1e-3, 1e-4]
ETAS = np.geomspace(1e-4, 1e-2, 9)
D = 128


def table_1() -> dict[str, Any]:
    """Every error over its rate, the range of that, and how far nu-DP-FTRL is from the best and from the bound."""
    rows = []
    for d, exponent, eta in itertools.product((8, 32, 128), (0.0, 0.5, 1.0, 2.0), (1e-4, 1e-3, 1e-2)):
        eigenvalues = exact.power_law(d, exponent)
        d_eff, mu = float(eigenvalues.sum()), float(eigenvalues.min())
        lower, best, sgd, nu = (
            error(eigenvalues, eta)
            for error in (
                exact.regression_lower_bound,
                exact.regression_best,
                exact.regression_sgd,
                exact.regression_nu,
            )
        )
        labels = exact.excess_loss(exact.noise_gains_labels(eigenvalues, eta), eigenvalues, eta)
        rows.append({
            "d": d, "exponent": exponent, "eta": eta, "d_eff": d_eff, "nu_over_best": nu / best,
            "nu_over_lower": nu / lower, "sgd_over_nu": sgd / nu, "lower_over_rate": lower / (eta**2 * d_eff),
            "sgd_over_rate": sgd / (eta * d), "nu_over_rate": nu / (eta * np.log(eta * mu)) ** 2 / d_eff,
            "labels_over_rate": labels / (eta * d_eff),
        })  # fmt: skip
    ranges = {key: [float(f([row[key] for row in rows])) for f in (min, max)] for key in rows[0] if "_over_" in key}
    return {"ranges": ranges, "rows": rows}


def compute(given: Any = None) -> dict[str, Any]:
    sensitivities = []
    for nu in NUS:
        long_enough = int(20 / nu)  # the coefficients have decayed by e^-20
        once = Participation()
        sensitivities.append({
            "nu": nu,
            "nu_dpftrl": exact.gamma_squared_nu(nu),
            "nu_dpftrl_from_coefficients": NuDPFTRL(nu).sensitivity(long_enough, once) ** 2,
            "log_8_over_nu_over_pi": float(np.log(8 / nu) / np.pi),
            "damped_anti_pgd": exact.gamma_squared_damped(nu),
            "damped_anti_pgd_from_coefficients": BandedInverse((1.0, nu - 1.0)).sensitivity(long_enough, once) ** 2,
        })  # fmt: skip
    anti_pgd = {str(n): BandedInverse((1.0, -1.0)).sensitivity(n, Participation()) ** 2 for n in (100, 1000, 10_000)}
    slopes = {}
    for name, eigenvalues in (("1/k", exact.power_law(D)), ("all 1", np.ones(D))):
        linearised = name == "all 1"  # 128 equal directions feed back too much to be left to sampled x
        damped = [exact.best_damped(eigenvalues, eta, linearised=linearised) for eta in ETAS]
        errors = {
            "sgd": [exact.regression_sgd(eigenvalues, eta, linearised=linearised) for eta in ETAS],
            "best_damped_anti_pgd": [error for error, _ in damped],
            "nu_dpftrl": [exact.regression_nu(eigenvalues, eta, linearised=linearised) for eta in ETAS],
        }
        local = {key: log_slope(ETAS[:2], values[:2]) for key, values in errors.items()}
        slopes[name] = {
            "sampled_x": not linearised,
            "slope_in_eta": {key: log_slope(ETAS, values) for key, values in errors.items()},
            "slope_at_the_smallest_eta": local,
            "best_damping_over_root_of_eta_mean_eigenvalue": [
                nu / float(np.sqrt(eta * eigenvalues.mean())) for eta, (_, nu) in zip(ETAS, damped, strict=True)
            ],
        }
    return {
        "table_1": table_1(),
        "squared_sensitivities": sensitivities, "anti_pgd_squared_sensitivity_by_steps": anti_pgd,
        "eta_range": [float(ETAS[0]), float(ETAS[-1])], "slopes": slopes,
    }  # fmt: skip


main = experiment("tables", compute)

if __name__ == "__main__":
    main()
