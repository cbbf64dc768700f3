"""Index of files of shards: what is read back is what was written, the index is data alone, and tells no place."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.run.shards import folder_of, read_shards, write_shards
from tests import tiny
from tests.ranks import launch


def _work(folder: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    moments = [torch.randn(4, 3), torch.randn(5).bfloat16()]
    state = {"state": [distribute_tensor(moment, mesh, [Shard(0)]) for moment in moments], "lr": 0.1}
    file = folder / "optimizer.pt"
    rest = write_shards(state, file)
    like = state["state"][0]
    found = read_shards(rest, file, like)
    is_same = [torch.equal(a.full_tensor(), b) for a, b in zip(found["state"], moments, strict=True)]
    index = (folder_of(file) / ".metadata").read_bytes()
    written = {path.name: path.read_bytes() for path in folder_of(file).iterdir()}
    names_place = [name for name, content in written.items() if folder.name.encode() in content]  # in parts, perhaps
    said = {}
    assert b"__0_0.distcp" in index
    (folder / "_0.distcp").write_bytes(written["__0_0.distcp"])
    for name, content in {
        "code": pickle.dumps(tiny.Bomb(folder / "ran")), "another": pickle.dumps([1]), "torn": index[:-9],
        "elsewhere": index.replace(b"__0_0.distcp", b"../_0.distcp"),
    }.items():  # fmt: skip
        (folder_of(file) / ".metadata").write_bytes(content)
        try:
            read_shards(rest, file, like)
        except DPConfigError as error:
            said[name] = str(error)
        except BaseException as error:  # of which torch.distributed.checkpoint has one
            said[name] = f"another error: {error!r}"
    torch.save({"is_same": is_same, "said": said, "names_place": names_place}, folder / "found.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    launch(lambda: _work(folder), 1, folder)
    return folder


@pytest.mark.xdist_group("shard_index")
class TestFiles:
    def test_what_was_written_is_read(self, place):
        assert torch.load(place / "found.pt")["is_same"] == [True, True]

    def test_nothing_in_an_index_is_run(self, place):
        assert not (place / "ran").exists()

    @pytest.mark.parametrize("name", ["code", "another", "torn", "elsewhere"])
    def test_another_index_is_refused_in_one_sentence(self, place, name):
        assert "nothing was loaded" in torch.load(place / "found.pt")["said"][name]

    def test_no_file_names_the_folder_of_the_run(self, place):
        assert torch.load(place / "found.pt")["names_place"] == []
