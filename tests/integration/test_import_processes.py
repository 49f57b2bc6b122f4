"""What a fresh interpreter imports."""

import json
import subprocess
import sys
from pathlib import Path


def test_data_are_checked_without_torch(tmp_path: Path) -> None:
    rows = [{"text": f"text {number}", "label": "ab"[number % 2]} for number in range(20)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    code = """
import sys
from collapipe.data.cluster_rows import check_data
from collapipe.job import JobConfig
document = {"task": {"kind": "classification"}, "data": {"train": sys.argv[1:]}, "training": {"mini_batch": 8}}
check_data(JobConfig.from_dict(document, "job"))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_only_the_modelling_code_of_the_family_is_imported() -> None:
    code = """
import sys
import collapipe.models as models
assert "transformers" not in sys.modules
try:
    models.adapter_for("bert", "ner", "[]")
except Exception:
    pass
loaded = [name for name in sys.modules if name.startswith("transformers.models.")]
assert any("modeling_bert" in name for name in loaded)
others = ("roberta", "distilbert", "marian", "bart")
assert not [name for name in loaded if name.rpartition("modeling_")[2] in others]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
