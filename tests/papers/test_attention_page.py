"""What docs/attention.md prints follows from its stored points, recomputed here."""

import json
import re

from support import ROOT

DOCS = ROOT / "docs"
ROWS = ("q_proj", "k_proj", "v_proj", "up")


def test_numbers_of_the_ten_copies():
    text = re.sub(r"\s+", " ", (DOCS / "attention.md").read_text(encoding="utf-8"))
    copies = json.loads((DOCS / "attention.json").read_text(encoding="utf-8"))["copies"]
    assert len(copies) == 11  # the one as trained is first
    names = dict.fromkeys(copies[0]["layers"]["trace"], ("relative_flatness", "relative_flatness_columns"))
    assert len(names) == 12
    kept = [
        sum(copy["layers"][pair[not layer.endswith(ROWS)]][layer] for layer, pair in names.items()) for copy in copies
    ]
    moved = max(abs(value / kept[0] - 1) for value in kept)
    sums = {name: [sum(copy["layers"][name].values()) for copy in copies] for name in copies[0]["layers"]}
    sums["lambda_max"] = [copy["lambda_max"] for copy in copies]
    times = {name: max(values) / values[0] for name, values in sums.items()}
    assert f"agree to {max(copy['difference'] for copy in copies):.0e}." in text
    assert f"is the same to {moved:.0e} of its value" in text
    assert f"trace grows up to {times['trace']:.0f}-fold" in text
    assert f"adaptive sharpness up to {times['adaptive_sharpness']:.0f}-fold" in text
    assert f"λ_max up to {times['lambda_max']:.0f}-fold" in text
    assert f"grows up to {times['relative_flatness']:.0f}-fold" in text
