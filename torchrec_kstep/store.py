"""`python -m torchrec_kstep.store`: looks into row stores, checks, compacts and exports them, and estimates what one will take.

Only `compact` opens a store for writing, and not while a run has it open; everything else reads committed snapshots.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchrec_kstep.errors import ConfigError, KStepError, StorageError
from torchrec_kstep.ops.batch import MAX_ROWS, TableSpec
from torchrec_kstep.optim_spec import AdamSpec, OptimizerSpec, RowwiseAdagradSpec, SgdSpec
from torchrec_kstep.storage import maintenance
from torchrec_kstep.storage.estimate import StoreEstimate, estimate
from torchrec_kstep.storage.export import export
from torchrec_kstep.storage.segments import svg_map, text_map
from torchrec_kstep.storage.snapshot import Snapshot
from torchrec_kstep.storage.table_ids import table_ids
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import format_bytes, parse_bytes

EXIT_DAMAGE = 1
EXIT_USAGE = 2  # as argparse
_OPTIMIZERS: dict[str, Callable[[], OptimizerSpec | None]] = {
    "none": lambda: None,
    "sgd": lambda: SgdSpec(lr=1.0),
    "adam": lambda: AdamSpec(lr=1.0),
    "adam_row_bias": lambda: AdamSpec(lr=1.0, bias_correction="row"),
    "adam_replay": lambda: AdamSpec(lr=1.0, l2=1.0, l2_absent_rows="replay"),
    "rowwise_adagrad": lambda: RowwiseAdagradSpec(lr=1.0),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, 1 for damage found or a failed store, 2 for wrong arguments."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except ConfigError as error:
        print(f"torchrec_kstep.store: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KStepError as error:
        print(f"torchrec_kstep.store: {error}", file=sys.stderr)
        return EXIT_DAMAGE
    return status


def run_inspect(args: argparse.Namespace) -> int:
    """Prints snapshots, tables, space and the segment map of each store; 1 if a snapshot cannot be opened."""
    svgs = []
    status = 0
    for paths in maintenance.find_stores(args.paths):
        print(f"row store at {', '.join(paths)}" + (" (open for training now)" if maintenance.is_open_elsewhere(paths) else ""))
        names = Snapshot.names(paths)
        damaged = sorted(set(Snapshot.all_names(paths)) - set(names))
        for name in damaged:
            status = EXIT_DAMAGE
            print(f"  snapshot {name}: cannot be opened: {_damage_of(paths, name)}")
        if not names and not damaged:
            print("  no snapshots: only snapshots outlive a run")
        if not names:
            continue
        for name in names:
            print(f"  snapshot {_snapshot_line(Snapshot.open(paths, name))}")
        shown = Snapshot.open(paths, args.snapshot)
        print(_indented(_tables_text(shown)))
        print(_indented(text_map(shown.segments())))
        svgs.append(svg_map(shown.segments(), f"snapshot {shown.name} of {paths[0]}"))
    if args.svg is not None:
        if len(svgs) != 1:
            raise ConfigError(f"--svg draws one store with a snapshot, found {len(svgs)}: name the folder of one rank")
        try:
            args.svg.write_text(svgs[0], encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--svg {args.svg}: the picture cannot be written: {error.strerror}") from error
        print(f"picture: {args.svg}")
    return status


def run_verify(args: argparse.Namespace) -> int:
    """Checks every checksum of one or all snapshots; 1 if there is any damage."""
    num_failures = 0
    for paths in maintenance.find_stores(args.paths):
        names = [args.snapshot] if args.snapshot else Snapshot.all_names(paths)
        if not names:
            print(f"{paths[0]}: no snapshots")
        for name in names:
            try:
                report = Snapshot.open(paths, name).verify()
                failures = list(report.failures)
                read = f"{report.num_live_records:,} rows, {report.num_records:,} records, {format_bytes(report.file_bytes)}"
            except StorageError as error:
                failures, read = [str(error)], "cannot be opened"
            print(f"{paths[0]}: snapshot {name}: {read}: " + (f"{len(failures)} failures" if failures else "sound"))
            for failure in failures:
                print(f"  {failure}")
            num_failures += len(failures)
    return EXIT_DAMAGE if num_failures else 0


def run_compact(args: argparse.Namespace) -> int:
    """Writes a snapshot anew without stale records and, unless told to keep it, deletes the old one."""
    for paths in maintenance.find_stores(args.paths):
        source = Snapshot.open(paths, args.snapshot).name
        into = args.into or f"{source}-compact"
        report = maintenance.compact(paths, source, into)
        print(
            f"{paths[0]}: snapshot {into}: {report.num_rows:,} rows, "
            f"{format_bytes(report.bytes_before)} before, {format_bytes(report.bytes_after)} after"
        )
        if not args.keep:
            maintenance.remove_snapshot(paths, source)
            print(f"{paths[0]}: snapshot {source} deleted")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Writes one file per table."""
    stores = maintenance.find_stores(args.paths)
    for paths in stores:
        snapshot = Snapshot.open(paths, args.snapshot)
        folder = args.out if len(stores) == 1 else args.out / Path(paths[0]).relative_to(Path(args.paths[0]))
        for file in export(snapshot, folder, args.format, args.table or None, args.field or None, args.with_untouched):
            print(f"{file}: {format_bytes(file.stat().st_size)}")
    return 0


def run_estimate(args: argparse.Namespace) -> int:
    """Prints DRAM and SSD that a store of the given tables will take on one rank."""
    tables, touched = parse_tables(args.table)
    config = TierConfig(args.dram, ["unused"], segment_bytes=args.segment, space_factor=args.space_factor)
    print(_estimate_text(estimate(tables, _OPTIMIZERS[args.optimizer](), config.num_dram_bytes, config, touched)))
    return 0


def parse_tables(texts: Sequence[str]) -> tuple[list[TableSpec], list[int]]:
    """Reads `rows=1e9,dim=64[,touched=1e6][,count=26][,name=user]`; returns tables and how many rows of each are touched.

    Raises:
        ConfigError: a key is unknown or missing, or a number is none.
    """
    tables: list[TableSpec] = []
    touched: list[int] = []
    for text in texts:
        values = dict(part.partition("=")[::2] for part in text.split(","))
        unknown = set(values) - {"rows", "dim", "touched", "count", "name"}
        if unknown or not {"rows", "dim"} <= set(values):
            raise ConfigError(f"--table {text}: expected rows=N,dim=N and perhaps touched=N, count=N, name=TEXT")
        rows, dim, count = (_whole(text, values.get(key, "1")) for key in ("rows", "dim", "count"))
        num_touched = _whole(text, values["touched"]) if "touched" in values else rows
        if not (1 <= rows <= MAX_ROWS and 1 <= dim <= 2048 and 1 <= count <= 65536 and 0 <= num_touched <= rows):
            raise ConfigError(f"--table {text}: expected 1 to 2^48 rows, dim 1 to 2048, count 1 to 65536, touched at most rows")
        for index in range(count):
            name = values.get("name", f"table{len(tables)}") + (f"_{index}" if count > 1 and "name" in values else "")
            tables.append(TableSpec(name, rows, dim))
            touched.append(num_touched)
    try:
        ids = table_ids(table.name for table in tables)
    except ValueError as error:
        raise ConfigError(f"--table: {error}") from error
    return [table._replace(table_id=ids[table.name]) for table in tables], touched


def _whole(text: str, number: str) -> int:
    try:
        value = float(number)
    except ValueError as error:
        raise ConfigError(f"--table {text}: {number!r} is no number") from error
    if not value.is_integer():  # nor is nan, nor infinity
        raise ConfigError(f"--table {text}: {number!r} is no whole number")
    return int(value)


def _snapshot_line(snapshot: Snapshot) -> str:
    created = snapshot.created_unix_s
    when = "" if created is None else time.strftime(", %Y-%m-%d %H:%M:%S", time.localtime(created))
    num_bytes = sum(segment.file_bytes for segment in snapshot.segments())
    rows = sum(table.materialised_rows for table in snapshot.tables)
    return f"{snapshot.name}: {rows:,} rows, {format_bytes(num_bytes)}{when}" + (f", {snapshot.note}" if snapshot.note else "")


def _tables_text(snapshot: Snapshot) -> str:
    segments = snapshot.segments()
    num_bytes = sum(segment.file_bytes for segment in segments)
    record_bytes = {}  # with its share of headers and footers
    for payload_bytes in {segment.payload_bytes for segment in segments}:
        alike = [segment for segment in segments if segment.payload_bytes == payload_bytes]
        record_bytes[payload_bytes] = sum(segment.file_bytes for segment in alike) / max(sum(segment.num_records for segment in alike), 1)
    lines = [f"snapshot {snapshot.name}, table by table", f"  {'table':<24} {'rows':>15} {'with record':>15} {'live':>10}  record"]
    live_bytes = 0.0
    for table in snapshot.tables:
        payload_bytes = 4 * sum(field.width for field in table.fields)
        live = table.materialised_rows * record_bytes.get(payload_bytes, 0.0)
        live_bytes += live
        record = " ".join(f"{field.name}:{field.dtype}[{field.width}]" for field in table.fields)
        lines.append(
            f"  {table.spec.name:<24} {table.spec.num_rows:>15,} {table.materialised_rows:>15,} {format_bytes(live):>10}  {record}"
        )
    lines.append(f"live {format_bytes(live_bytes)} of {format_bytes(num_bytes)} in {len(segments)} segments")
    first: dict[str, float] = next(iter(snapshot.counters.values()), {})
    if "write_amplification_ratio" in first:
        lines.append(
            f"write amplification {first['write_amplification_ratio']:.2f}, cleaner's share {first['cleaner_share_ratio']:.0%} "
            "(of the run that made the snapshot, until then)"
        )
    return "\n".join(lines)


def _estimate_text(result: StoreEstimate) -> str:
    lines = [f"{'table':<24} {'rows':>15} {'touched':>15} {'record':>9} {'index':>10} {'cache':>10}"]
    for table in result.tables:
        lines.append(
            f"{table.name:<24} {table.num_rows:>15,} {table.touched_rows:>15,} {table.record_bytes:>7} B "
            f"{format_bytes(table.index_bytes):>10} {format_bytes(table.cache_bytes):>10}"
        )
    lines += [
        f"DRAM   {format_bytes(result.memory_bytes)}: {result.describe_memory()}",
        f"SSD    {format_bytes(result.disk_bytes)} when every touched row was written once, at most "
        f"{format_bytes(result.max_disk_bytes)} with stale rows; what older snapshots alone hold comes on top",
    ]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _damage_of(paths: list[str], name: str) -> str:
    try:
        Snapshot.open(paths, name)
    except StorageError as error:
        return str(error)
    return "its manifest is of another store"


def _name(text: str) -> str:
    if not text:  # an unset variable of a shell must not stand for the newest
        raise argparse.ArgumentTypeError("expected the name of a snapshot, got an empty text; leave the option out for its default")
    return text


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torchrec_kstep.store", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    def with_store(added: argparse.ArgumentParser, snapshot: str) -> argparse.ArgumentParser:
        added.add_argument("paths", nargs="+", metavar="PATH", help="the ssd_paths of a run, or the folders of one rank below them")
        added.add_argument("--snapshot", type=_name, metavar="NAME", help=snapshot)
        return added

    inspect = with_store(
        command("inspect", run_inspect, "show snapshots, rows, space and the segment map"), "show this one; default: the newest"
    )
    inspect.add_argument("--svg", type=Path, metavar="FILE", help="also write the segment map as a picture")
    with_store(command("verify", run_verify, "check every checksum; exit status 1 if anything is damaged"), "check only this one")
    compact = with_store(command("compact", run_compact, "write a snapshot anew without stale records"), "default: the newest")
    compact.add_argument("--into", type=_name, metavar="NAME", help="name of the new snapshot; default: the old name with -compact")
    compact.add_argument("--keep", action="store_true", help="do not delete the old snapshot")
    exported = with_store(command("export", run_export, "write tables to files"), "default: the newest")
    exported.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="one file per table is written there")
    exported.add_argument("--format", choices=("parquet", "safetensors"), default="parquet")
    exported.add_argument("--table", action="append", metavar="NAME", help="only this table; may be repeated")
    exported.add_argument("--field", action="append", metavar="NAME", help="only this field, e.g. weight; may be repeated")
    exported.add_argument("--with-untouched", action="store_true", help="also rows never touched, with their initial values")
    sizes = command("estimate", run_estimate, "say how much DRAM and SSD tables will take on one rank")
    sizes.add_argument("--table", action="append", required=True, metavar="rows=N,dim=N[,touched=N][,count=N][,name=TEXT]")
    sizes.add_argument("--optimizer", choices=sorted(_OPTIMIZERS), default="adam")
    sizes.add_argument("--dram", type=_size, default=0, metavar="SIZE", help="cache, e.g. 8GiB; default: none")
    sizes.add_argument("--segment", type=_size, default="64MiB", metavar="SIZE", help="segment_bytes; default 64MiB")
    sizes.add_argument("--space-factor", type=float, default=1.5, help="default 1.5")
    return parser


if __name__ == "__main__":
    sys.exit(main())
