r"""How far one record moves a sum of clipped gradients and a scaled sum of their squares, together.

A record with the clipped gradient g, ``|g| <= C``, contributes the vector ``(g, s g^2)``: the square is elementwise
and s its scale (1 / gradient units). Both parts get noise of one stddev, in proportion to the joint sensitivity D, so
the sum of squares has noise ``1 / s`` times as large.

**More or fewer records, and a record without gradient** (`add_or_remove_one`, `zero_out`). One contribution appears,
so ``D^2 = max |g|^2 + s^2 sum_i g_i^4``. With ``t = |g|^2`` the second sum is at most ``t^2``, for its terms are the
squares of numbers >= 0 that add up to t; equal where one coordinate has all of it. So ``D^2 = C^2 + s^2 C^4``.

**A replaced record** (`replace_one`). ``D^2 = max |g - h|^2 + s^2 |g^2 - h^2|^2`` over two clipped gradients. The
differences of the squares are the diagonal of ``g g^T - h h^T``, whose squared Frobenius norm is
``|g|^4 + |h|^4 - 2 a^2`` with ``a = <g, h>``. For every a the bound
``|g|^2 + |h|^2 - 2 a + s^2 (|g|^4 + |h|^4 - 2 a^2)`` grows with both norms, so both are C, and what is left is concave
in a over [-C^2, C^2]:

* ``s^2 <= 1 / (2 C^2)``: it falls in a, the maximum is at ``a = -C^2``: ``D = 2 C``. The squares are free.
* Larger s: the maximum is at ``a = -1 / (2 s^2)``: ``D^2 = 2 C^2 + 2 s^2 C^4 + 1 / (2 s^2)``.

Both are attained from two coordinates on: ``g - h`` and ``g + h`` are at a right angle where g and h are equally long,
and with the two at 45 degrees to the axes ``g g^T - h h^T`` is diagonal. (With one coordinate the second case is an
upper bound.) What is free there is free beside ``2 C``: adding or removing a record moves the sums by
``C sqrt(1 + s^2 C^2)`` at that scale, at most 1.23 C.

**Steps.** A record enters a step once, so a step is the (subsampled) Gaussian mechanism of sensitivity D, and the
accountant needs no change. **Correlated noise** of one strategy matrix S for both parts is its noise for vectors of
norm at most D: with contributions v_t in the steps of a pattern,
``|sum_t S_t v_t^T|^2 <= D^2 sum_{t, t'} |S^T S|_{t t'}`` over the pairs of its steps, which is D^2 times the squared
sensitivity that the package computes. Two different matrices are not used here.

The paper (Kalinin, Upadhyay and Lampert) has a regime in which the second moment is free; its proofs were not at hand,
so these are ours, and the tests maximise over gradients without them.
"""

from __future__ import annotations

import math

from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR, Adjacency


def free_scale(clip: float) -> float:
    """Largest scale at which a replaced record moves gradients and squares no farther than gradients alone."""
    return 1 / (math.sqrt(2) * clip)


def joint_sensitivity(clip: float, scale: float, adjacency: Adjacency) -> float:
    """Largest change of ``(sum g, scale * sum g^2)`` between adjacent datasets, in gradient units.

    Formal guarantee: exact for gradients of two coordinates or more; see the module.

    Args:
        clip: bound on the norm of a record's gradient, > 0.
        scale: of the squares, 1 / gradient units, >= 0.
        adjacency: which datasets are neighbours.
    """
    relative = scale * clip  # unitless
    if adjacency != "replace_one":
        return SENSITIVITY_FACTOR[adjacency] * clip * math.sqrt(1 + relative**2)
    if scale <= free_scale(clip):
        return SENSITIVITY_FACTOR[adjacency] * clip
    return clip * math.sqrt(2 + 2 * relative**2 + 1 / (2 * relative**2))
