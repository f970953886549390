"""What the MovieLens sets share: the task, the features, the split. Their file formats live in a module each.

The task is to tell the ratings of 4 and 5 stars from the others. The rows are split 80/10/10 (by default) along
`numpy.random.RandomState(split_seed).permutation`, over ratings in a fixed order, and stay in the permuted order: so the
first rows of the training split, which `data.limit` keeps, are a random sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_kstep.data.blocks import Coded, RawBlock
from torchrec_kstep.errors import DataError

SPARSE_NAMES = ("user", "item", "gender", "age", "occupation", "zip", "genres", "year")
BAG_NAMES = frozenset({"genres"})
MIN_POSITIVE_RATING = 4
ZIP_PREFIX_CHARACTERS = 2  # tells regions apart; whole codes are all but as many as users

Texts = npt.NDArray[np.str_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ratings:
    """`[num_ratings]` each, in the order that the split is drawn over."""

    user: Ints
    item: Ints
    rating: npt.NDArray[np.floating]


@dataclass(frozen=True)
class Users:
    """`[num_users]` each."""

    user: Ints
    gender: Texts
    age: Ints
    occupation: Texts
    zip_code: Texts


@dataclass(frozen=True)
class Items:
    """`[num_items]` each; an empty year is missing, genres are one list per item."""

    item: Ints
    year: Texts
    genres: Sequence[Sequence[str]]


def to_block(ratings: Ratings, users: Users, items: Items, where: Path, split_seed: int, held_out: tuple[float, float]) -> RawBlock:
    """Joins the three tables into rows.

    Args:
        ratings: all ratings.
        users: every user that rated.
        items: every item that was rated.
        where: folder of the files, for messages.
        split_seed: seed of the permutation.
        held_out: shares of validation and test.

    Raises:
        DataError: a rating is of an unknown user or item, or there are none.
    """
    num_rows = len(ratings.rating)
    if not num_rows:
        raise DataError(f"{where} holds no ratings")
    permutation = np.random.RandomState(split_seed).permutation(num_rows)
    user_row = _find(users.user, ratings.user[permutation], "user", where)
    item_row = _find(items.item, ratings.item[permutation], "item", where)
    columns = {
        "user": Coded.of(ratings.user[permutation]),
        "item": Coded.of(ratings.item[permutation]),
        "gender": _text(users.gender[user_row]),
        "age": Coded.of(users.age[user_row]),
        "occupation": _text(users.occupation[user_row]),
        "zip": _text(np.array([code[:ZIP_PREFIX_CHARACTERS] for code in users.zip_code.tolist()], dtype=np.str_)[user_row]),
        "genres": _bags(items.genres, item_row),
        "year": _text(items.year[item_row]),
    }
    return RawBlock(
        label=(ratings.rating[permutation] >= MIN_POSITIVE_RATING).astype(np.uint8),
        split=split_by_order(num_rows, *held_out),
        dense=[],
        sparse=[columns[name] for name in SPARSE_NAMES],
    )


def split_by_order(num_rows: int, validation_fraction: float, test_fraction: float) -> npt.NDArray[np.uint8]:
    """Gives the first rows to training, the next to validation, the last to the test; fractions are rounded down in this order."""
    num_train = int(round((1 - validation_fraction - test_fraction) * num_rows, 6))
    num_validation = int(round((1 - test_fraction) * num_rows, 6)) - num_train
    return np.repeat(np.arange(3, dtype=np.uint8), [num_train, num_validation, num_rows - num_train - num_validation])


def _find(known: Ints, wanted: Ints, what: str, where: Path) -> Ints:
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)
    found = known[order[place]] == wanted
    if not found.all():
        raise DataError(
            f"{what} {wanted[~found][0]} has ratings but no entry among the {what}s of {where}; {np.sum(~found)} ratings are concerned"
        )
    rows: Ints = order[place].astype(np.int64)
    return rows


def _text(raw: Texts) -> Coded:
    return Coded.of(raw, is_missing=raw == "")


def _bags(bags: Sequence[Sequence[str]], rows: Ints) -> Coded:
    """Codes the bags of items, and repeats them for the rows; an empty bag holds the missing value."""
    lengths = np.array([max(1, len(bag)) for bag in bags], dtype=np.int64)
    coded = _text(np.array([name for bag in bags for name in (bag or [""])], dtype=np.str_))
    begins = np.cumsum(lengths) - lengths
    row_lengths = lengths[rows]
    offsets = np.concatenate([[0], np.cumsum(row_lengths)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], row_lengths)
    return Coded(coded.codes[np.repeat(begins[rows], row_lengths) + within], coded.values, offsets)
