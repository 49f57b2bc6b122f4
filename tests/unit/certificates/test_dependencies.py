"""Which packages a box needs."""

import subprocess
import sys
from pathlib import Path

from collapipe.certificates import Identity, Role
from collapipe.certificates.authority_folder import AuthorityFolder

CODE = """
import sys
from pathlib import Path
sys.modules["cryptography"] = None
from collapipe.rpc import Security
folder = Path(sys.argv[1])
security = Security.of(False, *(folder / name for name in ("ca.pem", "cert.pem", "key.pem")))
print(security.presented().identity)
from collapipe_client.cli import app
app(["certs", "list", str(folder)], standalone_mode=False)
"""


def test_service_speaks_tls_without_the_package_cryptography(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    authority.issue(Identity(Role.DEVICE_AGENT, "pi"), [], tmp_path / "pi")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "pi")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "device-agent:pi\n"
    assert "pip install cryptography" in done.stderr
    assert "Traceback" not in done.stderr
