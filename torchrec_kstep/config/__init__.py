"""Configuration: dataclass schemas, and the only code that reads YAML, overrides and environment variables."""
