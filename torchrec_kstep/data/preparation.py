"""Turns raw logs into a prepared set, once: decides whether there is anything to do, and publishes the result as a whole."""

from pathlib import Path
from typing import Any

from torchrec_kstep.config.schema import DataConfig
from torchrec_kstep.data.fingerprint import describe_sources, fingerprint
from torchrec_kstep.data.manifest import MANIFEST_NAME, NUM_RESERVED_IDS, Manifest, check_files, read_manifest, write_manifest
from torchrec_kstep.data.passes import Progress, run_passes
from torchrec_kstep.data.sources import open_source
from torchrec_kstep.data.sources.base import name_files
from torchrec_kstep.data.staging import staged_folder
from torchrec_kstep.errors import ConfigError, DataError


def prepared_folder(config: DataConfig) -> Path:
    """Where the prepared set of this configuration lives."""
    return Path(config.path or f"prepared/{config.name}")


def prepare(config: DataConfig, *, overwrite: bool = False, progress: Progress | None = None) -> Manifest:
    """Makes the prepared set, or finds that it is there already. One process may do so at a time.

    Args:
        config: the source, the target and the options.
        overwrite: replace a set that was made from other sources or with other options.
        progress: is called after every block.

    Returns:
        The manifest of the set.

    Raises:
        DataError: raw files are missing or malformed, or another set stands at the target and `overwrite` is false.
        ConfigError: the options contradict each other.
    """
    _check_options(config)
    source = open_source(config)
    sources, options = describe_sources(source.files), _options(config)
    mark = fingerprint(sources, options)
    folder = prepared_folder(config)
    if (existing := _find_existing(folder, mark, sources, options, overwrite=overwrite)) is not None:
        if existing.num_bad_lines > config.max_bad_lines:
            raise DataError(
                f"{folder} was prepared with {existing.num_bad_lines} malformed lines left out, "
                f"but data.max_bad_lines={config.max_bad_lines}: allow them, or repair the raw files and prepare again"
            )
        return existing
    with staged_folder(folder, overwrite=overwrite) as staging:
        content = run_passes(config, source, staging, progress or _be_silent)
        manifest = Manifest(name=config.name, fingerprint=mark, options=options, sources=sources, **content)
        if describe_sources(source.files) != sources:
            raise DataError(f"{name_files(source.files)} changed while being read: prepare again when they are at rest")
        write_manifest(staging, manifest)
    return manifest


def check_sources(config: DataConfig) -> None:
    """Compares an existing set with the raw files and the options of the configuration.

    Raises:
        DataError: they differ; says in what.
    """
    sources, options = describe_sources(open_source(config).files), _options(config)
    _find_existing(prepared_folder(config), fingerprint(sources, options), sources, options, overwrite=False)


def _be_silent(_what: str, _num_rows: int) -> None:
    return


def _check_options(config: DataConfig) -> None:
    findings = []
    if config.encoding not in ("vocabulary", "hash"):
        findings.append(f"data.encoding={config.encoding}: expected vocabulary or hash")
    if config.encoding == "hash" and config.min_count != 1:
        findings.append(f"data.min_count={config.min_count}: data.encoding=hash counts no values; leave it at 1")
    if config.encoding == "hash" and config.num_hash_rows <= NUM_RESERVED_IDS:
        findings.append(f"data.num_hash_rows={config.num_hash_rows}: expected more than the {NUM_RESERVED_IDS} reserved ids")
    if config.min_count < 1 or config.rows_per_row_group < 1 or config.max_bad_lines < 0:
        findings.append("data.min_count and data.rows_per_row_group must be at least 1, data.max_bad_lines at least 0")
    fractions = (config.validation_fraction, config.test_fraction)
    if min(fractions) < 0 or sum(fractions) >= 1:
        findings.append(f"data.validation_fraction={fractions[0]}, data.test_fraction={fractions[1]}: expected shares with a sum below 1")
    if findings:
        raise ConfigError("; ".join(findings))


def _options(config: DataConfig) -> dict[str, Any]:
    """The options that change the result, as they go into the fingerprint."""
    options: dict[str, Any] = {
        "name": config.name,
        "encoding": config.encoding,
        "rows_per_row_group": config.rows_per_row_group,
        "split_seed": config.split_seed,
        "validation_fraction": config.validation_fraction,
        "test_fraction": config.test_fraction,
    }
    return options | ({"num_hash_rows": config.num_hash_rows} if config.encoding == "hash" else {"min_count": config.min_count})


def _find_existing(folder: Path, mark: str, sources: list[dict[str, Any]], options: dict[str, Any], *, overwrite: bool) -> Manifest | None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / MANIFEST_NAME).is_file():
        raise DataError(f"{folder} exists and is no prepared set: move it away or choose another data.path; nothing there is ever deleted")
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
    except DataError:
        if overwrite:
            return None
        raise
    if manifest.fingerprint == mark:
        return manifest
    if overwrite:
        return None
    raise DataError(
        f"{folder} was prepared from other sources or with other options: {_differences(manifest, sources, options)}; "
        "choose another data.path, or replace it with `python -m torchrec_kstep.prepare ... overwrite=true`"
    )


def _differences(manifest: Manifest, sources: list[dict[str, Any]], options: dict[str, Any]) -> str:
    found = [
        f"{name} was {manifest.options.get(name)}, now {options.get(name)}"
        for name in sorted(options.keys() | manifest.options.keys())
        if manifest.options.get(name) != options.get(name)
    ]
    before, now = ({entry["file"]: entry for entry in entries} for entries in (manifest.sources, sources))
    found += [f"file {name} was changed" for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    found += [f"file {name} is gone" for name in sorted(before.keys() - now.keys())]
    found += [f"file {name} is new" for name in sorted(now.keys() - before.keys())]
    return ", ".join(found) or "their order differs"
