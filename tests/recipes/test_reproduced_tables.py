"""Tables of docs/reproductions.md: every cell is that of the JSON file beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from recipes.paper.runs import interval

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = re.sub(r"```.*?```", "", (DOCS / "reproductions.md").read_text(encoding="utf-8").replace("±", "+-"), flags=re.S)


def load(name: str) -> dict:
    return json.loads((DOCS / "reproductions" / f"{name}.json").read_text(encoding="utf-8"))


def table(heading: str, number: int = 0, named_by: int = 1) -> dict[tuple[str, str], str]:
    """Cells of a table below a heading: (first cells of the row, name of the column) -> text."""
    section = PAGE.partition(f"\n{heading}\n")[2]
    assert section, heading
    section = section.partition("\n## ")[0].partition("\n# ")[0]
    blocks, lines = [], []
    for line in [*section.splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip().replace("**", "") for cell in line.strip("|").split("|")])
        elif lines:
            blocks.append(lines)
            lines = []
    names, _, *rows = blocks[number]
    return {
        (", ".join(row[:named_by]), name): cell
        for row in rows for name, cell in zip(names[named_by:], row[named_by:], strict=True) if cell
    }  # fmt: skip


def signed(mean: float, half: float) -> str:
    return f"{mean:+.1f} +- {half:.1f}".replace("-0.0 +-", "0.0 +-").replace("+0.0 +-", "0.0 +-")


def plain(cell: str) -> str:
    """The cell with zeros written in one way."""
    return cell.replace("-0.0 +-", "0.0 +-").replace("+0.0 +-", "0.0 +-")


def budget(epsilon: float) -> str:
    return f"{'epsilon ' if epsilon == 2 else ''}{epsilon:g}"


def test_mechanisms_on_phrases():
    rows = load("training")["rows"]
    over_sgd, over_nu = table("## Training on real data"), table("## Training on real data", 1)
    assert len(over_sgd) == len(over_nu) == len(rows)
    base = {row["epsilon"]: row for row in rows if row["mechanism"].startswith("DP-SGD")}
    for row in rows:
        key = (row["mechanism"], budget(row["epsilon"]))
        shown = f"{row['accuracy']:.1f}"
        if row is not base[row["epsilon"]]:
            gain = row["over_dp_sgd"]
            shown += f" ({signed(gain['mean'], gain['half_of_95_interval'])})"
        assert plain(over_sgd[key]) == shown, key
        gain = row.get("over_best_nu")
        number = "0" if gain is None else signed(gain["mean"], gain["half_of_95_interval"])
        assert plain(over_nu[key]) == f"{number} [{row['predicted_error']:.0f}]", key


def test_the_dense_optimum():
    cells, rows = table("### The dense optimum over all epochs"), load("training_1000")["rows"]
    assert len(cells) == len(rows)
    for row in rows:
        gain = row.get("over_best_nu")
        over = f" ({signed(gain['mean'], gain['half_of_95_interval'])})" if gain else ""
        shown = f"{row['accuracy']:.1f}{over} [{row['predicted_error']:.0f}]"
        assert plain(cells[row["mechanism"], budget(row["epsilon"])]) == shown


def test_regimes_of_filters():
    found, heading = load("doppler_regimes"), "### Three regimes, named beforehand"
    cells, ablation = table(heading), table(heading, 1)
    for name, regime in found["regimes"].items():
        accuracies = [f"{100 * np.mean(regime['accuracies'][key]):.1f}" for key in ("plain", "first_order_v1")]
        gains = regime["predicted"]["gains"]["first_order_v1"]
        assert cells["accuracy, without / with", name] == " / ".join(accuracies)
        assert cells["Eq. 4, without sampling", name] == f"{gains['equation_4_without_sampling']:.1f}"
        assert cells["Eq. 4, gradients of batches", name] == f"{gains['equation_4']:.1f}"
        assert cells["ratio of powers (ours)", name] == f"{gains['power_ratio']:.1f}"
        assert cells["the same, of all steps together (ours)", name] == f"{gains['ratio_of_displacement']:.2f}"
        digits = 2 if name == "small rate" else 1
        gain, half = (f"{regime[key]:{sign}.{digits}f}" for key, sign in (("gain", "+"), ("half_of_95_interval", "")))
        assert cells["gain, points", name] == f"{gain} +- {half}"
    differences = [cell for (_, column), cell in ablation.items() if column == "difference"]
    assert differences == [signed(row["gain"], row["half_of_95_interval"]) for row in found["ablation"]]


TASKS = {"sst2": "phrases", "imdb": "reviews"}


def test_scales_before_correlated_noise():
    rows, cells = load("one_query_words")["rows"], table("## Scales before correlated noise")
    assert len(cells) == len(rows)
    for row in rows:
        key = (row["method"], f"{TASKS[row['task']]}, epsilon {row['epsilon']:g}")
        gain = "" if row["method"] == "DP-AdamW" else f" ({signed(row['over_dp_adamw'], row['half_of_95_interval'])})"
        assert plain(cells[key].replace("(-0.0", "(0.0").replace("(+0.0", "(0.0")) == f"{row['accuracy']:.1f}{gain}", (
            key
        )


def test_one_query_on_adapters():
    rows = load("one_query_top_layer")["rows"]
    section = PAGE.partition("\n### On adapters\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert len(lines) == len(rows) + 2
    base = {row["epsilon"]: row for row in rows if row["method"] == "DP-AdamW"}
    order = [(row["epsilon"], row["method"]) for row in rows]
    at = None
    for epsilon, method, phrases, gain, sentences in lines[2:]:
        at = float(epsilon or at)
        row = rows[order.index((at, method))]
        assert phrases == f"{np.mean(row['test']):.1f}"
        mean_sentences = f"{np.mean(row['sentences']):.1f}"
        if method == "DP-AdamW":
            assert (gain, sentences) == ("", mean_sentences)
            continue
        other = base[at]
        assert plain(gain) == signed(*interval(np.array(row["test"]) - other["test"])), (at, method)
        paired = signed(*interval(np.array(row["sentences"]) - other["sentences"]))
        assert sentences == f"{mean_sentences} ({paired})", (at, method)


@pytest.mark.parametrize("optimizer, name", [("dp_sgd", "DP-SGD"), ("dp_adam_bc", "DP-AdamBC")])
def test_filters_in_the_top_layer(optimizer, name):
    cells = table("### In the top layer, in pairs")
    (row,) = (row for row in load("doppler_top_layer")["rows"] if row["cells"][0]["optimizer"] == optimizer)
    without, filtered = row["cells"]
    gain = np.array(filtered["test"]) - without["test"]
    assert cells[name, "no filter"] == f"{np.mean(without['test']):.1f}"
    assert cells[name, "first_order_v1"] == f"{np.mean(filtered['test']):.1f}"
    assert plain(cells[name, "difference"]) == signed(*interval(gain))
    assert cells[name, "standard error"] == f"{gain.std(ddof=1) / len(gain) ** 0.5:.2f}"
    assert cells[name, "sentences"] == signed(*interval(np.array(filtered["sentences"]) - without["sentences"]))


def test_stale_preconditioners():
    rows = load("dp2_stale")["rows"]
    cells = table("### How long a preconditioner may be used, without privacy (Figure 2)")
    for row in rows:
        column = "1 (RMSProp)" if row["delay"] == 1 else f"{row['delay']:,}"
        assert cells["test accuracy, %", column] == f"{100 * row['mean']:.1f}"
        assert cells["training loss", column] == f"{np.mean(row['loss']):.3f}"
        if row["delay"] > 1:
            gain = np.subtract(row["test"], rows[0]["test"])
            assert cells["difference from RMSProp", column] == signed(*interval(100 * gain))


IMDB = {
    "variant 1 from `delay` steps on (`extra_query`), two queries at the same epsilon": "variant 1, extra query",
    "variant 1 of the paper (`algorithm2`), two queries at the same epsilon": "variant 1, as printed",
    "the same with the noise of DP-SGD on each query, epsilon 21.8": "variant 1, as printed, noise of DP-SGD per query",
}


@pytest.mark.parametrize("name", IMDB)
def test_the_first_variant_of_dp2(name):
    cells = table("## DP^2 (arXiv:2212.00309): IMDB, bag of words")
    (row,) = (row for row in load("dp2_imdb")["table"] if row["method"] == IMDB[name])
    assert cells[name, "here"] == f"{100 * row['mean']:.1f} +- {100 * row['std']:.1f}"
    assert cells[name, "seeds"] == str(len(row["test"]))


STACKEXCHANGE = {
    "DP2-RMSProp": "DP^2-RMSProp",
    "one query": "one query (ours)",
    "AdaDPS": "AdaDPS, with public records",
}


def test_posts_of_stack_exchange():
    rows = load("dp2_stackexchange")["rows"]
    heading = "### Posts of Stack Exchange, for the paper's tags"
    paper, small = table(heading), table(heading, 1, named_by=2)
    checked = 0
    for row in rows:
        gain = "" if row["method"] == "DP-SGD" else f" ({signed(*row['over DP-SGD'])})"
        shown = f"{row['accuracy']:.1f}{gain}"
        if row["features"] == "frequencies, bias":
            assert (
                plain(paper[STACKEXCHANGE.get(row["method"], row["method"]), f"epsilon {row['epsilon']:g}"]) == shown
            )
            checked += 1
        elif row["features"] == "frequencies, small bias":
            name = {"DP2-RMSProp": "DP^2-RMSProp"}.get(row["method"], row["method"])
            assert plain(small[f"0.1, {row['epsilon']:g}", name]) == shown, row
            checked += 1
    assert checked == len(paper) + len(small)


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("lora", "## Four changes of private LoRA"),
        ("lora_public", "### Public text before LoRA, chosen by a private classifier"),
    ],
)
def test_changes_of_lora(name, heading):
    rows, cells = load(name)["rows"], table(heading)
    assert len(cells) == 3 * len(rows)
    for row in rows:
        assert cells[row["variant"], "rate"] == max(row["tried"], key=row["tried"].get)
        for name, column in (("accuracy", "phrases"), ("sentences", "sentences")):
            gain = row.get(f"{name}_gain")
            over = f" ({signed(gain['mean'], gain['half_of_95_interval'])})" if gain else ""
            assert cells[row["variant"], column] == f"{100 * np.mean(row[name]):.1f}{over}"
