"""The store's file: whole or not at all, one writer, and no database of anybody else's is touched."""

import contextlib
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pyflatness as pf
from pyflatness.scoring import keys, result_files
from pyflatness.scoring import store as stores
from pyflatness.scoring.store import SCHEMA, Store, check_local
from pyflatness.scoring.units import Fit, Pair, Row
from pyflatness.scoring.worker import Outcome

PAIRS = [
    Pair("body", "trace"),
    Pair(("body", "head"), "trace"),
    Pair("head", "relative_flatness"),
    Pair((), "pac_bayes"),
]
ROWS = {pair: Row(layer="x", measure=pair.measure, value=0.1, exact=True, samples=3) for pair in PAIRS}
OUTCOME = Outcome(ROWS, Fit(0.5, 0.25), 1.5)


def filled(path: Path) -> tuple[int, str]:
    """A store with one checkpoint, of which all is done."""
    with Store(path, write=True) as store:
        setting = store.setting({"key": {"loss": "x"}})
        store.name({"a": (None, "content")})
        store.ask(setting, {"content": PAIRS})
        store.commit(setting, "content", OUTCOME)
    return setting, "content"


def of(key: tuple[int, str]) -> tuple[int, list[str]]:
    return key[0], [key[1]]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    key = filled(path := tmp_path / "folder" / "runs.sqlite")
    assert sorted(child.name for child in path.parent.iterdir()) == ["runs.sqlite", "runs.sqlite-lock"]  # no log left
    with Store(path) as store:
        held = store.values(*key)
        assert {pair: one.row for pair, one in held.items()} == ROWS
        assert {one.fit for one in held.values()} == {OUTCOME.fit}
        assert store.counts(*of(key)) == {"to do": 0, "done": 4, "failed": 0, "none": 0}


def test_a_value_that_is_done_stays(tmp_path: Path) -> None:
    setting, content = filled(path := tmp_path / "runs.sqlite")
    with Store(path, write=True) as store:
        assert store.ask(setting, {content: [*PAIRS, Pair("head", "trace")]}) == {content: [Pair("head", "trace")]}
        last = Row(layer="head", measure="trace", value=2.0)
        store.commit(setting, content, Outcome({PAIRS[0]: Row(error="late"), Pair("head", "trace"): last}))
        found = {pair: one.row for pair, one in store.values(setting, content).items()}
        assert found == {**ROWS, Pair("head", "trace"): last}


def test_half_a_commit_is_none(tmp_path: Path) -> None:
    with Store(tmp_path / "runs.sqlite", write=True) as store:
        setting = store.setting({"key": 1})
        store.ask(setting, {"content": PAIRS})
        broken = Outcome({PAIRS[0]: ROWS[PAIRS[0]], PAIRS[1]: Row(value=object())})  # SQLite takes no objects
        with pytest.raises(pf.errors.StoreError):
            store.commit(setting, "content", broken)
        assert store.counts(setting, ["content"])["to do"] == 4
        assert store.select("SELECT * FROM units") == []


def test_there_is_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    with Store(path, write=True) as store:
        assert store.setting({"key": 1}) == 1
        with Store(path) as reader:  # others read meanwhile
            assert reader.counts(1, [])["done"] == 0
        with pytest.raises(pf.errors.StoreError, match="another process is writing"):
            Store(path, write=True)
    filled(path)


def test_a_writer_that_is_killed_leaves_the_store_free_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    script = f"""
import os, signal
from pathlib import Path
from test_store import PAIRS, OUTCOME
from pyflatness.scoring.store import Store
store = Store(Path({str(path)!r}), write=True)
setting = store.setting({{"key": 1}})
store.ask(setting, {{"content": PAIRS, "other": PAIRS}})
store.commit(setting, "content", OUTCOME)
with store.changes() as connection:
    connection.execute("DELETE FROM results")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    folders = f"{Path(__file__).parent}:{Path(__file__).parents[1]}"
    done = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": folders}, check=False)
    assert done.returncode == -9
    assert path.with_name("runs.sqlite-wal").exists()
    with Store(path) as store:
        assert store.counts(1, ["content", "other"]) == {"to do": 4, "done": 4, "failed": 0, "none": 0}
    with Store(path, write=True) as store:
        assert store.counts(1, ["content", "other"]) == {"to do": 4, "done": 4, "failed": 0, "none": 0}
    assert not path.with_name("runs.sqlite-wal").exists()


def _other_program(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE results (a)")
    connection.close()


def _other_version(path: Path) -> None:
    filled(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    connection.close()


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_bytes(b"weights" * 1000), "file is not a database"),
        (_other_program, "a database of another program"),
        (_other_version, "a later release of pyflatness"),
        (Path.mkdir, "unable to open|there is no file"),
    ],
)
def test_other_files_are_left_as_they_are(make, words: str, write: bool, tmp_path: Path) -> None:
    make(path := tmp_path / "runs.sqlite")
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(pf.errors.StoreError, match=words):
        Store(path, write=write)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_store_that_may_not_be_written_is_read(tmp_path: Path) -> None:
    key = filled(path := tmp_path / "runs.sqlite")
    path.chmod(stat.S_IRUSR)
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with Store(path) as store:
            assert len(store.values(*key)) == 4
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_a_file_has_one_writer_by_whatever_name(tmp_path: Path) -> None:
    filled(path := tmp_path / "runs.sqlite")
    (soft := tmp_path / "soft.sqlite").symlink_to(path)
    (tmp_path / "folder").mkdir()
    hard = tmp_path / "folder" / "hard.sqlite"
    with Store(path, write=True), pytest.raises(pf.errors.StoreError, match="another process is writing"):
        Store(soft, write=True)
    with Store(soft, write=True), pytest.raises(pf.errors.StoreError, match="another process is writing"):
        Store(path, write=True)
    hard.hardlink_to(path)
    for name in (path, soft, hard):
        with pytest.raises(pf.errors.StoreError, match=r"has 2 names \(hard links\)"):
            Store(name, write=True)
        assert len(Store(name).values(1, "content")) == 4
    hard.unlink()
    filled(path)


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("name", ["a" * 300, "a" * 250, "a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have_is_an_error(name: str, write: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(pf.errors.StoreError, match=r"^store: "):
        Store(path, write=write)
    if write:
        with pytest.raises(pf.errors.StoreError):
            pf.score({"a": torch.nn.Linear(3, 2)}, "mse_loss", (torch.ones(4, 3), torch.ones(4, 2)), store=path)


def values_of(path: Path) -> dict[tuple[str, Pair], str]:
    """The values that readers get of a store, with what they were computed with."""
    with Store(path) as store:
        return {
            (content, pair): repr(held)
            for content in ("content", "later")
            for pair, held in store.values(1, content).items()
        }


def test_every_flip_of_a_bit_is_noticed_or_changes_no_value(tmp_path: Path) -> None:
    path, random_ = tmp_path / "runs.sqlite", random.Random(0)
    with Store(path, write=True) as store:
        facts = {"loss": {"name": "x"}, "options": {"seed": 3}, "data": {"samples": 5}}
        setting = store.setting({"key": facts, "shown": {"model": "m", "data": "d"}})
        store.name({"a": (None, "content"), "b": ("/b", "later")})
        store.describe({"a": {"rate": 0.1}})
        store.ask(setting, {"content": PAIRS, "later": PAIRS})
        store.commit(setting, "content", OUTCOME)
        store.commit(setting, "later", Outcome({PAIRS[0]: Row(error="failed")}))
        result = pf.spectrum(torch.nn.Linear(2, 2), "mse_loss", (torch.ones(3, 2), torch.ones(3, 2)), k=1)
        result_files.add(store, "a", result)
    whole, before, noticed = path.read_bytes(), values_of(path), 0
    assert len(before) == 5
    used = [place for place, byte in enumerate(whole) if byte]  # most of a page is empty
    for place in random_.choices(used, k=300) + random_.choices(range(len(whole)), k=100):
        content = bytearray(whole)
        content[place] ^= 1 << random_.randrange(8)
        path.write_bytes(content)
        try:
            found = values_of(path)
        except pf.errors.StoreError:
            noticed += 1
        else:
            assert found.items() <= before.items()  # one that is lost is computed again
    assert 50 < noticed < 400


def test_a_value_that_is_computed_again_leaves_both_units_whole(tmp_path: Path) -> None:
    key = filled(path := tmp_path / "runs.sqlite")
    late = {Pair("head", "trace"): Row(error="late"), Pair("head", "mls"): Row(layer="head", measure="mls", value=1.0)}
    with Store(path, write=True) as store:
        store.ask(key[0], {key[1]: [*late]})
        store.commit(*key, Outcome(late))
        last = {Pair("head", "trace"): Row(layer="head", measure="trace", value=2.0)}
        store.commit(*key, Outcome(last))
        assert stores.problems(store) == []
        assert {pair: one.row for pair, one in store.values(*key).items()} == {**ROWS, **late, **last}


def test_a_value_that_was_changed_is_noticed_by_whatever_reads_it(tmp_path: Path) -> None:
    key = filled(path := tmp_path / "runs.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE results SET value = 38.06 WHERE id = 1")
    with Store(path) as store, pytest.raises(pf.errors.StoreError, match=r"damaged \(units 1: not what was written\)"):
        store.values(*key)
    with Store(path) as store, pytest.raises(pf.errors.StoreError, match="damaged"):
        store.check()
    with Store(path, write=True) as store, pytest.raises(pf.errors.StoreError, match="damaged"):
        store.values(*key)
    with Store(path) as other, Store(tmp_path / "b.sqlite", write=True) as store, pytest.raises(pf.errors.StoreError):
        stores.merge(store, other)
    with contextlib.closing(sqlite3.connect(path)) as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute("UPDATE results SET value = 'text' WHERE id = 1")


MOUNTS = """\
22 28 0:21 / / rw,relatime shared:1 - ext4 /dev/sda rw
36 22 0:30 / /home rw - nfs4 server:/home rw
37 36 0:31 / /home/me/local\\040disk rw shared:2 - xfs /dev/sdb rw
38 22 0:32 / /mnt/far rw - fuse.sshfs me@there: rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/runs.sqlite", ""),
        ("/home/me/runs.sqlite", "nfs4"),
        ("/home/me/local disk/runs.sqlite", ""),
        ("/homes/runs.sqlite", ""),
        ("/mnt/far/runs.sqlite", "fuse.sshfs"),
    ],
)
def test_network_file_systems_are_refused(path: str, kind: str, tmp_path: Path) -> None:
    (mounts := tmp_path / "mountinfo").write_text(MOUNTS)
    if not kind:
        check_local(Path(path), mounts)
        return
    with pytest.raises(pf.errors.StoreError, match=rf"network file system \({kind}\).*--shard i/N.*merge"):
        check_local(Path(path), mounts)


def test_a_moved_checkpoint_takes_its_row_along(tmp_path: Path) -> None:
    (first := tmp_path / "a").write_bytes(b"a")
    (second := tmp_path / "b").write_bytes(b"a")
    with Store(tmp_path / "runs.sqlite", write=True) as store:
        for name, path in (("a", first), ("b", second)):
            store.name({name: (str(path), keys.of_file(path))})
        shutil.move(second, third := tmp_path / "c")
        store.name({"c": (str(third), keys.of_file(third))})
        assert [row["name"] for row in store.select("SELECT name FROM checkpoints ORDER BY id")] == ["a", "c"]
        for name in ("d", "e"):  # two that are not there have nothing to do with each other
            store.name({name: (str(tmp_path / name), keys.of_file(tmp_path / name))})
        assert [row["name"] for row in store.select("SELECT name FROM checkpoints ORDER BY id")] == ["a", "c", "d", "e"]
