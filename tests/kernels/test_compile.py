"""The kernels compile for GPUs that are not here, fit into shared memory, and add up outside of products."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install -c constraints.txt '.[test]'")

# Bytes of shared memory that a block may use: A100, L40 and RTX 4090, H100.
CAPACITY = {80: 166_912, 89: 101_376, 90: 232_448}

# In a process of its own: in this one, Triton may have been told to interpret.
SCRIPT = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_dpopt.clipping.kernels import cross_entropy, layer_norm, outer
from hf_dpopt.randomness import kernel as noise

STRIDES = ["left_b", "left_t", "right_b", "right_t", "stride_b", "stride_t"]
POINTERS = {"left_ptr": "*bf16", "right_ptr": "*bf16", "logits_ptr": "*bf16", "grad_ptr": "*bf16", "labels_ptr": "*i64"}
POINTERS |= {"key_ptr": "*i32", "stddev_ptr": "*fp64", "first": "i64"}


def compiled(kernel, capability, constants, **options):
    types = {
        name: "constexpr" if name in constants else POINTERS.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in constants and (name.endswith("_ptr") or name in [*STRIDES, "P", "Q", "V", "D"])
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    sums.update(re.findall(r"= tt\\.dot [^,]+, [^,]+, (%\\w+)", made.asm["ttir"]))
    return made.metadata.shared


unit = {"left_p": 1, "right_q": 1}
outer_sums = {**unit, "BLOCK_P": outer.BLOCK_P, "BLOCK_Q": outer.BLOCK_Q, "BLOCK_T": 128}
shared, sums = {}, set()
for c in map(int, sys.argv[1:]):
    shared[c] = [
        compiled(outer._weighted_sum_kernel, c, {**outer_sums, "ACCUMULATE": True}, num_warps=8, num_stages=3),
        compiled(outer._squares_kernel, c, {**unit, "BLOCK_T": 64, "BLOCK_K": 128}, num_warps=4, num_stages=3),
        compiled(outer._squares_kernel, c, {**unit, "BLOCK_T": 64, "BLOCK_K": 64}, num_warps=4, num_stages=4),
        compiled(cross_entropy._forward_kernel, c, {"BLOCK_V": 4096}, num_warps=8),
        compiled(cross_entropy._gradient_kernel, c, {"BLOCK_V": 4096}, num_warps=8),
        compiled(layer_norm._kernel, c, {"BLOCK_T": 32, "BLOCK_D": 128}, num_warps=4),
        compiled(noise._add_kernel, c, {"BLOCKS": noise.BLOCKS}, num_warps=4),
    ]
print(json.dumps([shared, sorted(sums)]))
"""


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_they_compile_and_fit(repo, tmp_path):
    """And no product of a kernel starts from a sum: tensor cores truncate, and norms would come out too small."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(repo), *sys.path])}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, CAPACITY)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shared, added_to = json.loads(done.stdout.splitlines()[-1])
    assert added_to and all(name.startswith("%cst") for name in added_to), added_to
    assert set(shared) == {str(c) for c in CAPACITY}
    for capability, capacity in CAPACITY.items():
        assert max(shared[str(capability)]) <= capacity
