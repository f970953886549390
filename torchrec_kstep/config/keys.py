"""The flat list of keys of a dataclass schema: dotted path, type, default, and the comment that explains it."""

import ast
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """One configuration key.

    Attributes:
        path: dotted name, e.g. `optim.lr`.
        type: annotation of its field, e.g. `int` or `list[int]`.
        default: value when nothing sets it; `dataclasses.MISSING` if the schema gives none.
        comment: text of the comment beside the field: meaning and unit.
    """

    path: str
    type: object
    default: object
    comment: str

    @property
    def type_text(self) -> str:
        """The type as a person writes it."""
        return self.type.__name__ if isinstance(self.type, type) and not typing.get_args(self.type) else str(self.type)


@dataclass(frozen=True)
class SchemaKeys:
    """All keys of a schema.

    Attributes:
        leaves: path -> key, in the order of the schema.
        groups: path -> dataclass of every inner name, e.g. `data` and `data.synthetic`.
    """

    leaves: Mapping[str, Key]
    groups: Mapping[str, type]

    @property
    def names(self) -> list[str]:
        """Paths of all keys and groups."""
        return [*self.leaves, *self.groups]

    def is_open(self, path: str) -> bool:
        """Whether `path` lies inside a key whose names are free: a mapping, or one without a declared type."""
        parts = path.split(".")
        parents = (".".join(parts[:end]) for end in range(1, len(parts)))
        return any(parent in self.leaves and _is_open_type(self.leaves[parent].type) for parent in parents)

    def knows(self, path: str) -> bool:
        """Whether `path` may be set."""
        return path in self.leaves or path in self.groups or self.is_open(path)


def _is_open_type(annotation: object) -> bool:
    choices = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Union else (annotation,)
    return any(choice is typing.Any or choice is dict or typing.get_origin(choice) is dict for choice in choices)


def field_comments(schema_cls: type) -> dict[str, str]:
    """Reads the comment at the end of each field's line from the source of a dataclass, without `# `.

    Returns an empty mapping where the package was installed without its sources.
    """
    try:
        source = textwrap.dedent(inspect.getsource(schema_cls))
    except OSError:  # only explanations are lost, in --help and in saved files
        return {}
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    fields = [
        (node.target.id, node.end_lineno or 0) for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return {name: comments[line] for name, line in fields if line in comments}


def _default(field: "dataclasses.Field[object]") -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@functools.cache
def schema_keys(schema_cls: type) -> SchemaKeys:
    """Returns every key below a dataclass, nested dataclasses included."""
    leaves: dict[str, Key] = {}
    groups: dict[str, type] = {}

    def visit(cls: type, prefix: str) -> None:
        hints, comments = typing.get_type_hints(cls), field_comments(cls)
        for field in dataclasses.fields(cls):
            path, annotation = prefix + field.name, hints[field.name]
            if dataclasses.is_dataclass(annotation):
                groups[path] = typing.cast(type, annotation)
                visit(groups[path], path + ".")
            else:
                leaves[path] = Key(path, annotation, _default(field), comments.get(field.name, ""))

    visit(schema_cls, "")
    return SchemaKeys(leaves, groups)
