"""Makes tiny raw files of every source, so that preparation is tested without any download."""

import gzip
from collections.abc import Sequence
from pathlib import Path

from torchrec_kstep.config.schema import DataConfig

AVAZU_HEADER = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,"
    "device_id,device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)


def criteo_fields(row: int) -> list[str]:
    """The 40 columns of a well-formed line; some are empty."""
    integers = ["" if (row + column) % 5 == 0 else str(row * column - 3) for column in range(13)]
    categories = ["" if (row * column) % 11 == 10 else f"{(row % (column + 2)) * 2654435761 % 2**32:08x}" for column in range(26)]
    return [str((row % 3 == 0 and 1) or 0), *integers, *categories]


def criteo_lines(num_rows: int, first_row: int = 0) -> list[str]:
    """Well-formed lines without their ends."""
    return ["\t".join(criteo_fields(row)) for row in range(first_row, first_row + num_rows)]


def avazu_lines(num_rows: int) -> list[str]:
    """Well-formed lines without header and ends."""
    return [
        ",".join(
            [f"1000{row}", str(row % 2), f"1410{21 + row % 7:02d}{row % 24:02d}", "1005", str(row % 3)]
            + [f"{(row % (column + 2)) * 40503 % 2**32:08x}" for column in range(9)]
            + ["1", "0", "15706", "320", "50", "1722", "0", "35", "-1", str(79 + row % 2)]
        )
        for row in range(num_rows)
    ]


def write_lines(path: Path, lines: Sequence[str], end: str = "\n") -> Path:
    """Writes lines, the last one with an end too; packed where the name says so."""
    text = "".join(line + end for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def criteo_config(source: Path, target: Path, **options: object) -> DataConfig:
    """A configuration with small row groups."""
    defaults: dict[str, object] = {"name": "criteo", "source": str(source), "path": str(target), "rows_per_row_group": 32}
    return DataConfig(**(defaults | options))  # type: ignore[arg-type]


def write_movielens_100k(folder: Path, num_ratings: int = 60) -> Path:
    """Writes RecBole's three files: 6 users, 5 items, one of them without genres and year."""
    ratings = [f"{1 + row % 6}\t{1 + row // 6 % 5}\t{1 + row % 5}\t88125{row:04d}" for row in range(num_ratings)]
    users = [f"{user}\t{20 + user}\t{'MF'[user % 2]}\twriter\t{'T8H1N' if user == 3 else f'0{user}711'}" for user in range(1, 7)]
    items = ["1\tToy Story\t1995\tAnimation Children's Comedy", "2\tUnknown\t\t", *(f"{item}\tFilm\t1990\tDrama" for item in (3, 4, 5))]
    write_lines(folder / "ml-100k.inter", ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *ratings])
    write_lines(folder / "ml-100k.user", ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token", *users])
    write_lines(folder / "ml-100k.item", ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq", *items])
    return folder


def write_movielens_1m(folder: Path, num_ratings: int = 60) -> Path:
    """Writes the official `::` files, ratings in no order, titles in Latin-1."""
    ratings = [f"{1 + row % 6}::{1 + row // 6 % 5}::{1 + row % 5}::97830{row:04d}" for row in range(num_ratings)]
    write_lines(folder / "ratings.dat", ratings[::-1])
    write_lines(folder / "users.dat", [f"{user}::{'MF'[user % 2]}::{25 + user}::{user}::0{user}711" for user in range(1, 7)])
    movies = [
        "1::Toy Story (1995)::Animation|Children's|Comedy",
        "2::Café (19th) (2000)::Drama",
        *(f"{i}::No year::Drama|War" for i in (3, 4, 5)),
    ]
    (folder / "movies.dat").write_bytes("".join(line + "\n" for line in movies).encode("latin-1"))
    return folder


def write_frappe(folder: Path) -> Path:
    """Writes the three libFM files; the ids of column c are c*100, c*100+1, ..."""
    for split, num_rows in (("train", 40), ("validation", 12), ("test", 8)):
        lines = [
            " ".join([str(1 if row % 3 == 0 else -1), *(f"{column * 100 + row % (column + 2)}:1" for column in range(10))])
            for row in range(num_rows)
        ]
        write_lines(folder / f"frappe.{split}.libfm", lines)
    return folder
