"""The address that other hosts are told. Which network it is on follows from MASTER_ADDR."""

import os
import socket

import pytest

from rlhf_mp.cluster import network
from rlhf_mp.cluster.launcher import RankInfo
from rlhf_mp.errors import ConfigError

ALONE, ONE_OF_TWO = RankInfo(0, 0, 2, 2), RankInfo(0, 0, 2, 1)


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_ranks_of_one_machine_stay_on_loopback():
    assert network.join_network(ALONE) == "127.0.0.1"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_loopback_is_no_address_for_other_machines(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ConfigError, match="where no other host can reach it"):
        network.join_network(ONE_OF_TWO)


def test_an_unknown_first_machine_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(ConfigError, match="no-such-host.invalid.*not reachable from"):
        network.join_network(ONE_OF_TWO)


def test_gloo_uses_the_interface_of_that_address_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(network, "address_toward", lambda host: "10.9.8.7")
    monkeypatch.setattr(network, "interface_of", lambda address: {"10.9.8.7": "ib0"}[address])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what is set below is undone
    del os.environ["GLOO_SOCKET_IFNAME"]
    assert network.join_network(ONE_OF_TWO) == "10.9.8.7"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    os.environ["GLOO_SOCKET_IFNAME"] = "eth1"
    network.join_network(ONE_OF_TWO)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


def test_the_way_to_this_machine_is_loopback_and_that_is_an_interface():
    assert network.address_toward("127.0.0.1") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") in dict(map(reversed, socket.if_nameindex()))
    assert network.interface_of("203.0.113.77") is None
