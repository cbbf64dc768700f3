"""The files of docs/clusters/ and the Dockerfile, run as far as one machine without a GPU can."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from transformers import BertTokenizer

from hf_dpopt.run.ledger import LEDGER, Ledger
from tests.helpers import tiny
from tests.house.test_packaging import instructions

slow = pytest.mark.slow


def _files(repo: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in (repo / "docs" / "clusters").iterdir() if file.is_file()}


@pytest.fixture
def place(repo: Path, tmp_path: Path) -> Path:
    """A folder with the files, a tiny model, its tokenizer, and rows in two Parquet files."""
    for name, content in _files(repo).items():
        (tmp_path / name).write_text(content)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", *(f"w{i}" for i in range(37))]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    tiny.model(num_hidden_layers=1, max_position_embeddings=16).save_pretrained(tmp_path / "model")
    rows = datasets.Dataset.from_list(tiny.records())
    (tmp_path / "data").mkdir()
    for i in range(2):
        rows.shard(2, i, contiguous=True).to_parquet(str(tmp_path / "data" / f"train-{i}.parquet"))
    return tmp_path


def _environment(place: Path, repo: Path, **more: str) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{place / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(repo),
        "MODEL": str(place / "model"), "TRAIN_FILES": str(place / "data" / "train-*.parquet"), "BATCH": "16",
        "HF_DPOPT_PRIVATE_DIR": str(place / "keys"), "HF_HOME": str(place / "cache"), "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true", "STEPS": "6", **more,
    }  # fmt: skip


SMALL = ["--save_steps", "2", "--report_to", "none", "--disable_tqdm", "True", "--logging_steps", "1"]


def test_the_page_links_to_the_files_and_they_parse(repo: Path) -> None:
    files = _files(repo)
    page = (repo / "docs" / "clusters.md").read_text()
    assert (
        set(files)
        == set(re.findall(r"\]\(clusters/([\w.]+)\)", page))
        == {"train.py", "train.sh", "train.sbatch", "train.yaml"}
    )
    for name in ("train.sh", "train.sbatch"):
        assert files[name].startswith("#!/usr/bin/env bash\n")
        assert subprocess.run(["bash", "-n"], input=files[name], text=True, capture_output=True).returncode == 0
    compile(files["train.py"], "train.py", "exec")


@slow
def test_torchrun_trains_on_two_processes_and_goes_on(place: Path, repo: Path) -> None:
    command = ["bash", "train.sh", *SMALL, "--use_cpu"]
    done = subprocess.run(
        command, cwd=place, env=_environment(place, repo, PROCESSES="2"), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ledger = Ledger.read(place / "runs/one" / LEDGER)
    assert ledger.charged == (6,) and ledger.plan is not None and ledger.plan["target_epsilon"] == 8
    assert (place / "runs/one/model.safetensors").exists()
    assert "on 2 process(es)" in (place / "runs/one/privacy/statement.md").read_text()


SRUN = """#!{python}
import os, signal, subprocess, sys, time
from pathlib import Path

arguments = [a for a in sys.argv[1:] if not a.startswith("--kill-on-bad-exit")]
tasks = [
    subprocess.Popen(arguments, env=os.environ | {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), "SLURM_NTASKS": "2"}})
    for i in range(2)
]
warned = Path("warned")
while any(task.poll() is None for task in tasks):
    if not warned.exists() and Path("runs/array-2/checkpoint-2").exists():  # the time is nearly over
        warned.touch()
        for task in tasks:
            task.send_signal(signal.SIGUSR1)
    time.sleep(0.05)
sys.exit(max(task.returncode for task in tasks))
"""
# The image is this machine; what is outside of the bound folders is not noticed.
APPTAINER = """#!/usr/bin/env bash
[ "$1 $2 $3 $5 $7" = "exec --nv --bind --pwd hf_dpopt.sif" ] || exit 9
for folder in ${4//,/ }; do [ -d "$folder" ] || exit 8; done
cd "$6" && touch in_image && shift 7 && exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> scontrol.log; fi
"""


@slow
def test_slurm_requeues_a_run_that_was_warned_and_it_ends(place: Path, repo: Path) -> None:
    (place / "bin").mkdir()
    scripts = {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL, "apptainer": APPTAINER}
    for name, content in scripts.items():
        (place / "bin" / name).write_text(content)
        (place / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "2"}
    environment = _environment(place, repo, SLURM_JOB_NODELIST="localhost", STEPS="40", IMAGE="hf_dpopt.sif", **job)
    codes = []
    for _ in range(2):
        done = subprocess.run(
            ["bash", "train.sbatch", *SMALL, "--use_cpu"], cwd=place, env=environment, capture_output=True, text=True,
            timeout=280,
        )  # fmt: skip
        codes.append(done.returncode)
        charged = Ledger.read(place / "runs/array-2" / LEDGER).charged
        assert done.returncode != 75 or 2 <= charged[0] < 40, charged
    assert codes == [75, 0], done.stderr[-3000:]
    assert (place / "scontrol.log").read_text() == "requeue 77_2\n"
    assert charged == (40,), "one chain, nothing paid twice"
    assert (place / "in_image").exists()


def test_kubernetes_names_lead_somewhere(repo: Path) -> None:
    parts: dict[str, dict[str, Any]] = {}
    for part in yaml.safe_load_all(_files(repo)["train.yaml"]):
        parts.setdefault(part["kind"], {})[part["metadata"]["name"]] = part
    assert set(parts) == {"Secret", "StorageClass", "PersistentVolumeClaim", "Service", "Job"}
    job = parts["Job"]["hf-dpopt"]["spec"]
    pod = job["template"]["spec"]
    (train,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in [train, *pod["initContainers"]]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
    claims = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    assert claims == set(parts["PersistentVolumeClaim"])
    (storage,) = parts["StorageClass"].values()
    named = {v for k, v in storage["parameters"].items() if k.endswith("secret-name")}
    assert named == {"hf-dpopt-keys"} and named < set(parts["Secret"])
    private = parts["PersistentVolumeClaim"]["hf-dpopt-private"]["spec"]
    assert private["storageClassName"] == storage["metadata"]["name"] and storage["reclaimPolicy"] == "Retain"
    for entry in train["env"]:
        if "valueFrom" in entry:
            reference = entry["valueFrom"]["secretKeyRef"]
            assert reference["key"] in parts["Secret"][reference["name"]]["stringData"]
    environment = {entry["name"]: entry.get("value") for entry in train["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in train["volumeMounts"]}
    assert environment["HF_DPOPT_PRIVATE_DIR"].startswith(mounts["private"] + "/")
    (output_dir,) = (a.split("=")[1] for a in train["args"] if a.startswith("--output_dir="))
    assert output_dir.startswith(mounts["runs"] + "/") and not output_dir.startswith(mounts["private"])
    shutdown = next(int(a.split("=")[1]) for a in train["command"] if a.startswith("--shutdown-timeout="))
    assert pod["terminationGracePeriodSeconds"] > shutdown
    uid = next(
        rest.split("=")[1] for keyword, rest in instructions(repo) if keyword == "ARG" and rest.startswith("UID=")
    )
    assert pod["securityContext"]["runAsUser"] == int(uid) and pod["securityContext"]["runAsNonRoot"]


@slow
def test_the_options_of_the_files_are_those_there_are(repo: Path) -> None:
    """Options of the trainer, and of torchrun."""
    from hf_dpopt import DPTrainingArguments

    files = _files(repo)
    launcher = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--help"], capture_output=True, text=True
    )
    known = set(re.findall(r"--[a-z-]+", launcher.stdout))
    fields = {f"--{name}" for name in DPTrainingArguments.__dataclass_fields__}
    job = next(part for part in yaml.safe_load_all(files["train.yaml"]) if part["kind"] == "Job")
    (train,) = job["spec"]["template"]["spec"]["containers"]
    flags = [a.split("=")[0] for a in (*train["command"], *train["args"]) if a.startswith("--")]
    flags += re.findall(r"(?<![\w-])--[a-z_-]+", files["train.sh"])
    assert flags and set(flags) <= known | fields, set(flags) - known - fields


@slow
@pytest.mark.parametrize("name", ["load", "write down"])
def test_shards_are_memory_mapped_and_streams_written_down(repo: Path, place: Path, monkeypatch, name: str) -> None:
    """The snippets of the page give what the trainer takes, the same rows, without holding them in memory."""
    text = (repo / "docs" / "clusters.md").read_text().partition("## Data in shards, and streams")[2]
    load, write = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(place)
    files = str(place / "data" / "train-*.parquet")
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    made: dict[str, Any] = {"stream": stream}
    exec(load if name == "load" else write, made)
    found = made["train_dataset"]
    assert found.cache_files, "Arrow files on the disk, which are mapped"
    assert [row["input_ids"] for row in found] == [row["input_ids"] for row in tiny.records()]
    tiny.trainer(place / "out", train_dataset=found, max_steps=2).train()


# --- the image ---
