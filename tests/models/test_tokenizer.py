"""Text as ids of a tokenizer of Hugging Face's library, made on the spot."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from models.data import tokens
from models.data.batches import WindowBatches
from models.data.errors import DataSettingsError, NoDataLeft
from models.data.opening import piece_bytes_of
from models.data.position import position_from_json
from models.data.settings import DataSettings, TokenizerSettings, data_settings, refuse_this_machine
from models.registry import build_model
from tests.models.openers import one_source, opened
from tests.models.virtual_clock import VirtualClock
from tests.models.web_server import Site, serving, status, web_server

TEXT = [f"line number {number}, with an <|endoftext|> that is text" for number in range(60)]


def made(*, end: str = "<|endoftext|>") -> Tokenizer:
    """Bytes as in GPT-2, two merges, and one special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {one: number for number, one in enumerate([*letters, "li", "ne"])}
    library = Tokenizer(models.BPE(numbers, [("l", "i"), ("n", "e")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([end])
    return library


def written(library: Tokenizer, folder: Path) -> str:
    """The SHA-256 of its file."""
    file = folder / "tokenizer.json"
    library.save(str(file))
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    tokens._kept.clear()
    yield
    tokens._kept.clear()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with web_server(tmp_path) as made_site:
        yield made_site


def settings_of(folder: Path, path: str | Path, sha256: str = "", **more: Any) -> DataSettings:
    shard = folder / "text.txt"
    shard.write_text("\n".join(TEXT))
    tokenizer = TokenizerSettings(str(path), sha256)
    return one_source("text", shard, tokenizer=tokenizer, shuffle_examples=20, **more)


def ids_of(settings: DataSettings, **more: Any) -> list[int]:
    with opened(settings, **more) as data:
        batches = list(WindowBatches(data, rows=2, window=16))
    assert all(batch.dtype == torch.int64 for batch in batches)
    return torch.cat([batch.flatten() for batch in batches]).tolist()


def test_windows_are_the_ids_of_the_examples_and_each_has_its_end(tmp_path: Path) -> None:
    library = made()
    settings = settings_of(tmp_path, tmp_path, written(library, tmp_path), piece_bytes=200)
    found = ids_of(settings)
    end = library.token_to_id("<|endoftext|>")
    pieces = [list(g) for is_end, g in itertools.groupby(found, end.__eq__) if not is_end]
    # also those of a text with the written form of a special token
    assert {library.decode(one) for one in pieces[:-1]} <= set(TEXT)
    assert len(pieces) > len(TEXT) - 3
    assert library.token_to_id("li") in found


def test_a_file_that_asks_for_truncation_and_padding_gets_neither(tmp_path: Path) -> None:
    library = made()
    plain = ids_of(settings_of(tmp_path, tmp_path, written(library, tmp_path)))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    assert ids_of(settings_of(tmp_path, tmp_path, written(library, tmp_path))) == plain


def test_a_position_between_batches_loses_no_id(tmp_path: Path) -> None:
    library = made()
    settings = settings_of(tmp_path, tmp_path, written(library, tmp_path), piece_bytes=200)
    with opened(settings) as data:
        windows = WindowBatches(data, rows=2, window=16)
        before = [next(windows) for _ in range(5)]
        kept = position_from_json(windows.position().to_json())
    found = torch.cat([one.flatten() for one in before]).tolist() + ids_of(settings, position=kept)
    end = library.token_to_id("<|endoftext|>")
    pieces = [list(g) for is_end, g in itertools.groupby(found, end.__eq__) if not is_end]
    texts = [library.decode(one) for one in pieces[:-1]]
    assert len(set(texts)) == len(texts), "none comes twice"
    assert set(texts) <= set(TEXT)
    assert len(texts) > len(TEXT) - 3


def test_a_remainder_of_another_tokenizer_is_dropped(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, tmp_path, written(made(), tmp_path))
    with opened(settings) as data:
        windows = WindowBatches(data, rows=1, window=16)
        position = windows.position()
    for remainder in (b"abc", b"\xff" * 8):
        other = type(position)(position.sources, position.drawn, remainder)
        assert ids_of(settings, position=other) == ids_of(settings)


def test_the_tokenizer_must_be_the_one_that_is_meant(tmp_path: Path) -> None:
    sha256 = written(made(), tmp_path)
    with pytest.raises(DataSettingsError, match="does not say which one it means") as caught:
        ids_of(settings_of(tmp_path, tmp_path))
    assert f'sha256 = "{sha256}"' in caught.value.advice
    with pytest.raises(DataSettingsError, match=f"says {'0' * 64}"):
        ids_of(settings_of(tmp_path, tmp_path, "0" * 64))


def test_the_model_must_have_all_of_its_ids(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, tmp_path, written(made(), tmp_path))
    with opened(settings) as data:
        windows = WindowBatches(data, rows=2, window=16, vocabulary=256)
        with pytest.raises(DataSettingsError, match="The tokenizer has 259 ids, and the model 256"):
            next(windows)
    model = build_model({"name": "gpt", "size": "tiny", "vocabulary": 259}, seed=0)
    with opened(settings) as data:
        batch = next(WindowBatches(data, rows=2, window=model.window, vocabulary=model.vocabulary))
    assert model.loss(batch).isfinite()
    assert model.sample.startswith(f"a window of {model.window} ids")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1, 2]", b"\xff\xfe", b'{"model": {"type": "BPE"}}']
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    settings = settings_of(tmp_path, tmp_path, hashlib.sha256(content).hexdigest())
    with pytest.raises(DataSettingsError, match="cannot be used"):
        ids_of(settings)


def test_a_text_that_the_tokenizer_cannot_read_is_said_in_words(tmp_path: Path) -> None:
    """One without an id for unknown words, and one whose expression takes too long (a panic)."""
    unknowing = Tokenizer(models.WordLevel({"a": 0}, unk_token="<other>"))
    slow = made()
    slow.pre_tokenizer = pre_tokenizers.Split(Regex("(a|a)*$"), "isolated")
    for library, words in ((unknowing, "UNK"), (slow, "retry-limit")):
        settings = settings_of(tmp_path, tmp_path, written(library, tmp_path))
        (tmp_path / "text.txt").write_text("a" * 40 + "b")
        with pytest.raises(DataSettingsError, match=f"cannot read a text.*{words}"):
            ids_of(settings)


def test_a_file_that_makes_texts_grow_without_end_is_refused_before_it_sees_one(
    tmp_path: Path,
) -> None:
    library = made()
    library.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 16)] * 9)
    with pytest.raises(DataSettingsError, match="343,597,383,680 times as long"):
        ids_of(settings_of(tmp_path, tmp_path, written(library, tmp_path)))
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    assert ids_of(settings_of(tmp_path, tmp_path, written(library, tmp_path)))


def table_of_letters(letter: str, replacement: str) -> bytes:
    """As SentencePiece has it: a tree of bytes with two nodes and a value, and the replacement."""
    units = [0] * 1024
    root, child = 256 ^ ord(letter), 512
    units[0] = 256 << 10
    units[root] = child << 10 | 1 << 8 | ord(letter)
    units[root ^ child] = 1 << 31
    index = struct.pack("<1024I", *units)
    return struct.pack("<I", len(index)) + index + replacement.encode() + b"\0"


def test_a_table_of_letters_that_is_in_the_file_counts_as_well(tmp_path: Path) -> None:
    library = made()
    long = normalizers.Precompiled(table_of_letters("a", "b" * 200))
    assert long.normalize_str("a") == "b" * 200
    library.normalizer = long
    with pytest.raises(DataSettingsError, match="1,000 times as long"):
        ids_of(settings_of(tmp_path, tmp_path, written(library, tmp_path)))
    library.normalizer = normalizers.Precompiled(table_of_letters("a", "b" * 20))
    assert ids_of(settings_of(tmp_path, tmp_path, written(library, tmp_path)))


GROWING: dict[str, Callable[[], dict[str, Any]]] = {
    "bytes that become letters of two bytes": lambda: {
        "normalizer": normalizers.Sequence([normalizers.ByteLevel()] * 8)
    },
    "the same where a text is taken apart": lambda: {
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 8)
    },
    "letters before each piece": lambda: {
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Metaspace()] * 8)
    },
    "spaces around each letter": lambda: {
        "normalizer": normalizers.Sequence([normalizers.BertNormalizer()] * 8)
    },
    "letters that are taken apart and replaced again": lambda: {
        "normalizer": normalizers.Sequence(
            [normalizers.Replace("\u0635", "\ufdfa"), normalizers.NFKD()] * 2
        )
    },
    "letters of four bytes that are replaced again": lambda: {
        "normalizer": normalizers.Sequence(
            [
                normalizers.ByteLevel(),
                *(normalizers.Replace(one, "\U0001f600") for one in "\u00f0\u0141\u013a\u0122"),
            ]
            * 4
        )
    },
    "texts between two letters": lambda: {"normalizer": normalizers.Replace(Regex(""), "a" * 128)},
    "so many that their number has no end": lambda: {
        "normalizer": normalizers.Sequence([normalizers.Replace("a", "a" * 10)] * 5_000)
    },
}


@pytest.mark.parametrize("rules", GROWING.values(), ids=list(GROWING))
def test_all_rules_that_add_letters_count(
    rules: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    library = made()
    for name, one in rules().items():
        setattr(library, name, one)
    with pytest.raises(DataSettingsError, match="times as long"):
        ids_of(settings_of(tmp_path, tmp_path, written(library, tmp_path)))


def test_published_rules_are_not_refused(tmp_path: Path) -> None:
    """Those of ALBERT, with a table whose longest replacement is that of SentencePiece's own."""
    library = made()
    library.normalizer = normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Precompiled(table_of_letters("a", "b" * 18)),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    ids_of(settings_of(tmp_path, tmp_path, written(library, tmp_path)))


def test_a_file_that_is_too_large_is_not_read_whole(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "LARGEST_FILE_BYTES", 100)
    sha256 = written(made(), tmp_path)
    with pytest.raises(DataSettingsError, match="more than 100 bytes"):
        ids_of(settings_of(tmp_path, tmp_path, sha256))
    site.answers["/tokenizer.json"] = serving((tmp_path / "tokenizer.json").read_bytes())
    with pytest.raises(DataSettingsError, match="cannot be fetched"):
        ids_of(settings_of(tmp_path, f"{site.url}/tokenizer.json", sha256))


def test_it_is_fetched_from_a_server_once_and_after_interruptions(
    tmp_path: Path, site: Site
) -> None:
    sha256 = written(made(), tmp_path)
    content = (tmp_path / "tokenizer.json").read_bytes()
    site.once["/tokenizer.json"] = [status(503), serving(content, up_to=500)]
    site.answers["/tokenizer.json"] = serving(content)
    settings = settings_of(tmp_path, f"{site.url}/tokenizer.json", sha256)
    clock = VirtualClock()
    assert ids_of(settings, clock=clock) == ids_of(settings)
    assert clock.waits == [1.0, 2.0]
    assert len(site.asked) == 3


def test_a_server_that_stays_away_ends_it_and_can_be_tried_again(
    tmp_path: Path, site: Site
) -> None:
    site.answers["/tokenizer.json"] = status(503)
    settings = settings_of(tmp_path, f"{site.url}/tokenizer.json", "0" * 64)
    with pytest.raises(NoDataLeft, match=r"cannot be fetched: .*503"):
        ids_of(settings)
    site.answers.clear()
    with pytest.raises(DataSettingsError, match="404"):
        ids_of(settings)


def test_a_name_is_looked_up_in_the_cache_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    with pytest.raises(DataSettingsError, match="not in this machine's cache"):
        ids_of(settings_of(tmp_path, "owner/model", "0" * 64))
    model = cache / "models--owner--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    sha256 = written(made(), model / "snapshots" / "abc")
    assert ids_of(settings_of(tmp_path, "owner/model", sha256))


@pytest.mark.parametrize(
    "path", ["/etc/tokenizer.json", "tokenizer.json", "../owner/model", "gpt2"]
)
def test_strangers_name_nothing_on_this_machine(path: str) -> None:
    settings = data_settings({"tokenizer": {"path": path, "sha256": "0" * 64}})
    with pytest.raises(DataSettingsError, match="from this machine's disk"):
        refuse_this_machine(settings)


def test_strangers_name_nothing_in_this_network() -> None:
    given = {"path": "http://192.168.1.7/tokenizer.json", "sha256": "0" * 64}
    with pytest.raises(DataSettingsError, match="own network"):
        refuse_this_machine(data_settings({"tokenizer": given}))
    refuse_this_machine(data_settings({"tokenizer": given | {"path": "owner/model"}}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"path": "owner/model", "sha": ""}, "data.tokenizer has no key 'sha'"),
        ({"path": "owner/model", "sha256": "ABC"}, "not valid"),
        ({"sha256": "0" * 64}, "not valid"),
        ("owner/model", "not valid"),
    ],
)
def test_mistakes_in_its_settings_are_named(given: Any, words: str) -> None:
    with pytest.raises(DataSettingsError, match=words):
        data_settings({"tokenizer": given})


def test_its_pieces_are_small_enough_for_the_memory_that_the_library_takes() -> None:
    given = {"path": "owner/model", "sha256": "0" * 64}
    with pytest.raises(DataSettingsError, match="must be 262,144 at most"):
        data_settings({"piece_bytes": 1 << 20, "tokenizer": given})
    settings = data_settings({"tokenizer": given})
    assert piece_bytes_of(settings, window=30_000) == 4 * 30_000
    assert piece_bytes_of(settings, window=1 << 20) == 262_144


def test_pictures_have_none() -> None:
    given = {"path": "owner/model", "sha256": "0" * 64}
    with pytest.raises(DataSettingsError, match="for pictures"):
        data_settings({"piece_bytes": 0, "tokenizer": given})
