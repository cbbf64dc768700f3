"""`hf-dpopt demo`: the notes that it makes up, what it measures, and what it prints and writes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.huggingface.demo import DIGITS, Demo, Sizes, make_notes, make_tokenizer, run
from hf_dpopt.verify import verify

REPO = Path(__file__).resolve().parents[2]
SMALL = Sizes(records=300, secrets=3, copies=4, stock_epochs=1, private_epochs=1, width=16, layers=1)


def test_each_secret_is_planted_as_often_as_it_is_said() -> None:
    notes = make_notes(Sizes(), seed=3)
    assert len(notes.train) == 8000 and notes == make_notes(Sizes(), seed=3) != make_notes(Sizes(), seed=4)
    for prompt, code in notes.secrets:
        assert notes.train.count(f"{prompt} {code} .") == 6 and len(code.split()) == DIGITS
        assert not any(prompt in note for note in notes.held_out)
    assert len({prompt for prompt, _ in notes.secrets}) == 40


def test_the_vocabulary_knows_every_word_and_no_record() -> None:
    tokenizer, notes = make_tokenizer(), make_notes(Sizes(), seed=0)
    unknown = tokenizer.convert_tokens_to_ids("<unk>")
    assert not any(unknown in tokenizer(note)["input_ids"] for note in [*notes.train, *notes.held_out])


class Parrot(torch.nn.Module):
    """Predicts the token that follows in a given text, with certainty."""

    def __init__(self, demo: Demo, texts: list[str]):
        super().__init__()
        self.rows, self.size = [demo.tokenizer(text)["input_ids"] for text in texts], len(demo.tokenizer)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor):
        logits = torch.zeros(*input_ids.shape, self.size)
        for row, ids in zip(logits, input_ids.tolist(), strict=True):
            for known in self.rows:
                for i in range(len(ids)):
                    if ids[: i + 1] == known[: i + 1] and i + 1 < len(known):
                        row[i, known[i + 1]] = 1e3
        return type("Output", (), {"logits": logits})


def test_a_secret_counts_as_recited_if_every_digit_is_said() -> None:
    demo = Demo(SMALL, seed=1)
    said = [f"<end> {prompt} {code}" for prompt, code in demo.notes.secrets]
    wrong = said[1][:-1] + ("1" if said[1][-1] != "1" else "2")
    assert demo.measure(Parrot(demo, [said[0], wrong, said[2]]))["recited"] == 2


def test_the_loss_is_the_mean_over_notes_of_the_mean_over_their_tokens() -> None:
    demo = Demo(SMALL, seed=1)
    found = demo.measure(Parrot(demo, []))  # every token is as likely
    assert found["loss"] == pytest.approx(math.log(len(demo.tokenizer)), abs=1e-5) and found["loss_interval"] < 1e-6


def test_both_trainings_are_compared_and_the_claim_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = run(tmp_path / "demo", seed=2, sizes=SMALL)
    printed = capsys.readouterr().out
    assert json.loads((tmp_path / "demo" / "demo.json").read_text()) == facts
    assert facts["private"]["epsilon"] <= 8 and facts["stock"]["loss"] < facts["untrained"]["loss"]
    assert "recited" in printed and f"{facts['private']['loss']:.3f}" in printed and "hf-dpopt verify" in printed
    assert verify(tmp_path / "demo" / "private").exit_code(is_strict=False) == 0
    with pytest.raises(DPConfigError, match="output_dir=.*files already"):
        run(tmp_path / "demo", sizes=SMALL)


def test_the_readme_has_the_numbers_of_ten_seeds() -> None:
    report, readme = json.loads((REPO / "docs" / "demo.json").read_text()), (REPO / "README.md").read_text()
    found = report["summary"]
    assert len(report["runs"]) == 10 and found["stock recited"]["least"] >= 20
    assert found["private recited"]["largest"] == 0 and found["gain_kept"]["least"] >= 0.5

    def said(name: str, digits: int) -> str:
        mean, least, largest = (f"{found[name][part]:.{digits}f}" for part in ("mean", "least", "largest"))
        return mean if least == largest else f"{mean} [{least}, {largest}]"

    rows = {
        "transformers.Trainer": [said("stock loss", 2), f"{said('stock recited', 0)} of 40", "infinite"],
        "hf_dpopt.DPTrainer": [said("private loss", 2), "**0 of 40**", "8"],
    }
    for trainer, cells in rows.items():
        assert f"| `{trainer}` | {' | '.join(cells)} |" in readme
    times = json.loads((REPO / "docs/training_time.json").read_text())
    lora, full = (times[kind]["ratios"]["private / stock, grouped by length"]["median"] for kind in ("lora", "full"))
    assert f"takes {lora:.2f} times as long as the stock Trainer that groups by length" in readme
    assert f"with all weights {full:.2f} times" in readme
    assert f"the test loss is {said('untrained loss', 2)} before training" in readme
