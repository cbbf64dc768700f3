"""Steps per second of a convex head at the size of SST-2 with a small sentence encoder.

    python benchmarks/convex_head.py --steps 100000

Features are random, of the shape (67349, 385) and norm 1; what is timed is all that a private run does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from hf_dpopt.convex import HeadConfig, HeadRun, clip_features, make_head_plan

NUM_EXAMPLES, WIDTH, LABELS = 67_349, 384, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=1024)
    options = parser.parse_args()
    config = HeadConfig(
        head_radius=1.0, feature_norm=1.0, expected_batch_size=options.batch, num_steps=options.steps,
        noise_multiplier=4.0, target_delta=1e-5, l2=1e-3,
    )  # fmt: skip
    plan = make_head_plan(config, num_examples=NUM_EXAMPLES)
    features = clip_features(torch.randn(NUM_EXAMPLES, WIDTH), 1.0, config.bias_feature)
    labels = torch.randint(LABELS, (NUM_EXAMPLES,))
    with tempfile.TemporaryDirectory() as folder:
        run = HeadRun(plan, output_dir=Path(folder, "out"), private_state_dir=Path(folder, "private"))
        began = time.perf_counter()
        run.train(features, labels, LABELS)
        seconds = time.perf_counter() - began
    print(
        f"{options.steps} steps of {options.batch} on {NUM_EXAMPLES} x {WIDTH}: {seconds:.0f} s, "
        f"{options.steps / seconds:.0f} a second, {torch.get_num_threads()} thread(s)"
    )


if __name__ == "__main__":
    main()
