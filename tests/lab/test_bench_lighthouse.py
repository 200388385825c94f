"""`scripts/bench lighthouse`: a report becomes figures, and what is not installed is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.bench.lighthouse import program_of, rated
from lab.page.browser import missing
from node.core.wrong_use import WrongUse


def test_a_report_of_lighthouse_becomes_scores_and_what_was_wanting() -> None:
    def category(score: float, *audits: tuple[str, int]) -> dict[str, Any]:
        return {"score": score, "auditRefs": [{"id": n, "weight": w} for n, w in audits]}

    answer = {
        "categories": {
            "performance": category(0.978, ("first-paint", 10), ("a-hint", 0)),
            "accessibility": category(0.9, ("contrast", 7), ("names", 7)),
            "best-practices": category(1.0),
        },
        "environment": {"benchmarkIndex": 1234.5},
        "audits": {
            "first-paint": {"score": 0.9, "displayValue": "1.2 s", "title": "First paint"},
            "a-hint": {"score": 0.0, "title": "It counts nothing"},
            "contrast": {"score": 0, "title": "Colours are alike"},
            "names": {"score": 1, "title": "All have names"},
        },
    }
    assert rated(answer) == {
        "scores": {"performance": 98, "accessibility": 90, "best-practices": 100},
        "wanting": {
            "performance": {"first-paint": "1.2 s"},
            "accessibility": {"contrast": "Colours are alike"},
            "best-practices": {},
        },
        "index": 1234,
    }


@pytest.mark.skipif(bool(missing()), reason=f"it is looked for after the browser: {missing()}")
def test_without_lighthouse_it_is_said_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="Lighthouse is not there") as error:
        program_of(tmp_path / "lighthouse")
    assert "npm install lighthouse" in str(error.value.advice)
