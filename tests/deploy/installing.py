"""The program deploy/install.py as a module, and the files of systemd that it writes."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

from collapipe.installation import LOCKS, Places, places_of

CHECKOUT = Path(__file__).parents[2]
SERVICES = [role for role in LOCKS if role != "client"]


@cache
def installer() -> ModuleType:
    path = CHECKOUT / "deploy" / "install.py"
    found = importlib.util.spec_from_file_location("collapipe_installer", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def of_system(name: str) -> Places:
    return places_of(name, is_root=True, home=Path("/root"))


def unit_files(role: str, places: Places) -> dict[str, str]:
    return dict(installer().unit_files(role, places))
