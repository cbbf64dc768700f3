"""`DPTrainer` over shards made by accelerate and by transformers; a resume over another number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dpopt.common.sharding import has_shards
from tests.helpers import ranks, tiny
from tests.sharded import trained
from tests.sharded.compare import distance


def launch(out: Path, source: Path, how: str, size: int, *jobs: str) -> None:
    """Run jobs over so many processes, and wait for them."""
    ranks.launch(lambda: trained.main(out, source, how, list(jobs)), size, out)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("trained")
    tiny.model(dropout=0.0).save_pretrained(place / "source")
    source = place / "source"
    launch(place / "one", source, "plain", 1, "blt_dp2", "filtered", "lora", "average", "checked", "eval")
    kept = ("blt_dp2/first", "blt_dp2/second", "lora/first", "filtered/first")
    launch(place / "accelerate", source, "accelerate", 2, "average", "eval", *kept)
    launch(place / "accelerate", source, "accelerate", 3, "lora/second", "filtered/second")
    launch(place / "transformers", source, "transformers", 2, "checked")
    return place


def load(place: Path, how: str, job: str) -> dict[str, Any]:
    found = torch.load(place / how / f"{job}.pt")
    assert "error" not in found, found["error"]
    return found


@pytest.mark.timeout(400)
@pytest.mark.xdist_group("sharded_trainer")
class TestTrainer:
    @pytest.mark.parametrize(
        "how, case, part",
        [
            ("accelerate", "lora", "second"),
            ("accelerate", "average", "whole"),
            ("accelerate", "eval", "whole"),
            ("accelerate", "blt_dp2", "second"),
            ("accelerate", "filtered", "second"),
            ("transformers", "checked", "whole"),
        ],
    )
    def test_the_weights_are_those_of_one_process(self, place, how, case, part):
        one, two = load(place, "one", f"{case}-whole"), load(place, how, f"{case}-{part}")
        assert distance(one["weights"], two["weights"]) <= 1e-6
        assert len(two["sharded"]) >= len(two["weights"])  # every trained weight lies in shards, also after evaluation

    @pytest.mark.parametrize("case", ["blt_dp2", "filtered", "lora"])
    def test_checkpoints_are_whole_files(self, place, case):
        """Also where accelerate is asked for SHARDED_STATE_DICT, its default: any number of processes resumes them."""
        folder = place / "accelerate" / case / "run" / "checkpoint-2"
        assert has_shards(torch.load(folder / "optimizer.pt", weights_only=True))  # marked, as they lay in shards
        assert not [path for path in folder.iterdir() if path.is_dir()]

    def test_the_self_check_of_shards_ran_and_says_what_it_left_out(self, place):
        assert "in shards" in load(place, "transformers", "checked-whole")["self_check"]

    def test_evaluation_sees_the_same_model(self, place):
        logs = [load(place, how, "eval-whole")["log"] for how in ("one", "accelerate")]
        losses = [[line["eval_loss"] for line in log if "eval_loss" in line] for log in logs]
        assert losses[0] and losses[0] == pytest.approx(losses[1], rel=1e-5)

    def test_what_is_saved_is_the_whole_model(self, place):
        from safetensors.torch import load_file

        for how, case, file in (
            ("accelerate", "eval", "model.safetensors"),
            ("transformers", "checked", "model.safetensors"),
            ("accelerate", "lora", "adapter_model.safetensors"),
        ):
            one, two = (load_file(place / where / case / "run" / file) for where in ("one", how))
            assert distance(one, two) <= 1e-6
