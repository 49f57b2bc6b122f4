"""Checks the exports of all combinations of family, task, origin of the weights, LoRA and type of the frozen weights."""

from pathlib import Path

import pytest
from integration.export_oracle import check_exports
from integration.exports import Case, cases


@pytest.mark.parametrize("case", cases(), ids=str)
def test_library_computes_generates_and_measures_what_the_services_do(
    case: Case, tmp_path: Path
) -> None:
    check_exports(case, tmp_path)
