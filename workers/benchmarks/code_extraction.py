"""From a model's answer to a program that defines the function asked for.

The answer continues a prompt that may have opened a code fence, and models then do one of four things: go on
with the code; close the fence and open another after some prose; write only the indented body that continues
the given signature; or talk. EvalPlus' ``sanitize`` does the trimming; this module chooses what to hand to
it, and puts back what the answer relies on: what the prompt had given to the model (imports and helper
functions), and what ``sanitize`` (0.3.1) drops although the function uses it, which is every top-level definition
but classes, plain assignments, and undecorated functions that have a return statement.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

END_OF_TEXT = ("<|endoftext|>", "<|endofmask|>", "</s>")
_FENCE = re.compile(r"```[^\n`]*\n?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Extraction:
    """A program and how it was found: ``function``, ``body``, ``longest`` or ``unparsable``."""

    program: str
    found: str


def extract_program(text: str, prompt: str, entry_point: str) -> Extraction:
    """The program that ``text`` amounts to as an answer to ``prompt``, which asks for ``entry_point``.

    Never raises: what no parser accepts comes back as it is, found ``unparsable``, and fails when it is run.
    """
    for stop in END_OF_TEXT:
        text = text.split(stop, 1)[0]
    text = text.replace("\t", "    ").replace("\r\n", "\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # an answer's invalid escapes, say, which may be errors to the caller
            return _extract(text, prompt, entry_point)
    except (
        RecursionError,
        MemoryError,
        ValueError,
        SyntaxError,
    ):  # null bytes, lone surrogates, deep nesting
        return Extraction(program=text, found="unparsable")


def _extract(text: str, prompt: str, entry_point: str) -> Extraction:
    definition = re.compile(
        rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}[ \t]*\(", re.MULTILINE
    )
    stretches = _FENCE.split(text)
    for stretch in stretches:
        if definition.search(stretch):
            program = _trimmed(textwrap.dedent(stretch), entry_point)
            if _defines(program, entry_point):
                return Extraction(program=with_context(program, prompt, entry_point), found="function")
    for continuation in _bodies(stretches[0]):
        program = _trimmed(f"{prompt.rstrip()}\n{continuation}", entry_point)
        if _defines(program, entry_point):
            return Extraction(program=with_context(program, prompt, entry_point), found="body")
    program = _trimmed(text, entry_point)
    return Extraction(program=with_context(program, prompt, entry_point), found="longest")


def _trimmed(source: str, entry_point: str) -> str:
    """What ``sanitize`` keeps of ``source``; or, where that lacks something that the function uses and ``source``
    defines, the imports and the first definition of each name that it uses, in their order."""
    from evalplus.sanitize import code_extract, sanitize

    program: str = sanitize(source, entry_point)
    missing = [name for name in _missing(program, entry_point) if _may_define(source, name)]
    if not missing:
        return program
    given = ast.parse(code_extract(source)).body
    definitions: dict[str, ast.stmt] = {}
    for node in given:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            for name in _names(node):
                definitions.setdefault(name, node)
    if not any(
        name in definitions and (name != entry_point or _answers(definitions[name])) for name in missing
    ):
        return program
    wanted, reached = [entry_point], set[str]()
    while wanted:
        name = wanted.pop()
        if name in definitions and name not in reached:
            reached.add(name)
            wanted += _used(definitions[name])
    kept = {id(definitions[name]) for name in reached}
    return "\n".join(
        ast.unparse(node)
        for node in given
        if isinstance(node, ast.Import | ast.ImportFrom) or id(node) in kept
    )


def _may_define(source: str, name: str) -> bool:
    """Whether a line of ``source`` reads like a top-level definition of ``name``: cheap, and errs to yes."""
    own = re.escape(name)
    pattern = rf"^(?=\S)(?:.*\b{own}\b.*[:=]|(?:async +)?(?:def|class) +{own}\b)"
    return re.search(pattern, source, re.MULTILINE) is not None


def _answers(node: ast.stmt) -> bool:
    """Whether a definition gives something back: a prompt whose body is missing is one that does not."""
    return any(isinstance(part, ast.Return | ast.Yield | ast.YieldFrom) for part in ast.walk(node))


def _missing(program: str, entry_point: str) -> set[str]:
    """The names that ``program`` uses and nothing in it binds, ``entry_point`` among what is used."""
    try:
        tree = ast.parse(program)
    except SyntaxError:
        return set()
    bound = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return ({entry_point} | set(_used(tree))) - bound


def _used(tree: ast.AST) -> list[str]:
    return [
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    ]


def _bodies(stretch: str) -> Iterator[str]:
    """Ways to read ``stretch`` as a body: as it stands, indented, or with its first line's indent lost."""
    body = stretch.strip("\n")
    if not body.strip():
        return
    if body[0] == " ":
        yield body
        yield textwrap.indent(textwrap.dedent(body), "    ")
    else:
        yield "    " + body
        yield textwrap.indent(body, "    ")


def _defines(program: str, entry_point: str) -> bool:
    """Whether ``program`` defines the function at top level with more in it than a docstring."""
    try:
        tree = ast.parse(program)
    except SyntaxError:
        return False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == entry_point:
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            return bool(body)
    return False


def with_context(program: str, prompt: str, entry_point: str) -> str:
    """``program`` preceded by the imports and helper definitions of ``prompt`` that it lacks."""
    try:
        own = ast.parse(program).body
    except SyntaxError:
        return program
    defined = {name for node in own for name in _names(node)}
    imports = {ast.unparse(node) for node in own if isinstance(node, ast.Import | ast.ImportFrom)}
    context = []
    for node in ast.parse(prompt).body:
        source = ast.get_source_segment(prompt, node)
        assert source is not None
        if isinstance(node, ast.Import | ast.ImportFrom):
            if ast.unparse(node) not in imports:
                context.append(source)
        elif entry_point not in _names(node) and not (_names(node) & defined):
            context.append(source)
    future = [line for line in program.split("\n") if line.startswith("from __future__ ")]
    rest = [line for line in program.split("\n") if not line.startswith("from __future__ ")]
    return "\n".join([*future, *context, *rest])


def _names(node: ast.stmt) -> set[str]:
    """Names that a top-level statement binds, imports aside."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [part for target in targets for part in ast.walk(target)]
        return {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return set()
