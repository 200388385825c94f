"""The backbone's file: saved slots are there again, and no file can stop a start."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from node.core import dht_store
from node.core.dht_store import KEPT_CONTACTS, DhtStore
from node.core.private_file import UnusableFile
from protocols.dht import Contact, Keeper, KeepingFailed, KeptSlot, Slot, contact_of
from protocols.dht.slots import check_signature, sign_slot
from protocols.errors import PotluckError
from protocols.identity import Identity

NOW = 1_800_000_000_000
PUBLISHER = Identity.from_seed(bytes(32))


def slot(name: str, sequence: int = 1, *, lives_ms: int = 60_000, value: bytes = b"\xa1x") -> Slot:
    return sign_slot(PUBLISHER, f"note/{name}", value, sequence, NOW + lives_ms)


def contact(number: int, *addresses: str) -> Contact:
    identity = Identity.from_seed(number.to_bytes(32, "big"))
    return contact_of(identity.peer_id, addresses or (f"/ip4/127.0.0.1/tcp/{1000 + number}",))


def kept(*slots: Slot, forget_at: int = 0) -> list[KeptSlot]:
    return [KeptSlot(one, max(one.expires, forget_at)) for one in slots]


def by_key(slots: Iterable[KeptSlot]) -> list[Slot]:
    return sorted((one.slot for one in slots), key=lambda one: one.key)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "dht.sqlite"


def test_it_is_a_keeper(path: Path) -> None:
    with DhtStore(path) as store:
        keeper: Keeper = store
        assert (keeper.load_contacts(), keeper.load_slots()) == ([], [])


def test_slots_are_there_again_after_a_restart_bit_for_bit(path: Path) -> None:
    withdrawn = sign_slot(PUBLISHER, "note/gone", b"", 3, NOW + 9_000, withdrawn=True)
    saved = [slot("a"), slot("ü", 7, value=bytes(300)), withdrawn]
    with DhtStore(path) as store:
        store.save_slots(kept(*saved), NOW)
    with DhtStore(path) as store:
        loaded = store.load_slots()
    assert by_key(loaded) == by_key(kept(*saved))
    for one in loaded:
        check_signature(one.slot)


def test_a_newer_slot_takes_the_place_of_an_older_one_and_never_the_other_way(path: Path) -> None:
    with DhtStore(path) as store:
        store.save_slots(kept(slot("a", 5)), NOW)
        store.save_slots(kept(slot("a", 6), slot("a", 4)), NOW)
        assert [one.slot.sequence for one in store.load_slots()] == [6]


def test_expired_slots_are_forgotten(path: Path) -> None:
    with DhtStore(path) as store:
        store.save_slots(kept(slot("short", lives_ms=1_000), slot("long")), NOW)
        store.save_slots([], NOW + 1_000)
        assert [one.slot.key for one in store.load_slots()] == ["note/long"]


def test_contacts_come_back_in_their_order_with_earlier_ones_behind(path: Path) -> None:
    with DhtStore(path) as store:
        store.save_contacts([contact(1), contact(2)])
        store.save_contacts([contact(3), contact(2, "/ip4/127.0.0.1/tcp/9")])
    with DhtStore(path) as store:
        assert store.load_contacts() == [
            contact(3),
            contact(2, "/ip4/127.0.0.1/tcp/9"),
            contact(1),
        ]


def test_knowing_nobody_does_not_erase_whom_it_knew(path: Path) -> None:
    with DhtStore(path) as store:
        store.save_contacts([contact(1)])
        store.save_contacts([])
        assert store.load_contacts() == [contact(1)]


def test_no_more_contacts_are_kept_than_the_limit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_store, "KEPT_CONTACTS", 3)
    with DhtStore(path) as store:
        store.save_contacts([contact(number) for number in range(1, 6)])
        store.save_contacts([contact(6)])
        assert store.load_contacts() == [contact(6), contact(1), contact(2)]
    assert KEPT_CONTACTS > 3


def test_only_its_owner_can_read_the_file(path: Path) -> None:
    with DhtStore(path) as store:
        store.save_slots(kept(slot("a")), NOW)
        modes = {file.stat().st_mode & 0o077 for file in path.parent.iterdir()}
    assert modes == {0}


def test_threads_take_turns(path: Path) -> None:
    with DhtStore(path) as store:

        def save(first: int) -> None:
            for number in range(first, first + 50):
                store.save_slots(kept(slot(str(number))), NOW)
                store.save_contacts([contact(number + 1)])

        threads = [threading.Thread(target=save, args=(first,)) for first in (0, 50, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.load_slots()) == len(store.load_contacts()) == 150


def test_after_closing_saving_fails_with_a_sentence(path: Path) -> None:
    store = DhtStore(path)
    store.close()
    store.close()
    with pytest.raises(KeepingFailed, match=r"cannot be kept in .*dht\.sqlite"):
        store.save_slots(kept(slot("a")), NOW)
    assert store.load_slots() == []


def test_a_failed_batch_changes_nothing(path: Path) -> None:
    with DhtStore(path) as store:
        store.save_slots(kept(slot("a")), NOW)
        impossible = Slot("note/b", None, 1, NOW + 1, b"", False, b"")  # type: ignore[arg-type]
        with pytest.raises(KeepingFailed):
            store.save_slots(kept(slot("c"), impossible), NOW)
        assert [one.slot.key for one in store.load_slots()] == ["note/a"]
        store.save_slots(kept(slot("d")), NOW)


SAVE_FOR_EVER = """
import sys
from pathlib import Path
from node.core.dht_store import DhtStore
from tests.dht.test_dht_store import NOW, kept, slot
store = DhtStore(Path(sys.argv[1]))
batch = 0
while True:
    batch += 1
    store.save_slots(kept(*(slot(f"{batch}-{part}") for part in range(7))), NOW)
    print(batch, flush=True)
"""


@pytest.mark.slow
def test_after_kill_9_every_finished_batch_is_there_whole(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= 20:
                break
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
    finished = int(rest[-1]) if rest else 20
    with DhtStore(path) as store:
        keys = {one.slot.key.removeprefix("note/") for one in store.load_slots()}
    batches = {key.split("-")[0] for key in keys}
    assert keys == {f"{batch}-{part}" for batch in batches for part in range(7)}
    assert {str(number) for number in range(1, finished + 1)} <= batches


# -- files that are not what they should be


def write_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(10_000))


def cut_short(path: Path) -> None:
    with DhtStore(path) as store:
        store.save_slots(kept(*(slot(str(number), value=bytes(1000)) for number in range(50))), NOW)
    os.truncate(path, path.stat().st_size // 2)


def overwrite_pages(path: Path) -> None:
    with DhtStore(path) as store:
        store.save_slots(kept(*(slot(str(number), value=bytes(1000)) for number in range(50))), NOW)
    content = bytearray(path.read_bytes())
    content[4096 : 4096 * 3] = os.urandom(4096 * 2)
    path.write_bytes(content)


def of_another_program(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE bookmarks (url)")
        other.execute("PRAGMA application_id = 77")


def with_a_trigger(path: Path) -> None:
    DhtStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as mischief:
        mischief.execute("CREATE TRIGGER t AFTER INSERT ON slots BEGIN DELETE FROM slots; END")


def with_a_view_for_a_table(path: Path) -> None:
    DhtStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as mischief:
        mischief.execute("DROP TABLE contacts")
        mischief.execute("CREATE VIEW contacts AS SELECT 1 AS peer, 2 AS addresses, 3 AS place")


@pytest.mark.parametrize(
    "spoil",
    [write_garbage, cut_short, overwrite_pages, of_another_program, with_a_trigger,
     with_a_view_for_a_table],
)  # fmt: skip
def test_a_file_that_is_not_ours_is_moved_aside_and_a_new_one_is_begun(
    spoil: Callable[[Path], None], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    spoil(path)
    with caplog.at_level(logging.WARNING), DhtStore(path) as store:
        assert store.load_slots() == []
        store.save_slots(kept(slot("a")), NOW)
    assert "moved to" in caplog.text
    assert path.with_name("dht.sqlite.damaged").exists()
    with DhtStore(path) as store:
        assert store.load_slots() == kept(slot("a"))


def test_an_empty_file_is_a_new_one(path: Path) -> None:
    path.parent.mkdir()
    path.touch(mode=0o600)
    with DhtStore(path) as store:
        store.save_slots(kept(slot("a")), NOW)
    assert [file.name for file in path.parent.iterdir()] == ["dht.sqlite"]


def test_impossible_rows_are_left_out(path: Path) -> None:
    with DhtStore(path) as store:
        store.save_slots(kept(slot("a")), NOW)
        store.save_contacts([contact(1)])
    with contextlib.closing(sqlite3.connect(path)) as mischief:
        for row in [
            ("note/wrong", b"short", 1, NOW + 1, b"", 0, b""),
            ("note/type", b"p" * 32, "one", "two", "text", "yes", 5),
            ("note/" + "x" * 500, b"p" * 32, 1, NOW + 1, b"", 0, b"s" * 64),
            ("note/large", b"p" * 32, 1, NOW + 1, bytes(70_000), 0, b"s" * 64),
            ("note/negative", b"p" * 32, -1, NOW + 1, b"", 0, b"s" * 64),
        ]:
            mischief.execute(f"INSERT INTO slots VALUES (?, ?, ?, ?, ?, ?, ?, {NOW + 1})", row)
        for row in [
            ("nobody", b"\x90", 1),
            ("x" * 5000, b"\xc1", 2),
            (5, 6, 7),
            ("y", b"a" * 5000, 8),
        ]:
            mischief.execute("INSERT INTO contacts VALUES (?, ?, ?)", row)
        mischief.commit()
    with DhtStore(path) as store:
        assert store.load_slots() == kept(slot("a"))
        assert store.load_contacts() == [contact(1)]


def test_invalid_text_does_not_hide_the_rest(path: Path) -> None:
    with DhtStore(path) as store:
        store.save_slots(kept(slot("a")), NOW)
    with contextlib.closing(sqlite3.connect(path)) as mischief:
        mischief.execute("INSERT INTO slots SELECT CAST(x'ff2fff' AS TEXT), publisher, sequence,"
                         " expires, value, withdrawn, signature, forget_at FROM slots")  # fmt: skip
        mischief.commit()
    with DhtStore(path) as store:
        assert kept(slot("a"))[0] in store.load_slots()


def test_no_more_is_loaded_than_a_node_keeps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_store, "LOADED_BYTES", 2_100)
    with DhtStore(path) as store:
        slots = [slot(f"{life}", lives_ms=life, value=bytes(1000)) for life in (1000, 2000, 3000)]
        store.save_slots(kept(*slots), NOW)
        assert [one.slot.key for one in store.load_slots()] == ["note/3000", "note/2000"]


def test_the_file_of_a_newer_potluck_is_left_alone(path: Path) -> None:
    DhtStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as newer:
        newer.execute("PRAGMA user_version = 99")
    with pytest.raises(PotluckError, match="newer potluck"):
        DhtStore(path)
    assert not path.with_name("dht.sqlite.damaged").exists()


def test_a_link_in_its_place_is_refused(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnusableFile, match="not an ordinary file"):
        DhtStore(path)


def test_a_file_that_others_may_write_is_refused(path: Path) -> None:
    DhtStore(path).close()
    path.chmod(0o666)
    with pytest.raises(UnusableFile, match="0666"):
        DhtStore(path)


def test_an_impossible_path_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PotluckError, match="--keep-slots"):
        DhtStore(tmp_path / "file" / "dht.sqlite")


# -- what a slot stood against


def test_a_slot_stays_for_as_long_as_it_stands_in_the_way_of_a_longer_lived_one(
    path: Path,
) -> None:
    short = slot("a", 2, lives_ms=1_000)
    with DhtStore(path) as store:
        store.save_slots(kept(slot("a", 1, lives_ms=90_000)), NOW)
        store.save_slots(kept(short, forget_at=NOW + 90_000), NOW)
        store.save_slots([], NOW + 60_000)
        assert store.load_slots() == [KeptSlot(short, NOW + 90_000)]
        store.save_slots([], NOW + 90_000)
        assert store.load_slots() == []


def test_a_file_of_the_first_version_is_brought_up_to_date(path: Path) -> None:
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as first:
        first.executescript(dht_store.MIGRATIONS[0])
        first.execute(f"PRAGMA application_id = {dht_store.APPLICATION_ID}")
        first.execute("PRAGMA user_version = 1")
        old = msgspec.structs.astuple(slot("old"))
        first.execute("INSERT INTO slots VALUES (?, ?, ?, ?, ?, ?, ?)", old)
        first.commit()
    path.chmod(0o600)
    with DhtStore(path) as store:
        assert store.load_slots() == kept(slot("old"))
        store.save_slots(kept(slot("new")), NOW)
    with DhtStore(path) as store:
        assert by_key(store.load_slots()) == [slot("new"), slot("old")]
