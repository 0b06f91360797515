"""The YAML of a grid file: plain safe YAML 1.1, less what would surprise in a grid.

A key given twice is an error (plain YAML keeps the last), a date is text, and a value that its own tag cannot
hold (``!!int "x"``, a number of thousands of digits) is an error with its line. Merge keys (``<<: *x``) work.
"""

from __future__ import annotations

from typing import Any

import yaml

from dlmgrid.workers.errors import InputError

MAX_NUMBER_BITS = 128
_MERGE = "tag:yaml.org,2002:merge"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_CONVERSION_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""What PyYAML's constructors let through for a scalar that does not fit its tag."""


def parse_yaml(text: str, origin: str) -> Any:
    """The value of a YAML text; ``origin`` names it in errors. Raises InputError, one line."""
    try:
        return yaml.load(text, Loader=_GridLoader)
    except yaml.YAMLError as error:
        raise InputError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise InputError(f"{origin}: not valid YAML: nested too deeply for a grid") from error


class _GridLoader(yaml.SafeLoader):
    """SafeLoader with the rules of this module."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - declared so by yaml
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Keys are compared as written, before merging, which may override a key on purpose."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _fault("a key must be plain text, not a list or a mapping", key)
            if key.tag != _MERGE and (key.tag, key.value) in seen:
                raise _fault(f"key {_short(key.value)} is given twice", key)
            seen.add((key.tag, key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            compound: Any = super().construct_object(node, deep)
            return compound
        try:
            value: Any = super().construct_object(node, deep)
        except _CONVERSION_ERRORS as error:
            kind = node.tag.rpartition(":")[2]
            raise _fault(f"{_short(node.value)} cannot be read as {kind}", node) from error
        if isinstance(value, int) and value.bit_length() > MAX_NUMBER_BITS:
            raise _fault(f"the number {_short(node.value)} is too large", node)
        return value


def _fault(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
