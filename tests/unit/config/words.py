"""Which words in a comment name the unit of a number."""

import re

UNIT = re.compile(
    r"\b(rows?|columns?|ids?|batch|batches|steps?|epochs?|passes|lines|times|evaluations|checkpoints|units|widths|layers|row groups"
    r"|seconds|share|probability|rate|decay|rank|seed|deviation|root|factor|L2|norm|number)\b|p\(i\)"
)
