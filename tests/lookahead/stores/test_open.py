import subprocess
import sys

import pytest
from lookahead.stores.servers import SOURCE

from dyncp.lookahead.stores.open import open_store


@pytest.mark.parametrize(
    "address, shown",
    [
        ("memory:", "memory"),
        ("file:/a/b", "file:/a/b"),
        ("file:///a/b%20c", "file:/a/b c"),
        ("tcp://host:29400", "tcp://host:29400"),
        ("tcp://[::1]:29400", "tcp://[::1]:29400"),
        ("redis://host", "redis://host:6379/0"),
        ("rediss://host:7000/3", "rediss://host:7000/3"),
    ],
)
def test_addresses(address, shown):
    store = open_store(address, "job")
    assert (store.address, store.job) == (shown, "job")


@pytest.mark.parametrize(
    "address, message",
    [
        ("http://host", "begins with 'http'; expected memory:, file:, tcp:, redis:, rediss:"),
        ("", "begins with ''"),
        ("tcp", "begins with 'tcp'"),
        ("memory:a", "expected memory: alone"),
        ("file:a", "expected file:/folder, from the root"),
        ("file://host/a", "expected file:/folder"),
        ("tcp://host", "expected tcp://host:port"),
        ("tcp://host:0", "expected tcp://host:port"),
        ("tcp://host:99999", "expected tcp://host:port"),
        ("tcp://:5", "expected tcp://host:port"),
        ("tcp://host:5/job", "expected tcp://host:port"),
    ],
)
def test_what_is_no_address(address, message):
    with pytest.raises(ValueError, match=message):
        open_store(address, "job")


def test_a_password_is_for_those_who_check_it():
    with pytest.raises(ValueError, match="only redis: and rediss: check one") as caught:
        open_store("tcp://host:5", "job", password="secret")
    assert "secret" not in str(caught.value)


def test_the_expiry_is_for_redis_alone():
    open_store("memory:", "job", expiry_s=1)
    with pytest.raises(ValueError, match="expiry_s is 0"):
        open_store("redis://host", "job", expiry_s=0)


def test_files_need_neither_torch_nor_redis():
    code = (
        "import sys; from dyncp.lookahead.stores.open import open_store; from dyncp.lookahead.stores.patient import "
        "Patient; Patient(open_store('file:/a', 'job')); sys.exit('torch' in sys.modules or 'redis' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE, check=False).returncode == 0


@pytest.mark.parametrize(
    "address",
    [
        "tcp://u:s3cret@h:1",
        "file://u:s3cret@h/x",
        "redis://u:12/s3cret@h:6379/0",
        "redis://h/s3cret@h2",
        "redis://:s3cret/x@h",
        "redis://:s3cret?x@h",
        "redis://u:s3cret@h:6379/0",
        "memory:u:s3cret@h",
    ],
)
def test_no_message_quotes_what_may_be_a_password(address):
    with pytest.raises(ValueError) as caught:
        open_store(address, "job")
    assert "s3cret" not in str(caught.value)
