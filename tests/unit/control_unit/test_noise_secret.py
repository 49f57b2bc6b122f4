import stat
from pathlib import Path

from damaged_files import damage

from collapipe.control_unit.noise_secret import noise_secret


def test_secret_stays_the_same_and_only_the_user_can_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    secret = noise_secret(directory)
    assert len(secret) == 32 and noise_secret(directory) == secret
    assert stat.S_IMODE((directory / "noise-secret").stat().st_mode) == 0o600


def test_secret_that_was_cut_makes_no_noise(tmp_path: Path) -> None:
    """Whoever guesses it could remove the noise."""
    secret = noise_secret(tmp_path)
    path = tmp_path / "noise-secret"
    for how in damage(path):
        if how.startswith("cut"):
            found = noise_secret(tmp_path)
            assert len(found) == 32, how
            assert not found.startswith(secret[:16]), how
            assert noise_secret(tmp_path) == found, how
