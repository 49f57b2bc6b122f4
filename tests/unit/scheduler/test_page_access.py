"""Who may see the page, and who may act on it."""

import stat
import time
from pathlib import Path

import pytest
from unit.rpc.authorities import Authority

from collapipe.certificates import Identity
from collapipe.documents import read_document
from collapipe.errors import NotPermittedError
from collapipe.rpc import Security
from collapipe.scheduler.web import access
from collapipe.scheduler.web.access import LINK_FILE, Access, Links, Visitor, is_loopback

URL = "http://127.0.0.1:80/"


def present_key(folder: Path) -> str:
    page = read_document(folder / LINK_FILE)
    assert page is not None and page["url"] == URL
    key: str = page["link"].removeprefix(f"{URL}#key=")
    return key


def test_link_works_once_and_leaves_another_one(tmp_path: Path) -> None:
    links = Links(URL, tmp_path)
    key = present_key(tmp_path)
    assert links.exchange("guess") is None
    cookie = links.exchange(key)
    assert cookie is not None and links.knows(cookie)
    assert links.exchange(key) is None and present_key(tmp_path) != key
    assert links.exchange(present_key(tmp_path)) is not None


def test_only_the_user_can_read_the_link_and_the_secret(tmp_path: Path) -> None:
    links = Links(URL, tmp_path)
    links.exchange(present_key(tmp_path))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600} and LINK_FILE in modes


def test_cookie_outlives_a_restart_but_neither_its_time_nor_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cookie = Links(URL, tmp_path).exchange(present_key(tmp_path)) or Links(URL, tmp_path).exchange(
        present_key(tmp_path)
    )
    assert cookie is not None
    again = Links(URL, tmp_path)
    assert again.knows(cookie)
    expires, signature = cookie.split(".")
    for other in (
        f"{int(expires) + 1}.{signature}",
        f"{expires}.{signature[:-1]}",
        "",
        ".",
        "a.b",
        "é.é",
    ):
        assert not again.knows(other)
    (tmp_path / "page-secret").write_bytes(b"")  # The process ended before it wrote.
    assert not Links(URL, tmp_path).knows(cookie)
    now = time.time()
    monkeypatch.setattr(access.time, "time", lambda: now + 31 * 86_400)
    assert not again.knows(cookie)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("192.168.1.2", False),
        ("::", False),
    ],
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("127.0.0.1:4711", True),
        ("localhost:4711", True),
        ("LOCALHOST", True),
        ("[::1]:4711", True),
        ("[::1]", True),
        ("evil.example:4711", False),
        ("127.0.0.1.evil.example", False),
        ("192.168.1.2:4711", False),
        ("", False),
        ("localhost.:80", False),
    ],
)
def test_page_on_loopback_has_only_names_of_this_machine(
    tmp_path: Path, header: str, expected: bool
) -> None:
    assert Access("127.0.0.1", Links(URL, tmp_path), Security.insecure()).is_own(header) == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [("192.168.1.2:4711", True), ("pi.lan:4711", True), ("PI.LAN", True), ("evil.example", False)],
)
def test_page_of_a_deployment_has_the_names_in_its_certificate(
    tmp_path: Path, header: str, expected: bool
) -> None:
    security = Authority(tmp_path).security("scheduler:scheduler", "pi.lan")
    assert Access("0.0.0.0", None, security).is_own(header) == expected


@pytest.mark.parametrize(
    ("identity", "owner", "expected"),
    [
        ("client:me", "client:me", True),
        ("client:me", "client:other", False),
        ("client:me", "", True),
        ("admin:root", "client:me", True),
        ("device-agent:me", "client:me", False),
        ("prometheus:me", "", False),
        (None, "", False),
    ],
)
def test_people_change_what_is_theirs_and_others_nothing(
    identity: str | None, owner: str, expected: bool
) -> None:
    visitor = Visitor(may_see=True, identity=Identity.parse(identity) if identity else None)
    assert visitor.may_change(owner) == expected


def test_revoked_key_sees_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    security, person = authority.security("scheduler:scheduler"), authority.security("client:me")
    assert person.certificate is not None
    shown = person.certificate.read_bytes()
    uris = [Identity.parse("client:me").uri]
    page = Access("0.0.0.0", None, security)
    assert page.visitor("", uris, shown).may_change("client:me")
    security.learn_revoked(authority.revoke("client:me"))
    with pytest.raises(NotPermittedError, match="revoked"):
        page.visitor("", uris, shown)
