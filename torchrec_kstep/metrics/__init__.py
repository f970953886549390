"""Numbers about a run: quality of predictions, speed, and where they are written."""
