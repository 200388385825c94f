"""The definition alone decides what is trained: the same at every peer, in its own order."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from models.data.clock import ReadingStopped
from models.data.errors import DataSettingsError
from models.errors import ModelsError
from node.core.wrong_use import WrongUse
from node.run.building import RunTask, build_task, parts_of, weighted_mean
from node.run.checking import check
from node.run.costs import KEPT_APART, costs_of
from node.run.definition import WrongDefinition, read_definition
from node.run.trusted import BrokenModule, UntrustedModule, trusted_modules
from protocols.errors import PotluckError
from tests.runs.definitions import TEXT, changed, with_line

CLASSIFIER = changed(
    'name = "gpt"\nsize = "tiny"\ncontext = 16\n', 'name = "classifier"\n'
).replace(b"width = 16\nlayers = 1\nheads = 2\n", b'size = "tiny"\n')
SWAV = CLASSIFIER.replace(b'"classifier"', b'"swav"')
FACTORS = b"[averaging]\n%s\n"
MODULE = changed(
    'name = "gpt"\nsize = "tiny"\ncontext = 16\nwidth = 16\nlayers = 1\nheads = 2\n',
    'module = "poem_model"\nwidth = 8\n',
)
NORMED = """
import torch
from models.trainable import Trainable

class Normed(Trainable):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3), persistent=False)

def build_model(settings, *, seed):
    return Normed()

def open_batches(settings, *, seed, peer, samples):
    while True:
        yield torch.ones(samples, 3)
"""
POEM_MODEL = """
import torch
from models.registry import build_model as build

def build_model(settings, *, seed):
    return build({"name": "gpt", "size": "tiny", "context": 16, "heads": 2, **settings}, seed=seed)

def open_batches(settings, *, seed, peer, samples):
    while True:
        yield torch.full((samples, 17), settings["letter"], dtype=torch.uint8)
"""


def task_of(text: bytes = TEXT, peer: str = "alice", **options: Any) -> RunTask:
    return build_task(read_definition(text), peer=peer, **options)


def batches_of(task: RunTask, count: int, **options: Any) -> list[torch.Tensor]:
    with task.open_batches(samples=4, **options) as batches:
        return [next(batches) for _ in range(count)]


def digest(task: RunTask) -> str:
    hashed = hashlib.sha256()
    for name, one in task.named_parameters:
        hashed.update(name.encode() + one.detach().numpy().tobytes())
    return hashed.hexdigest()


def test_all_peers_begin_with_the_same_bits_and_another_seed_with_others() -> None:
    assert digest(task_of(peer="alice")) == digest(task_of(peer="bob"))
    assert digest(task_of()) != digest(task_of(with_line("seed = 1")))


@pytest.mark.slow
def test_two_peers_read_the_same_data_in_different_orders() -> None:
    alices, again, bobs = (batches_of(task_of(peer=peer), 3) for peer in ("a", "a", "b"))
    assert all(torch.equal(one, other) for one, other in zip(alices, again, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(alices, bobs, strict=True))


@pytest.mark.slow
def test_reading_goes_on_behind_the_last_batch_that_was_given() -> None:
    task = task_of()
    with task.open_batches(samples=4) as batches:
        first = next(batches)
        kept = batches.position()
    (second,) = batches_of(task, 1, position=kept)
    assert not torch.equal(first, second)
    assert kept is not None
    assert kept.sources[0].drawn > 0


def test_the_loss_is_the_models_and_learns() -> None:
    task = task_of()
    batch = task.made_up_batch(4)
    assert task.samples_in(batch) == 4
    optimizer = task.optimizer_factory(task.named_parameters)
    before = task.loss(batch)
    before.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert task.loss(batch).item() < before.item()


def test_stopping_ends_a_thread_that_asks_for_a_batch() -> None:
    with task_of().open_batches(samples=4) as batches:
        next(batches)
        batches.stop()
        with pytest.raises(ReadingStopped):
            list(batches)  # what was read ahead is still given


def test_a_classifier_without_data_has_the_built_in_figures_each_peer_its_own() -> None:
    alice, bob = task_of(CLASSIFIER), task_of(CLASSIFIER, "bob")
    with alice.open_batches(samples=2) as batches:
        next(batches)
        kept = batches.position()
        second = next(batches)
    (again,) = batches_of_samples(alice, 2, kept)
    (bobs,) = batches_of_samples(bob, 2, None)
    assert torch.equal(second.images, again.images)
    assert not torch.equal(second.images, bobs.images)
    assert alice.samples_in(again) == 2


def test_swav_gets_crops_of_the_built_in_figures_and_others_after_a_restart() -> None:
    task = task_of(SWAV)
    with task.open_batches(samples=2) as batches:
        first = next(batches)
        kept = batches.position()
    (second,) = batches_of_samples(task, 2, kept)
    assert first.large.shape == (2, 2, 3, 32, 32)
    assert first.small.shape == (2, 4, 3, 16, 16)
    assert not torch.equal(first.large, second.large)
    (again,) = batches_of_samples(task, 2, None)
    assert torch.equal(first.large, again.large)


def test_a_buffer_that_is_not_persistent_is_this_machines_own(tmp_path: Path) -> None:
    task = task_of(SWAV)
    assert [name for name, _ in task.model.named_buffers()] == ["queue"]
    assert not task.buffers
    file = tmp_path / "poem_model.py"
    file.write_text(NORMED)
    text = MODULE + b'[data]\nmodule = "poem_model"\n'
    built = task_of(text, trusted=trusted_modules([str(file)]))
    assert [name for name, _ in built.buffers] == ["mean"]


def test_passes_that_only_measure_leave_every_buffer_alone() -> None:
    task = task_of(SWAV)
    with task.buffers_stay():
        task.compute(task.made_up_batch(4))
        assert task.model.get_buffer("queue").any()
    assert not task.model.get_buffer("queue").any()


def batches_of_samples(task: RunTask, samples: int, position: Any) -> list[Any]:
    with task.open_batches(samples=samples, position=position) as batches:
        return [next(batches)]


LOCAL = {
    "a path": '[[data.source]]\nkind = "text"\npaths = ["/etc/passwd"]\n',
    "a file address": '[[data.source]]\nkind = "text"\npaths = ["FILE/etc/passwd"]\n'.replace(
        "FILE",
        "file:" + "//",  # no file of ours names one in full
    ),
    "its own network": '[[data.source]]\nkind = "text"\npaths = ["http://192.168.1.1/x"]\n',
    "itself": '[[data.source]]\nkind = "text"\npaths = ["http://localhost/x"]\n',
    "a tokenizer of its disk": '[data.tokenizer]\npath = "/etc/tokenizer.json"\n',
    "a folder as data set": '[[data.source]]\nkind = "datasets"\ndataset = "text"\n',
}


@pytest.mark.parametrize("data", LOCAL.values(), ids=LOCAL.keys())
def test_nothing_is_read_from_the_volunteers_own_machine_or_network(data: str) -> None:
    text = TEXT + data.encode()
    with pytest.raises(ModelsError):
        task_of(text)
    definition, mistakes = check(text)
    assert definition is None
    assert mistakes, "and the organiser is told before anybody else"


def test_a_module_is_refused_by_name_unless_it_is_trusted() -> None:
    with pytest.raises(UntrustedModule, match="poem_model") as caught:
        task_of(MODULE)
    assert "--trust-module PATH/poem_model.py" in caught.value.advice
    assert caught.value.exit_code == 3


def test_a_trusted_module_is_the_model_and_the_data(tmp_path: Path) -> None:
    file = tmp_path / "poem_model.py"
    file.write_text(POEM_MODEL)
    text = MODULE + b'[data]\nmodule = "poem_model"\nletter = 65\n'
    task = task_of(text, trusted=trusted_modules([str(file)]))
    (batch,) = batches_of(task, 1)
    assert batch.shape == (4, 17)
    assert int(batch[0, 0]) == 65
    assert task.loss(batch).item() > 0
    assert task.plain_model == {}


def test_a_module_may_have_dataclasses(tmp_path: Path) -> None:
    file = tmp_path / "poem_model.py"
    record = "from dataclasses import dataclass\n@dataclass\nclass Verse:\n    feet: int = 5\n"
    file.write_text("from __future__ import annotations\n" + record + POEM_MODEL)
    task_of(MODULE, trusted=trusted_modules([str(file)]))


def test_a_module_must_be_the_file_that_the_organiser_meant(tmp_path: Path) -> None:
    file = tmp_path / "poem_model.py"
    trusted = {"poem_model": file}
    file.write_text(POEM_MODEL)
    right = hashlib.sha256(file.read_bytes()).hexdigest()
    text = MODULE.replace(b'"poem_model"\n', f'"poem_model"\nsha256 = "{right}"\n'.encode())
    task_of(text, trusted=trusted)
    file.write_text('raise SystemExit("executed")')
    with pytest.raises(UntrustedModule, match="is not the module poem_model of this run"):
        task_of(text, trusted=trusted)


def test_a_module_that_everybody_may_write_to_is_not_trusted(tmp_path: Path) -> None:
    file = tmp_path / "poem_model.py"
    file.write_text('raise SystemExit("executed")')
    file.chmod(0o666)
    with pytest.raises(UntrustedModule, match="Everybody on this machine may write to"):
        task_of(MODULE, trusted={"poem_model": file})


@pytest.mark.parametrize("name", ["../poem_model", "/etc/passwd", "os.path", "a" * 65])
def test_the_name_of_a_module_in_a_definition_never_becomes_a_path(
    name: str, tmp_path: Path
) -> None:
    text = MODULE.replace(b'"poem_model"', f'"{name}"'.encode())
    with pytest.raises(WrongDefinition, match="must be a name"):
        task_of(text, trusted={name: tmp_path})


def test_a_module_whose_batches_end_is_told(tmp_path: Path) -> None:
    file = tmp_path / "poem_model.py"
    file.write_text(POEM_MODEL.replace("while True:", "if samples:"))
    text = MODULE + b'[data]\nmodule = "poem_model"\nletter = 65\n'
    task = task_of(text, trusted={"poem_model": file})
    with pytest.raises(BrokenModule, match="have ended"):
        batches_of(task, 2)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "has no function build_model"),
        ("def build_model(settings, *, seed): return 7", "line 1: build_model must give"),
        ("def build_model(settings, *, seed): raise KeyError('a')", "KeyError"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_module_that_does_not_do_it_is_told(source: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "poem_model.py"
    file.write_text(source)
    with pytest.raises(BrokenModule, match=told):
        task_of(MODULE, trusted={"poem_model": file})


@pytest.mark.parametrize("name", ["missing.py", "poem_model.txt", "two words.py", ""])
def test_only_a_python_file_can_be_trusted(name: str, tmp_path: Path) -> None:
    (tmp_path / "poem_model.txt").write_text("")
    (tmp_path / "two words.py").write_text("")
    with pytest.raises(WrongUse, match="There is no Python file"):
        trusted_modules([str(tmp_path / name)])


ALBERT_BASE = changed('name = "gpt"\nsize = "tiny"', 'name = "albert"\nsize = "base"').replace(
    b"context = 16\nwidth = 16\nlayers = 1\nheads = 2\n", b""
)

MISTAKES = {
    "a size that there is not": (changed('"tiny"', '"tony"'), "Did you mean tiny?"),
    "a setting of the model": (with_line("widht = 3", "model"), "Did you mean width?"),
    "a list that is too short": (with_line("betas = [0.9]", "optimizer"), "must be a list of leng"),
    "a setting of the optimizer": (with_line("lrr = 3", "optimizer"), "Did you mean lr?"),
    "a schedule that cannot end": (TEXT + b'[schedule]\nname = "cosine"', "cannot end at step 0"),
    "data": (TEXT + b"[data]\nshufle_examples = 3", "Did you mean shuffle_examples?"),
    "an end of the data": (TEXT + b"[data]\npasses = 1", "Leave `passes` out"),
    "options": (with_line("delayed = true\nlocal_steps = 2"), "do not go together"),
    "a codec": (TEXT + b'[averaging]\ncodec = "sparse-sign"', "goes with local_steps > 1"),
    "fragments alone": (with_line("fragments = 2"), "does not go without local_steps"),
    "too many fragments": (
        with_line("fragments = 64\nlocal_steps = 64"),
        "more than the model can be divided into: 5.",
    ),
    "one machine alone": (with_line("steps = 9").replace(b"= 64", b"= 2"), "every step alone"),
    "over before it begins": (
        with_line("steps = 9") + b'[schedule]\nname = "cosine"\nsteps = 99\nwarmup = 20',
        "before the schedule's warm-up",
    ),
    "ids without a vocabulary": (
        ALBERT_BASE,
        "needs ids of its own vocabulary",
    ),
    "a model called by a list": (
        changed('"gpt"', '["gpt"]'),
        "is called ['gpt'], and there is none",
    ),
    "an optimizer called by a table": (changed('"adamw"', "{}"), "is called {}, and there is none"),
    "a schedule called by a list": (
        TEXT + b"[schedule]\nname = []",
        "is called [], and there is no",
    ),
    "factors of local steps": (
        with_line("local_steps = 8") + FACTORS % b"powersgd_rank = 4",
        "powersgd_rank=4 and local_steps=8 do not go together. Leave powersgd_rank out",
    ),
    "factors over a grid": (
        TEXT + FACTORS % b"powersgd_rank = 4\napproximate = true",
        "powersgd_rank=4 and approximate=True do not go together. Leave approximate out",
    ),
    "factors that are longer": (
        TEXT + FACTORS % b"powersgd_rank = 64",
        "powersgd_rank=64 makes no tensor of this model shorter. Take a smaller rank",
    ),
    "a group size without cohorts": (
        TEXT + b"[averaging]\ngroup_size = 7\n",
        "group_size below [averaging] is 7, but only groups of 8 or more make cohorts",
    ),
    "a module's name": (MODULE.replace(b'"poem_model"', b'"../poem"'), "must be a name"),
    "a module's digest": (MODULE.replace(b"width = 8", b'sha256 = "x"'), "64 hexadecimal digits"),
}


@pytest.mark.parametrize(("text", "told"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_in_a_table_is_found_by_the_check(text: bytes, told: str) -> None:
    definition, mistakes = check(text)
    assert definition is None
    assert any(told in one for one in mistakes), mistakes


@pytest.mark.parametrize("setting", ["group_size = 8", "group_size = 2\napproximate = true"])
def test_a_group_size_with_which_all_peers_can_take_part_is_none(setting: str) -> None:
    assert check(TEXT + f"[averaging]\n{setting}\n".encode())[1] == []


def test_a_definition_that_was_signed_with_a_small_group_size_is_read() -> None:
    assert read_definition(TEXT + b"[averaging]\ngroup_size = 4\n").averaging.group_size == 4


def test_mistakes_of_sections_and_tables_are_found_together() -> None:
    _, mistakes = check(changed('"tiny"', '"tony"').replace(b"batch = 64", b"batch = -1"))
    assert len(mistakes) == 2


def test_every_mistake_in_every_table_is_told_at_once() -> None:
    text = (
        changed("width = 16", "width = 3.5")
        .replace(b"lr = 0.003", b'lr = "fast"\nbetas = 0.9\nmomentum = 0.9')
        .replace(b"samples_at_once = 4", b"samples_at_once = 4096")
        + b'[schedule]\nname = "cosine"\nwarmup = -1\nfloor = 3\n'
        + b'[[data.source]]\nkind = "txt"\nfeild = "text"\n'
    )
    _, mistakes = check(text)
    for place in (
        "samples_at_once",
        "width below [model] cannot be 3.5: it must be a whole number",
        "lr below [optimizer] cannot be 'fast': it must be a number",
        "betas below [optimizer]",
        "'momentum' below [optimizer]",
        "warmup below [schedule]",
        "floor below [schedule]",
        "kind below [data.source, number 1] cannot be 'txt': it is one of",
        "Did you mean field?",
    ):
        assert [place in one for one in mistakes].count(True) == 1, (place, mistakes)
    assert len(mistakes) == 9


def test_the_author_of_a_module_is_told_its_mistake(tmp_path: Path) -> None:
    file = tmp_path / "poem_model.py"
    file.write_text(POEM_MODEL)
    trusted = trusted_modules([str(file)])
    assert check(MODULE, trusted)[1] == []
    (mistake,) = check(MODULE)[1]
    assert "--trust-module PATH/poem_model.py" in mistake
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    pinned = MODULE.replace(b"width", f'sha256 = "{digest}"\nwidth'.encode())
    assert check(pinned, trusted)[1] == []
    file.write_text("raise ValueError('a slip')\n")
    (mistake,) = check(pinned, trusted)[1]
    assert hashlib.sha256(file.read_bytes()).hexdigest() in mistake
    (mistake,) = check(MODULE, trusted)[1]
    assert "ValueError: a slip" in mistake


def test_the_costs_of_a_run_follow_from_its_shapes() -> None:
    costs = costs_of(read_definition(TEXT))
    parameters = sum(one.numel() for _, one in task_of().named_parameters)
    assert costs.parameters == parameters
    assert costs.state_bytes == 12 * parameters, "AdamW has two statistics"
    assert costs.memory_bytes(3) - costs.memory_bytes(2) == costs.sample_bytes
    assert costs.most_samples(costs.memory_bytes(5)) == 5
    assert costs.most_samples(1000) == 0
    traffic = costs.traffic(volunteers=4, samples_per_second=8.0)
    assert traffic.step_seconds == 64 / 32
    there_and_back = 4 * parameters  # in float16
    assert costs.round_bytes == pytest.approx(there_and_back, rel=0.03)
    assert traffic.round_bytes == pytest.approx(0.75 * there_and_back, rel=0.03), "a quarter stays"
    hourly = 1800 * traffic.round_bytes
    assert hourly < traffic.up_bytes_per_hour < hourly + 10_000_000
    alone = costs.traffic(volunteers=1, samples_per_second=8.0)
    assert alone.round_bytes == 0


def test_the_organiser_may_ask_for_more_memory_than_was_worked_out() -> None:
    costs = costs_of(read_definition(TEXT + b"[limits]\nmemory_mb = 4000"))
    assert costs.memory_bytes(1) == 4_000_000_000


def test_a_document_as_large_as_memory_is_counted_as_that() -> None:
    plain = costs_of(read_definition(TEXT)).fixed_bytes
    large = costs_of(read_definition(TEXT + b"[data]\nlargest_document_bytes = 1_000_000_000"))
    assert large.fixed_bytes - plain > 900_000_000


def test_pictures_fill_the_shuffle_buffer_with_whole_documents() -> None:
    source = b'[[data.source]]\nkind = "parquet"\npaths = ["https://x.org/pictures.parquet"]\n'
    data = CLASSIFIER + b"[data]\npiece_bytes = 0\nshuffle_bytes = %d\n" + source
    small, large = (costs_of(read_definition(data % size)) for size in (10_000_000, 900_000_000))
    assert large.fixed_bytes - small.fixed_bytes == 890_000_000


def test_the_momentum_of_sgd_is_part_of_the_state() -> None:
    plain = changed('name = "adamw"', 'name = "sgd"')
    with_momentum = plain.replace(b'"sgd"', b'"sgd"\nmomentum = 0.9')
    state, larger = (costs_of(read_definition(one)).state_bytes for one in (plain, with_momentum))
    assert larger == 2 * state


def test_a_made_up_batch_has_only_ids_that_the_model_knows() -> None:
    task = task_of(changed('name = "gpt"\n', 'name = "gpt"\nvocabulary = 65\n'))
    batch = task.made_up_batch(16)
    assert 32 < int(batch.max()) < 65
    assert task.loss(batch).item() > 0


def test_a_run_of_a_terabyte_is_looked_at_without_its_memory() -> None:
    huge = changed("width = 16\nlayers = 1\nheads = 2", "width = 16384\nlayers = 24\nheads = 64")
    assert costs_of(read_definition(huge)).memory_bytes(1) > 1e12


def test_a_batch_is_spread_over_devices_without_an_empty_part() -> None:
    windows = torch.arange(10).view(5, 2)
    assert [len(part) for part in parts_of(windows, 4)] == [2, 2, 1]
    figures = task_of(CLASSIFIER).made_up_batch(3)
    parts = parts_of(figures, 8)
    assert len(parts) == 3
    assert torch.equal(torch.cat([part.images for part in parts]), figures.images)


def test_the_loss_of_the_parts_is_the_loss_of_the_batch() -> None:
    task = task_of()
    batch = task.made_up_batch(5)
    parts = parts_of(batch, 3)
    losses = [task.loss(part) for part in parts]
    together = weighted_mean(losses, [task.samples_in(part) for part in parts])
    assert together.item() == pytest.approx(task.loss(batch).item(), rel=1e-6)


def test_only_our_own_errors_say_what_cannot_be_built() -> None:
    for text in (changed('"gpt"', '"gtp"'), changed('"adamw"', '"adam"')):
        with pytest.raises((ModelsError, PotluckError)):
            task_of(text)


def test_a_run_reads_its_text_with_a_tokenizer_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--owner--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    library = Tokenizer(models.WordLevel({"<other>": 0, "=": 299}, unk_token="<other>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    file = model / "snapshots" / "abc" / "tokenizer.json"
    library.save(str(file))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    table = f'[data.tokenizer]\npath = "owner/model"\nsha256 = "{sha256}"\n'.encode()
    batches = batches_of(task_of(with_line("vocabulary = 300", "model") + table), 20)
    assert all(one.dtype == torch.int64 for one in batches)
    assert set(torch.cat(batches).flatten().tolist()) == {0, 299}
    with pytest.raises(DataSettingsError, match="300 ids, and the model 256"):
        batches_of(task_of(TEXT + table), 1)


def test_albert_with_its_own_vocabulary_reads_ids_of_its_tokenizer() -> None:
    """The published sizes could be used with a module alone."""
    table = b'[data.tokenizer]\npath = "albert/albert-base-v2"\n'
    definition, mistakes = check(ALBERT_BASE + table)
    assert mistakes == []
    assert definition is not None


def test_the_queue_of_swav_is_in_the_memory_that_a_volunteer_is_told() -> None:
    """It was in no figure: a run could ask for gigabytes beyond what `--max-memory` allowed."""
    small, large = (
        costs_of(read_definition(SWAV.replace(b'size = "tiny"', b'size = "tiny"\nqueue = %d' % n)))
        for n in (128, 1 << 20)
    )
    of_one = 4 * 2 * 16  # features, for both large crops
    in_a_pass = 2 * of_one + 4 * 4 * 32  # with the scores, and two copies of the codes
    more = pytest.approx(KEPT_APART * (of_one + in_a_pass) * ((1 << 20) - 128), rel=1e-6)
    assert large.fixed_bytes - small.fixed_bytes == more
    assert large.with_gpu.on_gpu - small.with_gpu.on_gpu == more
    assert large.sample_bytes == small.sample_bytes


def test_a_tokenizer_and_its_longer_pieces_are_in_the_memory_that_a_volunteer_is_told() -> None:
    text = with_line("vocabulary = 50257", "model") + b"[data]\nshuffle_bytes = 1_000_000_000\n"
    table = b'[data.tokenizer]\npath = "owner/model"\n'
    plain, with_ids = (costs_of(read_definition(one)) for one in (text, text + table))
    assert with_ids.fixed_bytes - plain.fixed_bytes > 40_000_000  # of the vocabulary alone
    longer = text.replace(b"[data]\n", b"[data]\npiece_bytes = 262_144\nshuffle_examples = 1\n")
    plain, with_ids = (costs_of(read_definition(one)) for one in (longer, longer + table))
    assert with_ids.fixed_bytes - plain.fixed_bytes > 40_000_000 + 216 * 262_144, "as measured"
