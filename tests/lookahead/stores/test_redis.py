import sys
import time

import pytest
from lookahead.stores.servers import PASSWORD

from dyncp.lookahead.stores import redis as module
from dyncp.lookahead.stores.api import StoreError
from dyncp.lookahead.stores.redis import RedisStore


@pytest.mark.parametrize("password", [None, "wrong horse"])
def test_a_wrong_password_is_said_and_no_password_is_shown(running, password):
    server = running("redis")
    store = RedisStore(server.address, "job", password)
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:\d+/0 wants (another password or user|a password): ") as caught:
        store.put("a", b"1")
    assert "horse" not in str(caught.value)


def test_a_certificate_of_nobody_known_is_refused(running):
    server = running("rediss")
    store = RedisStore(server.address.partition("?")[0], "job", PASSWORD)
    with pytest.raises(StoreError, match=r"cannot be reached: ConnectionError: .*certificate verify failed"):
        store.get("a", 5)


def test_a_certificate_of_another_host_is_refused(running):
    server = running("rediss")
    store = RedisStore(server.address.replace("127.0.0.1", "localhost"), "job", PASSWORD)
    with pytest.raises(StoreError, match=r"cannot be reached: ConnectionError: .*certificate"):
        store.get("a", 5)


def test_values_expire(running):
    store = RedisStore(running("redis").address, "expiring", PASSWORD, expiry_s=1.0)
    store.put("a", b"1")
    assert store.add("b", b"2")
    assert store.get("a", 0) == b"1"
    deadline = time.monotonic() + 10
    while not store.add("b", b"3"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(TimeoutError):
        store.get("a", 0)


def test_a_full_server_says_so(stopped):
    store = RedisStore(stopped("redis").start().address, "job", PASSWORD)
    store.put("a", b"1")
    store._client.config_set("maxmemory", 1)
    with pytest.raises(StoreError, match=r"has no room \(see its maxmemory\): OutOfMemoryError"):
        store.put("a", b"2")
    store.delete("a")


def test_values_above_redis_own_limit_are_refused(running, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_BYTES", 10)
    with pytest.raises(ValueError, match="'a' was put with 11 bytes; Redis takes at most 10"):
        RedisStore(running("redis").address, "job", PASSWORD).put("a", b"x" * 11)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ValueError, match=r"pip install 'dyncp\[redis\]'"):
        RedisStore("redis://localhost", "job")


@pytest.mark.parametrize(
    "url, message",
    [
        ("redis://:secret@localhost", "password in it.*give it as password="),
        ("redis://user:secret@localhost", "password in it.*give it as password="),
        ("redis://", "expected redis://host:port/database"),
        ("redis://localhost:port", "expected redis://host:port/database"),
        ("redis://localhost/plans", "is 'plans'; it needs a number"),
        ("redis://localhost?db=3", "has the option 'db'; known are ssl_ca_certs"),
        ("redis://localhost?ssl_ca_certs=/a", "ssl_ca_certs without TLS; write rediss://"),
        ("rediss://localhost?ssl_ca_certs=/no/file", "'/no/file', which is no file here"),
    ],
)
def test_a_bad_address_is_refused_at_once(url, message):
    with pytest.raises(ValueError, match=message) as caught:
        RedisStore(url, "job")
    assert "secret" not in str(caught.value)


def test_addresses_have_their_defaults():
    assert RedisStore("redis://host", "job").address == "redis://host:6379/0"
    assert RedisStore("redis://user@[::1]:7000/2", "job").address == "redis://[::1]:7000/2"
    with pytest.raises(ValueError, match="expiry_s is 0"):
        RedisStore("redis://host", "job", expiry_s=0)
