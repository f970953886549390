"""The grid of a study: every run that it asks for, with the command line of each. Pure functions."""

import hashlib
import re
from dataclasses import dataclass

from torchrec_kstep.config.schema import StudyConfig
from torchrec_kstep.errors import ConfigError

_NAME_CHARS = 80


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        model: value of the key `model`.
        variant: name of a set of overrides.
        point: value of the study's axis.
        seed: value of `train.seed`.
        overrides: what `train` is called with, run directory excepted.
    """

    model: str
    variant: str
    point: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the run directory: readable, and different for different overrides, so that a changed study runs anew."""
        text = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", f"{self.model}_{self.variant}_{self.point}_seed{self.seed}")[:_NAME_CHARS]
        return f"{text}_{hashlib.sha256(chr(0).join(self.overrides).encode()).hexdigest()[:8]}"

    @property
    def curve(self) -> str:
        """What the cells of one curve share."""
        return f"{self.model}, {self.variant}"


def cells_of(config: StudyConfig) -> list[Cell]:
    """Returns all runs, cheapest questions first: every model and variant at a point before the next point, seeds outermost.

    Raises:
        ConfigError: nothing to run, an axis that is overridden twice, or a variant that only some points know.
    """
    findings = [f"{name} is empty" for name in ("models", "points", "seeds", "variants") if not getattr(config, name)]
    fixed = {"model", "train.seed", "run_dir", config.axis}
    given = {text.split("=", 1)[0].lstrip("+") for text in (*config.train, *config.extra, *" ".join(config.variants.values()).split())}
    findings += [f"{key} is set by the study itself: take it out of the overrides" for key in sorted(given & fixed)]
    findings += [f"variant {name!r} is named in points_of, but not in variants" for name in config.points_of if name not in config.variants]
    if findings:
        raise ConfigError("the study cannot be run:\n  " + "\n  ".join(findings))
    cells = []
    for seed in config.seeds:
        for point in config.points:
            for model in config.models:
                for variant, overrides in config.variants.items():
                    if point in config.points_of.get(variant, " ".join(config.points)).split():
                        own = (
                            f"model={model}",
                            *config.train,
                            *config.extra,
                            *overrides.split(),
                            f"{config.axis}={point}",
                            f"train.seed={seed}",
                        )
                        cells.append(Cell(model, variant, point, seed, own))
    return cells
