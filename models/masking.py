"""ALBERT's task: text with masked ids to be guessed, and two halves in order or swapped.

From each window of text two consecutive segments are cut, A and B, at a random place. The model's
input is `[CLS] A [SEP] B [SEP]`, or B before A for half of the samples, and it says which (sentence
order prediction). Of the text's ids 15 % are chosen in runs of one to three, a run of n with a
chance in proportion to 1/n (equation 4 of the ALBERT paper); of those 80 % become [MASK], 10 % a
random id, and 10 % stay, as in BERT.

Every sample has the same number of chosen ids. So the mean over a batch's chosen ids is the mean
over its samples, and peers can add up their gradients.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from models.errors import NotThisModel, WrongSettings

CHOSEN_FRACTION = 0.15
MASKED_FRACTION = 0.8
RANDOM_FRACTION = 0.1  # the rest of the chosen stay as they are
LONGEST_RUN = 3
EARLIEST_CUT, LATEST_CUT = 0.25, 0.75  # of the window: neither segment is too short to judge

SPECIALS_AROUND = 3  # [CLS], and a [SEP] after each segment
NEVER = 1 << 62  # a priority behind all that are drawn
Size = Annotated[int, Meta(ge=0, le=1_000_000)]
CHANCES = 1 << 24  # how finely chances are drawn: as whole numbers, the same on every machine


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ids. A random id is drawn from `first` to `last`."""

    size: Size
    first: Size
    last: Size
    pad: Size
    cls: Size
    sep: Size
    mask: Size

    def __post_init__(self) -> None:
        largest = max(self.last, self.pad, self.cls, self.sep, self.mask)
        if largest >= self.size or self.first > self.last:
            raise WrongSettings(
                f"A vocabulary of {self.size} ids has none of number {largest}."
                if largest >= self.size
                else f"There are no ids from {self.first} to {self.last}."
            )


BYTE_VOCABULARY = Vocabulary(size=260, first=0, last=255, pad=256, cls=257, sep=258, mask=259)
"""The 256 bytes, and four ids after them."""

ALBERT_VOCABULARY = Vocabulary(size=30_000, first=5, last=29_999, pad=0, cls=2, sep=3, mask=4)
"""The published SentencePiece vocabulary, of which 1 is the unknown piece."""


class MaskedBatch(NamedTuple):
    """length = window + 3; chosen = how many ids of each sample are to be guessed."""

    ids: Tensor  # (samples, length) int64: what the model is given
    segments: Tensor  # (samples, length) int64: 0 up to the first [SEP], then 1
    positions: Tensor  # (samples, chosen) int64: where ids are to be guessed
    targets: Tensor  # (samples, chosen) int64: the original ids
    swapped: Tensor  # (samples,) int64: 1 where B stands before A


def chosen_in(window: int) -> int:
    """How many ids of a window are to be guessed."""
    return max(1, round(CHOSEN_FRACTION * window))


def masked_batch(
    windows: Tensor, vocabulary: Vocabulary, generator: torch.Generator
) -> MaskedBatch:
    """Examples from consecutive ids.

    windows: (samples, window), on the CPU, as the generator is; ids must be ordinary ones.
    The same generator in the same state gives the same batch on every machine.
    """
    if windows.dim() != 2 or windows.shape[1] < 2:
        raise NotThisModel(
            f"Windows of shape {tuple(windows.shape)} cannot be cut into two segments each."
        )
    text = windows.long()
    if text.numel() and not 0 <= int(text.min()) <= int(text.max()) < vocabulary.size:
        raise NotThisModel(
            f"The text has ids from {int(text.min())} to {int(text.max())}, and the vocabulary has "
            f"{vocabulary.size}.",
            advice="Use the vocabulary that the text was made with.",
        )
    original, is_text, segments, swapped = _two_segments(text, vocabulary, generator)
    chosen = chosen_in(text.shape[1])
    positions = _in_runs(is_text, chosen, generator)
    targets = original.gather(1, positions)
    given = _disguised(targets, vocabulary, generator)
    return MaskedBatch(
        ids=original.scatter(1, positions, given),
        segments=segments,
        positions=positions,
        targets=targets,
        swapped=swapped,
    )


def _two_segments(
    text: Tensor, vocabulary: Vocabulary, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[CLS] A [SEP] B [SEP], or B first.

    text: (samples, window); returns ids, whether they are text, and their segments, all of
    (samples, window + 3), and swapped, (samples,).
    """
    samples, window = text.shape
    earliest = max(1, int(EARLIEST_CUT * window))
    latest = max(earliest, int(LATEST_CUT * window))
    cut = torch.randint(earliest, latest + 1, (samples, 1), generator=generator)
    swapped = torch.randint(2, (samples, 1), generator=generator)

    # Swapping two parts of a window is rotating it: read from the cut on, around the end.
    first = torch.where(swapped == 1, window - cut, cut)  # how many ids stand before the [SEP]
    place = torch.arange(window + SPECIALS_AROUND).expand(samples, -1)
    in_second = place > first + 1
    is_cls = place == 0
    is_sep = (place == first + 1) | (place == window + 2)
    in_order = (place - 1 - in_second.long()).clamp(0, window - 1)
    ids = text.gather(1, (in_order + cut * swapped) % window)
    ids = ids.masked_fill(is_cls, vocabulary.cls).masked_fill(is_sep, vocabulary.sep)
    return ids, ~(is_cls | is_sep), in_second.long(), swapped.flatten()


def _in_runs(is_text: Tensor, chosen: int, generator: torch.Generator) -> Tensor:
    """Exactly so many positions of text in each sample, in runs of one to three.

    Every position draws a priority and a length for a run that begins there. A position has the
    best priority of the runs that cover it, and the best positions are chosen; only the last run
    may be cut short. is_text: (samples, length); returns (samples, chosen), ascending.
    """
    priority = torch.randint(NEVER, is_text.shape, generator=generator)
    length = _run_lengths(is_text.shape, generator)
    best = priority.clone()
    for back in range(1, LONGEST_RUN):
        reaches = torch.where(length[:, :-back] > back, priority[:, :-back], NEVER)
        best[:, back:] = torch.minimum(best[:, back:], reaches)
    best = best.masked_fill(~is_text, NEVER)
    return best.argsort(dim=1, stable=True)[:, :chosen].sort(dim=1).values


def _run_lengths(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """1 with a chance of 6/11, 2 with 3/11, 3 with 2/11: in proportion to 1/n."""
    parts = torch.randint(11, shape, generator=generator)
    return 1 + (parts >= 6).long() + (parts >= 9).long()


def _disguised(targets: Tensor, vocabulary: Vocabulary, generator: torch.Generator) -> Tensor:
    """The model's input in place of the chosen ids."""
    chance = torch.randint(CHANCES, targets.shape, generator=generator)
    anything = torch.randint(
        vocabulary.first, vocabulary.last + 1, targets.shape, generator=generator
    )
    masked = chance < int(MASKED_FRACTION * CHANCES)
    random = chance < int((MASKED_FRACTION + RANDOM_FRACTION) * CHANCES)
    return torch.where(masked, vocabulary.mask, torch.where(random, anything, targets))
