"""`DPTrainer` over shards made by accelerate and by transformers; a resume over another number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dpopt.run.shards import has_marks
from tests import ranks, tiny
from tests.sharded import trained
from tests.sharded.compare import distance
from tests.sharded.trained import IN_SHARDS


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
    def test_every_rank_writes_its_shards_where_that_is_asked_for(self, place, case):
        """SHARDED_STATE_DICT: torch's distributed checkpoint, half of the state in the file of each of two ranks."""
        folder = place / "accelerate" / case / "run" / "checkpoint-2"
        for stem in ("optimizer", "released_state") if case == "blt_dp2" else ("optimizer",):
            parts = sorted((folder / f"{stem}_shards").glob("__*.distcp"))
            if case not in IN_SHARDS:
                assert not parts and not has_marks(torch.load(folder / "optimizer.pt"))
                continue
            assert len(parts) == 2 and (folder / f"{stem}_shards" / ".metadata").exists()
            sizes = [part.stat().st_size for part in parts]
            assert min(sizes) > 0.4 * sum(sizes) and (folder / f"{stem}.pt").stat().st_size < sum(sizes) / 4
            assert has_marks(torch.load(folder / f"{stem}.pt", weights_only=True))

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
