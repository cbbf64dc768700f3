"""Small data: 5,000 made-up notes of 12 departments at epsilon 3, by the command that `hf-dpopt plan` prints.

    python benchmarks/patient_notes.py --model <folder or name of an encoder> --output docs/patient_notes.json

Asks `hf-dpopt plan` for advice, runs the command that it prints with these files, labels and this model in it, and
writes the accuracy with the share of the largest class; with --compare also that of the same without privacy.

The notes are not separable: a note may have symptoms of other departments, and some departments share symptoms.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parents[1]
NUM_TRAIN, NUM_HELD_OUT, EPSILON = 5_000, 1_000, 3.0
PLAN = ("plan", "--num_examples", str(NUM_TRAIN), "--target_epsilon", f"{EPSILON:g}")
PROGRAM = (sys.executable, "-c", "from hf_dpopt.cli.app import main; main()")  # as `hf-dpopt`

# department -> its share of the notes in percent, what patients complain of, what is found, what is done
DEPARTMENTS: dict[str, tuple[int, str, str, str]] = {
    "cardiology": (
        10,
        "chest tightness on exertion|palpitations at night|swollen ankles|breathlessness when lying flat|a fainting "
        "spell while climbing stairs|a racing pulse",
        "a systolic murmur|an irregular rhythm on the ECG|a raised troponin|a low ejection fraction",
        "start a beta blocker|arrange an echocardiogram|increase the diuretic|book an exercise test",
    ),
    "pulmonology": (
        9,
        "a cough for three weeks|wheezing in cold air|breathlessness on the stairs|coughing up phlegm|night-time "
        "coughing|shortness of breath after a cold",
        "crackles at both bases|a reduced peak flow|a shadow on the chest film|low oxygen saturation",
        "prescribe an inhaler|arrange spirometry|begin antibiotics for the chest|refer for pulmonary rehabilitation",
    ),
    "gastroenterology": (
        9,
        "burning pain after meals|loose stools for a month|bloating and cramps|blood on the toilet paper|loss of "
        "appetite|nausea in the morning",
        "a tender epigastrium|raised liver enzymes|a positive stool test|an enlarged liver edge",
        "arrange a colonoscopy|start a proton pump inhibitor|send a stool sample|advise a bland diet",
    ),
    "neurology": (
        9,
        "headaches with flashing lights|numb fingers on the left|a tremor of the right hand|a spell of confusion|"
        "dizziness on turning the head|weakness of one leg",
        "brisk reflexes|an unsteady gait|a mild facial droop|reduced sensation to pinprick",
        "order an MRI of the brain|start a triptan|arrange nerve conduction studies|refer to the stroke clinic",
    ),
    "orthopaedics": (
        9,
        "a painful knee after a fall|low back pain on lifting|a stiff shoulder|a swollen ankle|hip pain when walking|"
        "a clicking wrist",
        "a reduced range of motion|joint line tenderness|a hairline fracture on the film|a positive impingement sign",
        "fit a brace|refer to physiotherapy|inject the joint|book a film of the joint",
    ),
    "dermatology": (
        8,
        "an itchy rash on both arms|a mole that changed colour|flaking skin of the scalp|painful blisters|dry cracked "
        "hands|hives after a meal",
        "scaly plaques on the elbows|an irregular pigmented spot|redness with small vesicles|thickened nails",
        "prescribe a steroid cream|take a skin biopsy|freeze the lesion|advise an emollient",
    ),
    "nephrology": (
        8,
        "foamy urine|swelling of the face in the morning|tiredness and itching|less urine than usual|cramps after "
        "dialysis|swollen ankles",
        "protein in the urine|a falling filtration rate|a high potassium|small kidneys on ultrasound",
        "adjust the dialysis schedule|restrict potassium|start an ACE inhibitor|arrange a kidney biopsy",
    ),
    "endocrinology": (
        8,
        "thirst and frequent urination|weight gain despite dieting|feeling cold all the time|shaking before meals|"
        "hair loss and tiredness|sweating and weight loss",
        "a raised fasting glucose|a small goitre|a low thyroid hormone|a high cortisol",
        "start metformin|adjust the insulin dose|check antibodies of the thyroid|refer to the diabetes nurse",
    ),
    "psychiatry": (
        8,
        "low mood since spring|waking at four every night|panic in crowds|hearing a voice|loss of interest in hobbies|"
        "worrying all day",
        "a flat affect|pressured speech|poor concentration|a high score on the depression scale",
        "begin an antidepressant|offer talking therapy|review in a week for safety|reduce the sedative",
    ),
    "ophthalmology": (
        8,
        "blurred vision in one eye|flashes and floaters|a red painful eye|double vision in the evening|watering eyes|"
        "halos around lights",
        "a cloudy lens|raised pressure in the eye|a swollen optic disc|an ulcer of the cornea",
        "start drops twice a day|book a cataract operation|arrange a field test|refer for a retinal scan",
    ),
    "ear nose throat": (
        7,
        "a blocked nose for months|ringing in both ears|a hoarse voice|a sore throat on swallowing|hearing loss on the "
        "left|dizziness on turning the head",
        "a perforated eardrum|enlarged tonsils|nasal polyps|fluid behind the drum",
        "arrange a hearing test|prescribe a nasal spray|book a removal of the tonsils|look at the larynx with a scope",
    ),
    "urology": (
        7,
        "a weak stream at night|blood in the urine|pain in the flank|burning on passing water|leaking on coughing|"
        "frequent urination",
        "an enlarged prostate|a stone on the scan|a residual volume of 200 ml|a raised PSA",
        "start an alpha blocker|arrange a cystoscopy|break up the stone|send a urine culture",
    ),
}
COMMON = (
    "Feels well otherwise.|No fever.|Sleeps badly.|Lives alone.|Smokes ten a day.|Takes no regular medicines.|"
    "Blood pressure is a little high.|Allergic to penicillin.|Worried about work.|The family came along.|"
    "Examination is otherwise normal.|Blood tests are pending.|Seen twice this year for the same."
).split("|")
PLANS = "review in four weeks|send a letter to the family doctor|repeat the blood tests|call back if it gets worse"


def note(department: str, chance: random.Random) -> str:
    """Write a note of a department: its own signs, some of others, and what any note could have."""

    def of(which: int, own: float) -> str:
        name = department if chance.random() < own else chance.choice([*DEPARTMENTS])
        return chance.choice(str(DEPARTMENTS[name][which]).split("|"))

    patient = f"{chance.randint(19, 91)}-year-old {chance.choice(('man', 'woman'))}"
    sentences = [f"{patient} with {of(1, 0.85)}.", chance.choice(COMMON), f"Known from before: {of(1, 0.1)}."]
    if chance.random() < 0.6:
        sentences.append(f"On examination {of(2, 0.7)}.")
    sentences.append(f"Plan: {of(3, 0.6) if chance.random() < 0.5 else chance.choice(PLANS.split('|'))}.")
    return " ".join(sentences)


def write_notes(folder: Path, *, seed: int = 0) -> float:
    """Write train.csv and validation.csv; return the share of the largest class of the latter."""
    chance = random.Random(seed)
    shares = [share for share, *_ in DEPARTMENTS.values()]
    for name, num in (("train", NUM_TRAIN), ("validation", NUM_HELD_OUT)):
        labels = chance.choices([*DEPARTMENTS], shares, k=num)
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *((note(label, chance), label) for label in labels)])
    return max(Counter(labels).values()) / num


def printed_command() -> list[str]:
    """Words of the command that `hf-dpopt plan` prints for so many records and that budget."""
    said = subprocess.run([*PROGRAM, *PLAN], cwd=REPO, check=True, capture_output=True, text=True).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("python recipes/glue.py")]
    return shlex.split(line)


def run(folder: Path, model: str, *, private: bool = True) -> dict[str, Any]:
    """Run the printed command on the notes of a folder; return it, its accuracy and what it cost.

    Args:
        folder: where `write_notes` wrote; gets the folder of the run.
        model: folder or name of an encoder.
        private: whether the run is; without privacy the advised batch and learning rate are given by hand.
    """
    out = folder / ("private" if private else "not_private")
    words = printed_command()
    placed = {
        "--model_name_or_path": model,
        "--train_file": str(folder / "train.csv"),
        "--validation_file": str(folder / "validation.csv"),
        "--label_list": ",".join(DEPARTMENTS),
        "--output_dir": str(out),
    }
    for flag, value in placed.items():
        words[words.index(flag) + 1] = value
    if not private:
        said = subprocess.run([*PROGRAM, *PLAN, "--json"], cwd=REPO, check=True, capture_output=True, text=True)
        at = words.index("--target_epsilon")
        options = json.loads(said.stdout)["options"]
        steps = [f"--{name}={options[name]}" for name in ("learning_rate", "expected_batch_size")]
        words[at : at + 2] = ["--non_private", *steps]
    begun = time.monotonic()
    more = ["--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true", "--eval_data_privacy", "public"]
    ran = subprocess.run([sys.executable, *words[1:], *more], cwd=REPO, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}")
    print(ran.stdout)
    results = json.loads((out / "eval_results.json").read_text())
    report = json.loads((out / "privacy" / "report.json").read_text()) if private else {}
    return {
        "accuracy": results["eval_accuracy"],
        "epsilon": report.get("epsilon_spent"),
        "advised": report.get("plan", {}).get("advised"),
        "num_steps": report.get("plan", {}).get("num_steps"),
        "seconds": round(time.monotonic() - begun),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or name of an encoder, such as MiniLM.")
    parser.add_argument("--name", help="What to call it. Default: the last part of --model.")
    parser.add_argument("--output", type=Path, required=True, help="JSON file.")
    parser.add_argument("--compare", action="store_true", help="Also without privacy.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        majority = write_notes(folder)
        made = {
            "task": f"{NUM_TRAIN} made-up notes, {len(DEPARTMENTS)} departments, {NUM_HELD_OUT} held out",
            "model": asked.name or Path(asked.model).name,
            "plan": shlex.join(("hf-dpopt", *PLAN)),
            "command": shlex.join(printed_command()),
            "majority": majority,
            "private": run(folder, asked.model),
            "processor": f"{platform.machine()}, {torch.get_num_threads()} threads",
        }
        if asked.compare:
            made["not_private"] = run(folder, asked.model, private=False)
    asked.output.write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
