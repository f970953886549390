"""Studies: the same training under many settings, run one after the other, resumable, shown as a table and a plot."""
