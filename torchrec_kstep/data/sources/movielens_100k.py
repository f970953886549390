"""MovieLens-100K in RecBole's atomic files: `ml-100k.inter`, `.user`, `.item`, tab-separated with a typed header."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data.bad_lines import BadLines
from torchrec_kstep.data.blocks import RawBlock
from torchrec_kstep.data.sources.lines import require_numbers, split_lines
from torchrec_kstep.data.sources.movielens import BAG_NAMES, SPARSE_NAMES, Items, Ratings, Users, to_block
from torchrec_kstep.errors import DataError

_HEADERS = {
    "inter": ["user_id:token", "item_id:token", "rating:float", "timestamp:float"],
    "user": ["user_id:token", "age:token", "gender:token", "occupation:token", "zip_code:token"],
    "item": ["item_id:token", "movie_title:token_seq", "release_year:token", "class:token_seq"],
}
_NUMBERS = ((0, 1, 2), (0, 1), (0,))  # columns of each file that hold whole numbers


class MovieLens100KSource:
    """The ratings in the order of the file; rows as in `movielens`."""

    dense_names: tuple[str, ...] = ()
    sparse_names = SPARSE_NAMES
    bag_names = BAG_NAMES

    def __init__(self, config: DataConfig) -> None:
        """Finds the three files under `config.source`, or inside the installed `recbole` package where that is empty."""
        self._folder = Path(config.source) if config.source else _folder_of_recbole()
        self._config = config
        self.files = [self._folder / f"ml-100k.{kind}" for kind in _HEADERS]
        missing = [path.name for path in self.files if not path.is_file()]
        if missing:
            raise DataError(
                f"{self._folder} lacks {', '.join(missing)}: expected MovieLens-100K in the form of RecBole's dataset_example/ml-100k"
            )

    def blocks(self, bad_lines: BadLines) -> Iterator[RawBlock]:
        """Reads all rows as one block, see `Source.blocks`."""
        inter, user, item = (
            split_lines(path, "\t", len(header), bad_lines, header=header, parse=require_numbers(*numbers))
            for path, header, numbers in zip(self.files, _HEADERS.values(), _NUMBERS, strict=True)
        )
        ratings = Ratings(inter[0].astype(np.int64), inter[1].astype(np.int64), inter[2].astype(np.float64))
        users = Users(user[0].astype(np.int64), gender=user[2], age=user[1].astype(np.int64), occupation=user[3], zip_code=user[4])
        items = Items(item[0].astype(np.int64), year=item[2], genres=[genres.split() for genres in item[3].tolist()])
        yield to_block(
            ratings, users, items, self._folder, self._config.split_seed, (self._config.validation_fraction, self._config.test_fraction)
        )


def _folder_of_recbole() -> Path:
    spec = importlib.util.find_spec("recbole")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "data=movielens_100k reads the copy inside the `recbole` package, which is not installed: "
            "run `pip install --no-deps recbole==1.2.1`, or point data.source to a folder with ml-100k.inter, .user and .item"
        )
    return Path(spec.submodule_search_locations[0]) / "dataset_example" / "ml-100k"
