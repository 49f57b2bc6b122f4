from typing import Any

import pytest

from collapipe.errors import InvalidInputError
from collapipe.scheduler.host_claims import check_claims
from collapipe.v1.scheduler_pb2 import HOST_ROLE_DEVICE_AGENT, Host


@pytest.mark.parametrize("field", ["host_id", "address", "metrics_address", "incarnation"])
@pytest.mark.parametrize("wrong", ["\x1b[2J", "a\nb", "\u202e", "\x00"])
def test_host_whose_name_a_terminal_would_obey_is_refused(field: str, wrong: str) -> None:
    host = Host(host_id="a", address="a:1", incarnation="1", role=HOST_ROLE_DEVICE_AGENT)
    setattr(host, field, f"{wrong}:1")
    nobody: Any = None  # It is refused before anybody looks who it is.
    with pytest.raises(InvalidInputError) as refused:
        check_claims(host, nobody)
    assert repr(f"{wrong}:1") in str(refused.value)
