import ipaddress
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.traffic_shaping.tc.classes import (
    Root,
    ShapedClass,
    class_commands,
    read_classes,
    read_root,
)
from collapipe.traffic_shaping.tc.disciplines import ClassRate, Discipline, Netem, TokenBucket

WIFI = Netem(50e6, 0.002, 0.001, 0.0, 426)
LOSSY = Netem(2.4e6, 0.035, 0.01, 0.01, 109)
BUCKET, LARGE_BUCKET = TokenBucket(2.4e6, 3028, 0.5), TokenBucket(50e6, 12_500, 0.1)
RATE, LOWER_RATE = ClassRate(2e7), ClassRate(1e6)
HANDLE = "c01e:"
HERE, THERE, SIX = "10.0.0.2", "10.0.0.3", "fd00::12:2"


def root(*classes: tuple[str | None, Discipline | None]) -> Root:
    numbered = enumerate(classes, start=1)
    return Root("eth0", HANDLE, True, classes={n: ShapedClass(*one) for n, one in numbered})


def beginnings(lines: list[str], num_words: int = 2) -> list[str]:
    """Returns the first words of each command."""
    return [" ".join(line.split()[:num_words]) for line in lines]


def test_new_address_gets_a_class_a_discipline_and_a_filter() -> None:
    lines = class_commands(root(), {HERE: WIFI, SIX: LOSSY})
    assert beginnings(lines, 1) == ["class", "qdisc", "filter"] * 2
    netem = "netem limit 426 delay 2000.0us 1000.0us loss random 0.00000% rate 50000000bit"
    assert netem in lines[1]
    assert "protocol ip prio 1 u32 match ip dst 10.0.0.2" in lines[2]
    assert "protocol ipv6 prio 2 u32 match ip6 dst fd00::12:2" in lines[5]


def test_class_that_limits_the_rate_itself_needs_no_discipline() -> None:
    lines = class_commands(root(), {HERE: RATE})
    assert beginnings(lines, 1) == ["class", "filter"]
    assert "htb rate 20000000bit ceil 20000000bit burst 5000 cburst 5000" in lines[0]


def test_other_values_change_the_class_or_its_discipline_in_place() -> None:
    lines = class_commands(root((HERE, RATE), (THERE, RATE)), {HERE: RATE, THERE: LOWER_RATE})
    assert lines == [
        f"class change dev eth0 parent {HANDLE} classid {HANDLE}2 {LOWER_RATE.class_arguments}"
    ]
    lines = class_commands(root((HERE, WIFI), (THERE, WIFI)), {HERE: WIFI, THERE: LOSSY})
    assert lines == [f"qdisc change dev eth0 parent {HANDLE}2 {LOSSY.leaf_arguments}"]


def test_command_for_the_root_leaves_packets_of_other_receivers_unshaped() -> None:
    expected = f"qdisc add dev eth0 root handle {HANDLE} htb default 0"
    assert root().add_command.startswith(expected)


def test_nothing_is_done_when_all_classes_are_as_desired() -> None:
    assert class_commands(root((HERE, WIFI), (SIX, LOSSY)), {SIX: LOSSY, HERE: WIFI}) == []
    assert class_commands(root(), {}) == []


@pytest.mark.parametrize(
    ("before", "after", "commands"),
    [
        (LARGE_BUCKET, BUCKET, ["qdisc del", "qdisc add"]),
        (BUCKET, LARGE_BUCKET, ["qdisc change"]),
        (WIFI, BUCKET, ["qdisc del", "qdisc add"]),
    ],
)
def test_bucket_that_shrinks_and_discipline_of_another_kind_are_replaced(
    before: Discipline, after: Discipline, commands: list[str]
) -> None:
    """A waiting packet larger than the new burst would block the link for ever, so the queue is dropped."""
    lines = class_commands(root((HERE, before)), {HERE: after})
    assert beginnings(lines) == commands
    assert after.leaf_arguments in lines[-1]


def test_address_that_is_no_longer_shaped_loses_its_class_and_the_number_is_used_again() -> None:
    lines = class_commands(root((HERE, WIFI), (THERE, LOSSY)), {THERE: LOSSY, SIX: WIFI})
    assert lines[:2] == [
        f"filter del dev eth0 parent {HANDLE} prio 1",
        f"class del dev eth0 parent {HANDLE} classid {HANDLE}1",
    ]
    assert f"classid {HANDLE}1 htb" in lines[2]


@pytest.mark.parametrize("incomplete", [(None, WIFI), (HERE, None), (None, None)])
def test_incomplete_class_of_a_killed_process_is_replaced(
    incomplete: tuple[str | None, Discipline | None],
) -> None:
    lines = class_commands(root(incomplete), {HERE: WIFI})
    assert f"class del dev eth0 parent {HANDLE} classid {HANDLE}1" in lines
    assert beginnings(lines[-3:], 1) == ["class", "qdisc", "filter"]


@pytest.mark.parametrize("known", [WIFI, None])
def test_second_class_of_an_address_is_removed(known: Discipline | None) -> None:
    lines = class_commands(root((HERE, WIFI), (HERE, known)), {HERE: WIFI})
    assert beginnings(lines) == ["filter del", "class del"]
    assert f"classid {HANDLE}2" in lines[1]


disciplines = st.sampled_from((WIFI, LOSSY, BUCKET))
addresses = st.sampled_from([f"10.0.0.{number}" for number in range(2, 7)])


@given(st.dictionaries(addresses, disciplines), st.dictionaries(addresses, disciplines))
def test_commands_lead_from_any_state_to_any_other(
    before: dict[str, Discipline], after: dict[str, Discipline]
) -> None:
    known = root()
    kernel: dict[int, tuple[str | None, str | None]] = {}
    run(kernel, class_commands(known, before))
    assert in_kernel(known) == kernel
    run(kernel, class_commands(known, after))
    assert in_kernel(known) == kernel
    shaped = dict(kernel.values())
    assert shaped == {address: one.leaf_arguments for address, one in after.items()}


def in_kernel(root: Root) -> dict[int, tuple[str | None, str | None]]:
    return {
        number: (known.address, known.discipline and known.discipline.leaf_arguments)
        for number, known in root.classes.items()
    }


def run(kernel: dict[int, tuple[str | None, str | None]], lines: list[str]) -> None:
    """Applies commands to the classes of a kernel, and refuses commands that a kernel refuses."""
    for line in lines:
        what, how = line.split()[:2]
        number = int((re.search(rf"{HANDLE}([0-9a-f]+)", line) or [0, "0"])[1], 16)
        if what == "class":
            assert (number in kernel) == (how == "del")
            if how == "add":
                kernel[number] = (None, None)
            else:
                del kernel[number]
        elif what == "filter":
            prio = int(line.split("prio ")[1].split()[0])
            address = line.split("dst ")[1].split()[0] if how == "add" else None
            assert (kernel[prio][0] is None) == (how == "add")
            kernel[prio] = (address, kernel[prio][1])
        else:
            leaf = line.split(f"{HANDLE}{number:x} ")[1] if how != "del" else None
            former = kernel[number][1]
            assert (former is None) == (how == "add")
            if how == "change":
                assert former is not None and leaf is not None
                assert former.split()[0] == leaf.split()[0]
            kernel[number] = (kernel[number][0], leaf)


def test_output_of_tc_from_a_kernel_with_netem_is_read() -> None:
    options = {
        "limit": 426,
        "delay": {"delay": 0.002, "jitter": 0.001, "correlation": 0},
        "rate": {"rate": 6250000, "packetoverhead": 0},
        "ecn": False,
    }
    qdiscs = [
        {"kind": "htb", "handle": HANDLE, "root": True, "options": {}},
        {"kind": "netem", "handle": "8001:", "parent": f"{HANDLE}1", "options": options},
    ]
    found = read_root("eth0", HANDLE, json.dumps(qdiscs))
    read_classes(
        found,
        f"class htb {HANDLE}1 root leaf 8001: prio 0 rate 10Gbit ceil 10Gbit burst 1Mb cburst 1Mb\n"
        f"class htb {HANDLE}2 root prio 0 rate 10Gbit ceil 10Gbit burst 1Mb cburst 1Mb\n",
        "filter protocol ip pref 1 u32 chain 0 \n"
        "filter protocol ip pref 1 u32 chain 0 fh 800: ht divisor 1 \n"
        f"filter protocol ip pref 1 u32 chain 0 fh 800::800 order 2048 key ht 800 bkt 0 *flowid {HANDLE}1 not_in_hw \n"
        "  match 0a000002/ffffffff at 16\n"
        f"filter protocol ipv6 pref 2 u32 chain 0 fh 801::800 order 2048 key ht 801 bkt 0 *flowid {HANDLE}2 not_in_hw \n"
        "  match fd000000/ffffffff at 24\n  match 00000000/ffffffff at 28\n"
        "  match 00000000/ffffffff at 32\n  match 00120002/ffffffff at 36\n",
    )
    assert found.is_present and not found.other_kind
    assert found.classes[1].address == HERE
    assert found.classes[1].discipline is not None
    assert WIFI.matches(found.classes[1].discipline)
    assert found.classes[2] == ShapedClass(str(ipaddress.ip_address(SIX)), None)


def test_root_of_another_program_is_distinguished_from_a_default_one() -> None:
    def read(kind: str, handle: str) -> Root:
        qdisc = {"kind": kind, "handle": handle, "root": True, "options": {}}
        return read_root("eth0", HANDLE, json.dumps([qdisc]))

    tbf, service = read("tbf", "8003:"), read("htb", "c011:")
    assert (tbf.other_kind, tbf.other_handle) == ("tbf", "8003:")
    assert (service.other_kind, service.other_handle) == ("htb", "c011:")
    assert not read("noqueue", "0:").other_kind and not read("fq_codel", "0:").other_kind
