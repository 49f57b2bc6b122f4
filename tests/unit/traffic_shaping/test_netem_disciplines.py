import ipaddress
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.traffic_shaping.netem.disciplines import (
    HANDLE,
    Discipline,
    Netem,
    Present,
    PresentClass,
    TokenBucket,
    add_classes,
    commands,
    discipline_for,
    read_root,
)
from collapipe.traffic_shaping.netem.profiles import LinkConditions, network_profiles

WIFI = Netem(50e6, 2000.0, 1000.0, 0.0, 426)
LOSSY = Netem(2.4e6, 35_000.0, 10_000.0, 0.01, 109)
BUCKET = TokenBucket(2.4e6, 3028, 500_000.0)
HERE, THERE, SIX = "10.0.0.2", "10.0.0.3", "fd00::12:2"


def present(*classes: tuple[str | None, Discipline | None]) -> Present:
    known = enumerate(classes, start=1)
    return Present(ours=True, classes={number: PresentClass(*one) for number, one in known})


def test_free_interface_gets_a_root_and_for_each_address_class_leaf_and_filter() -> None:
    lines = commands("eth0", Present(), {HERE: WIFI, SIX: LOSSY})
    assert lines[0].startswith(f"qdisc add dev eth0 root handle {HANDLE} htb default 0")
    assert [line.split()[0] for line in lines[1:]] == ["class", "qdisc", "filter"] * 2
    assert (
        "netem limit 426 delay 2000.0us 1000.0us loss random 0.00000% rate 50000000bit"
        in (lines[2])
    )
    assert "protocol ip prio 1 u32 match ip dst 10.0.0.2" in lines[3]
    assert "protocol ipv6 prio 2 u32 match ip6 dst fd00::12:2" in lines[6]


def test_nothing_is_done_when_all_is_as_desired() -> None:
    assert commands("eth0", present((HERE, WIFI), (SIX, LOSSY)), {SIX: LOSSY, HERE: WIFI}) == []
    assert commands("eth0", Present(), {}) == []


def test_other_values_change_the_leaf_in_place() -> None:
    lines = commands("eth0", present((HERE, WIFI), (THERE, WIFI)), {HERE: WIFI, THERE: LOSSY})
    assert lines == [f"qdisc change dev eth0 parent {HANDLE}2 {LOSSY.arguments}"]


def test_bucket_that_shrinks_is_replaced_and_one_that_grows_is_changed() -> None:
    """A packet that waits and is larger than the new burst would hold up a link for ever: so the queue is let go."""
    small, large = BUCKET, TokenBucket(50e6, 12_500, 100_000.0)
    shrunk = commands("eth0", present((HERE, large)), {HERE: small})
    assert [line.split()[:2] for line in shrunk] == [["qdisc", "del"], ["qdisc", "add"]]
    grown = commands("eth0", present((HERE, small)), {HERE: large})
    assert [line.split()[:2] for line in grown] == [["qdisc", "change"]]


def test_leaf_of_another_kind_is_replaced() -> None:
    lines = commands("eth0", present((HERE, WIFI)), {HERE: BUCKET})
    assert [line.split()[:2] for line in lines] == [["qdisc", "del"], ["qdisc", "add"]]
    assert BUCKET.arguments in lines[1]


def test_address_that_is_not_shaped_any_more_goes_and_its_number_is_given_again() -> None:
    lines = commands("eth0", present((HERE, WIFI), (THERE, LOSSY)), {THERE: LOSSY, SIX: WIFI})
    assert lines[:2] == [
        f"filter del dev eth0 parent {HANDLE} prio 1",
        f"class del dev eth0 parent {HANDLE} classid {HANDLE}1",
    ]
    assert f"classid {HANDLE}1 htb" in lines[2]


@pytest.mark.parametrize("half", [(None, WIFI), (HERE, None), (None, None)])
def test_half_made_class_of_a_killed_process_is_made_anew(
    half: tuple[str | None, Discipline | None],
) -> None:
    lines = commands("eth0", present(half), {HERE: WIFI})
    assert f"class del dev eth0 parent {HANDLE} classid {HANDLE}1" in lines
    assert [line.split()[0] for line in lines[-3:]] == ["class", "qdisc", "filter"]


def test_last_address_takes_the_root_with_it() -> None:
    assert commands("eth0", present((HERE, WIFI)), {}) == [
        f"qdisc del dev eth0 root handle {HANDLE}"
    ]


leaves = st.sampled_from([WIFI, LOSSY, BUCKET])
addresses = st.sampled_from([f"10.0.0.{number}" for number in range(2, 9)])


@given(st.dictionaries(addresses, leaves), st.dictionaries(addresses, leaves))
def test_commands_lead_from_any_state_to_any_other(
    before: dict[str, Discipline], after: dict[str, Discipline]
) -> None:
    kernel: dict[int, tuple[str | None, str | None]] = {}
    root = run(kernel, commands("eth0", Present(), before), root=False)
    known = {leaf.arguments: leaf for leaf in (WIFI, LOSSY, BUCKET)}
    found = Present(
        ours=root,
        classes={
            number: PresentClass(address, known[str(leaf)])
            for number, (address, leaf) in kernel.items()
        },
    )
    root = run(kernel, commands("eth0", found, after), root)
    assert root == bool(after)
    shaped = {address: leaf for address, leaf in kernel.values()}
    assert shaped == {address: leaf.arguments for address, leaf in after.items()}


def run(kernel: dict[int, tuple[str | None, str | None]], lines: list[str], root: bool) -> bool:
    """What a kernel would make of commands; refuses what a kernel refuses."""
    for line in lines:
        what, how = line.split()[:2]
        number = int((re.search(rf"{HANDLE}([0-9a-f]+)", line) or [0, "0"])[1], 16)
        if " root " in line:
            assert root == (how == "del")
            root = how == "add"
            if not root:
                kernel.clear()
        elif what == "class":
            assert root and (number in kernel) == (how == "del")
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
    return root


def test_what_tc_shows_of_a_kernel_with_netem_is_read_back() -> None:
    found = read_root(
        json.dumps(
            [
                {"kind": "htb", "handle": HANDLE, "root": True, "options": {}},
                {
                    "kind": "netem",
                    "handle": "8001:",
                    "parent": f"{HANDLE}1",
                    "options": {
                        "limit": 426,
                        "delay": {"delay": 0.002, "jitter": 0.001, "correlation": 0},
                        "rate": {"rate": 6250000, "packetoverhead": 0},
                        "ecn": False,
                    },
                },
            ]
        )
    )
    add_classes(
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
    assert found.ours and not found.foreign
    assert found.classes[1].address == HERE
    assert found.classes[1].discipline is not None
    assert WIFI.matches(found.classes[1].discipline)
    assert found.classes[2] == PresentClass(str(ipaddress.ip_address(SIX)), None)


def test_root_of_somebody_else_is_told_from_a_default_one() -> None:
    def root(kind: str, handle: str) -> Present:
        shown = {"kind": kind, "handle": handle, "root": True, "options": {}}
        return read_root(json.dumps([shown]))

    assert root("tbf", "8003:").foreign == "tbf 8003:"
    assert root("htb", "c011:").foreign == "htb c011:"
    assert not root("noqueue", "0:").foreign and not root("fq_codel", "0:").foreign


@pytest.mark.parametrize("name", network_profiles())
def test_queue_holds_what_is_on_its_way_however_small_and_is_bounded(name: str) -> None:
    for conditions in (network_profiles()[name].up, network_profiles()[name].down):
        leaf = discipline_for(conditions, has_netem=True)
        assert isinstance(leaf, Netem) and conditions.rate_bps
        delay = conditions.delay_seconds + conditions.jitter_seconds
        assert leaf.limit_packets >= 1000 * delay + 8
        seconds = 8 * 1514 * leaf.limit_packets / conditions.rate_bps
        assert delay + conditions.queue_seconds <= seconds
        # of full frames, some more: what is counted are packets
        assert seconds <= max(0.4, 4 * (delay + conditions.queue_seconds))


def test_without_netem_only_the_rate_is_left() -> None:
    lossy = network_profiles()["lte-lossy"].up
    leaf = discipline_for(lossy, has_netem=False)
    assert isinstance(leaf, TokenBucket) and leaf.rate_bps == lossy.rate_bps
    assert discipline_for(LinkConditions(delay_seconds=0.1), has_netem=False) is None


def test_link_without_limits_needs_nothing_and_delay_alone_keeps_packets_in_order() -> None:
    assert discipline_for(LinkConditions(), has_netem=True) is None
    leaf = discipline_for(LinkConditions(delay_seconds=0.1, jitter_seconds=0.05), has_netem=True)
    assert isinstance(leaf, Netem) and leaf.rate_bps == 1e11
