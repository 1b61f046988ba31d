"""Addresses of servers that a run starts on several hosts."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mega_rl.config.rules.rollout import is_loopback
from mega_rl.errors import UserError
from mega_rl.rollout.sglang.server.addresses import address_of, check_urls, listening_address

AWAY = next(
    (name for name in psutil.net_if_addrs() if not is_loopback(address_of(name)) and address_of(name) != name), ""
)
needs_interface = pytest.mark.skipif(not AWAY, reason="this machine has no interface but loopback")


def world(*others: tuple[str, list[str]]) -> Any:
    """The first rank of several; others' addresses and interfaces."""
    return SimpleNamespace(rank=0, size=1 + len(others), gather_json=lambda own: [own, *map(list, others)])


def test_one_host_keeps_loopback() -> None:
    assert listening_address("127.0.0.1", world(), hosts=1) == "127.0.0.1"
    assert listening_address("lo", world(), hosts=1) == "127.0.0.1"


def test_address_of_another_network_stays() -> None:
    assert listening_address("10.1.2.3", world(), hosts=8) == "10.1.2.3"


@needs_interface
@pytest.mark.parametrize("setting", ["127.0.0.1", "localhost", "lo", "::1"])
def test_several_hosts_listen_towards_the_master(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", address_of(AWAY))
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert listening_address(setting, world(("10.0.0.2", [])), hosts=2) == address_of(AWAY)


def test_hosts_that_met_on_loopback_are_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert listening_address("127.0.0.1", world(("127.0.0.1", [])), hosts=2) == "127.0.0.1"


def test_joined_server_on_loopback_is_refused_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = ["http://10.0.0.1:30000", "http://127.0.0.1:30000"]
    check_urls(urls, hosts=1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    check_urls(urls, hosts=2)  # all on one machine
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    check_urls(urls[:1], hosts=2)
    with pytest.raises(UserError, match=r"urls=http://127.0.0.1:30000: the run has 2 hosts, of which one reaches it"):
        check_urls(urls, hosts=2)


def test_master_that_is_loopback_on_its_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a node's own name is 127.0.1.1; every rank gets the error."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(
        UserError, match=r"http://localhost:\d+ \(MASTER_ADDR\) is loopback on the host of rank 0; name the inter"
    ) as refused:
        listening_address("127.0.0.1", world(("10.0.0.2", ["eth0 (10.0.0.2)"])), hosts=2)
    if AWAY:
        assert re.search(rf"{AWAY} \({address_of(AWAY)}\)", str(refused.value))
