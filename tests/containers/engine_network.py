"""Restores the network settings of this machine after a Docker Engine has changed them."""

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")

Rules = dict[str, list[str]]
"""The lines of `iptables-save` by table, without counters."""


@contextmanager
def kept_network(bridge: str, subnet: str) -> Iterator[None]:
    """Makes a bridge for an engine, and afterwards restores the network settings of this machine.

    An engine leaves its chains, a FORWARD policy of DROP and IP forwarding behind. If another engine runs on
    this machine, it needs these settings, too. Then only rules that name the bridge are removed.

    Args:
        bridge: Name of the bridge. A bridge of the same name, left by a killed run, is replaced.
        subnet: Address of the bridge with the length of its prefix.
    """
    before, forwarding = firewall(), _FORWARDING.read_text()
    saved = _run("iptables-save")
    _run("ip", "link", "del", bridge, check=False)
    _run("ip", "link", "add", bridge, "type", "bridge")
    try:
        _run("ip", "addr", "add", subnet, "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        yield
    finally:
        _run("ip", "link", "del", bridge)
        if other_engines():
            _delete_rules(before, only_with=bridge)
        else:
            _delete_rules(before, only_with="")
            _delete_chains(before)
            _FORWARDING.write_text(forwarding)
            if (
                firewall() != before
            ):  # our engine removed rules of an earlier engine when it started
                _run("iptables-restore", given=saved)
            left = firewall()
            assert left == before, f"the firewall was not restored: it is {left}, and was {before}"


def firewall() -> Rules:
    """Returns the rules and chains in force. Leaves out chains with policy ACCEPT, which is the default."""
    tables: Rules = {}
    table = ""
    for line in _run("iptables-save").splitlines():
        rule = line.partition(" [")[0] if line.startswith(":") else line
        if line.startswith("*"):
            table = line[1:]
        elif rule.startswith((":", "-A")) and not (rule[0] == ":" and rule.endswith(" ACCEPT")):
            tables.setdefault(table, []).append(rule)
    return tables


def other_engines() -> list[int]:
    """Returns the pids of the engines that run on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):  # the process has ended meanwhile
            if path.read_text().strip() == "dockerd":
                found.append(int(path.parent.name))
    return found


def _delete_rules(before: Rules, only_with: str) -> None:
    for table, lines in firewall().items():
        known = before.get(table, [])
        for line in lines:
            if line.startswith("-A") and line not in known and only_with in line:
                _run("iptables", "-t", table, "-D", *shlex.split(line)[1:])


def _delete_chains(before: Rules) -> None:
    """Removes the chains that are not in `before`, and restores the policies."""
    for table, lines in firewall().items():
        for line in lines:
            chain, _, policy = line[1:].partition(" ")
            if not line.startswith(":") or line in before.get(table, []):
                continue
            if policy == "-":
                _run("iptables", "-t", table, "-F", chain)
                _run("iptables", "-t", table, "-X", chain)
            else:  # `before` contains all policies except ACCEPT
                _run("iptables", "-t", table, "-P", chain, "ACCEPT")


def _run(*command: str, check: bool = True, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
