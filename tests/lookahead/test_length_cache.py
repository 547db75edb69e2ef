import json
import logging
import multiprocessing
import stat
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest
from lookahead.loading import LENGTHS

from dyncp.lookahead.config import Batching
from dyncp.lookahead.lengths import sample_lengths
from dyncp.lookahead.source import make_source


class Untold:
    """Samples of some lengths, which it does not tell; every read is a byte in a file, as processes share it."""

    def __init__(self, log, lengths=LENGTHS, pause_s=0.0):
        self.lengths_ = lengths
        self.log = log
        self.pause_s = pause_s

    def __len__(self):
        return len(self.lengths_)

    def __getitem__(self, index):
        with self.log.open("ab") as file:
            file.write(b".")
        threading.Event().wait(self.pause_s)
        return np.arange(self.lengths_[index])

    def reads(self):
        """Since it was last asked."""
        count = self.log.stat().st_size if self.log.exists() else 0
        self.log.write_bytes(b"")
        return count


@pytest.fixture
def dataset(tmp_path):
    return Untold(tmp_path / "reads")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "lengths"


def found(dataset, path):
    return sample_lengths(dataset, Batching(200, length_cache=path)).tolist()


def test_a_dataset_is_measured_once(dataset, path, caplog):
    many = Untold(dataset.log, LENGTHS * 10)
    assert found(many, path) == list(LENGTHS * 10)
    assert many.reads() == 120
    assert found(many, str(path)) == list(LENGTHS * 10)
    assert many.reads() == 16  # probes
    assert found(dataset, path.with_name("other")) == list(LENGTHS)
    assert dataset.reads() == 12
    assert found(dataset, path.with_name("other")) == list(LENGTHS)
    assert dataset.reads() == 12
    assert sorted(file.name for file in path.parent.iterdir()) == ["lengths", "lengths.lock", "other", "other.lock"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert not caplog.records


def flip(content):
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "does not begin with a line of JSON"),
        (lambda content: b"\x80\x04\x95", "does not begin with a line of JSON"),
        (lambda content: b"[1]\n", "is not of the format 'dyncp lengths 1'"),
        (lambda content: content[:-1], "is damaged"),
        (lambda content: content[:-8], "is damaged"),
        (flip, "is damaged"),
        (lambda content: content.replace(b"null", b'"ab"'), "of a dataset with fingerprint ab, this one has None"),
    ],
)
def test_a_damaged_file_is_made_anew(damage, message, dataset, path, caplog):
    found(dataset, path)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    dataset.reads()
    assert found(dataset, path) == list(LENGTHS)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("dyncp", logging.WARNING)
    assert message in record.message and str(path) in record.message
    assert path.read_bytes() == good
    assert dataset.reads() == 12


def test_a_file_of_other_samples_is_made_anew(dataset, path, caplog):
    found(dataset, path)
    more = Untold(dataset.log, (*LENGTHS, 3))
    assert found(more, path) == [*LENGTHS, 3]
    assert "it has the lengths of 12 samples, the dataset has 13" in caplog.text
    other = Untold(dataset.log, (*LENGTHS, 4))
    assert found(other, path) == [*LENGTHS, 4]
    assert "sample 12 has 4 tokens, it says 3" in caplog.text


def test_the_file_follows_a_dataset_that_grows(dataset, path, caplog):
    caplog.set_level(logging.INFO, "dyncp")
    source = make_source(dataset, Batching(200, length_cache=path))
    list(source.draws(0))
    dataset.lengths_ = (*LENGTHS, 100)
    assert sum(len(draw.samples) for draw in source.draws(1)) == 13
    assert "the dataset has 13 samples, it had 12" in caplog.text
    dataset.reads()
    assert make_source(dataset, Batching(200, length_cache=path)).lengths.tolist() == [*LENGTHS, 100]
    assert dataset.reads() == 13  # probes


def test_hugging_face_datasets_are_known_by_their_fingerprint(path, caplog):
    dataset = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in LENGTHS]})
    dataset = dataset.with_transform(lambda rows: rows)  # or it would be measured in no time
    reads = []
    original = datasets.Dataset.__getitem__

    def read(this, key):
        reads.append(key)
        return original(this, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.Dataset, "__getitem__", read)
        assert found(dataset, path) == list(LENGTHS)
        assert len(reads) == 12
        assert found(dataset, path) == list(LENGTHS)
        assert len(reads) == 12
        assert found(dataset.select(range(11, -1, -1)), path) == list(LENGTHS[::-1])
    assert json.loads(path.read_bytes().partition(b"\n")[0])["fingerprint"] != dataset._fingerprint
    assert "of a dataset with fingerprint" in caplog.text


def test_the_file_is_not_needed_where_lengths_are_told(path):
    class Told(list):
        lengths = (2, 3)

    assert list(sample_lengths(Told([[1, 2], [1, 2, 3]]), Batching(9, length_cache=path))) == [2, 3]
    assert not path.exists()


def test_lengths_that_cannot_be_kept_are_used_all_the_same(dataset, path, caplog, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dyncp.lookahead.length_cache.os.replace", full)
    assert found(dataset, path) == list(LENGTHS)
    assert "could not be kept" in caplog.text and "No space left" in caplog.text
    assert [file.name for file in path.parent.iterdir()] == ["lengths.lock"]


def test_a_file_system_without_locks_is_said(dataset, path, caplog, monkeypatch):
    def no_locks(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("dyncp.lookahead.length_cache.fcntl.flock", no_locks)
    assert found(dataset, path) == list(LENGTHS)
    assert "cannot be locked" in caplog.text
    assert path.exists()


def test_threads_measure_once(dataset, path):
    dataset.pause_s = 0.01
    results = []
    threads = [threading.Thread(target=lambda: results.append(found(dataset, path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [list(LENGTHS)] * 3
    assert dataset.reads() == 3 * 12  # measured by one, probed by two


def _measure(folder, barrier, results):
    dataset = Untold(Path(folder) / "reads", LENGTHS * 3, pause_s=0.005)
    barrier.wait()
    results.put(found(dataset, Path(folder) / "lengths"))


def test_of_two_processes_one_measures(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_measure, args=(tmp_path, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [list(LENGTHS * 3)] * 2
    for process in processes:
        process.join()
    reads = (tmp_path / "reads").stat().st_size
    assert reads == 36 + 16  # one measures them all, the other looks whether the file fits
