"""MovieLens-1M: the official `ratings.dat`, `users.dat`, `movies.dat` (`::` between columns), or three Parquet tables."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data.bad_lines import BadLines
from torchrec_kstep.data.blocks import RawBlock
from torchrec_kstep.data.sources.lines import require_numbers, split_lines
from torchrec_kstep.data.sources.movielens import BAG_NAMES, SPARSE_NAMES, Items, Ratings, Users, to_block
from torchrec_kstep.data.sources.parquet import read_table
from torchrec_kstep.errors import DataError

_TEXT_FILES = ("ratings.dat", "users.dat", "movies.dat")
_PARQUET_FILES = ("ratings.parquet", "users.parquet", "items.parquet")
_YEAR_AT_END = re.compile(r"\((\d{4})\)\s*$")


class MovieLens1MSource:
    """The ratings sorted by user and item, so that both formats give the same split; rows as in `movielens`."""

    dense_names: tuple[str, ...] = ()
    sparse_names = SPARSE_NAMES
    bag_names = BAG_NAMES

    def __init__(self, config: DataConfig) -> None:
        """Finds the files of one of the two formats under `config.source`."""
        what = f"a folder with {', '.join(_TEXT_FILES)} as GroupLens ships them, or with {', '.join(_PARQUET_FILES)}"
        if not config.source:
            raise DataError(f"data=movielens_1m needs data.source: {what}")
        self._folder = Path(config.source)
        self._config = config
        for names in (_TEXT_FILES, _PARQUET_FILES):
            self.files = [self._folder / name for name in names]
            missing = [path.name for path in self.files if not path.is_file()]
            if not missing:
                return
            if len(missing) < len(names):
                raise DataError(f"data.source={config.source} lacks {', '.join(missing)}: expected {what}")
        raise DataError(f"data.source={config.source} is not {what}")

    def blocks(self, bad_lines: BadLines) -> Iterator[RawBlock]:
        """Reads all rows as one block, see `Source.blocks`."""
        read = _read_text if self.files[0].suffix == ".dat" else _read_parquet
        ratings, users, items = read(self.files, bad_lines)
        order = np.lexsort((ratings.item, ratings.user))
        ratings = Ratings(ratings.user[order], ratings.item[order], ratings.rating[order])
        yield to_block(
            ratings, users, items, self._folder, self._config.split_seed, (self._config.validation_fraction, self._config.test_fraction)
        )


def _read_text(files: list[Path], bad_lines: BadLines) -> tuple[Ratings, Users, Items]:
    rating = split_lines(files[0], "::", 4, bad_lines, parse=require_numbers(0, 1, 2))
    user = split_lines(files[1], "::", 5, bad_lines, parse=require_numbers(0, 2))
    item = split_lines(files[2], "::", 3, bad_lines, parse=require_numbers(0), encoding="latin-1")
    return (
        Ratings(rating[0].astype(np.int64), rating[1].astype(np.int64), rating[2].astype(np.float64)),
        Users(user[0].astype(np.int64), gender=user[1], age=user[2].astype(np.int64), occupation=user[3], zip_code=user[4]),
        _items(item[0].astype(np.int64), item[1].tolist(), item[2].tolist()),
    )


def _read_parquet(files: list[Path], _: BadLines) -> tuple[Ratings, Users, Items]:
    whole, text = pa.int64(), pa.large_string()
    rating = read_table(files[0], {"user_id": whole, "item_id": whole, "rating": pa.float64()})
    user = read_table(files[1], {"user_id": whole, "gender": text, "age": whole, "occupation": text, "zip": text})
    item = read_table(files[2], {"item_id": whole, "title": text, "genres": text})
    ratings = Ratings(_numbers(rating, "user_id"), _numbers(rating, "item_id"), _numbers(rating, "rating"))
    users = Users(
        _numbers(user, "user_id"),
        gender=_texts(user, "gender"),
        age=_numbers(user, "age"),
        occupation=_texts(user, "occupation"),
        zip_code=_texts(user, "zip"),
    )
    return ratings, users, _items(_numbers(item, "item_id"), _texts(item, "title").tolist(), _texts(item, "genres").tolist())


def _items(item: npt.NDArray[np.int64], titles: list[str], genres: list[str]) -> Items:
    matches = [_YEAR_AT_END.search(title) for title in titles]
    years = np.array([match.group(1) if match else "" for match in matches], dtype=np.str_)
    return Items(item, years, [[name for name in text.split("|") if name] for text in genres])


def _numbers(table: Any, name: str) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = table.column(name).to_numpy()
    return values


def _texts(table: Any, name: str) -> npt.NDArray[np.str_]:
    return np.array(pc.fill_null(table.column(name), "").to_pylist(), dtype=np.str_)
