"""Where jobs may read files on a host."""

from pathlib import Path

import pytest
from unit.rpc.authorities import Authority

from collapipe.control_unit.app import ControlUnitSettings
from collapipe.stage_host.host import data_root


@pytest.mark.parametrize("given", [None, "/srv/texts"])
@pytest.mark.parametrize("insecure", [True, False], ids=["plain text", "mutual TLS"])
def test_secured_host_reads_only_in_its_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, insecure: bool, given: str | None
) -> None:
    line = ["control-unit", "--scheduler", "127.0.0.1:1", "--state-dir", str(tmp_path / "state")]
    if insecure:
        line.append("--insecure")
    else:
        tls = Authority(tmp_path).security("control-unit:cu")
        line += [f"--tls-ca={tls.ca}", f"--tls-cert={tls.certificate}", f"--tls-key={tls.key}"]
    if given:
        line += ["--data-root", given]
    monkeypatch.setattr("sys.argv", line)
    default = None if insecure else tmp_path / "state" / "data"
    settings = ControlUnitSettings()  # type: ignore[call-arg]
    assert data_root(settings) == (Path(given) if given else default)
